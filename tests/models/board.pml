/* The board of a group (rpc/collectives/board.cpp): a rank that announces steps, and a rank that waits for them and
 * sleeps. Checks that no announcement is slept through. Spin's memory is sequentially consistent, as the flags are.
 *
 * holds:
 * fails: -DNO_SECOND_LOOK
 * fails: -DNO_BELL
 *
 * NO_SECOND_LOOK: the waiter does not read the flag again after it has stored `sleeping`.
 * NO_BELL: the announcer wakes without moving the bell, so a waiter that has not slept yet misses it.
 */
#define STEPS 3

byte announced = 0, bell = 0;
bit sleeping = 0;
bit asleep = 0; /* inside the futex */

active proctype announcer() {
  byte step = 1;
  do
  :: step <= STEPS ->
     announced = step;
     if
     :: sleeping ->
#ifndef NO_BELL
        bell = bell + 1;
#endif
        asleep = 0 /* futex_wake */
     :: else
     fi;
     step = step + 1
  :: else -> break
  od
}

active proctype waiter() {
  byte step = 1, heard;
  do
  :: step <= STEPS ->
     do
     :: announced >= step -> break
     :: else ->
        heard = bell;
        sleeping = 1;
        if
#ifndef NO_SECOND_LOOK
        :: announced >= step -> skip
        :: announced < step ->
#else
        :: true ->
#endif
           /* futex_wait compares and sleeps in one step */
           atomic {
             if
             :: bell == heard -> asleep = 1
             :: else
             fi
           };
           asleep == 0 /* an end state here is a lost wake-up */
        fi;
        sleeping = 0
     od;
     step = step + 1
  :: else -> break
  od
}
