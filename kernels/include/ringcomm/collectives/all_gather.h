// SPDX-License-Identifier: Apache-2.0

// All-gather (every rank gets all contributions); broadcast (every rank gets one contribution).
//
// B bytes of output, W ranks. Each rank reads (W-1)/W * B bytes from its peers.
//
//   one_shot 1 hop. A rank publishes its contribution once, for all readers: zero copy if it is in
//            the heap (the input, or its place in the output), else through the shared slots.
//   ring     W-1 hops: each rank forwards what it received from its predecessor.
#pragma once

#include "ringcomm/collectives/ring.h"

RINGCOMM_NAMESPACE_BEGIN

// For each sender of the group, copies the j-th part of the sender's data to its place,
// dst_of(sender). peer_reads: peers have just read this place as a source. Skips a sender whose
// data has no j-th part, or for which shares(sender) is false.
// model: collect_piece (tests/proof/model/one_shot.pml)
template <class E, class DstOf, class Shares>
RC_TEAM_FN Status collect_piece(E& e, Peers senders, uint32_t j, DstOf dst_of, Shares shares,
                                bool peer_reads) {
  const uint64_t begin = uint64_t(j) * e.segment_bytes();
  const auto has_piece = [&](int p) {
    return shares(p) && j < e.reads(Stream::kShared, p, dst_of(p).bytes, j > 0);
  };
  RC_RETURN_IF_FAILED(e.wait_by_lanes(senders, [&](int p) {
    if (!has_piece(p)) return Status::kOk;
    const typename E::Part all = dst_of(p);
    return e.arrive(Stream::kShared, p, all, begin, item_length(all.bytes, e.segment_bytes(), j),
                    &e.sources()[p]);
  }));
  for (int d = senders.first; d < senders.last; ++d) {
    const int p = e.peer_at(d);
    if (!has_piece(p)) continue;
    const typename E::Part dst = dst_of(p);
    const uint64_t bytes = e.read_bytes(Stream::kShared, p, dst.bytes, j);
    RC_RETURN_IF_FAILED(
        e.collect(p, dst.ptr + dst.offset(begin), e.stretch(dst, begin, bytes), peer_reads));
  }
  e.team.sync();
  e.each_by_lanes(senders, [&](int p) {
    if (!has_piece(p)) return;
    const uint64_t total = dst_of(p).bytes;
    e.release(Stream::kShared, p, total, begin + e.read_bytes(Stream::kShared, p, total, j));
  });
  return Status::kOk;
}

// Waits for all readers if they read in place (`stays`). Always commits the shared stream's epochs.
// model: finish_sharing (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status finish_sharing(E& e, bool stays, uint32_t items) {
  if (stays)
    RC_RETURN_IF_FAILED(e.wait_by_lanes(
        {1, e.world()}, [&](int p) { return e.drained(Stream::kShared, p, items); }));
  e.each_by_lanes({1, e.world()}, [&](int p) { e.commit_sent(Stream::kShared, p, items); });
  e.team.sync();
  return Status::kOk;
}

// The source that a rank shares, and how the rank shares it.
template <class Part>
struct Sharing {
  Part source;
  bool stays;       // the peers read the source in place; else it is copied into the slots
  bool copy_first;  // the source is my place in the output, which must be filled first
  uint32_t items;   // 0 if this rank shares nothing
};

template <class E, class Part = typename E::Part>
RC_TEAM_FN Sharing<Part> sharing_of(const E& e, const Part& input, const Part& own_output,
                                    bool shares, bool all_share) {
  if (!shares || e.world() == 1) return {input, false, false, 0};
  if (e.zero_copy(input)) return {input, true, false, 1};
  if (input.ptr != own_output.ptr && e.zero_copy(own_output)) return {own_output, true, true, 1};
  if (e.single_copy(input, kSingleCopyMinBytes, all_share)) return {input, true, false, 1};
  return {input, false, false, e.pieces(input.bytes)};
}

// Returns how many pieces my input has: one if peers read it in place while I copy it in one pass.
template <class E, class Part = typename E::Part>
RC_TEAM_FN uint32_t pieces_to_share(const E& e, const Sharing<Part>& sharing, const Part& input) {
  return E::Lanes::kReadsWhole && sharing.stays ? 1 : e.pieces(input.bytes);
}

