// SPDX-License-Identifier: Apache-2.0

// Reads torch's tensors without torch. Reading a tensor takes tens of nanoseconds, while one check
// in Python (is it on the CPU, is it contiguous, ...) takes a hundred nanoseconds, and eight checks
// are needed.
#pragma once

#include <nanobind/nanobind.h>

#include "ringcomm/core/dtypes.h"
#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

// The result of a collective whose tensors Python must check. It has communicated nothing.
constexpr int kNotFast = -1;

struct TensorMemory {
  char* ptr;
  uint64_t elems;
  DType dtype;

  uint64_t bytes() const { return elems * uint64_t(size_of(dtype)); }
};

// A tensor's sizes, in an array that the tensor's object owns.
struct TensorShape {
  const int64_t* sizes;
  int dims;
};

// The device of a tensor, in DLPack's terms.
struct TensorPlace {
  int32_t kind, id;

  bool is_cpu() const { return kind == 1; }  // then the id has no meaning
};
constexpr TensorPlace kCpu{1, 0};

// True if a tensor's memory can be used directly. The tensor has one of torch's own classes, is at
// `place`, contiguous, not empty, not complex, and has no negation pending. No gradient passes
// through it. No profiler is on, and the thread has no key of its own in torch's dispatcher (a
// mode, a transform or a trace), since these would have to see the call. Sets no Python error.
bool read_memory(nanobind::handle tensor, TensorMemory* result, TensorPlace place = kCpu);

// Like read_memory(), for a tensor of the CPU that a compiled graph only reads. The tensor may
// require grad: another graph computes the gradients.
bool read_source(nanobind::handle tensor, TensorMemory* result, TensorShape* shape);

// Returns the calling thread's keys in torch's dispatcher that mean a mode, a transform or a trace;
// 0: the thread has no such keys.
uint64_t intercepting_keys();

// True while a profiler of torch is on; then Python makes each call, and the profiler sees it.
bool is_profiled();

// True if a tensor is chunk `index` of `whole`, or does not overlap `whole`.
bool is_chunk_or_apart(const TensorMemory& whole, const TensorMemory& tensor, int index);

// Marks a tensor as changed for autograd, as torch's own functions do. Throws torch's errors.
void advance_version(nanobind::handle tensor);

// Returns ringcomm's code of one of torch's ReduceOp constants; negative: `op` is another object.
int op_code(nanobind::handle op);
// Returns torch's ReduceOp constant with the hash `kind`, which is torch's own code of the
// operation; null: there is none.
nanobind::handle op_of_kind(Py_hash_t kind);

// Returns the code of an algorithm of all backends (auto, one-shot or ring), by its name in a
// collective; negative: another name.
int algorithm_code(nanobind::handle name, Collective collective);

// Returns `rank` as a number if it is a Python integer and a rank of `world`; else negative.
int rank_of(nanobind::handle rank, int world);

void bind_tensors(nanobind::module_& m);

}  // namespace ringcomm::host
