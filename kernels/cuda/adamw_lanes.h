// SPDX-License-Identifier: Apache-2.0

// Updates a run (a range of elements) of a shard by the lanes of a block. A *segment* belongs to
// one parameter; a *turn* is 8 elements (4 in AnyTurns) that one lane updates together. The block
// looks up the rule of the parameter and the number of gradient sources once per segment. The
// common cases have loops of their own without branches: a turn first loads all its inputs. If a
// quotient is out of range, the turn is *refused*: it stores nothing, and exact instructions update
// its elements after the loop.
#pragma once

#include "kernels/cuda/quantized_update_lanes.h"
#include "kernels/cuda/workspace.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// The turns of one lane that begin before `end`, `stride` elements apart.
struct LaneTurns {
  static constexpr uint64_t kAtOnce = 31;

  uint64_t at, end;

  // Makes up to kAtOnce turns. Returns one bit per turn, 1 if `turn` refused it, the last turn in
  // the lowest bit; a leading 1 above them marks the number of turns.
  template <class Turn>
  RC_TEAM_FN uint32_t make(uint64_t stride, Turn turn) {
    uint32_t refused = 1;
    RC_ROLLED
    for (; at < end && (refused >> kAtOnce) == 0; at += stride)
      refused = refused + refused + uint32_t(!turn(at));
    return refused;
  }
};

// The kernel that makes an update. It limits the number of gradient sources, and the number of
// copies of the results at other ranks.
enum class UpdateKind {
  kAlone,  // one source, no copies
  kRing,   // one or two sources, no copies
  kPair,   // two sources and one copy; or one source and any number of copies
  kMany,   // more sources, and a copy for each peer
};

// True if `kind` has a loop for gradients from `sources` sources.
RC_TEAM_FN constexpr bool has_loop(UpdateKind kind, int sources) {
  if (kind == UpdateKind::kMany) return sources == 4 || sources == 8;
  return sources == 1 || (sources == 2 && kind != UpdateKind::kAlone);
}

// The turns of AdamW with decoupled decay and FP32 masters, the most common case.
template <class G, class P, UpdateKind kind>
struct CommonTurns {
  const Workspace& w;

  RC_TEAM_FN static bool take(const AdamWShard& s, const UpdateArgs& u, const AdamWFactors& f) {
    const bool rounds =
        Updater<G, P>::kIsMaster || (s.master != nullptr && s.rounding == Rounding::kNearest);
    return rounds && (f.flags & ~(kAdamActive | kAdamMaximize)) == 0 && f.one_minus_beta1 < 0.5f &&
           is_power_of_two(u.divide_by) && takes_quotients(f);
  }

  // Returns false if the turn is refused; nothing was stored then.
  template <int sources>
  RC_TEAM_FN bool turn(uint64_t at) const {
    const Updater<G, P> updater{w.shard, w.results, w.update.copy_count};
    // `grads` uses w.sources: the compiler then sees that the pointers are in shared memory.
    const GradSum<G> grads{w.sources, sources, 0, w.update.begin};
    float *const to_m = w.shard.exp_avg + at, *const to_v = w.shard.exp_avg_sq + at,
                 *const to_p = updater.wide_masters(at);
    const LoadedGrads<G, sources> loaded = grads.template load<sources>(at);
    Eight<float> held_m, held_v, held_p;
    held_m.load(to_m);
    held_v.load(to_v);
    held_p.load(to_p);
    Gate gate;
    gate.await(held_m);
    gate.await(held_v);
    gate.await(held_p);
    float g[kTurnElems], m[kTurnElems], v[kTurnElems], p[kTurnElems];
    loaded.sum(g, gate.zero(to_m));
    held_m.get(m);
    held_v.get(v);
    held_p.get(p);
    const StepFactors f = w.step.factors;
    bool odd = false;
    RC_UNROLL
    for (int k = 0; k < kTurnElems; ++k) {
      const float each = g[k] * f.inverse_world * f.grad_scale * f.clip;
      m[k] = fused_multiply_add(f.one_minus_beta1, each - m[k], m[k]);
      v[k] = fused_multiply_add(f.one_minus_beta2 * each, each, v[k] * f.beta2);
      p[k] = f.quotients.new_parameter(p[k] * f.decay, m[k], v[k], odd);
    }
    // With many sources, recompute the addresses: no registers are left to keep them.
    constexpr bool again = sources > 4;
    held_m.set(m);
    held_m.store_if(!odd, again ? w.shard.exp_avg + at : to_m);
    held_v.set(v);
    held_v.store_if(!odd, again ? w.shard.exp_avg_sq + at : to_v);
    float* const masters = again ? updater.wide_masters(at) : to_p;
    if constexpr (kind == UpdateKind::kAlone || kind == UpdateKind::kRing)
      updater.template store_finite_if<0>(!odd, at, masters, p);
    else
      updater.template store_finite_if<sources == 1 ? -1 : sources - 1>(!odd, at, masters, p);
    return !odd;
  }
};

