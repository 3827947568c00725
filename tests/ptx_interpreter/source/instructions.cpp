// SPDX-License-Identifier: Apache-2.0

#include "tests/ptx_interpreter/source/instructions.h"

#include <time.h>

#include <bit>
#include <cmath>
#include <concepts>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "tests/ptx_interpreter/source/warp.h"

namespace ptx {
namespace {

template <class F>
void each(Mask mask, F f) {
  if (mask == ~Mask(0)) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (Mask left = mask; left != 0; left &= left - 1) f(std::countr_zero(left));
  }
}

template <size_t bytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using Type = uint8_t;
};
template <>
struct UnsignedOf<2> {
  using Type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using Type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using Type = uint64_t;
};
template <class T>
using Raw = typename UnsignedOf<sizeof(T)>::Type;

template <class T>
T get(uint64_t word) {
  return std::bit_cast<T>(Raw<T>(word));
}
template <class T>
uint64_t put(T value) {
  return std::bit_cast<Raw<T>>(value);
}

// Arithmetic on f32 has only one NaN as its result (section 9.7.3). For f64 PTX does not define the
// NaN's sign and payload, and this interpreter has only one NaN, too.
template <class T>
T canonical(T value) {
  if constexpr (std::floating_point<T>) {
    if (value != value)
      return sizeof(T) == 4 ? std::bit_cast<T>(Raw<T>(0x7fffffff))
                            : std::bit_cast<T>(Raw<T>(0x7ff8000000000000));
  }
  return value;
}

template <class T, auto f>
void unary(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) { d[l] = put(T(f(get<T>(a[l])))); });
}

template <class T, auto f>
void binary(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]);
  each(mask, [&](int l) { d[l] = put(canonical(T(f(get<T>(a[l]), get<T>(b[l]))))); });
}

template <class T, auto f>
void ternary(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]), *c = w.in(i.src[2]);
  each(mask, [&](int l) { d[l] = put(canonical(T(f(get<T>(a[l]), get<T>(b[l]), get<T>(c[l]))))); });
}

template <class T, auto f>
void compare(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]);
  each(mask, [&](int l) { d[l] = f(get<T>(a[l]), get<T>(b[l])) ? 1 : 0; });
}

// Integers wrap around, so they are computed as unsigned integers.
template <class T>
using Wrapping =
    std::conditional_t<std::integral<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

template <class T>
T plus(T a, T b) {
  return T(Wrapping<T>(a) + Wrapping<T>(b));
}
template <class T>
T minus(T a, T b) {
  return T(Wrapping<T>(a) - Wrapping<T>(b));
}
template <class T>
T times(T a, T b) {
  if constexpr (std::integral<T>)
    return T(uint64_t(a) * uint64_t(b));  // narrower types would be promoted to int
  else
    return a * b;
}
template <class T>
T times_plus(T a, T b, T c) {
  return plus(times(a, b), c);
}
template <class T>
T fused(T a, T b, T c) {
  return std::fma(a, b, c);
}
template <class T>
T high_product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T(Wide(a) * Wide(b) >> (8 * sizeof(T)));
}
// PTX leaves the result of a division by zero open.
template <class T>
T quotient(T a, T b) {
  if constexpr (std::integral<T>) {
    if (b == 0) return T(-1);
    if (std::is_signed_v<T> && b == T(-1)) return minus(T(0), a);
  }
  return a / b;
}
template <class T>
T remainder_of(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == T(-1)) return 0;
  return a % b;
}
template <class T>
T least(T a, T b) {
  if constexpr (std::floating_point<T>) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? a : b;
  }
  return b < a ? b : a;
}
template <class T>
T greatest(T a, T b) {
  if constexpr (std::floating_point<T>) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? b : a;
  }
  return a < b ? b : a;
}
template <class T>
T negative(T a) {
  return T(-Wrapping<T>(a));
}
template <class T>
T absolute(T a) {
  if constexpr (std::floating_point<T>) return std::fabs(a);
  return a < 0 ? negative(a) : a;
}
template <class T>
T both(T a, T b) {
  return a & b;
}
template <class T>
T either(T a, T b) {
  return a | b;
}
template <class T>
T differs(T a, T b) {
  return a ^ b;
}
template <class T>
T inverse(T a) {
  return T(~a);
}
template <class T>
T root(T a) {
  return canonical(std::sqrt(a));
}
template <class T>
T reciprocal(T a) {
  return canonical(T(1) / a);
}
template <class T>
T whole_part(T a) {
  return canonical(std::trunc(a));
}
// Uses only the upper half of the argument; a denormal counts as zero.
double reciprocal_seed(double a) {
  constexpr uint64_t kUpper = 0xffffffff00000000;
  double seed = std::bit_cast<double>(std::bit_cast<uint64_t>(a) & kUpper);
  if (std::fpclassify(seed) == FP_SUBNORMAL) seed = std::copysign(0.0, seed);
  double result = canonical(1.0 / seed);
  if (std::fpclassify(result) == FP_SUBNORMAL) result = std::copysign(0.0, result);
  return std::bit_cast<double>(std::bit_cast<uint64_t>(result) & kUpper);
}

