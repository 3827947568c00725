// SPDX-License-Identifier: Apache-2.0

// All-reduce, reduce-scatter and all-gather by LL, for small messages. Their flag travels with the
// data, so that one transfer carries both, without a fence between them (NCCL's LL protocol).
//
// An LL packet is 8 bytes of payload and two copies of its flag (atomics.h). B bytes, W ranks, one
// hop: all-gather and reduce-scatter send 2(W-1)/W * B bytes per rank, all-reduce 2(W-1) * B. In
// all-reduce, every rank sends its whole buffer and reduces all of them in rank order with one
// rounding, so the bits are those of `one_shot`.
//
// In every LL call, every rank sends to and receives from every peer. So two sets of buffers, used
// alternately, are enough: I write call e+2 over call e only after I have received the peer's
// packets of call e+1, and the peer sent these after it had read my packets of call e. The flag is
// the call's number, counted per channel. All LL calls of a communicator use the same channels, so
// the flags at an address only grow. Both sets are cleared long before flags repeat. (The accesses
// are relaxed: kernel boundaries order e's reads before e+1's stores, and those of e+1 before
// e+2's.)
#pragma once

#include "ringcomm/protocol/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN

// The first packets of each channel carry the sender's header, 8 bytes each; the next packet
// carries a hash of all of the header except the factor. A reader waits for the factor and the
// hash, and for the whole header only if the hash differs from its own.
constexpr int kFactorPacket = int(sizeof(CallId) / 8) + 3;
constexpr int kHeaderPackets = kFactorPacket + 1;
constexpr int kHashPacket = kHeaderPackets;
static_assert((kHashPacket + 1) * 8 <= int(kHeaderBytes));
#if RC_HAS_OFFSETOF
static_assert(offsetof(CallHeader, factor) == kFactorPacket * 8 &&
              offsetof(CallHeader, result_offset) == kHeaderPackets * 8);
#endif

// Two calls have the same hash with probability 2^-64. Each step can be undone, so a change of a
// single word always changes the hash. The hash guards against mistakes, not against malice.
RC_FN constexpr uint64_t hash_of(const uint64_t* header) {
  uint64_t hash = 0;
  RC_UNROLL
  for (int i = 0; i < kHeaderPackets; ++i) {
    if (i == kFactorPacket) continue;
    hash = (hash ^ header[i]) * 0x9e3779b97f4a7c15;  // 2^64 / golden ratio, an odd number
    hash ^= hash >> 32;
  }
  return hash;
}

// Flags repeat after 2^32 calls; each set of buffers is cleared once per this many calls.
constexpr uint32_t kCallsPerClearing = 1u << 24;

// Returns the flag of the call after the call with flag `last`: even and odd alternately, like the
// sets. 0 is the flag of cleared memory, so no call has it; 1 is skipped, to keep the alternation.
RC_FN constexpr uint32_t next_flag(uint32_t last) { return last + 1 == 0 ? 2 : last + 1; }

// True if the call clears the set that it does not use. Two consecutive calls do so, and thus clear
// both sets. The last two calls before flags repeat are such calls.
RC_FN constexpr bool clears_other_set(uint32_t flag) {
  return flag % kCallsPerClearing >= kCallsPerClearing - 2;
}

// Packets, one per rank, whose loads overlap.
constexpr int kPacketBatch = 8;

struct LLCall {
  uint32_t flag;
  Extent extent;  // this channel's payload in the message
};

// Loads up to 8 bytes of payload from `from`, where `bytes` bytes are left.
RC_TEAM_FN uint64_t load_payload(const char* from, uint64_t bytes) {
  if (bytes >= 8 && (reinterpret_cast<uintptr_t>(from) & 7) == 0)
    return *reinterpret_cast<const uint64_t*>(from);
  uint64_t word = 0;
  RC_ROLLED
  for (int i = 0; i < 8 && uint64_t(i) < bytes; ++i)
    word |= uint64_t(static_cast<unsigned char>(from[i])) << (8 * i);
  return word;
}

RC_TEAM_FN void store_payload(char* to, uint64_t word, uint64_t bytes) {
  if (bytes >= 8 && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint64_t*>(to) = word;
    return;
  }
  RC_ROLLED
  for (int i = 0; i < 8 && uint64_t(i) < bytes; ++i) to[i] = char(word >> (8 * i));
}

