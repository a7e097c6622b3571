/* How the reference tables of three agents agree while connections are lost: References in rpc/core/references.h, its
 * batches in reference_peers.cpp, holds in reference_holds.cpp and objects in reference_objects.cpp. docs/codec.md ("The
 * reference protocol") has the rules.
 *
 * A parent P holds an object of an owner O, and passes it on to a receiver R. Then P and R let go of it, each at any
 * moment. The tables talk in batches of one operation. A session outlives its connections, so an attempt to send a
 * batch may be lost before it arrives, its answer may be lost, and an attempt that failed may still arrive, after the
 * next attempt and after later batches. The message that carries the reference may be lost or late too.
 * Cases:
 *   (none)     P holds the object, and a request carries the reference; the call may fail at P at any moment
 *   CREATING   P creates the object by a call that may fail, and passes the reference on meanwhile
 *   BY_REPLY   a reply to a call of R carries the reference
 *   OTHERS     R also has an operation for another object at O, at any moment
 *   DEATHS     P or R may die at any step; the others learn of it at any moment, also if it lives (peer_timeout)
 * Checked:
 *   - the object is not freed while P or R has a handle, unless O has taken that agent, or P, for dead;
 *   - a receiver never refuses a reference in a reply that its program reads;
 *   - in the end the object is freed, and no table holds anything for it. A process that waits for ever is an invalid
 *     end state.
 * FAULTS bounds how many attempts and answers are lost or repeated.
 *
 * Each mutant leaves one step out, and must fail:
 *   NO_NUMBERS       the receiver of a batch does not compare its number with that of the last one
 *   NO_ANSWER        the receiver refuses a repeat instead of giving the first answer again
 *   NO_RESEND        the sender does not send a lost batch again
 *   NO_TURN          the sender sends the next batch although the last one has not been answered
 *   NO_KEEPING       P lets go of its hold although R's fork is not accepted yet
 *   NO_WITHDRAW      P does not ask R about a fork whose message has failed
 *   NO_REFUSAL       R takes a record although it has told P that it will not
 *   NO_MAYBE         R refuses a fork although its program may still read the reply that carries it
 *   NO_ABANDON       P does not tell O that it gave the creation up
 *   NO_AWAIT         O tells R that an object is gone although its creation may still come
 *   NO_FREEING       O keeps the forks of a dead agent
 *   NO_DEAD          O registers forks for an agent that it takes for dead
 *
 * holds: -DFAULTS=3
 * holds: -DFAULTS=2 -DCREATING
 * holds: -DFAULTS=2 -DBY_REPLY
 * holds: -DFAULTS=2 -DOTHERS
 * holds: -DFAULTS=1 -DDEATHS
 * holds: -DFAULTS=0 -DDEATHS -DCREATING
 * fails: -DFAULTS=2 -DNO_NUMBERS
 * fails: -DFAULTS=2 -DNO_ANSWER
 * fails: -DFAULTS=2 -DNO_RESEND
 * fails: -DFAULTS=1 -DOTHERS -DNO_TURN
 * fails: -DFAULTS=2 -DNO_KEEPING
 * fails: -DFAULTS=2 -DNO_WITHDRAW
 * fails: -DFAULTS=2 -DNO_REFUSAL
 * fails: -DFAULTS=2 -DBY_REPLY -DNO_MAYBE
 * fails: -DFAULTS=0 -DCREATING -DNO_ABANDON
 * fails: -DFAULTS=0 -DCREATING -DNO_AWAIT
 * fails: -DFAULTS=0 -DDEATHS -DNO_FREEING
 * fails: -DFAULTS=0 -DDEATHS -DNO_DEAD
 */
#define O 0
#define P 1
#define R 2

