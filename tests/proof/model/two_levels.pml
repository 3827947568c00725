/* SPDX-License-Identifier: Apache-2.0 */

// Reduce-scatter in two levels: within groups of two ranks, then over the groups.
//
// -D, beside those of signal.pml: SEGMENTS, the pieces of each chunk; CALLS.
#include "signal.pml"

#define RANKS 2  // of a group
#define GROUPS (WORLD / RANKS)
#define STEPS (SEGMENTS * GROUPS)
#define has(rank) ((rank) / RANKS == me / RANKS)
#define same_place(rank) ((rank) % RANKS == me % RANKS)
#define owner_in(step) (((me / RANKS + 1 + (step) % GROUPS) % GROUPS) * RANKS + me % RANKS)
#define own_group (((1 << RANKS) - 1) << (me / RANKS * RANKS))
#define everybody ((1 << WORLD) - 1)

// A slot holds the number of a step or of a piece of partial sums (never 0), and the ranks whose
// versions are in it: a bit for each rank.
#define VERSION(call, step) (1 + (call) * STEPS + (step))
#define PARTIAL(call, piece) (101 + (call) * SEGMENTS + (piece))
#define cell(sender, reader, epoch) (((sender) * WORLD + (reader)) * SLOTS + slot((epoch) % EPOCHS))
#define to(reader) cell(me, reader, sent_to(PAIR, reader) + 1)
#define from(sender) cell(sender, me, seen_of(PAIR, sender) + 1)
#define own_partial(piece) ((me * WORLD + me) * SLOTS + (piece) % SLOTS)
byte items[WORLD * WORLD * SLOTS];
byte sums[WORLD * WORLD * SLOTS];

inline put(where, item, versions) {
  items[where] = item;
  sums[where] = versions
}

// two_levels.h: send_to_group
inline send_to_group(step) {
  each_peer(
    if
    :: has(p) ->
       atomic {
         slot_is_free(PAIR, p, 0);
         put(to(p), VERSION(call, step), 1 << me);
         publish(PAIR, p, sent_to(PAIR, p) + 1);
         commit_sent(PAIR, p, 1)
       }
    :: else
    fi)
}

inline read_version(step) {
  assert(items[from(p)] == VERSION(call, step) && sums[from(p)] == 1 << p)
}

inline release(peer) {
  acknowledge(PAIR, peer, seen_of(PAIR, peer) + 1);
  commit_seen(PAIR, peer, 1)
}

// two_levels.h: reduce_in_group
inline reduce_in_group(step) {
  owner = owner_in(step);
  each_peer(
    if
    :: has(p) -> atomic { await_item(PAIR, p, 0); read_version(step) }
    :: else
    fi);
#ifdef MUTANT_RELEASED_BEFORE_REDUCED
  each_peer(
    if
    :: has(p) -> acknowledge(PAIR, p, seen_of(PAIR, p) + 1)
    :: else
    fi);
#endif
  if
  :: owner != me -> atomic { slot_is_free(PAIR, owner, 0) }
  :: else
  fi;
  atomic {  // has read all of the versions
    proceed();
    each_peer(
      if
      :: has(p) -> read_version(step)
      :: else
      fi);
    if
    :: owner != me -> put(to(owner), PARTIAL(call, (step) / GROUPS), own_group)
    :: else -> put(own_partial((step) / GROUPS), PARTIAL(call, (step) / GROUPS), own_group)
    fi
  };
  each_peer(
    if
    :: has(p) -> atomic { proceed(); release(p) }
    :: else
    fi);
  if
  :: owner != me ->
     atomic {
       proceed();
       publish(PAIR, owner, sent_to(PAIR, owner) + 1);
       commit_sent(PAIR, owner, 1)
     }
  :: else
  fi
}

inline read_partial(where, piece) {
  assert(items[where] == PARTIAL(call, piece) && !(total & sums[where]));
  total = total | sums[where]
}

// two_levels.h: reduce_groups
inline reduce_groups(piece) {
  each_peer(
    if
    :: same_place(p) -> atomic { await_item(PAIR, p, 0) }
    :: else
    fi);
  atomic {
    proceed();
    total = 0;
    read_partial(own_partial(piece), piece);
    each_peer(
      if
      :: same_place(p) -> read_partial(from(p), piece)
      :: else
      fi);
    assert(total == everybody);
    total = 0
  };
  each_peer(
    if
    :: same_place(p) -> atomic { proceed(); release(p) }
    :: else
    fi)
}

#ifdef MUTANT_PARTIAL_SUMS_LEFT_LONGER
#define BEHIND 2
#else
#define BEHIND 1
#endif

// two_levels.h: reduce_scatter_two_levels
inline reduce_scatter_two_levels() {
  for (step : 0 .. LOOKAHEAD - 1) { send_to_group(step) };
  for (step : 0 .. STEPS - 1) {
    if
    :: step + LOOKAHEAD < STEPS -> send_to_group(step + LOOKAHEAD)
    :: else
    fi;
    reduce_in_group(step);
    if
    :: (step + 1) % GROUPS == 0 && step / GROUPS >= BEHIND -> reduce_groups(step / GROUPS - BEHIND)
    :: else
    fi
  };
  for (step : SEGMENTS - BEHIND .. SEGMENTS - 1) { reduce_groups(step) }
}

proctype rank(byte me) {
  byte call, step, d, p, owner, total;
  for (call : 0 .. CALLS - 1) {
    may_close();
    reduce_scatter_two_levels();
    atomic { step = 0; owner = 0 }
  };
closed:
  has_detached(me) = true;
gave_up:
died:
  skip
}

init {
  atomic {
    byte i;
    for (i : 0 .. WORLD - 1) { run rank(i) }
  }
}
