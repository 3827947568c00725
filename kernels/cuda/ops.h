// SPDX-License-Identifier: Apache-2.0

// Copies and reductions on a GPU (the Ops of endpoint.h): 16-byte accesses, many independent loads
// in flight per lane, adjacent lanes at adjacent addresses. It also compiles for the host, where
// threads are the lanes. B bytes and S sources: S * B bytes are loaded, B stored.
//
// A lane alternates between two sets of registers: while it uses one set, the loads of the other
// are in flight. So half of a lane's loads are in flight whenever it waits. Pointers of different
// alignment (a view that begins at an odd element) are accessed element by element or byte by byte,
// which is several times slower.
#pragma once

#include "kernels/cuda/ptx.h"
#include "ringcomm/core/reduce.h"
#include "ringcomm/protocol/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// 16-byte loads that a lane has in flight. 384 lanes with 16 loads each have 96 KiB in flight. An
// H100 needs about 23 KiB per multiprocessor (3 TB/s, 1 us latency). Fewer loads fit where
// operators spread the elements of a vector over several registers. These numbers come from this
// estimate and the limit of 168 registers; they are not measured on a GPU.
constexpr int kCopyLoads = 16;
template <class T>
constexpr int kReduceLoads = sizeof(T) < 4 && sizeof(typename Traits<T>::Acc) == sizeof(T) ? 8 : 16;
// Sources that are loaded together if their number is not 1, 2, 4 or 8.
constexpr int kBatch = 4;

template <bool truth>
struct Constant {
  static constexpr bool value = truth;
};

#if RC_CUDA
constexpr int kWarpLanes = 32;
// Returns a value that is equal in all lanes of a warp. ptxas can keep the result in a uniform
// register, which all lanes share.
RC_TEAM_FN uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }
#else
constexpr int kWarpLanes = 1;
inline uint32_t uniform(uint32_t x) { return x; }
#endif
RC_TEAM_FN int64_t uniform(int64_t x) {
  return int64_t(uint64_t(uniform(uint32_t(uint64_t(x) >> 32))) << 32 | uniform(uint32_t(x)));
}
constexpr int kVectorStep = kWarpLanes * 16;  // bytes from one vector of a lane to the next

RC_TEAM_FN uint32_t misalignment(const void* ptr) {
  return uint32_t(reinterpret_cast<uintptr_t>(ptr) & 15);
}

// Returns the bytes before the first 16-byte boundary of ptr.
RC_TEAM_FN uint64_t head_bytes(const void* ptr, uint64_t bytes) {
  const uint64_t head = (16 - misalignment(ptr)) & 15;
  return head < bytes ? head : bytes;
}

// The destinations of a vector.
struct Results {
  char *dst, *also;  // also: a second destination, or null

  RC_TEAM_FN void store(uint64_t at, const Vec16& v) const {
    store16(dst + at, v);
    if (also != nullptr) store16(also + at, v);
  }
  RC_TEAM_FN void move(uint32_t vectors) {
    dst = behind(dst, vectors);
    if (also != nullptr) also = behind(also, vectors);
  }
  RC_TEAM_FN Results at(uint64_t bytes) const {
    return {dst + bytes, also == nullptr ? nullptr : also + bytes};
  }
};

// The vectors of a team; the first begins at byte `head`.
struct Vectors {
  uint64_t head, count;
  int lane, lanes;
};

// Half a turn of a lane: `half` vectors of each source, kVectorStep bytes apart. `vector` is the
// number of the first vector. whole: all vectors exist; else only vectors below `count` do.
template <int sources, int half>
struct HalfTurn {
  static constexpr int kVectors = half * kWarpLanes;  // vectors of all lanes of a warp
  static constexpr uint64_t kBytes = uint64_t(half) * kVectorStep;
  Vec16 v[half][sources];

