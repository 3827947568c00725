// SPDX-License-Identifier: Apache-2.0

// The loops of one KernelTable, written for the compiler's vectoriser. Each isa_*.cpp sets
// RINGCOMM_ISA and includes this file once. The file uses no template of the standard library: code
// for different instruction sets would share the template's symbols (see platform.h).
#pragma once

#include "kernels/host/kernel_table.h"

#if RC_HAS_STREAMING_STORES || RC_HAS_F16C
#include <immintrin.h>
#endif

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// The accumulators of one tile: 4 KiB stay in the first-level cache together with two sources.
constexpr uint64_t kTileBytes = 4096;

#if RC_HAS_STREAMING_STORES
#if RC_VECTOR_BYTES == 64
using Vector = __m512i;
inline Vector load_vector(const char* p) { return _mm512_loadu_si512(p); }
inline void stream_vector(char* p, Vector v) {
  _mm512_stream_si512(reinterpret_cast<Vector*>(p), v);
}
#elif RC_VECTOR_BYTES == 32
using Vector = __m256i;
inline Vector load_vector(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const Vector*>(p));
}
inline void stream_vector(char* p, Vector v) {
  _mm256_stream_si256(reinterpret_cast<Vector*>(p), v);
}
#else
using Vector = __m128i;
inline Vector load_vector(const char* p) {
  return _mm_loadu_si128(reinterpret_cast<const Vector*>(p));
}
inline void stream_vector(char* p, Vector v) { _mm_stream_si128(reinterpret_cast<Vector*>(p), v); }
#endif

// Copies past the caches, without a fence at the end; dst and src need no alignment.
inline void stream_bytes(char* dst, const char* src, uint64_t bytes) {
  const uint64_t misaligned = reinterpret_cast<uintptr_t>(dst) % RC_VECTOR_BYTES;
  const uint64_t head = misaligned == 0 ? 0 : RC_VECTOR_BYTES - misaligned;
  if (bytes < head + RC_VECTOR_BYTES) {
    memcpy(dst, src, bytes);
    return;
  }
  memcpy(dst, src, head);
  uint64_t i = head;
  for (; i + 4 * RC_VECTOR_BYTES <= bytes; i += 4 * RC_VECTOR_BYTES) {
    const Vector a = load_vector(src + i), b = load_vector(src + i + RC_VECTOR_BYTES);
    const Vector c = load_vector(src + i + 2 * RC_VECTOR_BYTES),
                 d = load_vector(src + i + 3 * RC_VECTOR_BYTES);
    stream_vector(dst + i, a);
    stream_vector(dst + i + RC_VECTOR_BYTES, b);
    stream_vector(dst + i + 2 * RC_VECTOR_BYTES, c);
    stream_vector(dst + i + 3 * RC_VECTOR_BYTES, d);
  }
  for (; i + RC_VECTOR_BYTES <= bytes; i += RC_VECTOR_BYTES)
    stream_vector(dst + i, load_vector(src + i));
  memcpy(dst + i, src + i, bytes - i);
}
inline void stream_fence() { _mm_sfence(); }
#else
inline void stream_bytes(char* dst, const char* src, uint64_t bytes) { memcpy(dst, src, bytes); }
inline void stream_fence() {}
#endif

inline void copy(void* dst, const void* src, uint64_t bytes) { memcpy(dst, src, bytes); }

inline void copy_streaming(void* dst, const void* src, uint64_t bytes) {
  stream_bytes(static_cast<char*>(dst), static_cast<const char*>(src), bytes);
  stream_fence();
}

// The source of a loop: an array of T, widened element by element in registers. The result may
// overlap a source exactly (in place): element i of the result depends on element i alone. So the
// pointer may be marked as unaliased for the vectoriser.
template <class T>
struct Elements {
  const T* RC_RESTRICT ptr;
  typename Traits<T>::Acc operator[](uint64_t i) const { return Traits<T>::load(ptr[i]); }
};

