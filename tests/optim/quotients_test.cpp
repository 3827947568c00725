// SPDX-License-Identifier: Apache-2.0

// Compares the branch-free quotients and roots (kernels/cuda/quotients.h), and AdamW's step with
// them (update_rules.h), with `/` and sqrt, bit for bit. near_error_ulps is the error of the first
// approximation, as large as a GPU's may be. argv[1] = n: tests every n-th mantissa of divisors.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "kernels/cuda/update_rules.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::device;

long failures = 0;

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }

void fail(const char* what, float a, float b, float found, float wanted) {
  if (++failures <= 10)
    std::printf("%s of %a and %a, %d ulps off: %a, not %a\n", what, double(a), double(b),
                near_error_ulps, double(found), double(wanted));
}

void check_quotient(float a, float b) {
  for (near_error_ulps = -2; near_error_ulps <= 2; ++near_error_ulps) {
    const float found = quotient(a, b, reciprocal(b)), wanted = a / b;
    // Newton's step does not always round the reciprocals of the largest mantissas correctly.
    // ptxas' `/` takes the same step from an approximation that is correct there.
    const bool largest = (bits_of(b) & 0x7fffff) >= 0x7ffff0;
    if (!same(found, wanted) && !(largest && near_error_ulps != 0))
      fail("quotient", a, b, found, wanted);
  }
  near_error_ulps = 0;
  const float found = quotient(a, b, 1.0f / b);
  if (!same(found, a / b)) fail("quotient by an exact reciprocal", a, b, found, a / b);
}

uint32_t inverse_of_odd(uint32_t x) {
  uint32_t inverse = x;
  for (int k = 0; k < 5; ++k) inverse *= 2 - x * inverse;
  return inverse;
}

// Checks the dividends whose quotients by `b`, 2^23 <= b < 2^24, are nearest to the middle of two
// numbers: a * 2^shift = middle * b + rest, with an odd middle of 25 bits and a small rest. The
// error before the last rounding is below 2 * 2^-24 ulps, and a rest of r is r * 2^-24 * 2^23 / b
// ulps away: no other dividend can be rounded wrongly.
void check_hard_quotients(uint32_t b) {
  const int twos = __builtin_ctz(b);
  for (int shift = 24; shift <= 25; ++shift)
    for (int rest = -8; rest <= 8; ++rest) {
      if (rest == 0 || twos > 3 || (rest & ((1 << twos) - 1)) != 0) continue;
      const int bits = shift - twos;
      const uint32_t first =
          uint32_t(-(rest >> twos)) * inverse_of_odd(b >> twos) & ((uint32_t(1) << bits) - 1);
      for (uint64_t middle = first; middle < 1 << 25; middle += uint64_t(1) << bits) {
        if (middle < 1 << 24 || middle % 2 == 0) continue;
        const uint64_t product = middle * b + uint64_t(int64_t(rest));
        const uint64_t a = product >> shift;
        if (product << (64 - shift) != 0 || a < 1 << 23 || a >= 1 << 24) continue;
        check_quotient(float(a), float(b));
      }
    }
}

// Checks every mantissa, for even and odd exponents. With approximations as inexact as PTX allows,
// two give a wrong root of some number; ptxas' sqrtf() has the same instructions.
void check_roots() {
  long wrong = 0;
  for (uint32_t bits = 0x3f800000; bits < 0x40800000; ++bits)
    for (near_error_ulps = -1; near_error_ulps <= 1; ++near_error_ulps) {
      const float x = float_of(bits), found = root(x), wanted = std::sqrt(x);
      const double exact = 1 / std::sqrt(double(x));
      if (std::fabs(double(near_inverse_root(x)) / exact - 1) > 0x1.125fcp-23) continue;  // 2^-22.9
      if (same(found, wanted)) continue;
      ++wrong;
      if (near_error_ulps == 0) fail("root", x, x, found, wanted);
    }
  near_error_ulps = 0;
  if (wrong > 2) fail("roots by other approximations", 0, 0, float(wrong), 2);
}

float exact_step(float p, float m, float v, const AdamWFactors& f) {
  const float denom = std::sqrt(v) / f.bias_correction2_sqrt + f.eps;
  return p + f.negative_step_size * m / denom;
}

