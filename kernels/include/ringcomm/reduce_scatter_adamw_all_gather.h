// A whole step in one pass: the reduced gradient is consumed by the update as it comes into being,
// and never stored.
//
//   direct   each rank reads its chunk of all ranks' gradients, updates, and stores the parameters
//            in all ranks' buckets. 2 hops of words; (W-1)/W * B bytes read and (W-1)/W * P stored
//            in peers' memory. Three calls in its place move as much between ranks, and write and
//            read a gradient shard of 4 bytes per element on top.
//   ring     partial sums go around the ring; the owner's last hop updates; ring all-gather.
//
// The arithmetic is that of reduce_scatter_norm, then adamw_all_gather: the same bits.
#pragma once

#include "ringcomm/adamw_all_gather.h"
#include "ringcomm/reduce_scatter_norm.h"

RINGCOMM_NAMESPACE_BEGIN

template <class E>
RC_TEAM_FN Status reduce_scatter_adamw_all_gather_direct(E& e, const Bucket& b) {
  RC_RETURN_IF_FAILED(offer(e, b, true));
  RC_RETURN_IF_FAILED(accept(e, b, true));
  e.ops.consume(e.team, Gradients{e.sources(), e.world()}, slice_of(e, b, e.rank()));
  return return_offers(e, b);
}

template <class E>
RC_TEAM_FN Status reduce_scatter_adamw_all_gather_ring(E& e, const Bucket& b) {
  if (e.team.lane() == 0) e.v.results[e.rank()] = nullptr;
  e.team.sync();
  RC_RETURN_IF_FAILED(reduce_scatter_norm_ring(e, b));
  return gather_parameters_ring(e, b);
}

RINGCOMM_NAMESPACE_END
