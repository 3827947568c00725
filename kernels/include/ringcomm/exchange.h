// Exchange: each rank has something of its own for each peer. All-to-all, gather (every rank to
// root), scatter (root to every rank) and barrier (nothing but headers, all to all) are exchanges.
//
// 1 hop; each rank sends and reads exactly the bytes that the peers are owed. Zero copy from the
// heap.
#pragma once

#include "ringcomm/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN

// Which ordered pairs of ranks talk.
struct Edges {
  int only_reader;  // gather: root; else -1
  int only_sender;  // scatter: root; else -1

  RC_FN bool has(int sender, int reader) const {
    return (only_reader < 0 || only_reader == reader) && (only_sender < 0 || only_sender == sender);
  }
};

template <class E>
Status take_piece(E& e, int sender, Span dst, uint32_t j) {
  const uint64_t begin = uint64_t(j) * e.segment_bytes();
  const uint64_t bytes = item_length(dst.bytes, e.segment_bytes(), j);
  const char* data = nullptr;
  RC_RETURN_IF_FAILED(e.receive(Stream::kPair, sender, dst.bytes, begin, bytes, &data));
  e.ops.copy_private(e.team, dst.ptr + begin, data, bytes);
  e.team.sync();
  e.release(Stream::kPair, sender, dst.bytes, begin + bytes);
  return Status::kOk;
}

template <class E>
Status finish_exchange(E& e, const Chunks& out_of, const Edges& edges) {
  for (int d = 1; d < e.world(); ++d) {
    const int p = e.peer_at(d);
    if (edges.has(p, e.rank())) e.commit_seen(Stream::kPair, p);
  }
  for (int d = 1; d < e.world(); ++d) {
    const int r = e.peer_at(d);
    if (!edges.has(e.rank(), r)) continue;
    const Span span = e.slice(out_of.get(r));
    if (e.zero_copy(span)) RC_RETURN_IF_FAILED(e.drain(Stream::kPair, r, 1));
    e.commit_sent(Stream::kPair, r, e.items(span));
  }
  return Status::kOk;
}

// send.get(r) goes to rank r, receive.get(p) is filled from rank p.
template <class E>
Status exchange_direct(E& e, const Chunks& send, const Chunks& receive, const Edges& edges) {
  const int me = e.rank();
  uint32_t rounds = 0;
  for (int p = 0; p < e.world(); ++p) {
    if (p == me) continue;
    uint32_t out_items = 0, in_pieces = 0;
    if (edges.has(me, p)) out_items = e.items(e.slice(send.get(p)));
    if (edges.has(p, me)) {
      in_pieces = e.pieces(e.slice(receive.get(p)).bytes);
      e.begin_receive(Stream::kPair, p);
    }
    rounds = out_items > rounds ? out_items : rounds;
    rounds = in_pieces > rounds ? in_pieces : rounds;
  }
  e.team.sync();
  for (uint32_t j = 0; j < rounds + kLookahead; ++j) {
    for (int d = 1; d < e.world(); ++d) {
      const int r = e.peer_at(d);
      if (!edges.has(me, r)) continue;
      const Span span = e.slice(send.get(r));
      if (j < e.items(span)) RC_RETURN_IF_FAILED(e.send(r, span, j));
    }
    if (j < kLookahead) continue;
    for (int d = 1; d < e.world(); ++d) {
      const int p = e.peer_at(d);
      if (!edges.has(p, me)) continue;
      const Span dst = e.slice(receive.get(p));
      if (j - kLookahead < e.pieces(dst.bytes))
        RC_RETURN_IF_FAILED(take_piece(e, p, dst, j - kLookahead));
    }
  }
  if (edges.has(me, me)) {
    const Span from = e.slice(send.get(me)), to = e.slice(receive.get(me));
    if (from.ptr != to.ptr && from.bytes > 0)
      e.ops.copy_private(e.team, to.ptr, from.ptr, from.bytes);
  }
  return finish_exchange(e, send, edges);
}

RINGCOMM_NAMESPACE_END