// The turns of any rule and any number of sources. They have fewer elements, since the kernels have
// no registers for more.
template <class G, class P>
struct AnyTurns {
  static constexpr int kElems = 4;

  const Updater<G, P>& updater;
  const GradSum<G>& grads;
  const AdamWFactors& f;

  // Returns false if the turn is refused; nothing was stored then.
  RC_TEAM_FN bool turn(uint64_t at) const {
    const AdamWShard& s = updater.s;
    const bool first = has_first(f), second = has_second(f),
               largest = (f.flags & kAdamAmsgrad) != 0;
    Pack<float, kElems> held;
    typename Updater<G, P>::template Masters<kElems> masters;
    float g[kElems], p[kElems], m[kElems] = {}, v[kElems] = {}, v_max[kElems] = {};
    const auto load = [&](const float* from, float (&x)[kElems]) {
      held.load(from);
      held.get(x);
    };
    if (first) load(s.exp_avg + at, m);
    if (second) load(s.exp_avg_sq + at, v);
    if (largest) load(s.max_exp_avg_sq + at, v_max);
    updater.load_masters(at, masters);
    grads.some(at, g);
    updater.masters_of(masters, p);
    if (!update(g, p, m, v, v_max)) return false;
    const auto store = [&](const float (&x)[kElems], float* to) {
      held.set(x);
      held.store(to);
    };
    if (first) store(m, s.exp_avg + at);
    if (second) store(v, s.exp_avg_sq + at);
    if (largest) store(v_max, s.max_exp_avg_sq + at);
    updater.store_some(at, p, f);
    return true;
  }

  RC_TEAM_FN bool update(const float (&grad)[kElems], float (&p)[kElems], float (&m)[kElems],
                         float (&v)[kElems], float (&v_max)[kElems]) const {
    float g[kElems];
    RC_UNROLL
    for (int k = 0; k < kElems; ++k) g[k] = adamw_gradient(grad[k], f);
    if ((f.flags & kSgd) != 0) {
      with_sgd_path(f, [&](auto path) {
        RC_UNROLL
        for (int k = 0; k < kElems; ++k) sgd_element<decltype(path)>(p[k], g[k], m[k], f);
      });
      return true;
    }
    if ((f.flags & kLion) != 0) {
      RC_UNROLL
      for (int k = 0; k < kElems; ++k) lion_element(p[k], g[k], m[k], f);
      return true;
    }
    const StepQuotients quotients = StepQuotients::of(f);
    bool odd = !takes_quotients(f);
    RC_UNROLL
    for (int k = 0; k < kElems; ++k) {
      const float square = update_moments(p[k], g[k], m[k], v[k], v_max[k], f);
      p[k] = quotients.new_parameter(p[k], m[k], square, odd);
    }
    return !odd;
  }
};

// ---- a segment ----------------------------------------------------------------------------------

template <class G>
RC_TEAM_FN GradSum<G> grads_of(const UpdateArgs& u) {
  return {u.sources, u.source_count, u.divide_by, u.begin};
}

// The intersection of the current segment with the run of w.update. [begin, whole) are whole turns;
// elements [whole, end) are updated singly. Segments and chunks begin at whole turns; if a user's
// layout does not, all elements are updated singly.
struct SegmentPart {
  uint64_t begin, whole, end;

  template <class G>
  RC_TEAM_FN static SegmentPart of(const Workspace& w) {
    const AdamWSegment& here = w.shard.segments[w.step.segment];
    const uint64_t first = w.shard.begin + w.update.begin, last = w.shard.begin + w.update.end;
    const uint64_t begin = (here.begin > first ? here.begin : first) - w.shard.begin,
                   end = (here.end < last ? here.end : last) - w.shard.begin;
    const bool vectors = grads_of<G>(w.update).aligned() && begin % kTurnElems == 0;
    return {begin, vectors ? begin + (end - begin) / kTurnElems * kTurnElems : begin, end};
  }
};

RC_TEAM_FN const AdamWFactors& factors_of(const Workspace& w) {
  return w.shard.factors[w.shard.segments[w.step.segment].param];
}

// True if a loop of CommonTurns can update the segment.
template <class G, class P, UpdateKind kind>
RC_TEAM_FN bool is_common(const Workspace& w, const AdamWFactors& f) {
  return has_loop(kind, w.update.source_count) &&
         CommonTurns<G, P, kind>::take(w.shard, w.update, f);
}

// ---- elements outside the common loops ----------------------------------------------------------

// Updates elements `at`, at + step, ... before `end`, one by one.
template <class G, class P>
RC_TEAM_FN void update_singly(const Updater<G, P>& updater, const GradSum<G>& grads,
                              const AdamWFactors& f, uint64_t at, uint64_t end, uint64_t step) {
  RC_ROLLED
  for (; at < end; at += step) updater.one(at, grads.one(at), f);
}

