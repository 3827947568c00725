#include "tests/support/emulator/registry.h"

void add_half_kernels(KernelMap& kernels) {
  add_arithmetic<ringcomm::BFloat16>(kernels, "reduce_bfloat16");
  add_reduction<ringcomm::Float16, ringcomm::RedOp::kSum>(kernels, "reduce_float16", "sum");
  add_reduction<ringcomm::Float16, ringcomm::RedOp::kMax>(kernels, "reduce_float16", "max");
}