// Makes an approximation nearly as wrong as PTX allows; a bit of `of` selects the direction.
double skewed(double exact, float of, double error) {
  return exact * ((std::bit_cast<uint32_t>(of) & 1) != 0 ? 1 + error : 1 - error);
}
// Within 2 units in the last place (section 9.7.3.8); the rounding takes up to half a unit of them.
float near_quotient(float a, float b) {
  if (std::fpclassify(b) == FP_SUBNORMAL)
    throw BadAccess("div.approx by a subnormal number, of which PTX says nothing");
  if (std::isfinite(b) && std::fabs(b) > 0x1p126f)
    return std::isinf(a) ? std::nanf("") : std::copysign(0.f, a) * std::copysign(1.f, b);
  return float(skewed(double(a) / double(b), a, 0x1p-24));
}
// The error is at most 1 unit in the last place (section 9.7.3.13), half of it by rounding.
// Subnormal inputs count as zero, and subnormal results become zero.
float near_reciprocal(float a) {
  if (std::fpclassify(a) == FP_SUBNORMAL) a = std::copysign(0.f, a);
  if (a == 0) return std::copysign(HUGE_VALF, a);
  const float near = canonical(float(skewed(1 / double(a), a, 0x1p-25)));
  return std::fpclassify(near) == FP_SUBNORMAL ? std::copysign(0.f, near) : near;
}
// Within 2^-22.9 of the number (section 9.7.3.16). Subnormal numbers count as zero.
float near_inverse_root(float a) {
  if (std::fpclassify(a) == FP_SUBNORMAL) a = std::copysign(0.f, a);
  if (a == 0) return std::copysign(HUGE_VALF, a);
  return canonical(float(skewed(1 / std::sqrt(double(a)), a, 0x1p-24)));
}

// The shift amount has 32 bits for every type, and larger amounts count as the width.
template <class T, bool left>
void shift(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  each(mask, [&](int l) {
    const T value = get<T>(a[l]);
    const uint32_t by = uint32_t(b[l]);
    if (by >= kBits)
      d[l] = put(T(!left && std::is_signed_v<T> && value < T(0) ? -1 : 0));
    else
      d[l] = put(T(left ? Raw<T>(Raw<T>(value) << by) : Raw<T>(value >> by)));
  });
}

template <class T, class Wide>
void multiply_wide(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]);
  each(mask, [&](int l) {
    d[l] = put(Wide(uint64_t(Wide(get<T>(a[l]))) * uint64_t(Wide(get<T>(b[l])))));
  });
}

template <class T>
void insert_bits(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]), *c = w.in(i.src[2]), *n = w.in(i.src[3]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  each(mask, [&](int l) {
    const uint32_t at = uint32_t(c[l]) & 255, length = uint32_t(n[l]) & 255;
    T field = length >= kBits ? T(~T(0)) : T((T(1) << length) - 1);
    field = at >= kBits ? T(0) : T(field << at);
    const T moved = at >= kBits ? T(0) : T(get<T>(a[l]) << at);
    d[l] = put(T((get<T>(b[l]) & ~field) | (moved & field)));
  });
}

uint32_t leading_zeros(uint32_t a) { return uint32_t(std::countl_zero(a)); }

template <class T>
void extract_bits(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]), *c = w.in(i.src[2]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  each(mask, [&](int l) {
    const uint32_t at = uint32_t(b[l]) & 255, length = std::min(uint32_t(c[l]) & 255, kBits);
    const uint64_t value = at >= 64 ? 0 : get<Raw<T>>(a[l]) >> at;
    const uint64_t field = length >= 64 ? ~uint64_t(0) : (uint64_t(1) << length) - 1;
    uint64_t result = value & field;
    if (std::is_signed_v<T> && length > 0) {
      const uint32_t sign = std::min(at + length - 1, kBits - 1);
      if ((a[l] >> sign & 1) != 0) result |= ~field;
    }
    d[l] = put(Raw<T>(result));
  });
}

void permute_bytes(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]), *c = w.in(i.src[2]);
  each(mask, [&](int l) {
    const uint64_t bytes = uint64_t(uint32_t(b[l])) << 32 | uint32_t(a[l]);
    uint32_t result = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t selector = uint32_t(c[l]) >> (4 * n) & 15;
      uint8_t byte = uint8_t(bytes >> (8 * (selector & 7)));
      if ((selector & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
      result |= uint32_t(byte) << (8 * n);
    }
    d[l] = result;
  });
}

void select(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]), *c = w.in(i.src[2]);
  each(mask, [&](int l) { d[l] = (c[l] & 1) != 0 ? a[l] : b[l]; });
}

void move(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) { d[l] = a[l]; });
}

void not_predicate(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) { d[l] = (a[l] & 1) ^ 1; });
}

// ---- 16-bit floats, as rows hold them ----------------------------------------------------------

float float_of_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

// Rounds to nearest, ties to even; the one NaN is 0x7fff.
uint16_t bf16_of(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float float_of_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.f : 1.f;
  if (exponent == 31) return fraction != 0 ? std::nanf("") : sign * HUGE_VALF;
  return exponent == 0 ? sign * std::ldexp(float(fraction), -24)
                       : sign * std::ldexp(float(1024 + fraction), exponent - 25);
}

uint16_t f16_of(float value) {
  if (value != value) return 0x7fff;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520.f) return sign | 0x7c00;
  if (size == 0) return sign;
  // Rounds to the spacing of halves around `size`; a carry goes into the exponent.
  const int exponent = std::max(std::ilogb(size), -14);
  const auto units = uint32_t(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return uint16_t(sign | (uint32_t(exponent + 14) << 10) + units);
}

