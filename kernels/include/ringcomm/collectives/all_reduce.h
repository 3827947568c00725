// SPDX-License-Identifier: Apache-2.0

// All-reduce: every rank ends with the reduction of all ranks' buffers.
//
// B bytes, W ranks.
//
//   two_shot 2 hops, 2(W-1)/W * B bytes: a reduce-scatter that shares each piece as soon as it is
//            reduced, so that the all-gather of one piece overlaps the reduction of the next.
//            Up to one_hop_bytes: 1 hop, (W-1) * B bytes; every rank shares its whole buffer and
//            reduces all buffers (torch's symmetric memory calls this form one-shot). Both sum in
//            rank order with one rounding: the same bits.
//   ring     2(W-1) hops, 2(W-1)/W * B bytes: ring reduce-scatter, then ring all-gather.
#pragma once

#include "ringcomm/collectives/all_gather.h"
#include "ringcomm/collectives/reduce_scatter.h"

RINGCOMM_NAMESPACE_BEGIN

// model: all_reduce_one_hop (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status all_reduce_one_hop(E& e, Span in, char* out) {
  char* slot = nullptr;
  const Peers all{1, e.world()};
  const typename E::Part mine = e.part(in);
  char* const result = out + (mine.ptr - in.ptr);
  if (e.team.lane() == 0) {
    e.sources()[e.rank()] = mine.ptr;
    e.factors()[e.rank()] = e.factor();
  }
  RC_RETURN_IF_FAILED(e.acquire_shared(0, &slot));
  e.ops.copy_shared(e.team, slot, mine.ptr, mine.bytes);  // in one segment
  e.publish_shared(0, mine, false, e.segment_bytes());
  RC_RETURN_IF_FAILED(e.wait_by_lanes(all, [&](int p) {
    return e.arrive(Stream::kShared, p, mine, 0, mine.bytes, &e.sources()[p]);
  }));
  e.ops.reduce(e.team, {result, false, nullptr}, HopSources{e.all_sources()}, mine.bytes,
               e.world());
  e.team.sync();
  e.each_by_lanes(all, [&](int p) {
    e.release(Stream::kShared, p, mine.bytes, mine.bytes);
    e.commit_seen(Stream::kShared, p);
    e.commit_sent(Stream::kShared, p, 1);
  });
  e.team.sync();
  return Status::kOk;
}

// Reduces piece `i` of my chunk and shares the result with every peer. stays: peers read the result
// in place.
// model: reduce_and_share (tests/proof/model/one_shot.pml)
template <class E, class Part = typename E::Part>
RC_TEAM_FN Status reduce_and_share(E& e, const Part& mine, const Part& result, bool stays,
                                   uint32_t i) {
  const uint64_t begin = uint64_t(i) * e.segment_bytes();
  const uint64_t bytes = item_length(mine.bytes, e.segment_bytes(), i);
  RC_RETURN_IF_FAILED(receive_sources(e, mine, begin, bytes));
  char* slot = nullptr;
  RC_RETURN_IF_FAILED(e.acquire_shared(i, &slot));
  char* const own = result.ptr + result.offset(begin);
  const ReduceTarget to = stays ? ReduceTarget{own, true, nullptr} : ReduceTarget{slot, true, own};
  e.ops.reduce(e.team, to, e.all_sources(), bytes, e.world());
  // The sync() in publish_shared() precedes both the releases and the publications.
  e.publish_shared(i, result, stays, e.segment_bytes(),
                   [&](int p) { e.release(e.pairs, p, mine.bytes, begin + bytes); });
  return Status::kOk;
}

// Input and output may be one buffer, without a copy: rank r overwrites its chunk p only with rank
// p's published result, and rank p published it after it had read r's version of that piece.
// model: all_reduce_two_hops (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status all_reduce_two_hops(E& e, const Chunks& in, const Chunks& out) {
  const Peers all{1, e.world()};
  const typename E::Part mine = e.part(in.get(e.rank())), result = e.part(out.get(e.rank()));
  const bool stays = e.zero_copy(result) || e.single_copy(result, kSingleCopyMinResultBytes, true);
  const auto dst_of = [&](int p) { return e.part(out.get(p)); };
  const auto shares = [](int) { return true; };
  const uint32_t out_items = most_items(e, in, -1), shared_items = e.pieces(result.bytes);
  const uint32_t rounds = rounds_of(e, in);
  for (uint32_t j = 0; j < rounds + 2 * kLookahead; ++j) {
    if (j < out_items) RC_RETURN_IF_FAILED(send_chunks(e, in, -1, j));
    if (j >= kLookahead && j - kLookahead < shared_items)
      RC_RETURN_IF_FAILED(reduce_and_share(e, mine, result, stays, j - kLookahead));
    if (j < 2 * kLookahead) continue;
    for (int d = 1; d < e.world(); d += e.group())
      RC_RETURN_IF_FAILED(
          collect_piece(e, {d, d + e.group()}, j - 2 * kLookahead, dst_of, shares, stays));
  }
  e.each_by_lanes(all, [&](int p) {
    e.commit_seen(e.pairs, p);
    e.commit_seen(Stream::kShared, p);
  });
  RC_RETURN_IF_FAILED(drain_chunks(e, in, -1));
  return finish_sharing(e, stays, shared_items);
}

template <class E>
RC_TEAM_FN Status all_reduce_two_shot(E& e, const Chunks& in, char* out, uint64_t one_hop_bytes) {
  const Span whole{in.base, in.total_bytes};
  if (e.world() == 1) {
    const typename E::Part mine = e.part(whole);
    reduce_hop(e, out + (mine.ptr - whole.ptr), nullptr, mine.ptr, mine.bytes, 1);
    e.team.sync();
    return Status::kOk;
  }
  if (whole.bytes <= one_hop_bytes) return all_reduce_one_hop(e, whole, out);
  return all_reduce_two_hops(e, in, Chunks{out, in.total_bytes, in.chunk_bytes, nullptr});
}

template <class E>
RC_TEAM_FN Status all_reduce_ring(E& e, const Chunks& in, char* out) {
  const Chunks result{out, in.total_bytes, in.chunk_bytes, nullptr};
  const Span own = result.get(e.rank());
  RC_RETURN_IF_FAILED(reduce_scatter_ring(e, in, own.ptr));
  return all_gather_ring(e, own, result);
}

RINGCOMM_NAMESPACE_END
