// All-gather (every rank's contribution to every rank) and broadcast (one rank's to every rank).
//
// B bytes of output, W ranks. Each rank reads (W-1)/W * B bytes from its peers.
//
//   direct   1 hop. The contribution is published once, for all readers: zero copy where it lies in
//            the heap (the input, or its place in the output), else through the shared slots.
//   ring     W-1 hops: each rank forwards what it received from its predecessor.
#pragma once

#include "ringcomm/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN

// Copies piece `j` of what `sender` shares to its place in `dst`; peer_reads: that place was a
// peer's source a moment ago.
template <class E>
Status collect_piece(E& e, int sender, Span dst, uint32_t j, bool peer_reads) {
  const uint64_t begin = uint64_t(j) * e.segment_bytes();
  const uint64_t bytes = item_length(dst.bytes, e.segment_bytes(), j);
  const char* data = nullptr;
  RC_RETURN_IF_FAILED(e.receive(Stream::kShared, sender, dst.bytes, begin, bytes, &data));
  if (peer_reads)
    e.ops.copy_shared(e.team, dst.ptr + begin, data, bytes);
  else
    e.ops.copy_private(e.team, dst.ptr + begin, data, bytes);
  e.team.sync();
  e.release(Stream::kShared, sender, dst.bytes, begin + bytes);
  return Status::kOk;
}

// Zero copy: waits for all readers. Always: commits the epochs of the shared stream.
template <class E>
Status finish_sharing(E& e, bool zero_copy, uint32_t items) {
  for (int d = 1; d < e.world(); ++d) {
    if (zero_copy) RC_RETURN_IF_FAILED(e.drain(Stream::kShared, e.peer_at(d), items));
  }
  for (int d = 1; d < e.world(); ++d) e.commit_sent(Stream::kShared, e.peer_at(d), items);
  return Status::kOk;
}

// What a rank shares, and how.
struct Sharing {
  Span source;  // read by the peers (zero copy) or copied into the slots
  bool zero_copy;
  bool copy_first;  // the source is my place in the output, which must be filled before
  uint32_t items;   // 0 when this rank shares nothing
};

template <class E>
Sharing plan_sharing(const E& e, Span input, Span own_output, bool shares) {
  if (!shares || e.world() == 1) return {input, false, false, 0};
  if (e.zero_copy(input)) return {input, true, false, 1};
  if (input.ptr != own_output.ptr && e.zero_copy(own_output)) return {own_output, true, true, 1};
  return {input, false, false, e.pieces(input.bytes)};
}

// Publishes piece `j`, and puts it in its place in my own output.
template <class E>
Status share_piece(E& e, const Sharing& plan, Span input, Span own_output, uint32_t j) {
  const uint64_t begin = uint64_t(j) * e.segment_bytes();
  const uint64_t bytes = item_length(input.bytes, e.segment_bytes(), j);
  if (j < plan.items) {
    char* slot = nullptr;
    RC_RETURN_IF_FAILED(e.acquire_shared(j, &slot));
    if (!plan.zero_copy) e.ops.copy_shared(e.team, slot, input.ptr + begin, bytes);
    const uint64_t item_bytes = plan.zero_copy ? plan.source.bytes : e.segment_bytes();
    e.publish_shared(j, slot, e.header(plan.source, plan.zero_copy, item_bytes));
  }
  // The piece is still in the cache from the copy into the slot.
  if (!plan.copy_first && own_output.ptr != nullptr && own_output.ptr != input.ptr && bytes > 0)
    e.ops.copy_private(e.team, own_output.ptr + begin, input.ptr + begin, bytes);
  return Status::kOk;
}