  template <bool whole>
  RC_TEAM_FN void load(const char* const (&from)[sources], uint64_t at, uint32_t vector,
                       uint32_t count) {
    RC_UNROLL
    for (int u = 0; u < half; ++u)
      if (whole || vector + u * kWarpLanes < count) {
        RC_UNROLL
        for (int s = 0; s < sources; ++s) v[u][s] = load16(from[s] + at + u * kVectorStep);
      }
  }
  // Computes result(v) for each vector's sources v.
  template <class Result>
  RC_TEAM_FN void use(const Result& result, Vec16 (&made)[half]) const {
    RC_UNROLL
    for (int u = 0; u < half; ++u) made[u] = result(v[u]);
  }
  template <bool whole>
  RC_TEAM_FN static void store(const Vec16 (&made)[half], const Results& to, uint64_t at,
                               uint32_t vector, uint32_t count) {
    RC_UNROLL
    for (int u = 0; u < half; ++u)
      if (whole || vector + u * kWarpLanes < count) store16(to.dst + at + u * kVectorStep, made[u]);
    if (to.also == nullptr) return;
    RC_UNROLL
    for (int u = 0; u < half; ++u)
      if (whole || vector + u * kWarpLanes < count)
        store16(to.also + at + u * kVectorStep, made[u]);
  }
};

// Returns the gaps of a warp in uniform registers.
RC_TEAM_FN Gaps uniform(const Gaps& g) {
  return {uniform(g.dealt), uniform(g.each), uniform(g.to_rest),
          int32_t(uniform(uint32_t(g.shift)))};
}

// Stores result(v) for every vector position of a lane; v has one vector per source. In a turn, a
// warp takes two halves of `half` * kWarpLanes consecutive vectors; in each half a lane takes every
// kWarpLanes-th vector. A lane's vectors are a constant distance apart, so that one address in
// registers reaches all of them. If there are gaps, they are the same in all sources and results,
// and the first vector is at position 0. The vectors of a warp's turn are in one tile, since their
// number divides the vectors of a tile.
template <int sources, int half, class Result>
RC_TEAM_FN void use_vectors(const char* (&from)[sources], Results to, const Vectors& all,
                            const Gaps& gaps, const Result& result) {
  using Half = HalfTurn<sources, half>;
  static_assert((half & (half - 1)) == 0 && 2 * Half::kBytes <= uint64_t(1) << kLeastTileShift);
  // Many sources leave no registers for the gaps, which each turn then loads from shared memory.
  constexpr bool kKeepsGaps = sources < 8;
  const Gaps kept = kKeepsGaps ? uniform(gaps) : Gaps{};
  const auto gaps_before = [&](uint32_t v) { return (kKeepsGaps ? kept : gaps).before(v); };
  const uint32_t lane = uint32_t(all.lane) % kWarpLanes, step = uint32_t(all.lanes) * (2 * half),
                 count = uniform(uint32_t(all.count));
  // The warp's first vector of the turn, the gaps before it, and the vectors to the next turn.
  uint32_t vector = uniform(uint32_t(all.lane) / kWarpLanes) * (2 * Half::kVectors);
  uint32_t before = gaps_before(vector), vectors = 0;
  const auto advance = [&] {
    const uint32_t former = before;
    before = gaps_before(vector + step);
    vectors = step + before - former;
    RC_UNROLL
    for (int s = 0; s < sources; ++s) from[s] = behind(from[s], vectors);
  };
  const uint64_t begin = all.head + (uint64_t(vector + lane) + before) * 16;
  RC_UNROLL
  for (int s = 0; s < sources; ++s) from[s] += begin;
  to = to.at(begin);
  Half a{}, b{};  // the two halves of a turn
  Vec16 made[half];
  a.template load<false>(from, 0, vector + lane, count);
  b.template load<false>(from, Half::kBytes, vector + lane + Half::kVectors, count);
  a.use(result, made);
  Half::template store<false>(made, to, 0, vector + lane, count);
  advance();
  // Takes the second half of this turn and the first half of the next, whose addresses are ready.
  // Only one half is in flight from call to call: otherwise ptxas waits for both halves together.
  const auto turn = [&](auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    const uint32_t mine = vector + lane, next = mine + step;
    // Zero-initialized where some vectors are not loaded: otherwise ptxas keeps their old registers
    // alive, and runs out of registers.
    if constexpr (!kWhole) a = Half{};
    a.template load<kWhole>(from, 0, next, count);
    b.use(result, made);
    // ptxas moves no load ahead of a store. With these stores before the loads of `b`, it would use
    // `b` before it issues the loads of `a`: few loads would be in flight during the wait for `b`.
    // The stores come first with one source, whose uses are short, and in partial turns, which lack
    // registers.
    constexpr bool kStoresLater = kWhole && sources > 1;
    if constexpr (!kStoresLater)
      Half::template store<kWhole>(made, to, Half::kBytes, mine + Half::kVectors, count);
    if constexpr (!kWhole) b = Half{};
    b.template load<kWhole>(from, Half::kBytes, next + Half::kVectors, count);
    if constexpr (kStoresLater)
      Half::template store<kWhole>(made, to, Half::kBytes, mine + Half::kVectors, count);
    to.move(vectors);
    vector += step;
    advance();
    a.use(result, made);
    Half::template store<kWhole>(made, to, 0, next, count);
  };
  RC_ROLLED
  while (vector + step + 2 * Half::kVectors <= count) turn(Constant<true>{});
  RC_ROLLED
  while (vector < count) turn(Constant<false>{});
}

