// A kernel that Triton has compiled, launched as the driver takes it. Triton's own launch costs the
// host a hundred microseconds and more.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kernels/cuda/driver.h"
#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

class TritonKernel {
 public:
  // A number that the caller passes. Triton compiles one kernel for those that fit into 32 bits and
  // another for those that do not.
  struct Parameter {
    bool wide;         // 8 bytes, else 4
    bool specialized;  // Triton compiles other kernels for 1 and for multiples of 16
  };

  // function: a CUfunction, which stays loaded. scratch_pointers: parameters behind those of the
  // caller, for scratch memory that the kernel does not use.
  TritonKernel(uint64_t function, unsigned threads, unsigned shared_bytes,
               std::vector<Parameter> parameters, int scratch_pointers);

  // Whether Triton would launch this very kernel for these numbers.
  bool takes(const int64_t* values, size_t count) const;
  // Of numbers that it takes().
  void launch(const Driver& driver, unsigned grid_x, unsigned grid_y, void* stream,
              const int64_t* values) const;
  void* function() const { return function_; }

 private:
  // The launch of 8 ranks has 31 numbers.
  static constexpr size_t kMostParameters = 40;

  void* function_;
  unsigned threads_, shared_bytes_;
  std::vector<Parameter> parameters_;
  size_t scratch_pointers_;
};

}  // namespace device
RINGCOMM_NAMESPACE_END
