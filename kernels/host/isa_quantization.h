// SPDX-License-Identifier: Apache-2.0

// The quantization loops of one KernelTable, written for the compiler's vectoriser: whole blocks at
// a time, which stay in registers and the first-level cache. Each isa_*.cpp includes this file
// once.
#pragma once

#include "kernels/host/isa_kernels.h"

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// Returns elements [0, n) of a source as FP32: in place, or in `room`.
inline const float* widened(const float* from, float*, uint64_t) { return from; }
inline const float* widened(const BFloat16* RC_RESTRICT from, float* RC_RESTRICT room, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) room[i] = widen(from[i]);
  return room;
}
inline const float* widened(const Float16* RC_RESTRICT from, float* RC_RESTRICT room, uint64_t n) {
#if RC_HAS_F16C
  widen_tile(room, from, n);
#else
  for (uint64_t i = 0; i < n; ++i) room[i] = widen(from[i]);
#endif
  return room;
}

// Returns the scale of a block of n numbers.
template <class Format>
inline BlockScale scale_of_block(const float* RC_RESTRICT x, uint64_t n) {
  uint32_t most = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & kMagnitude;
    most = magnitude > most ? magnitude : most;
  }
  if (most < kInfinityBits) return BlockScale::of<Format>(most, false);
  most = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & kMagnitude;
    if (magnitude < kInfinityBits && magnitude > most) most = magnitude;
  }
  return BlockScale::of<Format>(most, true);
}

// Quantizes and dequantizes a block's numbers. A block without infinities and NaNs takes the loop
// without a branch.
template <class Format>
struct BlockQuantizer {
  BlockScale block;
  float before, inverse, scale, after;

  explicit BlockQuantizer(BlockScale b)
      : block(b), before(b.before()), inverse(b.inverse()), scale(b.scale()), after(b.after()) {}

  uint32_t quantize(float x) const { return Format::quantize(x * before * inverse); }
  float dequantize(uint32_t value) const { return Format::dequantize(value) * scale * after; }
};

// Stores quantized values: 8-bit values take a byte each. A byte of 4-bit values holds numbers i
// and i + half of the block.
template <class Format, class Numbers>
inline void store_quantized(uint8_t* RC_RESTRICT to, uint64_t n, Numbers value) {
  if constexpr (Format::format == QuantFormat::kInt4) {
    const uint64_t half = (n + 1) / 2, whole = n - half;
    for (uint64_t i = 0; i < whole; ++i) to[i] = uint8_t(value(i) | value(i + half) << 4);
    if (whole < half) to[whole] = uint8_t(value(whole));
  } else {
    // If values were stored as bytes at once, GCC 12 would narrow their operands to bytes one by
    // one, which takes longer than the quantization.
    alignas(64) uint32_t wide[kQuantBlock];
    for (uint64_t i = 0; i < n; ++i) wide[i] = value(i);
    for (uint64_t i = 0; i < n; ++i) to[i] = uint8_t(wide[i]);
  }
}

// Calls take(i, value) for the quantized values of a block.
template <class Format, class Take>
inline void load_quantized(const uint8_t* RC_RESTRICT from, uint64_t n, Take take) {
  if constexpr (Format::format == QuantFormat::kInt4) {
    const uint64_t half = (n + 1) / 2, whole = n - half;
    for (uint64_t i = 0; i < half; ++i) take(i, from[i] & 0xfu);
    for (uint64_t i = 0; i < whole; ++i) take(i + half, uint32_t(from[i]) >> 4);
  } else {
    for (uint64_t i = 0; i < n; ++i) take(i, from[i]);
  }
}

#if RC_HAS_F16C
// Widens e4m3 values, and divides them by 256. The fields of an e4m3 value are those of an FP16
// number 1/256 as large, since FP16's exponent bias is 8 larger. The processor widens such FP16
// numbers, including subnormal numbers.
inline void widen_e4m3(float* RC_RESTRICT to, const uint8_t* RC_RESTRICT values, uint64_t n) {
  alignas(64) Float16 halves[kQuantBlock];
  for (uint64_t i = 0; i < n; ++i)
    halves[i].bits = uint16_t((values[i] & 0x7fu) << 7 | (values[i] & 0x80u) << 8);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns in case n is 0
  widen_tile(to, halves, n);
#pragma GCC diagnostic pop
}
#endif

