// Moments of 8 bits (block_moments.h) by the lanes of a block.
//
// A block's elements lie eight each with as many lanes as make a block, which are side by side in a
// warp and find its exponent among them; on the host one lane has them all.
#pragma once

#include "kernels/cuda/grad_sum.h"
#include "ringcomm/optimizer/block_moments.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

#if RC_CUDA
constexpr int kMomentLanes = int(kMomentBlock) / kTurnElems, kMomentWarp = 32;
// By all lanes of a warp, each for the block that it has a part of.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t most) {
  RC_UNROLL
  for (int mask = kMomentLanes / 2; mask > 0; mask /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, most, mask);
    most = other > most ? other : most;
  }
  return most;
}
#else
constexpr int kMomentLanes = 1, kMomentWarp = 1;
inline uint32_t largest_of_block(uint32_t most) { return most; }
#endif
constexpr int kMomentElems = int(kMomentBlock) / kMomentLanes;

template <class Moment>
struct MomentLanes {
  BlockMoment moment;

  RC_TEAM_FN static float widened(uint32_t code, uint32_t exponent) {
    if (exponent == kNotFinite) return float_of(0x7fc00000u);
    const uint32_t least = least_normal<Moment>(exponent);
    return kSame<Moment, FirstMoment> ? widen_first(uint8_t(code), least)
                                      : widen_second(uint8_t(code), least);
  }

  // Of up to eight elements at a multiple of eight.
  RC_TEAM_FN void load(uint64_t at, int count, uint32_t exponent, float* wide) const {
    uint64_t codes = 0;
    if (count == kTurnElems)
      codes = *reinterpret_cast<const uint64_t*>(moment.codes + at);
    else
      for (int k = 0; k < count; ++k) codes |= uint64_t(moment.codes[at + k]) << 8 * k;
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k)
      wide[k] = widened(uint32_t(codes >> 8 * k) & 0xffu, exponent);
  }

  RC_TEAM_FN void store(uint64_t at, int count, const float* wide, uint32_t exponent,
                        const uint32_t (&words)[kTurnElems]) const {
    const uint32_t least = least_normal<Moment>(exponent);
    uint64_t codes = 0;
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) {
      const uint8_t code = kSame<Moment, FirstMoment>
                               ? narrow_first(wide[k], least, MomentDraw::of_first(words[k]))
                               : narrow_second(wide[k], least, MomentDraw::of_second(words[k]));
      codes |= uint64_t(code) << 8 * k;
    }
    if (count == kTurnElems)
      *reinterpret_cast<uint64_t*>(moment.codes + at) = codes;
    else
      for (int k = 0; k < count; ++k) moment.codes[at + k] = uint8_t(codes >> 8 * k);
  }

  // The exponent of the block of which a lane has `wide`, zeros behind the parameter's end.
  RC_TEAM_FN uint32_t new_exponent(const float (&wide)[kMomentElems]) const {
    uint32_t most = 0;
    RC_UNROLL
    for (int k = 0; k < kMomentElems; ++k) {
      const uint32_t each = bits_of(wide[k]) & 0x7fffffffu;
      most = each > most ? each : most;
    }
    return block_exponent(largest_of_block(most));
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
