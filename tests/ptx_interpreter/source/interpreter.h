// SPDX-License-Identifier: Apache-2.0

// The interpreter's interface in C, for a driver whose kernels are PTX, and for Python
// (tests/ptx_interpreter/interpreter.py).
#pragma once

#include <cstdint>

extern "C" {

// The order in which warps and lanes run; see Schedule in warp.h.
struct PtxSchedule {
  uint32_t seed;
  uint8_t no_progress_in_a_warp, even_are_late, replicates_reads, counts_trips;
};

struct PtxLaunch {
  const void* parameters;
  uint64_t parameter_bytes;
  int grid_x, grid_y, threads;
  uint32_t shared_bytes;  // dynamic ones
  PtxSchedule schedule;
};

// The memory of the driver that the interpreter serves. Without such a driver, kernels may use only
// memory that ptx_allow() names, and no address is a multicast address.
struct PtxMemory {
  // Returns whether an address is in the driver's memory, and the range around it: `bytes` bytes
  // from `begin`.
  int (*find)(uint64_t address, uint64_t* begin, uint64_t* bytes);
  // Writes at most `room` of the addresses that are bound to `bytes` bytes at a multicast address.
  // Returns their number; 0: not a multicast address; -1: a device has bound nothing there.
  int (*find_multicast)(uint64_t address, uint64_t bytes, uint64_t* memory, int room);
};
void ptx_serve(const PtxMemory* memory);

// Returns a text's module, never freed, or nullptr; ptx_refusal() then returns the reason.
const void* ptx_load(const char* text);
const char* ptx_refusal();
// Returns the most threads per block that a kernel declares, 0 if it declares no limit, -1 if the
// module has no such kernel.
int ptx_threads(const void* module, const char* kernel);
// Writes at most `room` of the lines of a module's text that order memory and that kernels have
// executed. Returns their number.
int ptx_reached(const void* module, uint32_t* lines, int room);
// Returns the trips to memory of a kernel's launch: the longest chain of any block, in the launch
// with the shortest chain among launches whose schedule counts trips. -1: no launch counted them.
int ptx_trips(const void* module, const char* kernel);

// Runs a kernel of a module to its end, in the caller's thread. Returns the mistake of the first
// kernel that failed, or nullptr. After a failure all kernels of the process end at once, until
// ptx_forget_failure().
const char* ptx_run(const void* module, const char* kernel, const PtxLaunch* launch);
const char* ptx_failure();
void ptx_forget_failure();

// Allows kernels more memory than the driver's: tensors, and pages of the host.
void ptx_allow(uint64_t address, uint64_t bytes);
void ptx_forget_allowed();
// If strict, kernels may not use any other memory of the process.
void ptx_be_strict(int strict);
// Calls `watcher` after each strong store to the word; nullptr ends this.
void ptx_watch(uint64_t word, void (*watcher)());

// The next work of this thread comes after all work that has ended on other streams.
void ptx_stream_waited();
// All later work comes after the work that has ended.
void ptx_host_waited();

}  // extern "C"
