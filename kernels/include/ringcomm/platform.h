// The only file that asks which compiler and which machine compiles the templates.
//
// RINGCOMM_ISA names the inline namespace of everything below kernels/include. A translation unit
// compiled with -mavx512f must not lend its inline functions to one compiled for the baseline: the
// linker keeps one copy of equal symbols, whichever it saw first, and the program would then die on
// an older CPU with SIGILL. Distinct namespaces make distinct symbols.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifndef RINGCOMM_ISA
#define RINGCOMM_ISA generic
#endif

#define RINGCOMM_NAMESPACE_BEGIN \
  namespace ringcomm {           \
  inline namespace RINGCOMM_ISA {
#define RINGCOMM_NAMESPACE_END \
  }                            \
  }

#if defined(__CUDACC__)
#define RC_FN __host__ __device__ __forceinline__
#define RC_RESTRICT __restrict__
#elif defined(__GNUC__) || defined(__clang__)
#define RC_FN inline __attribute__((always_inline))
#define RC_RESTRICT __restrict__
#else
#error "ringcomm supports GCC, Clang and NVCC"
#endif

#if defined(__CUDA_ARCH__)
#define RC_DEVICE_PASS 1
#else
#define RC_DEVICE_PASS 0
#endif

// Vector conversions between half and single precision in hardware.
#if !RC_DEVICE_PASS && defined(__F16C__) && defined(__AVX__)
#define RC_HAS_F16C 1
#else
#define RC_HAS_F16C 0
#endif

// Stores that go past the caches.
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
