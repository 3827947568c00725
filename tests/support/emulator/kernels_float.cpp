// SPDX-License-Identifier: Apache-2.0

#include "tests/support/emulator/registry.h"

void add_float_kernels(KernelMap& kernels) {
  using ringcomm::RedOp;
  add_reduction<float, RedOp::kSum>(kernels, "reduce_float32", "sum");
  add_reduction<float, RedOp::kProduct>(kernels, "reduce_float32", "product");
  add_reduction<float, RedOp::kMin>(kernels, "reduce_float32", "min");
  add_reduction<float, RedOp::kMax>(kernels, "reduce_float32", "max");
  add_reduction<double, RedOp::kSum>(kernels, "reduce_float64", "sum");
  add_reduction<double, RedOp::kMax>(kernels, "reduce_float64", "max");
}
