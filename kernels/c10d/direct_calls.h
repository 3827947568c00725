// SPDX-License-Identifier: Apache-2.0

// The calls of a communicator on the host as C functions, for code that is compiled separately from
// ringcomm._native and without its headers: the backend of torch.distributed.
#pragma once

#include <cstdint>

namespace ringcomm {

// The name of the capsule that `ringcomm._native.Comm.direct_calls` makes.
constexpr const char* kDirectCallsName = "ringcomm.DirectCalls";
// Increased whenever the struct, or the behaviour of a function, changes.
constexpr uint64_t kDirectCallsVersion = 1;

// A function returns this in place of a status if it has communicated nothing. The caller then
// makes the call in Python.
constexpr int kNotDirect = -1;

// Codes of types and ops are those of `ringcomm._native`. Memory is on the host and contiguous.
//
// The calling thread does not hold the GIL; a function takes it to find the call site if the flight
// recorder is on. A function returns a status, 0 on success. After another status, Python's error
// is set for this thread if a signal handler raised; otherwise the communicator has the fault.
struct DirectCalls {
  uint64_t version, size_bytes;
  void* comm;  // the first argument of each function
  int (*all_reduce)(void* comm, void* data, uint64_t elems, int dtype, int op);
  int (*reduce_scatter)(void* comm, void* in, uint64_t in_elems, void* out, uint64_t out_elems,
                        int dtype, int op);
  int (*all_gather)(void* comm, void* in, uint64_t in_elems, void* out, uint64_t out_elems,
                    int dtype);
  int (*broadcast)(void* comm, void* data, uint64_t elems, int dtype, int64_t root);
  int (*barrier)(void* comm);
};

}  // namespace ringcomm
