// The loops behind one KernelTable, written for the compiler's vectoriser. Included once by each
// isa_*.cpp, which sets RINGCOMM_ISA before; it uses no standard library template, whose symbols
// would be shared between instruction sets (see platform.h).
#pragma once

#include "kernels/host/kernel_table.h"

#if RC_HAS_STREAMING_STORES || RC_HAS_F16C
#include <immintrin.h>
#endif

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// Accumulators of one block: 4 KiB stays in the first-level cache beside two sources.
constexpr uint64_t kBlockBytes = 4096;

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

// Without the fence; dst and src need no alignment.
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

template <class T>
inline void widen_block(typename Traits<T>::Acc* RC_RESTRICT dst, const T* RC_RESTRICT src,
                        uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) dst[i] = Traits<T>::load(src[i]);
}
template <class T>
inline void narrow_block(T* RC_RESTRICT dst, const typename Traits<T>::Acc* RC_RESTRICT src,
                         uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) dst[i] = Traits<T>::store(src[i]);
}

#if RC_HAS_F16C
// The compiler does not vectorise half-precision conversions by itself.
template <>
inline void widen_block<Float16>(float* RC_RESTRICT dst, const Float16* RC_RESTRICT src,
                                 uint64_t n) {
  uint64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(h));
  }
  for (; i < n; ++i) dst[i] = widen(src[i]);
}
template <>
inline void narrow_block<Float16>(Float16* RC_RESTRICT dst, const float* RC_RESTRICT src,
                                  uint64_t n) {
  uint64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i h =
        _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), h);
  }
  for (; i < n; ++i) dst[i] = narrow_float16(src[i]);
}
#endif

// One block of at most kBlockBytes / sizeof(Acc) elements.
template <class T, RedOp op>
inline void reduce_block(T* dst, const void* const* sources, const double* factors, int count,
                         uint64_t begin, uint64_t n, int finish_world) {
  using A = typename Traits<T>::Acc;
  constexpr bool direct = sizeof(A) == sizeof(T);  // no conversion: the sources are read in place
  alignas(64) A acc[kBlockBytes / sizeof(A)];
  alignas(64) A wide[direct ? 1 : kBlockBytes / sizeof(A)];
  for (int s = 0; s < count; ++s) {
    const T* source = static_cast<const T*>(sources[s]) + begin;
    const A* values;
    if constexpr (direct) {
      values = reinterpret_cast<const A*>(source);
    } else {
      widen_block<T>(wide, source, n);
      values = wide;
    }
    const double factor = factors[s];
    if (s == 0) {
      for (uint64_t i = 0; i < n; ++i) acc[i] = prepare<op>(values[i], factor);
    } else {
      for (uint64_t i = 0; i < n; ++i) acc[i] = combine<op>(acc[i], prepare<op>(values[i], factor));
    }
  }
  if (op == RedOp::kAvg && finish_world > 0)
    for (uint64_t i = 0; i < n; ++i) acc[i] = finish<op>(acc[i], finish_world);
  if constexpr (direct)
    memcpy(dst, acc, n * sizeof(T));
  else
    narrow_block<T>(dst, acc, n);
}

// Two sources of a type that needs no conversion (two ranks, or a hop of the ring): no accumulator
// in memory.
template <class T, RedOp op>
inline void reduce_two(T* dst, const T* a, const T* b, const double* factors, uint64_t n,
                       int finish_world) {
  const double fa = factors[0], fb = factors[1];
  if (op == RedOp::kAvg && finish_world > 0) {
    for (uint64_t i = 0; i < n; ++i) dst[i] = finish<op>(combine<op>(a[i], b[i]), finish_world);
  } else {
    for (uint64_t i = 0; i < n; ++i)
      dst[i] = combine<op>(prepare<op>(a[i], fa), prepare<op>(b[i], fb));
  }
}

template <class T, RedOp op>
void reduce_kernel(void* dst_ptr, const void* const* sources, const double* factors, int count,
                   uint64_t bytes, int finish_world, bool streaming) {
  using A = typename Traits<T>::Acc;
  constexpr uint64_t block = kBlockBytes / sizeof(A);
  const uint64_t elems = bytes / sizeof(T);
  T* const dst = static_cast<T*>(dst_ptr);
  alignas(64) T bounce[block];  // streamed results gather here, in the first-level cache
  for (uint64_t begin = 0; begin < elems; begin += block) {
    const uint64_t n = elems - begin < block ? elems - begin : block;
    T* const out = streaming ? bounce : dst + begin;
    bool done = false;
    if constexpr (sizeof(A) == sizeof(T)) {
      if (count == 2) {
        const T* a = static_cast<const T*>(sources[0]) + begin;
        const T* b = static_cast<const T*>(sources[1]) + begin;
        reduce_two<T, op>(out, a, b, factors, n, finish_world);
        done = true;
      }
    }
    if (!done) reduce_block<T, op>(out, sources, factors, count, begin, n, finish_world);
    if (streaming)
      stream_bytes(reinterpret_cast<char*>(dst + begin), reinterpret_cast<const char*>(bounce),
                   n * sizeof(T));
  }
  if (streaming) stream_fence();
}

template <class T, RedOp op>
constexpr ReduceFn entry() {
  if constexpr (supports<T>(op))
    return &reduce_kernel<T, op>;
  else
    return nullptr;
}

template <class T>
constexpr void fill_row(ReduceFn (&row)[int(RedOp::kCount)]) {
  row[int(RedOp::kSum)] = entry<T, RedOp::kSum>();
  row[int(RedOp::kAvg)] = entry<T, RedOp::kAvg>();
  row[int(RedOp::kPremulSum)] = entry<T, RedOp::kPremulSum>();
  row[int(RedOp::kProduct)] = entry<T, RedOp::kProduct>();
  row[int(RedOp::kMin)] = entry<T, RedOp::kMin>();
  row[int(RedOp::kMax)] = entry<T, RedOp::kMax>();
  row[int(RedOp::kBand)] = entry<T, RedOp::kBand>();
  row[int(RedOp::kBor)] = entry<T, RedOp::kBor>();
  row[int(RedOp::kBxor)] = entry<T, RedOp::kBxor>();
}

constexpr KernelTable make_table(const char* isa) {
  KernelTable t{isa, &copy, &copy_streaming, {}};
  fill_row<uint8_t>(t.reduce[int(DType::kUInt8)]);
  fill_row<int8_t>(t.reduce[int(DType::kInt8)]);
  fill_row<uint16_t>(t.reduce[int(DType::kUInt16)]);
  fill_row<int16_t>(t.reduce[int(DType::kInt16)]);
  fill_row<uint32_t>(t.reduce[int(DType::kUInt32)]);
  fill_row<int32_t>(t.reduce[int(DType::kInt32)]);
  fill_row<uint64_t>(t.reduce[int(DType::kUInt64)]);
  fill_row<int64_t>(t.reduce[int(DType::kInt64)]);
  fill_row<Bool>(t.reduce[int(DType::kBool)]);
  fill_row<Float16>(t.reduce[int(DType::kFloat16)]);
  fill_row<BFloat16>(t.reduce[int(DType::kBFloat16)]);
  fill_row<float>(t.reduce[int(DType::kFloat32)]);
  fill_row<double>(t.reduce[int(DType::kFloat64)]);
  fill_row<Complex<float>>(t.reduce[int(DType::kComplex64)]);
  fill_row<Complex<double>>(t.reduce[int(DType::kComplex128)]);
  return t;
}

}  // namespace host
RINGCOMM_NAMESPACE_END
