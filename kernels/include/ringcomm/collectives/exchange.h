// SPDX-License-Identifier: Apache-2.0

// Exchange: each rank has different data for each peer. All-to-all, gather (every rank to root),
// scatter (root to every rank) and barrier (headers only, all to all) are exchanges.
//
// 1 hop; each rank sends and reads exactly the bytes of its pairs. Zero copy from the heap.
#pragma once

#include "ringcomm/protocol/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN

// The ordered pairs of ranks that communicate. Collectives: all pairs, or the pairs of a root.
// Messages: the pairs that this rank names, one bit per peer.
struct Edges {
  int only_reader = -1;  // gather: root
  int only_sender = -1;  // scatter: root
  uint64_t my_readers = ~uint64_t(0), my_senders = ~uint64_t(0);

  RC_FN bool sends(int me, int reader) const {
    return (only_reader < 0 || only_reader == reader) && (only_sender < 0 || only_sender == me) &&
           ((my_readers >> (reader & 63)) & 1) != 0;
  }
  RC_FN bool receives(int me, int sender) const {
    return (only_reader < 0 || only_reader == me) && (only_sender < 0 || only_sender == sender) &&
           ((my_senders >> (sender & 63)) & 1) != 0;
  }
};

// For each sender of the group, copies the j-th part (read `j`) of the sender's data to its place.
// model: take_piece (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status take_piece(E& e, Peers senders, const Chunks& receive, const Edges& edges,
                             uint32_t j) {
  const uint64_t begin = uint64_t(j) * e.segment_bytes();
  const auto dst_of = [&](int p) { return e.part(receive.get(p)); };
  const auto has_piece = [&](int p) {
    return edges.receives(e.rank(), p) && j < e.reads(e.pairs, p, dst_of(p).bytes, j > 0);
  };
  RC_RETURN_IF_FAILED(e.wait_by_lanes(senders, [&](int p) {
    if (!has_piece(p)) return Status::kOk;
    const typename E::Part all = dst_of(p);
    return e.arrive(e.pairs, p, all, begin, item_length(all.bytes, e.segment_bytes(), j),
                    &e.sources()[p]);
  }));
  for (int d = senders.first; d < senders.last; ++d) {
    const int p = e.peer_at(d);
    if (!has_piece(p)) continue;
    const typename E::Part dst = dst_of(p);
    e.ops.copy_private(e.team, dst.ptr + dst.offset(begin), e.received(p),
                       e.stretch(dst, begin, e.read_bytes(e.pairs, p, dst.bytes, j)));
  }
  e.team.sync();
  e.each_by_lanes(senders, [&](int p) {
    if (!has_piece(p)) return;
    const uint64_t total = dst_of(p).bytes;
    e.release(e.pairs, p, total, begin + e.read_bytes(e.pairs, p, total, j));
  });
  return Status::kOk;
}

// model: finish_exchange (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status finish_exchange(E& e, const Chunks& out_of, const Edges& edges) {
  e.each_by_lanes({1, e.world()}, [&](int p) {
    if (edges.receives(e.rank(), p)) e.commit_seen(e.pairs, p);
  });
  return e.wait_by_lanes({1, e.world()}, [&](int r) {
    if (!edges.sends(e.rank(), r)) return Status::kOk;
    const typename E::Part span = e.part(out_of.get(r));
    if (e.zero_copy(span)) RC_RETURN_IF_FAILED(e.drained(e.pairs, r, 1));
    e.commit_sent(e.pairs, r, e.items(span));
    return Status::kOk;
  });
}

// send.get(r) goes to rank r; receive.get(p) is filled by rank p.
// model: exchange_one_shot (tests/proof/model/one_shot.pml)
template <class E>
RC_TEAM_FN Status exchange_one_shot(E& e, const Chunks& send, const Chunks& receive,
                                    const Edges& edges) {
  const int me = e.rank();
  uint32_t out_items = 0;
  RC_ROLLED
  for (int d = 1; d < e.world(); ++d) {
    const int p = e.peer_at(d);
    const uint32_t items = edges.sends(me, p) ? e.items(e.part(send.get(p))) : 0;
    out_items = items > out_items ? items : out_items;
  }
  const auto takes = [&](int p) { return edges.receives(me, p); };
  const auto bytes_of = [&](int p) { return e.part(receive.get(p)).bytes; };
  const auto span_for = [&](int r) { return e.part(send.get(r)); };
  uint32_t in_reads = e.most_reads(e.pairs, false, takes, bytes_of);
  for (uint32_t j = 0; j < out_items || j < in_reads + kLookahead; ++j) {
    const auto gets_item = [&](int r) { return edges.sends(me, r) && j < e.items(span_for(r)); };
    for (int d = 1; d < e.world() && j < out_items; d += e.group())
      RC_RETURN_IF_FAILED(e.send({d, d + e.group()}, j, span_for, gets_item));
    if (j < kLookahead || j - kLookahead >= in_reads) continue;
    for (int d = 1; d < e.world(); d += e.group())
      RC_RETURN_IF_FAILED(take_piece(e, {d, d + e.group()}, receive, edges, j - kLookahead));
    if (j == kLookahead) in_reads = e.most_reads(e.pairs, true, takes, bytes_of);
  }
  if (edges.sends(me, me) && edges.receives(me, me)) {
    const typename E::Part from = e.part(send.get(me)), to = e.part(receive.get(me));
    if (from.ptr != to.ptr && from.bytes > 0)
      e.ops.copy_private(e.team, to.ptr, from.ptr, from.first(from.bytes));
  }
  return finish_exchange(e, send, edges);
}

RINGCOMM_NAMESPACE_END
