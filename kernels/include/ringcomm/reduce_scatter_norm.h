// Reduce-scatter of gradients into FP32 shards, with the norm of the result on the way out: the
// first of the two passes that a step takes when it must know the norm, or whether all gradients
// are finite, before it changes anything.
//
//   direct   1 hop, as reduce_scatter_direct: the sum in rank order in FP32, and not rounded again.
//   ring     W-1 hops, as reduce_scatter_ring, with partial sums in the gradients' type; the last
//            hop's sum stays in FP32.
//
// What the Ops' consume() does is the difference between this collective and those that update:
// it stores the sum and adds its norm (grad_norm.h).
#pragma once

#include "ringcomm/buckets.h"
#include "ringcomm/reduce_scatter.h"

RINGCOMM_NAMESPACE_BEGIN

template <class E>
RC_TEAM_FN Status reduce_scatter_norm_direct(E& e, const Bucket& b) {
  RC_RETURN_IF_FAILED(offer(e, b, false));
  RC_RETURN_IF_FAILED(accept(e, b, false));
  e.ops.consume(e.team, Gradients{e.sources(), e.world()}, slice_of(e, b, e.rank()));
  return return_offers(e, b);
}

// Ops whose reduce() hands the last hop's sums to consume(). `e` keeps the cut of the gradients.
template <class E>
RC_TEAM_FN Status reduce_scatter_norm_ring(E& e, const Bucket& b) {
  e.cut = cut_by_blocks(e.v.layout, b.grad_bytes);
  // The last hop stores nothing there: where it would store says which elements it has.
  return reduce_scatter_ring(e, b.grads(), b.grads().get(e.rank()).ptr);
}

RINGCOMM_NAMESPACE_END
