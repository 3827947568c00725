// SPDX-License-Identifier: Apache-2.0

// Binds the copies and sums of separate rows of a DeviceComm.
#include "kernels/bindings/module.h"
#include "kernels/cuda/device_comm.h"
#include "kernels/host/routing.h"

namespace nb = nanobind;

namespace ringcomm::host {

using device::DeviceComm;
using device::RowsArgs;

namespace {

RowsArgs rows_of(uintptr_t entries, uint64_t entry_words, uint64_t count, const Addresses& bases,
                 uint64_t row_bytes, uintptr_t out) {
  if (bases.size() > size_t(device::kMaxWorld))
    throw nb::value_error("bases: expected at most 64, one for each rank");
  RowsArgs rows{};
  rows.entries = typed<const int64_t>(entries);
  rows.entry_words = entry_words;
  rows.count = count;
  rows.row_bytes = row_bytes;
  rows.out = at(out);
  for (size_t rank = 0; rank < bases.size(); ++rank) rows.bases[rank] = at(bases[rank]);
  return rows;
}

}  // namespace

void bind_device_rows(nb::class_<DeviceComm>& c) {
  c.def(
       "copy_rows",
       [](DeviceComm& d, uintptr_t entries, uint64_t entry_words, uint64_t count,
          const Addresses& bases, uint64_t row_bytes, uintptr_t out) {
         d.copy_rows(rows_of(entries, entry_words, count, bases, row_bytes, out));
         return 0;
       },
       nb::arg("entries_ptr"), nb::arg("entry_words"), nb::arg("count"), nb::arg("base_ptrs"),
       nb::arg("row_bytes"), nb::arg("out_ptr"),
       "As the host's; the table of entries and all rows are in memory that the device maps.")
      .def(
          "sum_rows",
          [](DeviceComm& d, uintptr_t entries, const Addresses& bases, uint64_t tokens, uint64_t k,
             uintptr_t weights, int dtype, uint64_t elems, uintptr_t out) {
            const DType type = float_dtype_of(dtype);
            RowsArgs rows = rows_of(entries, 2, tokens, bases, elems * size_of(type), out);
            rows.k = k;
            rows.weights = typed<const float>(weights);
            d.sum_rows(rows, type);
            return 0;
          },
          nb::arg("entries_ptr"), nb::arg("base_ptrs"), nb::arg("tokens"), nb::arg("k"),
          nb::arg("weights_ptr"), nb::arg("dtype"), nb::arg("elems"), nb::arg("out_ptr"))
      .def(
          "scale_rows",
          [](DeviceComm& d, uintptr_t entries, uint64_t count, const Addresses& bases,
             uintptr_t weights, uintptr_t with, int dtype, uint64_t elems, uintptr_t out,
             uintptr_t dots) {
            const DType type = float_dtype_of(dtype);
            RowsArgs rows =
                rows_of(entries, kSourceWords, count, bases, elems * size_of(type), out);
            rows.weights = typed<const float>(weights);
            rows.with = at(with);
            rows.dots = typed<float>(dots);
            d.scale_rows(rows, type);
            return 0;
          },
          nb::arg("entries_ptr"), nb::arg("count"), nb::arg("base_ptrs"), nb::arg("weights_ptr"),
          nb::arg("with_ptr"), nb::arg("dtype"), nb::arg("elems"), nb::arg("out_ptr"),
          nb::arg("dots_ptr"));
}

}  // namespace ringcomm::host
