// The optimizer's kernels that need no communicator.
#pragma once

#include "kernels/host/comm.h"

namespace ringcomm::host {

// The beginning of a step; see adamw_prepare.h.
void prepare_adamw(const AdamWTable& table);

// grad: of this rank's chunk, element 0 first.
void adamw_shard(const AdamWShard& shard, const GradCall& grad);

// words: overwritten with the norm of `elems` elements.
void grad_norm(const GradCall& grad, uint64_t elems, NormKind kind, NormWords* words);

}  // namespace ringcomm::host
