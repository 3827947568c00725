// SPDX-License-Identifier: Apache-2.0

// The collectives of a communicator as Python sees them, bound once for the host and once for
// devices: they take addresses and sizes, and return a status.
//
// Calls contains the differences between host and devices:
//   Comm                                      the class that is bound
//   world(comm)                               its number of ranks
//   reduction(dtype, op, factor, algorithm, &elems)
//                                             the reduction argument; may change the count `elems`
//   algorithm(code)                           the algorithm argument
//   run(comm, call)                           the status of call(collectives of comm)
#pragma once

#include "kernels/bindings/module.h"

namespace ringcomm::host {

using Addresses = std::vector<uintptr_t>;
using Sizes = std::vector<uint64_t>;

inline std::vector<Span> spans(const Addresses& ptrs, const Sizes& bytes) {
  std::vector<Span> result(ptrs.size());
  for (size_t i = 0; i < ptrs.size(); ++i) result[i] = {at(ptrs[i]), bytes[i]};
  return result;
}

// Returns one span of `bytes` bytes per rank. A rank that neither sends nor receives by a list,
// such as a sender of a gather, has passed an empty list.
inline std::vector<Span> spans(Addresses ptrs, uint64_t bytes, int world) {
  ptrs.resize(size_t(world));
  return spans(ptrs, Sizes(ptrs.size(), bytes));
}

template <class Calls>
void bind_reductions(nanobind::class_<typename Calls::Comm>& c) {
  using Comm = typename Calls::Comm;
  c.def(
       "all_reduce",
       [](Comm& n, uintptr_t in, uintptr_t out, uint64_t elems, int dtype, int op, double factor,
          int algorithm) {
         const auto r = Calls::reduction(dtype, op, factor, algorithm, &elems);
         return Calls::run(n,
                           [&](auto& comm) { return comm.all_reduce(at(in), at(out), elems, r); });
       },
       nanobind::sig("def all_reduce(self, in_ptr: int, out_ptr: int, elems: int, dtype: int, "
                     "op: int, factor: float, algorithm: int, /) -> int"))
      .def(
          "reduce",
          [](Comm& n, uintptr_t in, uintptr_t out, uint64_t elems, int dtype, int op, double factor,
             int root) {
            const auto r = Calls::reduction(dtype, op, factor, 0, &elems);
            return Calls::run(
                n, [&](auto& comm) { return comm.reduce(at(in), at(out), elems, r, root); });
          },
          nanobind::sig("def reduce(self, in_ptr: int, out_ptr: int, elems: int, dtype: int, "
                        "op: int, factor: float, root: int, /) -> int"))
      .def(
          "reduce_scatter",
          [](Comm& n, uintptr_t in, uintptr_t out, uint64_t elems, int dtype, int op, double factor,
             int algorithm) {
            const auto r = Calls::reduction(dtype, op, factor, algorithm, &elems);
            return Calls::run(
                n, [&](auto& comm) { return comm.reduce_scatter(at(in), at(out), elems, r); });
          },
          nanobind::sig("def reduce_scatter(self, in_ptr: int, out_ptr: int, out_elems: int, "
                        "dtype: int, op: int, factor: float, algorithm: int, /) -> int"))
      .def(
          "reduce_scatter_list",
          [](Comm& n, const Addresses& in, Sizes elems, uintptr_t out, int dtype, int op,
             double factor) {
            uint64_t none = 0;
            const auto r = Calls::reduction(dtype, op, factor, 0, &none);
            for (uint64_t& e : elems) e *= uint64_t(size_of(DType(dtype)));
            return Calls::run(n, [&](auto& comm) {
              return comm.reduce_scatter_list(spans(in, elems), at(out), r);
            });
          },
          nanobind::sig("def reduce_scatter_list(self, in_ptrs: Sequence[int], "
                        "in_elems: Sequence[int], out_ptr: int, dtype: int, op: int, "
                        "factor: float, /) -> int"));
}

template <class Calls>
void bind_movement(nanobind::class_<typename Calls::Comm>& c) {
  using Comm = typename Calls::Comm;
  c.def(
       "all_gather",
       [](Comm& n, uintptr_t in, uintptr_t out, uint64_t bytes, int dtype, int algorithm) {
         return Calls::run(n, [&](auto& comm) {
           return comm.all_gather(at(in), at(out), bytes, DType(dtype),
                                  Calls::algorithm(algorithm));
         });
       },
       nanobind::sig("def all_gather(self, in_ptr: int, out_ptr: int, in_bytes: int, "
                     "dtype: int, algorithm: int, /) -> int"))
      .def(
          "all_gather_list",
          [](Comm& n, uintptr_t in, const Addresses& out, const Sizes& bytes, int dtype) {
            return Calls::run(n, [&](auto& comm) {
              return comm.all_gather_list(at(in), spans(out, bytes), DType(dtype));
            });
          },
          nanobind::sig("def all_gather_list(self, in_ptr: int, out_ptrs: Sequence[int], "
                        "out_bytes: Sequence[int], dtype: int, /) -> int"))
      .def(
          "broadcast",
          [](Comm& n, uintptr_t ptr, uint64_t bytes, int dtype, int root) {
            return Calls::run(
                n, [&](auto& comm) { return comm.broadcast(at(ptr), bytes, DType(dtype), root); });
          },
          nanobind::sig("def broadcast(self, ptr: int, size_bytes: int, dtype: int, root: int, "
                        "/) -> int"))
      .def(
          "gather",
          [](Comm& n, uintptr_t in, uint64_t bytes, const Addresses& out, int dtype, int root) {
            return Calls::run(n, [&](auto& comm) {
              const auto list = spans(out, bytes, Calls::world(n));
              return comm.gather(at(in), bytes, list, DType(dtype), root);
            });
          },
          nanobind::sig("def gather(self, in_ptr: int, size_bytes: int, "
                        "out_ptrs: Sequence[int], dtype: int, root: int, /) -> int"))
      .def(
          "scatter",
          [](Comm& n, const Addresses& in, uintptr_t out, uint64_t bytes, int dtype, int root) {
            return Calls::run(n, [&](auto& comm) {
              const auto list = spans(in, bytes, Calls::world(n));
              return comm.scatter(list, at(out), bytes, DType(dtype), root);
            });
          },
          nanobind::sig("def scatter(self, in_ptrs: Sequence[int], out_ptr: int, "
                        "size_bytes: int, dtype: int, root: int, /) -> int"))
      .def(
          "all_to_all",
          [](Comm& n, const Addresses& in, const Sizes& in_bytes, const Addresses& out,
             const Sizes& out_bytes, int dtype) {
            return Calls::run(n, [&](auto& comm) {
              return comm.all_to_all(spans(in, in_bytes), spans(out, out_bytes), DType(dtype));
            });
          },
          nanobind::sig("def all_to_all(self, in_ptrs: Sequence[int], in_bytes: Sequence[int], "
                        "out_ptrs: Sequence[int], out_bytes: Sequence[int], dtype: int, "
                        "/) -> int"))
      .def("barrier",
           [](Comm& n) { return Calls::run(n, [](auto& comm) { return comm.barrier(); }); });
}

template <class Calls>
void bind_collectives(nanobind::class_<typename Calls::Comm>& c) {
  bind_reductions<Calls>(c);
  bind_movement<Calls>(c);
}

}  // namespace ringcomm::host
