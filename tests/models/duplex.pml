/* Which connection carries the calls of a link: Peers::admit in agent/link/peers.cpp, Connections::attach in
 * agent/connections/connections.cpp, and the dial in agent/dial/dial.cpp.
 *
 * Two agents, either of which may dial the other at any moment, also both at once. The agent with the lower incarnation
 * decides: it takes a connection when its handshake has ended, and says so by a `go` frame, which carries the number of
 * the connection. The other agent uses a connection only after it has read `go`. In its hello it says the number of the
 * last connection that it has used, so that the deciding agent can tell a dial that crossed its own choice (a lower
 * number) from one that is made because the last connection was lost. A connection may be cut at any moment; each end
 * then notices that at some time, or not before it has been replaced. A dial may be given up at any moment.
 * Checked: when nothing happens any more, both agents use the same connection, or neither can dial; no agent ends a
 * connection that works and that both use; the other agent never goes back to an earlier connection.
 *
 * Each mutant changes one rule, and must fail:
 *   TAKES_NEWEST  the deciding agent gives its connection up for each new one that the other agent has dialled
 *   TAKES_STALE   the other agent follows each `go`, whatever its number
 *   BOTH_DECIDE   the other agent takes the connection that it has dialled without `go`
 *   ONE_DIALS     the deciding agent, which alone can dial, dials once
 *
 * holds:
 * holds: -DDECIDER_CANNOT_DIAL
 * holds: -DOTHER_CANNOT_DIAL
 * fails: -DTAKES_NEWEST
 * fails: -DTAKES_STALE
 * fails: -DBOTH_DECIDE
 * fails: -DONE_DIALS -DOTHER_CANNOT_DIAL
 */
#define PLACES 3 /* connections at a time */
#define CUTS 2
#define NONE 9
#define HIGHEST 4 /* bounds the search: connections that are taken in all */

typedef Connection {
  bool open;           /* its handshake has ended, and one end at least has not closed it */
  bool by_decider;     /* who has dialled it */
  byte taken;          /* from the other agent's hello: the number of its last connection */
  bool judged;         /* by the deciding agent */
  byte go;             /* the number in the `go` frame; 0: not sent */
  bool followed;       /* the other agent has read it */
  bool cut;
  bool closed_here, closed_there;  /* by the deciding agent, by the other one */
};
Connection connections[PLACES];

byte mine = NONE, theirs = NONE;  /* the connections in use at the deciding agent, and at the other one */
byte number, used;                /* of the last connection taken, and of the last one used by the other agent */
byte cuts;

inline forget(c) {
  if
  :: connections[c].closed_here && connections[c].closed_there ->
     connections[c].open = false; connections[c].judged = false; connections[c].go = 0; connections[c].followed = false;
     connections[c].cut = false; connections[c].closed_here = false; connections[c].closed_there = false;
     connections[c].taken = 0; connections[c].by_decider = false
  :: else
  fi
}

inline take(c) {
  number++;
  connections[c].go = number;
  mine = c
}

inline close_mine() {
  connections[mine].closed_here = true;
  forget(mine);
  mine = NONE
}

inline close_theirs() {
  connections[theirs].closed_there = true;
  forget(theirs);
  theirs = NONE
}

#define LEFT (number < HIGHEST)
#define GONE(c) (connections[c].cut || connections[c].closed_there)

/* The steps of both agents on one connection, and what happens to it. */
proctype steps(byte c) {
  bool dialled;
end:
  do
#ifndef DECIDER_CANNOT_DIAL
#ifdef ONE_DIALS
  :: atomic { !dialled && c == 0 && mine == NONE && LEFT && !connections[c].open -> dialled = true;
#else
  :: atomic { mine == NONE && LEFT && !connections[c].open ->
#endif
       connections[c].open = true; connections[c].by_decider = true; connections[c].taken = used
     }
#endif
#ifndef OTHER_CANNOT_DIAL
  :: atomic { theirs == NONE && LEFT && !connections[c].open ->
       connections[c].open = true; connections[c].taken = used;
#ifdef BOTH_DECIDE
       theirs = c; connections[c].followed = true
#endif
     }
#endif
  /* The deciding agent: the handshake has ended. */
  :: atomic { LEFT && connections[c].open && !connections[c].judged && !connections[c].closed_here ->
       connections[c].judged = true;
       if
       :: GONE(c) -> connections[c].closed_here = true; forget(c)
       :: !GONE(c) && mine == NONE -> take(c)
       :: !GONE(c) && mine != NONE ->
          if
#ifdef TAKES_NEWEST
          :: !connections[c].by_decider ->
#else
          :: !connections[c].by_decider && connections[c].taken >= number ->
#endif
             assert(!(theirs == mine && !connections[mine].cut)); /* the other agent has lost it */
             close_mine();
             take(c)
          :: else ->
             assert(theirs != c || connections[c].cut);
             connections[c].closed_here = true;
             forget(c)
          fi
       fi
     }
  :: atomic { mine == c && GONE(c) -> close_mine() }  /* it notices the end */

  /* The other agent: `go` has come, perhaps before a cut. */
  :: atomic { connections[c].go != 0 && !connections[c].followed && !connections[c].closed_there ->
       connections[c].followed = true;
       if
#ifdef TAKES_STALE
       :: true ->
#else
       :: connections[c].go <= used -> connections[c].closed_there = true; forget(c)
       :: connections[c].go > used ->
#endif
          if
          :: theirs != NONE && theirs != c -> close_theirs()
          :: else
          fi;
          assert(connections[c].go > used);
          used = connections[c].go;
          theirs = c
       fi
     }
  /* ... the deciding agent has dropped it, or it was cut */
  :: atomic { connections[c].open && theirs != c && !connections[c].closed_there &&
              (connections[c].cut || connections[c].closed_here) -> connections[c].closed_there = true; forget(c) }
  :: atomic { theirs == c && (connections[c].cut || connections[c].closed_here) -> close_theirs() }

  /* It is cut, or an attempt of the other agent takes too long. */
  :: atomic { cuts < CUTS && connections[c].open && !connections[c].cut -> cuts++; connections[c].cut = true }
  :: atomic { cuts < CUTS && connections[c].open && !connections[c].by_decider && !connections[c].followed &&
              !connections[c].closed_there -> cuts++; connections[c].closed_there = true; forget(c) }
  od
}

init {
  atomic { run steps(0); run steps(1); run steps(2) };
  timeout; /* nothing happens any more */
  assert(number == HIGHEST || (mine != NONE && mine == theirs && !connections[mine].cut))
}