// model: packet_arrived (tests/proof/model/ll.pml)
RC_TEAM_FN bool packet_arrived(const LLPacket& p, uint32_t flag) {
  return p.first_flag == flag && p.second_flag == flag;
}
RC_TEAM_FN uint64_t payload_of(const LLPacket& p) { return uint64_t(p.second) << 32 | p.first; }

// Returns the address at byte `offset` of the packets that `reader` receives from `sender` in a
// call.
template <class E>
RC_TEAM_FN LLPacket* packets_at(const E& e, const LLCall& call, int sender, int reader,
                                uint64_t offset) {
  char* const set = e.v.regions[reader] + e.v.layout.ll_offset(call.flag & 1, sender);
  return reinterpret_cast<LLPacket*>(set + offset);
}

// Returns the packets of this channel's header. The headers of all channels come first: ranks that
// disagree on the size of the message still find the headers at the same addresses.
template <class E>
RC_TEAM_FN LLPacket* header_packets(const E& e, const LLCall& call, int sender, int reader) {
  const uint64_t offset = e.v.layout.ll_header_offset(e.team.channel());
  return packets_at(e, call, sender, reader, offset);
}

// Returns the packets of this channel's payload.
template <class E>
RC_TEAM_FN LLPacket* payload_packets(const E& e, const LLCall& call, int sender, int reader) {
  const uint64_t offset = e.v.layout.ll_payload_offset(call.extent.begin_bytes);
  return packets_at(e, call, sender, reader, offset);
}

// Waits until the packet has arrived; called by one lane.
// model: await_packet_slowly (tests/proof/model/ll.pml)
template <class Team>
RC_COLD Status await_packet_slowly(Team team, const View& v, const LLPacket* packet, uint32_t flag,
                                   int sender) {
  Pause pause{&packet->first_flag, 0, nullptr, 0};
  uint64_t started = 0;
  for (;; ++pause.polls) {
    const LLPacket seen = load_ll_packet_sys(packet);
    if (packet_arrived(seen, flag)) return Status::kOk;
    pause.seen = seen.first_flag;
    if (!team.pause(pause)) continue;
    const uint64_t now = team.now_ns();
    if (started == 0) started = now;
    Status status = reason_to_give_up(team, v, sender, now - started);
    const CallHeader* theirs = nullptr;
    if (status != Status::kAborted && status != Status::kInterrupted) {
      theirs = other_call_seen(v, team.channel(), sender);
      if (theirs != nullptr) status = Status::kMismatch;
    }
    if (status == Status::kOk) continue;
    if (status != Status::kAborted && packet_arrived(load_ll_packet_sys(packet), flag))
      return Status::kOk;
    return give_up(team, v, Site{Stream::kPair, sender, false, 0}, status, flag, pause.seen,
                   now - started, theirs);
  }
}

// Reports that a peer's header differs from mine; called by one lane. Waits for the whole header.
template <class Team>
RC_COLD Status ll_mismatch(Team team, const View& v, const LLPacket* header, uint32_t flag,
                           int sender) {
  for (int i = 0; i < kHeaderPackets; ++i) {
    const Status status = await_packet_slowly(team, v, header + i, flag, sender);
    if (status != Status::kOk) return status;
  }
  Fault* record = claim_fault(v);
  if (record == nullptr) return Status::kMismatch;
  fill_fault(record, v, Status::kMismatch, sender);
  for (int i = 0; i < kHeaderPackets; ++i)
    reinterpret_cast<uint64_t*>(&record->theirs)[i] = payload_of(load_ll_packet_sys(header + i));
  raise_fault(team, v);
  return Status::kMismatch;
}