AdamWFactors factors(float step_size, float correction, float eps) {
  AdamWFactors f{};
  f.negative_step_size = -step_size;
  f.bias_correction2_sqrt = correction;
  f.eps = eps;
  return f;
}

void check_step(float p, float m, float v, const AdamWFactors& f, bool may_be_odd) {
  bool odd = false;
  const float found = StepQuotients::of(f).new_parameter(p, m, v, odd),
              wanted = exact_step(p, m, v, f);
  if (!odd && !same(found, wanted)) fail("step", m, v, found, wanted);
  if (odd && !may_be_odd) fail("a common step is odd", m, v, found, wanted);
}

// Checks all pairs of exponents, including zeros, subnormal numbers, infinities and NaN.
void check_steps() {
  std::mt19937 random(1);
  const AdamWFactors all[] = {factors(1e-3f, 0.0316f, 1e-8f), factors(1.0f, 1.0f, 0x1p-58f),
                              factors(1e-6f, 0x1p-12f, 0x1p20f), factors(0.0f, 0.5f, 1e-6f),
                              factors(10.0f, 0x1p-12f, 0x1p-58f)};
  const float parameters[] = {0.0f, -0.0f, 0.7f, -3e-41f, 1e-30f, INFINITY};
  for (const AdamWFactors& each : all) {
    if (!takes_quotients(each)) fail("factors", each.eps, each.bias_correction2_sqrt, 0, 1);
    for (uint32_t of_m = 0; of_m < 512; ++of_m)
      for (uint32_t of_v = 0; of_v < 512; ++of_v)
        for (int k = 0; k < 3; ++k) {
          const uint32_t ends[] = {0, 0x7fffff};
          const auto mantissa = [&] { return k < 2 ? ends[k] : uint32_t(random()) & 0x7fffff; };
          const float m = float_of(of_m << 23 | mantissa()), v = float_of(of_v << 23 | mantissa());
          check_step(parameters[random() % 6], m, v, each, true);
        }
  }
  // Subnormal quotients.
  const AdamWFactors& f = all[4];
  for (int k = 0; k < 1 << 16; ++k)
    check_step(0.0f, std::ldexp(float(1 << 23 | (random() & 0x7fffff)), -110 - int(random() % 8)),
               std::ldexp(float(1 << 23 | (random() & 0x7fffff)), 18 + int(random() % 22)), f,
               true);
  // Values of training, and moments that have decayed to zero, must not take the slow path.
  const float usual[] = {0.0f, -0.0f, 1e-12f, -3e-5f, 0.25f, -17.0f},
              squares[] = {0.0f, 1e-45f, 1e-40f, 1e-20f, 3e-5f, 900.0f};
  for (const float m : usual)
    for (const float v : squares) check_step(0.5f, m, v, all[0], false);
  // Factors that need the slow path.
  for (const AdamWFactors& other :
       {factors(1e-3f, 0.5f, 0.0f), factors(1e-3f, 0x1p-13f, 1e-8f), factors(1e-3f, 1.5f, 1e-8f),
        factors(1e-3f, 0.5f, NAN), factors(1e-3f, NAN, 1e-8f), factors(1e-3f, 0.5f, 2e6f)})
    if (takes_quotients(other)) fail("factors", other.eps, other.bias_correction2_sqrt, 1, 0);
}

}  // namespace

int main(int, char** arguments) {
  const uint32_t every = uint32_t(std::atoi(arguments[1]));
  std::mt19937 random(2);
  for (uint32_t b = 1 << 23; b < 1 << 24; b += every == 1 ? 1 : 1 + random() % (2 * every))
    check_hard_quotients(b);
  check_hard_quotients((1 << 24) - 1);
  for (int k = 0; k < 1 << 18; ++k)
    check_quotient(std::ldexp(float(1 + random() % 0xffffff), int(random() % 60) - 50),
                   std::ldexp(float(1 + random() % 0xffffff), int(random() % 60) - 50));
  check_roots();
  check_steps();
  if (failures != 0) return std::printf("%ld failures\n", failures), 1;
  std::puts("ok");
  return 0;
}
