// SPDX-License-Identifier: Apache-2.0

// Element types, and how each is widened for accumulation and narrowed for the result.
// bfloat16 and float16 accumulate in FP32 and round once, to nearest even.
#pragma once

#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN

// Ranks compare these values: append a new type at the end, even a type that is only moved and not
// reduced, as the float8 types are.
enum class DType : int32_t {
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kBool,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
  kFloat8E4M3FN,
  kFloat8E4M3FNUZ,
  kFloat8E5M2,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
  kCount
};

RC_FN constexpr int size_of(DType t) {
  switch (t) {
    case DType::kUInt16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUInt32:
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kUInt64:
    case DType::kInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
    default:
      return 1;
  }
}

// Returns the DType of Traits<T>::Acc, the accumulator of a type.
RC_FN constexpr DType accumulator_of(DType t) {
  return t == DType::kFloat16 || t == DType::kBFloat16 ? DType::kFloat32 : t;
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Bool {
  uint8_t value;
};
template <class R>
struct Complex {
  R re, im;
};

// NVRTC has neither the standard library nor the compilers' own __is_same.
template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

RC_FN uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
RC_FN float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

RC_FN float widen(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }

RC_FN BFloat16 narrow_bfloat16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  // A NaN must not round up to infinity: keep its top bits and set the quiet bit.
  return {uint16_t(x != x ? (u >> 16) | 0x40u : rounded)};
}

// Half precision through integers (no hardware needed), after the bit layout of IEEE 754 binary16.
RC_FN float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = uint32_t(x.bits & 0x7fffu)
                                                                      << 13;
  // Rebiases the exponent by multiplication, which is exact for normal and subnormal inputs.
  const float scaled = float_of(magnitude) * float_of(0x77800000u /* 2^112 */);
  const uint32_t inf_nan = magnitude | 0x7f800000u;
  return float_of(sign | (magnitude >= 0x0f800000u ? inf_nan : bits_of(scaled)));
}

RC_FN Float16 narrow_float16(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  // Below 2^-14 the result is subnormal: adding 0.5 aligns the result's last bit with FP32's last
  // bit, so that the FP32 adder does the rounding to nearest even.
  const uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (a - 0x38000000u + 0x0fffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t finite = a < 0x38800000u ? subnormal : normal;
  const uint32_t magnitude = a > 0x7f800000u                          ? 0x7e00u
                             : (a >= 0x47800000u || finite > 0x7c00u) ? 0x7c00u
                                                                      : finite;
  return {uint16_t(sign | magnitude)};
}

// Traits<T>::Acc is the accumulator; load() widens, store() narrows.
template <class T>
struct Traits {
  using Acc = T;
  static RC_FN Acc load(T x) { return x; }
  static RC_FN T store(Acc x) { return x; }
};
template <>
struct Traits<BFloat16> {
  using Acc = float;
  static RC_FN float load(BFloat16 x) { return widen(x); }
  static RC_FN BFloat16 store(float x) { return narrow_bfloat16(x); }
};
template <>
struct Traits<Float16> {
  using Acc = float;
  static RC_FN float load(Float16 x) { return widen(x); }
  static RC_FN Float16 store(float x) { return narrow_float16(x); }
};

RINGCOMM_NAMESPACE_END
