// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <stdexcept>
#include <string_view>

#include "kernels/cuda/optimizer_body.h"
#include "tests/support/emulator/registry.h"

namespace {

using ringcomm::device::kNormThreads;

// The threads of a block, and the registers per thread on sm_90a, by the beginning of the kernel's
// name: the maximum of these kernels in tests/proof/compile/test_cuda_compile.py, which checks the
// numbers.
struct Family {
  std::string_view begin;
  int registers;  // 0: the kernel declares registers and threads
  bool waits = true;
  int threads = 256;
};
constexpr std::array<Family, 20> kFamilies = {{
    {"rc_move", 168, true, 384},
    {"rc_list_move", 168, true, 384},
    {"rc_ll_move", 128},
    {"rc_ll_", 146},
    {"rc_reduce_scatter_norm", 128, true, kNormThreads},
    {"rc_ring_norm", 255},
    {"rc_reduce_scatter_", 168, true, 384},
    {"rc_all_reduce_", 168, true, 384},
    {"rc_adamw_prepare", 55, false},
    {"rc_grad_norm", 110, false},
    {"rc_adamw_shard_", 128, false},
    {"rc_adamw_step_", 0},
    {"rc_adamw_many_", 0},
    {"rc_adamw_ring_", 255},
    {"rc_multicast_sum", 120},
    {"rc_quantize_", 64, false},
    {"rc_dequantize_and_sum_", 64, false},
    {"rc_copy_rows", 123, false},
    {"rc_sum_rows_", 85, false},
    {"rc_scale_rows_", 114, false},
}};

const Family& family_of(std::string_view name) {
  for (const Family& family : kFamilies)
    if (name.starts_with(family.begin)) return family;
  throw std::logic_error("no family of kernels: " + std::string(name));
}

KernelMap all_kernels() {
  KernelMap kernels;
  kernels["move/rc_move"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      ringcomm::device::move_kernel(team, params, rank, w);
    });
  }};
  kernels["move/rc_list_move"] = list_kernel([](auto team, const auto& params, int rank, auto& w) {
    ringcomm::device::list_move_kernel(team, params, rank, w);
  });
  kernels["move/rc_ll_move"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      ringcomm::device::ll_move_kernel(team, params, rank, w);
    });
  }};
  // The host has no multicast: these kernels run only as PTX.
  for (const char* dtype : {"float32", "bfloat16", "float16"})
    kernels[std::string("multicast_") + dtype + "/rc_multicast_sum"] = {};
  add_float_kernels(kernels);
  add_half_kernels(kernels);
  add_integer_kernels(kernels);
  add_optimizer_kernels(kernels);
  add_row_kernels(kernels);
  add_quantization_kernels(kernels);
  for (auto& [key, kernel] : kernels) {
    const std::string_view name = std::string_view(key).substr(key.find('/') + 1);
    const Family& family = family_of(name);
    kernel.shared_bytes = int(sizeof(ringcomm::device::Workspace));  // their only variable
    kernel.waits = family.waits;
    if (family.registers == 0) continue;
    kernel.registers = family.registers;
    kernel.threads = family.threads;
  }
  return kernels;
}

}  // namespace

extern "C" const EmulatedKernel* emulated_kernel(const char* unit, const char* name) {
  static const KernelMap kernels = all_kernels();
  const auto found = kernels.find(std::string(unit) + "/" + name);
  return found == kernels.end() ? nullptr : &found->second;
}

extern "C" uint64_t emulated_barriers_met() { return emulated_barriers.load(); }

extern "C" uint64_t emulated_params_bytes(const EmulatedKernel* kernel) {
  return kernel->params_bytes;
}

extern "C" void emulated_figures(const EmulatedKernel* kernel, int* registers, int* shared_bytes,
                                 int* threads) {
  *registers = kernel->registers;
  *shared_bytes = kernel->shared_bytes;
  *threads = kernel->threads;
}
