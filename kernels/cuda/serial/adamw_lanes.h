// SPDX-License-Identifier: Apache-2.0

// Updates a run (a range of elements) of a shard by the lanes of a block. 256 lanes with loads of
// 112 bytes each keep 28 KiB in flight.
#pragma once

#include "kernels/cuda/quantized_moment_lanes.h"
#include "ringcomm/optimizer/buckets.h"
#include "ringcomm/optimizer/one_moment_element.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

template <class P>
struct Narrowed {
  RC_TEAM_FN static P of(float master, const AdamWShard& s, uint64_t index, uint32_t step) {
    if (s.rounding == Rounding::kStochastic)
      return narrow_stochastic(master, random_bits(s.seed, s.bucket, index, step),
                               static_cast<P*>(nullptr));
    return Traits<P>::store(master);
  }
  // `index` is a multiple of 4, since a draw of Philox serves four elements.
  RC_TEAM_FN static void eight(const float (&master)[kTurnElems], const AdamWShard& s,
                               uint64_t index, uint32_t step, P (&param)[kTurnElems]) {
    if (s.rounding == Rounding::kStochastic) {
      RC_UNROLL
      for (int k = 0; k < kTurnElems; k += 4) {
        const Philox drawn = philox(s.seed, index / 4 + uint64_t(k / 4), step, uint32_t(s.bucket));
        RC_UNROLL
        for (int i = 0; i < 4; ++i)
          param[k + i] = narrow_stochastic(master[k + i], drawn.word[i], static_cast<P*>(nullptr));
      }
      return;
    }
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) param[k] = Traits<P>::store(master[k]);
  }
};
template <>
struct Narrowed<float> {
  RC_TEAM_FN static float of(float master, const AdamWShard&, uint64_t, uint32_t) { return master; }
  RC_TEAM_FN static void eight(const float (&master)[kTurnElems], const AdamWShard&, uint64_t,
                               uint32_t, float (&param)[kTurnElems]) {
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) param[k] = master[k];
  }
};

// A parameter's elements, updated one by one or eight at a time.
template <class G, class P>
struct Updater {
  const AdamWShard& s;
  char* const* copies;
  int copy_count;

  static constexpr bool kIsMaster = sizeof(P) == sizeof(float);

  RC_TEAM_FN P* own(uint64_t at) const { return reinterpret_cast<P*>(s.params) + s.begin + at; }
  RC_TEAM_FN P* copy(int c, uint64_t at) const {
    return reinterpret_cast<P*>(copies[c]) + s.begin + at;
  }

  // True if a parameter's update reads and writes its first or second moment.
  RC_TEAM_FN static bool has_first(const AdamWFactors& f) {
    return (f.flags & (kSgd | kMomentum)) != kSgd;
  }
  RC_TEAM_FN static bool has_second(const AdamWFactors& f) {
    return (f.flags & (kSgd | kLion)) == 0;
  }

  RC_TEAM_FN static void update_sgd(float& p, float g, float& m, const AdamWFactors& f) {
    const bool l2 = (f.flags & kAdamL2) != 0;
    if ((f.flags & kMomentum) == 0)
      l2 ? sgd_element<SgdPath<true, false, false>>(p, g, m, f)
         : sgd_element<SgdPath<false, false, false>>(p, g, m, f);
    else if ((f.flags & kNesterov) != 0)
      l2 ? sgd_element<SgdPath<true, true, true>>(p, g, m, f)
         : sgd_element<SgdPath<false, true, true>>(p, g, m, f);
    else
      l2 ? sgd_element<SgdPath<true, true, false>>(p, g, m, f)
         : sgd_element<SgdPath<false, true, false>>(p, g, m, f);
  }

