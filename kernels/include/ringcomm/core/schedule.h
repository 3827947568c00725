// SPDX-License-Identifier: Apache-2.0

// The arithmetic of the schedules: chunks, peers, hops and tails. Pure and constexpr;
// tests/proof/races/schedule_test.cpp proves it for worlds 1..16 at compile time.
#pragma once

#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN

struct Span {
  char* ptr;
  uint64_t bytes;
};

// Returns the bytes of all spans of a list.
template <class Spans>
RC_FN constexpr uint64_t sum_bytes(const Spans& spans) {
  uint64_t total = 0;
  for (const Span& s : spans) total += s.bytes;
  return total;
}

// A buffer cut into one chunk per rank, by a list of spans or into chunks of chunk_bytes (0: each
// chunk is the whole buffer); the last chunks may be shorter or empty.
struct Chunks {
  char* base;
  uint64_t total_bytes;
  uint64_t chunk_bytes;
  const Span* list;

  RC_FN constexpr Span get(int rank) const {
    if (list != nullptr) return list[rank];
    const uint64_t begin = uint64_t(rank) * chunk_bytes;
    if (begin >= total_bytes) return {base + total_bytes, 0};
    const uint64_t left = total_bytes - begin;
    return {base + begin, left - 1 < chunk_bytes - 1 ? left : chunk_bytes};  // 0 - 1 is the maximum
  }
};

// Returns the bytes of a chunk: whole 64-byte lines, so that no two ranks write to the same line
// and every chunk but the last starts as well aligned as the buffer.
RC_FN constexpr uint64_t balanced_chunk_bytes(uint64_t total_bytes, int world) {
  const uint64_t share = (total_bytes + world - 1) / world;
  return (share + 63) / 64 * 64;
}

// Counts items of 2^item_shift bytes. A stream has at least one: an empty item carries its header.
RC_FN constexpr uint32_t items_of(uint64_t bytes, int item_shift) {
  return bytes == 0 ? 1 : uint32_t(((bytes - 1) >> item_shift) + 1);
}

// The item_shift of a stream that is one item of any length.
constexpr int kOneItem = 63;

// Returns the item size of a zero-copy stream that is published at once, not segment by segment as
// the segments are made.
RC_FN constexpr uint64_t whole_item(uint64_t bytes) { return bytes == 0 ? 1 : bytes; }

RC_FN constexpr uint64_t item_length(uint64_t bytes, uint64_t item_bytes, uint64_t item) {
  const uint64_t begin = item * item_bytes;
  if (begin >= bytes) return 0;
  return bytes - begin < item_bytes ? bytes - begin : item_bytes;
}

RC_FN constexpr int ring_next(int rank, int world) { return rank + 1 == world ? 0 : rank + 1; }
RC_FN constexpr int ring_prev(int rank, int world) { return rank == 0 ? world - 1 : rank - 1; }

// Ring reduce-scatter: the chunk whose partial sum rank r sends at hop t in [0, W-2]. The chunk
// that it receives at hop t is the chunk that it sends at hop t + 1; at hop W-2 it receives its own
// chunk.
RC_FN constexpr int ring_reduce_chunk(int rank, int hop, int world) {
  return (rank + 2 * world - 1 - hop) % world;
}

// Ring all-gather: the chunk that rank r sends at hop t in [0, W-2], its own chunk first. It
// receives the chunk that its predecessor sends: ring_gather_chunk(r, t + 1).
RC_FN constexpr int ring_gather_chunk(int rank, int hop, int world) {
  return (rank + 2 * world - hop) % world;
}

// Returns the peer that a rank visits at step d in [1, W-1]. Each rank starts at its successor, so
// that no two ranks read the same peer at the same time.
RC_FN constexpr int rotated_peer(int rank, int d, int world) {
  return rank + d < world ? rank + d : rank + d - world;
}

RINGCOMM_NAMESPACE_END
