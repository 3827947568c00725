// SPDX-License-Identifier: Apache-2.0

// Sums gradients into FP32 and computes the norm of the sum, tile by tile (grad_norm.h), by the
// lanes of a block.
#pragma once

#include "kernels/cuda/grad_sum.h"
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
  // Stores eight elements; with `accumulate`, adds them to the elements in `out`.
  RC_TEAM_FN void store(uint64_t at, float (&g)[kTurnElems]) const {
    if (out == nullptr) return;
    if (accumulate) add_to(load(at), g);
    Eight<float> held;
    held.set(g);
    held.store(out + at);
  }
  RC_TEAM_FN Eight<float> load(uint64_t at) const {
    Eight<float> held;
    held.load(out + at);
    return held;
  }
  RC_TEAM_FN static void add_to(const Eight<float>& held, float (&g)[kTurnElems]) {
    float before[kTurnElems];
    held.get(before);
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) g[k] += before[k];
  }
};

RC_TEAM_FN uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }

// A lane's elements of a tile: eight in each half of the tile.
constexpr uint64_t kHalfElems = kTileElems / 2;
struct TileElems {
  float half[2][kTurnElems];
};

#if RC_CUDA
constexpr int kNormLanes = 32;

// Adds a tile to the words of the norm. All lanes of a warp call it, and share the tile.
__device__ __forceinline__ void add_elems(const TileElems& g, NormKind kind, int lane,
                                          NormWords& words) {
  if (kind == NormKind::kInf) {
    uint32_t most = 0;
    RC_UNROLL
    for (int k = 0; k < 2 * kTurnElems; ++k) {
      const uint32_t each = magnitude(g.half[k / kTurnElems][k % kTurnElems]);
      most = each > most ? each : most;
    }
    most = largest_of_lanes<kNormLanes>(most);
    if (lane == 0) max_to_words(words, most);
    return;
  }
  double x[8];
  RC_UNROLL
  for (int k = 0; k < kTurnElems; ++k)
    x[k] = norm_term(g.half[0][k], kind) + norm_term(g.half[1][k], kind);
  const double sum = warp_tile_sum(WarpLanes{lane}, x);
  if (lane == 0) add_to_words(words, sum);
}

// Adds a tile to the words of the norm. elems(first, g) fills `g` with the lane's elements: of the
// tile's first half, those from element `first` on; of the second half, those half a tile later.
template <class Elems>
__device__ __forceinline__ void norm_tile(NormKind kind, int lane, NormWords& words, Elems elems) {
  TileElems g;
  elems(uint64_t(lane) * kTurnElems, g);
  add_elems(g, kind, lane, words);
}
#else
constexpr int kNormLanes = 1;

// On the host, one lane does the work of a warp.
template <class Elems>
inline void norm_tile(NormKind kind, int, NormWords& words, Elems elems) {
  float g[kTileElems];
  for (uint64_t i = 0; i < kHalfElems; i += kTurnElems) {
    TileElems some;
    elems(i, some);
    memcpy(g + i, some.half[0], sizeof(some.half[0]));
    memcpy(g + i + kHalfElems, some.half[1], sizeof(some.half[1]));
  }
  if (kind == NormKind::kInf) {
    uint32_t most = 0;
    for (float x : g) most = magnitude(x) > most ? magnitude(x) : most;
    return max_to_words(words, most);
  }
  double y[kHalfElems];
  for (uint64_t i = 0; i < kHalfElems; ++i)
    y[i] = norm_term(g[i], kind) + norm_term(g[i + kHalfElems], kind);
  for (uint64_t h = kTileElems / 4; h > 0; h /= 2)
    for (uint64_t i = 0; i < h; ++i) y[i] += y[i + h];
  add_to_words(words, y[0]);
}
#endif

// A lane's loads for half a tile: from each source, and from `out` if the sum is added to it.
template <class G, int sources, bool accumulates>
struct LoadedHalf {
  static constexpr int kVectors =
      sources * Eight<G>::kVectors + (accumulates ? Eight<float>::kVectors : 0);

  LoadedGrads<G, sources> grads;
  Eight<float> held;

  RC_TEAM_FN void load(const NormTarget<G>& t, uint64_t at) {
    grads = t.grads.template load<sources>(at);
    if constexpr (accumulates) held = t.load(at);
  }
  RC_TEAM_FN void await(Gate& gate) const {
    grads.await(gate);
    if constexpr (accumulates) gate.await(held);
  }
  RC_TEAM_FN void sum(const NormTarget<G>& t, uint32_t gate, float (&g)[kTurnElems]) const {
    grads.sum(g, gate);
    t.grads.scale(g);
    if constexpr (accumulates) t.add_to(held, g);
  }
};

// A turn of a warp: enough tiles for each lane to have at least eight vectors in flight. All
// vectors are loaded before the first is used.
template <class G, int sources, bool accumulates>
struct NormTurn {
  using Half = LoadedHalf<G, sources, accumulates>;
  static constexpr int kLoads = 2 * Half::kVectors;  // vectors per tile
  static constexpr int kTiles = kLoads < 8 ? (8 + kLoads - 1) / kLoads : 1;
  static constexpr uint64_t kElems = uint64_t(kTiles) * kTileElems;

