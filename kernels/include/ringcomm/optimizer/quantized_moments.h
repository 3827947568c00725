// SPDX-License-Identifier: Apache-2.0

// 8-bit moments: small floats with an exponent that a block of elements shares, as in the
// microscaling formats (Rouhani et al., "Microscaling Data Formats for Deep Learning", 2023).
//
// A moment has a sign (only the first moment), an exponent of 4 bits (5 bits for the second moment,
// which is a square), and a mantissa of 3 bits. All bit patterns are numbers: exponent field 0
// marks a subnormal number, and the largest field means the block's exponent. Every such number is
// an FP32 number, and a block with a smaller exponent has all the numbers of a block with a larger
// exponent, up to its own largest. So moments that are dequantized to FP32 and quantized again stay
// the same.
//
// A step dequantizes a block, updates it in FP32, and rounds it stochastically. Rounding to nearest
// would drop changes below half a spacing, and the second moment changes by a thousandth. The 20
// bits that are cut off are compared with 20 random bits, so the expectation is the FP32 number
// itself. The random bits depend on the seed, the parameter, its step and the element's index in
// the parameter, not on buckets, ranks or lanes. A second moment other than 0 is never rounded to
// 0, so that no update is divided by eps alone.
//
// In memory the values of a chunk (1 byte per element) precede the exponents (1 byte per block).
// All elements of a block belong to one parameter: parameters begin at multiples of kMomentBlock
// elements. Zero bytes represent zeros.
#pragma once

#include "ringcomm/optimizer/adamw_element.h"

RINGCOMM_NAMESPACE_BEGIN

constexpr uint64_t kMomentBlock = 64;
constexpr int kCutBits = 20;
// The smallest exponent of a block, with FP32's bias, so that no value is subnormal in FP32.
constexpr uint32_t kLeastExponent = 36;
constexpr uint32_t kNotFinite = 255 - kLeastExponent;

struct FirstMoment {
  static constexpr uint32_t kBelow = 14;  // number of normal exponents below the block's exponent
};
struct SecondMoment {
  static constexpr uint32_t kBelow = 30;
};

// Returns the stored exponent of a block, from the bits of its largest magnitude. If that magnitude
// is above 1.875 * 2^127, infinite or NaN, the whole block is NaN.
RC_FN uint32_t block_exponent(uint32_t most) {
  const uint32_t exponent = (most + ((1u << kCutBits) - 1)) >> 23;
  const uint32_t held = exponent < kLeastExponent ? kLeastExponent : exponent;
  return (held < 255 ? held : 255) - kLeastExponent;
}

// Returns the bits of the smallest normal number of a block.
template <class Moment>
RC_FN uint32_t least_normal(uint32_t exponent) {
  return (exponent + kLeastExponent - Moment::kBelow) << 23;
}

// Return the larger and the smaller of two bit patterns of positive numbers.
RC_FN int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
RC_FN int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

// Returns the bits of the magnitude that a value, without its sign, represents. It is the smaller
// of y / 2, the magnitude of a normal number, and y - least, the magnitude of a subnormal number.
RC_FN uint32_t magnitude_of(uint32_t value, uint32_t least) {
  const uint32_t y = least + (value << kCutBits);
  const float subnormal = float_of(y) - float_of(least);
  return uint32_t(smaller(int32_t(bits_of(subnormal)), int32_t(y - (1u << 23))));
}

// Returns the value of a magnitude, rounded by kCutBits bits of `random`: inverts magnitude_of().
RC_FN uint32_t quantized_of(uint32_t magnitude, uint32_t least, uint32_t random) {
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(least));
  const int32_t y = larger(int32_t(subnormal), int32_t(magnitude + (1u << 23)));
  return (uint32_t(y) - least + random) >> kCutBits;
}

RC_FN float dequantize_first(uint8_t value, uint32_t least) {
  return float_of(magnitude_of(value & 0x7fu, least) | (uint32_t(value) & 0x80u) << 24);
}
RC_FN float dequantize_second(uint8_t value, uint32_t least) {
  return float_of(magnitude_of(value, least));
}

RC_FN uint8_t quantize_first(float m, uint32_t least, uint32_t random) {
  const uint32_t bits = bits_of(m);
  return uint8_t(quantized_of(bits & 0x7fffffffu, least, random) | (bits >> 24 & 0x80u));
}
RC_FN uint8_t quantize_second(float v, uint32_t least, uint32_t random) {
  const uint32_t magnitude = bits_of(v) & 0x7fffffffu;
  const int32_t value = int32_t(quantized_of(magnitude, least, random));
  return uint8_t(larger(value, smaller(int32_t(magnitude), 1)));
}

// The random bits for one parameter in one step.
struct MomentDraw {
  uint32_t key, twist;
  uint32_t first;  // index in the parameter of a run's first element

  // `element`: the index of the first element, at the beginning of a block.
  static RC_FN MomentDraw of(uint64_t seed, uint64_t param, uint32_t step, uint64_t element) {
    const Philox drawn = philox(seed, param, step, 0x80000000u | uint32_t(element >> 32));
    return {drawn.word[0], drawn.word[1], uint32_t(element)};
  }
  // Returns the random bits of element `i` of the run: the last two rounds of a hash by Wellons
  // ("lowbias32"). A key is xored in before each multiplication.
  RC_FN uint32_t word(uint32_t i) const {
    uint32_t x = ((first + i) ^ key) * 0x7feb352du;
    x = (x ^ x >> 15 ^ twist) * 0x846ca68bu;
    return x ^ x >> 16;
  }
  // The first moment takes the low bits of the word, the second moment the high bits.
  static RC_FN uint32_t of_first(uint32_t word) { return word & ((1u << kCutBits) - 1); }
  static RC_FN uint32_t of_second(uint32_t word) { return word >> (32 - kCutBits); }
};

// A moment of a chunk, at the address that AdamWShard holds.
struct QuantizedMoment {
  uint8_t* values;
  uint8_t* exponents;

  static RC_FN QuantizedMoment of(float* moment, uint64_t elems) {
    uint8_t* const values = reinterpret_cast<uint8_t*>(moment);
    return {values, values + elems};
  }
};

RINGCOMM_NAMESPACE_END
