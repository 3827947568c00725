// SPDX-License-Identifier: Apache-2.0

// Loads and sums the gradients of a chunk, 8 elements per lane and turn (16 bytes of 16-bit types,
// 32 of FP32). With B bytes of gradients at each of S sources, S * B bytes are loaded, none stored.
#pragma once

#include "kernels/cuda/ops.h"
#include "kernels/cuda/quotients.h"
#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

constexpr int kTurnElems = 8;

// Consecutive elements in memory order, moved in accesses of 16 bytes or in one access of 8 bytes.
template <class T, int elems>
struct Pack {
  static constexpr int kBytes = elems * int(sizeof(T));
  static constexpr int kVectors = kBytes / 16;
  static_assert(kBytes == 8 || kBytes % 16 == 0);
  uint32_t word[kBytes / 4];

  RC_TEAM_FN void load(const T* from) {
    if constexpr (kBytes == 8) {
      const Vec8 v = load8(from);
      memcpy(word, &v, 8);
    }
    RC_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      const Vec16 v = load16(reinterpret_cast<const char*>(from) + 16 * k);
      memcpy(word + 4 * k, &v, 16);
    }
  }
  RC_TEAM_FN Vec16 vector(int k) const {
    Vec16 v;
    memcpy(&v, word + 4 * k, 16);
    return v;
  }
  RC_TEAM_FN void store(T* to) const {
    if constexpr (kBytes == 8) store8(to, Vec8{{word[0], word[1]}});
    RC_UNROLL
    for (int k = 0; k < kVectors; ++k) store16(reinterpret_cast<char*>(to) + 16 * k, vector(k));
  }
  RC_TEAM_FN void store_if(bool yes, T* to) const {
    RC_UNROLL
    for (int k = 0; k < kVectors; ++k)
      store16_if(yes, reinterpret_cast<char*>(to) + 16 * k, vector(k));
  }
  RC_TEAM_FN void get(T (&x)[elems]) const { memcpy(x, word, kBytes); }
  RC_TEAM_FN void set(const T (&x)[elems]) { memcpy(word, x, kBytes); }
  // Returns element k as FP32, by a conversion of one instruction. gate: zero, see Gate.
  RC_TEAM_FN float wide(int k, uint32_t gate) const {
    if constexpr (sizeof(T) == 2)
      return widened(word[k / 2], k % 2 != 0, gate, static_cast<T*>(nullptr));
    else
      return float_of(word[k] | gate);
  }
};
template <class T>
using Eight = Pack<T, kTurnElems>;

// Makes a zero that depends on loaded values. To save registers, ptxas would otherwise move some
// loads after the first uses of other loads. Values combined with this zero are used only after all
// loads have been issued.
struct Gate {
  uint32_t any = 0;

  template <class T>
  RC_TEAM_FN void await(const Eight<T>& loaded) {
    RC_UNROLL
    for (int k = 0; k < Eight<T>::kVectors; ++k) any |= loaded.word[4 * k];
  }
  // vector: an aligned address that vectors are loaded from.
  RC_TEAM_FN uint32_t zero(const void* vector) const { return any & misalignment(vector); }
};

// Eight elements of each of `sources` sources. All loads overlap, so they take one memory latency;
// the first use waits for it.
template <class G, int sources>
struct LoadedGrads {
  Eight<G> of[sources];

  // Adds in the sources' order. With a single source, a NaN need not keep its bits.
  RC_TEAM_FN void sum(float (&total)[kTurnElems], uint32_t gate) const {
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) {
      total[k] = of[0].wide(k, gate);
      RC_UNROLL
      for (int s = 1; s < sources; ++s) total[k] += of[s].wide(k, gate);
    }
  }
  RC_TEAM_FN void await(Gate& gate) const {
    RC_UNROLL
    for (int s = 0; s < sources; ++s) gate.await(of[s]);
  }
};

// The gradient of an element: the sum over the sources, divided by `divide_by` (0: no division).
template <class G>
struct GradSum {
  const void* const* ptrs;
  int count, divide_by;
  uint64_t first;  // element of the chunk that ptrs point at

  // Sources that are loaded together when their number is not known at compile time.
  static constexpr int kBatch = 4;

  RC_TEAM_FN const G* source(int s, uint64_t at) const {
    return static_cast<const G*>(ptrs[s]) + (at - first);
  }
  RC_TEAM_FN bool aligned() const {
    bool all = true;
    for (int s = 0; s < count; ++s) all &= misalignment(ptrs[s]) == 0;
    return all;
  }
  // True if the division is an exact product with `inverse`: the divisor is a power of two.
  RC_TEAM_FN bool scales() const { return is_power_of_two(divide_by); }
  RC_TEAM_FN float inverse() const { return divide_by > 0 ? reciprocal(float(divide_by)) : 1.0f; }

  // Scales eight sums; requires scales().
  RC_TEAM_FN void scale(float (&sum)[kTurnElems]) const {
    if (divide_by == 0) return;
    const float factor = inverse();
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) sum[k] *= factor;
  }
  RC_TEAM_FN float finished(float sum) const {
    return divide_by > 0 ? sum / float(divide_by) : sum;
  }
  RC_TEAM_FN float one(uint64_t at) const {
    float sum = Traits<G>::load(*source(0, at));
    for (int s = 1; s < count; ++s) sum += Traits<G>::load(*source(s, at));
    return finished(sum);
  }
  // Loads 8 elements of each source; `sources` must be the number of sources.
  template <int sources>
  RC_TEAM_FN LoadedGrads<G, sources> load(uint64_t at) const {
    // Compute all addresses first, so that no load waits for an address.
    const G* from[sources];
    RC_UNROLL
    for (int s = 0; s < sources; ++s) from[s] = source(s, at);
    LoadedGrads<G, sources> loaded;
    RC_UNROLL
    for (int s = 0; s < sources; ++s) loaded.of[s].load(from[s]);
    return loaded;
  }
  // Loads and sums `elems` consecutive elements.
  template <int elems>
  RC_TEAM_FN void some(uint64_t at, float (&total)[elems]) const {
    RC_ROLLED
    for (int begin = 0; begin < count; begin += kBatch) {
      Pack<G, elems> loaded[kBatch];
      RC_UNROLL
      for (int s = 0; s < kBatch; ++s)
        if (begin + s < count) loaded[s].load(source(begin + s, at));
      RC_UNROLL
      for (int s = 0; s < kBatch; ++s)
        if (begin + s < count) add(loaded[s], begin + s == 0, total);
    }
    RC_UNROLL
    for (int k = 0; k < elems; ++k) total[k] = finished(total[k]);
  }
  template <int elems>
  RC_TEAM_FN static void add(const Pack<G, elems>& loaded, bool first, float (&total)[elems]) {
    G x[elems];
    loaded.get(x);
    RC_UNROLL
    for (int k = 0; k < elems; ++k) {
      const float wide = Traits<G>::load(x[k]);
      total[k] = first ? wide : total[k] + wide;
    }
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
