// CRC32C (Castagnoli, polynomial 0x1EDC6F41, as in RFC 3720): the checksum for which CPUs have an
// instruction.
#pragma once

#include <cstdint>

namespace ringcomm::host {

// By the instruction where this CPU has it, else by tables; chosen at first use.
uint32_t crc32c(const void* data, uint64_t bytes);

// For tests: the ways that run here, each ended by a null.
struct Crc32cWay {
  const char* name;
  uint32_t (*sum)(const void* data, uint64_t bytes);
};
const Crc32cWay* crc32c_ways();

}  // namespace ringcomm::host
