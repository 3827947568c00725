// SPDX-License-Identifier: Apache-2.0

#include "tests/support/emulator/registry.h"

void add_half_kernels(KernelMap& kernels) {
  using ringcomm::RedOp;
  add_reduction<ringcomm::BFloat16, RedOp::kSum>(kernels, "reduce_bfloat16", "sum");
  add_reduction<ringcomm::BFloat16, RedOp::kMax>(kernels, "reduce_bfloat16", "max");
  add_reduction<ringcomm::Float16, RedOp::kSum>(kernels, "reduce_float16", "sum");
}
