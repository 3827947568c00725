// SPDX-License-Identifier: Apache-2.0

// All-reduce, reduce-scatter and all-gather by LL: small messages whose flag travels with the data,
// so that one trip carries both and no fence separates them (NCCL's LL protocol).
//
// An LL packet is 8 bytes of payload and two copies of its flag (atomics.h). B bytes, W ranks, one
// hop: all-gather and reduce-scatter send 2(W-1)/W * B bytes per rank, all-reduce 2(W-1) * B (every
// rank sends its whole buffer and reduces all buffers, in rank order with one rounding: the bits of
// `one_shot`).
//
// In every LL call every rank sends to and receives from every peer, so two alternating sets of
// buffers suffice. I overwrite call e with call e+2 only after I have received the peer's packets
// of call e+1, which it sent after it had read mine of call e. The flag is the number of the call,
// counted per channel; all LL calls of a communicator use the same number of channels, so that the
// flags at an address always grow. Long before the count wraps around, both sets are cleared. (The
// accesses are relaxed. The end of a kernel and the start of the next order e's reads before e+1's
// stores, and e+1's reads before e+2's stores.)
#pragma once

#include "ringcomm/protocol/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN

// The first packets of each channel carry the sender's header, 8 bytes each, and the next packet a
// hash of all words but the factor. A reader waits for hash and factor, and for the other words
// only if the hash differs from its own. LL packets carry the results themselves, so the header
// contains no address of a result.
constexpr int kFactorPacket = int(sizeof(CallId) / 8) + 3;
constexpr int kHeaderPackets = kFactorPacket + 1;
constexpr int kHashPacket = kHeaderPackets;
static_assert((kHashPacket + 1) * 8 <= int(kHeaderBytes));
#if RC_HAS_OFFSETOF
static_assert(offsetof(CallHeader, factor) == kFactorPacket * 8 &&
              offsetof(CallHeader, result_offset) == kHeaderPackets * 8);
#endif

// Different calls have equal hashes with a chance of 2^-64. Each step is reversible, so a change of
// one word always shows. The hash guards against mistakes, not against a peer that lies.
RC_FN constexpr uint64_t hash_of(const uint64_t* header) {
  uint64_t hash = 0;
  RC_UNROLL
  for (int i = 0; i < kHeaderPackets; ++i) {
    if (i == kFactorPacket) continue;
    hash = (hash ^ header[i]) * 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio, made odd
    hash ^= hash >> 32;
  }
  return hash;
}

// Flags repeat after 2^32 calls. Once in this many calls each set of buffers is cleared.
constexpr uint32_t kCallsPerClearing = 1u << 24;

// Returns the flag of the call after the call with flag `last`: flags are even and odd in turn,
// like the two sets. No call has flag 0, the flag of memory that was cleared or never written;
// skipping 1 as well keeps the alternation.
RC_FN constexpr uint32_t next_flag(uint32_t last) { return last + 1 == 0 ? 2 : last + 1; }

// True for the last two of every kCallsPerClearing calls; each of the two clears the other call's
// set. They include the last two calls before the count wraps around.
RC_FN constexpr bool clears_other_set(uint32_t flag) {
  return flag % kCallsPerClearing >= kCallsPerClearing - 2;
}

// The number of ranks whose words or packets a lane loads side by side.
constexpr int kPacketBatch = 8;

// Returns a bit for each existing rank of [first, first + kPacketBatch).
RC_FN constexpr uint32_t ranks_in_batch(int first, int world) {
  return (1u << (world - first < kPacketBatch ? world - first : kPacketBatch)) - 1;
}
// Returns a bit for each rank of ranks_in_batch(first, world) except `rank`.
RC_FN constexpr uint32_t peers_in_batch(int first, int world, int rank) {
  const uint32_t at = uint32_t(rank - first);
  return ranks_in_batch(first, world) ^ (at < kPacketBatch ? 1u << at : 0);
}

struct LLCall {
  uint32_t flag;
  uint64_t sets;  // offset of this call's packet sets in a region
  uint64_t hash;  // hash of my header
};

