// SPDX-License-Identifier: Apache-2.0

// The parts that the optimizer's collectives share. They work on buckets (adamw.h) in the heap, so
// every rank reads its chunk of the peers' gradients in place, and stores its new parameters into
// its own bucket and into the peers' buckets.
//
//   offer    one item to each peer: "my gradients of your chunk are here, and you may store your
//            results there". It also permits the stores: a rank that has offered no longer reads
//            the parameters that its peers will now replace.
//   return   the acknowledgement of an offer, after all reads and stores: "your gradients are
//            yours again, and my chunk of your parameters is new". A rank is done when all its
//            offers have been returned, so no barrier ends the call.
//
// 2 hops of words; W ranks, B bytes of gradients and P bytes of parameters: each rank reads
// (W-1)/W * B bytes of its peers' memory, and stores (W-1)/W * P bytes there. Nothing is staged.
//
// The Ops of these collectives have, in addition to those of endpoint.h:
//   void consume(Team&, const Gradients&, Run)   with all lanes: processes the gradients of a run
//                                                of my chunk
#pragma once

#include "ringcomm/collectives/ring.h"
#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN

// A range of elements of a chunk.
struct Run {
  uint64_t begin, end;
};

// The gradients of a run: its element `begin` is at ptrs[s], for each source s in [0, count).
struct Gradients {
  const void* const* ptrs;
  int count;
};

struct Bucket {
  char* base;  // address of the gradients; null: this call exchanges no gradients
  char* params;
  uint64_t elems, chunk_elems;
  int32_t grad_bytes, param_bytes;  // bytes per element

  static RC_FN Bucket of(char* base, char* params, uint64_t elems, int32_t grad_bytes,
                         int32_t param_bytes, int world) {
    const uint64_t share = (elems + uint64_t(world) - 1) / uint64_t(world);
    const uint64_t chunk = (share + kTileElems - 1) / kTileElems * kTileElems;
    return {base, params, elems, chunk, grad_bytes, param_bytes};
  }
  RC_FN Run chunk(int rank) const {
    const uint64_t begin = uint64_t(rank) * chunk_elems;
    if (begin >= elems) return {elems, elems};
    return {begin, elems - begin < chunk_elems ? elems : begin + chunk_elems};
  }
  RC_FN Chunks grads() const {
    return {base, elems * uint64_t(grad_bytes), chunk_elems * uint64_t(grad_bytes), nullptr};
  }
  RC_FN Chunks parameters() const {
    return {params, elems * uint64_t(param_bytes), chunk_elems * uint64_t(param_bytes), nullptr};
  }
};

// Returns the Cut by which channels share a chunk of gradients or parameters in whole tiles.
// Elements have 2 or 4 bytes, and segments are powers of two that contain whole tiles.
RC_FN Cut cut_by_tiles(int32_t elem_bytes) {
  return {kTileShift + (elem_bytes == 2 ? 1 : 2), 0, true};
}

template <class E>
RC_TEAM_FN Run slice_of(const E& e, const Bucket& b, int rank) {
  const Run chunk = b.chunk(rank);
  const Extent extent = extent_of(chunk.end - chunk.begin, e.team.portion(), kTileShift);
  return {extent.begin_bytes, extent.end_bytes};
}

template <class E>
RC_TEAM_FN Span grads_of(const E& e, const Bucket& b, int rank) {
  const Run slice = slice_of(e, b, rank);
  if (b.base == nullptr) return {nullptr, 0};
  return {b.base + (b.chunk(rank).begin + slice.begin) * uint64_t(b.grad_bytes),
          (slice.end - slice.begin) * uint64_t(b.grad_bytes)};
}

template <class E>
RC_TEAM_FN Status offer(E& e, const Bucket& b, bool results) {
  const Peers all{1, e.world()};
  RC_RETURN_IF_FAILED(e.wait_by_lanes(all, [&](int reader) {
    RC_RETURN_IF_FAILED(e.slot_is_free(e.pairs, reader, 0));
    const Span span = grads_of(e, b, reader);
    const bool in_heap = span.ptr != nullptr;
    e.write_header(e.pairs, reader, span, in_heap,
                   in_heap ? whole_item(span.bytes) : e.segment_bytes(),
                   results ? e.heap_offset(b.params) : kNotInHeap);
    return Status::kOk;
  }));
  e.each_by_lanes(
      all, [&](int reader) { publish(e.team, e.v, e.pairs, reader, e.sent(e.pairs, reader) + 1); });
  return Status::kOk;
}

// Waits for all offers. Afterwards sources()[rank] is the address of the rank's version of my
// slice, and results[rank] the address of its bucket of parameters.
template <class E>
RC_TEAM_FN Status accept(E& e, const Bucket& b, bool results) {
  if (results) e.stores = {b.elems * uint64_t(b.param_bytes)};
  const Span mine = grads_of(e, b, e.rank());
  const Peers all{1, e.world()};
  if (e.team.lane() == 0) {
    e.sources()[e.rank()] = mine.ptr;
    e.v.results[e.rank()] = nullptr;
  }
  e.team.sync();
  return e.wait_by_lanes(
      all, [&](int p) { return e.arrive(e.pairs, p, {mine}, 0, mine.bytes, &e.sources()[p]); });
}

// Called once all lanes have read the peers' gradients and stored into the peers' buckets: returns
// the peers' offers, and waits until the peers have returned mine.
template <class E>
RC_TEAM_FN Status return_offers(E& e, const Bucket& b) {
  const uint64_t bytes = grads_of(e, b, e.rank()).bytes;
  const Peers all{1, e.world()};
  e.team.sync();
  e.each_by_lanes(all, [&](int p) {
    e.release(e.pairs, p, bytes, bytes);
    e.commit_seen(e.pairs, p);
  });
  return e.wait_by_lanes(all, [&](int p) {
    RC_RETURN_IF_FAILED(e.drained(e.pairs, p, 1));
    e.commit_sent(e.pairs, p, 1);
    return Status::kOk;
  });
}

RINGCOMM_NAMESPACE_END
