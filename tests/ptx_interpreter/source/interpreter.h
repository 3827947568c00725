// SPDX-License-Identifier: Apache-2.0

// The interpreter's interface, in C: for a driver whose kernels are PTX, and for Python
// (tests/ptx_interpreter/interpreter.py).
#pragma once

#include <cstdint>

extern "C" {

// In which order warps and lanes run; see Schedule in warp.h.
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

// The memory of the driver that the interpreter serves. Without one kernels may use only what
// ptx_allow() names, and no address is a multicast address.
struct PtxMemory {
  // Returns whether an address lies in memory of the driver's: `bytes` of it from `begin`.
  int (*find)(uint64_t address, uint64_t* begin, uint64_t* bytes);
  // Writes the addresses of all memory that `bytes` bytes at a multicast address stand for, at most
  // `room`. Returns their number; 0: not a multicast address; -1: a device has bound nothing there.
  int (*find_multicast)(uint64_t address, uint64_t bytes, uint64_t* memory, int room);
};
void ptx_serve(const PtxMemory* memory);

// Returns the module of a text, or nullptr: ptx_refusal() then says what is wrong with it. A module
// lives for good.
const void* ptx_load(const char* text);
const char* ptx_refusal();
// Returns the most threads of a block that a kernel declares, 0 if it declares none, -1 if the
// module has no such kernel.
int ptx_threads(const void* module, const char* kernel);
// Writes the lines of a module's text that order memory and that kernels have come to, at most
// `room` of them. Returns how many there are.
int ptx_reached(const void* module, uint32_t* lines, int room);
// Returns the trips to memory that the block with the most of them made one after the other, in
// that launch of a kernel that took the fewest, of those whose schedule counts them. -1: there was
// none.
int ptx_trips(const void* module, const char* kernel);

// Runs a kernel of a module to its end, in the caller's thread. Returns what the first kernel that
// failed did wrong, or nullptr. All kernels of the process end then, until ptx_forget_failure().
const char* ptx_run(const void* module, const char* kernel, const PtxLaunch* launch);
const char* ptx_failure();
void ptx_forget_failure();

// Memory that kernels may use besides the driver's: tensors, and pages of the host.
void ptx_allow(uint64_t address, uint64_t bytes);
void ptx_forget_allowed();
// Unless strict, kernels may use the rest of the process's memory, too.
void ptx_be_strict(int strict);
// Has `watcher` called whenever a strong store to the word has been made; nullptr ends it.
void ptx_watch(uint64_t word, void (*watcher)());

// The work that this thread runs next comes after what has ended on other streams.
void ptx_stream_waited();
// All later work comes after what has ended.
void ptx_host_waited();

}  // extern "C"
