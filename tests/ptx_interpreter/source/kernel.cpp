// PTX kernels as kernels of the emulated driver.
#include <memory>
#include <string>

#include "tests/support/emulator/kernel.h"
#include "tests/ptx_interpreter/source/warp.h"

namespace {

thread_local std::string refusal;

}  // namespace

extern "C" {

struct PtxSchedule {
  uint32_t seed;
  uint8_t no_progress_in_a_warp, even_are_late, replicates_reads;
  ptx::Schedule schedule() const {
    return {seed, no_progress_in_a_warp != 0, even_are_late != 0, replicates_reads != 0};
  }
};

struct PtxLaunch {
  const void* parameters;
  uint64_t parameter_bytes;
  int grid_x, grid_y, threads;
  uint32_t shared_bytes;  // dynamic ones
  PtxSchedule schedule;
};

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
// What its module does not say is as of `like`: registers, and how much of the module's shared
// memory it uses.
const EmulatedKernel* ptx_kernel(const void* module, const char* name, const EmulatedKernel* like,
                                 const PtxSchedule* given) {
  const auto* from = static_cast<const ptx::Module*>(module);
  const ptx::Function* kernel = from->kernel(name);
  if (kernel == nullptr) return nullptr;
  const ptx::Schedule schedule = given->schedule();
  auto* made = new EmulatedKernel(*like);
  if (kernel->max_threads != 0) made->threads = kernel->max_threads;
  made->run = [=](const ringcomm::device::LaunchParams& params, int x, int y, int threads) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&params);
    ptx::run({from, kernel, {bytes, bytes + sizeof params}, x, y, threads, 0, schedule});
  };
  return made;
}

// The lines of a module's text that order memory and that kernels have come to: at most `room` of
// them. Returns how many there are.
int ptx_reached(const void* module, uint32_t* lines, int room) {
  int count = 0;
  for (const ptx::OrderingSite& site : static_cast<const ptx::Module*>(module)->sites()) {
    if (!site.reached) continue;
    if (count < room) lines[count] = site.line;
    ++count;
  }
  return count;
}

// Runs a kernel of a module to its end, in the caller's thread. Returns what it did wrong, or
// nullptr, which is told until ptx_forget_failure.
const char* ptx_run(const void* module, const char* name, const PtxLaunch* launch) {
  const auto* from = static_cast<const ptx::Module*>(module);
  const ptx::Function* kernel = from->kernel(name);
  if (kernel == nullptr) return "no such kernel";
  const auto* bytes = static_cast<const uint8_t*>(launch->parameters);
  ptx::run({from,
            kernel,
            {bytes, bytes + launch->parameter_bytes},
            launch->grid_x,
            launch->grid_y,
            launch->threads,
            launch->shared_bytes,
            launch->schedule.schedule()});
  return ptx::failure();
}

// Memory that kernels may use besides that of the emulated devices: tensors and pages of the host.
void ptx_allow(uint64_t address, uint64_t bytes) { ptx::allow({address, address + bytes}); }
void ptx_forget_allowed() { ptx::forget_allowed(); }
void ptx_watch(uint64_t word, ptx::Watcher watcher) { ptx::watch(word, watcher); }
void ptx_be_strict(int strict) { ptx::be_strict(strict != 0); }

const char* ptx_failure() { return ptx::failure(); }
void ptx_forget_failure() { ptx::forget_failure(); }

}  // extern "C"
