// PTX kernels as kernels of the emulated driver.
#include <memory>
#include <string>

#include "tests/support/emulator/kernel.h"
#include "tests/support/ptx/warp.h"

namespace {

thread_local std::string refusal;

}  // namespace

extern "C" {

// The module of a text, or nullptr: ptx_refusal() then says what is wrong with it. It lives for
// good.
const void* ptx_load(const char* text) {
  try {
    return new ptx::Module(text);
  } catch (const std::exception& error) {
    refusal = error.what();
    return nullptr;
  }
}
const char* ptx_refusal() { return refusal.c_str(); }

// A kernel of a module for the emulated driver, run by the schedule that is given, or nullptr.
const EmulatedKernel* ptx_kernel(const void* module, const char* name, int registers, unsigned seed,
                                 int no_progress_in_a_warp) {
  const auto* from = static_cast<const ptx::Module*>(module);
  const ptx::Function* kernel = from->kernel(name);
  if (kernel == nullptr) return nullptr;
  const ptx::Schedule schedule{seed, no_progress_in_a_warp != 0};
  auto run = [=](const ringcomm::device::LaunchParams& params, int x, int y, int threads) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&params);
    ptx::run({from, kernel, {bytes, bytes + sizeof params}, x, y, threads, schedule});
  };
  return new EmulatedKernel{run, registers};
}

// Memory that kernels may use besides that of the emulated devices: tensors and pages of the host.
void ptx_allow(uint64_t address, uint64_t bytes) { ptx::allow({address, address + bytes}); }
void ptx_be_strict(int strict) { ptx::be_strict(strict != 0); }

const char* ptx_failure() { return ptx::failure(); }
void ptx_forget_failure() { ptx::forget_failure(); }

}  // extern "C"
