// The ring schedules and the chunk arithmetic, proved at compile time for worlds 1..16. Nothing to
// run: it compiles or it does not.
#include <initializer_list>

#include "ringcomm/layout.h"
#include "ringcomm/schedule.h"
#include "ringcomm/signal.h"
#include "ringcomm/team.h"

using namespace ringcomm;

namespace {

constexpr int kMaxWorld = 16;
char buffer[1 << 17];

// What rank r sends at step t is what its successor receives, and what a rank receives at step t is
// what it sends at step t + 1; at the last step it receives its own chunk.
constexpr bool ring_reduce_hands_on() {
  for (int world = 2; world <= kMaxWorld; ++world)
    for (int r = 0; r < world; ++r) {
      for (int t = 0; t + 1 < world; ++t) {
        const int next = ring_next(r, world);
        if (ring_prev(next, world) != r) return false;
        if (ring_reduce_chunk(r, t, world) != ring_reduce_chunk(next, t + 1, world)) return false;
      }
      if (ring_reduce_chunk(r, world - 1, world) != r) return false;
    }
  return true;
}

// Following one chunk around the ring, every rank adds to it exactly once.
constexpr bool ring_reduce_visits_all() {
  for (int world = 1; world <= kMaxWorld; ++world)
    for (int chunk = 0; chunk < world; ++chunk) {
      unsigned seen = 0;
      for (int r = 0; r < world; ++r)
        for (int t = 0; t < world; ++t)
          if (ring_reduce_chunk(r, t, world) == chunk) {
            if (seen & (1u << r)) return false;
            seen |= 1u << r;
          }
      if (seen != (1u << world) - 1) return false;
    }
  return true;
}

constexpr bool ring_gather_hands_on() {
  for (int world = 2; world <= kMaxWorld; ++world)
    for (int r = 0; r < world; ++r) {
      if (ring_gather_chunk(r, 0, world) != r) return false;
      unsigned seen = 0;
      for (int t = 0; t < world; ++t) {
        if (t > 0 &&
            ring_gather_chunk(r, t, world) != ring_gather_chunk(ring_prev(r, world), t - 1, world))
          return false;
        seen |= 1u << ring_gather_chunk(r, t, world);
      }
      if (seen != (1u << world) - 1) return false;
    }
  return true;
}

// At every distance, the peers that the ranks visit are a permutation: nobody is visited twice at
// once.
constexpr bool rotation_spreads() {
  for (int world = 1; world <= kMaxWorld; ++world)
    for (int d = 1; d < world; ++d) {
      unsigned seen = 0;
      for (int r = 0; r < world; ++r) {
        if (rotated_peer(r, d, world) == r) return false;
        seen |= 1u << rotated_peer(r, d, world);
      }
      if (seen != (1u << world) - 1) return false;
    }
  return true;
}

// The chunks of a buffer cover it without gap or overlap, none exceeds chunk 0, and all but the
// tail are whole lines.
constexpr bool chunks_partition() {
  for (int world = 1; world <= kMaxWorld; ++world)
    for (const uint64_t total :
         {0ull, 1ull, 63ull, 64ull, 65ull, 1000ull, 4096ull, 5000ull, 65537ull}) {
      const Chunks chunks{buffer, total, balanced_chunk_bytes(total, world), nullptr};
      uint64_t at = 0;
      for (int r = 0; r < world; ++r) {
        const Span s = chunks.get(r);
        if (s.bytes > 0 && chunks.chunk_bytes * uint64_t(r) != at) return false;
        if (s.bytes > chunks.get(0).bytes) return false;
        if (at + s.bytes < total && s.bytes % 64 != 0) return false;
        at += s.bytes;
      }
      if (at != total) return false;
    }
  return true;
}

constexpr bool parts_partition() {
  for (int parts = 1; parts <= kMaxWorld; ++parts)
    for (const uint64_t bytes : {0ull, 1ull, 64ull, 100ull, 1000ull, 4096ull, 4100ull}) {
      uint64_t at = 0;
      for (int p = 0; p < parts; ++p) {
        const Extent e = part_of(bytes, p, parts);
        if (e.begin_bytes != at || e.end_bytes < e.begin_bytes) return false;
        at = e.end_bytes;
      }
      if (at != bytes) return false;
    }
  return true;
}

constexpr bool items_cover() {
  for (const uint64_t item : {64ull, 4096ull})
    for (const uint64_t bytes : {0ull, 1ull, 64ull, 65ull, 4096ull, 10000ull}) {
      uint64_t sum = 0;
      for (uint32_t i = 0; i < items_of(bytes, item); ++i) sum += item_length(bytes, item, i);
      if (sum != bytes || item_length(bytes, item, items_of(bytes, item)) != 0) return false;
      if (items_of(bytes, item) == 0) return false;  // even nothing travels with a header
    }
  return true;
}

constexpr bool epochs_wrap() {
  for (const uint32_t e : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu})
    for (const uint32_t ahead : {0u, 1u, 1000u, 0x7fffffffu})
      if (!reached(e + ahead, e) || (ahead > 0 && reached(e, e + ahead))) return false;
  return true;
}

// No two of a region's parts overlap, for one and for several channels.
constexpr bool layout_is_disjoint() {
  for (int world = 1; world <= 4; ++world)
    for (int channels = 1; channels <= 2; ++channels) {
      const Layout l{world, channels, 4, 128};
      uint64_t end = kPageBytes;
      for (int s = 0; s < int(Stream::kCount); ++s)
        for (int c = 0; c < channels; ++c)
          for (int p = 0; p < world; ++p) {
            if (l.signal_offset(Stream(s), c, p) != end) return false;
            end += kLineBytes;
          }
      if (l.sleep_offset(Stream::kPair, 0, 0) != end) return false;
      if (l.epoch_offset(Stream::kPair, 0, 0) != end + l.links() * kLineBytes) return false;
      uint64_t slot = l.staging_offset();
      if (slot < end + 2 * l.links() * kLineBytes) return false;
      const uint64_t set = 4 * l.slot_bytes();
      for (int c = 0; c < channels; ++c)
        for (int p = 0; p < world; ++p, slot += set)
          if (l.slot_offset(Stream::kPair, c, p, 0) != slot) return false;
      for (int c = 0; c < channels; ++c, slot += set)
        if (l.slot_offset(Stream::kShared, c, 0, 0) != slot) return false;
      for (int p = 0; p < world; ++p, slot += set)
        if (l.slot_offset(Stream::kMessage, 0, p, 0) != slot) return false;
      if (l.region_bytes() < slot) return false;
    }
  return true;
}

static_assert(ring_reduce_hands_on());
static_assert(ring_reduce_visits_all());
static_assert(ring_gather_hands_on());
static_assert(rotation_spreads());
static_assert(chunks_partition());
static_assert(parts_partition());
static_assert(items_cover());
static_assert(epochs_wrap());
static_assert(layout_is_disjoint());

}  // namespace

int main() { return 0; }
