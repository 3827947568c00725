// SPDX-License-Identifier: Apache-2.0

// An optimizer's shard in a race test, and the reference: a step by one thread.
#pragma once

#include <vector>

#include "kernels/host/kernel_table.h"
#include "ringcomm/optimizer/adamw_prepare.h"
#include "tests/proof/races/race_world.h"

namespace {

constexpr uint64_t kElems = 5 * kTileElems + 77;  // the last rank's chunk is short or empty
constexpr uint64_t kTensorBytes = Layout{}.whole_pages(kElems * sizeof(float));
constexpr AdamWSegment kSegments[] = {{0, 700, 0}, {704, 1500, 1}, {1536, kElems, 2}};
constexpr int kParams = 3;
constexpr double kActive[kParams] = {1, 0, 1};
constexpr int64_t kGroups[kParams] = {0, 0, 1};
constexpr AdamWHyper kHyper[] = {{1e-2, 0.9, 0.999, 1e-8, 1e-2, 0},
                                 {1e-3, 0.8, 0.99, 1e-8, 0, double(kAdamAmsgrad)}};

float first_param(uint64_t i) { return float(i % 13) - 6; }

// One rank's optimizer. All lanes share the factors, which one lane prepares.
struct Optimizer {
  std::vector<float> exp_avg, exp_avg_sq, max_exp_avg_sq, shard_grad;
  AdamWControl control{1, 1, 0, 0, 0};
  double step[kParams] = {};
  AdamWFactors factors[kParams] = {};
  AdamWShard shard{};

  void begin() {
    prepare_adamw(AdamWTable{&control, kHyper, kGroups, kActive, step, factors, kParams}, 0, 1);
    advance_control(control);
  }
  void own(Run chunk, float* params) {
    const uint64_t n = chunk.end - chunk.begin;
    for (auto* v : {&exp_avg, &exp_avg_sq, &max_exp_avg_sq, &shard_grad}) v->assign(n + 1, 0.0f);
    shard = AdamWShard{kSegments,
                       factors,
                       std::size(kSegments),
                       kElems,
                       chunk.begin,
                       n,
                       nullptr,
                       nullptr,
                       exp_avg.data(),
                       exp_avg_sq.data(),
                       max_exp_avg_sq.data(),
                       reinterpret_cast<char*>(params),
                       DType::kFloat32,
                       Rounding::kNearest,
                       0,
                       0};
  }
};

// The reference: one thread takes the step over the whole bucket, with exact sums of integers.
struct Reference {
  std::vector<float> params = std::vector<float>(kElems), grads = std::vector<float>(kElems);
  Optimizer o;

  Reference() {
    for (uint64_t i = 0; i < kElems; ++i) params[i] = first_param(i);
    o.own(Run{0, kElems}, params.data());
  }
  void step(int world, int round) {
    for (uint64_t i = 0; i < kElems; ++i) grads[i] = sum_at(world, i, round);
    o.begin();
    const void* source = grads.data();
    kBaselineKernels.adamw(
        AdamWJob{&o.shard, {&source, 1, DType::kFloat32, 0, 0}, nullptr, 0, 0, kElems, false});
  }
};

}  // namespace
