// SPDX-License-Identifier: Apache-2.0

// Updates of a shard in turns of 8 elements (kernels/cuda/adamw_lanes.h), by one lane, against
// updates of its elements one by one, bit for bit. Some turns have gradients whose quotients are
// out of range, so that the common loops refuse these turns. A shard has more turns than
// LaneTurns::kAtOnce, and segments that end within a turn. Prints "ok".
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/cuda/adamw_lanes.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::device;

constexpr uint64_t kElems = 1200, kMost = 8;

// The only lane of its block.
struct LoneLane {
  RC_TEAM_FN int lane() const { return 0; }
  RC_TEAM_FN int num_lanes() const { return 1; }
  RC_TEAM_FN void sync() const {}
};

// Arrays that begin at multiples of 16 bytes.
template <class T>
struct Array {
  alignas(16) T at[kElems] = {};
};

template <class G, class P>
struct Shard {
  Array<G> grads[kMost];
  Array<float> master, m, v;
  Array<P> params, copies[kMost];
};

bool odd_turn(int pattern, uint64_t turn) {
  const uint64_t in_round = turn % LaneTurns::kAtOnce;
  switch (pattern) {
    case 0:
      return false;
    case 1:
      return true;
    case 2:
      return in_round == 0;
    case 3:
      return in_round == LaneTurns::kAtOnce - 1;
    default:
      return turn % 7 == 2 || turn % 11 == 3;
  }
}

// Fills a shard: gradients of the turns that `pattern` selects contain an element that the common
// loops refuse.
template <class G, class P>
void fill(Shard<G, P>& s, int pattern, int sources) {
  const float odd[] = {INFINITY, NAN, -INFINITY, 3e38f, 1e-35f, -1e-30f};
  std::mt19937 random(unsigned(17 * pattern + sources));
  const auto usual = [&] { return float(int(random() % 2000) - 1000) / 256.0f; };
  for (uint64_t k = 0; k < kElems; ++k) {
    const bool refused =
        odd_turn(pattern, k / kTurnElems) && k % kTurnElems == random() % kTurnElems;
    const float p = usual();
    for (int r = 0; r < sources; ++r)
      s.grads[r].at[k] = Traits<G>::store(refused ? odd[random() % 6] : usual());
    s.master.at[k] = p;
    s.params.at[k] = Traits<P>::store(p);
    // With moments of zero, a tiny gradient remains the numerator of the quotient.
    s.m.at[k] = refused ? 0.0f : usual();
    s.v.at[k] = refused ? 0.0f : std::fabs(usual());
  }
}

// The workspace of an update of the whole shard.
template <class G, class P>
struct Update {
  Workspace w{};
  AdamWFactors factors[2] = {};
  // The first segment ends within a turn; elements 413 to 415 are padding.
  AdamWSegment segments[2] = {{0, 413, 0}, {416, kElems - 3, 1}};

  Update(Shard<G, P>& s, int sources, int copies) {
    for (AdamWFactors& f : factors) {
      f.flags = kAdamActive;
      f.step = 3;
      f.decay = 0.9375f;
      f.one_minus_beta1 = 0.125f;
      f.beta2 = 0.96875f;
      f.one_minus_beta2 = 0.03125f;
      f.negative_step_size = -0.0078125f;
      f.bias_correction2_sqrt = 0.25f;
      f.eps = 1e-8f;
      f.grad_scale = f.clip = 1.0f;
    }
    constexpr bool is_master = sizeof(P) == sizeof(float);
    w.shard.segments = segments;
    w.shard.factors = factors;
    w.shard.segment_count = 2;
    w.shard.bucket_elems = w.shard.elems = kElems;
    w.shard.master = is_master ? nullptr : s.master.at;
    w.shard.exp_avg = s.m.at;
    w.shard.exp_avg_sq = s.v.at;
    w.shard.params = reinterpret_cast<char*>(s.params.at);
    w.shard.param_dtype = is_master ? DType::kFloat32 : DType::kBFloat16;
    for (int r = 0; r < sources; ++r) w.sources[r] = s.grads[r].at;
    for (int c = 0; c < copies; ++c) w.results[c] = reinterpret_cast<char*>(s.copies[c].at);
    w.update = {w.sources, sources, 2, copies, 0, kElems};
  }
};

long failures = 0;

// Compares two arrays by bits, except that a NaN equals any NaN.
template <class T>
void compare(const char* what, int sources, int pattern, const Array<T>& a, const Array<T>& b) {
  for (uint64_t k = 0; k < kElems; ++k) {
    const float x = Traits<T>::load(a.at[k]), y = Traits<T>::load(b.at[k]);
    if (bits_of(x) == bits_of(y) || (x != x && y != y)) continue;
    if (++failures <= 5)
      std::printf("%s[%d], %d sources, pattern %d: %a, not %a\n", what, int(k), sources, pattern,
                  double(x), double(y));
  }
}

template <class G, class P, UpdateKind kind>
void check(int sources, int copies) {
  for (int pattern = 0; pattern < 5; ++pattern) {
    std::vector<Shard<G, P>> both(2);
    for (Shard<G, P>& each : both) fill(each, pattern, sources);
    Shard<G, P>&found = both[0], &wanted = both[1];
    Update<G, P> by_turns(found, sources, copies), singly(wanted, sources, copies);
    update_lanes<G, P, kind>(LoneLane{}, by_turns.w);
    const Workspace& w = singly.w;
    const Updater<G, P> updater{w.shard, w.results, copies};
    for (const AdamWSegment& each : singly.segments)
      update_singly(updater, grads_of<G>(w.update), w.shard.factors[each.param], each.begin,
                    each.end, 1);
    compare("parameters", sources, pattern, found.params, wanted.params);
    compare("masters", sources, pattern, found.master, wanted.master);
    compare("first moments", sources, pattern, found.m, wanted.m);
    compare("second moments", sources, pattern, found.v, wanted.v);
    for (int c = 0; c < copies; ++c)
      compare("copies", sources, pattern, found.copies[c], wanted.copies[c]);
  }
}

template <class G, class P>
void check_all() {
  check<G, P, UpdateKind::kAlone>(1, 0);
  check<G, P, UpdateKind::kRing>(2, 0);
  check<G, P, UpdateKind::kPair>(2, 1);
  check<G, P, UpdateKind::kMany>(4, 3);
  check<G, P, UpdateKind::kMany>(8, 7);
}

}  // namespace

int main() {
  check_all<float, float>();
  check_all<BFloat16, BFloat16>();
  if (failures != 0) return std::printf("%ld failures\n", failures), 1;
  std::puts("ok");
  return 0;
}