// The buffers of a call, as one lane sees them: the bytes for rank p are at in + p * stride. The
// lane moves 8 bytes of its channel's payload at `at`, and every `step` bytes further on before
// `end`; offsets count bytes of the message.
struct LLLane {
  const char* in;
  uint32_t stride;  // bytes between two ranks' data at `in`; 0: all ranks get the same bytes
  const char* own;  // the bytes that this rank keeps for itself
  uint32_t at, step, end;
};

// The words that a lane loads before it knows the number of its call.
struct FirstWords {
  uint64_t own;
  uint64_t sent[kPacketBatch];  // payload words for the first ranks
  bool has_sent;                // false: they are not whole words, and are loaded when sent
};

RC_FN bool is_whole(const char* at, uint32_t stride, uint32_t bytes) {
  return bytes >= 8 && ((uint32_t(reinterpret_cast<uintptr_t>(at)) | stride) & 7) == 0;
}

// Loads a word of payload at `from`, where only `bytes` of its 8 bytes exist.
RC_COLD uint64_t load_payload(const char* from, uint32_t bytes) {
  if (is_whole(from, 0, bytes)) return *reinterpret_cast<const uint64_t*>(from);
  uint64_t word = 0;
  RC_ROLLED
  for (uint32_t i = 0; i < 8 && i < bytes; ++i)
    word |= uint64_t(static_cast<unsigned char>(from[i])) << (8 * i);
  return word;
}

RC_COLD void store_bytes(char* to, uint64_t word, uint32_t bytes) {
  const char* const end = to + (bytes < 8 ? bytes : 8);
  RC_ROLLED
  for (; to != end; word >>= 8) *to++ = char(word);
}
RC_TEAM_FN void store_payload(char* to, uint64_t word, uint32_t bytes) {
  if (!is_whole(to, 0, bytes)) return store_bytes(to, word, bytes);
  *reinterpret_cast<uint64_t*>(to) = word;
}

// model: packet_arrived (tests/proof/model/ll.pml)
RC_TEAM_FN bool packet_arrived(const LLPacket& p, uint32_t flag) {
  return p.first_flag == flag && p.second_flag == flag;
}
RC_TEAM_FN uint64_t payload_of(const LLPacket& p) { return uint64_t(p.second) << 32 | p.first; }

// One rank's end of the packets of a call on one channel. It copies the fields that it needs from
// the view, which may be in slower memory.
template <class Team, class Ops>
struct LLEndpoint {
  using Operations = Ops;
  Team& team;
  const View& v;
  Ops& ops;
  char* const* regions;  // one per rank, and at least kPacketBatch
  const CallHeader& mine;
  double* factors;
  Layout layout;
  int32_t rank, world;

  // Returns this channel's header. The headers of all channels come first: ranks that disagree on
  // the size of the message still find the headers at the same addresses.
  RC_TEAM_FN LLPacket* header(const LLCall& call, int sender, int reader) const {
    const uint64_t set = call.sets + uint32_t(sender) * layout.ll_set_bytes();
    return reinterpret_cast<LLPacket*>(regions[reader] + set +
                                       layout.ll_header_offset(team.channel()));
  }
  // Returns the offset in a region of the payload packet that is `at` bytes into the message.
  RC_TEAM_FN uint64_t payload_offset(const LLCall& call, int sender, uint32_t at) const {
    const uint64_t set = call.sets + uint32_t(sender) * layout.ll_set_bytes();
    return set + layout.ll_payload_offset(at);
  }
};

// Returns a lane's part of messages of `bytes` bytes; the message to rank p is at in + p * stride.
template <class Team>
RC_TEAM_FN LLLane lane_of(const Team& team, const char* in, uint32_t stride, int rank,
                          uint32_t bytes) {
  const Extent extent = extent_of(bytes, portion_of(team.channel(), team.num_channels()));
  return {in,
          stride,
          in + uint64_t(uint32_t(rank)) * stride,
          uint32_t(extent.begin_bytes) + uint32_t(team.lane()) * 8,
          uint32_t(team.num_lanes()) * 8,
          uint32_t(extent.end_bytes)};
}

