// SPDX-License-Identifier: Apache-2.0

// The optimizer's kernels that need no communicator.
#pragma once

#include "kernels/host/comm.h"

namespace ringcomm::host {

// Prepares a step; see adamw_prepare.h.
void prepare_adamw(const AdamWTable& table);

// Updates a shard. grad: the gradient of this rank's chunk, from element 0 on.
void adamw_shard(const AdamWShard& shard, const GradCall& grad);

// Overwrites `words` with the norm of the first `elems` elements.
void grad_norm(const GradCall& grad, uint64_t elems, NormKind kind, NormWords* words);

}  // namespace ringcomm::host
