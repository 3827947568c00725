// SPDX-License-Identifier: Apache-2.0

// Makes PTX kernels callable as kernels of the emulated driver, and lets them use its memory.
#include <string>

#include "tests/ptx_interpreter/source/interpreter.h"
#include "tests/support/emulator/kernel.h"

extern "C" {

int emu_memory_find(uint64_t address, uint64_t* begin, uint64_t* bytes);
int emu_vmm_find(uint64_t address, uint64_t* begin, uint64_t* bytes);
int emu_multicast_find(uint64_t address, uint64_t bytes, uint64_t* memory, int room);

// Returns a kernel of an interpreter's module, run with the given schedule, or nullptr. The module
// does not declare the registers, and how much of its shared memory the kernel uses: these are
// copied from `like`.
const EmulatedKernel* emulated_ptx_kernel(const void* module, const char* name,
                                          const EmulatedKernel* like, const PtxSchedule* given) {
  const int most_threads = ptx_threads(module, name);
  if (most_threads < 0) return nullptr;
  auto* made = new EmulatedKernel(*like);
  if (most_threads != 0) made->threads = most_threads;
  made->run = [module, kernel = std::string(name), schedule = *given, bytes = made->params_bytes](
                  const ringcomm::device::LaunchParams& params, int x, int y, int threads) {
    const PtxLaunch launch{&params, bytes, x, y, threads, 0, schedule};
    ptx_run(module, kernel.c_str(), &launch);
  };
  return made;
}

// Makes a kernel with parameters of these sizes; `run` runs its launches in the stream's thread.
const EmulatedKernel* emulated_kernel_of(const int* parameter_bytes, int count,
                                         EmulatedKernel::RunWith run) {
  auto* made = new EmulatedKernel;
  made->parameter_bytes.assign(parameter_bytes, parameter_bytes + count);
  made->run_with = run;
  made->waits = false;  // its blocks take no resources that the device counts
  return made;
}

}  // extern "C"

namespace {

int find(uint64_t address, uint64_t* begin, uint64_t* bytes) {
  return int(emu_memory_find(address, begin, bytes) != 0 ||
             emu_vmm_find(address, begin, bytes) != 0);
}

[[maybe_unused]] const bool kIsServed = [] {
  const PtxMemory memory{find, emu_multicast_find};
  ptx_serve(&memory);
  return true;
}();

}  // namespace
