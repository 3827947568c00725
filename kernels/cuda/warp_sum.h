// The sum of a tile of kTileElems terms by halves (grad_norm.h), done by the 32 lanes of a warp:
// the same additions as tile_sum() of kernels/host/isa_adamw.h, so the same bits.
//
// Lane t holds the terms 8t .. 8t+7 of the lower half of the tile and those of the upper. Adding
// the halves (elements i and i + 256) takes no exchange. Then elements i and i + 128 are lanes t
// and t + 16, and so on: at each of the next three steps a pair of lanes shares the work, so that 7
// values are exchanged, not 24. A Warp is a value per lane: one register on a GPU, and an array of
// 32 in the test that holds this against tile_sum().
//
//   W exchange(W x, int mask)           of each lane: the x of lane (own number ^ mask)
//   W pick(int bit, W zero, W one)      of each lane: by a bit of its number
#pragma once

#include "ringcomm/optimizer/grad_norm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// One step: of `count` sums that both lanes of a pair hold, the lower lane goes on with the first
// half and the upper with the second.
template <int count, class Warp, class W>
RC_TEAM_FN void share_sums(const Warp& warp, W (&x)[8], int bit) {
  RC_UNROLL
  for (int k = 0; k < count / 2; ++k) {
    const W mine = warp.pick(bit, x[k], x[k + count / 2]),
            theirs = warp.pick(bit, x[k + count / 2], x[k]);
    x[k] = mine + warp.exchange(theirs, 1 << bit);
  }
}

// x: the sums of halves; the result is the same in all lanes.
template <class Warp, class W>
RC_TEAM_FN W warp_tile_sum(const Warp& warp, W (&x)[8]) {
  share_sums<8>(warp, x, 4);              // elements i and i + 128
  share_sums<4>(warp, x, 3);              // + 64
  share_sums<2>(warp, x, 2);              // + 32
  W sum = x[0] + warp.exchange(x[0], 2);  // + 16
  sum = sum + warp.exchange(sum, 1);      // + 8
  sum = sum + warp.exchange(sum, 16);     // + 4: the pair that shared the eight
  sum = sum + warp.exchange(sum, 8);      // + 2
  return sum + warp.exchange(sum, 4);     // + 1
}

}  // namespace device
RINGCOMM_NAMESPACE_END
