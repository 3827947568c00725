// The loops of quantization behind one KernelTable, written for the compiler's vectoriser: whole
// blocks at a time, which stay in registers and the first-level cache. Included once by each
// isa_*.cpp.
#pragma once

#include "kernels/host/isa_kernels.h"

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// Elements [0, n) of a source, as FP32 numbers: where they are, or in `room`.
inline const float* widened(const float* from, float*, uint64_t) { return from; }
inline const float* widened(const BFloat16* RC_RESTRICT from, float* RC_RESTRICT room, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) room[i] = widen(from[i]);
  return room;
}
inline const float* widened(const Float16* RC_RESTRICT from, float* RC_RESTRICT room, uint64_t n) {
#if RC_HAS_F16C
  widen_block(room, from, n);
#else
  for (uint64_t i = 0; i < n; ++i) room[i] = widen(from[i]);
#endif
  return room;
}

// The scale of a block of n numbers.
template <class Code>
inline BlockScale scale_of_block(const float* RC_RESTRICT x, uint64_t n) {
  uint32_t most = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & kMagnitude;
    most = magnitude > most ? magnitude : most;
  }
  if (most < kInfinityBits) return BlockScale::of<Code>(most, false);
  most = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & kMagnitude;
    if (magnitude < kInfinityBits && magnitude > most) most = magnitude;
  }
  return BlockScale::of<Code>(most, true);
}

// What encodes and decodes a block's numbers. A block without infinities and NaNs takes the loop
// without a branch.
template <class Code>
struct BlockCoder {
  BlockScale block;
  float before, inverse, scale, after;

  explicit BlockCoder(BlockScale b)
      : block(b), before(b.before()), inverse(b.inverse()), scale(b.scale()), after(b.after()) {}

  uint32_t code(float x) const { return Code::encode(x * before * inverse); }
  float number(uint32_t code) const { return Code::decode(code) * scale * after; }
};

// 8-bit codes are a byte each. Of 4-bit codes a byte has those of numbers i and i + half of its
// block.
template <class Code, class Numbers>
inline void store_codes(uint8_t* RC_RESTRICT to, uint64_t n, Numbers code) {
  if constexpr (Code::format == QuantFormat::kInt4) {
    const uint64_t half = (n + 1) / 2, whole = n - half;
    for (uint64_t i = 0; i < whole; ++i) to[i] = uint8_t(code(i) | code(i + half) << 4);
    if (whole < half) to[whole] = uint8_t(code(whole));
  } else {
    // Stored as bytes at once, codes would be computed from operands that GCC 12 narrows to bytes
    // one by one, which takes longer than the codes themselves.
    alignas(64) uint32_t wide[kQuantBlock];
    for (uint64_t i = 0; i < n; ++i) wide[i] = code(i);
    for (uint64_t i = 0; i < n; ++i) to[i] = uint8_t(wide[i]);
  }
}

// Calls take(i, code) for the codes of a block.
template <class Code, class Take>
inline void load_codes(const uint8_t* RC_RESTRICT from, uint64_t n, Take take) {
  if constexpr (Code::format == QuantFormat::kInt4) {
    const uint64_t half = (n + 1) / 2, whole = n - half;
    for (uint64_t i = 0; i < half; ++i) take(i, from[i] & 0xfu);
    for (uint64_t i = 0; i < whole; ++i) take(i + half, uint32_t(from[i]) >> 4);
  } else {
    for (uint64_t i = 0; i < n; ++i) take(i, from[i]);
  }
}

#if RC_HAS_F16C
// The numbers of e4m3 codes over 256: FP16 numbers of the same bits, whose exponents have a bias 8
// larger. The processor widens these, subnormal ones, too.
inline void widen_e4m3(float* RC_RESTRICT to, const uint8_t* RC_RESTRICT codes, uint64_t n) {
  alignas(64) Float16 halves[kQuantBlock];
  for (uint64_t i = 0; i < n; ++i)
    halves[i].bits = uint16_t((codes[i] & 0x7fu) << 7 | (codes[i] & 0x80u) << 8);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns in case n is 0
  widen_block(to, halves, n);
#pragma GCC diagnostic pop
}
#endif

