// SPDX-License-Identifier: Apache-2.0

// Reduce-scatter: rank r ends with the reduction of all ranks' chunks r.
//
// B bytes, W ranks. Both algorithms read and send (W-1)/W * B bytes per rank.
//
//   one_shot 1 hop. Each rank offers chunk r to rank r: in place if it lies in the heap (zero
//            copy), else through pair slots, segment by segment. Each rank reduces the W versions
//            of its own chunk in rank order, with one rounding: bitwise equal to a sequential sum
//            in the accumulator's type.
//   ring     W-1 hops of partial sums around the ring, rounded to the element type at each hop:
//            bitwise equal from run to run, though not to the sequential sum.
#pragma once

#include "ringcomm/collectives/ring.h"

RINGCOMM_NAMESPACE_BEGIN

// Waits for bytes [begin, begin + bytes) of every rank's version of my chunk, and fills sources().
// model: receive_sources (tests/proof/model/one_shot.pml)
template <class E, class Part = typename E::Part>
RC_TEAM_FN Status receive_sources(E& e, const Part& mine, uint64_t begin, uint64_t bytes) {
  if (e.team.lane() == 0) {
    e.sources()[e.rank()] = mine.ptr + mine.offset(begin);
    e.factors()[e.rank()] = e.factor();
    e.set_gaps(mine, begin);
  }
  return e.wait_by_lanes({1, e.world()}, [&](int p) {
    return e.arrive(e.pairs, p, mine, begin, bytes, &e.sources()[p]);
  });
}

// Frees the peers' slots (or buffers) once all bytes before `end` are reduced.
// model: release_sources (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN void release_sources(E& e, Span mine, uint64_t end) {
  e.team.sync();
  e.each_by_lanes({1, e.world()}, [&](int p) { e.release(e.pairs, p, mine.bytes, end); });
}

// True if the first read brought every rank's whole version of my chunk, and this team reads items
// whole.
template <class E>
RC_TEAM_FN bool sources_are_whole(const E& e, Span mine) {
  const auto all = [](int) { return true; };
  return e.most_reads(e.pairs, true, all, [&](int) { return mine.bytes; }) <= 1;
}

// Returns the largest number of items in which a reader gets its chunk.
template <class E>
RC_TEAM_FN uint32_t most_items(const E& e, const Chunks& in, int only_root) {
  uint32_t most = 0;
  RC_ROLLED
  for (int d = 1; d < e.world(); ++d) {
    const int r = e.peer_at(d);
    if (only_root >= 0 && only_root != r) continue;
    const uint32_t items = e.items(e.part(in.get(r)));
    most = items > most ? items : most;
  }
  return most;
}

// Sends piece `j` of every chunk to the chunk's owner.
template <class E>
RC_TEAM_FN Status send_chunks(E& e, const Chunks& in, int only_root, uint32_t j) {
  const auto span_for = [&](int r) { return e.part(in.get(r)); };
  const auto gets_item = [&](int r) {
    return (only_root < 0 || only_root == r) && j < e.items(span_for(r));
  };
  for (int d = 1; d < e.world(); d += e.group())
    RC_RETURN_IF_FAILED(e.send({d, d + e.group()}, j, span_for, gets_item));
  return Status::kOk;
}

// model: drain_chunks (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status drain_chunks(E& e, const Chunks& in, int only_root) {
  return e.wait_by_lanes({1, e.world()}, [&](int r) {
    if (only_root >= 0 && only_root != r) return Status::kOk;
    const typename E::Part chunk = e.part(in.get(r));
    const uint32_t items = e.items(chunk);
    if (e.zero_copy(chunk)) RC_RETURN_IF_FAILED(e.drained(e.pairs, r, items));
    e.commit_sent(e.pairs, r, items);
    return Status::kOk;
  });
}

