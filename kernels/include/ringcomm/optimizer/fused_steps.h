// The steps that an optimizer takes over buckets, as collectives.
//
// A step is two passes when it must know the norm of the gradients, or whether all are finite,
// before it changes anything, and one pass otherwise. B bytes of gradients, P bytes of parameters,
// W ranks.
//
// reduce_scatter_norm: gradients into FP32 shards, with the norm of the result on the way out.
//
// - one-shot: 1 hop, as reduce_scatter_one_shot: the sum in rank order in FP32, not rounded again.
// - ring: W-1 hops, as reduce_scatter_ring, with partial sums in the gradients' type; the sum of
//   the last hop stays in FP32.
//
// adamw_all_gather: each rank updates its shard, and the new parameters go straight to every rank's
// bucket.
//
// - one-shot: each rank stores its results in its own bucket and in the peers': W stores of P/W
//   bytes and no read.
// - ring: each rank updates its chunk, then ring all-gather of the parameters.
//
// reduce_scatter_adamw_all_gather: a whole step in one pass. The reduced gradient is consumed by
// the update as it comes into being, and never stored. The arithmetic is that of the two passes:
// the same bits.
//
// - one-shot: each rank reads its chunk of all ranks' gradients, updates, and stores the parameters
//   in all ranks' buckets. 2 hops of words; (W-1)/W * B bytes are read and (W-1)/W * P bytes stored
//   in peers' memory. Three calls in its place move as much between ranks, and also write and read
//   a gradient shard of 4 bytes per element.
// - ring: partial sums go around the ring; the owner's last hop updates; ring all-gather.
//
// They differ in the Ops' consume(): it stores the sum and adds its norm (grad_norm.h), or it
// updates.
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

// Ops whose reduce() hands the last hop's sums to consume(). `e` keeps the cut of the gradients.
template <class E>
RC_TEAM_FN Status reduce_scatter_norm_ring(E& e, const Bucket& b) {
  e.cut = cut_by_tiles(b.grad_bytes);
  // The last hop stores nothing there: where it would store says which elements it has.
  return reduce_scatter_ring(e, b.grads(), b.grads().get(e.rank()).ptr);
}

// Makes `grad`, my shard's gradient and element 0 of my chunk, what consume() takes.
template <class E>
RC_TEAM_FN Gradients own_gradients(E& e, const Bucket& b, const char* grad) {
  const uint64_t begin = slice_of(e, b, e.rank()).begin;
  if (e.team.lane() == 0) e.sources()[0] = grad + begin * uint64_t(b.grad_bytes);
  e.team.sync();
  return {e.sources(), 1};
}

// A one-shot step before the update, whose gradients are then at e.sources(). `grad`: see
// own_gradients(), where the bucket has no gradients; null: all ranks' gradients.
template <class E>
RC_TEAM_FN Status begin_step_one_shot(E& e, const Bucket& b, const char* grad) {
  RC_RETURN_IF_FAILED(offer(e, b, true));
  RC_RETURN_IF_FAILED(accept(e, b, true));
  if (grad != nullptr) own_gradients(e, b, grad);
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
