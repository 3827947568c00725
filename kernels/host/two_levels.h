// SPDX-License-Identifier: Apache-2.0

// Reduce-scatter in two levels, for ranks on several NUMA nodes: within groups, then over groups.
//
// B bytes, W ranks in G groups of L consecutive ranks. A partial sum is w times as wide as an
// element (2 for 16-bit floats).
//
//   two_levels 2 hops. The ranks with place p in their groups own W / L chunks together. Each of
//              them reduces its own group's versions of these chunks, piece by piece, and sends the
//              partial sums to the owners, which reduce them in group order with one rounding: the
//              same bits as a sum in groups. A rank reads (L-1)/L * B bytes from its group and
//              w (G-1)/W * B bytes from other groups; one_shot reads (G-1)/G * B bytes from other
//              groups. It writes w (G-1)/W * B bytes of partial sums more than one_shot.
#pragma once

#include "ringcomm/collectives/ring.h"

RINGCOMM_NAMESPACE_BEGIN

// The groups of a call, as one rank sees them.
struct Groups {
  int ranks, count;      // ranks per group; number of groups
  int mine, place;       // my group; my position in it
  uint64_t piece_bytes;  // bytes of a chunk's piece, whose partial sum fits a slot

  RC_FN bool has(int rank) const { return rank / ranks == mine; }
  RC_FN bool same_place(int rank) const { return rank % ranks == place; }
  // Returns the owner of the chunk that the rank at position `at` reduces in a step. My own group
  // comes last, so that other groups receive their partial sums early.
  RC_FN int owner(uint32_t step, int at) const {
    return (mine + 1 + int(step % uint32_t(count))) % count * ranks + at;
  }
  RC_FN uint32_t piece(uint32_t step) const { return step / uint32_t(count); }
};

template <class E>
RC_TEAM_FN Groups groups_of(const E& e, int ranks) {
  return {ranks, e.world() / ranks, e.rank() / ranks, e.rank() % ranks,
          e.segment_bytes() / e.ops.partial_widths()};
}

template <class E>
RC_TEAM_FN typename E::Part piece_of(const E& e, const Groups& g, const Chunks& in, int owner,
                                     uint32_t j) {
  const Span chunk = e.part(in.get(owner));
  const uint64_t begin = uint64_t(j) * g.piece_bytes,
                 bytes = item_length(chunk.bytes, g.piece_bytes, j);
  return {{bytes == 0 ? chunk.ptr : chunk.ptr + begin, bytes}};
}

// Returns the number of pieces of the longest part of any chunk, so that all ranks count the same
// rounds.
template <class E>
RC_TEAM_FN uint32_t rounds_of(const E& e, const Groups& g, const Chunks& in) {
  uint64_t most = 1;
  RC_ROLLED
  for (int r = 0; r < e.world(); ++r) {
    const uint64_t bytes = e.part(in.get(r)).bytes;
    most = bytes > most ? bytes : most;
  }
  return uint32_t((most - 1) / g.piece_bytes + 1);
}

// Sends my version of a step's piece to each rank of my group, as an item with its own header.
// model: send_to_group (tests/proof/model/two_levels.pml)
template <class E>
RC_TEAM_FN Status send_to_group(E& e, const Groups& g, const Chunks& in, uint32_t step,
                                bool* lends) {
  const auto is_reader = [&](int r) { return g.has(r); };
  const auto span_for = [&](int r) {
    return piece_of(e, g, in, g.owner(step, r % g.ranks), g.piece(step));
  };
  for (int d = 1; d < e.world(); d += e.group())
    RC_RETURN_IF_FAILED(e.send({d, d + e.group()}, 0, span_for, is_reader));
  for (int r = g.mine * g.ranks; r < (g.mine + 1) * g.ranks; ++r)
    *lends |= r != e.rank() && e.zero_copy(span_for(r));
  e.each_by_lanes({1, e.world()}, [&](int r) {
    if (is_reader(r)) e.commit_sent(e.pairs, r, 1);
  });
  return Status::kOk;
}

// Returns the slot in which my group's partial sum of my piece `j` waits for the other groups.
template <class E>
RC_TEAM_FN char* own_partial(const E& e, uint32_t j) {
  return e.v.slot(e.rank(), e.pairs, e.team.channel(), e.rank(), j + 1);
}

