/* One slot for replies, and the calls that use it one after another: agent/transport/call_ring.h, and its users in
 * agent/calls/ring_calls.cpp and agent/calls/outgoing_calls.cpp.
 *
 * The caller's thread waits for its call or asks for a completion. With WITH_WAITS_THAT_END, it may also wait for a time
 * and then ask for a completion. Another thread may cancel the call (a time-out does the same). The pool takes replies of calls without a waiting thread, and the tick frees abandoned slots. The callee
 * replies by the slot or by socket, after any delay, and may die at any step.
 * Checked:
 *   - every call ends (a caller that waits for ever is an invalid end state);
 *   - a reply reaches only its own call (assert in take_reply);
 *   - the callee never writes into a slot that already has another call (assert in the callee);
 *   - a slot is given back once, and no reply in it stays unread (asserts in release): the callee holds its buffers.
 * Memory is sequentially consistent, as the code's compare-and-swaps are. The tick's check of every call in flight,
 * each 10 ms, is not in the model. Each mutant leaves one step out, and must fail:
 *   NO_GENERATION         an abandoned slot is used again at once, and the callee does not compare generations
 *   NO_OWN_GENERATION     the slot's word alone decides which thread takes a reply
 *   NO_WAKE_ON_ABANDON    abandoning the slot does not wake the thread that sleeps on it
 *   NO_WAKE_AT_THE_END    the end of a link wakes no thread: the callee may die between its reply and its wake-up
 *   NO_DONE_LIST          the callee does not list its replies to calls without a waiting thread
 *   NO_LOOK_AFTER_PUSH    the sending thread does not check whether the call has ended meanwhile: its slot stays taken
 *   NO_STOP_SLEEPING      a thread that ends its wait without the reply leaves the slot marked as slept on
 *   NO_LOOK_AFTER_WAIT    the waiting thread does not abandon the slot if the reply came by socket first
 *   NO_READ_ON_ABANDON    a call that has ended gives up its slot without the reply that came at that moment
 *
 * holds:
 * holds: -DWITH_WAITS_THAT_END
 * fails: -DNO_GENERATION
 * fails: -DNO_OWN_GENERATION
 * fails: -DNO_WAKE_ON_ABANDON
 * fails: -DNO_WAKE_AT_THE_END
 * fails: -DNO_DONE_LIST
 * fails: -DNO_LOOK_AFTER_PUSH
 * fails: -DWITH_WAITS_THAT_END -DNO_STOP_SLEEPING
 * fails: -DNO_LOOK_AFTER_WAIT
 * fails: -DNO_READ_ON_ABANDON
 */
#define CALLS 2

mtype = { Unused, Pending, Sleeping, Watched, Full, By_socket, Abandoned, Late };

/* the slot, in shared memory; its word is generation and state, changed together */
byte generation;
mtype state = Unused;
byte bytes;                                /* the reply: the generation of its request */
bool unread;                               /* a reply is in the slot; not in memory: for the check alone */
bool waits_in_kernel;                      /* the caller's thread sleeps on the word */
chan ring = [CALLS] of { byte, byte };     /* requests: call, generation */
chan done_list = [CALLS] of { byte };      /* generations */
chan socket = [CALLS] of { byte };         /* replies: call */

/* the caller's memory */
byte own_generation;
bool taken;                                /* not in the list of free slots */
byte slot_of[CALLS];                       /* generation */
bool open[CALLS], in_ring[CALLS], done[CALLS];
byte current = CALLS;                      /* the call that ring_calls_ has for the slot */
bool closed;

bool dead;                                 /* the callee's process */

#define OPEN_STATE (state == Pending || state == Sleeping || state == Watched)

#ifdef NO_GENERATION
#define IS_OF(mine) true
#define ABANDONED(mine) give_back(mine)
#else
#define IS_OF(mine) (generation == mine)
#define ABANDONED(mine) skip
#endif

inline release() { d_step { assert(taken && !unread); taken = false } }

/* CallRing::take_by_socket */
inline give_back(mine) {
  if
  :: atomic { (own_generation == mine) -> own_generation++ }; release()
  :: else
  fi
}

inline abandon(mine) {
  if
  :: atomic { (generation == mine && state == Sleeping) -> state = Abandoned };
#ifndef NO_WAKE_ON_ABANDON
     waits_in_kernel = false;
#endif
     ABANDONED(mine)
  :: atomic { (generation == mine && (state == Pending || state == Watched)) -> state = Abandoned };
     ABANDONED(mine)
  :: (generation == mine && state == By_socket) -> give_back(mine)
  :: atomic { (generation == mine && state == Full && own_generation == mine) -> own_generation++;
#ifndef NO_READ_ON_ABANDON
              unread = false
#endif
     }; release()
  :: else
  fi
}

/* OutgoingCalls::finish; runs on the thread that has removed the call from the table of pending calls */
inline finish(call) {
  done[call] = true;
  if
  :: in_ring[call] -> abandon(slot_of[call])
  :: else
  fi
}

