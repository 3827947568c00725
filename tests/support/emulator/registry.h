// SPDX-License-Identifier: Apache-2.0

// The kernels of the emulator: the map behind emulated_kernel().
#pragma once

#include <map>
#include <string>

#include "tests/support/emulator/block.h"

using KernelMap = std::map<std::string, EmulatedKernel>;  // by "unit/name"

void add_float_kernels(KernelMap& kernels);
void add_half_kernels(KernelMap& kernels);
void add_integer_kernels(KernelMap& kernels);
void add_optimizer_kernels(KernelMap& kernels);
void add_row_kernels(KernelMap& kernels);
void add_quantization_kernels(KernelMap& kernels);

template <class T, ringcomm::RedOp op>
void add_reduction(KernelMap& kernels, const std::string& unit, const std::string& name) {
  kernels[unit + "/rc_reduce_scatter_" + name] = reduce_scatter_kernel<T, op>();
  kernels[unit + "/rc_reduce_scatter_list_" + name] = reduce_scatter_list_kernel<T, op>();
  kernels[unit + "/rc_all_reduce_" + name] = all_reduce_kernel<T, op>();
  kernels[unit + "/rc_ll_" + name] = ll_kernel<T, op>();
}
