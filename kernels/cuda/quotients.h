// Quotients and roots in FP32 without branches.
//
// The instructions are those that ptxas itself makes of `/` and sqrtf() where exponents are
// moderate: an approximation, and steps after Newton and Markstein that round correctly. What it
// puts around them is left out, a check of the exponents and a call for each quotient, so that the
// quotients of several elements interleave. Whoever uses these checks the exponents, and does what
// fails the check again with `/` and square_root().
#pragma once

#include "kernels/cuda/ptx.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// 1 / b, correctly rounded but for some of the largest mantissas.
RC_TEAM_FN float reciprocal(float b) {
  const float near = near_reciprocal(b);
  return fused_multiply_add(near, fused_multiply_add(-b, near, 1.0f), near);
}

// a / b, of which `inverse` is 1 / b: 0 of a zero, with its sign. The residual is exact where
// |a| >= 2^-102, and nothing may overflow or become subnormal.
RC_TEAM_FN float quotient(float a, float b, float inverse) {
  const float near = a * inverse;
  return fused_multiply_add(fused_multiply_add(near, b, -a), -inverse, near);
}

// Of 2^-102 and more.
RC_TEAM_FN float root(float x) {
  const float inverse = near_inverse_root(x), near = x * inverse, half = inverse * 0.5f;
  return fused_multiply_add(fused_multiply_add(-near, near, x), half, near);
}

// True where x is neither zero nor, sign aside, `least` or more.
RC_TEAM_FN bool is_below(float x, float least) {
  const uint32_t bound = 2 * bits_of(least);
  return 2 * bits_of(x) - bound > 0 - bound;
}

RC_TEAM_FN bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

}  // namespace device
RINGCOMM_NAMESPACE_END