// Loads payload together with the first words of a call, so that it costs no extra trip to memory.
RC_TEAM_FN FirstWords load_first(const LLLane& lane, int world) {
  FirstWords words;
  const char* const from = lane.in + lane.at;
  words.has_sent = lane.at < lane.end;
  words.own = 0;
  if (!words.has_sent) return words;
  if (is_whole(from, lane.stride, lane.end - lane.at)) {
    const uint32_t ranks = ranks_in_batch(0, world);
    RC_UNROLL
    for (int k = 0; k < kPacketBatch; ++k)
      if (ranks >> k & 1)
        words.sent[k] = *reinterpret_cast<const uint64_t*>(from + uint64_t(k) * lane.stride);
    words.own = *reinterpret_cast<const uint64_t*>(lane.own + lane.at);
  } else {
    words.own = load_payload(lane.own + lane.at, lane.end - lane.at);
    words.has_sent = lane.stride == 0;
    RC_UNROLL
    for (int k = 0; k < kPacketBatch; ++k) words.sent[k] = words.own;
  }
  return words;
}

// The state of one lane's long wait for a packet: whether it continues, and when it started.
struct LongWait {
  uint64_t started;
  Status status;
};
// model: look_around (tests/proof/model/ll.pml)
template <class Team>
RC_COLD LongWait look_around(Team team, const View& v, const LLPacket* packet, uint32_t flag,
                             int sender, uint64_t started) {
  const uint64_t now = team.now_ns();
  if (started == 0) started = now;
  Status status = reason_to_give_up(team, v, sender, now - started);
  const CallHeader* theirs = nullptr;
  if (status != Status::kAborted && status != Status::kInterrupted) {
    theirs = other_call_seen(v, team.channel(), sender);
    if (theirs != nullptr) status = Status::kMismatch;
  }
  if (status == Status::kOk) return {started, Status::kOk};
  const LLPacket seen = load_ll_packet_sys(packet);
  if (status != Status::kAborted && packet_arrived(seen, flag)) return {started, Status::kOk};
  give_up(team, v, Site{Stream::kPair, sender, false, 0}, status, flag, seen.first_flag,
          now - started, theirs);
  return {started, status};
}

// One lane: a peer's header differs from mine. Waits for the whole header, which users will read.
template <class Team>
RC_COLD Status ll_mismatch(Team team, const View& v, const LLPacket* header, uint32_t flag,
                           int sender) {
  LongWait wait{0, Status::kOk};
  Pause pause{&header->first_flag, 0, nullptr, 0};
  for (int i = 0; i < kHeaderPackets; ++pause.polls) {
    if (packet_arrived(load_ll_packet_sys(header + i), flag)) {
      ++i;
    } else if (team.pause(pause)) {
      wait = look_around(team, v, header + i, flag, sender, wait.started);
      if (wait.status != Status::kOk) return wait.status;
    }
  }
  Fault* record = claim_fault(v);
  if (record == nullptr) return Status::kMismatch;
  fill_fault(record, v, Status::kMismatch, sender);
  RC_ROLLED
  for (int i = 0; i < kHeaderPackets; ++i)
    reinterpret_cast<uint64_t*>(&record->theirs)[i] = payload_of(load_ll_packet_sys(header + i));
  raise_fault(team, v);
  return Status::kMismatch;
}

// Clears `bytes` bytes of a set. The set holds the previous call, which is over; the peers write
// into it again only after they have received what I send below.
template <class Team>
RC_COLD void clear_other_set(Team team, char* set, uint64_t bytes) {
  const uint32_t lanes = uint32_t(team.num_lanes());
  const uint64_t step = team.num_channels() * lanes * sizeof(LLPacket);
  RC_ROLLED
  for (uint64_t at = (team.channel() * lanes + team.lane()) * sizeof(LLPacket); at < bytes;
       at += step)
    store_ll_packet_sys(reinterpret_cast<LLPacket*>(set + at), 0, 0, 0);
  // Every lane fences between the clearing stores of all lanes and its own sends.
  team.sync();
  fence_acq_rel_sys();
}

