// SPDX-License-Identifier: Apache-2.0

// A block's shared memory: state that all its lanes use, kept out of their registers.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/update_rules.h"
#include "ringcomm/optimizer/adamw.h"
#include "ringcomm/optimizer/buckets.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// The next update of an optimizer's kernel: elements [begin, end) of the chunk, the gradients'
// sources and divisor (grad_sum.h), and the number of copies of the parameters.
struct UpdateArgs {
  const void* const* sources;
  int source_count, divide_by, copy_count;
  uint64_t begin, end;
};

// The progress in an update: the segment, its finished turns, and the step's factors. They are in
// shared memory because the loops have no registers for them.
struct UpdateStep {
  StepFactors factors;
  uint64_t segment, turns;
};

struct Workspace {
  View view;
  CallHeader mine;
  Chunks in, out;
  HostPage* host;
  Portion portion;  // the portion of this block's channel
  Deal deal;        // how tiles are dealt to this block's channel
  Gaps gaps[2];     // the gaps of the next reduction's sources and results; [kNoGaps]: no gaps
  int failure;      // the greatest status of any lane so far
  int ring_position;
  // The channel's words, as loaded when the call began.
  uint64_t sequence;
  uint32_t ll_epoch, aborted, running;
  char* regions[kMaxWorld];
  char* heaps[kMaxWorld];
  uint64_t heap_bytes[kMaxWorld];
  int32_t ring[kMaxWorld];
  const void* sources[kMaxWorld];
  double factors[kMaxWorld];
  char* results[kMaxWorld];
  AdamWShard shard;
  Bucket bucket;
  UpdateArgs update;
  UpdateStep step;
  NormWords norm;
  PeerState peers[int(Stream::kCount) * kMaxWorld];
};

}  // namespace device
RINGCOMM_NAMESPACE_END
