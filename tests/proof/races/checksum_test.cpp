// SPDX-License-Identifier: Apache-2.0

// CRC-32 computed by several threads, compared with its definition. test_checksum_races.py also
// builds this program with mutants, each of which must fail.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "kernels/host/crc32.h"
#include "kernels/host/worker_pool.h"

using namespace ringcomm::host;

namespace {

constexpr uint64_t kPart = 16 << 10;  // kPartBytes, which the test shortens

uint32_t with_byte(uint32_t crc, unsigned char byte) {
  crc ^= byte;
  for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
  return crc;
}

}  // namespace

int main() {
  bytes_to_wake_for = 0;
  const std::vector<uint64_t> lengths = {0,
                                         1,
                                         63,
                                         64,
                                         65,
                                         96,
                                         kPart - 1,
                                         2 * kPart,
                                         2 * kPart + 1,
                                         3 * kPart,
                                         3 * kPart + 16,
                                         4 * kPart - 7};
  std::vector<unsigned char> bytes(lengths.back());
  uint32_t state = 1;
  for (unsigned char& byte : bytes)
    byte = (unsigned char)((state = state * 1664525 + 1013904223) >> 24);
  constexpr uint32_t kBefore = 0x12345678;
  uint32_t wanted = ~kBefore;
  uint64_t summed = 0;
  for (const uint64_t length : lengths) {
    while (summed < length) wanted = with_byte(wanted, bytes[summed++]);
    for (const int threads : {1, 2, 3, 5, 8}) {
      const uint32_t seen = crc32(kBefore, bytes.data(), length, threads);
      if (seen == ~wanted) continue;
      std::fprintf(stderr, "%d threads, %lu bytes: %08x\n", threads, (unsigned long)length, seen);
      return 1;
    }
  }
  std::puts("ok");
}
