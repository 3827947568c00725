// SPDX-License-Identifier: Apache-2.0

// Compares a warp's sum of a tile (kernels/cuda/warp_sum.h), whose 32 lanes are an array here, with
// the host's sum by halves, bit for bit. Also compares the exact addition of tiles with long double
// addition, where long double is exact.
#define RINGCOMM_ISA isa_baseline
#include <cmath>
#include <cstdio>
#include <random>

#include "kernels/cuda/warp_sum.h"
#include "kernels/host/isa_adamw.h"

namespace {

using namespace ringcomm;

struct Wide {
  double lane[32];
  friend Wide operator+(const Wide& a, const Wide& b) {
    Wide sum;
    for (int t = 0; t < 32; ++t) sum.lane[t] = a.lane[t] + b.lane[t];
    return sum;
  }
};

struct SimulatedWarp {
  Wide exchange(const Wide& x, int mask) const {
    Wide result;
    for (int t = 0; t < 32; ++t) result.lane[t] = x.lane[t ^ mask];
    return result;
  }
  Wide pick(int bit, const Wide& zero, const Wide& one) const {
    Wide result;
    for (int t = 0; t < 32; ++t)
      result.lane[t] = ((t >> bit) & 1) != 0 ? one.lane[t] : zero.lane[t];
    return result;
  }
};

double by_warp(const float* x) {
  Wide halves[8];
  for (int k = 0; k < 8; ++k)
    for (int t = 0; t < 32; ++t)
      halves[k].lane[t] = norm_term(x[8 * t + k], NormKind::kTwo) +
                          norm_term(x[8 * t + k + kTileElems / 2], NormKind::kTwo);
  const Wide sum = device::warp_tile_sum(SimulatedWarp{}, halves);
  for (int t = 1; t < 32; ++t)
    if (sum.lane[t] != sum.lane[0]) return NAN;
  return sum.lane[0];
}

int fail(const char* what) {
  std::printf("%s\n", what);
  return 1;
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-60, 60);
  NormWords words{};
  double largest = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    float x[kTileElems];
    for (float& each : x) each = std::ldexp(normal(random), exponent(random));
    const double sum = host::tile_sum(x, NormKind::kTwo);
    if (sum != by_warp(x)) return fail("a warp's sum differs from the host's");
    largest = std::max(largest, sum);
  }
  // The integers sum to less than 2^63, so long double's 64 bits hold the sum.
  std::uniform_int_distribution<uint64_t> integer(0, uint64_t(1) << 50);
  uint64_t total = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    const uint64_t each = integer(random);
    total += each;
    add_tile(double(each), [&](int k, int64_t digit) { words.word[k] += digit; });
  }
  long double sum = 0;
  for (int k = kNormDigits - 1; k >= 0; --k)
    sum += std::ldexp((long double)(words.word[k]), 32 * k - kNormBias);
  if (sum != (long double)(total)) return fail("tiles are not added exactly");
  // The ends of the range.
  for (const double edge : {std::ldexp(1.0, -298), std::ldexp(1.0, 265), 0.0}) {
    NormWords one{};
    add_tile(edge, [&](int k, int64_t digit) {
      if (k < 0 || k >= kNormDigits) std::abort();
      one.word[k] += digit;
    });
    long double back = 0;
    for (int k = 0; k < kNormDigits; ++k)
      back += std::ldexp((long double)(one.word[k]), 32 * k - kNormBias);
    if (back != (long double)(edge)) return fail("an end of the range is lost");
  }
  NormWords odd{};
  add_tile(INFINITY, [&](int k, int64_t digit) { odd.word[k] += digit; });
  add_tile(NAN, [&](int k, int64_t digit) { odd.word[k] += digit; });
  if (odd.word[kNonFiniteWord] != 2) return fail("what is not finite is not counted");
  std::puts("ok");
  return 0;
}
