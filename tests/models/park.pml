/* The sleep and the wake-up of a pool's threads: agent/transport/doorbell.h; Pool::next, park, poll, push and wake_one
 * in agent/pool/pool.cpp.
 *
 * Callers in other processes put requests into a ring and ring the doorbell. Two threads serve the ring, in one of two
 * cases:
 *   WITH_HANDLER_THAT_BLOCKS   both sleep at the doorbell; the handler of request 0 may block until request 1 is served
 *   WITH_JOB                   one thread leads: it sleeps in epoll_wait, which does not report requests in the ring.
 *                              Another thread of this process submits a job
 * Checked: each request and the job are served in the end. A process that waits for ever is an invalid end state.
 * The model has no housekeeping tick. In the code the tick adds a thread if each thread leads or blocks.
 *
 * Memory is sequentially consistent, as the code's atomics are. State under the pool's mutex changes in one step.
 * Each mutant leaves one step out, and must fail:
 *   NO_SECOND_LOOK     a thread sleeps without polling the ring once more
 *   NO_HANDLER_LOOK    a thread runs a handler without polling the ring for further requests
 *   NO_LOOK_FOR_JOBS   a thread that has polled the ring sleeps without checking the jobs once more
 *
 * holds: -DWITH_HANDLER_THAT_BLOCKS
 * holds: -DWITH_JOB
 * fails: -DWITH_HANDLER_THAT_BLOCKS -DNO_SECOND_LOOK
 * fails: -DWITH_HANDLER_THAT_BLOCKS -DNO_HANDLER_LOOK
 * fails: -DWITH_JOB -DNO_SECOND_LOOK
 * fails: -DWITH_JOB -DNO_LOOK_FOR_JOBS
 */
#define THREADS 2
#define REQUESTS 2
#define NOBODY THREADS
#ifdef WITH_JOB
#define MAY_LEAD (leader == NOBODY || leader == _pid)
#else
#define MAY_LEAD false
#endif
#ifdef NO_LOOK_FOR_JOBS
#define SEES_JOBS false
#else
#define SEES_JOBS (jobs > 0)
#endif

/* shared with the callers' processes */
byte ring[REQUESTS], head, tail;
byte pollers, parked;  /* the doorbell's page, without its sequence number: */
bool rung[THREADS];    /* the number has changed since the thread took its ticket */
bool asleep[THREADS];  /* the kernel's queue of the futex */

/* the pool */
byte jobs, parked_threads, wakes;
byte leader = NOBODY;
bool leader_polls, wake_fd;

/* for the check */
bool served[REQUESTS], job_done;

inline wake() {
  d_step { rung[0] = true; rung[1] = true };
  if  /* FUTEX_WAKE, one */
  :: atomic { asleep[0] -> asleep[0] = false }
  :: atomic { asleep[1] -> asleep[1] = false }
  :: (!asleep[0] && !asleep[1])
  fi
}

inline ring_the_bell() {
  if
  :: (pollers == 0) ->
     if
     :: (parked > 0) -> wake()
     :: else
     fi
  :: else
  fi
}

inline end_polling() {
  if
  :: atomic { polling -> polling = false; pollers-- };
#ifndef NO_HANDLER_LOOK
     if
     :: (head != tail) -> ring_the_bell()
     :: else
     fi
#endif
  :: else
  fi
}

active [THREADS] proctype thread() {
  byte request;
  bool polling;

look:
  if
  :: atomic { (jobs > 0) -> jobs-- };
     end_polling();
     job_done = true;
     goto look
  :: (jobs == 0)
  fi;

  if  /* serve */
  :: atomic { (head != tail) -> request = ring[tail]; tail++ };
     end_polling();
#ifdef WITH_HANDLER_THAT_BLOCKS
     if
     :: skip
     :: (request == 0) -> served[1]
     fi;
#endif
     atomic { served[request] = true; request = 0; polling = true; pollers++ };
     goto look
  :: (head == tail)
  fi;

  if  /* with the mutex */
  :: SEES_JOBS -> goto look
  :: (!SEES_JOBS && MAY_LEAD && polling) -> end_polling(); goto look
  :: atomic { (!SEES_JOBS && MAY_LEAD && !polling) -> leader = _pid; leader_polls = true };
end_leading:
     atomic { wake_fd -> wake_fd = false; leader_polls = false };
     goto look
  :: atomic { (!SEES_JOBS && !MAY_LEAD) -> rung[_pid] = false; parked_threads++ }
  fi;

  if  /* park */
  :: atomic { !polling -> polling = true; pollers++ }
  :: polling
  fi;
  if
  :: (rung[_pid] || head != tail) -> goto woken
  :: skip  /* it has polled for long enough */
  fi;
  parked++;
  pollers--;
#ifndef NO_SECOND_LOOK
  if
  :: (head != tail) -> goto unpark
  :: (head == tail)
  fi;
#endif
  if  /* FUTEX_WAIT */
  :: atomic { !rung[_pid] -> asleep[_pid] = true };
end_asleep:
     !asleep[_pid]
  :: rung[_pid]
  fi;
unpark:
  pollers++;
  parked--;
woken:
  atomic {
    parked_threads--;
    if
    :: (wakes > 0) -> wakes--
    :: else
    fi;
    goto look
  }
}

proctype caller(byte request) {
  atomic { ring[head] = request; head++ };
  ring_the_bell();
  served[request]
}

proctype submitter() {
  if
  :: atomic { (parked_threads > wakes) -> jobs++; wakes++ }; wake()
  :: atomic { (parked_threads <= wakes) -> jobs++; wake_fd = wake_fd || leader_polls }
  fi;
  job_done
}

init {
  atomic {
    byte i;
    for (i : 0 .. REQUESTS - 1) { run caller(i) };
#ifdef WITH_JOB
    run submitter()
#endif
  }
}
