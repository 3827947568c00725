// SPDX-License-Identifier: Apache-2.0

// Kernels that test the emulator itself; kernels.cpp has the library's own.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <thread>

#include "tests/support/emulator/kernel.h"

namespace {

struct Words {
  std::atomic<uint32_t>* word;
  uint32_t amount;
  uint32_t other;
};

Words words_of(const ringcomm::device::LaunchParams& params) {
  Words words;
  static_assert(sizeof(params) >= sizeof(words));
  std::memcpy(static_cast<void*>(&words), static_cast<const void*>(&params), sizeof(words));
  return words;
}

// Adds `amount` once per lane of every block.
void add(const ringcomm::device::LaunchParams& params, int grid_x, int grid_y, int lanes) {
  const Words words = words_of(params);
  words.word->fetch_add(words.amount * uint32_t(grid_x * grid_y * lanes));
}

// A waiting kernel counts the word at this distance after its own word to show that it runs.
constexpr int kRunsAfter = 128;

// Waits until the word has reached `amount`, then adds `other`.
void wait_then_add(const ringcomm::device::LaunchParams& params, int, int, int) {
  const Words words = words_of(params);
  words.word[kRunsAfter].fetch_add(1);
  while (words.word->load() < words.amount)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  words.word->fetch_add(words.other);
}

struct Named {
  std::string_view name;
  EmulatedKernel kernel;
};
// Two blocks of the first, or four of the second, fill a multiprocessor by their registers; one
// block of the third takes all of its shared memory.
const Named kKernels[] = {
    {"add", {add, 128}},
    {"wait_then_add", {wait_then_add, 64}},
    {"wait_in_shared", {wait_then_add, 64, 227 << 10}},
    {"add_in_waves", {add, 128, 0, 256, false}},
};

}  // namespace

extern "C" const EmulatedKernel* emu_test_kernel(const char* name) {
  for (const Named& each : kKernels)
    if (each.name == name) return &each.kernel;
  return nullptr;
}
