// SPDX-License-Identifier: Apache-2.0

// Norms of gradients that do not depend on how the gradient is cut into shards.
//
// A floating-point sum depends on its order, and the order usually on the number of ranks. This
// norm does not: a tile of kTileElems elements, always on one rank, is summed in double precision
// by halves in a fixed order, and the sums of tiles are added exactly, as integers. A double is cut
// into digits of 32 bits at fixed positions, as in an accumulator after Kulisch ("Computer
// Arithmetic and Validity", 2008). Each position has a word of 64 bits, which can add 2^31 digits
// without overflow. So the words of all ranks may be added in any order, by atomics or by an
// all-reduce, and the norm is the same number on 1 rank and on 1000 ranks.
//
// Within a tile the error is that of double precision: the squares of FP32 numbers are exact, and
// nine rounded additions give a relative error of at most 9 * 2^-53.
#pragma once

#include "ringcomm/optimizer/adamw.h"

RINGCOMM_NAMESPACE_BEGIN

enum class NormKind : int32_t { kTwo = 0, kOne = 1, kInf = 2 };

constexpr int kNormWords = 24;
constexpr int kNormDigits = 20;
constexpr int kNonFiniteWord = 23;  // number of tiles that contain an infinity or a NaN
// Digit k counts multiples of 2^(32 k - kNormBias). The smallest sum of squares of FP32 numbers
// is 2^-298, and the last bit of its mantissa 2^-350; a tile's sum is below 2^266.
constexpr int kNormBias = 352;

struct NormWords {
  int64_t word[kNormWords];
};

// Returns an element's term in a tile's sum or maximum.
RC_FN double norm_term(float x, NormKind kind) {
  const double wide = double(x);
  if (kind == NormKind::kTwo) return wide * wide;
  return wide < 0.0 ? -wide : wide;
}

// Adds a tile's sum to the words by add(k, digit): by atomics on a GPU, without them on the host.
template <class Add>
RC_FN void add_tile(double sum, Add add) {
  if (!(sum - sum == 0.0)) return add(kNonFiniteWord, 1);
  if (sum == 0.0) return;
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  const uint64_t mantissa = (bits & 0xfffffffffffffull) | 0x10000000000000ull;
  const int bit = int(bits >> 52) - 1075 + kNormBias;  // the mantissa's last bit; never < 0
  const int digit = bit / 32, shift = bit % 32;
  const uint64_t low = mantissa << shift, high = shift == 0 ? 0 : mantissa >> (64 - shift);
  add(digit, int64_t(low & 0xffffffffull));
  add(digit + 1, int64_t(low >> 32));
  add(digit + 2, int64_t(high));
}

// Adds the words of a set of tiles to those of another set; between ranks, an all-reduce does this.
RC_FN void merge_norms(NormWords& into, const NormWords& from, NormKind kind) {
  for (int k = 0; k < kNormWords; ++k) {
    if (kind == NormKind::kInf && k != kNonFiniteWord)
      into.word[k] = into.word[k] > from.word[k] ? into.word[k] : from.word[k];
    else
      into.word[k] += from.word[k];
  }
}

RINGCOMM_NAMESPACE_END
