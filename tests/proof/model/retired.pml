/* SPDX-License-Identifier: Apache-2.0 */

// Regions after their communicator: detaching, and reuse by the rank's next communicator.
//
// The ranks build communicators one after the other. In each, every rank publishes an item to every
// peer, takes their items, acknowledges them, and closes without waiting for acknowledgements: a
// peer may store into a region long after its owner has closed it. A rank may fail before it
// connects to its peers, or die at any time.
//
// -D: WORLD; COMMUNICATORS; FAULTS=n; MUTANT_*: a mistake.
#include "schedule.pml"

#define REGIONS 2  // places for regions in a heap
#define NOBODY 255
#define at(owner, index) ((owner) * REGIONS + (index))

// The owner of a place in a heap: 0 if free, else 1 + the number of the communicator.
byte region[WORLD * REGIONS];
bool connected_region[WORLD * REGIONS];  // peers know the region, so it must wait until they detach
bool retired[WORLD * REGIONS];
bool detached[WORLD * REGIONS * WORLD];  // set by the peer that detaches
bool ready[WORLD * REGIONS * WORLD];
bool consumed[WORLD * REGIONS * WORLD];
bool ended[WORLD];

// The rendezvous of each communicator: the place of each rank's region, and the connected ranks.
byte offered[COMMUNICATORS * WORLD] = NOBODY;
byte connected[COMMUNICATORS];
bool lost[COMMUNICATORS];  // a rank failed or ended, so the others give up

#ifdef FAULTS
byte faults;
#define may_fail (faults < FAULTS)
#else
#define may_fail false
#endif

// Each store must find that the region still belongs to the writer's communicator.
#define store(word, owner, index) \
  assert(region[at(owner, index)] == 1 + communicator); \
  word[at(owner, index) * WORLD + me] = true

// retired.cpp: free_of_peers
inline free_of_peers(index) {
  is_free = true;
#ifndef MUTANT_REUSED_WITHOUT_DETACH
  p = 0;
  do
  :: p < WORLD && connected_region[at(me, index)] ->
#ifdef MUTANT_ONE_DETACH_IS_ENOUGH
     is_free = false;
     if
     :: p != me && detached[at(me, index) * WORLD + p] -> is_free = true; break
     :: else
     fi;
#else
     is_free = is_free && (p == me || detached[at(me, index) * WORLD + p] || ended[p]);
#endif
     p++
  :: else -> break
  od
#endif
}

// retired.cpp: reclaim
inline reclaim() {
  for (i : 0 .. REGIONS - 1) {
    if
    :: region[at(me, i)] != 0 && retired[at(me, i)] ->
       free_of_peers(i);
       if
       :: is_free -> region[at(me, i)] = 0; retired[at(me, i)] = false
       :: else
       fi
    :: else
    fi
  };
  is_free = false
}

// The constructor in comm.cpp: takes a region and clears its words, or ends the rank without room.
inline allocate() {
  mine = 0;
  do
  :: mine < REGIONS && region[at(me, mine)] != 0 -> mine++
  :: else -> break
  od;
  if
  :: mine == REGIONS -> goto over
  :: else
  fi;
  region[at(me, mine)] = 1 + communicator;
  connected_region[at(me, mine)] = false;
  for (i : 0 .. WORLD - 1) {
    detached[at(me, mine) * WORLD + i] = false;
    ready[at(me, mine) * WORLD + i] = false;
    consumed[at(me, mine) * WORLD + i] = false
  }
}

// comm.cpp: detach
inline detach() {
  for (d : 1 .. WORLD - 1) {
    p = rotated_peer(me, d);
    atomic { store(detached, p, offered[communicator * WORLD + p]); may_die() }
  }
}

inline may_die() {
  if
  :: true
#ifdef FAULTS
  :: may_fail -> faults++; goto over
#endif
  fi
}

// Waits for an event of `peer`, unless the communicator is lost.
inline await(condition) {
  if
  :: condition
  :: lost[communicator] -> goto close
  fi
}

proctype rank(byte me) {
  byte communicator, mine, d, p, i;
  bool is_free;
  for (communicator : 0 .. COMMUNICATORS - 1) {
    atomic { reclaim(); allocate(); offered[communicator * WORLD + me] = mine; may_die() };
    // Waits until all ranks have offered their regions, then connects.
    atomic {
      i = 0;
      do
      :: i < WORLD ->
         if
         :: offered[communicator * WORLD + i] != NOBODY -> i++
         :: lost[communicator] -> i = 0; goto close_unconnected
         fi
      :: else -> break
      od;
      i = 0;
#ifdef FAULTS
      if
      :: true
      :: may_fail -> faults++; lost[communicator] = true; goto close_unconnected
      fi;
#endif
      connected_region[at(me, mine)] = true;
      connected[communicator]++
    };
    // activate() in comm.cpp: only after all ranks have connected.
    atomic {
      if
#ifndef MUTANT_WRITTEN_BEFORE_ALL_CONNECTED
      :: connected[communicator] == WORLD
#else
      :: true
#endif
      :: lost[communicator] -> goto close_unactivated
#ifdef FAULTS
      :: may_fail -> faults++; lost[communicator] = true; goto close_unactivated
#endif
      fi
    };
    for (d : 1 .. WORLD - 1) {
      p = rotated_peer(me, d);
      atomic { store(ready, p, offered[communicator * WORLD + p]); may_die() }
    };
    for (d : 1 .. WORLD - 1) {
      p = rotated_peer(me, d);
      atomic { await(ready[at(me, mine) * WORLD + p]); may_die() };
      atomic { store(consumed, p, offered[communicator * WORLD + p]); may_die() }
    };
close:
    detach();
close_unactivated:
    atomic { retired[at(me, mine)] = true; reclaim(); may_die() };
    goto next;
close_unconnected:  // peers do not know the region, so the rank tells nobody
    atomic { retired[at(me, mine)] = true; reclaim(); may_die() };
next:
    skip
  };
over:
  atomic {
    ended[me] = true;
    for (i : 0 .. COMMUNICATORS - 1) { lost[i] = true }
  }
}

init {
  atomic {
    byte r;
    for (r : 0 .. WORLD - 1) { run rank(r) }
  }
}