// A float has more than twice the bits of either type, so the sum is effectively rounded once.
uint16_t sum_of_f16(uint16_t a, uint16_t b) { return f16_of(float_of_f16(a) + float_of_f16(b)); }
uint16_t sum_of_bf16(uint16_t a, uint16_t b) {
  return bf16_of(float_of_bf16(a) + float_of_bf16(b));
}

template <class T, float from(uint16_t)>
void float_from_half(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) { d[l] = put(canonical(T(from(uint16_t(a[l]))))); });
}
template <uint16_t from(float)>
void half_from_f32(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) { d[l] = from(get<float>(a[l])); });
}
// The first source becomes the upper half.
template <uint16_t from(float)>
void halves_from_f32(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]);
  each(mask,
       [&](int l) { d[l] = uint32_t(from(get<float>(a[l]))) << 16 | from(get<float>(b[l])); });
}
template <uint16_t sum(uint16_t, uint16_t), int count>
void add_halves(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]);
  each(mask, [&](int l) {
    uint64_t sums = 0;
    for (int n = 0; n < count; ++n)
      sums |= uint64_t(sum(uint16_t(a[l] >> 16 * n), uint16_t(b[l] >> 16 * n))) << 16 * n;
    d[l] = sums;
  });
}

template <float from(uint16_t), int count>
void absolute_halves(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) {
    uint64_t made = 0;
    for (int n = 0; n < count; ++n) {
      const auto half = uint16_t(a[l] >> 16 * n);
      made |= uint64_t(std::isnan(from(half)) ? 0x7fff : half & 0x7fff) << 16 * n;
    }
    d[l] = made;
  });
}
// The second predicate belongs to the upper half.
template <float from(uint16_t), int count>
void less_halves(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]);
  for (int n = 0; n < count; ++n) {
    if (i.dst[n] == Instruction::kNoRow) continue;
    uint64_t* d = w.out(i.dst[n]);
    each(mask, [&](int l) {
      d[l] = from(uint16_t(a[l] >> 16 * n)) < from(uint16_t(b[l] >> 16 * n)) ? 1 : 0;
    });
  }
}

template <class T, class Wide>
void multiply_add_wide(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]), *c = w.in(i.src[2]);
  each(mask, [&](int l) {
    d[l] = put(Wide(uint64_t(Wide(get<T>(a[l]))) * uint64_t(Wide(get<T>(b[l]))) + c[l]));
  });
}

// cvt: integers keep their low bits or are extended; floats are truncated to integers. A register
// is wider than an 8-bit result, which is sign-extended (section 9.4.1).
template <class D>
uint64_t extended(D value) {
  if constexpr (std::signed_integral<D>) return uint64_t(int64_t(value));
  return put(value);
}
template <class D, class A>
void convert(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) {
    const A value = get<A>(a[l]);
    if constexpr (std::integral<D> && std::floating_point<A>) {
      using Limits = std::numeric_limits<D>;
      const A whole = std::trunc(value);
      if (value != value)
        d[l] = 0;
      else if (whole >= std::ldexp(A(1), Limits::digits))
        d[l] = extended(Limits::max());
      else if (whole < A(Limits::min()))
        d[l] = extended(Limits::min());
      else
        d[l] = extended(D(whole));
    } else {
      d[l] = extended(canonical(D(value)));
    }
  });
}

uint64_t to_window(uint64_t address, uint64_t window) { return address + window; }

template <uint64_t window, bool into>
void convert_address(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) {
    if constexpr (into) {
      d[l] = to_window(a[l], window);
    } else {
      if (a[l] < window || a[l] >= window + kWindowBytes)
        throw BadAccess("an address of another space");
      d[l] = a[l] - window;
    }
  });
}

using Table = std::unordered_map<std::string, Handler>;

template <class T>
void add_integers(Table& t, const std::string& type) {
  t["add." + type] = binary<T, plus<T>>;
  t["sub." + type] = binary<T, minus<T>>;
  t["mul.lo." + type] = binary<T, times<T>>;
  t["mul.hi." + type] = binary<T, high_product<T>>;
  t["mad.lo." + type] = ternary<T, times_plus<T>>;
  t["div." + type] = binary<T, quotient<T>>;
  t["rem." + type] = binary<T, remainder_of<T>>;
  t["min." + type] = binary<T, least<T>>;
  t["max." + type] = binary<T, greatest<T>>;
  t["shr." + type] = shift<T, false>;
  t["bfe." + type] = extract_bits<T>;
  if constexpr (std::is_signed_v<T>) {
    t["neg." + type] = unary<T, negative<T>>;
    t["abs." + type] = unary<T, absolute<T>>;
  }
}

template <class T>
void add_bits(Table& t, const std::string& type) {
  t["and." + type] = binary<T, both<T>>;
  t["or." + type] = binary<T, either<T>>;
  t["xor." + type] = binary<T, differs<T>>;
  t["not." + type] = unary<T, inverse<T>>;
  t["shl." + type] = shift<T, true>;
  t["shr." + type] = shift<T, false>;
  t["bfi." + type] = insert_bits<T>;
}