// Updates a lane's turns of a segment by AnyTurns.
template <class G, class P, UpdateKind kind, class Team>
RC_TEAM_FN void update_by_any(const Team& team, const Workspace& w) {
  const AdamWFactors& f = factors_of(w);
  const SegmentPart part = SegmentPart::of<G>(w);
  const Updater<G, P> updater{w.shard, w.results, w.update.copy_count};
  const GradSum<G> grads = grads_of<G>(w.update);
  const AnyTurns<G, P> any{updater, grads, f};
  constexpr uint64_t kElems = AnyTurns<G, P>::kElems;
  const uint64_t stride = uint64_t(team.num_lanes()) * kElems;
  uint64_t at = part.begin + uint64_t(team.lane()) * kElems;
  RC_ROLLED
  while (at < part.whole) {
    bool done = true;
    RC_ROLLED
    for (; done && at < part.whole; at += stride) done = any.turn(at);
    if (!done) update_singly(updater, grads, f, at - stride, at - stride + kElems, 1);
  }
}

// Updates the elements that the common loops left: the turns refused by this lane (`refused`, see
// LaneTurns::make), the last partial turn of a segment, and segments of other rules.
template <class G, class P, UpdateKind kind, class Team>
RC_TEAM_FN void end_turns(const Team& team, Workspace& w, uint32_t refused) {
  const int lane = team.lane(), lanes = team.num_lanes();
  const Updater<G, P> updater{w.shard, w.results, w.update.copy_count};
  const GradSum<G> grads = grads_of<G>(w.update);
  const AdamWFactors& f = factors_of(w);
  const SegmentPart part = SegmentPart::of<G>(w);
  const bool active = (f.flags & kAdamActive) != 0, common = is_common<G, P, kind>(w, f);
  const uint64_t stride = uint64_t(lanes) * kTurnElems;
  const uint64_t begin = part.begin + w.step.turns * stride;
  const bool last = !common || begin + LaneTurns::kAtOnce * stride >= part.whole;
  if (active && !common) {
    update_by_any<G, P, kind>(team, w);
    refused = 1;  // begin_turns() returned 1, too; set again, so that no register keeps it
  }
  uint64_t at = begin + uint64_t(lane) * kTurnElems + uint64_t(log2_of(refused)) * stride;
  bool tail = active && last;
  // One call site for both cases: the inlined code is long.
  RC_ROLLED
  while (refused > 1 || tail) {
    uint64_t from = part.whole + uint64_t(lane), to = part.end, each = uint64_t(lanes);
    if (refused > 1) {
      at -= stride;
      from = at, to = (refused & 1) != 0 ? at + kTurnElems : at, each = 1;
      refused >>= 1;
    } else {
      tail = false;
    }
    update_singly(updater, grads, f, from, to, each);
  }
  team.sync();
  if (lane == 0) {
    w.step.turns = last ? 0 : w.step.turns + LaneTurns::kAtOnce;
    if (last) ++w.step.segment;
  }
  team.sync();
}

// ---- the loops ----------------------------------------------------------------------------------

// Runs a lane's next turns by the loop for `sources` sources; see LaneTurns::make.
template <class G, class P, UpdateKind kind, int sources, class Team>
RC_TEAM_FN uint32_t common_turns(const Team& team, const Workspace& w) {
  const SegmentPart part = SegmentPart::of<G>(w);
  const uint64_t stride = uint64_t(team.num_lanes()) * kTurnElems;
  const uint64_t first = part.begin + uint64_t(team.lane()) * kTurnElems;
  LaneTurns turns{first + w.step.turns * stride, part.whole};
  const CommonTurns<G, P, kind> common{w};
  return turns.make(stride, [&](uint64_t at) { return common.template turn<sources>(at); });
}

template <class G, class P, UpdateKind kind, class Team>
RC_TEAM_FN uint32_t begin_turns(const Team& team, Workspace& w) {
  const AdamWFactors& f = factors_of(w);
  if ((f.flags & kAdamActive) == 0 || !is_common<G, P, kind>(w, f)) return 1;
  if (team.lane() == 0) w.step.factors = StepFactors::of(f, grads_of<G>(w.update).inverse());
  team.sync();
  const int sources = w.update.source_count;
  if constexpr (kind == UpdateKind::kMany) {
    if (sources == 4) return common_turns<G, P, kind, 4>(team, w);
    return common_turns<G, P, kind, 8>(team, w);
  } else {
    if constexpr (has_loop(kind, 2))
      if (sources == 2) return common_turns<G, P, kind, 2>(team, w);
    return common_turns<G, P, kind, 1>(team, w);
  }
}

// Updates the run of w.update, with FP32 moments. All lanes work on the same segment.
template <class G, class P, UpdateKind kind, class Team>
RC_TEAM_FN void update_lanes(const Team& team, Workspace& w) {
  const AdamWShard& s = w.shard;
  if (team.lane() == 0) {
    w.step.segment = first_segment(s, s.begin + w.update.begin);
    w.step.turns = 0;
  }
  team.sync();
  while (w.step.segment < s.segment_count &&
         s.segments[w.step.segment].begin < s.begin + w.update.end) {
    const uint32_t refused = begin_turns<G, P, kind>(team, w);
    end_turns<G, P, kind>(team, w, refused);
  }
}

}  // namespace device
RINGCOMM_NAMESPACE_END