/* The directions in which batches go. */
#define P_TO_O 0
#define R_TO_O 1
#define R_TO_P 2
#define P_TO_R 3
#define MAILS 4
#define FROM(mail) (mail == P_TO_O || mail == P_TO_R -> P : R)
#define NEXT(number) ((number + 1) % 8) /* the model's numbers wrap; the copies in the network are never so old */
#define TO(mail) (mail == P_TO_O || mail == R_TO_O -> O : (mail == R_TO_P -> P : R))

mtype = { None,
          Fork, Accept, Remove, Abandon, Withdraw, Other,  /* operations */
          Done, Object_gone, Held, Maybe, Refused, Failed, /* results; Failed: the answer was stale or dead */
          Absent, Awaited, Ready, Gone,                    /* the object; Absent: not heard of; Gone: it will not come */
          Creating, Unconfirmed, Confirmed, Lost };        /* holds */

/* the network */
chan attempts[MAILS] = [2] of { byte, mtype };
chan answers[MAILS] = [2] of { byte, mtype };
bool lost[MAILS];   /* an attempt or its answer was lost, and the sender sees its call fail */
bool carrier;       /* the message that carries the reference from P to R is under way */
bool creation;      /* P's request that creates the object is under way */
byte faults = FAULTS;

/* the senders of batches: Peer::queue, batch and batch_number */
chan queue[MAILS] = [3] of { mtype };
mtype batch[MAILS] = None;
byte number[MAILS];

/* the receivers of batches: Peer::done and answer */
byte executed[MAILS];
mtype answer[MAILS] = None;

/* O */
mtype object = Absent;
bool fork_of_p, fork_of_r;
bool came;       /* Peer::created: the creation came, or P has abandoned it */
bool abandoned;

/* P and R */
mtype hold_p = None, hold_r = None;
bool handle_p, handle_r;         /* of the program */
bool dropped_p, dropped_r;       /* Hold::dropped */
bool abandoning;                 /* P: Hold::abandon */
bool passing;                    /* P: Hold::passing, and the fork's entry in children_ */
bool askable, asked, told_held;  /* P: the same fields of Child */
bool refused;                    /* R: Peer::refused */
bool call_open;                  /* R: the call whose reply carries the reference is not over */

bool died[3];
bool taken_for_dead[9];
#define DEAD(agent, peer) taken_for_dead[3 * (agent) + (peer)]

/* ---- O: free_if_unused; and the operations of batches at every agent: apply */

inline free_if_unused() {
  if
  :: (object == Awaited && !fork_of_r) -> object = Absent
  :: (object == Ready && !fork_of_p && !fork_of_r) ->
     assert(!handle_p || hold_p == Lost || DEAD(O, P));
     assert(!handle_r || hold_r == Lost || DEAD(O, R) || DEAD(O, P));
     object = Gone
  :: else
  fi
}

/* The awaited object will not be made. In the code its forks stay, so that their holders learn why. */
inline fail_awaited() {
  object = Gone;
  fork_of_r = false
}

inline apply(mail, operation, result) {
  result = Done;
  if
  :: (operation == Fork) ->
     if
#ifdef NO_AWAIT
     :: (object == Absent) -> result = Object_gone
#else
     :: (object == Absent && (came || DEAD(O, P))) -> result = Object_gone
     :: (object == Absent && !(came || DEAD(O, P))) -> object = Awaited; fork_of_r = true
#endif
     :: (object == Gone) -> result = Object_gone
     :: (object == Ready || object == Awaited) -> fork_of_r = true
     fi
  :: (operation == Remove && mail == P_TO_O) -> fork_of_p = false; free_if_unused()
  :: (operation == Remove && mail == R_TO_O) -> fork_of_r = false; free_if_unused()
  :: (operation == Abandon) ->
     came = true;
     abandoned = true;
     fork_of_p = false;
     if
     :: (object == Absent) -> object = Gone
     :: (object == Awaited) -> fail_awaited()
     :: (object == Ready || object == Gone) -> free_if_unused()
     fi
  :: (operation == Other)
  :: (operation == Accept) -> drop_child()
  :: (operation == Withdraw) ->
     if
     :: (hold_r != None) -> result = Held
#ifdef NO_MAYBE
     :: (hold_r == None) -> refused = true; result = Refused
#else
     :: (hold_r == None && call_open) -> result = Maybe
     :: (hold_r == None && !call_open) -> refused = true; result = Refused
#endif
     fi
  fi
}