// Advances the count of LL calls; all lanes return the new call.
// model: begin_ll (tests/proof/model/ll.pml)
template <class E>
RC_TEAM_FN LLCall begin_ll(E& e, uint64_t message_bytes) {
  ChannelLine* line = e.v.channel_line(e.team.channel());
  const LLCall call{next_flag(e.v.ll_epoch), extent_of(message_bytes, e.team.portion())};
  if (e.team.lane() == 0) line->ll_epoch = call.flag;
  if (!clears_other_set(call.flag)) return call;
  // The other set holds the previous call, which is over. Peers write into this set again only
  // after they have received the packets that I send below.
  const uint64_t bytes = e.v.layout.ll_set_bytes() * e.world();
  char* base = e.v.regions[e.rank()] + e.v.layout.ll_offset((call.flag + 1) & 1, 0);
  const Extent mine = extent_of(bytes, e.team.portion());
  for (uint64_t at = mine.begin_bytes + uint64_t(e.team.lane()) * sizeof(LLPacket);
       at < mine.end_bytes; at += uint64_t(e.team.num_lanes()) * sizeof(LLPacket))
    store_ll_packet_sys(reinterpret_cast<LLPacket*>(base + at), 0, 0, 0);
  // Every lane fences between the packets that all lanes cleared and the packets that it sends.
  e.team.sync();
  fence_acq_rel_sys();
  return call;
}

template <class E>
RC_TEAM_FN void send_headers(E& e, const LLCall& call) {
  const auto* words = reinterpret_cast<const uint64_t*>(e.v.mine);
  const int packets = kHeaderPackets + 1, count = (e.world() - 1) * packets;
  const uint64_t hash = hash_of(words);
  for (int i = e.team.lane(); i < count; i += e.team.num_lanes()) {
    const int reader = e.peer_at(1 + i / packets), at = i % packets;
    const uint64_t word = at == kHashPacket ? hash : words[at];
    store_ll_packet_sys(header_packets(e, call, e.rank(), reader) + at, uint32_t(word),
                        uint32_t(word >> 32), call.flag);
  }
}

// Takes 8 bytes of payload from `sender`, whose packet was loaded as `seen`; called by one lane.
// model: take_payload (tests/proof/model/ll.pml)
template <class E>
RC_TEAM_FN Status take_payload(E& e, const LLCall& call, const LLPacket* from, LLPacket seen,
                               int sender, uint64_t* word) {
  if (!packet_arrived(seen, call.flag)) {
    RC_RETURN_IF_FAILED(await_packet_slowly(e.team, e.v, from, call.flag, sender));
    seen = load_ll_packet_sys(from);
  }
  *word = payload_of(seen);
  return Status::kOk;
}

// Waits for the peers' hashes and factors; compares the hashes with mine and fills factors().
template <class E>
RC_TEAM_FN Status check_headers(E& e, const LLCall& call) {
  const int count = (e.world() - 1) * 2;
  const uint64_t hash = hash_of(reinterpret_cast<const uint64_t*>(e.v.mine));
  Status status = Status::kOk;
  if (e.team.lane() == 0) e.factors()[e.rank()] = e.factor();
  for (int i = e.team.lane(); i < count && status == Status::kOk; i += e.team.num_lanes()) {
    const int sender = e.peer_at(1 + i / 2), at = i % 2 == 0 ? kHashPacket : kFactorPacket;
    const LLPacket* header = header_packets(e, call, sender, e.rank());
    uint64_t theirs = 0;
    status = take_payload(e, call, header + at, load_ll_packet_sys(header + at), sender, &theirs);
    if (status != Status::kOk) break;
    if (at == kFactorPacket)
      reinterpret_cast<uint64_t*>(e.factors())[sender] = theirs;
    else if (theirs != hash)
      status = ll_mismatch(e.team, e.v, header, call.flag, sender);
  }
  return e.team.share(status);
}

// Sends this channel's slice of my payload at `from` to one reader.
// model: send_payload (tests/proof/model/ll.pml)
template <class E>
RC_TEAM_FN void send_payload(E& e, const LLCall& call, const char* from, int reader) {
  LLPacket* to = payload_packets(e, call, e.rank(), reader);
  const uint64_t bytes = call.extent.end_bytes - call.extent.begin_bytes;
  for (uint64_t at = uint64_t(e.team.lane()) * 8; at < bytes;
       at += uint64_t(e.team.num_lanes()) * 8) {
    const uint64_t word = load_payload(from + call.extent.begin_bytes + at, bytes - at);
    store_ll_packet_sys(to + at / 8, uint32_t(word), uint32_t(word >> 32), call.flag);
  }
}