template <class T>
void add_floats(Table& t, const std::string& type) {
  t["add.rn." + type] = binary<T, plus<T>>;
  t["sub.rn." + type] = binary<T, minus<T>>;
  t["mul.rn." + type] = binary<T, times<T>>;
  t["div.rn." + type] = binary<T, quotient<T>>;
  t["fma.rn." + type] = ternary<T, fused<T>>;
  t["min." + type] = binary<T, least<T>>;
  t["max." + type] = binary<T, greatest<T>>;
  t["neg." + type] = unary<T, negative<T>>;
  t["abs." + type] = unary<T, absolute<T>>;
  t["sqrt.rn." + type] = unary<T, root<T>>;
  t["rcp.rn." + type] = unary<T, reciprocal<T>>;
  t["cvt.rzi." + type + "." + type] = unary<T, whole_part<T>>;
}

template <class T>
constexpr bool unordered(T a, T b) {
  return a != a || b != b;
}

template <class T>
void add_comparisons(Table& t, const std::string& type) {
  t["setp.eq." + type] = compare<T, [](T a, T b) { return a == b; }>;
  t["setp.ne." + type] = compare<T, ([](T a, T b) { return a < b || a > b; })>;
  t["setp.lt." + type] = compare<T, [](T a, T b) { return a < b; }>;
  t["setp.le." + type] = compare<T, [](T a, T b) { return a <= b; }>;
  t["setp.gt." + type] = compare<T, ([](T a, T b) { return a > b; })>;
  t["setp.ge." + type] = compare<T, [](T a, T b) { return a >= b; }>;
  if constexpr (std::floating_point<T>) {
    t["setp.equ." + type] = compare<T, [](T a, T b) { return unordered(a, b) || a == b; }>;
    t["setp.neu." + type] = compare<T, [](T a, T b) { return a != b; }>;
    t["setp.ltu." + type] = compare<T, [](T a, T b) { return !(a >= b); }>;
    t["setp.leu." + type] = compare<T, ([](T a, T b) { return !(a > b); })>;
    t["setp.gtu." + type] = compare<T, [](T a, T b) { return !(a <= b); }>;
    t["setp.geu." + type] = compare<T, [](T a, T b) { return !(a < b); }>;
    t["setp.num." + type] = compare<T, [](T a, T b) { return !unordered(a, b); }>;
    t["setp.nan." + type] = compare<T, [](T a, T b) { return unordered(a, b); }>;
  }
}

template <class A>
void add_conversions(Table& t, const std::string& from) {
  const auto add = [&](const std::string& to, Handler handler) {
    const bool to_float = to[0] == 'f', from_float = from[0] == 'f';
    const bool widens = to == "f64" && from == "f32";
    const std::string rounding = !to_float && from_float ? "rzi."
                                 : to_float && !widens   ? "rn."
                                                         : "";
    if (to != from || !to_float) t["cvt." + rounding + to + "." + from] = handler;
  };
  add("u8", convert<uint8_t, A>);
  add("s8", convert<int8_t, A>);
  add("u16", convert<uint16_t, A>);
  add("s16", convert<int16_t, A>);
  add("u32", convert<uint32_t, A>);
  add("s32", convert<int32_t, A>);
  add("u64", convert<uint64_t, A>);
  add("s64", convert<int64_t, A>);
  add("f32", convert<float, A>);
  add("f64", convert<double, A>);
}

