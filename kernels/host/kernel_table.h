// What differs between instruction sets: the loops that move and reduce bytes. One table per
// instruction set, each compiled in its own translation unit; the best that the CPU has is chosen
// at run time.
#pragma once

#include "ringcomm/reduce.h"

namespace ringcomm {

// dst[i] = reduction over s of sources[s][i]; finish_world as in finish() (0: a partial sum).
// dst may equal a source exactly. streaming: store past the caches.
using ReduceFn = void (*)(void* dst, const void* const* sources, const double* factors, int count,
                          uint64_t bytes, int finish_world, bool streaming);

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