// y[i] = the numbers of a block, or y[i] += them.
template <class Code, bool adds>
inline void decode_block(float* RC_RESTRICT y, const uint8_t* RC_RESTRICT from, uint64_t n,
                         BlockScale block) {
  const auto put = [&](uint64_t i, float x) { y[i] = adds ? y[i] + x : x; };
  if (block.special()) {
    load_codes<Code>(from, n, [&](uint64_t i, uint32_t code) { put(i, block.number<Code>(code)); });
    return;
  }
  const BlockCoder<Code> coder(block);
#if RC_HAS_F16C
  if constexpr (Code::format == QuantFormat::kFp8) {
    alignas(64) float numbers[kQuantBlock];
    widen_e4m3(numbers, from, n);
    const float scale = coder.scale * 256.0f;
    for (uint64_t i = 0; i < n; ++i) put(i, numbers[i] * scale * coder.after);
    return;
  }
#endif
  load_codes<Code>(from, n, [&](uint64_t i, uint32_t code) { put(i, coder.number(code)); });
}

template <class Code>
inline void encode_block(uint8_t* RC_RESTRICT to, const float* RC_RESTRICT x, uint64_t n,
                         BlockScale block) {
  if (block.special()) {
    store_codes<Code>(to, n, [&](uint64_t i) { return block.code<Code>(x[i]); });
    return;
  }
  const BlockCoder<Code> coder(block);
  store_codes<Code>(to, n, [&](uint64_t i) { return coder.code(x[i]); });
}

template <class Code, class In>
void quantize(const EncodeJob& job) {
  alignas(64) float room[kQuantBlock], sum[kQuantBlock], back[kQuantBlock];
  uint8_t* to = job.out;
  uint8_t* word = job.out + values_bytes(Code::format, job.elems);
  const auto block = [&](uint64_t begin, uint64_t n) {
    const float* x = widened(static_cast<const In*>(job.in) + begin, room, n);
    float* const residual = job.residual == nullptr ? nullptr : job.residual + begin;
    if (residual != nullptr) {
      for (uint64_t i = 0; i < n; ++i) sum[i] = x[i] + residual[i];
      x = sum;
    }
    const BlockScale scale = scale_of_block<Code>(x, n);
    encode_block<Code>(to, x, n, scale);
    if (residual != nullptr) {
      decode_block<Code, false>(back, to, n, scale);
      for (uint64_t i = 0; i < n; ++i) residual[i] = scale.special() ? 0.0f : x[i] - back[i];
    }
    scale.write(word);
    to += values_bytes(Code::format, n);
    word += kWordBytes;
  };
  const uint64_t whole = job.elems / kQuantBlock * kQuantBlock;
  for (uint64_t begin = 0; begin < whole; begin += kQuantBlock) block(begin, kQuantBlock);
  if (whole < job.elems) block(whole, job.elems - whole);
}

inline void store_block(float* to, const float* from, uint64_t n) {
  memcpy(to, from, n * sizeof(float));
}
inline void store_block(BFloat16* RC_RESTRICT to, const float* RC_RESTRICT from, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) to[i] = Traits<BFloat16>::store(from[i]);
}
inline void store_block(Float16* RC_RESTRICT to, const float* RC_RESTRICT from, uint64_t n) {
#if RC_HAS_F16C
  narrow_block(to, from, n);
#else
  for (uint64_t i = 0; i < n; ++i) to[i] = Traits<Float16>::store(from[i]);
#endif
}

template <class Code, class Out>
void dequantize_and_sum(const DecodeJob& job) {
  alignas(64) float sum[kQuantBlock];
  const uint64_t codes_bytes = values_bytes(Code::format, job.elems);
  Out* const out = static_cast<Out*>(job.out);
  const auto block = [&](uint64_t number, uint64_t n) {
    const uint64_t at = values_bytes(Code::format, number * kQuantBlock);
    for (int s = 0; s < job.count; ++s) {
      const uint8_t* const source = job.sources[s];
      const BlockScale scale = BlockScale::read(source + codes_bytes + number * kWordBytes);
      if (s == 0)
        decode_block<Code, false>(sum, source + at, n, scale);
      else
        decode_block<Code, true>(sum, source + at, n, scale);
    }
    if (job.divide_by > 0)
      for (uint64_t i = 0; i < n; ++i) sum[i] = finish<RedOp::kAvg>(sum[i], job.divide_by);
    store_block(out + number * kQuantBlock, sum, n);
  };
  const uint64_t whole = job.elems / kQuantBlock;
  for (uint64_t number = 0; number < whole; ++number) block(number, kQuantBlock);
  if (whole * kQuantBlock < job.elems) block(whole, job.elems - whole * kQuantBlock);
}

template <class Code>
constexpr QuantKernels quant_kernels() {
  return {{&quantize<Code, Float16>, &quantize<Code, BFloat16>, &quantize<Code, float>},
          {&dequantize_and_sum<Code, Float16>, &dequantize_and_sum<Code, BFloat16>,
           &dequantize_and_sum<Code, float>}};
}

}  // namespace host
RINGCOMM_NAMESPACE_END
