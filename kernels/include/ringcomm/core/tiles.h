// SPDX-License-Identifier: Apache-2.0

// How the channels of a collective divide a chunk of a buffer: in slices, or in tiles.
//
// A *slice* is one contiguous part of the chunk, so C channels access C distant streams of memory.
// *Tiles* have 2^shift bytes and are dealt round robin: channel c gets tiles c, c + C, c + 2C, ...
// so all channels access one window that moves through the chunk. Only whole rounds of C tiles are
// dealt. The rest of the chunk is divided in slices, so that all channels get equally many bytes. A
// chunk of less than C tiles has no round, and is divided in slices.
//
// A channel's *part* of a chunk is its tiles and its slice of the rest, in the order of addresses.
// A *position* counts the bytes of a part. Items (protocol/layout.h) are ranges of positions; a
// tile is as long as a full item, so each item has consecutive addresses.
#pragma once

#include "ringcomm/core/schedule.h"
#include "ringcomm/core/team.h"

RINGCOMM_NAMESPACE_BEGIN

// The sizes of tiles. They are a choice that no GPU has measured.
constexpr int kLeastTileShift = 14, kMostTileShift = 17;
// Loops count a part's vectors of 16 bytes in 32 bits, so larger chunks are not dealt in tiles.
constexpr uint64_t kMostPartBytes = uint64_t(1) << 35;

// How tiles are dealt to one channel; computed once per call. round_bytes 0: no tiles are dealt.
struct Deal {
  uint64_t round_bytes = 0;  // bytes of one tile for each channel
  uint64_t first_bytes = 0;  // from the beginning of a round to this channel's tile
  uint64_t share = 0;        // one channel's fraction, in units of 2^-32
  int shift = 0;             // a tile has 2^shift bytes

  static RC_FN constexpr Deal of(int channel, int channels, int shift) {
    if (channels == 1 || shift < kLeastTileShift || shift > kMostTileShift) return {};
    return {uint64_t(channels) << shift, uint64_t(channel) << shift, fraction_of(1, channels),
            shift};
  }
  // Returns the number of whole rounds in a chunk, or one less: the fraction is rounded down.
  RC_FN constexpr uint64_t rounds(uint64_t chunk_bytes) const {
    if (round_bytes == 0 || chunk_bytes >= kMostPartBytes) return 0;
    return Portion::times(chunk_bytes >> shift, share);
  }
};

// The gaps between the tiles of a part, in vectors of 16 bytes: the address of a position is the
// part's first address, plus the position, plus the gaps before it. The default has no gaps.
struct Gaps {
  uint32_t dealt = 0;    // vectors in tiles; the rest of the part follows them
  uint32_t each = 0;     // from the end of a tile to the channel's next tile
  uint32_t to_rest = 0;  // all gaps before the rest
  int32_t shift = 0;     // a tile has 2^shift vectors

  // Returns the gaps before a vector.
  RC_FN constexpr uint32_t before(uint32_t vector) const {
    return vector < dealt ? (vector >> shift) * each : to_rest;
  }
  // Returns the offset of a position's address from the part's first address, in bytes.
  RC_FN constexpr uint64_t offset(uint64_t position) const {
    return dealt == 0 ? position : position + uint64_t(before(uint32_t(position >> 4))) * 16;
  }
};

constexpr int kNoGaps = 1;

// Bytes from a part's position 0 on, for the loops that move or reduce them.
struct Stretch {
  uint64_t bytes;
  Gaps gaps = {};

  RC_FN constexpr Stretch(uint64_t n) : bytes(n) {}
  RC_FN constexpr Stretch(uint64_t n, const Gaps& g) : bytes(n), gaps(g) {}
  // Returns the consecutive bytes from `position` on, up to the end of the tile or stretch.
  RC_FN constexpr uint64_t consecutive(uint64_t position) const {
    if (position >= uint64_t(gaps.dealt) * 16) return bytes - position;
    const uint64_t tile = uint64_t(16) << gaps.shift, left = tile - (position & (tile - 1));
    return left < bytes - position ? left : bytes - position;
  }
};

// A channel's part of a chunk: `ptr` is the address of its position 0. Teams that deal no tiles use
// the first form.
template <bool tiles>
struct PartOf : Span {
  using Bytes = uint64_t;  // the type in which loops take a number of bytes

  static RC_FN constexpr uint64_t offset(uint64_t position) { return position; }
  RC_FN constexpr uint64_t reach() const { return bytes; }
  RC_FN constexpr Bytes first(uint64_t n) const { return n; }
};
template <>
struct PartOf<true> : Span {
  using Bytes = Stretch;
  Gaps gaps = {};

  RC_FN constexpr uint64_t offset(uint64_t position) const { return gaps.offset(position); }
  // Returns the bytes from the first to the last address of the part.
  RC_FN constexpr uint64_t reach() const { return bytes + uint64_t(gaps.to_rest) * 16; }
  // Returns the first n bytes of the part.
  RC_FN constexpr Bytes first(uint64_t n) const { return {n, gaps}; }
};

// Returns a channel's slice of a chunk.
RC_FN constexpr PartOf<false> sliced_part(Span chunk, const Portion& portion, int line_shift) {
  const Extent e = extent_of(chunk.bytes, portion, line_shift);
  return {{chunk.ptr + e.begin_bytes, e.end_bytes - e.begin_bytes}};
}

// Returns a channel's part of a chunk whose tiles are dealt.
RC_FN constexpr PartOf<true> dealt_part(Span chunk, const Deal& deal, const Portion& portion,
                                        int line_shift) {
  const uint64_t rounds = deal.rounds(chunk.bytes), dealt = rounds << deal.shift,
                 all_dealt = rounds * deal.round_bytes;
  const Extent rest = extent_of(chunk.bytes - all_dealt, portion, line_shift);
  const uint64_t first = rounds == 0 ? rest.begin_bytes : deal.first_bytes;
  const auto tile = uint64_t(1) << deal.shift;
  const uint64_t to_rest = all_dealt + rest.begin_bytes - first - dealt;
  return {{chunk.ptr + first, dealt + rest.end_bytes - rest.begin_bytes},
          {uint32_t(dealt >> 4), uint32_t((deal.round_bytes - tile) >> 4), uint32_t(to_rest >> 4),
           deal.shift - 4}};
}

RINGCOMM_NAMESPACE_END
