// SPDX-License-Identifier: Apache-2.0

// Sums gradients into FP32 and computes the norm of the sum, tile by tile (grad_norm.h), by the
// lanes of a block.
#pragma once

#include "kernels/cuda/serial/grad_sum.h"
#include "kernels/cuda/warp_sum.h"
#include "ringcomm/optimizer/buckets.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Add a tile's sum, or its largest magnitude, to the team's words.
RC_TEAM_FN void add_to_words(NormWords& words, double sum) {
  add_tile(sum, [&](int k, int64_t digit) { add_relaxed_sys(&words.word[k], digit); });
}

RC_TEAM_FN void max_to_words(NormWords& words, uint32_t most) {
  if (most >= 0x7f800000u)
    add_relaxed_sys(&words.word[kNonFiniteWord], 1);
  else
    max_relaxed_sys(&words.word[0], int64_t(most));
}

template <class G>
struct NormTarget {
  GradSum<G> grads;
  float* out;  // null: compute only the norm
  bool accumulate;
  NormKind kind;

  RC_TEAM_FN float one(uint64_t at) const {
    float g = grads.one(at);
    if (out == nullptr) return g;
    if (accumulate) g = out[at] + g;
    out[at] = g;
    return g;
  }
  // Sums elements [at, at + 8), and the eight elements half a tile later.
  RC_TEAM_FN void sixteen(uint64_t at, float (&g)[2 * kTurnElems]) const {
    grads.template eights<2>(at, kTileElems / 2, g);
    if (out == nullptr) return;
    RC_UNROLL
    for (int p = 0; p < 2; ++p) {
      float* const to = out + at + uint64_t(p) * (kTileElems / 2);
      Eight<float> held;
      if (accumulate) {
        held.load(to);
        float before[kTurnElems];
        held.get(before);
        RC_UNROLL
        for (int k = 0; k < kTurnElems; ++k) g[p * kTurnElems + k] += before[k];
      }
      float half[kTurnElems];
      RC_UNROLL
      for (int k = 0; k < kTurnElems; ++k) half[k] = g[p * kTurnElems + k];
      held.set(half);
      held.store(to);
    }
  }
};

// Sets g to a lane's elements of the tile, from `at` on; elements after `end` are zero.
template <class G>
RC_TEAM_FN void terms_of(const NormTarget<G>& t, bool aligned, uint64_t at, uint64_t end,
                         float (&g)[2 * kTurnElems]) {
  if (aligned && at + kTileElems / 2 + kTurnElems <= end) return t.sixteen(at, g);
  RC_UNROLL
  for (int k = 0; k < 2 * kTurnElems; ++k) {
    const uint64_t i = at + uint64_t(k % kTurnElems) + uint64_t(k / kTurnElems) * (kTileElems / 2);
    g[k] = i < end ? t.one(i) : 0.0f;
  }
}

RC_TEAM_FN uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }

#if RC_CUDA
// Sums a tile of kTileElems elements, by a warp.
template <class G>
__device__ __forceinline__ void norm_tile(const NormTarget<G>& t, bool aligned, uint64_t begin,
                                          uint64_t end, int lane, NormWords& words) {
  float g[2 * kTurnElems];
  terms_of(t, aligned, begin + uint64_t(lane) * kTurnElems, end, g);
  if (t.kind == NormKind::kInf) {
    uint32_t most = 0;
    RC_UNROLL
    for (int k = 0; k < 2 * kTurnElems; ++k) {
      const uint32_t each = magnitude(g[k]);
      most = each > most ? each : most;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, most, mask);
      most = other > most ? other : most;
    }
    if (lane == 0) max_to_words(words, most);
    return;
  }
  double x[8];
  RC_UNROLL
  for (int k = 0; k < kTurnElems; ++k)
    x[k] = norm_term(g[k], t.kind) + norm_term(g[k + kTurnElems], t.kind);
  const double sum = warp_tile_sum(WarpLanes{lane}, x);
  if (lane == 0) add_to_words(words, sum);
}
constexpr int kNormLanes = 32;
#else
// Sums a tile by one lane, which does the work of a warp.
template <class G>
inline void norm_tile(const NormTarget<G>& t, bool aligned, uint64_t begin, uint64_t end, int,
                      NormWords& words) {
  float g[kTileElems];
  for (uint64_t i = 0; i < kTileElems / 2; i += kTurnElems) {
    float some[2 * kTurnElems];
    terms_of(t, aligned, begin + i, end, some);
    memcpy(g + i, some, sizeof(some) / 2);
    memcpy(g + i + kTileElems / 2, some + kTurnElems, sizeof(some) / 2);
  }
  if (t.kind == NormKind::kInf) {
    uint32_t most = 0;
    for (float x : g) most = magnitude(x) > most ? magnitude(x) : most;
    return max_to_words(words, most);
  }
  double y[kTileElems / 2];
  for (uint64_t i = 0; i < kTileElems / 2; ++i)
    y[i] = norm_term(g[i], t.kind) + norm_term(g[i + kTileElems / 2], t.kind);
  for (uint64_t h = kTileElems / 4; h > 0; h /= 2)
    for (uint64_t i = 0; i < h; ++i) y[i] += y[i + h];
  add_to_words(words, y[0]);
}
constexpr int kNormLanes = 1;
#endif

// Sums elements [run.begin, run.end) of the chunk, by all lanes; a tile begins at run.begin.
template <class G>
RC_COLD void norm_lanes(NormTarget<G> t, Run run, NormWords& words, int lane, int lanes) {
  const bool aligned = t.grads.aligned() && misalignment(t.out) == 0;
  const int warp = lane / kNormLanes, warps = lanes / kNormLanes;
  for (uint64_t begin = run.begin + uint64_t(warp) * kTileElems; begin < run.end;
       begin += uint64_t(warps) * kTileElems)
    norm_tile(t, aligned, begin, run.end, lane % kNormLanes, words);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
