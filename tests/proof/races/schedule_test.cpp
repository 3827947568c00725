// SPDX-License-Identifier: Apache-2.0

// The ring schedules and the chunk arithmetic, proved at compile time for worlds 1..16. Nothing to
// run: it compiles or it does not.
#include <initializer_list>

#include "ringcomm/core/schedule.h"
#include "ringcomm/core/team.h"
#include "ringcomm/protocol/layout.h"
#include "ringcomm/protocol/ll.h"
#include "ringcomm/protocol/signal.h"

using namespace ringcomm;

namespace {

constexpr int kMaxWorld = 16;
char buffer[1 << 17];

// The chunk that rank r sends at hop t is the chunk that its successor receives; the chunk that a
// rank receives at hop t is the chunk it sends at hop t + 1; at the last hop it receives its own
// chunk.
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

// For the positions of a ring `order`: a rank's successor receives the chunk that the rank sends,
// every chunk gets every rank's addend on its way to its owner, and every rank gets every chunk.
constexpr bool ring_visits_all(const int* order, int world) {
  for (int i = 0; i < world; ++i) {
    unsigned added = 0, gathered = 0;
    for (int t = 0; t < world; ++t) {
      // Finds the rank that reduces the chunk of the rank at i at hop t.
      for (int at = 0; at < world; ++at) {
        if (order[ring_reduce_chunk(at, t, world)] != order[i]) continue;
        if ((added >> order[at]) & 1) return false;
        added |= 1u << order[at];
        if (t == world - 1 && at != i) return false;
        const int next = ring_next(at, world);
        if (t + 1 < world && order[ring_reduce_chunk(next, t + 1, world)] != order[i]) return false;
      }
      gathered |= 1u << order[ring_gather_chunk(i, t, world)];
    }
    const unsigned all = (1u << world) - 1;
    if (added != all || gathered != all) return false;
  }
  return true;
}

// Checks every order of the ranks, and for larger worlds every rotation of the order in strides.
constexpr bool any_ring_visits_all() {
  for (int world = 1; world <= 6; ++world) {
    int order[6] = {}, count = 1;
    for (int i = 2; i <= world; ++i) count *= i;
    for (int number = 0; number < count; ++number) {
      // The number's digits in the factorial base select from the remaining ranks.
      int left[6] = {0, 1, 2, 3, 4, 5}, rest = number;
      for (int i = 0; i < world; ++i) {
        const int choice = rest % (world - i);
        rest /= world - i;
        order[i] = left[choice];
        for (int k = choice; k + 1 < world; ++k) left[k] = left[k + 1];
      }
      if (!ring_visits_all(order, world)) return false;
    }
  }
  constexpr int strides[] = {1, 3, 5, 7, 9, 11, 13, 15};
  for (const int stride : strides) {
    int order[kMaxWorld] = {};
    for (int i = 0; i < kMaxWorld; ++i) order[i] = (i * stride + stride) % kMaxWorld;
    if (!ring_visits_all(order, kMaxWorld)) return false;
  }
  return true;
}

// At every distance the ranks visit a permutation of peers: no two ranks visit the same peer at
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

// If a buffer is cut into chunks of 0 bytes, each chunk is the whole buffer.
constexpr bool chunks_repeat() {
  for (const uint64_t total : {0ull, 1ull, 65537ull}) {
    const Chunks chunks{buffer, total, 0, nullptr};
    for (const int r : {0, 1, kMaxWorld - 1})
      if (chunks.get(r).ptr != buffer || chunks.get(r).bytes != total) return false;
  }
  return true;
}

constexpr bool portions_partition() {
  for (int count = 1; count <= kMaxWorld; ++count)
    for (const uint64_t bytes :
         {0ull, 1ull, 64ull, 100ull, 1000ull, 4096ull, 4100ull, ~0ull >> 20}) {
      // Equal to within a line at either end and the fractions' last bit.
      const uint64_t fair = bytes / uint64_t(count), slack = 128 + (bytes >> 31);
      uint64_t at = 0;
      for (int p = 0; p < count; ++p) {
        const Extent e = extent_of(bytes, p, count);
        const uint64_t size = e.end_bytes - e.begin_bytes;
        if (e.begin_bytes != at || e.end_bytes < e.begin_bytes) return false;
        if (size + slack < fair || size > fair + slack) return false;
        at = e.end_bytes;
      }
      if (at != bytes) return false;
    }
  return true;
}

constexpr bool fractions_are_quotients() {
  for (const int count :
       {1, 2, 3, 7, 16, 63, 64, 96, 132, 255, 1000, kMostPortions - 1, kMostPortions})
    for (int index = 0; index <= count; ++index)
      if (fraction_of(index, count) != (uint64_t(index) << 32) / uint64_t(count)) return false;
  return true;
}

constexpr bool items_cover() {
  for (const int shift : {6, 12, kOneItem})
    for (const uint64_t bytes : {0ull, 1ull, 64ull, 65ull, 4096ull, 10000ull}) {
      const uint64_t item = uint64_t(1) << shift;
      const uint32_t items = items_of(bytes, shift);
      uint64_t sum = 0;
      for (uint32_t i = 0; i < items; ++i) sum += item_length(bytes, item, i);
      if (sum != bytes || (shift != kOneItem && item_length(bytes, item, items) != 0)) return false;
      if (items == 0) return false;  // even an empty call has an item, for its header
    }
  return true;
}

constexpr bool epochs_wrap() {
  for (const uint32_t e : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu})
    for (const uint32_t ahead : {0u, 1u, 1000u, 0x7fffffffu})
      if (!reached(e + ahead, e) || (ahead > 0 && reached(e, e + ahead))) return false;
  return true;
}

