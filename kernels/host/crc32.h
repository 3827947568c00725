// SPDX-License-Identifier: Apache-2.0

// CRC-32 (ISO-HDLC, polynomial 0x04C11DB7; zlib's crc32): the checksum of checkpoints' files.
#pragma once

#include <cstdint>

namespace ringcomm::host {

// Returns the CRC of earlier data followed by `data`. `before`: the CRC of the earlier data; 0:
// none. Up to `threads` threads sum parts of fixed length; the result does not depend on `threads`.
uint32_t crc32(uint32_t before, const void* data, uint64_t bytes, int threads);

// Returns the CRC of A followed by B, from the CRCs of A and B and the length of B.
uint32_t combined_crc32(uint32_t a, uint32_t b, uint64_t b_bytes);

// For tests: the implementations that this CPU can run, then a null; crc32() uses the first.
struct Crc32Way {
  const char* name;
  uint32_t (*sum)(uint32_t before, const void* data, uint64_t bytes);
};
const Crc32Way* crc32_ways();

}  // namespace ringcomm::host
