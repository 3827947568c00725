// What differs between instruction sets: the loops that move and reduce bytes. One table per
// instruction set, each compiled in its own translation unit; the best that the CPU has is chosen
// at run time.
#pragma once

#include "ringcomm/reduce.h"

namespace ringcomm {

// dst[i] = also[i] = reduction over s of sources[s][i].
struct ReduceJob {
  void* dst;                       // may equal a source exactly
  void* also;                      // a second destination, or null
  bool streaming, also_streaming;  // store past the caches
  const void* const* sources;
  const double* factors;
  int count;
  int finish_world;  // as in finish() of reduce.h; 0: a partial sum
  uint64_t bytes;
};
using ReduceFn = void (*)(const ReduceJob& job);

struct KernelTable {
  const char* isa;
  void (*copy)(void* dst, const void* src, uint64_t bytes);
  // Stores past the caches, and fences: what a later release publishes includes these stores.
  void (*copy_streaming)(void* dst, const void* src, uint64_t bytes);
  ReduceFn reduce[int(DType::kCount)]
                 [int(RedOp::kCount)];  // null where the operator makes no sense
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

const KernelTable& kernels();
// A test knob: false when this CPU (or this build) has no such instruction set. "" restores the
// best.
bool force_isa(const char* name);

}  // namespace ringcomm