// Publishes piece `j`, and copies it to its place in my own output.
template <class E, class Part = typename E::Part>
RC_TEAM_FN Status share_piece(E& e, const Sharing<Part>& sharing, const Part& input,
                              const Part& own_output, uint32_t j) {
  const uint64_t begin = uint64_t(j) * e.segment_bytes();
  const uint64_t bytes = pieces_to_share(e, sharing, input) == 1
                             ? input.bytes
                             : item_length(input.bytes, e.segment_bytes(), j);
  if (j < sharing.items) {
    char* slot = nullptr;
    RC_RETURN_IF_FAILED(e.acquire_shared(j, &slot));
    if (!sharing.stays) e.ops.copy_shared(e.team, slot, input.ptr + input.offset(begin), bytes);
    e.publish_shared(j, sharing.source, sharing.stays,
                     sharing.stays ? sharing.source.bytes : e.segment_bytes());
  }
  // The piece is still in the cache from the copy into the slot.
  if (!sharing.copy_first && own_output.ptr != nullptr && own_output.ptr != input.ptr && bytes > 0)
    e.ops.copy_private(e.team, own_output.ptr + own_output.offset(begin),
                       input.ptr + input.offset(begin), e.stretch(input, begin, bytes));
  return Status::kOk;
}

// root < 0: every rank shares `input`; the input of rank p arrives in out.get(p).
// root >= 0: only root shares; of `out` only out.get(root) is used.
// model: share_one_shot (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status share_one_shot(E& e, Span whole_input, const Chunks& out, int root) {
  const bool i_share = root < 0 || root == e.rank();
  using Part = typename E::Part;
  const Part input = e.part(whole_input),
             own = i_share ? e.part(out.get(e.rank())) : Part{{nullptr, 0}};
  const Sharing<Part> sharing = sharing_of(e, input, own, i_share, root < 0);
  const auto shares = [&](int p) { return root < 0 || root == p; };
  const auto dst_of = [&](int p) { return e.part(out.get(p)); };
  const auto bytes_of = [&](int p) { return dst_of(p).bytes; };
  const uint32_t out_pieces = i_share ? pieces_to_share(e, sharing, input) : 0;
  if (sharing.copy_first) e.ops.copy_shared(e.team, own.ptr, input.ptr, input.first(input.bytes));

  uint32_t in_reads = e.most_reads(Stream::kShared, false, shares, bytes_of);
  for (uint32_t j = 0; j < out_pieces || j < in_reads + kLookahead; ++j) {
    if (j < out_pieces) RC_RETURN_IF_FAILED(share_piece(e, sharing, input, own, j));
    if (j < kLookahead || j - kLookahead >= in_reads) continue;
    for (int d = 1; d < e.world(); d += e.group())
      RC_RETURN_IF_FAILED(
          collect_piece(e, {d, d + e.group()}, j - kLookahead, dst_of, shares, false));
    if (j == kLookahead) in_reads = e.most_reads(Stream::kShared, true, shares, bytes_of);
  }
  e.each_by_lanes({1, e.world()}, [&](int p) {
    if (shares(p)) e.commit_seen(Stream::kShared, p);
  });
  return finish_sharing(e, sharing.stays, sharing.items);
}

// model: all_gather_ring (tests/proof/model/ring.pml)
template <class E>
RC_TEAM_FN Status all_gather_ring(E& e, Span whole_input, const Chunks& out) {
  const int world = e.world(), position = e.v.position_in_ring();
  const Neighbours at = neighbours(e.v);
  const uint64_t segment = e.segment_bytes();
  const typename E::Part input = e.part(whole_input), own = e.part(out.get(e.rank()));
  if (own.ptr != input.ptr)
    e.ops.copy_private(e.team, own.ptr, input.ptr, input.first(input.bytes));
  e.team.sync();
  if (world == 1) return Status::kOk;
  const uint32_t rounds = rounds_of(e, out), hops = world - 1, items = rounds * hops;
  const uint64_t stream_bytes = uint64_t(items) * segment;
  if (e.team.lane() == 0) e.receive_anew(e.pairs, at.prev);
  e.team.sync();
  for (uint32_t j = 0; j < rounds; ++j) {
    for (uint32_t t = 0; t <= hops; ++t) {
      const int owner = e.v.ring_rank(ring_gather_chunk(position, t, world));
      const typename E::Part chunk = e.part(out.get(owner));
      const uint64_t begin = uint64_t(j) * segment, bytes = item_length(chunk.bytes, segment, j);
      const uint32_t item = j * hops + t;
      const char* data = input.ptr + input.offset(begin);
      char* slot = nullptr;
      if (t > 0) {
        RC_RETURN_IF_FAILED(
            e.receive(e.pairs, at.prev, stream_bytes, uint64_t(item - 1) * segment, segment));
        data = e.received(at.prev);
      }
      if (t < hops) {
        RC_RETURN_IF_FAILED(ring_slot(e, at.next, item, stream_bytes, &slot));
        e.ops.copy_shared(e.team, slot, data, bytes);
        e.publish_item(at.next, item);
      }
      if (t == 0) continue;
      e.ops.copy_private(e.team, chunk.ptr + chunk.offset(begin), data, bytes);
      e.team.sync();
      if (e.team.lane() == 0) e.release(e.pairs, at.prev, stream_bytes, uint64_t(item) * segment);
    }
  }
  commit_ring(e, at, items);
  return Status::kOk;
}

RINGCOMM_NAMESPACE_END