/* ---- P and R: release_if_done, drop_child, receive */

inline release_p() {
  if
#ifdef NO_KEEPING
  :: false
#else
  :: passing
#endif
  :: else ->
     if
     :: abandoning ->
        abandoning = false;
#ifndef NO_ABANDON
        post(P_TO_O, Abandon)
#endif
     :: else
     fi;
     if
     :: (dropped_p && hold_p == Confirmed) -> hold_p = None; post(P_TO_O, Remove)
     :: (dropped_p && hold_p == Lost) -> hold_p = None
     :: else
     fi
  fi
}

inline drop_child() {
  if
  :: passing -> passing = false; release_p()
  :: else
  fi
}

inline release_r() {
  if
  :: (dropped_r && hold_r == Confirmed) -> hold_r = None; post(R_TO_O, Remove)
  :: (dropped_r && hold_r == Lost) -> hold_r = None
  :: else
  fi
}

inline receive() {
  if
#ifdef NO_REFUSAL
  :: false
#else
  :: refused -> assert(!call_open)
#endif
  :: else ->
     handle_r = true;
     if
     :: DEAD(R, O) -> hold_r = Lost; post(R_TO_P, Accept)
     :: else -> hold_r = Unconfirmed; post(R_TO_O, Fork)
     fi
  fi
}

/* ---- batches: post, answered, lose_peer */

inline post(mail, operation) {
  if
  :: DEAD(FROM(mail), TO(mail))
  :: else -> queue[mail] ! operation
  fi
}

inline forget_mail(mail) {
  batch[mail] = None;
  do
  :: nempty(queue[mail]) -> queue[mail] ? _
  :: empty(queue[mail]) -> break
  od
}

inline lose_peer(agent, peer) {
  if
  :: DEAD(agent, peer)
  :: else ->
     DEAD(agent, peer) = true;
     if
     :: (agent == O && peer == P) ->
#ifndef NO_FREEING
        fork_of_p = false;
#endif
        if
        :: (object == Awaited) -> fail_awaited()
        :: else -> free_if_unused()
        fi
     :: (agent == O && peer == R) ->
#ifndef NO_FREEING
        fork_of_r = false;
#endif
        free_if_unused()
     :: (agent == P && peer == O) ->
        forget_mail(P_TO_O);
        if
        :: (hold_p != None) -> hold_p = Lost; abandoning = false; release_p()
        :: else
        fi
     :: (agent == P && peer == R) -> forget_mail(P_TO_R); drop_child()
     :: (agent == R && peer == O) ->
        forget_mail(R_TO_O);
        if
        :: (hold_r == Unconfirmed) -> hold_r = Lost; post(R_TO_P, Accept); release_r()
        :: (hold_r == Confirmed || hold_r == Lost) -> hold_r = Lost; release_r()
        :: else
        fi
     :: (agent == R && peer == P) -> forget_mail(R_TO_P)
     fi
  fi
}

inline apply_result(mail, operation, result) {
  if
  :: (result == Failed) ->
     assert(DEAD(TO(mail), FROM(mail)));
     lose_peer(FROM(mail), TO(mail))
  :: (result != Failed && operation == Fork) ->
     assert(result == Done || abandoned || DEAD(O, P) || DEAD(O, R));
     if
     :: (hold_r == Unconfirmed) ->
        hold_r = (result == Done -> Confirmed : Lost);
        post(R_TO_P, Accept);
        release_r()
     :: else
     fi
  :: (result != Failed && operation == Withdraw) ->
     asked = false;
     if
     :: (result == Held) -> told_held = true
     :: (result == Refused) -> drop_child()
     :: else
     fi
  :: else
  fi
}

