// SPDX-License-Identifier: Apache-2.0

// The loops over rows of tokens of one KernelTable: weighted sums of rows at separate addresses,
// and the gradients of these sums. Each isa_*.cpp includes this file once.
#pragma once

#include "kernels/host/isa_quantization.h"

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// Numbers of a row that are summed at a time: 4 KiB, which stay in the first-level cache.
constexpr uint64_t kRowTile = 1024;

inline void fetch_ahead(const RowTable& table, uint64_t i, uint64_t end, uint64_t row_bytes) {
  if (i < end && table.has(i)) prefetch_lines(table.row(i, row_bytes));
}

// acc = weight * row, or acc += weight * row; the product and the sum are rounded separately.
template <bool first, bool weighted>
inline void add_row(float* RC_RESTRICT acc, const float* RC_RESTRICT row, float weight,
                    uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    const float term = weighted ? weight * row[i] : row[i];
    acc[i] = first ? term : acc[i] + term;
  }
}

template <bool first>
inline void add_row(float* acc, const float* row, const float* weight, uint64_t n) {
  if (weight != nullptr)
    add_row<first, true>(acc, row, *weight, n);
  else
    add_row<first, false>(acc, row, 1.0f, n);
}

template <class T>
void sum_rows(const SumRowsJob& job) {
  alignas(64) float acc[kRowTile], room[kRowTile];
  alignas(64) T bounce[kRowTile];
  const uint64_t row_bytes = job.elems * sizeof(T);
  T* const out = static_cast<T*>(job.out);
  for (uint64_t token = 0; token < job.tokens; ++token) {
    const uint64_t begin = token * job.k, end = begin + job.k;
    for (uint64_t i = end; i < end + job.k; ++i)
      fetch_ahead(job.table, i, job.tokens * job.k, row_bytes);
    for (uint64_t at = 0; at < job.elems; at += kRowTile) {
      const uint64_t n = job.elems - at < kRowTile ? job.elems - at : kRowTile;
      bool first = true;
      for (uint64_t i = begin; i < end; ++i) {
        if (!job.table.has(i)) continue;
        const auto* from = reinterpret_cast<const T*>(job.table.row(i, row_bytes)) + at;
        const float* const row = widened(from, room, n);
        const float* const weight = job.weights == nullptr ? nullptr : job.weights + i;
        if (first)
          add_row<true>(acc, row, weight, n);
        else
          add_row<false>(acc, row, weight, n);
        first = false;
      }
      if (first) memset(acc, 0, n * sizeof(float));
      T* const to = out + token * job.elems + at;
      if (!job.streaming) {
        store_tile(to, acc, n);
        continue;
      }
      store_tile(bounce, acc, n);
      stream_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(bounce),
                   n * sizeof(T));
    }
  }
  if (job.streaming) stream_fence();
}

// Partial sums of a scalar product: number i is added to sum i % kDotLanes, so that all instruction
// sets compute the same bits.
constexpr int kDotLanes = 64;

inline void add_products(float* RC_RESTRICT sums, const float* RC_RESTRICT a,
                         const float* RC_RESTRICT b, uint64_t n) {
  uint64_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes)
    for (int lane = 0; lane < kDotLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (int lane = 0; i < n; ++i, ++lane) sums[lane] += a[i] * b[i];
}

inline float total_of(float* sums) {
  for (int half = kDotLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

inline void scale_tile(float* RC_RESTRICT to, const float* RC_RESTRICT row, float weight,
                       uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) to[i] = weight * row[i];
}

template <class T>
void scale_rows(const ScaleRowsJob& job) {
  alignas(64) float room[kRowTile], other[kRowTile], scaled[kRowTile], sums[kDotLanes];
  alignas(64) T bounce[kRowTile];
  const uint64_t row_bytes = job.elems * sizeof(T);
  for (uint64_t i = 0; i < job.count; ++i) {
    T* const out = static_cast<T*>(job.out) + i * job.elems;
    const T* const with = static_cast<const T*>(job.with) + i * job.elems;
    fetch_ahead(job.table, i + 1, job.count, row_bytes);
    memset(sums, 0, sizeof(sums));
    if (!job.table.has(i)) {
      memset(out, 0, row_bytes);
      job.dots[i] = 0.0f;
      continue;
    }
    const auto* const from = reinterpret_cast<const T*>(job.table.row(i, row_bytes));
    for (uint64_t at = 0; at < job.elems; at += kRowTile) {
      const uint64_t n = job.elems - at < kRowTile ? job.elems - at : kRowTile;
      const float* const row = widened(from + at, room, n);
      add_products(sums, row, widened(with + at, other, n), n);
      scale_tile(scaled, row, job.weights[i], n);
      if (!job.streaming) {
        store_tile(out + at, scaled, n);
        continue;
      }
      store_tile(bounce, scaled, n);
      stream_bytes(reinterpret_cast<char*>(out + at), reinterpret_cast<const char*>(bounce),
                   n * sizeof(T));
    }
    job.dots[i] = total_of(sums);
  }
  if (job.streaming) stream_fence();
}

inline void copy_rows(const CopyRowsJob& job) {
  char* out = static_cast<char*>(job.out);
  for (uint64_t i = 0; i < job.count; ++i, out += job.row_bytes) {
    fetch_ahead(job.table, i + 1, job.count, job.row_bytes);
    if (!job.table.has(i))
      memset(out, 0, job.row_bytes);
    else if (job.streaming)
      stream_bytes(out, job.table.row(i, job.row_bytes), job.row_bytes);
    else
      memcpy(out, job.table.row(i, job.row_bytes), job.row_bytes);
  }
  if (job.streaming) stream_fence();
}

template <class T>
constexpr RowKernels row_kernels() {
  return {&sum_rows<T>, &scale_rows<T>};
}

}  // namespace host
RINGCOMM_NAMESPACE_END
