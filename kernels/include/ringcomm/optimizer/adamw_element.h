// SPDX-License-Identifier: Apache-2.0

// The update of one element, and how its result is stored.
//
// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019) and Adam
// (Kingma and Ba, ICLR 2015; amsgrad: Reddi, Kale and Kumar, ICLR 2018), operation by operation as
// torch.optim.AdamW(foreach=False, fused=False) does them in FP32 on a CPU with AVX2 or more: a
// fused multiply-add where torch's compiler makes one (lerp, addcmul, add with alpha) and nowhere
// else, and a correctly rounded square root, unlike torch's. So every instruction set and the GPU
// give the same bits, the moments are torch's own, and the parameter differs from torch's only by
// the effect of the square root; docs/optimizer.md derives a bound.
#pragma once

#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN

// The branches of the update; all elements of a parameter take the same branches.
template <bool decay_into_grad, bool amsgrad, bool from_end>
struct AdamWPath {
  static constexpr bool kL2 = decay_into_grad, kMax = amsgrad;
  // torch's lerp starts from the nearer end: from the gradient if beta1 <= 0.5.
  static constexpr bool kFromEnd = from_end;
};

// Returns the gradient in the form that the update uses: unscaled, clipped, negated to maximize.
RC_FN float adamw_gradient(float grad, const AdamWFactors& f) {
  return grad * f.grad_scale * f.clip;
}

// Updates one element; reads and writes `v_max` only with amsgrad.
template <class Path>
RC_FN void adamw_element(float& p, float g, float& m, float& v, float& v_max,
                         const AdamWFactors& f) {
  if constexpr (Path::kL2)
    g = fused_multiply_add(f.weight_decay, p, g);
  else
    p = p * f.decay;
  const float to_go = g - m;
  if constexpr (Path::kFromEnd)
    m = fused_multiply_add(-to_go, 1.0f - f.one_minus_beta1, g);
  else
    m = fused_multiply_add(f.one_minus_beta1, to_go, m);
  v = fused_multiply_add(f.one_minus_beta2 * g, g, v * f.beta2);
  float root = v;
  if constexpr (Path::kMax) {
    // As in torch.maximum, the result is a NaN if either operand is.
    v_max = (v_max > v || v_max != v_max) ? v_max : v;
    root = v_max;
  }
  const float denom = square_root(root) / f.bias_correction2_sqrt + f.eps;
  p = p + f.negative_step_size * m / denom;
}

// ---- the master copy as a bfloat16 parameter and the 16 bits below it --------------------------
// As in Apex's store_param_remainders, the parameter is the master rounded to nearest, ties away
// from zero, and the remainder is the master's low 16 bits. If ties were rounded to even, one more
// bit would be needed to restore the master.

RC_FN void split_master(float master, BFloat16& param, uint16_t& remainder) {
  const uint32_t u = master != master ? 0x7fc00000u : bits_of(master);
  param.bits = uint16_t((u + 0x8000u) >> 16);
  remainder = uint16_t(u);
}

RC_FN float join_master(BFloat16 param, uint16_t remainder) {
  const uint32_t rounded_up = remainder >> 15;
  return float_of(((uint32_t(param.bits) - rounded_up) << 16) | remainder);
}

// ---- stochastic rounding ----------------------------------------------------------------------
// Rounds up with a probability equal to the part that is cut off, so that the expectation is the
// value itself and steps smaller than half an ulp are not lost. 16 random bits per element
// (float16: 13, more for subnormal numbers).

// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11).
struct Philox {
  uint32_t word[4];
};

RC_FN Philox philox(uint64_t seed, uint64_t counter, uint32_t step, uint32_t stream) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = step, c3 = stream;
  RC_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xd2511f53u) * c0, b = uint64_t(0xcd9e8d57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c3 = uint32_t(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// Returns the random bits of element `index` of bucket `bucket` at the parameter's step. They do
// not depend on how the bucket is cut into chunks.
RC_FN uint32_t random_bits(uint64_t seed, uint64_t bucket, uint64_t index, uint32_t step) {
  const Philox drawn = philox(seed, index / 4, step, uint32_t(bucket));
  // Conditions select the word: a GPU cannot index registers, and would put an array that is
  // indexed by a variable in local memory.
  const uint32_t low = (index & 1) != 0 ? drawn.word[1] : drawn.word[0],
                 high = (index & 1) != 0 ? drawn.word[3] : drawn.word[2];
  return (index & 2) != 0 ? high : low;
}

RC_FN BFloat16 narrow_stochastic(float x, uint32_t random, BFloat16*) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7f800000u) == 0x7f800000u) return narrow_bfloat16(x);  // infinite, or not a number
  return {uint16_t((u + (random & 0xffffu)) >> 16)};
}

RC_FN Float16 narrow_stochastic(float x, uint32_t random, Float16*) {
  const uint32_t u = bits_of(x), a = u & 0x7fffffffu;
  if (a >= 0x477fe000u) return narrow_float16(x);  // 65504 and above
  if (a >= 0x38800000u) {                          // normal: 13 bits are cut off
    const uint32_t up = a + (random & 0x1fffu);
    return {uint16_t(((u >> 16) & 0x8000u) | ((up - 0x38000000u) >> 13))};
  }
  // Subnormal: whole multiples of 2^-24, and a fraction to compare with 24 random bits.
  const float scaled = float_of(a) * 16777216.0f;
  const uint32_t whole = uint32_t(scaled);
  const float fraction = scaled - float(whole), threshold = float(random >> 8) * 0x1p-24f;
  return {uint16_t(((u >> 16) & 0x8000u) | (whole + (threshold < fraction ? 1u : 0u)))};
}

RINGCOMM_NAMESPACE_END
