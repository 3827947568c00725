// SPDX-License-Identifier: Apache-2.0

// Proves that the parts of a chunk (core/tiles.h) partition it, and that the loops of the CUDA
// kernels access exactly the bytes of a part. The lanes of a kernel run here one after the other.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/cuda/ops.h"
#include "ringcomm/collectives/ring.h"

using namespace ringcomm;
using namespace ringcomm::device;

namespace {

constexpr int kShift = kLeastTileShift;
constexpr uint64_t kTile = uint64_t(1) << kShift;

PartOf<true> part(Span chunk, int channel, int channels, int shift = kShift) {
  return dealt_part(chunk, Deal::of(channel, channels, shift), portion_of(channel, channels), 6);
}

void fail(const char* what, uint64_t bytes, int channels, int channel) {
  std::printf("%s: %llu bytes, channel %d of %d\n", what, static_cast<unsigned long long>(bytes),
              channel, channels);
  std::exit(1);
}

// ---- the partition ------------------------------------------------------------------------------

// Each byte of the chunk belongs to one channel, items have consecutive addresses, and a shorter
// chunk has no tile that a longer chunk does not have.
void check_partition(uint64_t bytes, int channels, int shift) {
  const uint64_t tile = uint64_t(1) << shift;
  uint64_t covered = 0, rest_end = 0, longest = 0, shortest = ~uint64_t(0);
  for (int c = 0; c < channels; ++c) {
    const PartOf<true> p = part({nullptr, bytes}, c, channels, shift);
    const uint64_t first = reinterpret_cast<uintptr_t>(p.ptr), dealt = uint64_t(p.gaps.dealt) * 16;
    if (dealt % tile != 0 || dealt > p.bytes || p.bytes < dealt) fail("dealt", bytes, channels, c);
    for (uint64_t at = 0; at < dealt; at += tile)
      if (first + p.offset(at) != (at / tile * channels + c) * tile ||
          p.offset(at + tile - 1) != p.offset(at) + tile - 1)
        fail("a tile", bytes, channels, c);
    const uint64_t rest = first + p.offset(dealt);
    if (c == 0) rest_end = dealt * channels;
    if (p.bytes > dealt && (rest != rest_end || rest % 64 != 0))
      fail("the rest", bytes, channels, c);
    rest_end += p.bytes - dealt;
    if (p.bytes > dealt ? first + p.reach() != rest_end : first + p.reach() > bytes)
      fail("the reach", bytes, channels, c);
    covered += p.bytes;
    longest = p.bytes > longest ? p.bytes : longest;
    shortest = p.bytes < shortest ? p.bytes : shortest;
  }
  if (covered != bytes || rest_end != bytes) fail("the sum", bytes, channels, 0);
  if (longest - shortest > 128) fail("the balance", bytes, channels, 0);
}

void check_partitions() {
  for (const int channels : {1, 2, 3, 5, 7, 8, 31, 32, 62, 124, 132})
    for (int shift = kLeastTileShift; shift <= kMostTileShift; ++shift) {
      const uint64_t round = uint64_t(channels) << shift;
      for (const uint64_t near : {uint64_t(0), round / 2, round, 2 * round, 7 * round, 64 * round})
        for (const int64_t more : {-4096, -65, -64, -1, 0, 1, 63, 64, 100, 4100})
          if (int64_t(near) + more >= 0) check_partition(near + uint64_t(more), channels, shift);
    }
}

// ---- the rounds of rings and of two hops --------------------------------------------------------

// The members of an endpoint that rounds_of() uses.
template <bool tiles>
struct Cut {
  struct Channels {
    int channels;
    int num_channels() const { return channels; }
  } team;
  int world_, channel, segment_shift;

