/* Which thread reads a link's connection for calls: StreamReader in agent/calls/stream_reader.cpp; Pool::arm and Pool::disarm.
 *
 * Replies and requests come by one connection. Two threads wait for a reply each, and either may give up at any moment
 * (a time-out of its wait, a signal). A third call has a completion, which the pool or a waiting thread runs. Another
 * thread may end a call (a deadline, cancel()), and the callee then need not reply to it. The peer sends its requests
 * and replies after any delay, and may close the connection after them. Two threads of the pool may find the connection
 * readable at once, because the lead changes while one of them reads.
 * Checked: every wait returns, the completion runs, every request is read, and this side notices a closed connection. A
 * process that waits for ever is an invalid end state.
 *
 * The pool's epoll set reports the connection as long as it is armed and bytes wait. State under mutex_ changes in one
 * step. Each mutant leaves one step out or divides it, and must fail:
 *   NO_HAND_OVER       a thread that leaves wait() does not check whether it was woken to read for the others
 *   NO_TICK            the tick does not arm the connection that a thread has left to it
 *   NO_NUDGE           the end of a call does not wake the call's thread out of poll()
 *   DISARMED_UNLOCKED  a thread of the pool that meets a reader disarms when the reader may have stopped
 *
 * holds:
 * fails: -DNO_HAND_OVER
 * fails: -DNO_TICK
 * fails: -DNO_NUDGE
 * fails: -DDISARMED_UNLOCKED
 */
#define WAITERS 2
#define CALLS 3 /* the last one has a completion */
#define REQUEST CALLS
#define FRAMES 4

mtype = { Idle, Sleeping, Woken };

byte socket[FRAMES], head, tail;    /* frames; those from tail to head are unread */
bool reading;                       /* FrameStream::begin_read */
bool waiting[WAITERS];              /* in sleepers_ */
mtype word[WAITERS] = Idle;         /* the word of the thread's call */
bool open[FRAMES] = true;           /* in the table of pending calls */
bool done[FRAMES];
bool armed = true, due;
bool nudged;                        /* the eventfd */
bool ended;                         /* the peer has closed its end */
bool closed;                        /* ... and this side has read that */

#define READABLE (head != tail || (ended && !closed))

inline complete(call) {
  if
  :: atomic {
       open[call] -> open[call] = false; done[call] = true;
#ifndef NO_NUDGE
       nudged = true
#endif
     }
  :: !open[call]
  fi
}

/* StreamReader::release */
inline release() {
  atomic {
    reading = false;
    if
    :: (waiting[0] && !done[0]) -> word[0] = Woken
    :: (!(waiting[0] && !done[0]) && waiting[1] && !done[1]) -> word[1] = Woken
    :: else ->
       if
       :: armed = true  /* the peer makes calls too */
#ifndef NO_TICK
       :: due = true    /* ... or only answers: the tick does it */
#else
       :: true
#endif
       fi
    fi
  }
}

/* FrameStream::read_some: takes one frame, or the end, which closes the link. Only the reading thread takes from the
 * socket. */
inline read_one() {
  if
  :: atomic { (head != tail) -> call = socket[tail]; tail++ };
     if
     :: (call < CALLS) -> complete(call)
     :: (call >= CALLS)  /* a request, for the pool */
     fi;
     call = 0
  :: atomic { (head == tail && ended) -> closed = true }; complete(0); complete(1); complete(2)
  :: atomic { (head == tail && !ended) }
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
  atomic {  /* take */
    if
    :: done[_pid] -> goto left
    :: (!done[_pid] && reading) -> waiting[_pid] = true; goto sleep
    :: (!done[_pid] && !reading) -> reading = true; armed = false
    fi
  };

  /* read_until_done */
  do
  :: done[_pid] -> release(); goto left
  :: !done[_pid] ->
     if  /* poll() */
     :: READABLE -> read_one()
     :: nudged -> nudged = false
     :: may_leave -> release(); goto left
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
  :: atomic { !reading -> reading = true }; release()
  :: reading
  fi;
#endif
  skip
}

/* Threads that lead, and run StreamReader::on_readable. */
active [2] proctype pool() {
  byte call;
end:
  do
  :: READABLE && (armed || ended) ->  /* epoll_wait */
     if
     :: atomic { !reading -> reading = true };
        read_one();
        release()
#ifdef DISARMED_UNLOCKED
     :: reading -> armed = false
#else
     :: atomic { reading -> armed = false }
#endif
     fi
  od
}

active proctype tick() {
end:
  do
  :: atomic { due -> due = false;
       if
       :: reading
       :: !reading -> armed = true
       fi
     }
  od
}

active proctype peer() {
  byte call = FRAMES;
  do
  :: (call == 0) -> break
  :: (call > 0) ->
    call--;
    if
    :: atomic { true -> socket[head] = call; head++ }
    :: (call < CALLS && done[call])
    fi
  od;
  if
  :: true -> (head == tail)
  :: true -> ended = true;
     closed
  fi;
  done[CALLS - 1]
}

/* Ends at most one of the calls. */
active proctype ender() {
  if
  :: complete(0)
  :: complete(1)
  :: skip
  fi
}