// Reduces a step's piece over my group and hands the partial sum to the owner of the chunk.
// model: reduce_in_group (tests/proof/model/two_levels.pml)
template <class E>
RC_TEAM_FN Status reduce_in_group(E& e, const Groups& g, const Chunks& in, uint32_t step) {
  const int owner = g.owner(step, g.place), first = g.mine * g.ranks;
  const typename E::Part own = piece_of(e, g, in, owner, g.piece(step));
  if (e.team.lane() == 0) {
    e.sources()[e.rank()] = own.ptr;
    e.factors()[e.rank()] = e.factor();
  }
  RC_RETURN_IF_FAILED(e.wait_by_lanes({1, e.world()}, [&](int p) {
    if (!g.has(p)) return Status::kOk;
    e.receive_anew(e.pairs, p);
    return e.arrive(e.pairs, p, own, 0, own.bytes, &e.sources()[p]);
  }));
  char* partial = own_partial(e, g.piece(step));
  if (owner != e.rank())
    RC_RETURN_IF_FAILED(ring_slot(e, owner, 0, own.bytes * e.ops.partial_widths(), &partial));
  e.ops.reduce_group(e.team, partial, {e.sources() + first, e.factors() + first, g.ranks},
                     own.bytes);
  e.team.sync();
  e.each_by_lanes({1, e.world()}, [&](int p) {
    if (g.has(p)) e.release(e.pairs, p, own.bytes, own.bytes);
  });
  if (owner == e.rank()) return Status::kOk;
  e.publish_item(owner, 0);
  if (e.team.lane() == 0) e.commit_sent(e.pairs, owner, 1);
  return Status::kOk;
}

// Reduces the groups' partial sums of my piece `j`.
// model: reduce_groups (tests/proof/model/two_levels.pml)
template <class E>
RC_TEAM_FN Status reduce_groups(E& e, const Groups& g, const Chunks& in, char* out, uint32_t j) {
  const Span whole = in.get(e.rank());
  const typename E::Part mine = piece_of(e, g, in, e.rank(), j);
  const uint64_t bytes = mine.bytes * e.ops.partial_widths();
  const auto sends_partial = [&](int p) { return g.same_place(p); };
  RC_RETURN_IF_FAILED(e.wait_by_lanes({1, e.world()}, [&](int p) {
    if (!sends_partial(p)) return Status::kOk;
    e.receive_anew(e.pairs, p);
    return e.arrive(e.pairs, p, {{nullptr, bytes}}, 0, bytes, &e.sources()[p]);
  }));
  if (e.team.lane() == 0) {
    e.sources()[e.rank()] = own_partial(e, j);
    // Move the groups' sources to the first entries, in group order.
    for (int group = 0; group < g.count; ++group) {
      e.sources()[group] = e.sources()[group * g.ranks + g.place];
      e.factors()[group] = 1.0;
    }
  }
  e.team.sync();
  e.ops.reduce_groups(e.team, out + (mine.ptr - whole.ptr), {e.sources(), e.factors(), g.count},
                      bytes, e.world());
  e.team.sync();
  e.each_by_lanes({1, e.world()}, [&](int p) {
    if (sends_partial(p)) e.release(e.pairs, p, bytes, bytes);
  });
  return Status::kOk;
}

// Each rank sends one step ahead of its reductions, and reduces the partial sums of a piece one
// piece later. So no rank waits for a later step of another rank, and waits form no circle. A link
// then holds at most two unread items, for which any number of slots suffices.
// model: reduce_scatter_two_levels (tests/proof/model/two_levels.pml)
template <class E>
RC_TEAM_FN Status reduce_scatter_two_levels(E& e, const Chunks& in, char* out, int ranks) {
  const Groups g = groups_of(e, ranks);
  const uint32_t rounds = rounds_of(e, g, in), steps = rounds * uint32_t(g.count);
  bool lends = false;
  RC_RETURN_IF_FAILED(send_to_group(e, g, in, 0, &lends));
  for (uint32_t step = 0; step < steps; ++step) {
    if (step + 1 < steps) RC_RETURN_IF_FAILED(send_to_group(e, g, in, step + 1, &lends));
    RC_RETURN_IF_FAILED(reduce_in_group(e, g, in, step));
    const bool ends_round = (step + 1) % uint32_t(g.count) == 0;
    if (ends_round && g.piece(step) > 0)
      RC_RETURN_IF_FAILED(reduce_groups(e, g, in, out, g.piece(step) - 1));
  }
  RC_RETURN_IF_FAILED(reduce_groups(e, g, in, out, rounds - 1));
  e.each_by_lanes({1, e.world()}, [&](int p) {
    if (g.has(p) || g.same_place(p)) e.commit_seen(e.pairs, p);
  });
  return e.wait_by_lanes({1, e.world()}, [&](int r) {
    return lends && g.has(r) ? e.drained(e.pairs, r, 0) : Status::kOk;
  });
}

RINGCOMM_NAMESPACE_END