// root < 0: every rank shares `input`; rank p's lands in out.get(p).
// root >= 0: only root shares; `out` is read at root's index alone.
template <class E>
Status share_direct(E& e, Span whole_input, const Chunks& out, int root) {
  const bool shares = root < 0 || root == e.rank();
  const Span input = e.slice(whole_input),
             own = shares ? e.slice(out.get(e.rank())) : Span{nullptr, 0};
  const Sharing plan = plan_sharing(e, input, own, shares);
  uint32_t rounds = shares ? e.pieces(input.bytes) : 0;
  for (int p = 0; p < e.world(); ++p) {
    if (p == e.rank() || (root >= 0 && root != p)) continue;
    const uint32_t pieces = e.pieces(e.slice(out.get(p)).bytes);
    rounds = pieces > rounds ? pieces : rounds;
    e.begin_receive(Stream::kShared, p);
  }
  e.team.sync();
  if (plan.copy_first) e.ops.copy_shared(e.team, own.ptr, input.ptr, input.bytes);

  for (uint32_t j = 0; j < rounds + kLookahead; ++j) {
    if (shares && j < e.pieces(input.bytes))
      RC_RETURN_IF_FAILED(share_piece(e, plan, input, own, j));
    if (j < kLookahead) continue;
    for (int d = 1; d < e.world(); ++d) {
      const int p = e.peer_at(d);
      if (root >= 0 && root != p) continue;
      const Span dst = e.slice(out.get(p));
      if (j - kLookahead < e.pieces(dst.bytes))
        RC_RETURN_IF_FAILED(collect_piece(e, p, dst, j - kLookahead, false));
    }
  }
  for (int d = 1; d < e.world(); ++d) {
    const int p = e.peer_at(d);
    if (root < 0 || root == p) e.commit_seen(Stream::kShared, p);
  }
  return finish_sharing(e, plan.zero_copy, plan.items);
}

template <class E>
Status all_gather_ring(E& e, Span whole_input, const Chunks& out) {
  const int world = e.world(), next = ring_next(e.rank(), world), prev = ring_prev(e.rank(), world);
  const uint64_t segment = e.segment_bytes();
  const Span input = e.slice(whole_input), own = e.slice(out.get(e.rank()));
  if (own.ptr != input.ptr) e.ops.copy_private(e.team, own.ptr, input.ptr, input.bytes);
  e.team.sync();
  if (world == 1) return Status::kOk;
  const uint32_t rounds = e.pieces(e.slice(out.get(0)).bytes), hops = world - 1,
                 items = rounds * hops;
  const uint64_t stream_bytes = uint64_t(items) * segment;
  e.begin_receive(Stream::kPair, prev);
  e.team.sync();
  for (uint32_t j = 0; j < rounds; ++j) {
    for (uint32_t t = 0; t <= hops; ++t) {
      const Span chunk = e.slice(out.get(ring_gather_chunk(e.rank(), t, world)));
      const uint64_t begin = uint64_t(j) * segment, bytes = item_length(chunk.bytes, segment, j);
      const uint32_t item = j * hops + t;
      const char* data = input.ptr + begin;
      if (t > 0)
        RC_RETURN_IF_FAILED(e.receive(Stream::kPair, prev, stream_bytes,
                                      uint64_t(item - 1) * segment, segment, &data));
      if (t < hops) {
        RC_RETURN_IF_FAILED(e.await_slot(Stream::kPair, next, item));
        char* slot = e.my_slot(Stream::kPair, next, item);
        if (item == 0 && e.team.lane() == 0)
          *reinterpret_cast<CallHeader*>(slot) =
              e.header(Span{nullptr, stream_bytes}, false, segment);
        e.ops.copy_shared(e.team, slot + kHeaderBytes, data, bytes);
        e.publish_item(Stream::kPair, next, item);
      }
      if (t == 0) continue;
      e.ops.copy_private(e.team, chunk.ptr + begin, data, bytes);
      e.team.sync();
      e.release(Stream::kPair, prev, stream_bytes, uint64_t(item) * segment);
    }
  }
  e.commit_seen(Stream::kPair, prev);
  e.commit_sent(Stream::kPair, next, items);
  return Status::kOk;
}

RINGCOMM_NAMESPACE_END
