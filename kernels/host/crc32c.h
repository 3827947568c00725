// SPDX-License-Identifier: Apache-2.0

// CRC32C (Castagnoli, polynomial 0x1EDC6F41, as in RFC 3720): the checksum for which CPUs have an
// instruction.
#pragma once

#include <cstdint>

namespace ringcomm::host {

// Uses the instruction if this CPU has it, else tables; the choice is made at first use.
uint32_t crc32c(const void* data, uint64_t bytes);

// For tests: the implementations that this CPU can run, then a null; crc32c() uses the first.
struct Crc32cWay {
  const char* name;
  uint32_t (*sum)(const void* data, uint64_t bytes);
};
const Crc32cWay* crc32c_ways();

}  // namespace ringcomm::host