// Calls visit(offset, stretch) for each stretch of `all` that a loop takes at once. The stretch
// begins `offset` bytes behind the first address. Vectors at misaligned addresses would cross
// the ends of tiles: there, a loop takes one tile after the other.
template <class Visit>
RC_TEAM_FN void each_stretch(const Stretch& all, bool aligned, const Visit& visit) {
  const bool at_once = aligned || all.gaps.dealt == 0;
  uint64_t position = 0;
  RC_ROLLED
  do {
    const uint64_t bytes = at_once ? all.bytes : all.consecutive(position);
    visit(all.gaps.offset(position), Stretch(bytes, at_once ? all.gaps : Gaps{}));
    position += bytes;
  } while (position < all.bytes);
}

RC_TEAM_FN void copy_stretch(char* dst, const char* src, const Stretch& all, int lane, int lanes) {
  const uint64_t bytes = all.bytes;
  const bool alike = misalignment(dst) == misalignment(src) && bytes < kMostPartBytes;
  const uint64_t head = alike ? head_bytes(dst, bytes) : bytes, vectors = (bytes - head) / 16;
  const char* ptrs[1] = {src};
  if (vectors > 0)
    use_vectors<1, kCopyLoads / 2>(ptrs, Results{dst, nullptr}, Vectors{head, vectors, lane, lanes},
                                   all.gaps, [](const Vec16(&v)[1]) { return v[0]; });
  RC_ROLLED
  for (uint64_t k = lane; k < bytes - vectors * 16; k += lanes) {
    const uint64_t at = all.gaps.offset(k < head ? k : k + vectors * 16);
    dst[at] = src[at];
  }
}

RC_COLD void copy_lanes(char* dst, const char* src, Stretch all, int lane, int lanes) {
  each_stretch(all, misalignment(dst) == 0, [&](uint64_t offset, const Stretch& stretch) {
    copy_stretch(dst + offset, src + offset, stretch, lane, lanes);
  });
}

// The scaling around a SUM: AVG divides by divide_by, PREMUL_SUM premultiplies.
struct Scaling {
  bool premultiply;   // true: first multiply by factors[source]
  int32_t divide_by;  // the divisor of AVG; 0: no division

  // True if divide_by is a power of two: a division then equals a product with the exact
  // reciprocal.
  RC_TEAM_FN bool halves() const {
    return divide_by > 0 && (uint32_t(divide_by) & (uint32_t(divide_by) - 1)) == 0;
  }
};