// Fields that follow each other in a region, in order: each begins at the end of the previous
// field, or at the next whole page.
struct Walk {
  uint64_t end;
  bool right = true;
  constexpr void field(uint64_t begin, uint64_t bytes, uint64_t alignment) {
    const uint64_t page = (end + kPageBytes - 1) / kPageBytes * kPageBytes;
    right &= (begin == end || begin == page) && begin % alignment == 0;
    end = begin + bytes;
  }
};

// Everything that a region holds, from the control page to its end.
constexpr bool region_is_covered(const Layout& l) {
  Walk w{kPageBytes};
  const auto lines = [&](auto offset) {
    for (int s = 0; s < int(Stream::kCount); ++s)
      for (int c = 0; c < l.channels; ++c)
        for (int p = 0; p < l.world; ++p)
          w.field((l.*offset)(Stream(s), c, p), kLineBytes, kLineBytes);
  };
  lines(&Layout::signal_offset);
  lines(&Layout::sleep_offset);
  lines(&Layout::epoch_offset);
  for (int c = 0; c < l.channels; ++c) w.field(l.channel_offset(c), kLineBytes, kLineBytes);
  w.end = (w.end + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes;
  for (int s = 0; s < int(Stream::kCount); ++s)
    for (int c = 0; c < l.channels; ++c)
      for (int p = 0; p < l.world; ++p)
        for (int slot = 0; slot < l.slots; ++slot)
          w.field(l.header_offset(Stream(s), c, p, uint32_t(slot)), kHeaderBytes, kHeaderBytes);
  for (uint32_t parity = 0; parity < 2; ++parity)
    for (int sender = 0; sender < l.world; ++sender)
      w.field(l.ll_offset(parity, sender), l.ll_set_bytes(), sizeof(LLPacket));
  const auto set = [&](Stream s, int channel, int peer) {
    for (int slot = 0; slot < l.slots; ++slot)
      w.field(l.slot_offset(s, channel, peer, uint32_t(slot)), l.segment_bytes, kLineBytes);
  };
  w.right &= l.staging_offset() >= w.end && l.staging_offset() % kPageBytes == 0;
  for (int c = 0; c < l.channels; ++c)
    for (int p = 0; p < l.world; ++p) set(Stream::kPair, c, p);
  for (int c = 0; c < l.channels; ++c) set(Stream::kShared, c, 0);
  for (int c = 0; c < l.message_channels(); ++c)
    for (int p = 0; p < l.world; ++p) set(Stream::kMessage, c, p);
  w.field(l.copy_engine_offset(), l.copy_engine_bytes, kPageBytes);
  return w.right && l.region_bytes() >= w.end && l.region_bytes() % kPageBytes == 0;
}

constexpr bool regions_are_covered() {
  for (const int world : {1, 2, 3, 8})
    for (const int channels : {1, 2, 5, 8, 9, 12})  // messages have slots on 8 channels
      for (const uint32_t ll_bytes : {0u, 64u, 448u, 4096u})
        for (const uint64_t copy_engine_bytes : {0ull, 64ull, 8192ull})
          if (!region_is_covered({world, channels, 2, 256, ll_bytes, copy_engine_bytes}))
            return false;
  return true;
}

// The packets of one sender and call in their set: first the headers of all channels, then the
// channels' parts of the payload in whole packets.
constexpr bool ll_packets_are_disjoint() {
  for (int world = 1; world <= 3; ++world)
    for (int channels = 1; channels <= 4; ++channels) {
      const Layout l{world, channels, 2, 128, 320, 0};
      for (uint64_t bytes = 1; bytes <= l.ll_bytes; ++bytes) {
        uint64_t end = 0;
        for (int c = 0; c < channels; ++c, end += 2 * kHeaderBytes)
          if (l.ll_header_offset(c) != end ||
              (kHashPacket + 1) * sizeof(LLPacket) > 2 * kHeaderBytes)
            return false;
        for (int c = 0; c < channels; ++c) {
          const Extent extent = extent_of(bytes, c, channels);
          if (extent.begin_bytes == extent.end_bytes) continue;
          const uint64_t begin = l.ll_payload_offset(extent.begin_bytes);
          if (begin < end || begin % sizeof(LLPacket) != 0) return false;
          end = begin + (extent.end_bytes - extent.begin_bytes + 7) / 8 * sizeof(LLPacket);
        }
        if (end > l.ll_set_bytes()) return false;
      }
    }
  return true;
}

// A change of any word of a header, except the factor, changes the header's hash.
constexpr bool hash_sees_every_word() {
  uint64_t words[kHeaderPackets] = {1, 4096, 0x100000002, 3, 5, 4096, 0, ~0ull, 0x3ff0000000000000};
  const uint64_t hash = hash_of(words);
  for (int i = 0; i < kHeaderPackets; ++i)
    for (int bit = 0; bit < 64; ++bit) {
      words[i] ^= uint64_t(1) << bit;
      if ((hash_of(words) == hash) != (i == kFactorPacket)) return false;
      words[i] ^= uint64_t(1) << bit;
    }
  return true;
}

// Consecutive calls use alternate sets, no call has the flag of cleared memory, and a set is
// cleared while the other is in use, at least once before any flag comes again.
constexpr bool flags_alternate() {
  for (const uint32_t first : {0u, kCallsPerClearing - 9, 0u - kCallsPerClearing - 9, 0u - 9}) {
    uint32_t flag = first, cleared[2] = {};
    for (int calls = 0; calls < 20; ++calls) {
      const uint32_t next = next_flag(flag);
      if (next == 0 || (next & 1) == (flag & 1)) return false;
      cleared[(next + 1) & 1] += clears_other_set(next);
      flag = next;
    }
    if (first != 0 && (cleared[0] != 1 || cleared[1] != 1)) return false;
  }
  return true;
}

static_assert(ring_reduce_hands_on());
static_assert(ring_reduce_visits_all());
static_assert(ring_gather_hands_on());
static_assert(any_ring_visits_all());
static_assert(rotation_spreads());
static_assert(chunks_partition());
static_assert(chunks_repeat());
static_assert(portions_partition());
static_assert(fractions_are_quotients());
static_assert(items_cover());
static_assert(epochs_wrap());
static_assert(regions_are_covered());
static_assert(ll_packets_are_disjoint());
static_assert(hash_sees_every_word());
static_assert(flags_alternate());

}  // namespace

int main() { return 0; }
