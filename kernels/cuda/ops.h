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
RC_TEAM_FN bool all_of_warp(bool x) { return __all_sync(0xffffffffu, x); }
#else
constexpr int kWarpLanes = 1;
inline bool all_of_warp(bool x) { return x; }
#endif
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
  RC_TEAM_FN void move(uint64_t bytes) {
    dst += bytes;
    if (also != nullptr) also += bytes;
  }
};

// The vectors of a team; the first begins at byte `head`.
struct Vectors {
  uint64_t head, count;
  int lane, lanes;
};

// Half a turn of a lane: `half` vectors of each source, kVectorStep bytes apart. whole: all vectors
// exist; else only those within the team's `left` remaining vectors.
template <int sources, int half>
struct HalfTurn {
  static constexpr int kVectors = half * kWarpLanes;  // vectors of all lanes of a warp
  static constexpr uint64_t kBytes = uint64_t(half) * kVectorStep;
  Vec16 v[half][sources];

  RC_TEAM_FN static bool is_whole(int64_t left) {
    return all_of_warp(left > (half - 1) * kWarpLanes);
  }
  template <bool whole>
  RC_TEAM_FN void load(const char* const (&from)[sources], uint64_t at, int64_t left = 0) {
    RC_UNROLL
    for (int u = 0; u < half; ++u)
      if (whole || left > u * kWarpLanes) {
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
                               int64_t left = 0) {
    RC_UNROLL
    for (int u = 0; u < half; ++u)
      if (whole || left > u * kWarpLanes) store16(to.dst + at + u * kVectorStep, made[u]);
    if (to.also == nullptr) return;
    RC_UNROLL
    for (int u = 0; u < half; ++u)
      if (whole || left > u * kWarpLanes) store16(to.also + at + u * kVectorStep, made[u]);
  }
};

// Stores result(v) for every vector position of a lane; v has one vector per source. In a turn, a
// warp takes two halves of `half` * kWarpLanes consecutive vectors; in each half a lane takes every
// kWarpLanes-th vector. A lane's vectors are a constant distance apart, so that one address in
// registers reaches all of them.
template <int sources, int half, class Result>
RC_TEAM_FN void use_vectors(const char* (&from)[sources], Results to, const Vectors& all,
                            const Result& result) {
  using Half = HalfTurn<sources, half>;
  const int first = all.lane / kWarpLanes * (2 * Half::kVectors) + all.lane % kWarpLanes;
  const int64_t step = int64_t(all.lanes) * (2 * half);
  const auto move = [&](uint64_t bytes) {
    RC_UNROLL
    for (int s = 0; s < sources; ++s) from[s] += bytes;
  };
  move(all.head + uint64_t(first) * 16);
  to.move(all.head + uint64_t(first) * 16);
  int64_t left = int64_t(all.count) - first;  // from this turn's first vector to the end
  Half a{};
  a.template load<false>(from, 0, left);
  const auto turn = [&](auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    // Zero-initialized, although some vectors are not loaded: otherwise ptxas keeps their old
    // registers alive, and runs out of registers.
    Half b{}, next{};
    b.template load<kWhole>(from, Half::kBytes, left - Half::kVectors);
    move(uint64_t(step) * 16);
    Vec16 made_a[half], made_b[half];
    a.use(result, made_a);
    // No load moves ahead of a store. With the stores of `a` before the loads of `next`, ptxas
    // would hurry to use `a`, before it has issued the loads of `b`: few loads would be in flight
    // while it waits for `a`. One source's uses are short, and partial turns lack the registers.
    constexpr bool kStoresLater = kWhole && sources > 1;
    if constexpr (!kStoresLater) Half::template store<kWhole>(made_a, to, 0, left);
    next.template load<kWhole>(from, 0, left - step);
    if constexpr (kStoresLater) Half::template store<kWhole>(made_a, to, 0, left);
    b.use(result, made_b);
    Half::template store<kWhole>(made_b, to, Half::kBytes, left - Half::kVectors);
    to.move(uint64_t(step) * 16);
    a = next, left -= step;
  };
  RC_ROLLED
  while (Half::is_whole(left - step)) turn(Constant<true>{});
  RC_ROLLED
  while (left > 0) turn(Constant<false>{});
}

RC_COLD void copy_lanes(char* dst, const char* src, uint64_t bytes, int lane, int lanes) {
  if (misalignment(dst) != misalignment(src)) {
    for (uint64_t i = lane; i < bytes; i += lanes) dst[i] = src[i];
    return;
  }
  const uint64_t head = head_bytes(dst, bytes), vectors = (bytes - head) / 16;
  for (uint64_t i = lane; i < head; i += lanes) dst[i] = src[i];
  char* const to = dst + head;
  const char* const from = src + head;
  const char* ptrs[1] = {from};
  use_vectors<1, kCopyLoads / 2>(ptrs, Results{to, nullptr}, Vectors{0, vectors, lane, lanes},
                                 [](const Vec16(&v)[1]) { return v[0]; });
  for (uint64_t i = vectors * 16 + lane; i < bytes - head; i += lanes) to[i] = from[i];
}

// The scaling around a SUM: AVG divides by divide_by, PREMUL_SUM premultiplies.
struct Scaling {
  bool premultiply;   // true: first multiply by factors[source]
  int32_t divide_by;  // the divisor of AVG; 0: no division

