// SPDX-License-Identifier: Apache-2.0

// Copies, weighted sums and gradients of scattered rows in the memory of any rank, by the lanes of
// a block and with the host's bits (isa_rows.h). No kernel waits for peers. With rows of R bytes, a
// copy loads and stores R; a sum of k rows loads k * R and stores R; a gradient loads 2 R and
// stores R. A warp copies a row, or sums a token's rows, at a time; a single lane copies a row of
// one or two words. A scalar product has 64 partial sums: product i is added to sum i % 64. The
// lanes that share a row have a vector of sums each. On the host one lane does the work of a warp.
#pragma once

#include "kernels/cuda/loops.h"
#include "kernels/cuda/workspace.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

#if RC_CUDA
constexpr int kRowLanes = 32;
#else
constexpr int kRowLanes = 1;
#endif
// kRowUnroll: vectors per lane and turn of a sum. kDotRounds: rounds, of 64 products each, whose
// vectors are loaded together. Chosen without measurements.
constexpr int kRowUnroll = 4, kDotRounds = 2;
constexpr int kDotSums = 64;

// Returns the address of the row of entry i, or null if the entry means "no row".
RC_TEAM_FN const char* row_of(const RowsArgs& args, uint64_t i) {
  const int64_t* const entry = args.entries + i * args.entry_words;
  const int64_t rank = entry[0];
  return rank < 0 ? nullptr : args.bases[rank] + uint64_t(entry[1]) * args.row_bytes;
}

// A warp's index among all warps of the launch, and the lane's index in the warp.
struct WarpIndex {
  uint64_t warp, warps;
  int lane;

  template <class Team>
  RC_TEAM_FN explicit WarpIndex(const Team& team) {
    const uint64_t lanes = uint64_t(team.num_lanes());
    warp = (uint64_t(team.channel()) * lanes + uint64_t(team.lane())) / kRowLanes;
    warps = uint64_t(team.num_channels()) * lanes / kRowLanes;
    lane = team.lane() % kRowLanes;
  }
};

// Stores zeros to a row, by `lanes` adjacent lanes.
template <int lanes>
RC_TEAM_FN void clear_row(char* to, uint64_t bytes, bool has_vectors, int lane) {
  const Vec16 zeros{};
  if (has_vectors) {
    RC_ROLLED
    for (uint64_t at = uint64_t(lane) * 16; at < bytes; at += lanes * 16) store16(to + at, zeros);
    return;
  }
  RC_ROLLED
  for (uint64_t i = lane; i < bytes; i += lanes) to[i] = 0;
}

// Stores the row of entry i, or zeros, to row i of `out`.
template <class Team>
RC_TEAM_FN void copy_rows_kernel(Team team, const LaunchParams& p, int, Workspace&) {
  const RowsArgs& args = p.rows;
  const WarpIndex index(team);
  if (args.has_words) {
    const uint64_t lanes = index.warps * kRowLanes;
    const int words = int(args.row_bytes / 4);
    RC_ROLLED
    for (uint64_t i = index.warp * kRowLanes + uint64_t(index.lane); i < args.count; i += lanes) {
      const char* const from = row_of(args, i);
      char* const to = args.out + i * args.row_bytes;
      RC_ROLLED
      for (int w = 0; w < words; ++w)
        store4(to + 4 * w, from == nullptr ? 0u : load4(from + 4 * w));
    }
    return;
  }
  RC_ROLLED
  for (uint64_t i = index.warp; i < args.count; i += index.warps) {
    const char* const from = row_of(args, i);
    char* const to = args.out + i * args.row_bytes;
    if (from == nullptr)
      clear_row<kRowLanes>(to, args.row_bytes, args.has_vectors, index.lane);
    else
      copy_lanes(to, from, args.row_bytes, index.lane, kRowLanes);
  }
}

template <class T>
struct RowVector {
  static constexpr int kElems = 16 / sizeof(T);

  RC_TEAM_FN static void widen(float (&x)[kElems], const Vec16& v) {
    T narrow[kElems];
    memcpy(narrow, &v, sizeof(v));
    RC_UNROLL
    for (int e = 0; e < kElems; ++e) x[e] = Traits<T>::load(narrow[e]);
  }
  RC_TEAM_FN static Vec16 narrow(const float (&x)[kElems]) {
    T elems[kElems];
    RC_UNROLL
    for (int e = 0; e < kElems; ++e) elems[e] = Traits<T>::store(x[e]);
    Vec16 v;
    memcpy(&v, elems, sizeof(v));
    return v;
  }
};

// Computes the weighted sum of one token's rows.
template <class T>
struct RowSum {
  static constexpr int kElems = RowVector<T>::kElems;

  const RowsArgs& args;
  uint64_t first;  // index of the token's first entry
  T* out;
  int lane;

