// SPDX-License-Identifier: Apache-2.0

// Updates a run (a range of elements) of a shard with 8-bit moments (quantized_moments.h), by the
// lanes of a block. Per element it loads and stores 2 bytes of moments in place of the 8 of FP32.
#pragma once

#include "kernels/cuda/quantized_moment_lanes.h"
#include "kernels/cuda/updater.h"
#include "ringcomm/optimizer/buckets.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Updates one element whose moments are FP32.
RC_TEAM_FN void update_wide(float& p, float g, float& m, float& v, const AdamWFactors& f) {
  float unused = 0.0f;
  update_exactly(p, adamw_gradient(g, f), m, v, unused, f);
}

// Updates eight elements of a quantization block; returns their new moments in m and v.
template <class G, class P>
RC_TEAM_FN void update_eight(const Updater<G, P>& updater, const GradSum<G>& grads, uint64_t at,
                             const AdamWFactors& f, const MomentPair::Quantized& quantized,
                             float* m, float* v) {
  float p[kTurnElems], g[kTurnElems];
  typename Updater<G, P>::template Masters<kTurnElems> held;
  updater.load_masters(at, held);
  grads.some(at, g);
  updater.masters_of(held, p);
  RC_UNROLL
  for (int k = 0; k < kTurnElems; ++k) {
    m[k] = quantized.first(k), v[k] = quantized.second(k);
    update_wide(p[k], g[k], m[k], v[k], f);
  }
  updater.store_some(at, p, f);
}

// Updates fewer than eight elements, or unaligned ones, one by one with few registers. m and v are
// indexed by constants, so that they stay in registers.
template <class G, class P>
RC_TEAM_FN void update_singly(const Updater<G, P>& updater, const GradSum<G>& grads, uint64_t at,
                              int count, const AdamWFactors& f,
                              const MomentPair::Quantized& quantized, float* m, float* v) {
  RC_ROLLED
  for (int i = 0; i < count; ++i) {
    float its_m = quantized.first(i), its_v = quantized.second(i);
    float p = updater.master_of(*updater.own(at + i), at + i);
    update_wide(p, grads.one(at + i), its_m, its_v, f);
    updater.store_one(at + i, p, f);
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k)
      if (k == i) m[k] = its_m, v[k] = its_v;
  }
}

// Updates the quantization block at block.begin, by kMomentLanes lanes. All lanes of a warp call
// it, some with an empty run.
template <class G, class P>
RC_TEAM_FN void update_block(const Updater<G, P>& updater, const GradSum<G>& grads, bool vectors,
                             const AdamWSegment& here, Run block, const AdamWFactors& f, int lane) {
  const AdamWShard& s = updater.s;
  const MomentPair moments{QuantizedMoment::of(s.exp_avg, s.elems),
                           QuantizedMoment::of(s.exp_avg_sq, s.elems)};
  float m[kMomentElems] = {}, v[kMomentElems] = {};
  const uint64_t mine = block.begin + uint64_t(lane % kMomentLanes * kMomentElems);
  const auto each_eight = [&](auto work) {
    RC_UNROLL
    for (int e = 0; e < kMomentElems; e += kTurnElems) {
      const uint64_t at = mine + uint64_t(e);
      const uint64_t left = block.end > at ? block.end - at : 0;
      if (left != 0) work(at, left < kTurnElems ? int(left) : kTurnElems, e);
    }
  };
  // The lane that writes the exponents later also reads them: a shuffle orders no memory.
  const bool leads = lane % kMomentLanes == 0 && block.begin < block.end;
  const uint64_t number = block.begin / kMomentBlock;
  const uint32_t before = largest_of_lanes<kMomentLanes>(leads ? moments.exponents(number) : 0);
  each_eight([&](uint64_t at, int count, int e) {
    const MomentPair::Quantized quantized = moments.load(at, count, before);
    if (vectors && count == kTurnElems)
      update_eight(updater, grads, at, f, quantized, m + e, v + e);
    else
      update_singly(updater, grads, at, count, f, quantized, m + e, v + e);
  });
  const uint32_t after = new_exponent(m) | new_exponent(v) << 8;
  if (leads) moments.set_exponents(number, after);
  const MomentDraw draw = MomentDraw::of(s.seed, here.param, f.step, s.begin + mine - here.begin);
  each_eight([&](uint64_t at, int count, int e) {
    moments.store(at, count, m + e, v + e, after, draw, uint32_t(e));
  });
}

// Updates elements [run.begin, run.end) of the chunk with 8-bit moments, by all lanes. Factors are
// loaded where they are used, to save registers. The kernels of fused steps have too few registers
// for this function, so they do not support 8-bit moments.
template <class G, class P>
RC_COLD void update_blocks(const AdamWShard& s, GradSum<G> grads, char* const* copies,
                           int copy_count, Run run, int lane, int lanes) {
  const Updater<G, P> updater{s, copies, copy_count};
  const bool aligned = grads.aligned();
  const uint64_t first = s.begin + run.begin, last = s.begin + run.end;
  for (uint64_t i = first_segment(s, first); i < s.segment_count; ++i) {
    const AdamWSegment& here = s.segments[i];
    if (here.begin >= last) break;
    const AdamWFactors& f = s.factors[here.param];
    if ((f.flags & kAdamActive) == 0) continue;
    const uint64_t from = (here.begin > first ? here.begin : first) - s.begin,
                   to = (here.end < last ? here.end : last) - s.begin;
    const bool vectors = aligned && from % kTurnElems == 0;
    const uint64_t warp_elems = uint64_t(kMomentWarp / kMomentLanes) * kMomentBlock;
    const uint64_t own = uint64_t(lane % kMomentWarp / kMomentLanes) * kMomentBlock;
    for (uint64_t at = from + uint64_t(lane / kMomentWarp) * warp_elems; at < to;
         at += uint64_t(lanes / kMomentWarp) * warp_elems)
      update_block(updater, grads, vectors, here, Run{at + own, to}, f, lane);
  }
}

}  // namespace device
RINGCOMM_NAMESPACE_END
