// SPDX-License-Identifier: Apache-2.0

// Copies and reductions on a GPU (the Ops of endpoint.h): 16-byte accesses, several loads in flight
// per lane, adjacent lanes at adjacent addresses. On the host, threads are the lanes.
//
// Pointers of different alignment (a view that begins at an odd element) are accessed element by
// element or byte by byte, which is several times slower.
#pragma once

#include "kernels/cuda/ptx.h"
#include "ringcomm/core/reduce.h"
#include "ringcomm/protocol/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Vectors per lane and turn: 256 lanes keep 32 KiB of each of two sources in flight. On an H100
// (two ranks on one GPU, FP32, 256 MiB), with 8 vectors an all-reduce took 0.82 of its time with 6
// vectors, and a reduce-scatter 0.95; 384 and 512 lanes with fewer registers each were no better
// (bench/results/gpu/variants-2026-11-26.csv). Narrow types need more accumulators per vector,
// which must fit into the registers: their 4 vectors were chosen without measurements.
constexpr int kCopyUnroll = 8;
template <class T>
constexpr int kReduceUnroll = sizeof(T) == 1 || sizeof(typename Traits<T>::Acc) > sizeof(T) ? 4 : 8;

RC_TEAM_FN uint32_t misalignment(const void* ptr) {
  return uint32_t(reinterpret_cast<uintptr_t>(ptr) & 15);
}

// Returns the bytes before the first 16-byte boundary of ptr.
RC_TEAM_FN uint64_t head_bytes(const void* ptr, uint64_t bytes) {
  const uint64_t head = (16 - misalignment(ptr)) & 15;
  return head < bytes ? head : bytes;
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
  const uint64_t stride = uint64_t(lanes) * kCopyUnroll;
  Vec16 now[kCopyUnroll], next[kCopyUnroll];
  uint64_t base = 0;
  if (stride <= vectors) {
    RC_UNROLL
    for (int u = 0; u < kCopyUnroll; ++u) now[u] = load16(from + (u * lanes + lane) * 16);
  }
  for (; base + stride <= vectors; base += stride) {
    // The next turn's loads are in flight while this turn stores.
    if (base + 2 * stride <= vectors) {
      RC_UNROLL
      for (int u = 0; u < kCopyUnroll; ++u)
        next[u] = load16(from + (base + stride + u * lanes + lane) * 16);
    }
    RC_UNROLL
    for (int u = 0; u < kCopyUnroll; ++u) {
      store16(to + (base + u * lanes + lane) * 16, now[u]);
      now[u] = next[u];
    }
  }
  for (uint64_t i = base + lane; i < vectors; i += lanes)
    store16(to + i * 16, load16(from + i * 16));
  for (uint64_t i = vectors * 16 + lane; i < bytes - head; i += lanes) to[i] = from[i];
}

// The scaling around a SUM: AVG divides by divide_by, PREMUL_SUM premultiplies.
struct Scaling {
  bool premultiply;   // true: first multiply by factors[source]
  int32_t divide_by;  // the divisor of AVG; 0: no division
};

// The vectors of one lane: the first at `at_bytes`, `step_bytes` apart, before `end_bytes`.
struct Turns {
  uint64_t at_bytes, end_bytes, step_bytes;
};

template <class T, RedOp op>
struct Reducer {
  using Acc = typename Traits<T>::Acc;
  static constexpr int kElems = 16 / sizeof(T);

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

  // The accumulators of one vector, packed into 4-byte registers if Acc is as small as T.
  struct alignas(16) Held {
    uint32_t word[sizeof(Acc) * kElems / 4];
  };

