// SPDX-License-Identifier: Apache-2.0

// The host's loops of the optimizer: gradient, update and norm of one tile at a time in the
// first-level cache, so that each array of the state crosses the memory bus once in each direction.
// Like the loops of isa_kernels.h, these loops are compiled once for each instruction set, into its
// KernelTable.
#pragma once

#include "kernels/host/isa_kernels.h"
#include "ringcomm/optimizer/grad_norm.h"
#include "ringcomm/optimizer/one_moment_element.h"
#include "ringcomm/optimizer/quantized_moments.h"

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// The loops process a turn of elements at a time. A turn is short, so that the hardware prefetchers
// work on the streams of all arrays at once. Turns of 128, 256, 512 and 1024 elements take 12, 13,
// 18 and 18 ms in FP32, and 14, 15, 15 and 16 ms in bfloat16 (Zen 4, one core, 16 Mi elements, 2
// ranks, results stored twice, best of 5 runs).
constexpr uint64_t kTurnElems = 128;
static_assert(kTurnElems <= kTileElems);

// out = n elements of a source, widened to FP32.
template <class T>
inline void widen_source(float* RC_RESTRICT out, const T* RC_RESTRICT src, uint64_t n) {
#if RC_HAS_F16C
  if constexpr (Tilewise<T>::value) return widen_tile(out, src, n);
#endif
  for (uint64_t i = 0; i < n; ++i) out[i] = Traits<T>::load(src[i]);
}

template <class T>
inline void narrow_result(T* RC_RESTRICT out, const float* RC_RESTRICT src, uint64_t n) {
#if RC_HAS_F16C
  if constexpr (Tilewise<T>::value) return narrow_tile(out, src, n);
#endif
  for (uint64_t i = 0; i < n; ++i) out[i] = Traits<T>::store(src[i]);
}

// buffer = the sum of sources [first, last) over a turn of n elements; last > first.
template <class T>
inline void sum_sources(const GradSources& g, int first, int last, uint64_t begin, uint64_t n,
                        float* buffer) {
  const auto source = [&](int s) { return static_cast<const T*>(g.ptrs[s]) + (begin - g.first); };
  int rest = first + 1;
  if (Tilewise<T>::value || last == rest) {
    widen_source(buffer, source(first), n);
  } else {
    const T *const a = source(first), *const b = source(first + 1);
    for (uint64_t i = 0; i < n; ++i) buffer[i] = Traits<T>::load(a[i]) + Traits<T>::load(b[i]);
    rest = first + 2;
  }
  for (int s = rest; s < last; ++s) {
    const T* const next = source(s);
    if constexpr (Tilewise<T>::value) {
      alignas(64) float wide[kTileElems];
      widen_source(wide, next, n);
      for (uint64_t i = 0; i < n; ++i) buffer[i] += wide[i];
    } else {
      for (uint64_t i = 0; i < n; ++i) buffer[i] += Traits<T>::load(next[i]);
    }
  }
}

// Returns the gradient of a turn: in `buffer`, or in place if a source already is the gradient.
template <class T>
inline const float* gradient_of(const GradSources& g, uint64_t begin, uint64_t n, float* buffer) {
  if constexpr (kSame<T, float>) {
    if (g.count == 1 && g.divide_by == 0)
      return static_cast<const float*>(g.ptrs[0]) + (begin - g.first);
  }
  const int group = g.sum_group_size > 0 && g.sum_group_size < g.count ? g.sum_group_size : g.count;
  sum_sources<T>(g, 0, group, begin, n, buffer);
  for (int first = group; first < g.count; first += group) {
    alignas(64) float sums[kTileElems];
    const int last = first + group < g.count ? first + group : g.count;
    sum_sources<T>(g, first, last, begin, n, sums);
    for (uint64_t i = 0; i < n; ++i) buffer[i] += sums[i];
  }
  if (g.divide_by > 0) {
    const float world = float(g.divide_by);
    for (uint64_t i = 0; i < n; ++i) buffer[i] /= world;
  }
  return buffer;
}

