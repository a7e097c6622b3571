/* Which thread takes the replies of calls with completions, from the first call over a new link on: Link::start,
 * attach, RingCalls::send, OutgoingCalls::expect_reply and LazyCompletions in agent/; Call::State::on_done and escalate
 * in agent/call.cpp. reader.pml has the reading threads of a connection, slot.pml the owners of a slot, and park.pml the
 * sleep of pool threads.
 *
 * A handler makes a call with a completion, and blocks on an event of the program. The completion makes a second call,
 * whose completion sets the event. Each completion is lazy at first, and may be made prompt (then()). Meanwhile another
 * thread dials the link and offers the ring, so a request goes by the connection or by the ring. The callee replies
 * into the slot or by the connection, after any delay.
 * Checked: the handler returns, and the ring becomes ready. A process that waits for ever is an invalid end state.
 * The housekeeping tick does only one thing here: if the sentinel call is late, it makes lazy completions prompt. The
 * tick's check of every call, each 10 ms, is not in the model.
 *
 * The pool reads what comes by the connection, because no thread waits for a reply. Each mutant leaves one step out, and
 * must fail:
 *   NO_TICK     lazy calls depend on the sentinel call alone, which may have returned before they were noted
 *   NO_WATCH    a call in a slot, whose completion is prompt, is not marked for the callee
 *
 * holds:
 * fails: -DNO_TICK
 * fails: -DNO_WATCH
 */
#define CALLS 2
#define NO_CALL CALLS
#define ACCEPTED CALLS /* among replies: the callee has mapped the ring */
#define OFFER CALLS    /* among requests: the ring is offered */

mtype = { Unused, Pending, Watched, Full, By_socket, Taken };

/* between the processes */
chan requests = [3] of { byte, bool };  /* call, by ring */
byte socket[3], head, tail;             /* replies; the replies from tail to head are unread */
mtype slot[CALLS] = Unused;
bool listed[CALLS];                     /* the done list */

/* the link */
bool deferred[CALLS], outgoing, ring_ready;
bool in_ring[CALLS], open[CALLS], done[CALLS];
byte pending;
byte sentinel = NO_CALL;
bool lazy_ones;                         /* lazy_ */

/* the calls' completions */
bool has_completion[CALLS], lazy[CALLS];
bool jobs[CALLS];                       /* completions that the pool must run */
bool event;

/* OutgoingCalls::finish and Call::State::complete */
inline finish(call) {
  atomic {
    if
    :: open[call] ->
       open[call] = false;
       pending--;
       done[call] = true;
       jobs[call] = has_completion[call]
    :: else
    fi
  }
}

/* RingCalls::read */
inline take(call) {
  if
  :: atomic { (slot[call] == By_socket) -> slot[call] = Taken; in_ring[call] = false }
  :: atomic { (slot[call] == Full) -> slot[call] = Taken }; finish(call)
  :: (slot[call] != By_socket && slot[call] != Full)
  fi
}

inline expect_reply(call) {
  if
  :: !in_ring[call]
  :: in_ring[call] ->
     if
#ifdef NO_WATCH
     :: (slot[call] == Pending)
#else
     :: atomic { (slot[call] == Pending) -> slot[call] = Watched }
#endif
     :: (slot[call] != Pending) -> take(call)
     fi
  fi
}

inline hurry(call) {
  lazy[call] = false;
  expect_reply(call)
}

inline expect_lazy_ones() {
  if
  :: atomic { lazy_ones -> lazy_ones = false };
     if
     :: (open[0] && lazy[0]) -> hurry(0)
     :: !(open[0] && lazy[0])
     fi;
     if
     :: (open[1] && lazy[1]) -> hurry(1)
     :: !(open[1] && lazy[1])
     fi
  :: !lazy_ones
  fi
}

inline sentinel_returned(call) {
  if
  :: atomic { (sentinel == call) -> sentinel = NO_CALL }; expect_lazy_ones()
  :: (sentinel != call)
  fi
}

/* OutgoingCalls::send_now. Sends by the ring if the ring is ready. A call that waited for the link goes by the connection. */
inline send(call) {
  if
  :: ring_ready ->
     slot[call] = Pending;
     in_ring[call] = true;
     requests ! call, true
  :: !ring_ready -> requests ! call, false
  fi
}

/* Link::start, on_done(lazy), and perhaps then() */
inline make(call) {
  open[call] = true;
  pending++;
  if
  :: outgoing -> send(call)
  :: atomic { !outgoing -> deferred[call] = true }
  fi;
  if
  :: atomic { !done[call] -> has_completion[call] = true };
     lazy[call] = true;
     if
     :: atomic { (sentinel == NO_CALL) -> sentinel = call };
        hurry(call);
        if
        :: done[call] -> sentinel_returned(call)
        :: !done[call]
        fi
     :: (sentinel != NO_CALL) -> lazy_ones = true
     fi;
     if
     :: lazy[call] -> hurry(call)
     :: skip
     fi
  :: atomic { done[call] -> has_completion[call] = true; jobs[call] = true }  /* in the code it runs on this thread */
  fi
}

active proctype handler() {
  make(0);
  event
}

active proctype dialler() {
  do
  :: atomic { deferred[0] -> deferred[0] = false }; send(0)
  :: atomic { deferred[1] -> deferred[1] = false }; send(1)
  :: atomic { (!deferred[0] && !deferred[1] && (open[0] || done[0])) -> outgoing = true; break }
  od;
  requests ! OFFER, false;
  ring_ready
}

active proctype pool() {
  byte got;
end:
  do
  :: (head != tail) ->
     atomic { got = socket[tail]; tail++ };
     if
     :: (got == ACCEPTED) -> ring_ready = true
     :: (got != ACCEPTED) -> finish(got)
     fi;
     got = 0
  :: atomic { listed[0] -> listed[0] = false }; take(0)
  :: atomic { listed[1] -> listed[1] = false }; take(1)
  od
}

/* Another thread of the pool; runs the completions. */
active proctype completions() {
  atomic { jobs[0] -> jobs[0] = false };
  make(1);
  sentinel_returned(0);
  atomic { jobs[1] -> jobs[1] = false };
  event = true;
  sentinel_returned(1)
}

active proctype tick() {
end:
#ifndef NO_TICK
  do
  :: lazy_ones -> expect_lazy_ones()
  od
#else
  false
#endif
}

active proctype callee() {
  byte call;
  bool by_ring;
end:
  do
  :: requests ? call, by_ring ->
     if
     :: (call == OFFER) -> atomic { socket[head] = ACCEPTED; head++ }
     :: (call != OFFER && !by_ring) -> atomic { socket[head] = call; head++ }
     :: (call != OFFER && by_ring) ->
        if
        :: atomic { (slot[call] == Pending) -> slot[call] = Full }
        :: atomic { (slot[call] == Watched) -> slot[call] = Full; listed[call] = true }
        :: atomic { (slot[call] == Pending) -> slot[call] = By_socket };
           atomic { socket[head] = call; head++ }
        :: atomic { (slot[call] == Watched) -> slot[call] = By_socket; listed[call] = true };
           atomic { socket[head] = call; head++ }
        fi
     fi
  od
}
