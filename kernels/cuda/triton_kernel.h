// SPDX-License-Identifier: Apache-2.0

// A compiled Triton kernel, launched through the driver: Triton's own launch costs the host 100 us
// or more.
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
  // The type of a number that the caller passes. Triton compiles one kernel for numbers that fit
  // into 32 bits and another kernel for larger numbers.
  struct Parameter {
    bool wide;         // true: 8 bytes; false: 4 bytes
    bool specialized;  // true: Triton compiles other kernels for 1 and for multiples of 16
  };

  // function: a CUfunction, which stays loaded. scratch_pointers: the number of parameters after
  // the caller's, for scratch memory that the kernel does not use.
  TritonKernel(uint64_t function, unsigned threads, unsigned shared_bytes,
               std::vector<Parameter> parameters, int scratch_pointers);

  // True if Triton would launch this kernel for these numbers.
  bool takes(const int64_t* values, size_t count) const;
  // Launches the kernel; requires takes(values).
  void launch(const Driver& driver, unsigned grid_x, unsigned grid_y, void* stream,
              const int64_t* values) const;
  void* function() const { return function_; }

 private:
  // A launch of 8 ranks has 31 parameters.
  static constexpr size_t kMostParameters = 40;

  void* function_;
  unsigned threads_, shared_bytes_;
  std::vector<Parameter> parameters_;
  size_t scratch_pointers_;
};

}  // namespace device
RINGCOMM_NAMESPACE_END
