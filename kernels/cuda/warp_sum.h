// SPDX-License-Identifier: Apache-2.0

// Sums a tile of kTileElems terms by halves (grad_norm.h), by the 32 lanes of a warp. It makes the
// same additions as tile_sum() of kernels/host/isa_adamw.h, so the bits are equal.
//
// Lane t holds terms 8t .. 8t+7 of the tile's lower half and of its upper half. Adding the halves
// (elements i and i + 256) needs no exchange. Then elements i and i + 128 are in lanes t and t +
// 16, and so on: at each of the next three steps a pair of lanes shares the work, so that 7 values
// are exchanged, not 24. W is one value per lane: a register on a GPU, and an array of 32 in the
// test that compares this with tile_sum().
//
//   W exchange(W x, int mask)           in each lane: x of lane (own number ^ mask)
//   W pick(int bit, W zero, W one)      in each lane: by that bit of its number, `zero` or `one`
#pragma once

#include "ringcomm/optimizer/grad_norm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// One step for `count` sums that both lanes of a pair hold: the lower lane adds and keeps the first
// half of the sums, the upper lane the second half.
template <int count, class Warp, class W>
RC_TEAM_FN void share_sums(const Warp& warp, W (&x)[8], int bit) {
  RC_UNROLL
  for (int k = 0; k < count / 2; ++k) {
    const W mine = warp.pick(bit, x[k], x[k + count / 2]),
            theirs = warp.pick(bit, x[k + count / 2], x[k]);
    x[k] = mine + warp.exchange(theirs, 1 << bit);
  }
}

// x: the sums of the tile's halves. Returns the same sum in all lanes.
template <class Warp, class W>
RC_TEAM_FN W warp_tile_sum(const Warp& warp, W (&x)[8]) {
  share_sums<8>(warp, x, 4);              // elements i and i + 128
  share_sums<4>(warp, x, 3);              // elements i and i + 64
  share_sums<2>(warp, x, 2);              // elements i and i + 32
  W sum = x[0] + warp.exchange(x[0], 2);  // elements i and i + 16
  sum = sum + warp.exchange(sum, 1);      // elements i and i + 8
  sum = sum + warp.exchange(sum, 16);     // elements i and i + 4; pairs as in the first step
  sum = sum + warp.exchange(sum, 8);      // elements i and i + 2
  return sum + warp.exchange(sum, 4);     // elements i and i + 1
}

}  // namespace device
RINGCOMM_NAMESPACE_END
