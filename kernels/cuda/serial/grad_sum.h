// SPDX-License-Identifier: Apache-2.0

// Loads and sums the gradients of a chunk, 8 elements per lane and turn (16 bytes of 16-bit types,
// 32 bytes of FP32).
#pragma once

#include "kernels/cuda/serial/ops.h"
#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

constexpr int kTurnElems = 8;

template <class T>
struct Eight {
  static constexpr int kVectors = kTurnElems * int(sizeof(T)) / 16;
  static_assert(sizeof(T) >= 2);
  Vec16 v[kVectors];

  RC_TEAM_FN void load(const T* from) {
    RC_UNROLL
    for (int k = 0; k < kVectors; ++k) v[k] = load16(reinterpret_cast<const char*>(from) + 16 * k);
  }
  RC_TEAM_FN void store(T* to) const {
    RC_UNROLL
    for (int k = 0; k < kVectors; ++k) store16(reinterpret_cast<char*>(to) + 16 * k, v[k]);
  }
  RC_TEAM_FN void get(T (&x)[kTurnElems]) const { memcpy(x, v, sizeof(v)); }
  RC_TEAM_FN void set(const T (&x)[kTurnElems]) { memcpy(v, x, sizeof(v)); }
};

// The gradient of an element: the sum over the sources, divided by `divide_by` (0: no division).
template <class G>
struct GradSum {
  const void* const* ptrs;
  int count, divide_by;
  uint64_t first;  // element of the chunk that ptrs point at

  RC_TEAM_FN const G* source(int s, uint64_t at) const {
    return static_cast<const G*>(ptrs[s]) + (at - first);
  }
  RC_TEAM_FN bool aligned() const {
    bool all = true;
    for (int s = 0; s < count; ++s) all &= misalignment(ptrs[s]) == 0;
    return all;
  }
  RC_TEAM_FN float finished(float sum) const {
    return divide_by > 0 ? sum / float(divide_by) : sum;
  }
  RC_TEAM_FN float one(uint64_t at) const {
    float sum = Traits<G>::load(*source(0, at));
    for (int s = 1; s < count; ++s) sum += Traits<G>::load(*source(s, at));
    return finished(sum);
  }
  // Sums `unroll` times eight elements, `stride` apart. While the values of one source are added,
  // the loads of the next source are in flight.
  template <int unroll>
  RC_TEAM_FN void eights(uint64_t at, uint64_t stride, float (&sum)[unroll * kTurnElems]) const {
    Eight<G> now[unroll], next[unroll];
    RC_UNROLL
    for (int p = 0; p < unroll; ++p) now[p].load(source(0, at + uint64_t(p) * stride));
    RC_ROLLED
    for (int s = 0; s < count; ++s) {
      if (s + 1 < count) {
        RC_UNROLL
        for (int p = 0; p < unroll; ++p) next[p].load(source(s + 1, at + uint64_t(p) * stride));
      }
      RC_UNROLL
      for (int p = 0; p < unroll; ++p) {
        G x[kTurnElems];
        now[p].get(x);
        RC_UNROLL
        for (int k = 0; k < kTurnElems; ++k) {
          float& total = sum[p * kTurnElems + k];
          const float wide = Traits<G>::load(x[k]);
          total = s == 0 ? wide : total + wide;
        }
        now[p] = next[p];
      }
    }
    RC_UNROLL
    for (int k = 0; k < unroll * kTurnElems; ++k) sum[k] = finished(sum[k]);
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
