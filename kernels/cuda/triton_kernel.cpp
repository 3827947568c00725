// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/triton_kernel.h"

#include <utility>

RINGCOMM_NAMESPACE_BEGIN
namespace device {

TritonKernel::TritonKernel(uint64_t function, unsigned threads, unsigned shared_bytes,
                           std::vector<Parameter> parameters, int scratch_pointers)
    : function_(reinterpret_cast<void*>(function)),
      threads_(threads),
      shared_bytes_(shared_bytes),
      parameters_(std::move(parameters)),
      scratch_pointers_(size_t(scratch_pointers)) {
  if (scratch_pointers < 0 || parameters_.size() + scratch_pointers_ > kMostParameters)
    throw std::invalid_argument("a kernel of Triton's has more parameters than ringcomm passes");
}

bool TritonKernel::takes(const int64_t* values, size_t count) const {
  if (count != parameters_.size()) return false;
  for (size_t i = 0; i < count; ++i) {
    const int64_t value = values[i];
    if (parameters_[i].wide != (value != int32_t(value))) return false;
    if (parameters_[i].specialized && (value == 1 || value % 16 == 0)) return false;
  }
  return true;
}

void TritonKernel::launch(const Driver& driver, unsigned grid_x, unsigned grid_y, void* stream,
                          const int64_t* values) const {
  void* arguments[kMostParameters];
  size_t count = 0;
  // A 4-byte parameter is the first 4 of its value's 8 bytes.
  while (count < parameters_.size()) {
    arguments[count] = const_cast<int64_t*>(values + count);
    ++count;
  }
  uint64_t none = 0;
  for (size_t i = 0; i < scratch_pointers_; ++i) arguments[count++] = &none;
  driver.launch(function_, {grid_x, grid_y, threads_, shared_bytes_}, stream, arguments);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