  // True for a power of two: to divide by it equals to multiply by its reciprocal, which is exact.
  RC_TEAM_FN bool halves() const {
    return divide_by > 0 && (uint32_t(divide_by) & (uint32_t(divide_by) - 1)) == 0;
  }
};

struct Sources {
  const void* const* ptrs;
  const double* factors;
  int count;

  RC_TEAM_FN const char* ptr(int s) const { return static_cast<const char*>(ptrs[s]); }
  RC_TEAM_FN void are_shared_memory() const { assume_shared(ptrs), assume_shared(factors); }
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

  // Reduces one vector of each source, in the sources' order. scaled: multiplies by `factor` last.
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
        ptrs, to, all, [factor](const Vec16(&v)[count]) { return reduced<scaled>(v, factor); });
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

  // The accumulators of one vector. If Acc is as small as T, a 4-byte register holds several.
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

  // The kBatch sources from number `first` on, or as many as there are.
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
    uint64_t at = all.head + uint64_t(begin) * 16;
    HalfBatch a{}, b{};
    Held acc_a[kBatchHalf], acc_b[kBatchHalf];
    Batch(from, 0, at).load(a, left);
    RC_ROLLED
    for (; left > 0; left -= step, at += uint64_t(step) * 16) {
      RC_ROLLED
      for (int s = 0; s < from.count; s += kBatch) {
        const bool last = s + kBatch >= from.count;
        Batch(from, s, at + HalfBatch::kBytes).load(b, left - HalfBatch::kVectors);
        accumulate_half(acc_a, a, from, s, scaling.premultiply);
        Batch(from, last ? 0 : s + kBatch, last ? at + uint64_t(step) * 16 : at)
            .load(a, last ? left - step : left);
        accumulate_half(acc_b, b, from, s, scaling.premultiply);
      }
      store_half(to, at, acc_a, scaling.divide_by, left);
      store_half(to, at + HalfBatch::kBytes, acc_b, scaling.divide_by, left - HalfBatch::kVectors);
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
      const uint64_t i = k < head ? k : k + between;
      Acc acc{};
      RC_ROLLED
      for (int s = 0; s < from.count; ++s) {
        const double factor = scaling.premultiply ? from.factors[s] : 1.0;
        const Acc x = prepared(static_cast<const T*>(from.ptrs[s])[i], factor, scaling.premultiply);
        acc = s == 0 ? x : combine<op>(acc, x);
      }
      const T result = finished(acc, scaling.divide_by);
      reinterpret_cast<T*>(to.dst)[i] = result;
      if (to.also != nullptr) reinterpret_cast<T*>(to.also)[i] = result;
    }
  }

  template <int most>
  RC_TEAM_FN static void reduce_lanes(const Results& to, const Sources& from, uint64_t bytes,
                                      Scaling scaling, int lane, int lanes) {
    bool alike = to.also == nullptr || misalignment(to.also) == misalignment(to.dst);
    RC_ROLLED
    for (int s = 0; s < from.count; ++s)
      alike &= misalignment(from.ptrs[s]) == misalignment(to.dst);
    const uint64_t head = alike ? head_bytes(to.dst, bytes) : 0;
    const Vectors all{head, alike ? (bytes - head) / 16 : 0, lane, lanes};
    if (all.count > 0) reduce_vectors<most>(to, from, all, scaling);
    if (bytes > all.count * 16) reduce_rest(to, from, all, bytes / sizeof(T), scaling);
  }
  // Out of line, shared by all hops of the kernel.
  RC_COLD static void reduce_hop(Results to, Sources from, uint64_t bytes, Scaling scaling,
                                 int lane, int lanes) {
    reduce_lanes<2>(to, from, bytes, scaling, lane, lanes);
  }
};

// The Ops of collectives that only move data.
struct MoveOps {
  template <class Team>
  RC_TEAM_FN void copy_shared(Team& team, void* dst, const void* src, uint64_t bytes) const {
    copy_lanes(static_cast<char*>(dst), static_cast<const char*>(src), bytes, team.lane(),
               team.num_lanes());
  }
  template <class Team>
  RC_TEAM_FN void copy_private(Team& team, void* dst, const void* src, uint64_t bytes) const {
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
    R::template reduce_lanes<8>(results(to), sources(from), bytes, scaling(finish_world),
                                team.lane(), team.num_lanes());
  }
  template <class Team>
  RC_TEAM_FN void reduce(Team& team, const ReduceTarget& to, const HopSources& from, uint64_t bytes,
                         int finish_world) const {
    R::reduce_hop(results(to), sources(from), bytes, scaling(finish_world), team.lane(),
                  team.num_lanes());
  }
  RC_TEAM_FN static Results results(const ReduceTarget& to) {
    return {static_cast<char*>(to.dst), static_cast<char*>(to.also)};
  }
  RC_TEAM_FN static Sources sources(const ReduceSources& from) {
    return {from.ptrs, from.factors, from.count};
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