proctype sender(byte mail) {
  byte n;
  mtype operation, result;
  {
end:
    do
    :: atomic {
#ifdef NO_TURN
         (nempty(queue[mail]) && nfull(attempts[mail])) ->
#else
         (batch[mail] == None && nempty(queue[mail]) && nfull(attempts[mail])) ->
#endif
         queue[mail] ? operation;
         batch[mail] = operation;
         number[mail] = NEXT(number[mail]);
         lost[mail] = false;
         attempts[mail] ! number[mail], operation;
         operation = None }
#ifndef NO_RESEND
    :: atomic { (lost[mail] && batch[mail] != None && nfull(attempts[mail])) ->
         lost[mail] = false;
         attempts[mail] ! number[mail], batch[mail] }
#endif
    :: atomic { (faults > 0 && batch[mail] != None && nfull(attempts[mail])) ->  /* the last attempt may still arrive */
         faults--;
         attempts[mail] ! number[mail], batch[mail] }
    :: atomic { nempty(answers[mail]) ->
         answers[mail] ? n, result;
         if
         :: (n == number[mail] && batch[mail] != None) ->
            operation = batch[mail];
            batch[mail] = None;
            apply_result(mail, operation, result)
         :: else
         fi;
         n = 0; operation = None; result = None }
    od
  } unless { died[FROM(mail)] }
}

/* receive_mail */
proctype receiver(byte mail) {
  byte n;
  mtype operation, result;
  {
end:
    do
    :: atomic { (nempty(attempts[mail]) && nfull(answers[mail])) ->
         if
         :: attempts[mail] ? n, operation
         :: (len(attempts[mail]) == 2) ->  /* they go by different connections: the second one comes first */
            attempts[mail] ? n, operation;
            attempts[mail] ! n, operation;
            attempts[mail] ? n, operation
         fi;
         if
#ifdef NO_DEAD
         :: false
#else
         :: DEAD(TO(mail), FROM(mail)) -> result = Failed
#endif
#ifdef NO_NUMBERS
         :: else -> apply(mail, operation, result)
#else
         :: else ->
            if
            :: (n == NEXT(executed[mail])) ->
               apply(mail, operation, result);
               executed[mail] = n;
               answer[mail] = result
#ifdef NO_ANSWER
            :: else -> result = Failed
#else
            :: (n == executed[mail]) -> result = answer[mail]
            :: (n != executed[mail] && n != NEXT(executed[mail])) -> result = Failed
#endif
            fi
#endif
         fi;
         answers[mail] ! n, result;
         n = 0; operation = None; result = None }
    od
  } unless { died[TO(mail)] }
}

/* Connections end, and lose what is under way on them. */
proctype loss() {
  byte mail, n;
  mtype what;
end:
  do
  :: atomic { (faults > 0) ->
       faults--;
       if
       :: mail = P_TO_O
       :: mail = R_TO_O
       :: mail = R_TO_P
       :: mail = P_TO_R
       fi;
       if
       :: nempty(attempts[mail]) -> attempts[mail] ? n, what; lost[mail] = true
       :: nempty(answers[mail]) -> answers[mail] ? n, what; lost[mail] = true
       :: (empty(attempts[mail]) && empty(answers[mail]))
       fi;
       mail = 0; n = 0; what = None }
  od
}

/* ---- the programs */

