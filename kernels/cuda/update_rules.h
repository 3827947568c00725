// SPDX-License-Identifier: Apache-2.0

// The update rules, chosen by the flags of a parameter's factors: AdamW and Adam, SGD, Lion. Adam's
// variants are selections, not branches: each costs an instruction, but the kernels contain the
// arithmetic once, not eight times. The bits are those of adamw_element().
#pragma once

#include "kernels/cuda/quotients.h"
#include "ringcomm/optimizer/adamw_element.h"
#include "ringcomm/optimizer/one_moment_element.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// True if a parameter's update reads and writes its first or second moment.
RC_TEAM_FN bool has_first(const AdamWFactors& f) { return (f.flags & (kSgd | kMomentum)) != kSgd; }
RC_TEAM_FN bool has_second(const AdamWFactors& f) { return (f.flags & (kSgd | kLion)) == 0; }

// Updates Adam's moments and applies weight decay to p. Returns the number whose root is taken.
RC_TEAM_FN float update_moments(float& p, float g, float& m, float& v, float& v_max,
                                const AdamWFactors& f) {
  const bool l2 = (f.flags & kAdamL2) != 0, from_end = !(f.one_minus_beta1 < 0.5f);
  if (l2) g = fused_multiply_add(f.weight_decay, p, g);
  p = l2 ? p : p * f.decay;
  const float to_go = g - m;
  m = from_end ? fused_multiply_add(-to_go, 1.0f - f.one_minus_beta1, g)
               : fused_multiply_add(f.one_minus_beta1, to_go, m);
  v = fused_multiply_add(f.one_minus_beta2 * g, g, v * f.beta2);
  if ((f.flags & kAdamAmsgrad) == 0) return v;
  // As in torch.maximum, the result is a NaN if either number is.
  v_max = (v_max > v || v_max != v_max) ? v_max : v;
  return v_max;
}

// Calls `work` with the SgdPath for the flags.
template <class Work>
RC_TEAM_FN void with_sgd_path(const AdamWFactors& f, Work work) {
  const bool l2 = (f.flags & kAdamL2) != 0;
  if ((f.flags & kMomentum) == 0)
    l2 ? work(SgdPath<true, false, false>{}) : work(SgdPath<false, false, false>{});
  else if ((f.flags & kNesterov) != 0)
    l2 ? work(SgdPath<true, true, true>{}) : work(SgdPath<false, true, true>{});
  else
    l2 ? work(SgdPath<true, true, false>{}) : work(SgdPath<false, true, false>{});
}

// Updates one element by any rule, for any values. `g`: see adamw_gradient().
RC_TEAM_FN void update_exactly(float& p, float g, float& m, float& v, float& v_max,
                               const AdamWFactors& f) {
  if ((f.flags & kSgd) != 0)
    return with_sgd_path(f, [&](auto path) { sgd_element<decltype(path)>(p, g, m, f); });
  if ((f.flags & kLion) != 0) return lion_element(p, g, m, f);
  const float square = update_moments(p, g, m, v, v_max, f);
  const float denom = square_root(square) / f.bias_correction2_sqrt + f.eps;
  p = p + f.negative_step_size * m / denom;
}

// True if the factors are in the range where StepQuotients::new_parameter() has the bits of
// update_exactly(), or sets `odd`.
RC_TEAM_FN bool takes_quotients(const AdamWFactors& f) {
  return f.bias_correction2_sqrt >= 0x1p-12f && f.bias_correction2_sqrt <= 1.0f &&
         f.eps >= 0x1p-58f && f.eps <= 0x1p20f;
}

// AdamW's step of one element with the branch-free quotients of quotients.h.
//
// The root is taken of v * 2^64, so that a subnormal v needs no special case, and of 2^-126 instead
// of zero: the result is too small to change `eps`. The divisor contains the factor 2^32 that
// undoes the scaling.
struct StepQuotients {
  float negative_step_size, eps, divisor, inverse;

  RC_TEAM_FN static StepQuotients of(const AdamWFactors& f) {
    const float divisor = f.bias_correction2_sqrt * 0x1p32f;
    return {f.negative_step_size, f.eps, divisor, reciprocal(divisor)};
  }
  // Returns `p` after the step; sets `odd` if a number is too large or too small for this method.
  RC_TEAM_FN float new_parameter(float p, float m, float v, bool& odd) const {
    const float square = fused_multiply_add(v, 0x1p64f, 0x1p-126f);
    // As integers, the bits of NaNs and negative numbers are larger, too.
    odd |= bits_of(square) > bits_of(0x1p104f);
    const float denom = quotient(root(square), divisor, inverse) + eps;  // 2^-58 to 2^33
    const float numerator = negative_step_size * m;
    odd |= is_below(numerator, 0x1p-90f);
    const float result = p + quotient(numerator, denom, reciprocal(denom));
    odd |= !is_finite(result);
    return result;
  }
};

// The factors of AdamW's step with decoupled decay, in the order in which a lane reads them.
struct alignas(8) StepFactors {
  float inverse_world, grad_scale, clip, decay;  // inverse_world: 1 / divisor of the gradients
  float one_minus_beta1, one_minus_beta2, beta2, unused;
  StepQuotients quotients;

  RC_TEAM_FN static StepFactors of(const AdamWFactors& f, float inverse_world) {
    return {inverse_world,       f.grad_scale,      f.clip,  f.decay,
            f.one_minus_beta1,   f.one_minus_beta2, f.beta2, 0.0f,
            StepQuotients::of(f)};
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