struct Sources {
  const void* const* ptrs;
  const double* factors;
  int count;
  const Gaps* gaps;     // the gaps of all sources and results (core/tiles.h)
  uint64_t offset = 0;  // bytes, added to each of ptrs

  RC_TEAM_FN const char* ptr(int s) const { return static_cast<const char*>(ptrs[s]) + offset; }
  RC_TEAM_FN void are_shared_memory() const {
    assume_shared(ptrs), assume_shared(factors), assume_shared(gaps);
  }
};

template <class T, RedOp op>
struct Reducer {
  using Acc = typename Traits<T>::Acc;
  static constexpr int kElems = 16 / sizeof(T), kLoads = kReduceLoads<T>;
  // True for operators with short code; they have a loop for each common number of sources.
  static constexpr bool kTogether =
      sizeof(T) >= 4 || (op == RedOp::kSum && sizeof(Acc) > sizeof(T));
  // True for types whose AVG of 2^n ranks may be a product; integers instead round towards zero.
  static constexpr bool kHalves =
      op == RedOp::kSum && !IsInteger<Acc>::value && supports<T>(RedOp::kAvg);

  RC_TEAM_FN static Acc prepared(T x, double factor, bool premultiply) {
    const Acc wide = Traits<T>::load(x);
    if constexpr (op == RedOp::kSum && supports<T>(RedOp::kPremulSum))
      return premultiply ? prepare<RedOp::kPremulSum>(wide, factor) : wide;
    else
      return wide;
  }
  RC_TEAM_FN static T finished(Acc x, int divide_by) {
    if constexpr (op == RedOp::kSum && supports<T>(RedOp::kAvg))
      if (divide_by > 0) return Traits<T>::store(divide(x, divide_by));
    return Traits<T>::store(x);
  }

  // ---- all sources of a vector loaded together ----------------------------------------------

  // Reduces one vector of each source, in the sources' order. scaled: multiplies the results by
  // `factor`.
  template <bool scaled, int count>
  RC_TEAM_FN static Vec16 reduced(const Vec16 (&v)[count], Acc factor) {
    if constexpr (count == 1 && !scaled) {
      return quieted<T>(v[0]);
    } else if constexpr (count == 2 && !scaled && op == RedOp::kSum && kAddsPacked<T>) {
      const Vec16 sum = add_packed<T>(v[0], v[1]);
      return kSame<T, Float16> ? quieted<T>(sum) : sum;
    } else {
      return reduced_by_elements<scaled>(v, factor);
    }
  }
  template <bool scaled, int count>
  RC_TEAM_FN static Vec16 reduced_by_elements(const Vec16 (&v)[count], Acc factor) {
    Acc x[count][kElems], acc[kElems];
    RC_UNROLL
    for (int s = 0; s < count; ++s) widen_all<T>(v[s], x[s]);
    // Element by element: sums of all elements at once take more registers.
    RC_UNROLL
    for (int i = 0; i < kElems; ++i) {
      acc[i] = x[0][i];
      RC_UNROLL
      for (int s = 1; s < count; ++s) acc[i] = combine<op>(acc[i], x[s][i]);
      if constexpr (scaled) acc[i] = acc[i] * factor;
    }
    // Additions and products produce only the canonical NaN, which narrow_all() may rely on.
    constexpr bool kArithmetic = op == RedOp::kSum && (count > 1 || scaled);
    return narrow_all<T, kArithmetic>(acc);
  }

  template <int count, bool scaled>
  RC_TEAM_FN static void reduce_together(const Results& to, const Sources& from, const Vectors& all,
                                         Acc factor) {
    const char* ptrs[count];
    RC_UNROLL
    for (int s = 0; s < count; ++s) ptrs[s] = from.ptr(s);
    use_vectors<count, kLoads / count / 2>(
        ptrs, to, all, *from.gaps,
        [factor](const Vec16(&v)[count]) { return reduced<scaled>(v, factor); });
  }