  int world() const { return world_; }
  uint32_t pieces(uint64_t bytes) const { return items_of(bytes, segment_shift); }
  PartOf<tiles> part(Span chunk) const {
    if constexpr (tiles)
      return ::part(chunk, channel, team.channels);
    else
      return sliced_part(chunk, portion_of(channel, team.channels), 6);
  }
};

// All ranks count just enough rounds for every chunk. Returns how often chunk 0 has fewer rounds.
template <bool tiles>
int check_rounds(uint64_t total, int world, int channels, int segment_shift) {
  const Chunks chunks{nullptr, total, balanced_chunk_bytes(total, world), nullptr};
  int longer = 0;
  for (int c = 0; c < channels; ++c) {
    const Cut<tiles> e{{channels}, world, c, segment_shift};
    uint32_t most = 0;
    for (int r = 0; r < world; ++r) {
      const uint32_t here = e.pieces(e.part(chunks.get(r)).bytes);
      most = here > most ? here : most;
    }
    if (rounds_of(e, chunks) != most) fail("the rounds", total, channels, c);
    longer += e.pieces(e.part(chunks.get(0)).bytes) < most;
  }
  return longer;
}

void check_all_rounds() {
  int sliced = 0, dealt = 0;
  for (int world = 1; world <= 8; ++world)
    for (const int channels : {1, 2, 3, 5, 7, 8, 31, 132}) {
      for (uint64_t lines = 0; lines < 400; ++lines)
        for (const int shift : {6, 7, 8, 10})
          sliced += check_rounds<false>(lines * 64 + lines % 3 * 4, world, channels, shift);
      const uint64_t round = uint64_t(channels) << kShift;
      for (uint64_t lines = 0; lines < 100; ++lines)
        for (const uint64_t near : {uint64_t(0), round, 3 * round, 4 * round - 3200})
          dealt += check_rounds<true>(world * (near + lines * 64), world, channels, kShift) +
                   check_rounds<true>(world * near + lines * 64, world, channels, kShift);
    }
  // In this case a shorter chunk has a part that is longer by a piece.
  if (sliced == 0 || dealt == 0 || check_rounds<false>(164160, 2, 5, 14) == 0)
    fail("no shorter chunk has a longer part", 0, 0, 0);
}

// ---- the loops ----------------------------------------------------------------------------------

struct Buffer {
  std::vector<char> memory;
  char* chunk;

  Buffer(uint64_t bytes, int misaligned, int seed) : memory(bytes + 128) {
    uint32_t state = uint32_t(seed) * 2654435761u + 1;
    for (char& byte : memory) byte = char((state = state * 1664525u + 1013904223u) >> 28);
    chunk =
        memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 + misaligned;
  }
};

// The members of a team that the Ops use.
struct OneLane {
  int lane_, lanes_;
  Gaps gaps_[2];

  int lane() const { return lane_; }
  int num_lanes() const { return lanes_; }
  Gaps* gaps() { return gaps_; }
};

// Elements by which the starts of the result, source 0 and the other sources are misaligned.
struct Misaligned {
  int result, first, others;
};

template <class T>
T* elements(Buffer& buffer) {
  return reinterpret_cast<T*>(buffer.chunk);
}

// Lets all lanes of all channels copy or add parts of chunks, and compares all memory.
template <class T>
void check_loops(uint64_t bytes, int channels, int lanes, int sources, Misaligned by) {
  Buffer out(bytes, by.result * int(sizeof(T)), 9), expected = out;
  expected.chunk = expected.memory.data() + (out.chunk - out.memory.data());
  std::vector<Buffer> in;
  for (int s = 0; s < sources; ++s)
    in.emplace_back(bytes, (s == 0 ? by.first : by.others) * int(sizeof(T)), s);
  for (uint64_t i = 0; i < bytes / sizeof(T); ++i) {
    T sum{};
    for (Buffer& each : in) sum = T(uint64_t(sum) + uint64_t(elements<T>(each)[i]));
    elements<T>(expected)[i] = sum;
  }
  for (int c = 0; c < channels; ++c)
    for (int lane = 0; lane < lanes; ++lane) {
      const PartOf<true> to = part({out.chunk, bytes}, c, channels);
      OneLane team{lane, lanes, {to.gaps, {}}};
      const void* ptrs[16];
      const double factors[16] = {};
      for (int s = 0; s < sources; ++s) ptrs[s] = part({in[s].chunk, bytes}, c, channels).ptr;
      if (sources == 1)
        MoveOps{}.copy_private(team, to.ptr, ptrs[0], to.first(to.bytes));
      else
        ReduceOps<T, RedOp::kSum>(int32_t(RedOp::kSum))
            .reduce(team, {to.ptr, false, nullptr}, ReduceSources{ptrs, factors, sources}, to.bytes,
                    sources);
    }
  if (out.memory != expected.memory) fail("the loops", bytes, channels, sources);
}

// Sums of int32_t load 2, 4 or 8 sources together, and sums of uint8_t load them in batches.
template <class T>
void check_all_loops() {
  const Misaligned misaligned[] = {{0, 0, 0}, {3, 3, 3}, {0, 3, 0}, {3, 3, 0}, {1, 2, 3}};
  for (const int channels : {2, 3})
    for (const uint64_t elems : {uint64_t(25), channels * kTile / 4 - 1, channels * kTile / 4,
                                 3 * channels * kTile / 4 + 3333, 5 * channels * kTile / 4 - 7})
      for (const int lanes : {3, 8})
        for (const int sources : {1, 2, 3, 4, 8})
          for (const Misaligned& by : misaligned)
            check_loops<T>(elems * 4 + 4 - sizeof(T), channels, lanes, sources, by);
}

}  // namespace

int main() {
  check_partitions();
  check_all_rounds();
  check_all_loops<uint8_t>();
  check_all_loops<int32_t>();
  return 0;
}
