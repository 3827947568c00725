// SPDX-License-Identifier: Apache-2.0

// 8-bit moments (quantized_moments.h) by the lanes of a block.
//
// kMomentLanes adjacent lanes of a warp share a quantization block, eight elements each, and find
// the block's exponent by shuffles. On the host one lane has all elements.
#pragma once

#if RINGCOMM_SERIAL_LOOPS
#include "kernels/cuda/serial/grad_sum.h"
#else
#include "kernels/cuda/grad_sum.h"
#endif
#include "ringcomm/optimizer/quantized_moments.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

#if RC_CUDA
constexpr int kMomentLanes = int(kMomentBlock) / kTurnElems, kMomentWarp = 32;
#else
constexpr int kMomentLanes = 1, kMomentWarp = 1;
#endif
constexpr int kMomentElems = int(kMomentBlock) / kMomentLanes;

template <class Moment>
RC_TEAM_FN float widened(uint32_t value, uint32_t exponent) {
  if (exponent == kNotFinite) return float_of(0x7fc00000u);
  const uint32_t least = least_normal<Moment>(exponent);
  return kSame<Moment, FirstMoment> ? dequantize_first(uint8_t(value), least)
                                    : dequantize_second(uint8_t(value), least);
}

// Returns the exponent of a block. `wide`: this lane's elements, zero after the parameter's end.
RC_TEAM_FN uint32_t new_exponent(const float (&wide)[kMomentElems]) {
  uint32_t most = 0;
  RC_UNROLL
  for (int k = 0; k < kMomentElems; ++k) {
    const uint32_t each = bits_of(wide[k]) & 0x7fffffffu;
    most = each > most ? each : most;
  }
  return block_exponent(largest_of_lanes<kMomentLanes>(most));
}

// Both moments of a chunk. A block's two exponents are one word; the second moment's is in bits 8
// to 15.
struct MomentPair {
  QuantizedMoment first, second;

  RC_TEAM_FN uint32_t exponents(uint64_t block) const {
    return first.exponents[block] | uint32_t(second.exponents[block]) << 8;
  }
  RC_TEAM_FN void set_exponents(uint64_t block, uint32_t exponents) const {
    first.exponents[block] = uint8_t(exponents);
    second.exponents[block] = uint8_t(exponents >> 8);
  }

  RC_TEAM_FN static uint64_t quantized_at(const uint8_t* values, uint64_t at, int count) {
    if (count == kTurnElems) return *reinterpret_cast<const uint64_t*>(values + at);
    uint64_t found = 0;
    for (int k = 0; k < count; ++k) found |= uint64_t(values[at + k]) << 8 * k;
    return found;
  }
  RC_TEAM_FN static void put_quantized(uint8_t* values, uint64_t at, int count, uint64_t all) {
    if (count == kTurnElems)
      *reinterpret_cast<uint64_t*>(values + at) = all;
    else
      for (int k = 0; k < count; ++k) values[at + k] = uint8_t(all >> 8 * k);
  }

  // The quantized moments of up to eight elements, the first at a multiple of 8. first(k) and
  // second(k) return the moments of element k as FP32.
  struct Quantized {
    uint64_t m, v;
    uint32_t exponents;

    RC_TEAM_FN float first(int k) const {
      return widened<FirstMoment>(uint32_t(m >> 8 * k) & 0xffu, exponents & 0xffu);
    }
    RC_TEAM_FN float second(int k) const {
      return widened<SecondMoment>(uint32_t(v >> 8 * k) & 0xffu, exponents >> 8);
    }
  };
  RC_TEAM_FN Quantized load(uint64_t at, int count, uint32_t exponents) const {
    return {quantized_at(first.values, at, count), quantized_at(second.values, at, count),
            exponents};
  }

  // Stores moments, rounded at random: word i + k of the draw serves both moments of element k.
  RC_TEAM_FN void store(uint64_t at, int count, const float* m, const float* v, uint32_t exponents,
                        const MomentDraw& draw, uint32_t i) const {
    const uint32_t m_least = least_normal<FirstMoment>(exponents & 0xffu),
                   v_least = least_normal<SecondMoment>(exponents >> 8);
    uint64_t m_quantized = 0, v_quantized = 0;
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) {
      const uint32_t word = draw.word(i + uint32_t(k));
      m_quantized |= uint64_t(quantize_first(m[k], m_least, MomentDraw::of_first(word))) << 8 * k;
      v_quantized |= uint64_t(quantize_second(v[k], v_least, MomentDraw::of_second(word))) << 8 * k;
    }
    put_quantized(first.values, at, count, m_quantized);
    put_quantized(second.values, at, count, v_quantized);
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
