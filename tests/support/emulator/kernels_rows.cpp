// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/row_lanes.h"
#include "tests/support/emulator/registry.h"

namespace {

namespace device = ringcomm::device;

template <class T>
void add_rows_of(KernelMap& kernels, const std::string& name) {
  kernels["rows/rc_sum_rows_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::sum_rows_kernel<T>(team, params, rank, w);
    });
  }};
  kernels["rows/rc_scale_rows_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::scale_rows_kernel<T>(team, params, rank, w);
    });
  }};
}

}  // namespace

void add_row_kernels(KernelMap& kernels) {
  kernels["rows/rc_copy_rows"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::copy_rows_kernel(team, params, rank, w);
    });
  }};
  add_rows_of<float>(kernels, "float32");
  add_rows_of<ringcomm::BFloat16>(kernels, "bfloat16");
  add_rows_of<ringcomm::Float16>(kernels, "float16");
}