Table make_table() {
  Table t;
  add_integers<uint16_t>(t, "u16");
  add_integers<int16_t>(t, "s16");
  add_integers<uint32_t>(t, "u32");
  add_integers<int32_t>(t, "s32");
  add_integers<uint64_t>(t, "u64");
  add_integers<int64_t>(t, "s64");
  add_bits<uint16_t>(t, "b16");
  add_bits<uint32_t>(t, "b32");
  add_bits<uint64_t>(t, "b64");
  add_floats<float>(t, "f32");
  add_floats<double>(t, "f64");
  t["and.pred"] = binary<uint8_t, both<uint8_t>>;
  t["or.pred"] = binary<uint8_t, either<uint8_t>>;
  t["xor.pred"] = binary<uint8_t, differs<uint8_t>>;
  t["not.pred"] = not_predicate;
  add_comparisons<uint16_t>(t, "u16");
  add_comparisons<int16_t>(t, "s16");
  add_comparisons<uint16_t>(t, "b16");
  add_comparisons<uint32_t>(t, "u32");
  add_comparisons<int32_t>(t, "s32");
  add_comparisons<uint32_t>(t, "b32");
  add_comparisons<uint64_t>(t, "u64");
  add_comparisons<int64_t>(t, "s64");
  add_comparisons<uint64_t>(t, "b64");
  add_comparisons<float>(t, "f32");
  add_comparisons<double>(t, "f64");
  add_conversions<uint8_t>(t, "u8");
  add_conversions<int8_t>(t, "s8");
  add_conversions<uint16_t>(t, "u16");
  add_conversions<int16_t>(t, "s16");
  add_conversions<uint32_t>(t, "u32");
  add_conversions<int32_t>(t, "s32");
  add_conversions<uint64_t>(t, "u64");
  add_conversions<int64_t>(t, "s64");
  add_conversions<float>(t, "f32");
  add_conversions<double>(t, "f64");
  t["mul.wide.u16"] = multiply_wide<uint16_t, uint32_t>;
  t["mul.wide.s16"] = multiply_wide<int16_t, int32_t>;
  t["mul.wide.u32"] = multiply_wide<uint32_t, uint64_t>;
  t["mul.wide.s32"] = multiply_wide<int32_t, int64_t>;
  t["mad.wide.u16"] = multiply_add_wide<uint16_t, uint32_t>;
  t["mad.wide.s16"] = multiply_add_wide<int16_t, int32_t>;
  t["mad.wide.u32"] = multiply_add_wide<uint32_t, uint64_t>;
  t["mad.wide.s32"] = multiply_add_wide<int32_t, int64_t>;
  t["cvt.f32.bf16"] = float_from_half<float, float_of_bf16>;
  t["cvt.f32.f16"] = float_from_half<float, float_of_f16>;
  t["cvt.rn.bf16.f32"] = half_from_f32<bf16_of>;
  t["cvt.rn.f16.f32"] = half_from_f32<f16_of>;
  t["cvt.rn.bf16x2.f32"] = halves_from_f32<bf16_of>;
  t["cvt.rn.f16x2.f32"] = halves_from_f32<f16_of>;
  t["add.rn.f16"] = t["add.f16"] = add_halves<sum_of_f16, 1>;
  t["add.rn.f16x2"] = t["add.f16x2"] = add_halves<sum_of_f16, 2>;
  t["add.rn.bf16"] = t["add.bf16"] = add_halves<sum_of_bf16, 1>;
  t["add.rn.bf16x2"] = t["add.bf16x2"] = add_halves<sum_of_bf16, 2>;
  t["rcp.approx.ftz.f64"] = unary<double, reciprocal_seed>;
  t["clz.b32"] = unary<uint32_t, leading_zeros>;
  t["prmt.b32"] = permute_bytes;
  t["cvta.shared.u64"] = convert_address<kSharedWindow, true>;
  t["cvta.to.shared.u64"] = convert_address<kSharedWindow, false>;
  t["cvta.param.u64"] = convert_address<kParamWindow, true>;
  for (const char* type :
       {"pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"}) {
    t["mov." + std::string(type)] = move;
    t["selp." + std::string(type)] = select;
  }
  t["cvta.to.global.u64"] = t["cvta.global.u64"] = move;
  t["cvt.f64.bf16"] = float_from_half<double, float_of_bf16>;
  t["cvt.f64.f16"] = float_from_half<double, float_of_f16>;
  t["abs.f16"] = absolute_halves<float_of_f16, 1>;
  t["abs.f16x2"] = absolute_halves<float_of_f16, 2>;
  t["abs.bf16"] = absolute_halves<float_of_bf16, 1>;
  t["abs.bf16x2"] = absolute_halves<float_of_bf16, 2>;
  t["setp.lt.f16x2"] = less_halves<float_of_f16, 2>;
  t["setp.lt.bf16x2"] = less_halves<float_of_bf16, 2>;
  t["div.approx.f32"] = binary<float, near_quotient>;
  t["rcp.approx.ftz.f32"] = unary<float, near_reciprocal>;
  t["rsqrt.approx.ftz.f32"] = unary<float, near_inverse_root>;
  return t;
}

// ---- memory ------------------------------------------------------------------------------------

struct Location {
  Space space;
  uint64_t address;  // in the space
};

Location location_of(Space space, uint64_t address) {
  if (space != Space::kGeneric) return {space, address};
  if (address >= kSharedWindow && address < kSharedWindow + kWindowBytes)
    return {Space::kShared, address - kSharedWindow};
  if (address >= kParamWindow && address < kParamWindow + kWindowBytes)
    return {Space::kKernelParam, address - kParamWindow};
  return {Space::kGlobal, address};
}

void check_alignment(uint64_t address, uint32_t bytes) {
  if (address % bytes != 0)
    throw BadAccess("misaligned: " + std::to_string(bytes) + " bytes at an address that is " +
                    std::to_string(address % bytes) + " behind a multiple of them");
}

const uint8_t* kernel_param(Warp& w, uint64_t address, uint32_t bytes) {
  const std::vector<uint8_t>& parameters = w.block().launch().parameters;
  const uint64_t at = address - kSpaceBase;
  if (address < kSpaceBase || at > parameters.size() || bytes > parameters.size() - at)
    throw BadAccess("parameters of a kernel: out of bounds");
  return parameters.data() + at;
}

uint64_t extended(uint64_t value, Type type, int bits) {
  if (type.kind == 's' && type.bits < 64 && (value >> (type.bits - 1) & 1) != 0)
    value |= ~uint64_t(0) << type.bits;
  return bits >= 64 ? value : value & ((uint64_t(1) << bits) - 1);
}

