// SPDX-License-Identifier: Apache-2.0

// The emulated driver's counterpart of a CUfunction.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "kernels/cuda/args.h"

// `run` does the work of a whole launch, grid_x by grid_y blocks of `lanes` threads each, and
// returns when every block has ended. All blocks run at once: the driver has placed them.
// `registers` per thread, and `shared_bytes` and `threads` per block are the real kernel's. The
// parameters have `params_bytes` bytes; a kernel that takes lists has ListParams.
struct EmulatedKernel {
  std::function<void(const ringcomm::device::LaunchParams& params, int grid_x, int grid_y,
                     int lanes)>
      run;
  int registers = 0;
  int shared_bytes = 0;
  int threads = 256;
  bool waits = true;  // its blocks wait for other ranks, so all must run at the same time
  size_t params_bytes = sizeof(ringcomm::device::LaunchParams);
  // For a kernel whose parameters are not LaunchParams: their sizes, and the function that runs it.
  // The function gets the parameters laid out as in a structure.
  std::vector<int> parameter_bytes;
  using RunWith = void (*)(const void* parameters, int bytes, int grid_x, int grid_y, int threads,
                           int dynamic_bytes);
  RunWith run_with = nullptr;
};

// Returns the kernel `name` of compilation unit `unit`, or nullptr; kernels are never destroyed.
extern "C" const EmulatedKernel* emulated_kernel(const char* unit, const char* name);