  RC_TEAM_FN static void make(const NormTarget<G>& t, uint64_t begin, int lane, NormWords& words) {
    Half loaded[2 * kTiles];
    Gate gate;
    RC_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i)
      loaded[i].load(t, begin + uint64_t(lane) * kTurnElems + uint64_t(i) * kHalfElems);
    RC_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i) loaded[i].await(gate);
    const uint32_t zero = gate.zero(t.grads.source(0, begin));
    RC_UNROLL
    for (int tile = 0; tile < kTiles; ++tile)
      norm_tile(t.kind, lane, words, [&](uint64_t first, TileElems& g) {
        RC_UNROLL
        for (int half = 0; half < 2; ++half) {
          const uint64_t at = begin + first + uint64_t(2 * tile + half) * kHalfElems;
          Half& of = loaded[2 * tile + half];
          // On the host, one lane has more elements than `loaded` has space for.
          if constexpr (!RC_CUDA) of.load(t, at);
          of.sum(t, zero, g.half[half]);
          if (t.out == nullptr) continue;
          Eight<float> result;
          result.set(g.half[half]);
          result.store(t.out + at);
        }
      });
  }
};

// Sums a full or partial tile of any number of sources.
template <class G>
RC_TEAM_FN void norm_any(const NormTarget<G>& t, bool aligned, uint64_t begin, uint64_t end,
                         int lane, NormWords& words) {
  norm_tile(t.kind, lane, words, [&](uint64_t first, TileElems& g) {
    RC_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint64_t at = begin + first + uint64_t(half) * kHalfElems;
      if (aligned && at + kTurnElems <= end) {
        t.grads.some(at, g.half[half]);
        t.store(at, g.half[half]);
      } else {
        RC_UNROLL
        for (int k = 0; k < kTurnElems; ++k)
          g.half[half][k] = at + uint64_t(k) < end ? t.one(at + uint64_t(k)) : 0.0f;
      }
    }
  });
}

// Runs the whole turns of a warp. Returns the element at which the turns of all warps end.
template <class G, int sources, bool accumulates>
RC_TEAM_FN uint64_t norm_turns(const NormTarget<G>& t, Run run, NormWords& words, int lane,
                               int lanes) {
  using Turn = NormTurn<G, sources, accumulates>;
  const int warp = lane / kNormLanes, warps = lanes / kNormLanes;
  const uint64_t end = run.begin + (run.end - run.begin) / Turn::kElems * Turn::kElems;
  RC_ROLLED
  for (uint64_t begin = run.begin + uint64_t(warp) * Turn::kElems; begin < end;
       begin += uint64_t(warps) * Turn::kElems)
    Turn::make(t, begin, lane % kNormLanes, words);
  return end;
}

// Runs the loop for this number of sources, if there is one. FP32 gradients of eight sources would
// need more registers than a lane has.
template <class G, bool accumulates>
RC_TEAM_FN uint64_t norm_common(const NormTarget<G>& t, Run run, NormWords& words, int lane,
                                int lanes) {
  if (t.grads.count == 1) return norm_turns<G, 1, accumulates>(t, run, words, lane, lanes);
  if (t.grads.count == 2) return norm_turns<G, 2, accumulates>(t, run, words, lane, lanes);
  if (t.grads.count == 4) return norm_turns<G, 4, accumulates>(t, run, words, lane, lanes);
  if constexpr (sizeof(G) == 2)
    if (t.grads.count == 8) return norm_turns<G, 8, accumulates>(t, run, words, lane, lanes);
  return run.begin;
}

// The kernel that computes a norm, which fixes the possible numbers of sources.
enum class NormKernel { kAlone, kRing, kOneShot };

// Sums elements [run.begin, run.end) of the chunk, by all lanes; a tile begins at run.begin.
template <class G, NormKernel kernel>
RC_TEAM_FN void norm_lanes(const NormTarget<G>& t, Run run, NormWords& words, int lane, int lanes) {
  const bool aligned = t.grads.aligned() && misalignment(t.out) == 0;
  uint64_t begin = run.begin;
  if (aligned && run.begin < run.end && t.grads.scales()) {
    if constexpr (kernel == NormKernel::kAlone)
      begin = norm_turns<G, 1, false>(t, run, words, lane, lanes);
    if constexpr (kernel == NormKernel::kOneShot)
      begin = t.out != nullptr && t.accumulate ? norm_common<G, true>(t, run, words, lane, lanes)
                                               : norm_common<G, false>(t, run, words, lane, lanes);
  }
  const int warp = lane / kNormLanes, warps = lanes / kNormLanes;
  RC_ROLLED
  for (begin += uint64_t(warp) * kTileElems; begin < run.end; begin += uint64_t(warps) * kTileElems)
    norm_any(t, aligned, begin, run.end, lane % kNormLanes, words);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
