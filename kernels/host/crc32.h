// CRC-32 (ISO-HDLC, polynomial 0x04C11DB7; zlib's crc32): the checksum of checkpoints' files.
#pragma once

#include <cstdint>

namespace ringcomm::host {

// The sum of bytes behind others, whose sum is `before`; 0: there are none. Large ones are summed
// in parts of fixed length by up to `threads` threads, with the same result for any number.
uint32_t crc32(uint32_t before, const void* data, uint64_t bytes, int threads);

// The sum of A and then B, from those of A and of B and the length of B.
uint32_t combined_crc32(uint32_t a, uint32_t b, uint64_t b_bytes);

// For tests: the ways that run here, ended by a null; the first is taken.
struct Crc32Way {
  const char* name;
  uint32_t (*sum)(uint32_t before, const void* data, uint64_t bytes);
};
const Crc32Way* crc32_ways();

}  // namespace ringcomm::host