  // Handles 1, 2, 4 and 8 sources up to `most`; returns false for other numbers.
  template <int most, bool scaled>
  RC_TEAM_FN static bool reduce_few(const Results& to, const Sources& from, const Vectors& all,
                                    Acc factor) {
    switch (from.count) {
      case 1:
        return reduce_together<1, scaled>(to, from, all, factor), true;
      case 2:
        return reduce_together<2, scaled>(to, from, all, factor), true;
      case 4:
        if constexpr (most >= 4)
          return reduce_together<4, scaled>(to, from, all, factor), true;
        else
          return false;
      case 8:
        if constexpr (most >= 8)
          return reduce_together<8, scaled>(to, from, all, factor), true;
        else
          return false;
      default:
        return false;
    }
  }

  // ---- any number of sources, and any scaling -----------------------------------------------

  // The accumulators of one vector, packed into 4-byte registers if Acc is as small as T.
  struct alignas(16) Held {
    uint32_t word[sizeof(Acc) * kElems / 4];
  };
  // Vectors per lane and half turn: the registers hold accumulators and loads.
  static constexpr int kBatchHalf = sizeof(Held) > 16 ? 1 : kLoads / kBatch / 2;
  using HalfBatch = HalfTurn<kBatch, kBatchHalf>;

  RC_TEAM_FN static void accumulate(Held& held, const Vec16& v, double factor, bool premultiply,
                                    bool first) {
    T elems[kElems];
    Acc acc[kElems];
    memcpy(elems, &v, 16);
    if (!first) memcpy(acc, &held, sizeof(held));
    RC_UNROLL
    for (int i = 0; i < kElems; ++i) {
      const Acc x = prepared(elems[i], factor, premultiply);
      acc[i] = first ? x : combine<op>(acc[i], x);
    }
    memcpy(&held, acc, sizeof(held));
    if constexpr (sizeof(T) < 4 && sizeof(Acc) == sizeof(T)) {
      RC_UNROLL
      for (int i = 0; i < 4; ++i) keep_packed(held.word[i]);
    }
  }

  RC_TEAM_FN static Vec16 narrowed(const Held& held, int divide_by) {
    Acc acc[kElems];
    memcpy(acc, &held, sizeof(held));
    T elems[kElems];
    RC_UNROLL
    for (int i = 0; i < kElems; ++i) elems[i] = finished(acc[i], divide_by);
    Vec16 v;
    memcpy(&v, elems, 16);
    return v;
  }

  // Up to kBatch sources, from source number `first` on.
  struct Batch {
    const char* ptrs[kBatch];
    int count;

    RC_TEAM_FN Batch(const Sources& from, int first, uint64_t at)
        : count(from.count - first < kBatch ? from.count - first : kBatch) {
      RC_UNROLL
      for (int b = 0; b < kBatch; ++b) ptrs[b] = from.ptr(b < count ? first + b : first) + at;
    }
    RC_TEAM_FN void load(HalfBatch& half, int64_t left) const {
      RC_UNROLL
      for (int u = 0; u < kBatchHalf; ++u) {
        RC_UNROLL
        for (int b = 0; b < kBatch; ++b)
          if (b < count && left > u * kWarpLanes) half.v[u][b] = load16(ptrs[b] + u * kVectorStep);
      }
    }
  };

