// SPDX-License-Identifier: Apache-2.0

// What stands for a CUfunction in the emulated driver.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "kernels/cuda/args.h"

// `run` does the work of a whole launch, grid_x by grid_y blocks of `lanes` threads each, and
// returns when every block has ended. All blocks run at once: the driver has placed them.
// `registers` of a thread, `shared_bytes` and `threads` of a block are the real kernel's. The
// parameters are `params_bytes` long, those of a kernel that takes lists as ListParams.
struct EmulatedKernel {
  std::function<void(const ringcomm::device::LaunchParams& params, int grid_x, int grid_y,
                     int lanes)>
      run;
  int registers = 0;
  int shared_bytes = 0;
  int threads = 256;
  bool waits = true;  // for other ranks, so that its blocks must run at the same time
  size_t params_bytes = sizeof(ringcomm::device::LaunchParams);
  // Of a kernel with other parameters than a LaunchParams: their sizes, and what does the work. It
  // finds them as in a structure.
  std::vector<int> parameter_bytes;
  using RunWith = void (*)(const void* parameters, int bytes, int grid_x, int grid_y, int threads,
                           int dynamic_bytes);
  RunWith run_with = nullptr;
};

// The kernel `name` of compilation unit `unit`, or nullptr; the object lives for good.
extern "C" const EmulatedKernel* emulated_kernel(const char* unit, const char* name);
