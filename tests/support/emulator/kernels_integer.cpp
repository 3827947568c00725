// SPDX-License-Identifier: Apache-2.0

#include "tests/support/emulator/registry.h"

void add_integer_kernels(KernelMap& kernels) {
  using ringcomm::RedOp;
  add_reduction<int32_t, RedOp::kSum>(kernels, "reduce_int32", "sum");
  add_reduction<int32_t, RedOp::kProduct>(kernels, "reduce_int32", "product");
  add_reduction<int32_t, RedOp::kMin>(kernels, "reduce_int32", "min");
  add_reduction<int32_t, RedOp::kMax>(kernels, "reduce_int32", "max");
  add_reduction<int64_t, RedOp::kSum>(kernels, "reduce_int64", "sum");
  add_reduction<int64_t, RedOp::kMax>(kernels, "reduce_int64", "max");
  add_reduction<int64_t, RedOp::kBand>(kernels, "reduce_int64", "band");
  add_reduction<int64_t, RedOp::kBor>(kernels, "reduce_int64", "bor");
  add_reduction<int64_t, RedOp::kBxor>(kernels, "reduce_int64", "bxor");
  add_reduction<int16_t, RedOp::kSum>(kernels, "reduce_int16", "sum");
  add_reduction<int8_t, RedOp::kSum>(kernels, "reduce_int8", "sum");
  add_reduction<int8_t, RedOp::kMin>(kernels, "reduce_int8", "min");
  add_reduction<uint8_t, RedOp::kSum>(kernels, "reduce_uint8", "sum");
  add_reduction<ringcomm::Bool, RedOp::kMax>(kernels, "reduce_bool", "max");
  add_reduction<ringcomm::Bool, RedOp::kSum>(kernels, "reduce_bool", "sum");
}
