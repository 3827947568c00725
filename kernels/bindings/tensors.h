// Reads torch's tensors without torch: a call pays tens of nanoseconds for a tensor where a
// question asked in Python (is it on the CPU, is it contiguous, ...) takes a hundred and there are
// eight.
#pragma once

#include <nanobind/nanobind.h>

#include "ringcomm/core/dtypes.h"
#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

// A collective answers so, instead of with a status, when its tensors need a closer look in Python.
// Nothing was communicated.
constexpr int kNotFast = -1;

struct TensorMemory {
  char* ptr;
  uint64_t elems;
  DType dtype;

  uint64_t bytes() const { return elems * uint64_t(size_of(dtype)); }
};

// A tensor's sizes, which its object keeps.
struct TensorShape {
  const int64_t* sizes;
  int dims;
};

// Where a tensor lies, as DLPack says it.
struct TensorPlace {
  int32_t kind, id;

  bool is_cpu() const { return kind == 1; }  // then the id says nothing
};
constexpr TensorPlace kCpu{1, 0};

// True of a tensor whose memory can be used as it is: of torch's own classes, at `place`,
// contiguous, not empty, not complex, with no negation pending, and with nothing of torch that has
// to know of a call: no gradient, and no key of the thread's own in torch's dispatcher (a mode, a
// transform or a trace). Sets no Python error.
bool read_memory(nanobind::handle tensor, TensorMemory* result, TensorPlace place = kCpu);

// The same for a tensor of the CPU that a compiled graph only reads. It may require grad: another
// graph has the gradients.
bool read_source(nanobind::handle tensor, TensorMemory* result, TensorShape* shape);

// The keys that the calling thread has in torch's dispatcher and that stand for a mode, a transform
// or a trace; 0: none.
uint64_t intercepting_keys();

// True of a tensor that is chunk `index` of `whole`, or lies apart from it.
bool is_chunk_or_apart(const TensorMemory& whole, const TensorMemory& tensor, int index);

// Tells autograd that a tensor has changed, as torch's own functions do. Throws what torch raises.
void advance_version(nanobind::handle tensor);

// The code of one of torch's ReduceOp constants; negative: none.
int op_code(nanobind::handle op);
// The constant whose hash is `kind`, which is the code that torch has for it; null: none.
nanobind::handle op_of_kind(Py_hash_t kind);

// The code of an algorithm that every core has (auto, one-shot or ring), by its name in a
// collective; negative: none of these.
int algorithm_code(nanobind::handle name, Collective collective);

// A rank of `world`, as an integer of Python's has it; negative: it is none.
int rank_of(nanobind::handle rank, int world);

void bind_tensors(nanobind::module_& m);

}  // namespace ringcomm::host