  RC_TEAM_FN float weight(uint64_t i) const {
    return args.weights == nullptr ? 1.0f : args.weights[i];
  }

  // Sums this lane's `unroll` vectors from `at` on, 16 * kRowLanes bytes apart.
  template <int unroll>
  RC_TEAM_FN void turn(uint64_t at) const {
    float sum[unroll][kElems] = {};
    bool is_first = true;
    RC_ROLLED
    for (uint64_t i = first; i < first + args.k; ++i) {
      const char* const row = row_of(args, i);
      if (row == nullptr) continue;
      const float by = weight(i);
      Vec16 now[unroll];
      RC_UNROLL
      for (int u = 0; u < unroll; ++u) now[u] = load16(row + at + u * kRowLanes * 16);
      // Each use waits for all loads: for sm_100, ptxas would otherwise convert the first vector
      // before it issues the last load.
      uint32_t any = 0;
      RC_UNROLL
      for (int u = 0; u < unroll; ++u) any |= now[u].word[0];
      const uint32_t zero = any & misalignment(row + at);
      RC_UNROLL
      for (int u = 0; u < unroll; ++u) {
        now[u].word[0] |= zero;
        float x[kElems];
        RowVector<T>::widen(x, now[u]);
        RC_UNROLL
        for (int e = 0; e < kElems; ++e) {
          const float term = by * x[e];
          sum[u][e] = is_first ? term : sum[u][e] + term;
        }
      }
      is_first = false;
    }
    RC_UNROLL
    for (int u = 0; u < unroll; ++u)
      store16(reinterpret_cast<char*>(out) + at + u * kRowLanes * 16, RowVector<T>::narrow(sum[u]));
  }

  RC_TEAM_FN void vectors() const {
    constexpr uint64_t step = kRowLanes * 16;
    uint64_t at = uint64_t(lane) * 16;
    RC_ROLLED
    for (; at + (kRowUnroll - 1) * step < args.row_bytes; at += kRowUnroll * step)
      turn<kRowUnroll>(at);
    RC_ROLLED
    for (; at < args.row_bytes; at += step) turn<1>(at);
  }

  // Sums rows element by element, at any address.
  RC_COLD static void elements(RowSum s) {
    const uint64_t elems = s.args.row_bytes / sizeof(T);
    RC_ROLLED
    for (uint64_t e = s.lane; e < elems; e += kRowLanes) {
      float sum = 0;
      bool is_first = true;
      RC_ROLLED
      for (uint64_t i = s.first; i < s.first + s.args.k; ++i) {
        const char* const row = row_of(s.args, i);
        if (row == nullptr) continue;
        const float term = s.weight(i) * Traits<T>::load(reinterpret_cast<const T*>(row)[e]);
        sum = is_first ? term : sum + term;
        is_first = false;
      }
      s.out[e] = Traits<T>::store(sum);
    }
  }
};

// Row t of `out`: the sum in FP32, in the order of j = 0 .. k - 1, of weight times row t * k + j.
template <class T, class Team>
RC_TEAM_FN void sum_rows_kernel(Team team, const LaunchParams& p, int, Workspace&) {
  const RowsArgs& args = p.rows;
  const WarpIndex index(team);
  RC_ROLLED
  for (uint64_t t = index.warp; t < args.count; t += index.warps) {
    T* const out = reinterpret_cast<T*>(args.out + t * args.row_bytes);
    const RowSum<T> sum{args, t * args.k, out, index.lane};
    if (args.has_vectors)
      sum.vectors();
    else
      RowSum<T>::elements(sum);
  }
}

// Scales one row by its weight, and computes its scalar product with a row of `with`.
template <class T>
struct ScaledRow {
  static constexpr int kElems = RowVector<T>::kElems;
  static constexpr int kLanes = kRowLanes == 1 ? 1 : kDotSums / kElems;  // lanes that share a row
  static constexpr int kVectors = kDotSums / kElems / kLanes;            // lane's vectors per round

  const char* row;  // null: no row
  const char* with;
  char* out;
  float weight;
  uint64_t bytes;
  int lane;

  using Sums = float[kVectors][kElems];

  RC_TEAM_FN void vector(float (&sums_of)[kElems], uint64_t at, const Vec16& of_row,
                         const Vec16& of_with) const {
    float x[kElems], y[kElems];
    RowVector<T>::widen(x, of_row);
    RowVector<T>::widen(y, of_with);
    RC_UNROLL
    for (int e = 0; e < kElems; ++e) {
      sums_of[e] += x[e] * y[e];
      x[e] = weight * x[e];
    }
    store16(out + at, RowVector<T>::narrow(x));
  }

