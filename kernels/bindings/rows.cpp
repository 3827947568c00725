// SPDX-License-Identifier: Apache-2.0

// Binds the rows of tokens of ringcomm._native: routing to experts, copies and sums.
#include <nanobind/stl/vector.h>

#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"
#include "kernels/host/comm.h"
#include "kernels/host/routing.h"
#include "kernels/host/worker_pool.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

int float_type(int dtype) {
  const DType type = DType(dtype);
  if (type != DType::kFloat32 && accumulator_of(type) != DType::kFloat32)
    throw nb::value_error("dtype: expected float32, bfloat16 or float16");
  return float_type_index(type);
}

uint64_t bytes_of(int dtype) { return uint64_t(size_of(DType(dtype))); }

// A table of entries of a given number of words, and the addresses to which they refer.
struct Table {
  std::vector<const char*> bases;
  RowTable rows;

  Table(uintptr_t entries, uint64_t entry_words, const Addresses& ptrs)
      : rows{typed<const int64_t>(entries), entry_words, nullptr} {
    for (const uintptr_t ptr : ptrs) bases.push_back(at(ptr));
    rows.bases = bases.data();
  }
  // Returns this table without its first `entry` entries.
  RowTable from(uint64_t entry) const { return {rows.entry(entry), rows.entry_words, rows.bases}; }
};

// Calls run(begin, end) for parts of `count` rows of `row_bytes` bytes each.
template <class Run>
void each_part(uint64_t count, uint64_t row_bytes, const Run& run) {
  run_in_parts(count, 1, count * row_bytes, threads_without_communicator(), run);
}

std::vector<Assignments> assignments_of(const Addresses& orders, const Addresses& counts) {
  std::vector<Assignments> all;
  for (size_t rank = 0; rank < orders.size(); ++rank)
    all.push_back({typed<const int64_t>(orders[rank]), typed<const int64_t>(counts[rank])});
  return all;
}

int64_t sort(uintptr_t topk_idx, uint64_t assignments, uint64_t experts, uintptr_t order,
             uintptr_t counts) {
  const WithoutGil nogil;
  return sort_by_expert(typed<const int64_t>(topk_idx), assignments, experts, typed<int64_t>(order),
                        typed<int64_t>(counts));
}

void expert_rows(const Addresses& orders, const Addresses& counts, uint64_t rank, uint64_t experts,
                 uint64_t assignments, uintptr_t out) {
  const std::vector<Assignments> all = assignments_of(orders, counts);
  const WithoutGil nogil;
  find_expert_rows(all, rank, experts, experts / all.size(), assignments, typed<int64_t>(out));
}

void sources(const Addresses& orders, const Addresses& counts, uint64_t first,
             uint64_t experts_here, uint64_t k, uintptr_t out, uintptr_t out_counts) {
  const std::vector<Assignments> all = assignments_of(orders, counts);
  const WithoutGil nogil;
  list_sources(all, first, experts_here, k, typed<int64_t>(out), typed<int64_t>(out_counts));
}

uint64_t rows_of(const Addresses& counts, uint64_t first, uint64_t experts_here) {
  uint64_t total = 0;
  for (const uintptr_t each : counts)
    for (uint64_t e = 0; e < experts_here; ++e)
      total += uint64_t(typed<const int64_t>(each)[first + e]);
  return total;
}

void copy_rows(uintptr_t entries, uint64_t entry_words, uint64_t count, const Addresses& bases,
               uint64_t row_bytes, uintptr_t out) {
  const Table table(entries, entry_words, bases);
  const bool streaming = count * row_bytes >= kStreamingMinBytes;
  const WithoutGil nogil;
  each_part(count, row_bytes, [&](uint64_t begin, uint64_t end) {
    kernels().copy_rows(
        {table.from(begin), end - begin, row_bytes, at(out) + begin * row_bytes, streaming});
  });
}

void quantize_rows(int format, uintptr_t in, int dtype, uint64_t count, uint64_t elems,
                   uintptr_t out) {
  const QuantizeFn loop = kernels().quant[format].quantize[float_type(dtype)];
  const uint64_t row_bytes = elems * bytes_of(dtype),
                 quantized_row_bytes = quantized_bytes(QuantFormat(format), elems);
  const WithoutGil nogil;
  each_part(count, row_bytes, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i)
      loop({at(in) + i * row_bytes, typed<uint8_t>(out) + i * quantized_row_bytes, elems, nullptr,
            0, elems});
  });
}

void dequantize_rows(int format, uintptr_t entries, uint64_t entry_words, uint64_t count,
                     const Addresses& bases, int dtype, uint64_t elems, uintptr_t out) {
  const DequantizeFn loop = kernels().quant[format].sum[float_type(dtype)];
  const uint64_t row_bytes = elems * bytes_of(dtype),
                 quantized_row_bytes = quantized_bytes(QuantFormat(format), elems);
  const Table table(entries, entry_words, bases);
  const WithoutGil nogil;
  each_part(count, row_bytes, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      char* const to = at(out) + i * row_bytes;
      if (!table.rows.has(i)) {
        std::memset(to, 0, row_bytes);
        continue;
      }
      const auto* const source =
          reinterpret_cast<const uint8_t*>(table.rows.row(i, quantized_row_bytes));
      loop({&source, 1, to, elems, 0, 0, elems});
    }
  });
}

