// SPDX-License-Identifier: Apache-2.0

// FP32 numbers in a few bits, for links between nodes: the formats "int8", "fp8" (e4m3) and "int4".
//
// A run of n numbers is cut into blocks of 128 numbers; the last block may be shorter. A block has
// a scale s, and for each number x a quantized value of 8 or 4 bits: the value nearest to x / s,
// ties to even.
// In memory all quantized values of the run come first, then the scales' words of 3 bytes each:
//
//     format  values             bytes of n    error of a number, if M is the largest of its block
//     int8    -127 .. 127        131/128 n     M / 254
//     fp8     e4m3 to 256        131/128 n     |x| / 16, or M / 262144 if that is more
//     int4    -7 .. 7             67/128 n     M / 14
//
// plus 2^-150, half of FP32's smallest number, if M < 2^-62.
//
// These bounds include the roundings of FP32. The scale is M divided by the largest value, times
// 1 - 2^-12. This leaves room for the roundings of 1 / s and of x * (1 / s), and the largest number
// is still nearest to the largest value. The scale has 15 significant bits, so that
// a value times a scale is exact: a dequantized number is the same with and without fused
// multiply-adds, and a sum is rounded by its additions alone. So all machines compute the same
// bits.
//
// In blocks of tiny numbers, marked by a bit of the scale's word, numbers are multiplied by 2^64
// before and divided after. So subnormal numbers are as exact as others.
//
// Another bit of the word marks a block with infinities or NaNs. The values of largest magnitude
// then represent these, and M is the largest finite number. int8 and int4 then have one value
// fewer, and errors of M / 252 and M / 12.
//
// e4m3 reaches 448. With the largest number at 256 the error of Gaussian numbers is 2.53e-2 of
// their norm. This is the least of all choices from 224 to 448 that were tried, whose errors reach
// 2.94e-2; at 448 the error is 2.57e-2.
//
// Only fp8 keeps the sign of a zero. No format keeps the payload of a NaN.
//
// The host and CUDA compile this file; their loops are isa_quantization.h and quantization_lanes.h.
// Triton's counterpart is kernels/tl/quantization.py.
#pragma once

#include "ringcomm/core/dtypes.h"

RINGCOMM_NAMESPACE_BEGIN

enum class QuantFormat : int32_t { kInt8, kFp8, kInt4, kCount };

constexpr uint64_t kQuantBlock = 128;
constexpr uint64_t kWordBytes = 3;

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;

// Return the bytes of `elems` quantized numbers: of the values, and of the values and the scales.
RC_FN constexpr uint64_t values_bytes(QuantFormat format, uint64_t elems) {
  return format == QuantFormat::kInt4
             ? elems / kQuantBlock * (kQuantBlock / 2) + (elems % kQuantBlock + 1) / 2
             : elems;
}
RC_FN constexpr uint64_t quantized_bytes(QuantFormat format, uint64_t elems) {
  return values_bytes(format, elems) + (elems + kQuantBlock - 1) / kQuantBlock * kWordBytes;
}

// For |y| < 2^22, the low bits of y + kRounder are y rounded to a whole number, ties to even.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
RC_FN int32_t nearest_whole(float y) {
  return int32_t(bits_of(y + kRounder)) - int32_t(0x4b400000);
}

// Returns `below` if x < limit, else `other`, by bit operations on numbers below 2^31: the compiler
// would turn a choice between sums of floats into a branch, and then not vectorise the loop.
RC_FN uint32_t below_or(uint32_t x, uint32_t limit, uint32_t below, uint32_t other) {
  const uint32_t mask = uint32_t(int32_t(x - limit) >> 31);
  return (below & mask) | (other & ~mask);
}

// Whole numbers of 4 or 8 bits. The smallest value is used only for NaN, in a block with
// infinities.
template <QuantFormat kFormat, int kBits>
struct IntegerFormat {
  static constexpr QuantFormat format = kFormat;
  static constexpr uint32_t kMask = (1u << kBits) - 1, kNan = 1u << (kBits - 1);
  static constexpr float kMost = float(kNan - 1), kMostBeside = float(kNan - 2);
  static RC_FN uint32_t quantize(float y) { return uint32_t(nearest_whole(y)) & kMask; }
  static RC_FN float dequantize(uint32_t value) {
    return float(int32_t(value << (32 - kBits)) >> (32 - kBits));
  }
  // Returns the value for an infinity or NaN, given its bits; the next function inverts this.
  static RC_FN uint32_t quantize_special(uint32_t bits) {
    if ((bits & kMagnitude) != kInfinityBits) return kNan;
    return bits >> 31 ? kNan + 1 : kNan - 1;
  }
  static RC_FN bool dequantize_special(uint32_t value, uint32_t* bits) {
    if (value < kNan - 1 || value > kNan + 1) return false;
    *bits = value == kNan ? 0x7fc00000u : value > kNan ? 0xff800000u : kInfinityBits;
    return true;
  }
};
using Int8Format = IntegerFormat<QuantFormat::kInt8, 8>;
using Int4Format = IntegerFormat<QuantFormat::kInt4, 4>;

