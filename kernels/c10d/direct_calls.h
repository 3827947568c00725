// The calls of a communicator on the host as C functions, for code that is compiled apart from
// ringcomm._native and without its headers: the backend of torch.distributed.
#pragma once

#include <cstdint>

namespace ringcomm {

// Made by `ringcomm._native.Comm.direct_calls`, a capsule with this name.
constexpr const char* kDirectCallsName = "ringcomm.DirectCalls";
// A change of the struct or of what a function does changes it.
constexpr uint64_t kDirectCallsVersion = 1;

// A function returns this in place of a status if it has communicated nothing. The caller then
// makes the call in Python.
constexpr int kNotDirect = -1;

// Codes of types and ops are those of `ringcomm._native`. Memory is on the host and dense.
//
// The calling thread does not hold Python's lock. A function takes it for the call site, if the
// flight recorder is on. It returns a status, 0 if all is well; after another one Python's error is
// set for this thread, if a signal handler raised, and else the communicator has the fault.
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