inline const float* gradient(const GradSources& g, uint64_t begin, uint64_t n, float* buffer) {
  if (g.dtype == DType::kBFloat16) return gradient_of<BFloat16>(g, begin, n, buffer);
  if (g.dtype == DType::kFloat16) return gradient_of<Float16>(g, begin, n, buffer);
  return gradient_of<float>(g, begin, n, buffer);
}

// ---- update -------------------------------------------------------------------------------------

template <class Path>
inline void update_run(float* RC_RESTRICT p, const float* RC_RESTRICT g, float* RC_RESTRICT m,
                       float* RC_RESTRICT v, float* RC_RESTRICT v_max, const AdamWFactors& factors,
                       uint64_t n) {
  // A copy, so that the compiler sees that the stores below cannot change it.
  const AdamWFactors f = factors;
  for (uint64_t i = 0; i < n; ++i) {
    float unused = 0.0f;
    adamw_element<Path>(p[i], adamw_gradient(g[i], f), m[i], v[i], Path::kMax ? v_max[i] : unused,
                        f);
  }
}

template <class Path>
inline void sgd_run(float* RC_RESTRICT p, const float* RC_RESTRICT g, float* RC_RESTRICT m,
                    const AdamWFactors& factors, uint64_t n) {
  const AdamWFactors f = factors;
  for (uint64_t i = 0; i < n; ++i) {
    float unused = 0.0f;
    sgd_element<Path>(p[i], adamw_gradient(g[i], f), Path::kHasMoment ? m[i] : unused, f);
  }
}

inline void update_sgd(float* p, const float* g, float* m, const AdamWFactors& f, uint64_t n) {
  const bool l2 = (f.flags & kAdamL2) != 0, nesterov = (f.flags & kNesterov) != 0;
  const auto run = [&](auto path) { sgd_run<decltype(path)>(p, g, m, f, n); };
  if ((f.flags & kMomentum) == 0)
    return l2 ? run(SgdPath<true, false, false>{}) : run(SgdPath<false, false, false>{});
  if (nesterov) return l2 ? run(SgdPath<true, true, true>{}) : run(SgdPath<false, true, true>{});
  l2 ? run(SgdPath<true, true, false>{}) : run(SgdPath<false, true, false>{});
}

inline void update_lion(float* RC_RESTRICT p, const float* RC_RESTRICT g, float* RC_RESTRICT m,
                        const AdamWFactors& factors, uint64_t n) {
  const AdamWFactors f = factors;
  for (uint64_t i = 0; i < n; ++i) lion_element(p[i], adamw_gradient(g[i], f), m[i], f);
}

inline void update_adamw(float* p, const float* g, float* m, float* v, float* v_max,
                         const AdamWFactors& f, uint64_t n) {
  const bool l2 = (f.flags & kAdamL2) != 0, amsgrad = (f.flags & kAdamAmsgrad) != 0,
             from_end = !(f.one_minus_beta1 < 0.5f);
  const auto run = [&](auto path) { update_run<decltype(path)>(p, g, m, v, v_max, f, n); };
  if (from_end) {
    if (l2)
      return amsgrad ? run(AdamWPath<true, true, true>{}) : run(AdamWPath<true, false, true>{});
    return amsgrad ? run(AdamWPath<false, true, true>{}) : run(AdamWPath<false, false, true>{});
  }
  if (l2)
    return amsgrad ? run(AdamWPath<true, true, false>{}) : run(AdamWPath<true, false, false>{});
  return amsgrad ? run(AdamWPath<false, true, false>{}) : run(AdamWPath<false, false, false>{});
}

// ---- 8-bit moments ------------------------------------------------------------------------------