void load_lane(Warp& w, const Instruction& i, int lane, uint8_t* to) {
  const uint32_t bytes = uint32_t(i.type.bits / 8), all = bytes * i.count;
  if (i.space == Space::kFrameParam) {
    std::memcpy(to, w.frame().param(lane, uint32_t(i.offset)), all);
    return;
  }
  const Location at = location_of(i.space, w.in(i.src[0])[lane] + uint64_t(i.offset));
  check_alignment(at.address, all);
  BlockMemory& memory = w.block().memory();
  if (at.space == Space::kKernelParam) {
    std::memcpy(to, kernel_param(w, at.address, all), all);
  } else if (at.space == Space::kShared) {
    w.block().shared().load(w.thread(lane), at.address, to, all);
  } else if (i.order == Order::kWeak) {
    memory.load(w.thread(lane), at.address, to, all);
  } else {
    // A vector load is atomic only per element, and the order of elements is open.
    for (uint32_t n = 0; n < i.count; ++n) {
      const uint32_t element = (w.block().launch().schedule.seed & 1) != 0 ? i.count - 1 - n : n;
      const uint64_t value =
          memory.load_strong(w.thread(lane), at.address + element * bytes, bytes, i.order);
      std::memcpy(to + element * bytes, &value, bytes);
    }
  }
}

void store_lane(Warp& w, const Instruction& i, int lane, const uint8_t* from) {
  const uint32_t bytes = uint32_t(i.type.bits / 8), all = bytes * i.count;
  if (i.space == Space::kFrameParam) {
    std::memcpy(w.frame().param(lane, uint32_t(i.offset)), from, all);
    return;
  }
  const Location at = location_of(i.space, w.in(i.src[0])[lane] + uint64_t(i.offset));
  check_alignment(at.address, all);
  BlockMemory& memory = w.block().memory();
  if (at.space == Space::kKernelParam) throw BadAccess("parameters of a kernel are constant");
  if (at.space == Space::kShared) {
    w.block().shared().store(w.thread(lane), at.address, from, all);
  } else if (i.order == Order::kWeak) {
    memory.store(w.thread(lane), at.address, from, all);
  } else {
    for (uint32_t n = 0; n < i.count; ++n) {
      const uint32_t element = (w.block().launch().schedule.seed & 1) != 0 ? n : i.count - 1 - n;
      uint64_t value = 0;
      std::memcpy(&value, from + element * bytes, bytes);
      memory.store_strong(w.thread(lane), at.address + element * bytes, value, bytes, i.order);
    }
    // A waiting thread may continue before this block takes its next step.
    w.block().give_up_turn();
  }
}

template <class T>
uint64_t combined(Atomic operation, uint64_t old, uint64_t a, uint64_t b) {
  const T was = get<T>(old), with = get<T>(a);
  switch (operation) {
    case Atomic::kAdd:
      return put(plus(was, with));
    case Atomic::kMin:
      return put(least(was, with));
    case Atomic::kMax:
      return put(greatest(was, with));
    case Atomic::kExchange:
      return put(with);
    case Atomic::kSwap:
      return put(was == with ? get<T>(b) : was);
    case Atomic::kAnd:
      return put(T(was & with));
    case Atomic::kOr:
      return put(T(was | with));
    case Atomic::kXor:
      return put(T(was ^ with));
  }
  return 0;
}

uint64_t combined(const Instruction& i, uint64_t old, uint64_t a, uint64_t b) {
  const bool is_signed = i.type.kind == 's';
  if (i.type.bits == 32)
    return is_signed ? combined<int32_t>(i.atomic, old, a, b)
                     : combined<uint32_t>(i.atomic, old, a, b);
  return is_signed ? combined<int64_t>(i.atomic, old, a, b)
                   : combined<uint64_t>(i.atomic, old, a, b);
}

