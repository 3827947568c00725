// A block's shared memory: what its lanes know in common, kept off their registers.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/update_rules.h"
#include "ringcomm/optimizer/adamw.h"
#include "ringcomm/optimizer/buckets.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// What the lanes of an optimizer's kernel update next: elements [begin, end) of the chunk by their
// gradients (grad_sum.h), and the parameters of so many ranks.
struct UpdateArgs {
  const void* const* sources;
  int source_count, divide_by, copy_count;
  uint64_t begin, end;
};

// Where the lanes are in it: the segment, how many turns of it lie behind, and what its step takes.
// It lies here because the loops have no registers for it.
struct UpdateStep {
  StepFactors factors;
  uint64_t segment, turns;
};

struct Workspace {
  View view;
  CallHeader mine;
  Chunks in, out;
  HostPage* host;
  Portion portion;  // of this block's channel
  int failure;      // the greatest status of the lanes so far
  int ring_position;
  // As they were when the call began.
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
