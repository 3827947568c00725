// SPDX-License-Identifier: Apache-2.0

// Quotients and roots in FP32 without branches.
//
// The operations equal the fast paths of the compiler's own `/` and sqrtf(): an approximation,
// and Newton and Markstein steps that round it correctly (tests/proof/compile/test_quotient_code.py
// compares the machine code). The compiler adds a check of the exponents and a call to each
// quotient. Here the caller checks the exponents of several elements at once, so that their
// quotients interleave, and computes the elements that fail the check a second time, by `/` and
// square_root().
#pragma once

#include "kernels/cuda/ptx.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Returns 1 / b, correctly rounded except for some of the largest mantissas.
RC_TEAM_FN float reciprocal(float b) {
  const float near = near_reciprocal(b);
  return fused_multiply_add(near, fused_multiply_add(-b, near, 1.0f), near);
}

// Returns a / b, where `inverse` is reciprocal(b); a zero a gives a zero with the quotient's sign.
// The residual is exact for |a| >= 2^-102. No operand or result may overflow or become subnormal.
RC_TEAM_FN float quotient(float a, float b, float inverse) {
  const float near = a * inverse;
  return fused_multiply_add(fused_multiply_add(near, b, -a), -inverse, near);
}

// Returns the square root of x >= 2^-102.
RC_TEAM_FN float root(float x) {
  const float inverse = near_inverse_root(x), near = x * inverse, half = inverse * 0.5f;
  return fused_multiply_add(fused_multiply_add(-near, near, x), half, near);
}

// True if x is not zero and its magnitude is less than `least`.
RC_TEAM_FN bool is_below(float x, float least) {
  const uint32_t bound = 2 * bits_of(least);
  return 2 * bits_of(x) - bound > 0 - bound;
}

RC_TEAM_FN bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

}  // namespace device
RINGCOMM_NAMESPACE_END
