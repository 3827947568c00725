// SPDX-License-Identifier: Apache-2.0

// The updates that need one moment or none: SGD with momentum, and Lion.
//
// SGD (Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
// 2013, in the form of torch.optim.SGD) operation by operation as torch.optim.SGD(foreach=False,
// fused=False) does it in FP32 on a CPU with AVX2 or more, with a fused multiply-add where torch
// adds with alpha: the same bits. Lion (Chen et al., "Symbolic Discovery of Optimization
// Algorithms", NeurIPS 2023, algorithm 2) has the same bits as this loop over torch's operations:
// p.mul_(1 - lr * weight_decay); c = m.mul(beta1).add_(g, alpha=1 - beta1).sign_();
// p.add_(c, alpha=-lr); m.mul_(beta2).add_(g, alpha=1 - beta2).
#pragma once

#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN

// The branches of the update; all elements of a parameter take the same branches.
template <bool decay_into_grad, bool momentum, bool nesterov>
struct SgdPath {
  static constexpr bool kL2 = decay_into_grad, kHasMoment = momentum, kLooksAhead = nesterov;
};

template <class Path>
RC_FN void sgd_element(float& p, float g, float& m, const AdamWFactors& f) {
  if constexpr (Path::kL2) g = fused_multiply_add(f.weight_decay, p, g);
  if constexpr (Path::kHasMoment) {
    // The first gradient is not dampened: torch begins with a copy of it.
    m = f.step == 1 ? g : fused_multiply_add(f.one_minus_dampening, g, m * f.momentum);
    g = Path::kLooksAhead ? fused_multiply_add(f.momentum, m, g) : m;
  }
  p = fused_multiply_add(f.negative_step_size, g, p);
}

RC_FN void lion_element(float& p, float g, float& m, const AdamWFactors& f) {
  p = p * f.decay;
  const float c = fused_multiply_add(f.one_minus_beta1, g, m * f.beta1);
  // The sign of a NaN is 0, as in torch.
  const float sign = float(int(c > 0.0f) - int(c < 0.0f));
  p = fused_multiply_add(f.negative_step_size, sign, p);
  m = fused_multiply_add(f.one_minus_beta2, g, m * f.beta2);
}

RINGCOMM_NAMESPACE_END
