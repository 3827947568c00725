// SPDX-License-Identifier: Apache-2.0

#include "tests/ptx_interpreter/source/interpreter.h"

#include <string>

#include "tests/ptx_interpreter/source/warp.h"

namespace {

thread_local std::string refusal;

const ptx::Module& module_at(const void* module) {
  return *static_cast<const ptx::Module*>(module);
}

ptx::Schedule schedule_of(const PtxSchedule& given) {
  return {given.seed, given.no_progress_in_a_warp != 0, given.even_are_late != 0,
          given.replicates_reads != 0, given.counts_trips != 0};
}

}  // namespace

extern "C" {

const void* ptx_load(const char* text) {
  try {
    return new ptx::Module(text);
  } catch (const std::exception& error) {
    refusal = error.what();
    return nullptr;
  }
}

const char* ptx_refusal() { return refusal.c_str(); }

int ptx_threads(const void* module, const char* kernel) {
  const ptx::Function* found = module_at(module).kernel(kernel);
  return found == nullptr ? -1 : found->max_threads;
}

int ptx_reached(const void* module, uint32_t* lines, int room) {
  int count = 0;
  for (const ptx::OrderingSite& site : module_at(module).sites()) {
    if (!site.reached) continue;
    if (count < room) lines[count] = site.line;
    ++count;
  }
  return count;
}

int ptx_trips(const void* module, const char* kernel) {
  const ptx::Function* found = module_at(module).kernel(kernel);
  return found == nullptr ? -1 : int(found->fewest_trips->load());
}

const char* ptx_run(const void* module, const char* kernel, const PtxLaunch* launch) {
  const ptx::Module& from = module_at(module);
  const ptx::Function* found = from.kernel(kernel);
  if (found == nullptr) return "no such kernel";
  const auto* bytes = static_cast<const uint8_t*>(launch->parameters);
  ptx::run({&from,
            found,
            {bytes, bytes + launch->parameter_bytes},
            launch->grid_x,
            launch->grid_y,
            launch->threads,
            launch->shared_bytes,
            schedule_of(launch->schedule)});
  return ptx::failure();
}

void ptx_serve(const PtxMemory* memory) { ptx::driver_memory = *memory; }
void ptx_allow(uint64_t address, uint64_t bytes) { ptx::allow({address, address + bytes}); }
void ptx_forget_allowed() { ptx::forget_allowed(); }
void ptx_watch(uint64_t word, ptx::Watcher watcher) { ptx::watch(word, watcher); }
void ptx_be_strict(int strict) { ptx::be_strict(strict != 0); }

const char* ptx_failure() { return ptx::failure(); }
void ptx_forget_failure() { ptx::forget_failure(); }

}  // extern "C"
