// SPDX-License-Identifier: Apache-2.0

// The elements of a shard in memory: loads their FP32 values, narrows and stores new values, and
// updates single elements exactly.
#pragma once

#include "kernels/cuda/grad_sum.h"
#include "kernels/cuda/update_rules.h"

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
  template <int elems>
  RC_TEAM_FN static void some(const float (&master)[elems], const AdamWShard& s, uint64_t index,
                              uint32_t step, P (&param)[elems]) {
    if (s.rounding == Rounding::kStochastic) {
      RC_UNROLL
      for (int k = 0; k < elems; k += 4) {
        const Philox drawn = philox(s.seed, index / 4 + uint64_t(k / 4), step, uint32_t(s.bucket));
        RC_UNROLL
        for (int i = 0; i < 4; ++i)
          param[k + i] = narrow_stochastic(master[k + i], drawn.word[i], static_cast<P*>(nullptr));
      }
      return;
    }
    RC_UNROLL
    for (int k = 0; k < elems; ++k) param[k] = Traits<P>::store(master[k]);
  }
};
template <>
struct Narrowed<float> {
  RC_TEAM_FN static float of(float master, const AdamWShard&, uint64_t, uint32_t) { return master; }
  template <int elems>
  RC_TEAM_FN static void some(const float (&master)[elems], const AdamWShard&, uint64_t, uint32_t,
                              float (&param)[elems]) {
    RC_UNROLL
    for (int k = 0; k < elems; ++k) param[k] = master[k];
  }
};

// Loads, updates and stores elements of a shard's parameters and of their copies.
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
    for (int c = 0; c < copy_count; ++c) *copy(c, at) = param;
  }

  RC_TEAM_FN void one(uint64_t at, float g, const AdamWFactors& f) const {
    const bool amsgrad = (f.flags & kAdamAmsgrad) != 0;
    const bool first = has_first(f), second = has_second(f);
    float p = master_of(*own(at), at), m = first ? s.exp_avg[at] : 0.0f,
          v = second ? s.exp_avg_sq[at] : 0.0f, v_max = amsgrad ? s.max_exp_avg_sq[at] : 0.0f;
    update_exactly(p, adamw_gradient(g, f), m, v, v_max, f);
    if (first) s.exp_avg[at] = m;
    if (second) s.exp_avg_sq[at] = v;
    if (amsgrad) s.max_exp_avg_sq[at] = v_max;
    store_one(at, p, f);
  }

  // The raw data of FP32 masters: either the masters themselves, or parameters and their low
  // halves. The two cases share registers.
  template <int elems>
  struct Masters {
    uint32_t word[elems];
    template <class T>
    RC_TEAM_FN void load(const T* from, int at = 0) {
      Pack<T, elems> held;
      held.load(from);
      memcpy(word + at, held.word, sizeof(held));
    }
    template <class T>
    RC_TEAM_FN void get(T (&x)[elems], int at = 0) const {
      memcpy(x, word + at, sizeof(x));
    }
  };
  // Returns the address of the FP32 masters; requires that they exist.
  RC_TEAM_FN float* wide_masters(uint64_t at) const {
    if constexpr (kIsMaster)
      return own(at);
    else
      return s.master + at;
  }
  RC_TEAM_FN bool has_wide() const {
    if constexpr (kIsMaster) return false;
    return s.master != nullptr;
  }
  template <int elems>
  RC_TEAM_FN void load_masters(uint64_t at, Masters<elems>& held) const {
    if (has_wide()) return held.load(s.master + at);
    held.load(own(at));
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) held.load(s.remainder + at, elems / 2);
  }
  template <int elems>
  RC_TEAM_FN void masters_of(const Masters<elems>& held, float (&p)[elems]) const {
    if (has_wide()) return held.get(p);
    P param[elems];
    held.get(param);
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) {
        uint16_t rest[elems];
        held.get(rest, elems / 2);
        RC_UNROLL
        for (int k = 0; k < elems; ++k) p[k] = join_master(param[k], rest[k]);
        return;
      }
    RC_UNROLL
    for (int k = 0; k < elems; ++k) p[k] = Traits<P>::load(param[k]);
  }

  template <int elems>
  RC_TEAM_FN void store_masters(uint64_t at, const float (&p)[elems], const AdamWFactors& f,
                                P (&param)[elems]) const {
    if constexpr (kSame<P, BFloat16>)
      if (s.remainder != nullptr) {
        uint16_t rest[elems];
        RC_UNROLL
        for (int k = 0; k < elems; ++k) split_master(p[k], param[k], rest[k]);
        Pack<uint16_t, elems> low;
        low.set(rest);
        return low.store(s.remainder + at);
      }
    if constexpr (!kIsMaster)
      if (s.master != nullptr) {
        Pack<float, elems> held;
        held.set(p);
        held.store(s.master + at);
      }
    Narrowed<P>::some(p, s, s.begin + at, f.step, param);
  }

  // If `yes`, stores eight finite masters and the parameters rounded to nearest from them.
  // copies_known: the number of copies; -1: use copy_count.
  template <int copies_known>
  RC_TEAM_FN void store_finite_if(bool yes, uint64_t at, float* masters,
                                  const float (&p)[kTurnElems]) const {
    Eight<P> result;
    const uint64_t offset = (s.begin + at) * sizeof(P);
    if constexpr (kIsMaster) {
      result.set(p);
      result.store_if(yes, masters);
    } else {
      Eight<float> held;
      held.set(p);
      held.store_if(yes, masters);
      RC_UNROLL
      for (int k = 0; k < 4; ++k)
        result.word[k] = packed(p[2 * k], p[2 * k + 1], static_cast<P*>(nullptr));
      result.store_if(yes, reinterpret_cast<P*>(s.params + offset));
    }
    if constexpr (copies_known >= 0) {
      RC_UNROLL
      for (int c = 0; c < copies_known; ++c)
        result.store_if(yes, reinterpret_cast<P*>(copies[c] + offset));
    } else {
      RC_ROLLED
      for (int c = 0; c < copy_count; ++c)
        result.store_if(yes, reinterpret_cast<P*>(copies[c] + offset));
    }
  }

  template <int elems>
  RC_TEAM_FN void store_some(uint64_t at, const float (&p)[elems], const AdamWFactors& f) const {
    P param[elems];
    store_masters(at, p, f, param);
    Pack<P, elems> result;
    result.set(param);
    result.store(own(at));
    for (int c = 0; c < copy_count; ++c) result.store(copy(c, at));
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