  RC_TEAM_FN static void update(float& p, float g, float& m, float& v, float& v_max,
                                const AdamWFactors& f) {
    g = adamw_gradient(g, f);
    if ((f.flags & kSgd) != 0) return update_sgd(p, g, m, f);
    if ((f.flags & kLion) != 0) return lion_element(p, g, m, f);
    const bool l2 = (f.flags & kAdamL2) != 0, amsgrad = (f.flags & kAdamAmsgrad) != 0,
               from_end = !(f.one_minus_beta1 < 0.5f);
    // All lanes of a block take the same branch: they work on one parameter.
    if (from_end) {
      l2        ? amsgrad ? adamw_element<AdamWPath<true, true, true>>(p, g, m, v, v_max, f)
                          : adamw_element<AdamWPath<true, false, true>>(p, g, m, v, v_max, f)
      : amsgrad ? adamw_element<AdamWPath<false, true, true>>(p, g, m, v, v_max, f)
                : adamw_element<AdamWPath<false, false, true>>(p, g, m, v, v_max, f);
    } else {
      l2        ? amsgrad ? adamw_element<AdamWPath<true, true, false>>(p, g, m, v, v_max, f)
                          : adamw_element<AdamWPath<true, false, false>>(p, g, m, v, v_max, f)
      : amsgrad ? adamw_element<AdamWPath<false, true, false>>(p, g, m, v, v_max, f)
                : adamw_element<AdamWPath<false, false, false>>(p, g, m, v, v_max, f);
    }
  }

  // Updates one element whose 8-bit moments were converted to FP32.
  RC_TEAM_FN static void update_wide(float& p, float g, float& m, float& v, const AdamWFactors& f) {
    g = adamw_gradient(g, f);
    const bool l2 = (f.flags & kAdamL2) != 0;
    float unused = 0.0f;
    if (!(f.one_minus_beta1 < 0.5f))
      l2 ? adamw_element<AdamWPath<true, false, true>>(p, g, m, v, unused, f)
         : adamw_element<AdamWPath<false, false, true>>(p, g, m, v, unused, f);
    else
      l2 ? adamw_element<AdamWPath<true, false, false>>(p, g, m, v, unused, f)
         : adamw_element<AdamWPath<false, false, false>>(p, g, m, v, unused, f);
  }

