// SPDX-License-Identifier: Apache-2.0

// The loops that move and reduce bytes: one table per instruction set. Each table is compiled in
// its own translation unit; the best table that the CPU supports is chosen at run time.
#pragma once

#include "ringcomm/core/quantization.h"
#include "ringcomm/core/reduce.h"
#include "ringcomm/optimizer/grad_norm.h"

namespace ringcomm {

// dst[i] = also[i] = the reduction over s of sources[s][i]. Results may have another element type
// than the sources.
struct ReduceJob {
  void* dst;                       // may be one of the sources if it has their type
  void* also;                      // a second destination, or null
  bool streaming, also_streaming;  // true: store past the caches
  const void* const* sources;
  const double* factors;
  int count;
  int finish_world;  // ranks in the sum, as in finish() of reduce.h; 0: a partial sum
  uint64_t bytes;    // size of a source
};
using ReduceFn = void (*)(const ReduceJob& job);

// kHalves: the number of types that accumulate in another type. half_index(): the index of such a
// type in tables; -1 for all other types.
constexpr int kHalves = 2;
constexpr int half_index(DType type) {
  switch (type) {
    case DType::kFloat16:
      return 0;
    case DType::kBFloat16:
      return 1;
    default:
      return -1;
  }
}
constexpr bool every_half_has_an_index() {
  bool taken[kHalves] = {};
  for (int t = 0; t < int(DType::kCount); ++t) {
    const int index = half_index(DType(t));
    if ((accumulator_of(DType(t)) != DType(t)) != (index >= 0)) return false;
    if (index < 0) continue;
    if (index >= kHalves || taken[index]) return false;
    taken[index] = true;
  }
  for (const bool each : taken)
    if (!each) return false;
  return true;
}
static_assert(every_half_has_an_index(),
              "give each type whose accumulator_of (core/dtypes.h) is another type a case of its "
              "own in half_index, and count the cases in kHalves");

// The gradient of element i of a chunk: the sum over s of sources[s][i - first], divided by
// `divide_by` unless `divide_by` is 0.
struct GradSources {
  const void* const* ptrs;
  int count;
  DType dtype;  // kFloat32, kBFloat16 or kFloat16
  int divide_by;
  uint64_t first;
  int sum_group_size = 0;  // sources per group; group sums are added in order; 0: one group
};

// The update of elements [begin, end) of a shard.
struct AdamWJob {
  const AdamWShard* shard;
  GradSources grads;
  char* const* copies;  // [copy_count] other ranks' buckets of parameters; null: not written
  int copy_count;
  uint64_t begin, end;
  bool streaming;  // parameters are stored past the caches
};
using AdamWFn = void (*)(const AdamWJob& job);

// out[i] = (accumulate ? out[i] : 0) + gradient i for i in [begin, end), and the result's norm.
struct NormJob {
  GradSources grads;
  float* out;  // null: compute only the norm
  bool accumulate;
  NormKind kind;
  NormWords* words;     // the norm is added to these; null: no norm
  uint64_t begin, end;  // begin is a multiple of kTileElems
  bool streaming;       // `out` is stored past the caches
};
using NormFn = void (*)(const NormJob& job);

// Quantizes in[i], or with error feedback in[i] + error_feedback[i]. error_feedback[i] then becomes
// the quantization error, or 0 in a block with infinities or NaNs.
struct QuantizeJob {
  const void* in;
  uint8_t* out;
  uint64_t elems;
  float* error_feedback;  // null: no error feedback
  uint64_t begin, end;    // quantizes only these; begin is a multiple of kQuantBlock
};
using QuantizeFn = void (*)(const QuantizeJob& job);

// out[i] = the sum over s of the numbers of sources[s], divided by `divide_by` (0: no division).
struct DequantizeJob {
  const uint8_t* const* sources;
  int count;
  void* out;
  uint64_t elems;
  int divide_by;
  uint64_t begin, end;  // writes only these; begin is a multiple of kQuantBlock
};
using DequantizeFn = void (*)(const DequantizeJob& job);

// The loops of a quantized format, by the type of the numbers: float16, bfloat16, float32.
constexpr int kFloatTypes = 3;
constexpr int float_type_index(DType type) {
  return type == DType::kFloat32 ? 2 : type == DType::kBFloat16 ? 1 : 0;
}
struct QuantKernels {
  QuantizeFn quantize[kFloatTypes];
  DequantizeFn sum[kFloatTypes];
};

// The addresses of rows that are read one by one. The entry of row i is at entries + i *
// entry_words: the row is number `entry[1]` of the array of rows at bases[entry[0]]. A negative
// entry[0] means that there is no row.
struct RowTable {
  const int64_t* entries;
  uint64_t entry_words;
  const char* const* bases;

  const int64_t* entry(uint64_t i) const { return entries + i * entry_words; }
  bool has(uint64_t i) const { return *entry(i) >= 0; }
  const char* row(uint64_t i, uint64_t row_bytes) const {
    const int64_t* const at = entry(i);
    return bases[at[0]] + uint64_t(at[1]) * row_bytes;
  }
};

// out[i] = row i of the table, or zeros if there is no row.
struct CopyRowsJob {
  RowTable table;
  uint64_t count, row_bytes;
  void* out;
  bool streaming;  // stored past the caches
};
using CopyRowsFn = void (*)(const CopyRowsJob& job);

// out[t] = the sum in FP32 over j < k, in ascending order, of weights[i] * row i of the table,
// where i = t * k + j, rounded once. Without weights the rows are added unweighted.
struct SumRowsJob {
  RowTable table;
  uint64_t tokens, k, elems;
  const float* weights;  // null: none
  void* out;
  bool streaming;
};
using SumRowsFn = void (*)(const SumRowsJob& job);

// out[i] = weights[i] * row i of the table, and dots[i] = the scalar product of row i and with[i]
// in FP32. Both are zero if there is no row.
struct ScaleRowsJob {
  RowTable table;
  uint64_t count, elems;
  const float* weights;
  const void* with;
  void* out;
  float* dots;
  bool streaming;
};
using ScaleRowsFn = void (*)(const ScaleRowsJob& job);

struct RowKernels {
  SumRowsFn sum;
  ScaleRowsFn scale;
};

struct KernelTable {
  const char* isa;
  void (*copy)(void* dst, const void* src, uint64_t bytes);
  // Stores past the caches, and fences: a later release publishes these stores.
  void (*copy_streaming)(void* dst, const void* src, uint64_t bytes);
  AdamWFn adamw;
  NormFn reduce_norm;
  ReduceFn reduce[int(DType::kCount)]
                 [int(RedOp::kCount)];  // null where the operator is not defined
  // From a type to its accumulator's type, and back; indexed by half_index.
  ReduceFn widening[kHalves][int(RedOp::kCount)], narrowing[kHalves][int(RedOp::kCount)];
  QuantKernels quant[int(QuantFormat::kCount)];
  CopyRowsFn copy_rows;
  RowKernels rows[kFloatTypes];
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

const KernelTable& kernels();
// For tests: selects an instruction set; "" selects the best. Returns false if this CPU, or this
// build, lacks the instruction set.
bool force_isa(const char* name);

}  // namespace ringcomm