// Reduces 8 bytes at a time: each peer's packet at the same offset, and my own bytes from `own`.
template <class E>
RC_TEAM_FN Status reduce_ll(E& e, const LLCall& call, const char* own, char* out) {
  const uint64_t bytes = call.extent.end_bytes - call.extent.begin_bytes;
  // Rank p's packets are p sets after rank 0's.
  const char* const inbox = reinterpret_cast<const char*>(payload_packets(e, call, 0, e.rank()));
  const uint64_t set_bytes = e.v.layout.ll_set_bytes();
  Status status = Status::kOk;
  for (uint64_t at = uint64_t(e.team.lane()) * 8; at < bytes && status == Status::kOk;
       at += uint64_t(e.team.num_lanes()) * 8) {
    typename E::Operations::WordSum sum;
    const char* const from = inbox + 2 * at;
    const uint64_t mine = load_payload(own + call.extent.begin_bytes + at, bytes - at);
    for (int first = 0; first < e.world() && status == Status::kOk; first += kPacketBatch) {
      LLPacket seen[kPacketBatch];
      RC_UNROLL
      for (int k = 0; k < kPacketBatch; ++k) {
        const int p = first + k;
        if (p < e.world() && p != e.rank())
          seen[k] = load_ll_packet_sys(reinterpret_cast<const LLPacket*>(from + p * set_bytes));
      }
      RC_UNROLL
      for (int k = 0; k < kPacketBatch; ++k) {
        const int p = first + k;
        if (p >= e.world() || status != Status::kOk) continue;
        uint64_t word = mine;
        if (p != e.rank())
          status = take_payload(e, call, reinterpret_cast<const LLPacket*>(from + p * set_bytes),
                                seen[k], p, &word);
        sum.add(word, e.ops.scales() ? e.factors()[p] : 1.0, e.ops, p == 0);
      }
    }
    if (status == Status::kOk)
      store_payload(out + call.extent.begin_bytes + at, sum.result(e.ops, e.world()), bytes - at);
  }
  return e.team.share(status);
}

template <class E>
RC_TEAM_FN Status all_reduce_ll(E& e, const char* in, char* out, uint64_t bytes) {
  const LLCall call = begin_ll(e, bytes);
  send_headers(e, call);
  for (int d = 1; d < e.world(); ++d) send_payload(e, call, in, e.peer_at(d));
  RC_RETURN_IF_FAILED(check_headers(e, call));
  return reduce_ll(e, call, in, out);
}

// in: W chunks of chunk_bytes; out: my chunk.
template <class E>
RC_TEAM_FN Status reduce_scatter_ll(E& e, const char* in, char* out, uint64_t chunk_bytes) {
  const LLCall call = begin_ll(e, chunk_bytes);
  send_headers(e, call);
  for (int d = 1; d < e.world(); ++d)
    send_payload(e, call, in + e.peer_at(d) * chunk_bytes, e.peer_at(d));
  RC_RETURN_IF_FAILED(check_headers(e, call));
  return reduce_ll(e, call, in + e.rank() * chunk_bytes, out);
}

// in: my chunk; out: W chunks of chunk_bytes.
template <class E>
RC_TEAM_FN Status all_gather_ll(E& e, const char* in, char* out, uint64_t chunk_bytes) {
  const LLCall call = begin_ll(e, chunk_bytes);
  const uint64_t bytes = call.extent.end_bytes - call.extent.begin_bytes;
  send_headers(e, call);
  for (int d = 1; d < e.world(); ++d) send_payload(e, call, in, e.peer_at(d));
  RC_RETURN_IF_FAILED(check_headers(e, call));
  const Span mine{const_cast<char*>(in) + call.extent.begin_bytes, bytes};
  char* const own = out + e.rank() * chunk_bytes + call.extent.begin_bytes;
  if (own != mine.ptr) e.ops.copy_private(e.team, own, mine.ptr, bytes);
  Status status = Status::kOk;
  for (int d = 1; d < e.world(); ++d) {
    const int p = e.peer_at(d);
    const LLPacket* from = payload_packets(e, call, p, e.rank());
    char* const to = out + p * chunk_bytes + call.extent.begin_bytes;
    for (uint64_t at = uint64_t(e.team.lane()) * 8; at < bytes && status == Status::kOk;
         at += uint64_t(e.team.num_lanes()) * 8) {
      uint64_t word = 0;
      status = take_payload(e, call, from + at / 8, load_ll_packet_sys(from + at / 8), p, &word);
      if (status == Status::kOk) store_payload(to + at, word, bytes - at);
    }
  }
  return e.team.share(status);
}

RINGCOMM_NAMESPACE_END