  RC_TEAM_FN float master_of(P param, uint64_t at) const {
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) return join_master(param, s.remainder[at]);
    if constexpr (!kIsMaster)
      if (s.master != nullptr) return s.master[at];
    return Traits<P>::load(param);
  }
  RC_TEAM_FN P param_of(float master, uint64_t at, const AdamWFactors& f) const {
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) {
        BFloat16 param;
        split_master(master, param, s.remainder[at]);
        return param;
      }
    if constexpr (!kIsMaster)
      if (s.master != nullptr) s.master[at] = master;
    return Narrowed<P>::of(master, s, s.begin + at, f.step);
  }

  RC_TEAM_FN void store_one(uint64_t at, float p, const AdamWFactors& f) const {
    const P param = param_of(p, at, f);
    *own(at) = param;
    for (int c = 0; c < copy_count; ++c)
      if (copies[c] != nullptr) *copy(c, at) = param;
  }

  RC_TEAM_FN void one(uint64_t at, float g, const AdamWFactors& f) const {
    const bool amsgrad = (f.flags & kAdamAmsgrad) != 0;
    const bool first = has_first(f), second = has_second(f);
    float p = master_of(*own(at), at), m = first ? s.exp_avg[at] : 0.0f,
          v = second ? s.exp_avg_sq[at] : 0.0f, v_max = amsgrad ? s.max_exp_avg_sq[at] : 0.0f;
    update(p, g, m, v, v_max, f);
    if (first) s.exp_avg[at] = m;
    if (second) s.exp_avg_sq[at] = v;
    if (amsgrad) s.max_exp_avg_sq[at] = v_max;
    store_one(at, p, f);
  }

  // The raw data of eight FP32 masters: either the masters themselves, or the parameters and their
  // low halves. The two cases share registers.
  struct Masters {
    Vec16 v[2];
    template <class T>
    RC_TEAM_FN void load(const T* from, int at = 0) {
      Eight<T> held;
      held.load(from);
      RC_UNROLL
      for (int k = 0; k < Eight<T>::kVectors; ++k) v[at + k] = held.v[k];
    }
    template <class T>
    RC_TEAM_FN void get(T (&x)[kTurnElems], int at = 0) const {
      Eight<T> held;
      RC_UNROLL
      for (int k = 0; k < Eight<T>::kVectors; ++k) held.v[k] = v[at + k];
      held.get(x);
    }
  };
  RC_TEAM_FN bool has_wide() const {
    if constexpr (kIsMaster) return false;
    return s.master != nullptr;
  }
  RC_TEAM_FN void load_masters(uint64_t at, Masters& held) const {
    if (has_wide()) return held.load(s.master + at);
    held.load(own(at));
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) held.load(s.remainder + at, 1);
  }
  RC_TEAM_FN void masters_of(const Masters& held, float (&p)[kTurnElems]) const {
    if (has_wide()) return held.get(p);
    P param[kTurnElems];
    held.get(param);
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) {
        uint16_t rest[kTurnElems];
        held.get(rest, 1);
        RC_UNROLL
        for (int k = 0; k < kTurnElems; ++k) p[k] = join_master(param[k], rest[k]);
        return;
      }
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) p[k] = Traits<P>::load(param[k]);
  }

  RC_TEAM_FN void store_masters(uint64_t at, const float (&p)[kTurnElems], const AdamWFactors& f,
                                P (&param)[kTurnElems]) const {
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) {
        uint16_t rest[kTurnElems];
        RC_UNROLL
        for (int k = 0; k < kTurnElems; ++k) split_master(p[k], param[k], rest[k]);
        Eight<uint16_t> low;
        low.set(rest);
        return low.store(s.remainder + at);
      }
    if constexpr (!kIsMaster)
      if (s.master != nullptr) {
        Eight<float> held;
        held.set(p);
        held.store(s.master + at);
      }
    Narrowed<P>::eight(p, s, s.begin + at, f.step, param);
  }

  // The state of eight elements, in memory order.
  struct State {
    Eight<float> m, v, v_max;
    Masters masters;
  };
  template <bool may_amsgrad>
  RC_TEAM_FN void load_state(uint64_t at, const AdamWFactors& f, State& held) const {
    if (has_first(f)) held.m.load(s.exp_avg + at);
    if (has_second(f)) held.v.load(s.exp_avg_sq + at);
    if (may_amsgrad && (f.flags & kAdamAmsgrad) != 0) held.v_max.load(s.max_exp_avg_sq + at);
    load_masters(at, held.masters);
  }

  template <bool may_amsgrad>
  RC_TEAM_FN void update_state(uint64_t at, const float* g, const AdamWFactors& f,
                               State& held) const {
    const bool amsgrad = may_amsgrad && (f.flags & kAdamAmsgrad) != 0, first = has_first(f),
               second = has_second(f);
    float p[kTurnElems], m[kTurnElems] = {}, v[kTurnElems] = {}, v_max[kTurnElems] = {};
    masters_of(held.masters, p);
    if (first) held.m.get(m);
    if (second) held.v.get(v);
    if (amsgrad) held.v_max.get(v_max);
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) update(p[k], g[k], m[k], v[k], v_max[k], f);
    if (first) {
      held.m.set(m);
      held.m.store(s.exp_avg + at);
    }
    if (second) {
      held.v.set(v);
      held.v.store(s.exp_avg_sq + at);
    }
    if (amsgrad) {
      held.v_max.set(v_max);
      held.v_max.store(s.max_exp_avg_sq + at);
    }
    store_eight(at, p, f);
  }

  // Updates `unroll` times eight elements, `stride` apart; all their loads overlap. With `unroll`
  // above 1 no registers are left for AMSGrad's maxima.
  template <int unroll>
  RC_TEAM_FN void eights(uint64_t at, uint64_t stride, const GradSum<G>& grads,
                         const AdamWFactors& f) const {
    constexpr bool may_amsgrad = unroll == 1;
    State held[unroll];
    float g[unroll * kTurnElems];
    RC_UNROLL
    for (int k = 0; k < unroll; ++k) load_state<may_amsgrad>(at + uint64_t(k) * stride, f, held[k]);
    grads.template eights<unroll>(at, stride, g);
    RC_UNROLL
    for (int k = 0; k < unroll; ++k)
      update_state<may_amsgrad>(at + uint64_t(k) * stride, g + k * kTurnElems, f, held[k]);
  }

  RC_TEAM_FN void store_eight(uint64_t at, const float (&p)[kTurnElems],
                              const AdamWFactors& f) const {
    P param[kTurnElems];
    store_masters(at, p, f, param);
    Eight<P> result;
    result.set(param);
    result.store(own(at));
    for (int c = 0; c < copy_count; ++c)
      if (copies[c] != nullptr) result.store(copy(c, at));
  }
};