// float8_e4m3fn: 4 bits of exponent with a bias of 7, 3 of mantissa, subnormals, no infinities.
struct Fp8Format {
  static constexpr QuantFormat format = QuantFormat::kFp8;
  static constexpr float kMost = 256.0f, kMostBeside = 256.0f;
  static constexpr uint32_t kLeastNormal = 121u << 23;  // the bits of 2^-6
  static RC_FN uint32_t quantize(float y) {
    const uint32_t bits = bits_of(y), magnitude = bits & kMagnitude;
    // At |y|, e4m3 numbers have the spacing of FP32 numbers 2^20 times as large. So the sum of |y|
    // and this power of two rounds |y|, and the bits of the sum's mantissa count the steps.
    const uint32_t exponent = magnitude & kInfinityBits;
    const uint32_t power = exponent > kLeastNormal ? exponent : kLeastNormal;
    const uint32_t rounder = power + (20u << 23);
    const uint32_t steps = bits_of(float_of(magnitude) + float_of(rounder)) - rounder;
    return (steps + (power >> 20) - (kLeastNormal >> 20)) | (bits >> 24 & 0x80u);
  }
  static RC_FN float dequantize(uint32_t value) {
    const uint32_t magnitude = value & 0x7fu;
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t subnormal = bits_of(float_of(0x46800000u + magnitude) - 16384.0f);
    return float_of(below_or(magnitude, 8u, subnormal, normal) | (value & 0x80u) << 24);
  }
  static RC_FN uint32_t quantize_special(uint32_t bits) {
    if ((bits & kMagnitude) != kInfinityBits) return 0x7fu;
    return 0x7eu | (bits >> 24 & 0x80u);
  }
  static RC_FN bool dequantize_special(uint32_t value, uint32_t* bits) {
    if ((value & 0x7fu) < 0x7eu) return false;
    *bits = (value & 0x7fu) == 0x7fu ? 0x7fc00000u : kInfinityBits | (value & 0x80u) << 24;
    return true;
  }
};

// A block's scale, in the format of its word.
struct BlockScale {
  uint32_t word;  // 24 bits: infinities or NaNs (1), tiny (1), exponent (8), mantissa (14)

  static constexpr uint32_t kSpecial = 1u << 23, kTiny = 1u << 22, kFloat = kTiny - 1;
  static constexpr uint32_t kTinyBelow = 64u << 23;                          // the bits of 2^-63
  static constexpr float kUp = 18446744073709551616.0f, kDown = 1.0f / kUp;  // 2^64

  // Returns the scale of a block whose largest finite magnitude has the bits `most`.
  template <class Format>
  static RC_FN BlockScale of(uint32_t most, bool special) {
    constexpr float kLess = 1.0f - 1.0f / 4096;
    constexpr float usual = kLess / Format::kMost, beside = kLess / Format::kMostBeside;
    const bool tiny = most < kTinyBelow;
    const float largest = float_of(most) * (tiny ? kUp : 1.0f);
    const uint32_t bits = bits_of(largest * (special ? beside : usual));
    return {(special ? kSpecial : 0u) | (tiny ? kTiny : 0u) | bits >> 9};
  }

  RC_FN bool special() const { return (word & kSpecial) != 0; }
  RC_FN float scale() const { return float_of((word & kFloat) << 9); }
  // A number times before() and inverse() is ready to be quantized; a quantized value times scale()
  // and after() is the dequantized number.
  RC_FN float before() const { return word & kTiny ? kUp : 1.0f; }
  RC_FN float inverse() const { return word & kFloat ? 1.0f / scale() : 0.0f; }
  RC_FN float after() const { return word & kTiny ? kDown : 1.0f; }

  RC_FN void write(uint8_t* to) const {
    to[0] = uint8_t(word);
    to[1] = uint8_t(word >> 8);
    to[2] = uint8_t(word >> 16);
  }
  static RC_FN BlockScale read(const uint8_t* from) {
    return {uint32_t(from[0]) | uint32_t(from[1]) << 8 | uint32_t(from[2]) << 16};
  }

  // Returns the number that a quantized value of the block represents.
  template <class Format>
  RC_FN float dequantize(uint32_t value) const {
    uint32_t bits;
    if (special() && Format::dequantize_special(value, &bits)) return float_of(bits);
    return Format::dequantize(value) * scale() * after();
  }
  // Returns the quantized value of a number of the block.
  template <class Format>
  RC_FN uint32_t quantize(float x) const {
    const uint32_t bits = bits_of(x);
    if (special() && (bits & kMagnitude) >= kInfinityBits) return Format::quantize_special(bits);
    return Format::quantize(x * before() * inverse());
  }
};

RINGCOMM_NAMESPACE_END
