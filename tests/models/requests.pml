/* Whether the pool watches a connection from which requests come: Link::on_requests, keep_held and arm_requests in
 * agent/link.cpp; hold_requests and resume_requests in agent/link_serving.cpp.
 *
 * Two threads of the pool may run on_requests at once, because the lead changes while one of them reads. A thread that
 * meets a reader lets the pool watch the connection no longer, and leaves it to the reader to change that. Meanwhile
 * other threads hold the peer's requests, which also ends the watching, and resume them.
 * Checked: each request is read in the end. A process that waits for ever is an invalid end state.
 *
 * The pool's epoll set reports the connection as long as it is watched and bytes wait. Steps under ring_mutex_ are one.
 * Each mutant changes the order of two steps or lets others come between them, and must fail:
 *   NOTED_FIRST     a thread that meets a reader notes that before it ends the watching: the reader may take the note,
 *                   and let the pool watch, before the watching ends
 *   HELD_UNLOCKED   a thread that finds the requests held ends the watching when they may have been resumed
 *   HOLD_UNLOCKED   a thread that holds the requests ends the watching when they may have been resumed
 *
 * holds:
 * fails: -DNOTED_FIRST
 * fails: -DHELD_UNLOCKED
 * fails: -DHOLD_UNLOCKED
 */
#define THREADS 2
#define REQUESTS 3
#define HOLDS 2

byte unread;          /* requests in the socket */
bool watched = true;  /* the pool is told of bytes */
bool reading;         /* FrameStream::begin_read */
bool missed;          /* requests_missed_ */
bool held;            /* requests_held_ */

active [THREADS] proctype pool() {
  bool note;
end:
  do
  :: (watched && unread > 0) ->  /* epoll_wait */
     if
     :: held ->
#ifdef HELD_UNLOCKED
        watched = false;
        goto end
#else
        atomic {
          if
          :: held -> watched = false; goto end
          :: !held
          fi
        }
#endif
     :: !held
     fi;
     if
     :: atomic { !reading -> reading = true }
     :: reading ->
#ifdef NOTED_FIRST
        missed = true;
        watched = false;
#else
        watched = false;
        missed = true;
#endif
        if
        :: atomic { !reading -> reading = true;
#ifdef NOTED_FIRST
             missed = true
#endif
           }
        :: reading -> goto end
        fi
     fi;
     if  /* read_some: one system call */
     :: atomic { (unread > 0) -> unread-- }
     :: (unread == 0)
     fi;
     reading = false;
     atomic { note = missed; missed = false };
     if
     :: note ->
        atomic {
          if
          :: !held -> watched = true
          :: held
          fi
        };
        note = false
     :: !note
     fi
  od
}

active proctype peer() {
  byte i;
  for (i : 1 .. REQUESTS) { unread++ };
  (unread == 0)
}

active proctype holder() {
  byte i;
  for (i : 1 .. HOLDS) {
#ifdef HOLD_UNLOCKED
    atomic { !held -> held = true };
    watched = false
#else
    atomic { !held -> held = true; watched = false }
#endif
  };
}

active proctype resumer() {
end:
  do
  :: atomic { held -> held = false; watched = true }
  od
}
