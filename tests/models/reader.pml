/* Which thread reads the replies that come by a connection: ReplyReader::wait, read_until_done, stop_reading,
 * on_readable and expect_frames in agent/reply_reader.cpp; Pool::arm and Pool::disarm.
 *
 * Two threads wait for a call each, and either may give up at any moment (a time-out of its wait, a signal). A third
 * call has a completion: expect_frames arms the connection, so that the pool reads its reply. Another thread may end a
 * call (a deadline, cancel()), and the callee then need not reply to it. The callee replies after any delay, and may
 * close the connection after its replies.
 * Checked: every wait returns, the completion runs, and this side notices a closed connection. A process that waits for
 * ever is an invalid end state. The model has no housekeeping tick: a call without a deadline does not start it.
 *
 * State under wait_mutex_ changes in one step. Each mutant leaves one step out, and must fail:
 *   NO_HAND_OVER     a thread that leaves wait() does not check whether it was woken to read for the others
 *   NO_MISSED        the pool does not note an edge that it meets while another thread reads
 *   NO_NUDGE         the end of a call does not wake the call's thread out of poll()
 *
 * holds:
 * fails: -DNO_HAND_OVER
 * fails: -DNO_MISSED
 * fails: -DNO_NUDGE
 */
#define WAITERS 2
#define CALLS 3 /* the last one has a completion */

mtype = { Idle, Sleeping, Woken };

byte socket[CALLS], head, tail;     /* replies; the replies from tail to head are unread */
bool reading;                       /* FrameStream::begin_read */
bool waiting[WAITERS];              /* in waiters_ */
mtype word[WAITERS] = Idle;         /* the word of the thread's call */
bool open[CALLS] = true;            /* in the table of pending calls */
bool done[CALLS];
byte pending = CALLS;
bool armed, missed;
bool interest;                      /* the kernel reports bytes that arrive */
bool edge;                          /* an event for the pool's leader */
bool nudged;                        /* the eventfd */
bool ended;                         /* the callee has closed its end */
bool closed;                        /* ... and this side has read that */

#define READABLE (head != tail || (ended && !closed))

inline complete(call) {
  if
  :: atomic {
       open[call] -> open[call] = false; pending--; done[call] = true;
#ifndef NO_NUDGE
       nudged = true
#endif
     }
  :: !open[call]
  fi
}

/* Pool::arm and disarm. EPOLL_CTL_MOD reports bytes that are already there, and always reports the end. */
inline set_interest(wanted) {
  interest = wanted;
  if
  :: ((interest && head != tail) || (ended && !closed)) -> edge = true
  :: else
  fi
}

inline stop_reading() {
  reading = false;
  atomic {
    if
    :: (waiting[0] && !done[0]) -> word[0] = Woken
    :: (!(waiting[0] && !done[0]) && waiting[1] && !done[1]) -> word[1] = Woken
    :: else ->
       if
#ifdef NO_MISSED
       :: ((pending != 0) == armed)
#else
       :: ((pending != 0) == armed && !missed)
#endif
       :: else ->
          missed = false;
          armed = (pending != 0);
          set_interest(armed)
       fi
    fi
  }
}

/* FrameStream::read_some: takes one reply, or the end, which closes the link. Only the reading thread takes from the
 * socket. */
inline read_one() {
  if
  :: atomic { (head != tail) -> call = socket[tail]; tail++ }; complete(call); call = 0
  :: atomic { (head == tail) -> closed = true }; complete(0); complete(1); complete(2)
  fi
}

active [WAITERS] proctype waiter() {
  byte call;
  bool may_leave;
  if
  :: may_leave = true
  :: skip
  fi;

again:
  if
  :: done[_pid] -> goto left
  :: !done[_pid]
  fi;
  atomic {  /* prepare_to_sleep */
    if
    :: (word[_pid] == Woken) -> word[_pid] = Idle
    :: else
    fi
  };
  atomic {  /* with wait_mutex_ */
    if
    :: done[_pid] -> goto left
    :: (!done[_pid] && reading) -> waiting[_pid] = true; goto sleep
    :: (!done[_pid] && !reading) -> reading = true
    fi
  };

  /* read_until_done */
  do
  :: done[_pid] -> stop_reading(); goto left
  :: !done[_pid] ->
     if  /* poll() */
     :: READABLE -> read_one()
     :: nudged -> nudged = false
     :: may_leave -> stop_reading(); goto left
     fi
  od;

sleep:
  atomic {
    if
    :: (word[_pid] == Idle && !done[_pid]) -> word[_pid] = Sleeping
    :: else
    fi
  };
  if
  :: (word[_pid] == Woken || done[_pid]) -> waiting[_pid] = false;
     if
     :: goto again
     :: may_leave -> goto left  /* its wait timed out at the same moment */
     fi
  :: may_leave ->
     atomic {
       if
       :: (word[_pid] == Sleeping) -> word[_pid] = Idle
       :: else
       fi
     };
     waiting[_pid] = false;
     goto left
  fi;

left:
#ifndef NO_HAND_OVER
  if
  :: atomic { !reading -> reading = true }; stop_reading()
  :: reading
  fi;
#endif
  skip
}

/* Call::on_done, then expect_frames. */
active proctype completion() {
  atomic {
    if
    :: !armed -> armed = true; set_interest(true)
    :: armed
    fi
  };
  done[CALLS - 1]
}

/* The leader, which runs ReplyReader::on_readable at each edge. */
active proctype pool() {
  byte call;
end:
  do
  :: edge -> edge = false;
     if
     :: atomic { !reading -> reading = true };
        do
        :: READABLE -> read_one()
        :: !READABLE -> break
        od;
        stop_reading()
     :: atomic {  /* with wait_mutex_ */
          reading ->
          if
          :: armed -> armed = false; set_interest(false); edge = false  /* this edge is being handled */
          :: !armed
          fi;
          missed = true
        }
     fi
  od
}

active proctype callee() {
  byte call = CALLS;
  do
  :: (call == 0) -> break
  :: (call > 0) ->
    call--;
    atomic {
      if
      :: true -> socket[head] = call; head++;
         if
         :: interest -> edge = true
         :: !interest
         fi
      :: done[call]
      fi
    }
  od;
  if
  :: skip
  :: atomic { ended = true; edge = true };
     closed
  fi
}

/* Ends at most one of the calls. */
active proctype ender() {
  if
  :: complete(0)
  :: complete(1)
  :: skip
  fi
}