// y[i] = the numbers of a block, or y[i] += the numbers of a block.
template <class Format, bool adds>
inline void dequantize_block(float* RC_RESTRICT y, const uint8_t* RC_RESTRICT from, uint64_t n,
                             BlockScale block) {
  const auto put = [&](uint64_t i, float x) { y[i] = adds ? y[i] + x : x; };
  if (block.special()) {
    load_quantized<Format>(
        from, n, [&](uint64_t i, uint32_t value) { put(i, block.dequantize<Format>(value)); });
    return;
  }
  const BlockQuantizer<Format> quantizer(block);
#if RC_HAS_F16C
  if constexpr (Format::format == QuantFormat::kFp8) {
    alignas(64) float numbers[kQuantBlock];
    widen_e4m3(numbers, from, n);
    const float scale = quantizer.scale * 256.0f;
    for (uint64_t i = 0; i < n; ++i) put(i, numbers[i] * scale * quantizer.after);
    return;
  }
#endif
  load_quantized<Format>(from, n,
                         [&](uint64_t i, uint32_t value) { put(i, quantizer.dequantize(value)); });
}

template <class Format>
inline void quantize_block(uint8_t* RC_RESTRICT to, const float* RC_RESTRICT x, uint64_t n,
                           BlockScale block) {
  if (block.special()) {
    store_quantized<Format>(to, n, [&](uint64_t i) { return block.quantize<Format>(x[i]); });
    return;
  }
  const BlockQuantizer<Format> quantizer(block);
  store_quantized<Format>(to, n, [&](uint64_t i) { return quantizer.quantize(x[i]); });
}

template <class Format, class In>
void quantize(const QuantizeJob& job) {
  alignas(64) float room[kQuantBlock], sum[kQuantBlock], back[kQuantBlock];
  uint8_t* to = job.out + values_bytes(Format::format, job.begin);
  uint8_t* word =
      job.out + values_bytes(Format::format, job.elems) + job.begin / kQuantBlock * kWordBytes;
  const auto block = [&](uint64_t begin, uint64_t n) {
    const float* x = widened(static_cast<const In*>(job.in) + begin, room, n);
    float* const error_feedback =
        job.error_feedback == nullptr ? nullptr : job.error_feedback + begin;
    if (error_feedback != nullptr) {
      for (uint64_t i = 0; i < n; ++i) sum[i] = x[i] + error_feedback[i];
      x = sum;
    }
    const BlockScale scale = scale_of_block<Format>(x, n);
    quantize_block<Format>(to, x, n, scale);
    if (error_feedback != nullptr) {
      dequantize_block<Format, false>(back, to, n, scale);
      for (uint64_t i = 0; i < n; ++i) error_feedback[i] = scale.special() ? 0.0f : x[i] - back[i];
    }
    scale.write(word);
    to += values_bytes(Format::format, n);
    word += kWordBytes;
  };
  const uint64_t whole = job.end / kQuantBlock * kQuantBlock;
  for (uint64_t begin = job.begin; begin < whole; begin += kQuantBlock) block(begin, kQuantBlock);
  if (whole < job.end) block(whole, job.end - whole);
}

inline void store_tile(float* to, const float* from, uint64_t n) {
  memcpy(to, from, n * sizeof(float));
}
inline void store_tile(BFloat16* RC_RESTRICT to, const float* RC_RESTRICT from, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) to[i] = Traits<BFloat16>::store(from[i]);
}
inline void store_tile(Float16* RC_RESTRICT to, const float* RC_RESTRICT from, uint64_t n) {
#if RC_HAS_F16C
  narrow_tile(to, from, n);
#else
  for (uint64_t i = 0; i < n; ++i) to[i] = Traits<Float16>::store(from[i]);
#endif
}

template <class Format, class Out>
void dequantize_and_sum(const DequantizeJob& job) {
  alignas(64) float sum[kQuantBlock];
  const uint64_t scales_at = values_bytes(Format::format, job.elems);
  Out* const out = static_cast<Out*>(job.out);
  const auto block = [&](uint64_t number, uint64_t n) {
    const uint64_t at = values_bytes(Format::format, number * kQuantBlock);
    for (int s = 0; s < job.count; ++s) {
      const uint8_t* const source = job.sources[s];
      const BlockScale scale = BlockScale::read(source + scales_at + number * kWordBytes);
      if (s == 0)
        dequantize_block<Format, false>(sum, source + at, n, scale);
      else
        dequantize_block<Format, true>(sum, source + at, n, scale);
    }
    if (job.divide_by > 0)
      for (uint64_t i = 0; i < n; ++i) sum[i] = finish<RedOp::kAvg>(sum[i], job.divide_by);
    store_tile(out + number * kQuantBlock, sum, n);
  };
  const uint64_t whole = job.end / kQuantBlock;
  for (uint64_t number = job.begin / kQuantBlock; number < whole; ++number)
    block(number, kQuantBlock);
  if (whole * kQuantBlock < job.end) block(whole, job.end - whole * kQuantBlock);
}

template <class Format>
constexpr QuantKernels quant_kernels() {
  return {{&quantize<Format, Float16>, &quantize<Format, BFloat16>, &quantize<Format, float>},
          {&dequantize_and_sum<Format, Float16>, &dequantize_and_sum<Format, BFloat16>,
           &dequantize_and_sum<Format, float>}};
}

}  // namespace host
RINGCOMM_NAMESPACE_END