/* RingCalls::take and OutgoingCalls::on_reply */
inline take_reply(call) {
  if
  :: (generation == slot_of[call] && state == By_socket) ->
     give_back(slot_of[call]);
     in_ring[call] = false
  :: atomic { (generation == slot_of[call] && state == Full
#ifndef NO_OWN_GENERATION
               && own_generation == slot_of[call]
#endif
              ) -> own_generation++; unread = false };
     assert(bytes == slot_of[call]);
     release();
     if
     :: atomic { open[call] -> open[call] = false }; finish(call)
     :: else
     fi
  :: else
  fi
}

/* Link::start, RingCalls::send, then wait or Call::on_done. There is no other slot, and a request cannot go by socket. */
active proctype caller() {
  byte call, mine;
  do
  :: (call == CALLS) -> break
  :: (call < CALLS) ->
     open[call] = true;
     if
     :: closed ->
        if
        :: atomic { open[call] -> open[call] = false }; done[call] = true
        :: !open[call]
        fi;
        goto next
     :: !closed
     fi;
     if  /* reserve */
     :: atomic { !taken -> taken = true; own_generation++; mine = own_generation }
     :: closed -> goto result
     fi;
     atomic { generation = mine; state = Pending; slot_of[call] = mine; current = call };
     in_ring[call] = true;
     ring ! call, mine;
#ifndef NO_LOOK_AFTER_PUSH
     if
     :: done[call] -> abandon(mine)
     :: !done[call]
     fi;
#endif
     if
     :: done[call]
     :: !done[call] ->  /* wait_in_ring */
        do
        :: (done[call] || generation != mine || !OPEN_STATE) -> break
        :: atomic { (generation == mine && (state == Pending || state == Watched)) -> state = Sleeping };
           if  /* FUTEX_WAIT */
           :: atomic { (generation == mine && state == Sleeping) -> waits_in_kernel = true };
              if
              :: !waits_in_kernel
#ifdef WITH_WAITS_THAT_END
              :: waits_in_kernel = false; goto late  /* the time has passed */
#endif
              fi
           :: else
           fi
        od;
        if
        :: !done[call] -> take_reply(call)
#ifndef NO_LOOK_AFTER_WAIT
        :: done[call] -> abandon(mine)
#else
        :: done[call]
#endif
        fi;
        in_ring[call] = false
     :: !done[call] ->  /* expect_reply */
expect: if
        :: !in_ring[call]
        :: atomic { (in_ring[call] && generation == mine && state == Pending) -> state = Watched }
        :: (in_ring[call] && !(generation == mine && state == Pending)) -> take_reply(call)
        fi
     fi;
     goto result;
#ifdef WITH_WAITS_THAT_END
late:  /* CallRing::stop_sleeping, then Call::on_done */
#ifndef NO_STOP_SLEEPING
     if
     :: atomic { (generation == mine && state == Sleeping) -> state = Pending }
     :: else
     fi;
#endif
     goto expect;
#endif
result:
     done[call];
next:
     call++
  od
}

/* Cancels some of the calls, as cancel() or an expired deadline does. Then the callee may die; Link::close follows. */
active proctype ender() {
  byte call;
  do
  :: break
  :: (call == CALLS) -> break
  :: atomic { (call < CALLS && open[call]) -> open[call] = false }; finish(call); call++
  :: (call < CALLS && done[call]) -> call++
  od;
  if
  :: skip
  :: dead = true;
     closed = true;
     call = 0;
     do
     :: (call == CALLS) -> break
     :: atomic { (call < CALLS && open[call]) -> open[call] = false }; finish(call); call++
     :: (call < CALLS && !open[call]) -> call++
     od;
#ifndef NO_WAKE_AT_THE_END
     waits_in_kernel = false  /* CallRing::wake_all */
#endif
  fi
}

/* The caller's pool: takes replies of calls without a waiting thread, and replies that come by socket. */
active proctype pool() {
  byte call, mine;
end:
  do
  :: done_list ? mine ->
     atomic { call = current; if :: slot_of[call] == mine -> skip :: else -> goto end fi };
     take_reply(call)
  :: socket ? call ->
     if
     :: atomic { open[call] -> open[call] = false }; finish(call)
     :: !open[call]
     fi
  od
}

/* CallRing::reclaim */
active proctype tick() {
  byte mine;
end:
  do
  :: atomic { (state == Late) -> mine = generation; generation = 0; state = Unused }; give_back(mine)
  od
}

active proctype callee() {
  byte call, mine;
  mtype answer;
  {
end:
  do
  :: ring ? call, mine ->
     if
     :: answer = Full;
        if
        :: (!IS_OF(mine) || state == Abandoned)
        :: (IS_OF(mine) && state != Abandoned) -> assert(own_generation == mine); bytes = mine
        fi
     :: answer = By_socket
     fi;
     if  /* CallRing::change */
     :: atomic { (IS_OF(mine) && state == Sleeping) -> state = answer; unread = answer == Full }; waits_in_kernel = false
     :: atomic { (IS_OF(mine) && state == Pending) -> state = answer; unread = answer == Full }
     :: atomic { (IS_OF(mine) && state == Watched) -> state = answer; unread = answer == Full };
#ifndef NO_DONE_LIST
        done_list ! mine
#endif
     :: atomic { (IS_OF(mine) && state == Abandoned) -> state = Late }
     :: else
     fi;
     if
     :: (answer == By_socket) -> socket ! call
     :: else
     fi
  od
  } unless { dead }
}
