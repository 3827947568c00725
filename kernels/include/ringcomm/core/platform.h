// SPDX-License-Identifier: Apache-2.0

// The only file that depends on the compiler and on the machine for which it compiles.
//
// RINGCOMM_ISA names the inline namespace of everything below kernels/include. The linker keeps any
// one of several inline functions with the same symbol. If the linker kept a function compiled with
// -mavx512f in place of the same function of the baseline, an older CPU would end the program by
// SIGILL. Distinct namespaces make distinct symbols.
#pragma once

#if defined(__CUDACC_RTC__)
// NVRTC has no C library, but a built-in memcpy. Up to CUDA 13.0 it has no offsetof either.
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#define RC_HAS_OFFSETOF 0
#else
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define RC_HAS_OFFSETOF 1
#endif

#ifndef RINGCOMM_ISA
#define RINGCOMM_ISA generic
#endif

#define RINGCOMM_NAMESPACE_BEGIN \
  namespace ringcomm {           \
  inline namespace RINGCOMM_ISA {
#define RINGCOMM_NAMESPACE_END \
  }                            \
  }

// RC_FN: arithmetic, always inlined. RC_TEAM_FN: executed by a whole team; on CUDA inlined into the
// kernel, so that no variable is in local memory. RC_COLD: the path by which a wait fails, kept out
// of the loops.
#if defined(__CUDACC__)
#define RC_FN __host__ __device__ __forceinline__
#define RC_TEAM_FN __device__ __forceinline__
#define RC_COLD __device__ __noinline__
// Inlines a lambda, if written after its parameters. A large lambda that is not inlined reads
// captured variables from local memory.
#define RC_INLINED __attribute__((always_inline))
#define RC_UNROLL _Pragma("unroll")
#define RC_ROLLED _Pragma("unroll 1")
#define RC_RESTRICT __restrict__
#elif defined(__GNUC__) || defined(__clang__)
#define RC_FN inline __attribute__((always_inline))
#define RC_TEAM_FN inline
#define RC_COLD inline
#define RC_INLINED
#define RC_UNROLL _Pragma("GCC unroll 8")
#define RC_ROLLED
#define RC_RESTRICT __restrict__
#else
#error "ringcomm supports GCC, Clang and NVCC"
#endif

// 1 if CUDA code is compiled, for the device or the host.
#if defined(__CUDACC__)
#define RC_CUDA 1
#else
#define RC_CUDA 0
#endif

#if defined(__CUDA_ARCH__)
#define RC_DEVICE_PASS 1
#else
#define RC_DEVICE_PASS 0
#endif

// 1 if the GPU has instructions for multicast addresses.
#if RC_DEVICE_PASS && __CUDA_ARCH__ >= 900
#define RC_HAS_MULTIMEM 1
#else
#define RC_HAS_MULTIMEM 0
#endif

// 1 for GPUs of compute capability 10.0 and later.
#if RC_DEVICE_PASS && __CUDA_ARCH__ >= 1000
#define RC_IS_SM100 1
#else
#define RC_IS_SM100 0
#endif

// 1 if the GPU rounds (PAIRS) or adds (SUMS) two bfloat16 or float16 numbers at once.
#if RC_DEVICE_PASS && __CUDA_ARCH__ >= 800
#define RC_HAS_HALF_PAIRS 1
#else
#define RC_HAS_HALF_PAIRS 0
#endif
#if RC_DEVICE_PASS && __CUDA_ARCH__ >= 900
#define RC_HAS_HALF_SUMS 1
#else
#define RC_HAS_HALF_SUMS 0
#endif

// 1 if the processor converts vectors between half and single precision.
#if !RC_DEVICE_PASS && defined(__F16C__) && defined(__AVX__)
#define RC_HAS_F16C 1
#else
#define RC_HAS_F16C 0
#endif

// 1 if stores can go past the caches.
#if !RC_DEVICE_PASS && defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#define RC_HAS_STREAMING_STORES 1
#else
#define RC_HAS_STREAMING_STORES 0
#endif

#if RC_HAS_STREAMING_STORES && defined(__AVX512F__)
#define RC_VECTOR_BYTES 64
#elif RC_HAS_STREAMING_STORES && defined(__AVX__)
#define RC_VECTOR_BYTES 32
#else
#define RC_VECTOR_BYTES 16
#endif

RINGCOMM_NAMESPACE_BEGIN

// Prefetches 4 lines at `at`, which a host loads next; 4 was chosen without measurements.
RC_FN void prefetch_lines(const char* at) {
#if !RC_DEVICE_PASS
  for (int line = 0; line < 4; ++line) __builtin_prefetch(at + 64 * line);
#endif
}

// Returns the base-2 logarithm of a power of two.
RC_FN int log2_of(uint32_t x) {
#if RC_DEVICE_PASS
  return 31 - __clz(int(x));
#else
  return 31 - __builtin_clz(x);
#endif
}

// Returns x / d for d below 2^16. A GPU divides digit by digit: three 32-bit divisions take less
// time than one 64-bit division, which is a call of about a hundred instructions.
RC_FN uint64_t divide_by_short(uint64_t x, uint32_t d) {
#if RC_DEVICE_PASS
  uint64_t quotient = 0;
  uint32_t rest = uint32_t(x >> 32);
  quotient = uint64_t(rest / d) << 32;
  rest %= d;
  rest = rest << 16 | (uint32_t(x) >> 16);
  quotient |= uint64_t(rest / d) << 16;
  rest = (rest % d) << 16 | (uint32_t(x) & 0xffff);
  return quotient | (rest / d);
#else
  return x / d;
#endif
}

// Returns the correctly rounded square root, by an instruction if the machine has one.
#if RC_CUDA
RC_FN float square_root(float x) { return sqrtf(x); }
RC_FN double square_root(double x) { return sqrt(x); }
RC_FN double power(double base, double exponent) { return pow(base, exponent); }
RC_FN float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
RC_FN double fused_multiply_add(double a, double b, double c) { return fma(a, b, c); }
#else
RC_FN float square_root(float x) { return __builtin_sqrtf(x); }
RC_FN double square_root(double x) { return __builtin_sqrt(x); }
RC_FN double power(double base, double exponent) { return __builtin_pow(base, exponent); }
RC_FN double fused_multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Returns a * b + c, rounded once. Without an FMA, the product is exact in double precision, and
// its sum with c, rounded to odd, rounds to the same FP32 number as the exact sum (Boldo and
// Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Trans. Computers 57, 2008).
RC_FN float fused_multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  const double product = double(a) * double(b), addend = double(c), sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  const bool inexact = error < 0.0 || error > 0.0;  // false for infinities and NaN
  const uint64_t outwards = (error > 0.0) == (sum > 0.0) ? 1 : ~uint64_t(0);
  bits += inexact && (bits & 1) == 0 ? outwards : 0;
  double odd;
  memcpy(&odd, &bits, 8);
  return float(odd);
#endif
}
#endif

RINGCOMM_NAMESPACE_END
