// SPDX-License-Identifier: Apache-2.0

// The plain data that a collective works on: addresses only, passed by value to a kernel. Their
// owner is kernels/host/comm.h, or its CUDA counterpart.
#pragma once

#include "ringcomm/core/atomics.h"
#include "ringcomm/protocol/call.h"

RINGCOMM_NAMESPACE_BEGIN

// Per-peer state of the call in progress, in memory that all lanes of the team share.
struct PeerState {
  // The peer's data: an address in its heap as mapped here, or in its process if in_process is
  // true. Null: the data come in slots.
  const char* data;
  int item_shift;  // an item carries 2^item_shift bytes, the last maybe fewer
  uint32_t base;   // epoch before the first item of this call
  uint32_t items;  // items of this call; known once the header is read
  uint32_t acked;  // items of this call that I have acknowledged
  uint32_t sent;   // epoch of my last item for the peer before this call
  // The peer's words when the call began: its last item for me, and my last item that it had read
  // to the end.
  uint32_t ready, consumed;
  bool in_process;
};

// Loads the state of a peer on one stream and channel when a call begins. No load depends on
// another load, so all take one trip to memory.
RC_TEAM_FN PeerState find_link(const char* region, const Layout& layout, Stream s, int channel,
                               int peer) {
  const auto* epochs =
      reinterpret_cast<const EpochLine*>(region + layout.epoch_offset(s, channel, peer));
  const auto* line =
      reinterpret_cast<const SignalLine*>(region + layout.signal_offset(s, channel, peer));
  PeerState found{};
  // Relaxed: a send and a receive of a rank may run at once, and each changes its own word.
  found.base = load_relaxed_sys(&epochs->seen);
  found.sent = load_relaxed_sys(&epochs->sent);
  // Only a hint that an item may have arrived.
  found.ready = load_relaxed_sys(&line->ready);
  // Pairs with the release in acknowledge() of the peer. It is the last load, since later accesses
  // wait for it.
  found.consumed = load_acquire_sys(&line->consumed);
  return found;
}

struct View {
  int32_t rank, world;
  Layout layout;
  char* const* regions;        // [world] every rank's region, as mapped here
  char* const* heaps;          // [world] every rank's heap, as mapped here
  const uint64_t* heap_bytes;  // [world] the size of every rank's heap
  uint64_t timeout_ns;         // the time limit of one wait
  // Workspace of one channel, shared by the lanes of its team; in shared memory on CUDA.
  PeerState* in;         // [streams][world] the state of each peer
  const void** sources;  // [world, at least 2] addresses of the ranks' data
  double* factors;       // [world, at least 2] the ranks' factors
  CallHeader* mine;      // the call in progress, for its fault record
  // The ring of this channel's team: ring[position] is a rank. Null: the ranks in order.
  const int32_t* ring = nullptr;
  int32_t ring_position = 0;
  // [world] addresses of my results in the peers' heaps, for collectives that store there.
  char** results = nullptr;
  uint32_t ll_epoch = 0;  // the channel line's ll_epoch when the call began; LL only

  RC_FN int ring_rank(int position) const { return ring == nullptr ? position : ring[position]; }
  RC_FN int position_in_ring() const { return ring == nullptr ? rank : ring_position; }

  RC_FN SignalLine* signals(int owner, Stream s, int channel, int peer) const {
    return reinterpret_cast<SignalLine*>(regions[owner] + layout.signal_offset(s, channel, peer));
  }
  RC_FN SleepLine* sleepers(int owner, Stream s, int channel, int peer) const {
    return reinterpret_cast<SleepLine*>(regions[owner] + layout.sleep_offset(s, channel, peer));
  }
  RC_FN EpochLine* epochs(Stream s, int channel, int peer) const {
    return reinterpret_cast<EpochLine*>(regions[rank] + layout.epoch_offset(s, channel, peer));
  }
  RC_FN ChannelLine* channel_line(int channel) const {
    return reinterpret_cast<ChannelLine*>(regions[rank] + layout.channel_offset(channel));
  }
  RC_FN ControlPage* control(int owner) const {
    return reinterpret_cast<ControlPage*>(regions[owner]);
  }

  // Returns the header of item `epoch` that `sender` publishes to `reader`.
  RC_FN CallHeader* header(int reader, Stream s, int channel, int sender, uint32_t epoch) const {
    return reinterpret_cast<CallHeader*>(
        regions[reader] +
        layout.header_offset(s, channel, sender, (epoch - 1) & (layout.slots - 1)));
  }
  // Returns the slot of item `epoch` that `sender` publishes to `reader`.
  RC_FN char* slot(int sender, Stream s, int channel, int reader, uint32_t epoch) const {
    return regions[sender] +
           layout.slot_offset(s, channel, reader, (epoch - 1) & (layout.slots - 1));
  }
  RC_FN bool in_my_heap(const void* ptr, uint64_t bytes) const {
    return in_heap_of(rank, uint64_t(static_cast<const char*>(ptr) - heaps[rank]), bytes);
  }
  // An untrusted offset may be any number, so an addition to it could wrap around.
  RC_FN bool in_heap_of(int owner, uint64_t offset, uint64_t bytes) const {
    return offset < heap_bytes[owner] && bytes <= heap_bytes[owner] - offset;
  }
};

RINGCOMM_NAMESPACE_END