  RC_TEAM_FN static void accumulate_half(Held (&acc)[kBatchHalf], const HalfBatch& half,
                                         const Sources& from, int first, bool premultiply) {
    RC_UNROLL
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= from.count) continue;
      const double factor = premultiply ? from.factors[first + b] : 1.0;
      RC_UNROLL
      for (int u = 0; u < kBatchHalf; ++u)
        accumulate(acc[u], half.v[u][b], factor, premultiply, b == 0 && first == 0);
    }
  }
  RC_TEAM_FN static void store_half(const Results& to, uint64_t at, const Held (&acc)[kBatchHalf],
                                    int divide_by, int64_t left) {
    RC_UNROLL
    for (int u = 0; u < kBatchHalf; ++u)
      if (left > u * kWarpLanes) to.store(at + u * kVectorStep, narrowed(acc[u], divide_by));
  }

  // Makes the turns of use_vectors(); each turn has one round per batch of sources.
  RC_COLD static void reduce_batches(Results to, Sources from, Vectors all, Scaling scaling) {
    from.are_shared_memory();
    const int begin = all.lane / kWarpLanes * (2 * HalfBatch::kVectors) + all.lane % kWarpLanes;
    const int64_t step = int64_t(all.lanes) * (2 * kBatchHalf);
    int64_t left = int64_t(all.count) - begin;
    const Gaps& gaps = *from.gaps;
    uint32_t vector = uint32_t(begin);
    uint64_t at = all.head + (uint64_t(begin) + gaps.before(vector)) * 16;
    HalfBatch a{}, b{};
    Held acc_a[kBatchHalf], acc_b[kBatchHalf];
    Batch(from, 0, at).load(a, left);
    RC_ROLLED
    for (; left > 0; left -= step, vector += uint32_t(step)) {
      const uint32_t vectors =
          uint32_t(step) + gaps.before(vector + uint32_t(step)) - gaps.before(vector);
      const uint64_t next = at + uint64_t(vectors) * 16;
      RC_ROLLED
      for (int s = 0; s < from.count; s += kBatch) {
        const bool last = s + kBatch >= from.count;
        Batch(from, s, at + HalfBatch::kBytes).load(b, left - HalfBatch::kVectors);
        accumulate_half(acc_a, a, from, s, scaling.premultiply);
        Batch(from, last ? 0 : s + kBatch, last ? next : at).load(a, last ? left - step : left);
        accumulate_half(acc_b, b, from, s, scaling.premultiply);
      }
      store_half(to, at, acc_a, scaling.divide_by, left);
      store_half(to, at + HalfBatch::kBytes, acc_b, scaling.divide_by, left - HalfBatch::kVectors);
      at = next;
    }
  }

  // ---- choice of the loop, and partial vectors ----------------------------------------------

  template <int most>
  RC_TEAM_FN static void reduce_vectors(const Results& to, const Sources& from, const Vectors& all,
                                        Scaling scaling) {
    if constexpr (kTogether)
      if (!scaling.premultiply && scaling.divide_by == 0 &&
          reduce_few<most, false>(to, from, all, Acc{}))
        return;
    if constexpr (kHalves)
      if (!scaling.premultiply && scaling.halves() &&
          reduce_few<most, true>(to, from, all, Acc(1) / Acc(scaling.divide_by)))
        return;
    reduce_batches(to, from, all, scaling);
  }

  // Reduces the elements before the first and after the last whole vector.
  RC_COLD static void reduce_rest(Results to, Sources from, Vectors all, uint64_t elems,
                                  Scaling scaling) {
    from.are_shared_memory();
    const uint64_t head = all.head / sizeof(T), between = all.count * kElems;
    for (uint64_t k = all.lane; k < elems - between; k += all.lanes) {
      const uint64_t at = from.gaps->offset((k < head ? k : k + between) * sizeof(T));
      Acc acc{};
      RC_ROLLED
      for (int s = 0; s < from.count; ++s) {
        const double factor = scaling.premultiply ? from.factors[s] : 1.0;
        const Acc x =
            prepared(*reinterpret_cast<const T*>(from.ptr(s) + at), factor, scaling.premultiply);
        acc = s == 0 ? x : combine<op>(acc, x);
      }
      const T result = finished(acc, scaling.divide_by);
      *reinterpret_cast<T*>(to.dst + at) = result;
      if (to.also != nullptr) *reinterpret_cast<T*>(to.also + at) = result;
    }
  }

  template <int most>
  RC_TEAM_FN static void reduce_lanes(const Results& to, const Sources& from, uint64_t bytes,
                                      Scaling scaling, int lane, int lanes) {
    bool alike = to.also == nullptr || misalignment(to.also) == misalignment(to.dst);
    RC_ROLLED
    for (int s = 0; s < from.count; ++s) alike &= misalignment(from.ptr(s)) == misalignment(to.dst);
    // Vectors at misaligned addresses would cross the ends of tiles.
    const bool by_tiles = most > 2 && from.gaps->dealt != 0 && misalignment(to.dst) != 0;
    alike &= !by_tiles && bytes < kMostPartBytes;
    const uint64_t head = alike ? head_bytes(to.dst, bytes) : 0;
    const Vectors all{head, alike ? (bytes - head) / 16 : 0, lane, lanes};
    if (all.count > 0) reduce_vectors<most>(to, from, all, scaling);
    if (by_tiles)
      reduce_tiles(to, from, bytes, scaling, lane, lanes);
    else if (bytes > all.count * 16)
      reduce_rest(to, from, all, bytes / sizeof(T), scaling);
  }
  // Out of line, shared by all hops of the kernel.
  RC_COLD static void reduce_hop(Results to, Sources from, uint64_t bytes, Scaling scaling,
                                 int lane, int lanes) {
    reduce_lanes<2>(to, from, bytes, scaling, lane, lanes);
  }
  // Takes one tile after the other.
  RC_COLD static void reduce_tiles(Results to, Sources from, uint64_t bytes, Scaling scaling,
                                   int lane, int lanes) {
    const Stretch all(bytes, from.gaps[0]);
    from.gaps += kNoGaps;
    RC_ROLLED
    for (uint64_t at = 0; at < bytes; at += all.consecutive(at)) {
      from.offset = all.gaps.offset(at);
      reduce_hop(to.at(from.offset), from, all.consecutive(at), scaling, lane, lanes);
    }
  }
};

