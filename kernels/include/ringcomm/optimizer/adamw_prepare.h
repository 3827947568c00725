// SPDX-License-Identifier: Apache-2.0

// The beginning of a step: advances the step numbers and computes each parameter's factors. One
// thread of the host or one block of a GPU does this once per rank; the update's kernels only read
// the factors.
#pragma once

#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN

RC_FN void set_sgd_factors(AdamWFactors& f, const AdamWHyper& h) {
  f.one_minus_dampening = float(1.0 - h.beta1);
  f.momentum = float(h.beta2);
  f.negative_step_size = float(-h.lr);
}

RC_FN void set_lion_factors(AdamWFactors& f, const AdamWHyper& h) {
  f.beta1 = float(h.beta1);
  f.one_minus_beta1 = float(1.0 - h.beta1);
  f.beta2 = float(h.beta2);
  f.one_minus_beta2 = float(1.0 - h.beta2);
  f.negative_step_size = float(-h.lr);
}

RC_FN void set_adam_factors(AdamWFactors& f, const AdamWHyper& h, double step) {
  f.one_minus_beta1 = float(1.0 - h.beta1);
  f.beta2 = float(h.beta2);
  f.one_minus_beta2 = float(1.0 - h.beta2);
  f.negative_step_size = float(-(h.lr / (1.0 - power(h.beta1, step))));
  f.bias_correction2_sqrt = float(square_root(1.0 - power(h.beta2, step)));
  f.eps = float(h.eps);
}

// Computes the factors in double precision, as torch does in Python, and rounds them to FP32 where
// torch's kernels round.
RC_FN AdamWFactors factors_of(const AdamWHyper& h, double step, double inv_scale, double clip) {
  const uint32_t flags = uint32_t(h.flags);
  AdamWFactors f{};
  f.flags = flags | kAdamActive;
  f.step = uint32_t(step);
  f.decay = float(1.0 - h.lr * h.weight_decay);
  f.weight_decay = float(h.weight_decay);
  // Without weight decay nothing is added to the gradient, not even zero times the parameter.
  if (h.weight_decay == 0.0) f.flags &= ~kAdamL2;
  if ((flags & kSgd) != 0)
    set_sgd_factors(f, h);
  else if ((flags & kLion) != 0)
    set_lion_factors(f, h);
  else
    set_adam_factors(f, h, step);
  f.grad_scale = (flags & kAdamMaximize) != 0 ? -float(inv_scale) : float(inv_scale);
  f.clip = float(clip);
  return f;
}

// Lane `lane` of `lanes` prepares its share of the parameters. advance_control() advances `control`
// afterwards, when all lanes have read it.
RC_FN void prepare_adamw(const AdamWTable& t, int lane, int lanes) {
  const bool skip = t.control->found_inf != 0.0;
  const double inv_scale = t.control->inv_scale, clip = t.control->clip;
  int64_t last_group = -1;
  double last_step = 0.0;
  AdamWFactors last{};
  for (uint64_t i = uint64_t(lane); i < t.params; i += uint64_t(lanes)) {
    if (skip || t.active[i] == 0.0) {
      t.factors[i].flags = 0;
      continue;
    }
    const double step = t.step[i] + 1.0;
    t.step[i] = step;
    // Most parameters share group and step with the previous parameter, and powers are slow.
    if (t.group[i] != last_group || step != last_step)
      last = factors_of(t.hyper[t.group[i]], step, inv_scale, clip);
    last_group = t.group[i];
    last_step = step;
    t.factors[i] = last;
  }
}

RC_FN void advance_control(AdamWControl& c) {
  if (c.found_inf != 0.0)
    c.skipped += 1.0;
  else
    c.steps += 1.0;
}

RINGCOMM_NAMESPACE_END