proctype parent() {
  bool sent, ended, created;
  byte asks; /* in the code P asks until the call is over; each "maybe" is like the last */
  {
#ifndef CREATING
    created = true;
#endif
    do
    :: atomic { (!sent && handle_p && hold_p != Lost && !DEAD(P, R)) ->  /* pass */
         sent = true;
         passing = true;
         carrier = true;
#ifdef BY_REPLY
         ended = true;
         askable = true
#endif
       }
    :: atomic { (sent && !ended) -> ended = true; askable = true }  /* the call has ended, well or not */
    :: atomic { (!created && object == Ready) ->                    /* end_creation(Ok) */
         created = true;
         if
         :: (hold_p == Creating) -> hold_p = Confirmed; release_p()
         :: else
         fi }
    :: atomic { !created ->                                         /* end_creation(error) */
         created = true;
         if
         :: (hold_p == Creating) -> hold_p = Lost; abandoning = true; release_p()
         :: else
         fi }
#ifndef NO_WITHDRAW
    :: atomic { (askable && passing && !asked && !told_held && (asks < 2 || !call_open)) ->
         asked = true;
         asks = (asks < 2 -> asks + 1 : asks);
         post(P_TO_R, Withdraw) }
#endif
    :: atomic { handle_p -> handle_p = false; dropped_p = true; release_p() }
    :: atomic { (created && !handle_p && (!sent || ended) && !passing) -> break }
    od
  } unless { died[P] }
}

proctype program_of_r() {
#ifdef OTHERS
  bool other;
#endif
  {
end:
    do
#ifdef BY_REPLY
    :: atomic { (carrier && call_open) -> carrier = false; receive(); call_open = false }
    :: atomic { call_open -> call_open = false }  /* without a reply */
    :: atomic { (carrier && !call_open) -> carrier = false }
#else
    :: atomic { carrier -> carrier = false; receive() }
    :: atomic { carrier -> carrier = false }  /* it was lost */
#endif
    :: atomic { handle_r -> handle_r = false; dropped_r = true; release_r() }
#ifdef OTHERS
    :: atomic { !other -> other = true; post(R_TO_O, Other) }
#endif
    od
  } unless { died[R] }
}

/* The creation arrives at O, or is lost. */
proctype create() {
end:
  do
  :: atomic { creation ->
       creation = false;
       if
       :: (DEAD(O, P) || came)
       :: else -> came = true; fork_of_p = true; object = Ready
       fi }
  :: atomic { creation -> creation = false }
  od
}

/* P or R dies, and each other agent learns that. Or O takes it for dead although it lives. */
proctype deaths() {
  if
  :: skip
  :: atomic { died[R] = true; handle_r = false; forget_mail(R_TO_O); forget_mail(R_TO_P) };
     if
     :: atomic { true -> lose_peer(O, R) }; atomic { lose_peer(P, R) }
     :: atomic { true -> lose_peer(P, R) }; atomic { lose_peer(O, R) }
     fi
  :: atomic { died[P] = true; handle_p = false; passing = false; forget_mail(P_TO_O); forget_mail(P_TO_R) };
     if
     :: atomic { true -> lose_peer(O, P) }; atomic { lose_peer(R, P) }
     :: atomic { true -> lose_peer(R, P) }; atomic { lose_peer(O, P) }
     fi
  :: atomic { true -> lose_peer(O, R) }
  :: atomic { true -> lose_peer(O, P) }
  fi
}

/* Runs when nothing else can. */
proctype judge() {
  byte mail;
  timeout;
  assert(object == Gone || object == Absent);
  assert(!fork_of_p && !fork_of_r);
  assert(died[P] || (!passing && hold_p == None));
  assert(died[R] || hold_r == None);
  for (mail : 0 .. MAILS - 1) {
    assert(died[FROM(mail)] || (batch[mail] == None && empty(queue[mail])))
  }
}

init {
  atomic {
    handle_p = true;
#ifdef CREATING
    hold_p = Creating;
    creation = true;
    run create();
#else
    hold_p = Confirmed;
    fork_of_p = true;
    came = true;
    object = Ready;
#endif
#ifdef BY_REPLY
    call_open = true;
#endif
    byte i;
    for (i : 0 .. MAILS - 1) {
      run sender(i);
      run receiver(i)
    };
    run loss();
    run parent();
    run program_of_r();
#ifdef DEATHS
    run deaths();
#endif
    run judge()
  }
}