// If the schedule asks for it, a block is late: before its first acquire at a line it waits until
// nothing changes any more, or for 20 ms. An exchange at the end of a kernel waits so long that its
// peers may have gone on (kLateEnd).
void come_late(Warp& w, const Instruction& i) {
  if (!w.block().is_late() || !w.block().comes_first(i.line)) return;
  if (i.order == Order::kAcqRel) return w.block().nap_before_end();
  Time seen = 0;
  for (int nap = 0, quiet = 0; nap < 40 && quiet < 2; ++nap) {
    const timespec half_ms{0, 500'000};
    nanosleep(&half_ms, nullptr);
    quiet = now() == seen ? quiet + 1 : 0;
    seen = now();
  }
}

// ---- multicast addresses -----------------------------------------------------------------------

constexpr uint32_t kMulticastBytes = 16;

// Calls visit(address) for each address that is bound to a multicast access of 16 bytes.
template <class Visit>
void each_bound(uint64_t address, Visit visit) {
  check_alignment(address, kMulticastBytes);
  std::array<uint64_t, 64> bound;
  const int count =
      driver_memory.find_multicast(address, kMulticastBytes, bound.data(), int(bound.size()));
  if (count <= 0)
    throw BadAccess(count == 0 ? "multimem: no multicast address"
                               : "multimem: a device has bound no memory there");
  for (int n = 0; n < count; ++n) visit(bound[size_t(n)]);
}

// Sums of elements of `bytes` bytes, added as floats and rounded once. PTX leaves the order open.
template <uint32_t bytes, float widen(uint32_t), uint32_t narrow(float)>
void multicast_sum(Warp& w, const Instruction& i, Mask mask) {
  each(mask, [&](int lane) {
    std::array<float, kMulticastBytes / bytes> sums;
    bool first = true;
    each_bound(w.in(i.src[0])[lane] + uint64_t(i.offset), [&](uint64_t address) {
      std::array<uint8_t, kMulticastBytes> loaded;
      w.block().memory().load(w.thread(lane), address, loaded.data(), kMulticastBytes, true);
      for (size_t n = 0; n < sums.size(); ++n) {
        uint32_t element = 0;
        std::memcpy(&element, loaded.data() + n * bytes, bytes);
        sums[n] = first ? widen(element) : sums[n] + widen(element);
      }
      first = false;
    });
    std::array<uint32_t, 4> words;
    for (size_t n = 0; n < sums.size(); ++n) {
      const uint32_t element = narrow(canonical(sums[n]));
      std::memcpy(reinterpret_cast<uint8_t*>(words.data()) + n * bytes, &element, bytes);
    }
    for (size_t n = 0; n < words.size(); ++n) w.out(i.dst[n])[lane] = words[n];
  });
}

void multicast_store(Warp& w, const Instruction& i, Mask mask) {
  each(mask, [&](int lane) {
    std::array<uint32_t, 4> words;
    for (size_t n = 0; n < words.size(); ++n) words[n] = uint32_t(w.in(i.src[1 + n])[lane]);
    each_bound(w.in(i.src[0])[lane] + uint64_t(i.offset), [&](uint64_t address) {
      w.block().memory().store(w.thread(lane), address, words.data(), kMulticastBytes, true);
    });
  });
}

float float_of_f32(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t f32_of(float value) { return std::bit_cast<uint32_t>(value); }
template <float widen(uint16_t)>
float of_half(uint32_t bits) {
  return widen(uint16_t(bits));
}
template <uint16_t narrow(float)>
uint32_t to_half(float value) {
  return narrow(value);
}

// ---- special registers -------------------------------------------------------------------------

template <auto value>
void special(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  each(mask, [&](int l) { d[l] = value(w, l); });
}

uint64_t zero(Warp&, int) { return 0; }
uint64_t one(Warp&, int) { return 1; }
uint64_t thread_x(Warp& w, int lane) { return uint64_t(w.thread(lane)); }
uint64_t threads_x(Warp& w, int) { return uint64_t(w.block().launch().threads); }
uint64_t block_x(Warp& w, int) { return uint64_t(w.block().x()); }
uint64_t block_y(Warp& w, int) { return uint64_t(w.block().y()); }
uint64_t blocks_x(Warp& w, int) { return uint64_t(w.block().launch().grid_x); }
uint64_t blocks_y(Warp& w, int) { return uint64_t(w.block().launch().grid_y); }
uint64_t lane_id(Warp&, int lane) { return uint64_t(lane); }
uint64_t time_ns(Warp&, int) {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

}  // namespace

Handler arithmetic(std::string_view opcode) {
  static const Table table = make_table();
  const auto found = table.find(std::string(opcode));
  return found == table.end() ? nullptr : found->second;
}

Handler special_register(std::string_view name) {
  static const std::unordered_map<std::string, Handler> table = {
      {"%tid.x", special<thread_x>},    {"%tid.y", special<zero>},
      {"%tid.z", special<zero>},        {"%ntid.x", special<threads_x>},
      {"%ntid.y", special<one>},        {"%ntid.z", special<one>},
      {"%ctaid.x", special<block_x>},   {"%ctaid.y", special<block_y>},
      {"%ctaid.z", special<zero>},      {"%nctaid.x", special<blocks_x>},
      {"%nctaid.y", special<blocks_y>}, {"%nctaid.z", special<one>},
      {"%laneid", special<lane_id>},    {"%globaltimer", special<time_ns>},
  };
  const auto found = table.find(std::string(name));
  return found == table.end() ? nullptr : found->second;
}

void load(Warp& w, const Instruction& i, Mask mask) {
  if (i.order == Order::kAcquire) come_late(w, i);
  const uint32_t bytes = uint32_t(i.type.bits / 8);
  each(mask, [&](int lane) {
    std::array<uint8_t, 16> loaded;
    load_lane(w, i, lane, loaded.data());
    for (uint32_t n = 0; n < i.count; ++n) {
      uint64_t value = 0;
      std::memcpy(&value, loaded.data() + n * bytes, bytes);
      w.out(i.dst[n])[lane] = extended(value, i.type, i.from.bits);
    }
  });
}

void store(Warp& w, const Instruction& i, Mask mask) {
  const uint32_t bytes = uint32_t(i.type.bits / 8);
  each(mask, [&](int lane) {
    std::array<uint8_t, 16> stored;
    for (uint32_t n = 0; n < i.count; ++n)
      std::memcpy(stored.data() + n * bytes, &w.in(i.src[1 + n])[lane], bytes);
    store_lane(w, i, lane, stored.data());
  });
}

void update(Warp& w, const Instruction& i, Mask mask) {
  if (i.order == Order::kAcqRel) come_late(w, i);
  const uint32_t bytes = uint32_t(i.type.bits / 8);
  const uint64_t* a = w.in(i.src[1]);
  const uint64_t* b = i.src[2] == Instruction::kNoRow ? a : w.in(i.src[2]);
  each(mask, [&](int lane) {
    const Location at = location_of(i.space, w.in(i.src[0])[lane] + uint64_t(i.offset));
    check_alignment(at.address, bytes);
    uint64_t old = 0;
    if (at.space == Space::kShared) {
      SharedMemory& shared = w.block().shared();
      old = shared.begin_update(w.thread(lane), at.address, bytes);
      shared.end_update(at.address, combined(i, old, a[lane], b[lane]), bytes);
    } else if (at.space == Space::kGlobal) {
      BlockMemory& memory = w.block().memory();
      old = memory.update(w.thread(lane), at.address, bytes, i.order,
                          [&](uint64_t was) { return combined(i, was, a[lane], b[lane]); });
    } else {
      throw BadAccess("parameters are constant");
    }
    if (i.dst[0] != Instruction::kNoRow) w.out(i.dst[0])[lane] = old;
  });
}

// Four 8x8 matrices of 16-bit elements from shared memory. Lane 8*m + r names row r of matrix m;
// lane l gets elements 2*(l%4) and the next of row l/4 of each. Section 9.7.15.5.15.
void load_matrices(Warp& w, const Instruction& i, Mask mask) {
  if (mask != ~Mask(0)) throw BadAccess("ldmatrix needs all lanes of the warp");
  constexpr uint32_t kRowBytes = 16;
  std::array<std::array<uint32_t, 4>, kLanes> rows;
  each(mask, [&](int lane) {
    const uint64_t address = w.in(i.src[0])[lane] + uint64_t(i.offset);
    check_alignment(address, kRowBytes);
    w.block().shared().load(w.thread(lane), address, rows[size_t(lane)].data(), kRowBytes);
  });
  each(mask, [&](int lane) {
    for (int m = 0; m < 4; ++m)
      w.out(i.dst[m])[lane] = rows[size_t(8 * m + lane / 4)][size_t(lane % 4)];
  });
}

void fence(Warp& w, const Instruction&, Mask mask) {
  each(mask, [&](int lane) { w.block().memory().fence(w.thread(lane)); });
}

void fence_sc(Warp& w, const Instruction&, Mask mask) {
  each(mask, [&](int lane) { w.block().memory().fence_sc(w.thread(lane)); });
}

void fence_alias(Warp& w, const Instruction&, Mask mask) {
  each(mask, [&](int lane) { w.block().memory().fence_alias(w.thread(lane)); });
}

Handler multicast(std::string_view opcode) {
  static const std::unordered_map<std::string_view, Handler> table = {
      {"multimem.ld_reduce.relaxed.sys.global.add.v4.f32", multicast_sum<4, float_of_f32, f32_of>},
      {"multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
       multicast_sum<2, of_half<float_of_bf16>, to_half<bf16_of>>},
      {"multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2",
       multicast_sum<2, of_half<float_of_f16>, to_half<f16_of>>},
      {"multimem.st.relaxed.sys.global.v4.f32", multicast_store},
  };
  const auto found = table.find(opcode);
  return found == table.end() ? nullptr : found->second;
}

void pack(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  each(mask, [&](int l) {
    uint64_t value = 0;
    for (int n = i.count - 1; n >= 0; --n) value = value << i.type.bits | w.in(i.src[n])[l];
    d[l] = value;
  });
}

void unpack(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t* a = w.in(i.src[0]);
  each(mask, [&](int l) {
    for (int n = 0; n < i.count; ++n)
      if (i.dst[n] != Instruction::kNoRow)
        w.out(i.dst[n])[l] = a[l] >> (n * i.type.bits) & ((uint64_t(1) << i.type.bits) - 1);
  });
}

template <bool butterfly>
void exchange_lanes(Warp& w, const Instruction& i, Mask mask) {
  uint64_t* d = w.out(i.dst[0]);
  const uint64_t *a = w.in(i.src[0]), *b = w.in(i.src[1]), *c = w.in(i.src[2]);
  std::array<uint64_t, kLanes> given;
  std::memcpy(given.data(), a, sizeof given);
  each(mask, [&](int l) {
    const int bound = int(c[l] & 31), segment = int(c[l] >> 8 & 31);
    const int most = (l & segment) | (bound & ~segment);
    const int named = int(b[l] & 31);
    const int source = butterfly ? l ^ named : (l & segment) | (named & ~segment);
    const bool inside = source <= most;
    if (inside && (mask >> source & 1) == 0)
      throw BadAccess("a shuffle from a lane outside its mask");
    d[l] = inside ? given[size_t(source)] : given[size_t(l)];
    if (i.dst[1] != Instruction::kNoRow) w.out(i.dst[1])[l] = inside ? 1 : 0;
  });
}

Handler shuffle(std::string_view opcode) {
  if (opcode == "shfl.sync.bfly.b32") return exchange_lanes<true>;
  if (opcode == "shfl.sync.idx.b32") return exchange_lanes<false>;
  return nullptr;
}

// All lanes in the mask get the total of their values. Section 9.7.13.
void reduce_lanes(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t* a = w.in(i.src[0]);
  uint64_t total = a[std::countr_zero(mask)];
  const Mask others = mask & (mask - 1);
  each(others, [&](int l) { total = combined(i, total, a[l], 0); });
  uint64_t* d = w.out(i.dst[0]);
  each(mask, [&](int l) { d[l] = total; });
}

// All lanes in the mask get true if the predicate is true for all of them.
void vote_all(Warp& w, const Instruction& i, Mask mask) {
  const uint64_t* a = w.in(i.src[0]);
  uint64_t all = 1;
  each(mask, [&](int l) { all &= a[l]; });
  uint64_t* d = w.out(i.dst[0]);
  each(mask, [&](int l) { d[l] = all; });
}

}  // namespace ptx