// Advances the count of LL calls; all lanes get the call.
// model: begin_ll (tests/proof/model/ll.pml)
template <class E>
RC_TEAM_FN LLCall begin_ll(E& e) {
  const uint32_t flag = next_flag(e.v.ll_epoch);
  const uint64_t bytes = uint32_t(e.world) * e.layout.ll_set_bytes(),
                 sets = e.layout.ll_offset(0, 0), ours = (flag & 1) != 0 ? bytes : 0;
  char* const region = e.regions[e.rank];
  if (e.team.lane() == 0)
    reinterpret_cast<ChannelLine*>(region + e.layout.channel_offset(e.team.channel()))->ll_epoch =
        flag;
  if (clears_other_set(flag)) clear_other_set(e.team, region + sets + bytes - ours, bytes);
  return {flag, sets + ours, hash_of(reinterpret_cast<const uint64_t*>(&e.mine))};
}

template <class E>
RC_TEAM_FN void send_headers(E& e, const LLCall& call) {
  const auto* words = reinterpret_cast<const uint64_t*>(&e.mine);
  constexpr uint32_t packets = kHeaderPackets + 1;
  RC_ROLLED
  for (uint32_t i = e.team.lane(); i < e.world * packets; i += e.team.num_lanes()) {
    const int reader = int(i / packets), at = int(i % packets);
    if (reader == e.rank) continue;
    const uint64_t word = at == kHashPacket ? call.hash : words[at];
    store_ll_packet_sys(e.header(call, e.rank, reader) + at, uint32_t(word), uint32_t(word >> 32),
                        call.flag);
  }
}

// Sends my payload to all readers.
// model: send_payload (tests/proof/model/ll.pml)
template <class E>
RC_TEAM_FN void send_payload(E& e, const LLCall& call, const LLLane& lane,
                             const FirstWords& words) {
  const uint64_t offset = e.payload_offset(call, e.rank, 0);
  uint32_t at = lane.at;
  int reader = 0;
  if (words.has_sent) {
    char* to[kPacketBatch];
    RC_UNROLL
    for (int k = 0; k < kPacketBatch; ++k) to[k] = e.regions[k] + offset + 2 * at;
    const uint32_t peers = peers_in_batch(0, e.world, e.rank);
    RC_UNROLL
    for (int k = 0; k < kPacketBatch; ++k)
      if (peers >> k & 1)
        store_ll_packet_sys(reinterpret_cast<LLPacket*>(to[k]), uint32_t(words.sent[k]),
                            uint32_t(words.sent[k] >> 32), call.flag);
    reader = kPacketBatch;
  }
  RC_ROLLED
  for (; at < lane.end; at += lane.step, reader = 0) {
    RC_ROLLED
    for (; reader < e.world; ++reader) {
      if (reader == e.rank) continue;
      const uint64_t word =
          load_payload(lane.in + uint64_t(uint32_t(reader)) * lane.stride + at, lane.end - at);
      store_ll_packet_sys(reinterpret_cast<LLPacket*>(e.regions[reader] + offset + 2 * at),
                          uint32_t(word), uint32_t(word >> 32), call.flag);
    }
  }
}

// The packets for which a lane waits at the same time: a packet of a header, unless `header` is
// null, and one payload packet from each rank of a batch.
struct Awaited {
  const LLPacket* header = nullptr;
  int header_sender = 0;
  bool is_hash = false;
  const char* payload = nullptr;  // of rank `first`
  int first = 0;
  uint32_t peers = 0;  // a bit for each rank whose payload is awaited
};

