/* SPDX-License-Identifier: Apache-2.0 */

// The ring collectives: reduce-scatter, all-gather, and all-reduce as one after the other.
//
// -D, beside those of signal.pml: SEGMENTS of each chunk; CALLS, each a reduce-scatter or an
// all-gather, whose sequences are all explored.
#include "signal.pml"

#define HOPS (WORLD - 1)
#define REDUCE_SCATTER 0
#define ALL_GATHER 1

// A slot holds the chunk, segment and call of its item (never 0), and the ranks whose versions are
// in the sum: a bit for each rank.
#define ITEM(call, segment, owner) (1 + ((call) * SEGMENTS + (segment)) * WORLD + (owner))
byte items[WORLD * SLOTS];
byte sums[WORLD * SLOTS];
bool reduces[CALLS];

#define at_next(item) \
  (me * SLOTS + slot((sent_to(PAIR, ring_next(me)) + 1 + (item)) % EPOCHS))
#define at_prev(item) \
  (ring_prev(me) * SLOTS + slot((seen_of(PAIR, ring_prev(me)) + 1 + (item)) % EPOCHS))
#define everybody ((1 << WORLD) - 1)

// ring.h: ring_slot
inline ring_slot(item) {
  slot_is_free(PAIR, ring_next(me), item)
}

// endpoint.h: receive
inline receive(item) {
  await_item(PAIR, ring_prev(me), item)
}

// endpoint.h: publish_item
inline publish_item(item) {
  publish(PAIR, ring_next(me), sent_to(PAIR, ring_next(me)) + 1 + (item))
}

// endpoint.h: release
inline release(item) {
  acknowledge(PAIR, ring_prev(me), seen_of(PAIR, ring_prev(me)) + (item))
}

// ring.h: commit_ring
inline commit_ring() {
  commit_seen(PAIR, ring_prev(me), SEGMENTS * HOPS);
  commit_sent(PAIR, ring_next(me), SEGMENTS * HOPS)
}

// The chunk that arrived at hop t is hop t's chunk, summed over the preceding ranks of the ring.
inline read_partial(item) {
  assert(items[at_prev(item - 1)] == ITEM(call, j, owner));
  partial = sums[at_prev(item - 1)]
}

#ifdef MUTANT_RELEASED_BEFORE_REDUCED
#define releases_early true
#else
#define releases_early false
#endif

// reduce_scatter.h: reduce_scatter_ring
inline reduce_scatter_ring() {
  for (j : 0 .. SEGMENTS - 1) {
    for (t : 0 .. HOPS) {
      owner = ring_reduce_chunk(me, t);
      item = j * HOPS + t;
      partial = 0;
      if
      :: t < HOPS -> atomic { ring_slot(item) }
      :: else
      fi;
      if
      :: t > 0 ->
         atomic {
           receive(item - 1);
           read_partial(item);
           if
           :: releases_early -> release(item)
           :: else
           fi
         }
      :: else
      fi;
      atomic {  // reduce_hop, publish_item: has read the whole partial sum
        proceed();
        if
        :: t > 0 -> read_partial(item)
        :: else
        fi;
        assert(!(partial & (1 << me)));
        partial = partial | (1 << me);
        if
        :: t < HOPS ->
           items[at_next(item)] = ITEM(call, j, owner);
           sums[at_next(item)] = partial;
           publish_item(item)
        :: else -> assert(owner == me && partial == everybody)
        fi
      };
      if
      :: t > 0 && !releases_early -> atomic { proceed(); release(item) }
      :: else
      fi
    }
  };
  commit_ring()
}

// all_gather.h: all_gather_ring
inline all_gather_ring() {
  for (j : 0 .. SEGMENTS - 1) {
    got = 1 << me;
    for (t : 0 .. HOPS) {
      owner = ring_gather_chunk(me, t);
      item = j * HOPS + t;
      if
      :: t > 0 -> atomic { receive(item - 1); read_partial(item) }
      :: else -> assert(owner == me)
      fi;
      if
      :: t < HOPS ->
         atomic {
           ring_slot(item);
           if
           :: t > 0 -> read_partial(item)
           :: else
           fi;
           items[at_next(item)] = ITEM(call, j, owner);
           publish_item(item)
         }
      :: else
      fi;
      if
      :: t > 0 ->
         atomic {
           proceed();
           read_partial(item);
           got = got | (1 << owner);
           release(item)
         }
      :: else
      fi
    };
    assert(got == everybody)
  };
  commit_ring()
}

proctype rank(byte me) {
  byte call, j, t, item, owner, partial, got;
  for (call : 0 .. CALLS - 1) {
    may_close();
    if
    :: reduces[call] -> reduce_scatter_ring()
    :: else -> all_gather_ring()
    fi;
    d_step { partial = 0; got = 0; owner = 0; item = 0 }
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
    for (i : 0 .. CALLS - 1) {
      if
      :: true
      :: reduces[i] = true
      fi
    };
    for (i : 0 .. WORLD - 1) { run rank(i) }
  }
}
