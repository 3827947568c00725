// SPDX-License-Identifier: Apache-2.0

// The optimizer's steps over buckets of gradients and parameters, as collectives.
//
// A step takes two passes if it must know the gradients' norm, or whether all of them are finite,
// before it changes anything; otherwise one pass. Below: B bytes of gradients, P bytes of
// parameters, W ranks.
//
// reduce_scatter_norm: reduces gradients into FP32 shards and computes the norm of the result.
//
// - one-shot: 1 hop, as reduce_scatter_one_shot; sums in rank order and keeps the sum in FP32.
// - ring: W-1 hops, as reduce_scatter_ring, with partial sums in the gradients' type; the last
//   hop's sum stays in FP32.
//
// adamw_all_gather: each rank updates its shard and stores the new parameters in all ranks'
// buckets.
//
// - one-shot: each rank stores its results in its own bucket and in the peers': W stores of P/W
//   bytes, no reads.
// - ring: each rank updates its chunk; then a ring all-gather of the parameters.
//
// reduce_scatter_adamw_all_gather: a whole step in one pass. The update consumes the reduced
// gradient at once, and the gradient is never stored. The arithmetic and the bits are those of the
// two passes.
//
// - one-shot: each rank reads its chunk of all ranks' gradients, updates, and stores the parameters
//   in all ranks' buckets. 2 synchronizations; each rank reads (W-1)/W * B bytes from peers and
//   stores (W-1)/W * P bytes to peers. Three separate calls move as much between ranks, and also
//   write and read a gradient shard of 4 bytes per element.
// - ring: partial sums travel around the ring; the owner's last hop updates; ring all-gather.
//
// The steps differ in the Ops' consume(): it stores the sum and adds to the norm (grad_norm.h), or
// it updates.
#pragma once

#include "ringcomm/collectives/all_gather.h"
#include "ringcomm/collectives/reduce_scatter.h"
#include "ringcomm/optimizer/buckets.h"

RINGCOMM_NAMESPACE_BEGIN

template <class E>
RC_TEAM_FN Status reduce_scatter_norm_one_shot(E& e, const Bucket& b) {
  RC_RETURN_IF_FAILED(offer(e, b, false));
  RC_RETURN_IF_FAILED(accept(e, b, false));
  e.ops.consume(e.team, Gradients{e.sources(), e.world()}, slice_of(e, b, e.rank()));
  return return_offers(e, b);
}

// e.ops.reduce() must pass the sums of the last hop to consume(). Sets e.cut, by which channels
// share a chunk in whole tiles.
template <class E>
RC_TEAM_FN Status reduce_scatter_norm_ring(E& e, const Bucket& b) {
  e.cut = cut_by_tiles(b.grad_bytes);
  // The last hop stores nothing: from its target, reduce() only computes the hop's first element.
  return reduce_scatter_ring(e, b.grads(), b.grads().get(e.rank()).ptr);
}

// Makes the gradient of my chunk, which begins at `grad`, the only source that consume() gets.
template <class E>
RC_TEAM_FN Gradients own_gradients(E& e, const Bucket& b, const char* grad) {
  const uint64_t begin = slice_of(e, b, e.rank()).begin;
  if (e.team.lane() == 0) e.sources()[0] = grad + begin * uint64_t(b.grad_bytes);
  e.team.sync();
  return {e.sources(), 1};
}

// Runs a one-shot step up to its update, whose gradients are then at e.sources(). `grad`: the only
// source if the bucket has no gradients (see own_gradients()). `grad` is read last, and by
// reference: a GPU has it in shared memory, so no register keeps it while the lanes wait for peers.
template <class E>
RC_TEAM_FN Status begin_step_one_shot(E& e, const Bucket& b, const char* const& grad) {
  RC_RETURN_IF_FAILED(offer(e, b, true));
  RC_RETURN_IF_FAILED(accept(e, b, true));
  if (b.base == nullptr) own_gradients(e, b, grad);
  return Status::kOk;
}

template <class E>
RC_TEAM_FN Status step_one_shot(E& e, const Bucket& b, const char* grad) {
  RC_RETURN_IF_FAILED(begin_step_one_shot(e, b, grad));
  const Gradients from{e.sources(), grad != nullptr ? 1 : e.world()};
  e.ops.consume(e.team, from, slice_of(e, b, e.rank()));
  return return_offers(e, b);
}

template <class E>
RC_TEAM_FN Status adamw_all_gather_one_shot(E& e, Bucket b, const char* grad) {
  b.base = nullptr;
  return step_one_shot(e, b, grad);
}

template <class E>
RC_TEAM_FN Status gather_parameters_ring(E& e, const Bucket& b) {
  e.cut = cut_by_tiles(b.param_bytes);
  e.team.sync();
  return all_gather_ring(e, b.parameters().get(e.rank()), b.parameters());
}

template <class E>
RC_TEAM_FN Status adamw_all_gather_ring(E& e, const Bucket& b, const char* grad) {
  if (e.team.lane() == 0) e.v.results[e.rank()] = nullptr;
  e.ops.consume(e.team, own_gradients(e, b, grad), slice_of(e, b, e.rank()));
  return gather_parameters_ring(e, b);
}

template <class E>
RC_TEAM_FN Status reduce_scatter_adamw_all_gather_one_shot(E& e, const Bucket& b) {
  return step_one_shot(e, b, nullptr);
}

template <class E>
RC_TEAM_FN Status reduce_scatter_adamw_all_gather_ring(E& e, const Bucket& b) {
  if (e.team.lane() == 0) e.v.results[e.rank()] = nullptr;
  e.team.sync();
  RC_RETURN_IF_FAILED(reduce_scatter_norm_ring(e, b));
  return gather_parameters_ring(e, b);
}

RINGCOMM_NAMESPACE_END