  template <bool first>
  RC_TEAM_FN static void accumulate(Held& held, const Vec16& v, double factor, bool premultiply) {
    T elems[kElems];
    Acc acc[kElems];
    memcpy(elems, &v, 16);
    if constexpr (!first) memcpy(acc, &held, sizeof(held));
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

  // Makes a lane's turns at `at`, at + turn, ... before `end`; a turn has `unroll` vectors, `step`
  // bytes apart. While one source is added, the next source's loads are in flight; the last source
  // overlaps with the first loads of the next turn, so that these loads do not wait for the stores.
  // Returns the position of the next turn.
  template <int unroll>
  RC_TEAM_FN static uint64_t reduce_turns(char* dst, char* also, const void* const* sources,
                                          const double* factors, int count, Turns turns,
                                          Scaling scaling) {
    const uint64_t step = turns.step_bytes, turn = step * unroll;
    uint64_t at = turns.at_bytes;
    if (at >= turns.end_bytes) return at;
    Held acc[unroll];
    Vec16 now[unroll], next[unroll];
    RC_UNROLL
    for (int u = 0; u < unroll; ++u)
      now[u] = load16(static_cast<const char*>(sources[0]) + at + u * step);
    for (; at < turns.end_bytes; at += turn) {
      for (int s = 0; s < count; ++s) {
        const bool last = s + 1 == count;
        const uint64_t then = last ? at + turn : at;
        if (then < turns.end_bytes) {
          const char* const following = static_cast<const char*>(sources[last ? 0 : s + 1]);
          RC_UNROLL
          for (int u = 0; u < unroll; ++u) next[u] = load16(following + then + u * step);
        }
        const double factor = scaling.premultiply ? factors[s] : 1.0;
        RC_UNROLL
        for (int u = 0; u < unroll; ++u) {
          if (s == 0)
            accumulate<true>(acc[u], now[u], factor, scaling.premultiply);
          else
            accumulate<false>(acc[u], now[u], factor, scaling.premultiply);
          now[u] = next[u];
        }
      }
      RC_UNROLL
      for (int u = 0; u < unroll; ++u) {
        const Vec16 result = narrowed(acc[u], scaling.divide_by);
        store16(dst + at + u * step, result);
        if (also != nullptr) store16(also + at + u * step, result);
      }
    }
    return at;
  }

  RC_TEAM_FN static void reduce_element(char* dst, char* also, const void* const* sources,
                                        const double* factors, int count, uint64_t i,
                                        Scaling scaling) {
    Acc acc = prepared(static_cast<const T*>(sources[0])[i], scaling.premultiply ? factors[0] : 1.0,
                       scaling.premultiply);
    for (int s = 1; s < count; ++s)
      acc = combine<op>(acc, prepared(static_cast<const T*>(sources[s])[i],
                                      scaling.premultiply ? factors[s] : 1.0, scaling.premultiply));
    const T result = finished(acc, scaling.divide_by);
    reinterpret_cast<T*>(dst)[i] = result;
    if (also != nullptr) reinterpret_cast<T*>(also)[i] = result;
  }

  RC_COLD static void reduce_lanes(char* dst, char* also, const void* const* sources,
                                   const double* factors, int count, uint64_t bytes,
                                   Scaling scaling, int lane, int lanes) {
    bool alike = also == nullptr || misalignment(also) == misalignment(dst);
    for (int s = 0; s < count; ++s) alike &= misalignment(sources[s]) == misalignment(dst);
    const uint64_t elems = bytes / sizeof(T);
    const uint64_t head = alike ? head_bytes(dst, bytes) : 0;
    const uint64_t vectors = alike ? (bytes - head) / 16 : 0;
    const uint64_t step = uint64_t(lanes) * 16, end = head + vectors * 16;
    const uint64_t stride = step * kReduceUnroll<T>;
    // Unrolled turns stop at the team's last multiple of `stride`.
    Turns turns{head + uint64_t(lane) * 16, head + vectors * 16 / stride * stride, step};
    turns.at_bytes =
        reduce_turns<kReduceUnroll<T>>(dst, also, sources, factors, count, turns, scaling);
    turns.end_bytes = end;
    reduce_turns<1>(dst, also, sources, factors, count, turns, scaling);
    const uint64_t head_elems = head / sizeof(T), done = head_elems + vectors * kElems;
    for (uint64_t i = lane; i < head_elems; i += lanes)
      reduce_element(dst, also, sources, factors, count, i, scaling);
    for (uint64_t i = done + lane; i < elems; i += lanes)
      reduce_element(dst, also, sources, factors, count, i, scaling);
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

  template <class Team>
  RC_TEAM_FN void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from,
                         uint64_t bytes, int finish_world) const {
    R::reduce_lanes(static_cast<char*>(to.dst), static_cast<char*>(to.also), from.ptrs,
                    from.factors, from.count, bytes, scaling(finish_world), team.lane(),
                    team.num_lanes());
  }

  // Reduces 8 bytes of every rank, in rank order (ll.h).
  struct WordSum {
    static constexpr int kWordElems = 8 / sizeof(T);
    typename R::Acc acc[kWordElems] = {};

    RC_TEAM_FN void add(uint64_t word, double factor, const ReduceOps& ops, bool first) {
      T elems[kWordElems];
      memcpy(elems, &word, 8);
      RC_UNROLL
      for (int i = 0; i < kWordElems; ++i) {
        const auto x = R::prepared(elems[i], factor, ops.scales());
        acc[i] = first ? x : combine<op>(acc[i], x);
      }
    }
    RC_TEAM_FN uint64_t result(const ReduceOps& ops, int world) const {
      T elems[kWordElems];
      RC_UNROLL
      for (int i = 0; i < kWordElems; ++i)
        elems[i] = R::finished(acc[i], ops.scaling(world).divide_by);
      uint64_t word;
      memcpy(&word, elems, 8);
      return word;
    }
  };
};

}  // namespace device
RINGCOMM_NAMESPACE_END