// The Ops of collectives that only move data.
struct MoveOps {
  template <class Team>
  RC_TEAM_FN void copy_shared(Team& team, void* dst, const void* src, const Stretch& bytes) const {
    copy_lanes(static_cast<char*>(dst), static_cast<const char*>(src), bytes, team.lane(),
               team.num_lanes());
  }
  template <class Team>
  RC_TEAM_FN void copy_private(Team& team, void* dst, const void* src, const Stretch& bytes) const {
    copy_shared(team, dst, src, bytes);
  }
};

template <class T, RedOp op>
struct ReduceOps : MoveOps {
  using R = Reducer<T, op>;
  RedOp asked;  // kernels of kSum also do kAvg and kPremulSum

  RC_TEAM_FN explicit ReduceOps(int32_t redop) : asked(RedOp(redop)) {}

  RC_TEAM_FN bool scales() const { return asked == RedOp::kPremulSum; }
  RC_TEAM_FN Scaling scaling(int finish_world) const {
    return {scales(), asked == RedOp::kAvg ? finish_world : 0};
  }

  // Inlined into the kernel at one call site: out of line, each access would need its memory
  // descriptor again, and vectors would be used before all were loaded.
  template <class Team>
  RC_TEAM_FN void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from,
                         uint64_t bytes, int finish_world) const {
    R::template reduce_lanes<8>(results(to), sources(from, team.gaps()), bytes,
                                scaling(finish_world), team.lane(), team.num_lanes());
  }
  template <class Team>
  RC_TEAM_FN void reduce(Team& team, const ReduceTarget& to, const HopSources& from, uint64_t bytes,
                         int finish_world) const {
    R::reduce_hop(results(to), sources(from, team.gaps() + kNoGaps), bytes, scaling(finish_world),
                  team.lane(), team.num_lanes());
  }
  RC_TEAM_FN static Results results(const ReduceTarget& to) {
    return {static_cast<char*>(to.dst), static_cast<char*>(to.also)};
  }
  RC_TEAM_FN static Sources sources(const ReduceSources& from, const Gaps* gaps) {
    return {from.ptrs, from.factors, from.count, gaps};
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