// only_root >= 0: only that rank receives (the collective is then a reduce).
// model: reduce_scatter_one_shot (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status reduce_scatter_one_shot(E& e, const Chunks& in, char* out, int only_root = -1) {
  const bool receives = only_root < 0 || only_root == e.rank();
  const typename E::Part first = e.part(in.get(e.rank()));
  const uint64_t segment = e.segment_bytes();
  const uint32_t out_items = most_items(e, in, only_root);
  uint32_t in_pieces = receives ? e.pieces(first.bytes) : 0;

  for (uint32_t j = 0; j < out_items || j < in_pieces + kLookahead; ++j) {
    if (j < out_items) RC_RETURN_IF_FAILED(send_chunks(e, in, only_root, j));
    if (j < kLookahead || j - kLookahead >= in_pieces) continue;
    const Span whole = in.get(e.rank());
    const typename E::Part mine = e.again(first, whole);
    const uint64_t begin = (j - kLookahead) * segment;
    uint64_t bytes = item_length(mine.bytes, segment, j - kLookahead);
    RC_RETURN_IF_FAILED(receive_sources(e, mine, begin, bytes));
    if (j == kLookahead && sources_are_whole(e, mine)) in_pieces = 1, bytes = mine.bytes;
    char* const result = out + (mine.ptr - whole.ptr) + mine.offset(begin);
    e.ops.reduce(e.team, {result, false, nullptr}, e.all_sources(), bytes, e.world());
    release_sources(e, e.again(first, in.get(e.rank())), begin + bytes);
  }
  if (receives) e.each_by_lanes({1, e.world()}, [&](int p) { e.commit_seen(e.pairs, p); });
  return drain_chunks(e, in, only_root);
}

// Reduces one piece in one hop: adds my version, `own`, to the partial sum that arrived (if any).
template <class E>
RC_TEAM_FN void reduce_hop(E& e, char* dst, const char* partial, const char* own, uint64_t bytes,
                           int finish_world) {
  if (e.team.lane() == 0) {
    const bool first = partial == nullptr;
    e.sources()[0] = first ? own : partial;
    e.sources()[1] = own;
    e.factors()[0] = first ? e.factor() : 1.0;
    e.factors()[1] = e.factor();
  }
  e.team.sync();
  e.ops.reduce(e.team, {dst, finish_world == 0, nullptr},
               HopSources{{e.sources(), e.factors(), partial == nullptr ? 1 : 2}}, bytes,
               finish_world);
}

// model: reduce_scatter_ring (tests/proof/model/ring.pml)
template <class E>
RC_TEAM_FN Status reduce_scatter_ring(E& e, const Chunks& in, char* out) {
  const int world = e.world(), position = e.v.position_in_ring();
  const Neighbours at = neighbours(e.v);
  const uint64_t segment = e.segment_bytes();
  const Span whole = in.get(e.rank());
  const typename E::Part mine = e.part(whole);
  char* const result = out + (mine.ptr - whole.ptr);
  // Shorter parts send empty pieces, so that all ranks count the same items.
  const uint32_t rounds = rounds_of(e, in), hops = world - 1, items = rounds * hops;
  const uint64_t stream_bytes = uint64_t(items) * segment;  // as if every item were full
  if (world == 1) {
    reduce_hop(e, result, nullptr, mine.ptr, mine.bytes, 1);
    e.team.sync();
    return Status::kOk;
  }
  if (e.team.lane() == 0) e.receive_anew(e.pairs, at.prev);
  e.team.sync();
  for (uint32_t j = 0; j < rounds; ++j) {
    for (uint32_t t = 0; t <= hops; ++t) {
      const int owner = e.v.ring_rank(ring_reduce_chunk(position, t, world));
      const typename E::Part chunk = e.part(in.get(owner));
      const uint64_t bytes = item_length(chunk.bytes, segment, j);
      const uint32_t item = j * hops + t;
      const char* partial = nullptr;
      char* dst = result + mine.offset(j * segment);
      if (t < hops) RC_RETURN_IF_FAILED(ring_slot(e, at.next, item, stream_bytes, &dst));
      if (t > 0) {
        RC_RETURN_IF_FAILED(
            e.receive(e.pairs, at.prev, stream_bytes, uint64_t(item - 1) * segment, segment));
        partial = e.received(at.prev);
        e.team.sync();  // reduce_hop() writes sources(), which every lane has just read
      }
      reduce_hop(e, dst, partial, chunk.ptr + chunk.offset(j * segment), bytes,
                 t == hops ? world : 0);
      if (t < hops)
        e.publish_item(at.next, item);
      else
        e.team.sync();
      if (t > 0 && e.team.lane() == 0)
        e.release(e.pairs, at.prev, stream_bytes, uint64_t(item) * segment);
    }
  }
  commit_ring(e, at, items);
  return Status::kOk;
}

RINGCOMM_NAMESPACE_END
