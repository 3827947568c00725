// SPDX-License-Identifier: Apache-2.0

// Arithmetic of a reflected 32-bit CRC: tables by byte, and products modulo its polynomial P.
//
// A CRC is a polynomial modulo P over the field of two elements; bit 31 is the coefficient of x^0.
// The CRC is linear, and each zero byte behind the data multiplies it by x^8. So the CRC of A
// followed by B follows from the CRCs of A and B and the length of B (Mark Adler's
// crc32_combine of zlib).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ringcomm::host {

inline uint64_t word_at(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// `kPolynomial` is reflected, as CRCs are.
template <uint32_t kPolynomial>
constexpr uint32_t times_x(uint32_t crc) {
  return (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
}

// Indexed by k and b: the change that byte b makes to the CRC once k more bytes have followed.
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;
template <uint32_t kPolynomial>
constexpr CrcTables make_crc_tables() {
  CrcTables t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = times_x<kPolynomial>(crc);
    t[0][b] = crc;
  }
  for (size_t k = 1; k < t.size(); ++k)
    for (uint32_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 255];
  return t;
}
template <uint32_t kPolynomial>
inline constexpr CrcTables kCrcTables = make_crc_tables<kPolynomial>();

template <uint32_t kPolynomial>
class Crc {
 public:
  static uint32_t with_byte(uint32_t crc, unsigned char byte) {
    return (crc >> 8) ^ kCrcTables<kPolynomial>[0][(crc ^ byte) & 255];
  }
  static uint32_t with_word(uint32_t crc, uint64_t word) {
    word ^= crc;
    uint32_t sum = 0;
    for (int k = 0; k < 8; ++k) sum ^= kCrcTables<kPolynomial>[7 - k][(word >> (8 * k)) & 255];
    return sum;
  }
  static uint32_t with_bytes(uint32_t crc, const unsigned char* p, uint64_t bytes) {
    for (; bytes >= 8; p += 8, bytes -= 8) crc = with_word(crc, word_at(p));
    for (; bytes > 0; ++p, --bytes) crc = with_byte(crc, *p);
    return crc;
  }

  static constexpr uint32_t kOne = uint32_t(1) << 31;

  static constexpr uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (; a != 0; a <<= 1) {
      if ((a & kOne) != 0) sum ^= b;
      b = times_x<kPolynomial>(b);
    }
    return sum;
  }
  // x^n
  static constexpr uint32_t power(uint64_t n) {
    uint32_t result = kOne;
    for (uint32_t square = kOne >> 1; n != 0; n >>= 1, square = product(square, square))
      if ((n & 1) != 0) result = product(result, square);
    return result;
  }
};

}  // namespace ringcomm::host
