// The second pass of a step: each rank updates its shard, and the new parameters go straight to
// every rank's bucket.
//
//   direct   each rank stores its results in its own bucket and in the peers': W stores of P/W
//   bytes
//            and no read.
//   ring     each rank updates its chunk, then ring all-gather of the parameters.
#pragma once

#include "ringcomm/all_gather.h"
#include "ringcomm/buckets.h"

RINGCOMM_NAMESPACE_BEGIN

// `grad` is my shard's gradient, element 0 of my chunk; Ops' consume() updates.
template <class E>
RC_TEAM_FN void update_slice(E& e, const Bucket& b, const char* grad) {
  const Run slice = slice_of(e, b, e.rank());
  if (e.team.lane() == 0) e.sources()[e.rank()] = grad + slice.begin * uint64_t(b.grad_bytes);
  e.team.sync();
  e.ops.consume(e.team, Gradients{e.sources() + e.rank(), 1}, slice);
}

template <class E>
RC_TEAM_FN Status adamw_all_gather_direct(E& e, Bucket b, const char* grad) {
  b.base = nullptr;
  RC_RETURN_IF_FAILED(offer(e, b, true));
  RC_RETURN_IF_FAILED(accept(e, b, true));
  update_slice(e, b, grad);
  return return_offers(e, b);
}

template <class E>
RC_TEAM_FN Status gather_parameters_ring(E& e, const Bucket& b) {
  e.cut = cut_by_blocks(e.v.layout, b.param_bytes);
  e.team.sync();
  return all_gather_ring(e, b.parameters().get(e.rank()), b.parameters());
}

template <class E>
RC_TEAM_FN Status adamw_all_gather_ring(E& e, const Bucket& b, const char* grad) {
  if (e.team.lane() == 0) e.v.results[e.rank()] = nullptr;
  update_slice(e, b, grad);
  return gather_parameters_ring(e, b);
}

RINGCOMM_NAMESPACE_END
