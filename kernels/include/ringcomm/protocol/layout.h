// SPDX-License-Identifier: Apache-2.0

// The layout of a rank's region of its heap: control page, signal pad, epoch counters, header pad,
// staging slots. Every rank computes the same layout, and the rendezvous compares it.
//
// A *stream* is one kind of traffic between ranks:
//   kPair     data for one reader: a slot set per (channel, reader)
//   kShared   data that every peer reads: one slot set per channel, W-1 readers
//   kMessage  send and receive, which keep no order with the collectives: one slot set per reader
// An *item* is one publication on a stream: the header of a call, a segment, or both. Items are
// numbered by an epoch that counts from 1 for each (stream, channel, sender, reader) and never
// resets. Item e uses slot (e - 1) mod slots: its segment in the sender's region, where readers
// fetch it, and its header in the reader's region, next to the signal. docs/protocol.md has the
// table of all words.
#pragma once

#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN

enum class Stream : int32_t { kPair = 0, kShared = 1, kMessage = 2, kCount = 3 };

constexpr uint64_t kLineBytes = 64;
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kHeaderBytes = 128;
// Messages have no size that all ranks know, so they use a fixed number of channels: this many, or
// all if there are fewer. Chosen without measurements.
constexpr int32_t kMessageChannels = 8;

// The peer writes these words, and the owner of the region reads them.
struct alignas(64) SignalLine {
  uint32_t ready;     // epoch of the last item that the peer published to me
  uint32_t consumed;  // epoch of the last item of mine that the peer has read to the end
  uint32_t detached;  // 1: the peer never touches this region again (first stream and channel only)
};

// The owner of the region writes these words, and the peer reads them. 1: the owner sleeps on
// `ready` or `consumed`.
struct alignas(64) SleepLine {
  uint32_t on_ready;
  uint32_t on_consumed;
};

// Private to the owner. The words are in the heap, not in a register or a launch argument, so that
// a captured CUDA graph can be replayed.
struct alignas(64) EpochLine {
  uint32_t sent;  // epoch of the last item that I published to the peer
  uint32_t seen;  // epoch of the last item of the peer that I consumed
};

// Private to the owner, one per channel.
struct alignas(64) ChannelLine {
  uint64_t sequence;  // collectives begun on this channel
  uint32_t ll_epoch;  // LL calls begun on this channel; the flag of their packets
  uint32_t running;   // 1 while a kernel of a collective runs on this channel; CUDA only
};

static_assert(sizeof(SignalLine) == kLineBytes && sizeof(SleepLine) == kLineBytes &&
              sizeof(EpochLine) == kLineBytes && sizeof(ChannelLine) == kLineBytes);

RC_FN constexpr bool is_segment(uint32_t bytes) {
  return bytes >= kLineBytes && (bytes & (bytes - 1)) == 0;
}

struct Layout {
  int32_t world;
  int32_t channels;
  int32_t slots;               // slots per set; a power of two, so that epochs wrap around cleanly
  uint32_t segment_bytes;      // bytes of a segment; a power of two, so that no code divides by it
  uint32_t ll_bytes;           // payload of the largest LL message; a multiple of 64, 0: no LL
  uint64_t copy_engine_bytes;  // bytes staged by copy engines at a time; a multiple of 64, 0: none

  RC_FN constexpr bool same(const Layout& other) const {
    return world == other.world && channels == other.channels && slots == other.slots &&
           segment_bytes == other.segment_bytes && ll_bytes == other.ll_bytes &&
           copy_engine_bytes == other.copy_engine_bytes;
  }
  RC_FN constexpr int32_t message_channels() const {
    return channels < kMessageChannels ? channels : kMessageChannels;
  }
  RC_FN constexpr uint64_t links() const { return uint64_t(Stream::kCount) * channels * world; }
  RC_FN constexpr uint64_t link(Stream s, int channel, int peer) const {
    return (uint64_t(s) * channels + channel) * world + peer;
  }
  RC_FN constexpr uint64_t signal_offset(Stream s, int channel, int peer) const {
    return kPageBytes + link(s, channel, peer) * kLineBytes;
  }
  RC_FN constexpr uint64_t sleep_offset(Stream s, int channel, int peer) const {
    return kPageBytes + (links() + link(s, channel, peer)) * kLineBytes;
  }
  RC_FN constexpr uint64_t epoch_offset(Stream s, int channel, int peer) const {
    return kPageBytes + (2 * links() + link(s, channel, peer)) * kLineBytes;
  }
  RC_FN constexpr uint64_t channel_offset(int channel) const {
    return kPageBytes + (3 * links() + channel) * kLineBytes;
  }
  // Returns the offset of the header of an item from `peer`; each slot of (stream, channel, peer)
  // has a header. It is near the signals, so that both are in one page in a small world.
  RC_FN constexpr uint64_t header_offset(Stream s, int channel, int peer, uint32_t slot) const {
    const uint64_t lines = (3 * links() + channels + 1) / 2 * 2;
    return kPageBytes + lines * kLineBytes + (link(s, channel, peer) * slots + slot) * kHeaderBytes;
  }
  RC_FN constexpr uint64_t whole_pages(uint64_t bytes) const {
    return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  // An LL message of n payload bytes takes 2n bytes, after the headers of all channels.
  RC_FN constexpr uint64_t ll_set_bytes() const {
    return ll_bytes == 0 ? 0 : 2 * (uint64_t(ll_bytes) + channels * kHeaderBytes);
  }
  RC_FN constexpr uint64_t ll_offset(uint32_t parity, int sender) const {
    return whole_pages(header_offset(Stream::kCount, 0, 0, 0)) +
           (uint64_t(parity) * world + sender) * ll_set_bytes();
  }

  // Return offsets in a set: of a channel's header, and of the payload from `begin_bytes` on.
  RC_FN constexpr uint64_t ll_header_offset(int channel) const {
    return 2 * channel * kHeaderBytes;
  }
  RC_FN constexpr uint64_t ll_payload_offset(uint64_t begin_bytes) const {
    return 2 * (channels * kHeaderBytes + begin_bytes);
  }

  // Returns the former item in the slot of item `epoch`: the sender waits until the reader has
  // acknowledged it. Triton's counterpart is await_slot (kernels/tl/endpoint.py).
  RC_FN constexpr uint32_t held_before(uint32_t epoch) const { return epoch - slots; }

  // The staging slots begin here, after all words. The words are zero when a communicator begins.
  RC_FN constexpr uint64_t staging_offset() const { return whole_pages(ll_offset(2, 0)); }
  // Pair sets (channels x world), shared sets (channels), message sets (message channels x world).
  RC_FN constexpr uint64_t slot_offset(Stream s, int channel, int peer, uint32_t slot) const {
    const uint64_t pairs = uint64_t(channels) * world;
    uint64_t set = uint64_t(channel) * world + peer;
    if (s == Stream::kShared) set = pairs + channel;
    if (s == Stream::kMessage) set += pairs + channels;
    return staging_offset() + (set * slots + slot) * segment_bytes;
  }
  RC_FN constexpr uint64_t copy_engine_offset() const {
    const uint64_t sets = uint64_t(channels) * (world + 1) + uint64_t(message_channels()) * world;
    return whole_pages(staging_offset() + sets * slots * segment_bytes);
  }
  RC_FN constexpr uint64_t region_bytes() const {
    return whole_pages(copy_engine_offset() + copy_engine_bytes);
  }
};

RINGCOMM_NAMESPACE_END
