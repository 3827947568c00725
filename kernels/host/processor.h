// SPDX-License-Identifier: Apache-2.0

#pragma once

// Finds which instructions the processor has, and whether the operating system saves the registers
// that these instructions use.
//
// __builtin_cpu_supports depends on the compiler's runtime library. zig's library, as in wheels,
// always says no (https://github.com/ziglang/zig/issues/18074).

#if defined(__x86_64__)

#include <cpuid.h>

namespace ringcomm {

struct Processor {
  bool sse42 = false;
  bool pclmul = false;
  bool avx2 = false;    // AVX2 with FMA and BMI2
  bool avx512 = false;  // AVX-512 F, BW, CD, DQ and VL
};

inline Processor find_processor() {
  Processor found;
  unsigned a, b, c1, d, b7, c7;
  if (!__get_cpuid(1, &a, &b, &c1, &d)) return found;
  found.sse42 = c1 & bit_SSE4_2;
  found.pclmul = c1 & bit_PCLMUL;
  if (!(c1 & bit_OSXSAVE) || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return found;
  unsigned saved, saved_high;  // XCR0: the registers that the system saves
  __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;
  found.avx2 = (saved & kYmm) == kYmm && (c1 & bit_FMA) && (b7 & bit_AVX2) && (b7 & bit_BMI2);
  constexpr unsigned kAvx512 =
      bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
  found.avx512 = found.avx2 && (saved & kZmm) == kZmm && (b7 & kAvx512) == kAvx512;
  return found;
}

}  // namespace ringcomm

#endif
