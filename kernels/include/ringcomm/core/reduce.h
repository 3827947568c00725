// SPDX-License-Identifier: Apache-2.0

// The reduction operators, element by element, in the accumulator's type.
//
// A reduction of sources s_0 .. s_{W-1} (in rank order) is
//     result = narrow(finish(combine(.. combine(prepare(s_0), prepare(s_1)) .., prepare(s_{W-1}))))
// with one rounding at the end for bfloat16 and float16. No step is contracted into a fused
// multiply-add (the build says -ffp-contract=off), so that every instruction set gives the same
// bits.
#pragma once

#include "ringcomm/core/dtypes.h"

RINGCOMM_NAMESPACE_BEGIN

enum class RedOp : int32_t {
  kSum,
  kAvg,
  kPremulSum,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kCount
};

template <class T>
struct IsInteger {
  static constexpr bool value = false;
};
template <>
struct IsInteger<uint8_t> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<int8_t> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<uint16_t> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<int16_t> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<uint32_t> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<int32_t> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<uint64_t> {
  static constexpr bool value = true;
};
template <>
struct IsInteger<int64_t> {
  static constexpr bool value = true;
};

template <class T>
struct IsComplex {
  static constexpr bool value = false;
};
template <class R>
struct IsComplex<Complex<R>> {
  static constexpr bool value = true;
};

// True if an operator is defined for a type. Bool: SUM and MAX are "any", PRODUCT and MIN are
// "all".
template <class T>
RC_FN constexpr bool supports(RedOp op) {
  constexpr bool integer = IsInteger<T>::value, complex = IsComplex<T>::value;
  switch (op) {
    case RedOp::kSum:
    case RedOp::kProduct:
      return true;
    case RedOp::kAvg:
    case RedOp::kPremulSum:
      return true;
    case RedOp::kMin:
    case RedOp::kMax:
      return !complex;
    default:
      return integer;
  }
}
template <>
RC_FN constexpr bool supports<Bool>(RedOp op) {
  return op != RedOp::kAvg && op != RedOp::kPremulSum && op != RedOp::kCount;
}

// Integer sums wrap around: they are computed unsigned, where C++ defines the overflow.
template <class T>
struct Wrapping {
  using Type = T;
};
template <>
struct Wrapping<int8_t> {
  using Type = uint8_t;
};
template <>
struct Wrapping<int16_t> {
  using Type = uint16_t;
};
template <>
struct Wrapping<int32_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<int64_t> {
  using Type = uint64_t;
};

template <class A>
RC_FN A add(A a, A b) {
  using U = typename Wrapping<A>::Type;
  return A(U(U(a) + U(b)));
}
template <class A>
RC_FN A multiply(A a, A b) {
  // 16-bit operands promote to int, whose product may overflow; 64 bits hold it.
  if constexpr (IsInteger<A>::value)
    return A(uint64_t(a) * uint64_t(b));
  else
    return a * b;
}
template <class R>
RC_FN Complex<R> add(Complex<R> a, Complex<R> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class R>
RC_FN Complex<R> multiply(Complex<R> a, Complex<R> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
RC_FN Bool add(Bool a, Bool b) { return {uint8_t((a.value | b.value) != 0)}; }
RC_FN Bool multiply(Bool a, Bool b) { return {uint8_t(a.value != 0 && b.value != 0)}; }

// Return the smaller or the larger operand, or a NaN if either is a NaN, as torch.minimum does.
template <class A>
RC_FN A smaller(A a, A b) {
  return (a < b || a != a) ? a : b;
}
template <class A>
RC_FN A larger(A a, A b) {
  return (a > b || a != a) ? a : b;
}
RC_FN Bool smaller(Bool a, Bool b) { return multiply(a, b); }
RC_FN Bool larger(Bool a, Bool b) { return add(a, b); }

template <class A>
RC_FN A scale(A x, double factor) {
  if constexpr (IsComplex<A>::value) {
    using R = decltype(x.re);
    return {x.re * R(factor), x.im * R(factor)};
  } else {
    return multiply(x, A(factor));
  }
}

template <class A>
RC_FN A divide(A x, int world) {
  if constexpr (IsComplex<A>::value) {
    using R = decltype(x.re);
    return {x.re / R(world), x.im / R(world)};
  } else if constexpr (IsInteger<A>::value) {
    // Rounds towards zero, as division in C++ does.
    const uint64_t wide = uint64_t(x);
    if constexpr (sizeof(A) == 8) {
      const bool negative = A(-1) < A(0) && x < A(0);
      const uint64_t quotient = divide_by_short(negative ? 0 - wide : wide, uint32_t(world));
      return A(negative ? 0 - quotient : quotient);
    } else if constexpr (A(-1) < A(0)) {
      return A(int32_t(x) / world);
    } else {
      return A(uint32_t(x) / uint32_t(world));
    }
  } else {
    return x / A(world);
  }
}

template <RedOp op, class A>
RC_FN A prepare(A x, double factor) {
  if constexpr (op == RedOp::kPremulSum)
    return scale(x, factor);
  else
    return x;
}

template <RedOp op, class A>
RC_FN A combine(A a, A b) {
  if constexpr (op == RedOp::kProduct)
    return multiply(a, b);
  else if constexpr (op == RedOp::kMin)
    return smaller(a, b);
  else if constexpr (op == RedOp::kMax)
    return larger(a, b);
  else if constexpr (op == RedOp::kBand)
    return A(a & b);
  else if constexpr (op == RedOp::kBor)
    return A(a | b);
  else if constexpr (op == RedOp::kBxor)
    return A(a ^ b);
  else
    return add(a, b);
}
template <RedOp op>
RC_FN Bool combine(Bool a, Bool b) {
  if constexpr (op == RedOp::kProduct || op == RedOp::kMin || op == RedOp::kBand)
    return multiply(a, b);
  else if constexpr (op == RedOp::kBxor)
    return {uint8_t((a.value != 0) != (b.value != 0))};
  else
    return add(a, b);
}

// `world`: the number of ranks whose contributions the accumulator contains; 0 leaves a partial sum
// unfinished (an inner hop of the ring).
template <RedOp op, class A>
RC_FN A finish(A x, int world) {
  if constexpr (op == RedOp::kAvg)
    return world > 0 ? divide(x, world) : x;
  else
    return x;
}

RINGCOMM_NAMESPACE_END
