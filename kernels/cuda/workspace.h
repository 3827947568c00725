// A block's shared memory: what its lanes know in common, kept off their registers.
#pragma once

#include "kernels/cuda/args.h"
#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

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
  NormWords norm;
  PeerState peers[int(Stream::kCount) * kMaxWorld];
};

}  // namespace device
RINGCOMM_NAMESPACE_END
