/* SPDX-License-Identifier: Apache-2.0 */

// The one-shot collectives: pair and shared streams, several segments and calls, zero copy, faults.
//
// -D, beside those of signal.pml: SEGMENTS of each chunk; CALLS; KINDS, a bit for each collective
// that a call may be, whose sequences are all explored; LEND: buffers of any ranks may be in their
// heaps.
#include "signal.pml"

#define REDUCE_SCATTER 0
#define ALL_GATHER 1
#define ALL_REDUCE 2
#define ALL_TO_ALL 3
#define BROADCAST 4  // of rank 0
#define GATHER 5     // to rank 0
#define ONE_HOP 6    // an all-reduce of one segment
#define may_be(collective) ((KINDS >> (collective)) & 1)
byte kinds[COMMUNICATORS * CALLS];
#define kind kinds[REGION * CALLS + call]

#include "endpoint.pml"

#define all_peers (((1 << WORLD) - 1) - (1 << me))

// reduce_scatter.h: receive_sources
inline receive_sources(segment) {
  each_peer(arrive(PAIR, p, segment));
  assert(arrived == all_peers);
  arrived = 0
}

// reduce_scatter.h: release_sources
inline release_sources(segment) {
  each_peer(release(PAIR, p, segment))
}

// reduce_scatter.h: drain_chunks
inline drain_chunks() {
  each_peer(atomic {
    if
    :: lends(me) -> drained(PAIR, p, 1)
    :: else
    fi;
    commit_sent(PAIR, p, items_on(PAIR, me))
  })
}

// reduce_scatter.h: reduce_scatter_one_shot
inline reduce_scatter_one_shot() {
  for (j : 0 .. SEGMENTS + LOOKAHEAD - 1) {
    each_peer(send(p, j));
    if
    :: j >= LOOKAHEAD ->
       receive_sources(j - LOOKAHEAD);
       release_sources(j - LOOKAHEAD)
    :: else
    fi
  };
  atomic { each_peer(commit_seen(PAIR, p, items_on(PAIR, p))) };
  drain_chunks()
}

// all_gather.h: collect_piece
inline collect_piece(sender, segment) {
  arrive(SHARED, sender, segment);
  arrived = 0;
  store_result(sender, segment);
  release(SHARED, sender, segment)
}

// all_gather.h: finish_sharing
inline finish_sharing() {
  if
  :: lends(me) -> each_peer(atomic { drained(SHARED, p, items_on(SHARED, me)) })
  :: else
  fi;
  atomic { each_peer(commit_sent(SHARED, p, items_on(SHARED, me))) }
}

#define shares(rank) (kind != BROADCAST || (rank) == 0)

// all_gather.h: share_one_shot
inline share_one_shot() {
  for (j : 0 .. SEGMENTS + LOOKAHEAD - 1) {
    if
    :: shares(me) && j < items_on(SHARED, me) ->
       acquire_shared(j);
       publish_shared(j)
    :: else
    fi;
    if
    :: j >= LOOKAHEAD ->
       each_peer(
         if
         :: shares(p) -> collect_piece(p, j - LOOKAHEAD)
         :: else
         fi)
    :: else
    fi
  };
  atomic {
    each_peer(
      if
      :: shares(p) -> commit_seen(SHARED, p, items_on(SHARED, p))
      :: else
      fi)
  };
  if
  :: shares(me) -> finish_sharing()
  :: else
  fi
}

// all_reduce.h: reduce_and_share
inline reduce_and_share(segment) {
  receive_sources(segment);
  acquire_shared(segment);
  store_result(me, segment);
#ifdef MUTANT_SHARED_BEFORE_REDUCED
  publish_shared(segment);
  release_sources(segment)
#else
  release_sources(segment);
  publish_shared(segment)
#endif
}

// all_reduce.h: all_reduce_two_hops
inline all_reduce_two_hops() {
  for (j : 0 .. SEGMENTS + 2 * LOOKAHEAD - 1) {
    each_peer(send(p, j));
    if
    :: j >= LOOKAHEAD && j - LOOKAHEAD < SEGMENTS -> reduce_and_share(j - LOOKAHEAD)
    :: else
    fi;
    if
    :: j >= 2 * LOOKAHEAD -> each_peer(collect_piece(p, j - 2 * LOOKAHEAD))
    :: else
    fi
  };
  atomic { each_peer(commit_seen(PAIR, p, items_on(PAIR, p)); commit_seen(SHARED, p, SEGMENTS)) };
  drain_chunks();
  finish_sharing()
}