// The compiler does not vectorise half-precision conversions by itself, so with F16C they run tile
// by tile through a buffer in the first-level cache. Other types need no buffer.
template <class T>
struct Tilewise {
  static constexpr bool value = false;
};

#if RC_HAS_F16C
template <>
struct Tilewise<Float16> {
  static constexpr bool value = true;
};

inline void widen_tile(float* RC_RESTRICT dst, const Float16* RC_RESTRICT src, uint64_t n) {
  uint64_t i = 0;
#if RC_VECTOR_BYTES == 64
  for (; i + 16 <= n; i += 16) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    // Not _mm512_cvtph_ps: GCC 12 warns about its undefined first argument (GCC bug 105593).
    _mm512_storeu_ps(dst + i, _mm512_maskz_cvtph_ps(__mmask16(-1), h));
  }
#endif
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(h));
  }
  for (; i < n; ++i) dst[i] = widen(src[i]);
}

inline void narrow_tile(Float16* RC_RESTRICT dst, const float* RC_RESTRICT src, uint64_t n) {
  uint64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(src + i);
    const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), h);
  }
  for (; i < n; ++i) dst[i] = narrow_float16(src[i]);
}
#endif

// acc[i] = a[i] op b[i]
template <RedOp op, class A, class X, class Y>
inline void combine_into(A* RC_RESTRICT acc, X a, Y b, double fa, double fb, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i)
    acc[i] = combine<op>(prepare<op>(a[i], fa), prepare<op>(b[i], fb));
}

// out[i] = narrow(finish(acc[i] op b[i])); the values of acc are already prepared.
template <RedOp op, class T, class X, class Y>
inline void combine_last(T* out, X acc, Y b, double fa, double fb, uint64_t n, int finish_world) {
  if (op == RedOp::kAvg && finish_world > 0) {
    for (uint64_t i = 0; i < n; ++i)
      out[i] = Traits<T>::store(finish<op>(combine<op>(acc[i], b[i]), finish_world));
  } else {
    for (uint64_t i = 0; i < n; ++i)
      out[i] = Traits<T>::store(combine<op>(prepare<op>(acc[i], fa), prepare<op>(b[i], fb)));
  }
}

// Reduces one tile of values of the accumulator's type or of T, read through `source(s)`, into
// `out` of type Out.
template <RedOp op, class Out, class A, class Source>
inline void reduce_values(Out* out, A* acc, Source source, const double* factors, int count,
                          uint64_t n, int finish_world) {
  if (count == 1) {
    const auto only = source(0);
    for (uint64_t i = 0; i < n; ++i)
      out[i] = Traits<Out>::store(finish<op>(prepare<op>(only[i], factors[0]), finish_world));
    return;
  }
  if (count == 2) {
    const auto a = source(0), b = source(1);
    combine_last<op>(out, a, b, factors[0], factors[1], n, finish_world);
    return;
  }
  {
    const auto a = source(0), b = source(1);
    combine_into<op>(acc, a, b, factors[0], factors[1], n);
  }
  for (int s = 2; s < count - 1; ++s) {
    const auto b = source(s);
    const double factor = factors[s];
    for (uint64_t i = 0; i < n; ++i) acc[i] = combine<op>(acc[i], prepare<op>(b[i], factor));
  }
  const auto last = source(count - 1);
  const double factor = factors[count - 1];
  for (uint64_t i = 0; i < n; ++i)
    out[i] = Traits<Out>::store(
        finish<op>(combine<op>(acc[i], prepare<op>(last[i], factor)), finish_world));
}