  // Loads this lane's vectors of some rounds, from `at` on.
  template <int all>
  RC_TEAM_FN void load(Vec16 (&of_row)[all], Vec16 (&of_with)[all], uint64_t at) const {
    RC_UNROLL
    for (int v = 0; v < all; ++v) {
      of_row[v] = load16(row + at + v * kLanes * 16);
      of_with[v] = load16(with + at + v * kLanes * 16);
    }
  }

  // Loads the next rounds while it processes the current ones; the remaining rounds are processed
  // one by one.
  RC_TEAM_FN void vectors(Sums& sums) const {
    constexpr uint64_t round_bytes = kVectors * kLanes * 16, turn = kDotRounds * round_bytes;
    constexpr int all = kDotRounds * kVectors;
    // Up to `end`, a lane has all vectors of a turn.
    const uint64_t first = uint64_t(lane) * 16, end = first + bytes / turn * turn;
    uint64_t at = first;
    Vec16 of_row[all], of_with[all], next_row[all], next_with[all];
    if (at < end) load(of_row, of_with, at);
    RC_ROLLED
    for (; at < end; at += turn) {
      if (at + turn < end) load(next_row, next_with, at + turn);
      RC_UNROLL
      for (int v = 0; v < all; ++v) {
        vector(sums[v % kVectors], at + v * kLanes * 16, of_row[v], of_with[v]);
        of_row[v] = next_row[v];
        of_with[v] = next_with[v];
      }
    }
    RC_ROLLED
    for (; at < bytes; at += round_bytes) {
      RC_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const uint64_t here = at + v * kLanes * 16;
        if (here < bytes) vector(sums[v], here, load16(row + here), load16(with + here));
      }
    }
  }

  // Processes a row element by element, at any address.
  RC_TEAM_FN void elements(Sums& sums) const {
    const uint64_t elems = bytes / sizeof(T);
    RC_ROLLED
    for (uint64_t round = 0; round < elems; round += kDotSums) {
      RC_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        RC_UNROLL
        for (int e = 0; e < kElems; ++e) {
          const uint64_t i = round + uint64_t(v * kLanes + lane) * kElems + uint64_t(e);
          if (i >= elems) continue;
          const float x = Traits<T>::load(reinterpret_cast<const T*>(row)[i]);
          sums[v][e] += x * Traits<T>::load(reinterpret_cast<const T*>(with)[i]);
          reinterpret_cast<T*>(out)[i] = Traits<T>::store(weight * x);
        }
      }
    }
  }

  // Adds sums i and i + 32, then sums i and i + 16, and so on. Called by all lanes of a warp.
  RC_TEAM_FN static float total(Sums& sums) {
    RC_UNROLL
    for (int half = kVectors / 2; half > 0; half /= 2) {
      RC_UNROLL
      for (int v = 0; v < half; ++v) {
        RC_UNROLL
        for (int e = 0; e < kElems; ++e) sums[v][e] += sums[v + half][e];
      }
    }
    RC_UNROLL
    for (int half = kLanes / 2; half > 0; half /= 2) {
      RC_UNROLL
      for (int e = 0; e < kElems; ++e) sums[0][e] += exchanged(sums[0][e], half);
    }
    RC_UNROLL
    for (int half = kElems / 2; half > 0; half /= 2) {
      RC_UNROLL
      for (int e = 0; e < half; ++e) sums[0][e] += sums[0][e + half];
    }
    return sums[0][0];
  }
};

// Row i of `out`: weight times the row of entry i. dots[i]: the scalar product, in FP32, of that
// row and row i of `with`. Both are zero if the entry means "no row".
template <class T, class Team>
RC_TEAM_FN void scale_rows_kernel(Team team, const LaunchParams& p, int, Workspace&) {
  using Row = ScaledRow<T>;
  constexpr uint64_t together = kRowLanes / Row::kLanes;  // rows per warp
  const RowsArgs& args = p.rows;
  const WarpIndex index(team);
  const int lane = index.lane % Row::kLanes;
  RC_ROLLED
  for (uint64_t base = index.warp * together; base < args.count; base += index.warps * together) {
    const uint64_t i = base + uint64_t(index.lane / Row::kLanes);
    const bool has_work = i < args.count;
    const char* const row = has_work ? row_of(args, i) : nullptr;
    char* const out = args.out + i * args.row_bytes;
    typename Row::Sums sums = {};
    if (row != nullptr) {
      const Row each{row, args.with + i * args.row_bytes, out, args.weights[i], args.row_bytes,
                     lane};
      if (args.has_vectors)
        each.vectors(sums);
      else
        each.elements(sums);
    } else if (has_work) {
      clear_row<Row::kLanes>(out, args.row_bytes, args.has_vectors, lane);
    }
    const float dot = Row::total(sums);
    if (has_work && lane == 0) args.dots[i] = dot;
  }
}

}  // namespace device
RINGCOMM_NAMESPACE_END