void sum_rows(uintptr_t entries, const Addresses& bases, uint64_t tokens, uint64_t k,
              uintptr_t weights, int dtype, uint64_t elems, uintptr_t out) {
  const SumRowsFn loop = kernels().rows[float_type(dtype)].sum;
  const Table table(entries, 2, bases);
  const uint64_t row_bytes = elems * bytes_of(dtype);
  const bool streaming = tokens * row_bytes >= kStreamingMinBytes;
  const auto* const weight = typed<const float>(weights);
  const WithoutGil nogil;
  each_part(tokens, row_bytes, [&](uint64_t begin, uint64_t end) {
    loop({table.from(begin * k), end - begin, k, elems,
          weight == nullptr ? nullptr : weight + begin * k, at(out) + begin * row_bytes,
          streaming});
  });
}

void scale_rows(uintptr_t entries, uint64_t count, const Addresses& bases, uintptr_t weights,
                uintptr_t with, int dtype, uint64_t elems, uintptr_t out, uintptr_t dots) {
  const ScaleRowsFn loop = kernels().rows[float_type(dtype)].scale;
  const Table table(entries, kSourceWords, bases);
  const uint64_t row_bytes = elems * bytes_of(dtype);
  const bool streaming = count * row_bytes >= kStreamingMinBytes;
  const WithoutGil nogil;
  each_part(count, row_bytes, [&](uint64_t begin, uint64_t end) {
    loop({table.from(begin), end - begin, elems, typed<const float>(weights) + begin,
          at(with) + begin * row_bytes, at(out) + begin * row_bytes, typed<float>(dots) + begin,
          streaming});
  });
}

}  // namespace

void bind_rows(nb::module_& m) {
  add_constant(
      m, "SOURCE_WORDS", kSourceWords,
      "Words of a row's source: two entries of a table of rows, as `copy_rows` reads them.");
  m.def("sort_by_expert", sort, nb::arg("topk_idx_ptr"), nb::arg("assignments"), nb::arg("experts"),
        nb::arg("order_ptr"), nb::arg("counts_ptr"),
        "Sorts assignments (token t's to its j-th expert is t k + j) by expert, each in their "
        "order.\n\n"
        "Writes order int64 [assignments], of which those of expert -1 (none) are left out, and\n"
        "counts int64 [experts]. Returns the first assignment whose expert is out of range, or\n"
        "-1.");
  m.def("find_expert_rows", expert_rows, nb::arg("order_ptrs"), nb::arg("counts_ptrs"),
        nb::arg("rank"), nb::arg("experts"), nb::arg("assignments"), nb::arg("out_ptr"),
        "Writes int64 [assignments, 2]: the rank that an assignment of `rank` goes to, and its "
        "row.\n\n"
        "`order_ptrs` and `counts_ptrs` are those of all ranks, as `sort_by_expert` wrote them.\n"
        "-1 stands for the rank of an assignment to no expert.");
  m.def(
      "list_sources", sources, nb::arg("order_ptrs"), nb::arg("counts_ptrs"), nb::arg("first"),
      nb::arg("experts_here"), nb::arg("k"), nb::arg("out_ptr"), nb::arg("counts_out_ptr"),
      "Writes int64 [rows, SOURCE_WORDS] for the rows of experts [first, first + experts_here).\n\n"
      "A row has the rank of its token, the token, the rank again, and the assignment. Rows are\n"
      "sorted by expert, rank and assignment. Also writes how many rows each of these experts\n"
      "has, int64.");
  m.def("count_rows", rows_of, nb::arg("counts_ptrs"), nb::arg("first"), nb::arg("experts_here"),
        "Returns how many rows experts [first, first + experts_here) have, of all ranks' counts.");
  m.def("copy_rows", copy_rows, nb::arg("entries_ptr"), nb::arg("entry_words"), nb::arg("count"),
        nb::arg("base_ptrs"), nb::arg("row_bytes"), nb::arg("out_ptr"),
        "Copies rows that lie apart: of each entry, row `entry[1]` of the array "
        "`base_ptrs[entry[0]]`.\n\n"
        "Entries are int64 [count, entry_words]. A negative entry[0] gives zeros.");
  m.def("quantize_rows", quantize_rows, nb::arg("format"), nb::arg("in_ptr"), nb::arg("dtype"),
        nb::arg("count"), nb::arg("elems"), nb::arg("out_ptr"),
        "Quantizes rows of `elems` numbers, each as `quantize` does.");
  m.def("dequantize_rows", dequantize_rows, nb::arg("format"), nb::arg("entries_ptr"),
        nb::arg("entry_words"), nb::arg("count"), nb::arg("base_ptrs"), nb::arg("dtype"),
        nb::arg("elems"), nb::arg("out_ptr"),
        "Dequantizes rows that lie apart, found as by `copy_rows`.");
  m.def("sum_rows", sum_rows, nb::arg("entries_ptr"), nb::arg("base_ptrs"), nb::arg("tokens"),
        nb::arg("k"), nb::arg("weights_ptr"), nb::arg("dtype"), nb::arg("elems"),
        nb::arg("out_ptr"),
        "Writes for each token the sum of weight times row of its k entries, found as by "
        "`copy_rows`.\n\n"
        "Entries are int64 [tokens, k, 2], weights float32 [tokens, k]; 0 as `weights_ptr` means\n"
        "none. Products and sums are in float32, in the order of k, and the sum is rounded once\n"
        "to `dtype`.");
  m.def("scale_rows", scale_rows, nb::arg("entries_ptr"), nb::arg("count"), nb::arg("base_ptrs"),
        nb::arg("weights_ptr"), nb::arg("with_ptr"), nb::arg("dtype"), nb::arg("elems"),
        nb::arg("out_ptr"), nb::arg("dots_ptr"),
        "Writes weight times row of the sources [count, SOURCE_WORDS], found as by `copy_rows`.\n\n"
        "Also writes, in float32, the scalar product of each row and of that of `with_ptr`.");
}

}  // namespace ringcomm::host