// One lane: waits until all packets have arrived. Each poll loads all packets again, so the last
// packet to arrive costs one trip to memory. A header of another call ends the wait at once.
// model: await_packets (tests/proof/model/ll.pml)
template <class E>
RC_TEAM_FN Status await_packets(E& e, const LLCall& call, const Awaited& a, uint64_t* header_word,
                                LLPacket (&seen)[kPacketBatch]) {
  const uint64_t set_bytes = e.layout.ll_set_bytes();
  LongWait wait{0, Status::kOk};
  Pause pause{nullptr, 0, nullptr, 0};
  for (;; ++pause.polls) {
    LLPacket header{};
    if (a.header != nullptr) header = load_ll_packet_sys(a.header);
    RC_UNROLL
    for (int k = 0; k < kPacketBatch; ++k)
      if (a.peers >> k & 1)
        seen[k] = load_ll_packet_sys(
            reinterpret_cast<const LLPacket*>(a.payload + uint64_t(k) * set_bytes));
    uint32_t missing = 0;
    RC_UNROLL
    for (int k = 0; k < kPacketBatch; ++k)
      if ((a.peers >> k & 1) != 0 && !packet_arrived(seen[k], call.flag)) missing |= 1u << k;
    const bool has_header = a.header == nullptr || packet_arrived(header, call.flag);
    *header_word = payload_of(header);
    if (a.is_hash && has_header && *header_word != call.hash)
      return ll_mismatch(e.team, e.v, a.header - kHashPacket, call.flag, a.header_sender);
    if (has_header && missing == 0) return Status::kOk;
    if (!e.team.pause(pause)) continue;
    const int k = has_header ? log2_of(missing & (0 - missing)) : 0;
    const auto* payload = reinterpret_cast<const LLPacket*>(a.payload + uint64_t(k) * set_bytes);
    wait = look_around(e.team, e.v, has_header ? payload : a.header, call.flag,
                       has_header ? a.first + k : a.header_sender, wait.started);
    if (wait.status != Status::kOk) return wait.status;
  }
}

// Receives all payloads, offset by offset from all ranks, and passes them to `sink` once the peers'
// hashes equal mine. Fills the factors.
//   sink.take(e, int rank, uint64_t word, uint32_t at, uint32_t bytes)   in the order of the ranks
//   sink.finish(e, uint32_t at, uint32_t bytes)                          after the last rank
template <class E, class Sink>
RC_TEAM_FN Status receive_packets(E& e, const LLCall& call, const LLLane& lane, uint64_t own,
                                  Sink sink) {
  const int headers = e.world * 2, lanes = e.team.num_lanes();
  if (e.team.lane() == 0) e.factors[e.rank] = e.mine.factor;
  uint32_t at = lane.at;
  int first = 0, i = e.team.lane();
  Status status = Status::kOk;
  for (bool checked = false; at < lane.end || !checked;) {
    Awaited a;
    const int sender = i >> 1;
    if (i < headers && sender != e.rank) {
      a.is_hash = (i & 1) == 0;
      a.header_sender = sender;
      a.header = e.header(call, sender, e.rank) + (a.is_hash ? kHashPacket : kFactorPacket);
    }
    if (at < lane.end) {
      a.first = first;
      a.peers = peers_in_batch(first, e.world, e.rank);
      a.payload = e.regions[e.rank] + e.payload_offset(call, first, at);
    }
    uint64_t header_word = 0;
    LLPacket seen[kPacketBatch];
    if (status == Status::kOk) status = await_packets(e, call, a, &header_word, seen);
    if (status == Status::kOk && a.header != nullptr && !a.is_hash)
      reinterpret_cast<uint64_t*>(e.factors)[sender] = header_word;
    i += lanes;
    if (!checked) {
      if (i - e.team.lane() < headers) continue;
      status = e.team.share(status);
      checked = true;
    }
    if (status != Status::kOk || at >= lane.end) break;
    RC_UNROLL
    for (int k = 0; k < kPacketBatch; ++k) {
      if (first + k >= e.world) break;
      sink.take(e, first + k, first + k == e.rank ? own : payload_of(seen[k]), at, lane.end - at);
    }
    first += kPacketBatch;
    if (first < e.world) continue;
    sink.finish(e, at, lane.end - at);
    first = 0;
    at += lane.step;
    if (at < lane.end) own = load_payload(lane.own + at, lane.end - at);
  }
  return e.team.share(status);
}

RINGCOMM_NAMESPACE_END
