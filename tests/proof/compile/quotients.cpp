// SPDX-License-Identifier: Apache-2.0

// Prints how many results of quotient_of() differ from a division's, and how many results of its
// first step alone do: for all counts of ranks and for numbers of every exponent, with random
// mantissas and with the first and last ones.
#include <cstdio>

#include "kernels/cuda/packets.h"

using namespace ringcomm;

int main() {
  uint64_t differ = 0, first_differ = 0;
  uint32_t random = 1;
  for (uint32_t high = 0; high < 512; ++high)
    for (uint32_t i = 0; i < 512; ++i) {
      random ^= random << 13, random ^= random >> 17, random ^= random << 5;
      const uint32_t low = i < 64 ? i : i < 128 ? 0x7fffff - (i - 64) : random & 0x7fffff;
      const float x = float_of(high << 23 | low);
      for (int count = 1; count <= device::kMaxWorld; ++count) {
        const uint32_t right = bits_of(x / float(count));
        const double reciprocal = double(0xffffffffu / uint32_t(count)) * 0x1p-32;
        differ += bits_of(device::quotient_of(x, count)) != right;
        first_differ += bits_of(float(x * reciprocal)) != right;
      }
    }
  std::printf("%llu %llu\n", static_cast<unsigned long long>(differ),
              static_cast<unsigned long long>(first_differ));
}