// Reduces one tile of at most kTileBytes / sizeof(Acc) elements.
template <class In, class Out, RedOp op>
inline void reduce_tile(Out* dst, const void* const* sources, const double* factors, int count,
                        uint64_t begin, uint64_t n, int finish_world) {
  using A = typename Traits<In>::Acc;
  static_assert(kSame<A, typename Traits<Out>::Acc>);
  constexpr uint64_t tile = kTileBytes / sizeof(A);
  alignas(64) A acc[tile];
#if RC_HAS_F16C
  if constexpr (Tilewise<In>::value) {
    alignas(64) A wide[2][tile];
    const auto source = [&](int s) {
      widen_tile(wide[s & 1], static_cast<const In*>(sources[s]) + begin, n);
      return Elements<A>{wide[s & 1]};
    };
    if constexpr (Tilewise<Out>::value) {
      alignas(64) A result[tile];
      reduce_values<op>(result, acc, source, factors, count, n, finish_world);
      narrow_tile(dst, result, n);
    } else {
      reduce_values<op>(dst, acc, source, factors, count, n, finish_world);
    }
    return;
  }
#endif
  const auto source = [&](int s) {
    return Elements<In>{static_cast<const In*>(sources[s]) + begin};
  };
#if RC_HAS_F16C
  if constexpr (Tilewise<Out>::value) {
    alignas(64) A result[tile];
    reduce_values<op>(result, acc, source, factors, count, n, finish_world);
    narrow_tile(dst, result, n);
    return;
  }
#endif
  reduce_values<op>(dst, acc, source, factors, count, n, finish_world);
}

#if RC_HAS_STREAMING_STORES
// Stores the sum of two sources past the caches straight from registers: large FP32 buffers of 2
// ranks are the most frequent case, and a bounce through the first-level cache costs them 15 % (32
// MiB on Zen 4: 3.2 ms against 3.7 ms). Returns the number of elements summed; dst is aligned.
template <class T>
inline uint64_t stream_sum_of_two(T* dst, const T* a, const T* b, uint64_t elems) {
  typedef T V __attribute__((vector_size(RC_VECTOR_BYTES)));
  constexpr uint64_t step = RC_VECTOR_BYTES / sizeof(T);
  uint64_t i = 0;
  for (; i + step <= elems; i += step) {
    V x, y;
    memcpy(&x, a + i, sizeof(V));
    memcpy(&y, b + i, sizeof(V));
    x += y;
    Vector out;
    memcpy(&out, &x, sizeof(V));
    stream_vector(reinterpret_cast<char*>(dst + i), out);
  }
  return i;
}
#endif

template <class In, class Out, RedOp op>
void reduce_kernel(const ReduceJob& job) {
  using A = typename Traits<In>::Acc;
  constexpr uint64_t tile = kTileBytes / sizeof(A);
  const uint64_t elems = job.bytes / sizeof(In);
  Out* const dst = static_cast<Out*>(job.dst);
  Out* const also = static_cast<Out*>(job.also);
  alignas(64) Out bounce[tile];  // collects results, in the first-level cache, to be streamed
  uint64_t first = 0;
#if RC_HAS_STREAMING_STORES
  if constexpr (op == RedOp::kSum && kSame<In, Out> && (kSame<In, float> || kSame<In, double>)) {
    const bool aligned = reinterpret_cast<uintptr_t>(dst) % RC_VECTOR_BYTES == 0;
    if (job.streaming && job.count == 2 && also == nullptr && aligned)
      first = stream_sum_of_two(dst, static_cast<const In*>(job.sources[0]),
                                static_cast<const In*>(job.sources[1]), elems);
  }
#endif
  for (uint64_t begin = first; begin < elems; begin += tile) {
    const uint64_t n = elems - begin < tile ? elems - begin : tile;
    Out* const out = job.streaming ? bounce : dst + begin;
    reduce_tile<In, Out, op>(out, job.sources, job.factors, job.count, begin, n, job.finish_world);
    const char* const result = reinterpret_cast<const char*>(out);
    if (job.streaming) stream_bytes(reinterpret_cast<char*>(dst + begin), result, n * sizeof(Out));
    if (also == nullptr) continue;
    char* const second = reinterpret_cast<char*>(also + begin);
    if (job.also_streaming)
      stream_bytes(second, result, n * sizeof(Out));
    else
      memcpy(second, result, n * sizeof(Out));
  }
  if (job.streaming || job.also_streaming) stream_fence();
}

}  // namespace host
RINGCOMM_NAMESPACE_END
