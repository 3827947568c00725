// SPDX-License-Identifier: Apache-2.0

// The most frequent calls; the caller has read the addresses and sizes from the tensors already
// (tensors.h). module.cpp makes them with the GIL, and direct_calls.cpp without it.
//
// `run(comm, call)` makes a call under the communicator's call lock.
#pragma once

#include "kernels/bindings/native_comm.h"
#include "kernels/bindings/tensors.h"

namespace ringcomm::host {

// False for a ring if sums are taken in groups: Python then raises the error.
inline bool sums_by(const Comm& comm, int algorithm) {
  return comm.sum_group_size() == 0 || algorithm != int(Algorithm::kRing);
}

inline Reduction reduction_of(DType dtype, int op, int algorithm) {
  return {dtype, RedOp(op), 1.0, chosen(Algorithm(algorithm))};
}

template <class Run>
int all_reduce_memory(NativeComm& n, const TensorMemory& t, int op, int algorithm, Run run) {
  if (!sums_by(n.comm, algorithm) || kernels().reduce[int(t.dtype)][op] == nullptr) return kNotFast;
  const Reduction how = reduction_of(t.dtype, op, algorithm);
  return run(n, [&] { return n.comm.all_reduce(t.ptr, t.ptr, t.elems, how); });
}

template <class Run>
int reduce_scatter_memory(NativeComm& n, const TensorMemory& out, const TensorMemory& in, int op,
                          int algorithm, Run run) {
  const View& v = n.comm.view();
  if (!sums_by(n.comm, algorithm) || out.dtype != in.dtype ||
      in.elems != out.elems * uint64_t(v.world) ||
      kernels().reduce[int(out.dtype)][op] == nullptr || !is_chunk_or_apart(in, out, v.rank))
    return kNotFast;
  const Reduction how = reduction_of(out.dtype, op, algorithm);
  return run(n, [&] { return n.comm.reduce_scatter(in.ptr, out.ptr, out.elems, how); });
}

template <class Run>
int all_gather_memory(NativeComm& n, const TensorMemory& out, const TensorMemory& in, int algorithm,
                      Run run) {
  const View& v = n.comm.view();
  if (out.dtype != in.dtype || out.elems != in.elems * uint64_t(v.world) ||
      !is_chunk_or_apart(out, in, v.rank))
    return kNotFast;
  return run(n, [&] {
    return n.comm.all_gather(in.ptr, out.ptr, in.bytes(), in.dtype, chosen(Algorithm(algorithm)));
  });
}

}  // namespace ringcomm::host