// all_reduce.h: all_reduce_one_hop
inline all_reduce_one_hop() {
#ifndef MUTANT_SLOT_FILLED_UNASKED
  acquire_shared(0);
#endif
  publish_shared(0);
#ifndef MUTANT_REDUCED_WITHOUT_ARRIVAL
  each_peer(arrive(SHARED, p, 0));
  assert(arrived == all_peers);
  arrived = 0;
#endif
#ifdef MUTANT_ACKNOWLEDGED_BEFORE_REDUCED
  each_peer(release(SHARED, p, 0));
#endif
  each_peer(atomic { release(SHARED, p, 0); commit_seen(SHARED, p, 1); commit_sent(SHARED, p, 1) })
}

#define sends(reader) (kind != GATHER || (reader) == 0)
#define receives() (kind != GATHER || me == 0)

// exchange.h: take_piece
inline take_piece(sender, segment) {
  arrive(PAIR, sender, segment);
  arrived = 0;
  release(PAIR, sender, segment)
}

// exchange.h: finish_exchange
inline finish_exchange() {
  atomic {
    each_peer(
      if
      :: receives() -> commit_seen(PAIR, p, items_on(PAIR, p))
      :: else
      fi)
  };
  each_peer(
    if
    :: sends(p) ->
       atomic {
         if
         :: lends(me) -> drained(PAIR, p, 1)
         :: else
         fi;
         commit_sent(PAIR, p, items_on(PAIR, me))
       }
    :: else
    fi)
}

// exchange.h: exchange_one_shot
inline exchange_one_shot() {
  for (j : 0 .. SEGMENTS + LOOKAHEAD - 1) {
    each_peer(
      if
      :: sends(p) -> send(p, j)
      :: else
      fi);
    if
    :: j >= LOOKAHEAD && receives() -> each_peer(take_piece(p, j - LOOKAHEAD))
    :: else
    fi
  };
  finish_exchange()
}

// The buffer belongs to its user again.
inline give_back() {
  d_step {
    buffer(me) = 0;
#if may_be(ALL_REDUCE) && defined(LEND)
    for (p : 0 .. WORLD - 1) {
      for (j : 0 .. SEGMENTS - 1) { result(me, p, j) = false }
    }
#endif
  }
}

proctype rank(byte me; byte communicator) {
  byte call, j, d, p, arrived, found;
  bool torn;
  for (call : 0 .. CALLS - 1) {
    atomic { may_close(); buffer(me) = lends(me) * (1 + call); verify_streams() };
    if
#if may_be(REDUCE_SCATTER)
    :: kind == REDUCE_SCATTER -> reduce_scatter_one_shot()
#endif
#if may_be(ALL_GATHER) || may_be(BROADCAST)
    :: kind == ALL_GATHER || kind == BROADCAST -> share_one_shot()
#endif
#if may_be(ALL_REDUCE)
    :: kind == ALL_REDUCE -> all_reduce_two_hops()
#endif
#if may_be(ONE_HOP)
    :: kind == ONE_HOP -> all_reduce_one_hop()
#endif
#if may_be(ALL_TO_ALL) || may_be(GATHER)
    :: kind == ALL_TO_ALL || kind == GATHER -> exchange_one_shot()
#endif
    fi;
    verify_peer_buffers();
    give_back()
  };
closed:
  has_detached(me) = true;
  goto died;
gave_up:
  give_back();
died:
  skip
}

init {
  atomic {
    byte i;
    for (i : 0 .. COMMUNICATORS * CALLS - 1) {
      if
      :: may_be(REDUCE_SCATTER) -> kinds[i] = REDUCE_SCATTER
      :: may_be(ALL_GATHER) -> kinds[i] = ALL_GATHER
      :: may_be(ALL_REDUCE) -> kinds[i] = ALL_REDUCE
      :: may_be(ALL_TO_ALL) -> kinds[i] = ALL_TO_ALL
      :: may_be(BROADCAST) -> kinds[i] = BROADCAST
      :: may_be(GATHER) -> kinds[i] = GATHER
      :: may_be(ONE_HOP) -> kinds[i] = ONE_HOP
      fi
    };
#ifdef LEND
    for (i : 0 .. WORLD - 1) {
      if
      :: true
      :: lenders = lenders | (1 << i)
      fi
    };
#endif
    for (i : 0 .. COMMUNICATORS * WORLD - 1) { run rank(i % WORLD, i / WORLD) }
  }
}