// wide = n moments from `at` on, all of one quantization block.
template <class Moment>
inline void dequantize_moment(float* RC_RESTRICT wide, const QuantizedMoment& moment, uint64_t at,
                              uint64_t n) {
  const uint8_t* RC_RESTRICT const values = moment.values + at;
  const uint32_t exponent = moment.exponents[at / kMomentBlock];
  const uint32_t least = least_normal<Moment>(exponent);
  if (exponent == kNotFinite) {
    for (uint64_t i = 0; i < n; ++i) wide[i] = float_of(0x7fc00000u);
  } else if constexpr (kSame<Moment, FirstMoment>) {
    for (uint64_t i = 0; i < n; ++i) wide[i] = dequantize_first(values[i], least);
  } else {
    for (uint64_t i = 0; i < n; ++i) wide[i] = dequantize_second(values[i], least);
  }
}

inline uint32_t exponent_of(const float* RC_RESTRICT wide, uint64_t n) {
  uint32_t most = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(wide[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  return block_exponent(most);
}

inline void quantize_moments(const QuantizedMoment& first, const QuantizedMoment& second,
                             const float* RC_RESTRICT m, const float* RC_RESTRICT v, uint64_t at,
                             const MomentDraw& drawn, uint64_t n) {
  uint8_t* RC_RESTRICT const m_quantized = first.values + at;
  uint8_t* RC_RESTRICT const v_quantized = second.values + at;
  const uint32_t m_exponent = exponent_of(m, n), v_exponent = exponent_of(v, n);
  first.exponents[at / kMomentBlock] = uint8_t(m_exponent);
  second.exponents[at / kMomentBlock] = uint8_t(v_exponent);
  const uint32_t m_least = least_normal<FirstMoment>(m_exponent),
                 v_least = least_normal<SecondMoment>(v_exponent);
  const MomentDraw draw = drawn;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t word = draw.word(uint32_t(i));
    m_quantized[i] = quantize_first(m[i], m_least, MomentDraw::of_first(word));
    v_quantized[i] = quantize_second(v[i], v_least, MomentDraw::of_second(word));
  }
}

// Updates at most a turn, from the start of a quantization block on; `here` is the turn's segment.
inline void update_quantized(float* p, const float* g, const AdamWShard& s,
                             const AdamWSegment& here, uint64_t at, const AdamWFactors& f,
                             uint64_t n) {
  static_assert(kTurnElems % kMomentBlock == 0);
  alignas(64) float m[kTurnElems];
  alignas(64) float v[kTurnElems];
  const QuantizedMoment first = QuantizedMoment::of(s.exp_avg, s.elems),
                        second = QuantizedMoment::of(s.exp_avg_sq, s.elems);
  const auto each_block = [&](auto work) {
    for (uint64_t done = 0; done < n; done += kMomentBlock)
      work(done, n - done < kMomentBlock ? n - done : kMomentBlock);
  };
  each_block([&](uint64_t done, uint64_t elems) {
    dequantize_moment<FirstMoment>(m + done, first, at + done, elems);
    dequantize_moment<SecondMoment>(v + done, second, at + done, elems);
  });
  update_adamw(p, g, m, v, nullptr, f, n);
  MomentDraw draw = MomentDraw::of(s.seed, here.param, f.step, s.begin + at - here.begin);
  each_block([&](uint64_t done, uint64_t elems) {
    quantize_moments(first, second, m + done, v + done, at + done, draw, elems);
    draw.first += uint32_t(kMomentBlock);
  });
}

inline void update(float* p, const float* g, const AdamWShard& s, const AdamWSegment& here,
                   uint64_t at, const AdamWFactors& f, uint64_t n) {
  if ((f.flags & kQuantizedState) != 0) {
    for (uint64_t done = 0; done < n; done += kTurnElems)
      update_quantized(p + done, g + done, s, here, at + done, f,
                       n - done < kTurnElems ? n - done : kTurnElems);
    return;
  }
  float* const m = s.exp_avg != nullptr ? s.exp_avg + at : nullptr;
  if ((f.flags & kSgd) != 0) return update_sgd(p, g, m, f, n);
  if ((f.flags & kLion) != 0) return update_lion(p, g, m, f, n);
  float* const v_max = (f.flags & kAdamAmsgrad) != 0 ? s.max_exp_avg_sq + at : nullptr;
  update_adamw(p, g, m, s.exp_avg_sq + at, v_max, f, n);
}

template <class T>
inline void narrow_random(T* RC_RESTRICT out, const float* RC_RESTRICT src, const AdamWShard& s,
                          uint64_t index, uint32_t step, uint64_t n) {
  for (uint64_t i = 0; i < n;) {
    const Philox drawn = philox(s.seed, (index + i) / 4, step, uint32_t(s.bucket));
    for (uint64_t k = (index + i) % 4; k < 4 && i < n; ++k, ++i)
      out[i] = narrow_stochastic(src[i], drawn.word[k], static_cast<T*>(nullptr));
  }
}

// Updates elements [at, at + n) of the chunk, all of segment `here`; T is the parameter's type.
// Returns the address of the new parameters: `fresh`, or in place for FP32.
template <class T>
inline const T* step_run(const AdamWShard& s, const AdamWSegment& here, const float* g, uint64_t at,
                         uint64_t n, float* wide, T* fresh) {
  const AdamWFactors& f = s.factors[here.param];
  T* const own = reinterpret_cast<T*>(s.params) + s.begin + at;
  if constexpr (kSame<T, float>) {
    update(own, g, s, here, at, f, n);
    return own;
  } else {
    float* const master = s.master != nullptr ? s.master + at : wide;
    if constexpr (kSame<T, BFloat16>) {
      if (s.remainder != nullptr) {
        uint16_t* const low = s.remainder + at;
        for (uint64_t i = 0; i < n; ++i) wide[i] = join_master(own[i], low[i]);
        update(wide, g, s, here, at, f, n);
        for (uint64_t i = 0; i < n; ++i) split_master(wide[i], fresh[i], low[i]);
        return fresh;
      }
    }
    if (s.master == nullptr) widen_source(wide, own, n);
    update(master, g, s, here, at, f, n);
    if (s.rounding == Rounding::kStochastic)
      narrow_random(fresh, master, s, s.begin + at, f.step, n);
    else
      narrow_result(fresh, master, n);
    return fresh;
  }
}

inline void store_result(char* dst, const void* src, uint64_t bytes, bool streaming) {
  if (streaming)
    stream_bytes(dst, static_cast<const char*>(src), bytes);
  else
    memcpy(dst, src, bytes);
}

// Returns the elements per turn. An update that needs no buffer takes all elements in one turn: 32
// Mi FP32 elements take 26.2 ms, against 27.5 ms with turns of 128 (Zen 4, one core).
template <class T>
inline uint64_t turn_elems(const AdamWJob& job) {
  const bool in_place = kSame<T, float> && job.copy_count == 0 &&
                        job.grads.dtype == DType::kFloat32 && job.grads.count == 1 &&
                        job.grads.divide_by == 0;
  return in_place ? ~uint64_t(0) >> 1 : kTurnElems;
}

template <class T>
inline void adamw_turns(const AdamWJob& job) {
  const AdamWShard& s = *job.shard;
  alignas(64) float grads[kTurnElems];
  alignas(64) float wide[kTurnElems];
  alignas(64) T fresh[kTurnElems];
  uint64_t segment = first_segment(s, s.begin + job.begin);
  const uint64_t turn = turn_elems<T>(job);
  for (uint64_t begin = job.begin; begin < job.end; begin += turn) {
    const uint64_t n = job.end - begin < turn ? job.end - begin : turn;
    const uint64_t first = s.begin + begin, last = first + n;  // positions in the bucket
    const float* const g = gradient(job.grads, begin, n, grads);
    for (; segment < s.segment_count && s.segments[segment].begin < last; ++segment) {
      const AdamWSegment& here = s.segments[segment];
      const AdamWFactors& f = s.factors[here.param];
      const uint64_t from = here.begin > first ? here.begin : first,
                     to = here.end < last ? here.end : last, at = from - s.begin;
      if ((f.flags & kAdamActive) != 0 && to > from) {
        const T* const result =
            step_run<T>(s, here, g + (from - first), at, to - from, wide, fresh);
        const uint64_t bytes = (to - from) * sizeof(T);
        if constexpr (!kSame<T, float>)
          store_result(s.params + from * sizeof(T), result, bytes, job.streaming);
        for (int c = 0; c < job.copy_count; ++c)
          if (job.copies[c] != nullptr)
            store_result(job.copies[c] + from * sizeof(T), result, bytes, job.streaming);
      }
      if (here.end > last) break;  // the segment continues in the next turn
    }
  }
  if (job.streaming) stream_fence();
}

inline void adamw_kernel(const AdamWJob& job) {
  if (job.shard->param_dtype == DType::kBFloat16) return adamw_turns<BFloat16>(job);
  if (job.shard->param_dtype == DType::kFloat16) return adamw_turns<Float16>(job);
  adamw_turns<float>(job);
}

// ---- norm ---------------------------------------------------------------------------------------

// Sums a tile's terms by halves: elements i and i + 256 first, then i and i + 128, and so on.
inline double tile_sum(const float* RC_RESTRICT x, NormKind kind) {
  constexpr uint64_t half = kTileElems / 2;
  alignas(64) double y[half];
  if (kind == NormKind::kTwo) {
    for (uint64_t i = 0; i < half; ++i)
      y[i] = norm_term(x[i], NormKind::kTwo) + norm_term(x[i + half], NormKind::kTwo);
  } else {
    for (uint64_t i = 0; i < half; ++i)
      y[i] = norm_term(x[i], NormKind::kOne) + norm_term(x[i + half], NormKind::kOne);
  }
  for (uint64_t h = half / 2; h > 0; h /= 2)
    for (uint64_t i = 0; i < h; ++i) y[i] += y[i + h];
  return y[0];
}

// Returns the bits of the largest magnitude; the bits of a NaN exceed all others.
inline uint32_t tile_max(const float* RC_RESTRICT x) {
  uint32_t most = 0;
  for (uint64_t i = 0; i < kTileElems; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

inline void add_norm(const float* x, NormKind kind, NormWords& words) {
  if (kind != NormKind::kInf)
    return add_tile(tile_sum(x, kind), [&](int k, int64_t digit) { words.word[k] += digit; });
  const uint32_t most = tile_max(x);
  if (most >= 0x7f800000u)
    ++words.word[kNonFiniteWord];
  else if (int64_t(most) > words.word[0])
    words.word[0] = int64_t(most);
}

inline void reduce_norm_kernel(const NormJob& job) {
  alignas(64) float buffer[kTileElems];
  alignas(64) float padded[kTileElems];
  for (uint64_t begin = job.begin; begin < job.end; begin += kTileElems) {
    const uint64_t n = job.end - begin < kTileElems ? job.end - begin : kTileElems;
    const float* g = gradient(job.grads, begin, n, buffer);
    if (job.out != nullptr) {
      float* const out = job.out + begin;
      if (job.accumulate) {
        for (uint64_t i = 0; i < n; ++i) buffer[i] = out[i] + g[i];
        g = buffer;
      }
      if (g != out) store_result(reinterpret_cast<char*>(out), g, n * sizeof(float), job.streaming);
    }
    if (job.words == nullptr) continue;
    if (n < kTileElems) {
      memset(padded, 0, sizeof(padded));
      memcpy(padded, g, n * sizeof(float));
      g = padded;
    }
    add_norm(g, job.kind, *job.words);
  }
  if (job.streaming) stream_fence();
}

}  // namespace host
RINGCOMM_NAMESPACE_END
