#include "tests/support/emulator/registry.h"

namespace {

KernelMap all_kernels() {
  KernelMap kernels;
  kernels["move/rc_move"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      ringcomm::device::move_kernel(team, params, rank, w);
    });
  }};
  kernels["move/rc_packet_move"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      ringcomm::device::packet_move_kernel(team, params, rank, w);
    });
  }};
  add_float_kernels(kernels);
  add_half_kernels(kernels);
  add_integer_kernels(kernels);
  add_optimizer_kernels(kernels);
  return kernels;
}

}  // namespace

extern "C" const EmulatedKernel* emulated_kernel(const char* unit, const char* name) {
  static const KernelMap kernels = all_kernels();
  const auto found = kernels.find(std::string(unit) + "/" + name);
  return found == kernels.end() ? nullptr : &found->second;
}