// ---- 8-bit moments ------------------------------------------------------------------------------

// Updates eight elements of a quantization block; returns their new moments in m and v.
template <class G, class P>
RC_TEAM_FN void update_eight(const Updater<G, P>& updater, const GradSum<G>& grads, uint64_t at,
                             const AdamWFactors& f, const MomentPair::Quantized& quantized,
                             float* m, float* v) {
  float p[kTurnElems], g[kTurnElems];
  typename Updater<G, P>::Masters held;
  updater.load_masters(at, held);
  grads.template eights<1>(at, 0, g);
  updater.masters_of(held, p);
  RC_UNROLL
  for (int k = 0; k < kTurnElems; ++k) {
    m[k] = quantized.first(k), v[k] = quantized.second(k);
    updater.update_wide(p[k], g[k], m[k], v[k], f);
  }
  updater.store_eight(at, p, f);
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
    updater.update_wide(p, grads.one(at + i), its_m, its_v, f);
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

// Updates elements with FP32 moments by AdamW, SGD or Lion, `unroll` times eight per turn.
template <class G, class P, int unroll>
RC_COLD void update_lanes(const AdamWShard& s, GradSum<G> grads, char* const* copies,
                          int copy_count, Run run, int lane, int lanes) {
  const Updater<G, P> updater{s, copies, copy_count};
  const bool aligned = grads.aligned();
  const uint64_t first = s.begin + run.begin, last = s.begin + run.end;
  for (uint64_t i = first_segment(s, first); i < s.segment_count; ++i) {
    const AdamWSegment here = s.segments[i];
    if (here.begin >= last) break;
    const AdamWFactors f = s.factors[here.param];
    if ((f.flags & kAdamActive) == 0) continue;
    const uint64_t from = (here.begin > first ? here.begin : first) - s.begin,
                   to = (here.end < last ? here.end : last) - s.begin;
    // Segments and chunks begin at whole turns; if a user's layout does not, elements go singly.
    const bool vectors = aligned && from % kTurnElems == 0;
    const uint64_t whole = vectors ? from + (to - from) / kTurnElems * kTurnElems : from;
    const uint64_t stride = uint64_t(lanes) * kTurnElems;
    uint64_t at = from + uint64_t(lane) * kTurnElems;
    if constexpr (unroll > 1)
      if ((f.flags & kAdamAmsgrad) == 0)
        for (; at + (unroll - 1) * stride < whole; at += unroll * stride)
          updater.template eights<unroll>(at, stride, grads, f);
    for (; at < whole; at += stride) updater.template eights<1>(at, 0, grads, f);
    for (at = whole + uint64_t(lane); at < to; at += uint64_t(lanes))
      updater.one(at, grads.one(at), f);
  }
}

}  // namespace device
RINGCOMM_NAMESPACE_END
