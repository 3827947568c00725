// SPDX-License-Identifier: Apache-2.0

// An endpoint: one rank's end of all streams during one call on one channel. The collectives are
// written with its four verbs: send and share (publish an item to one peer, or to all), receive
// (wait for an item and find its data), release (acknowledge data that were read).
//
// Ops moves and reduces bytes, with all lanes of the team:
//   void copy_shared(Team&, void* dst, const void* src, Bytes bytes)
//       peers read dst
//   void copy_private(Team&, void* dst, const void* src, Bytes bytes)
//       dst is a result of the call
//   void reduce(Team&, const ReduceTarget&, const ReduceSources&, uint64_t bytes, int finish_world)
//
// Bytes is uint64_t. If the Team deals tiles, it is Stretch (tiles.h), and both addresses have the
// same gaps. A reduction of HopSources has no gaps; the gaps of others are team.gaps().
#pragma once

#include "ringcomm/core/tiles.h"
#include "ringcomm/protocol/header_check.h"
#include "ringcomm/protocol/signal.h"

#define RC_RETURN_IF_FAILED(expression)                         \
  do {                                                          \
    const ::ringcomm::Status rc_status = (expression);          \
    if (rc_status != ::ringcomm::Status::kOk) return rc_status; \
  } while (0)

RINGCOMM_NAMESPACE_BEGIN

// Pieces sent before the first is awaited. With 1, my copy of piece j+1 overlaps the peers' copies
// of piece j. It must be below the number of slots, or ranks would wait for each other in a circle.
constexpr uint32_t kLookahead = 1;

// Below this many bytes staging is preferred to zero copy. Zero copy must wait at the end until the
// readers have finished, and the copy (about 1 us at 16 GB/s) costs no more than this hop. Chosen
// by this estimate, not measured.
constexpr uint64_t kZeroCopyMinBytes = 16384;

// NOTE [Single copy]
//
// Memory outside the heap is staged: its owner copies it into slots, and readers copy it out of
// them. Between two ranks this moves each byte twice. Data that are shared unchanged take a single
// copy if the kernel lets both ranks read the memory of the other's process (process_vm_readv): the
// header holds the address in the owner's process, and the reader has the kernel copy the data
// straight to their place. As with zero copy, the owner waits at the end until the reader has
// finished, and after its last read the reader checks whether the owner gave up. Before the reader
// acknowledges a piece, it also checks whether the owner has ended: another process may have got
// the owner's process ID.
//
// The kernel copies page by page, at a speed that differs between machines. So each rank measures
// whether a single copy takes less time than staging (kernels/host/single_copy.h), and lends its
// memory only then. The two ranks may decide differently.
//
// Sweep of all_gather and all_reduce of plain tensors on a Xeon (AVX-512) at 2.5 GHz with 2 cores;
// each number is the speed of single copy divided by the speed of staging. 2 ranks: 0.97 to 1.21
// for a chunk of 64 KiB, 1.3 to 1.5 for 128 KiB, 1.5 to 1.65 for 512 KiB, 1.15 for 128 MiB;
// all_reduce 0.99 for a chunk of 1 MiB, 0.8 to 1.02 for 2 MiB, 1.18 for 8 MiB, 1.1 for 128 MiB.
// 4 ranks: 0.83 to 0.96, since each byte is staged once for three readers, and the kernel copies it
// more slowly than they do. On a Zen 4 virtual machine with 2 cores the kernel copies 5.4 GB/s and
// a core 12 GB/s; 2 ranks from 512 KiB to 64 MiB: all_gather 0.54 to 0.85, broadcast 0.23 to 0.62.
constexpr int kSingleCopyRanks = 2;
constexpr uint64_t kSingleCopyMinBytes = 128 << 10;
// The least size of single copy for an all-reduce's results, which are shared piece by piece.
constexpr uint64_t kSingleCopyMinResultBytes = 8 << 20;

// The result of a reduction: one destination, or two from one pass over the sources.
struct ReduceTarget {
  void* dst;
  bool shared;  // true: peers read dst
  void* also;   // a private destination, or null
};

struct ReduceSources {
  const void* const* ptrs;
  const double* factors;
  int count;
};
// The sources of one of several steps, such as a ring's hop. On a GPU all these steps of a kernel
// share one copy of the reduction's code; other reductions inline the code (kernels/cuda/ops.h).
struct HopSources : ReduceSources {};

// The peers at distances [first, last) from this rank, in the order in which this rank visits them.
struct Peers {
  int first, last;
};

// How buffers are cut, if not into lines of 64 bytes and the layout's segments.
struct Cut {
  int line_shift = 6;          // channels share a chunk in units of 2^line_shift bytes
  uint32_t segment_bytes = 0;  // size of a segment, a power of two; 0: the layout's
  bool sliced = false;         // true: no tiles are dealt
};

struct Nothing {
  RC_FN void operator()(int) const {}
};

template <class Team, class Ops>
struct Endpoint {
  using Lanes = Team;
  using Operations = Ops;
  using Part = PartOf<Team::kDealsTiles>;
  Team& team;
  const View& v;
  Ops& ops;
  Stream pairs = Stream::kPair;     // the stream of data for one reader; kMessage for send/receive
  bool reads_peer_buffers = false;  // true: this lane has read data of this call by zero copy
  Cut cut = {};
  Stores stores = {};

  RC_TEAM_FN int rank() const { return v.rank; }
  RC_TEAM_FN int world() const { return v.world; }
  RC_TEAM_FN uint64_t segment_bytes() const {
    return cut.segment_bytes == 0 ? v.layout.segment_bytes : cut.segment_bytes;
  }
  RC_TEAM_FN int peer_at(int d) const { return rotated_peer(v.rank, d, v.world); }
  RC_TEAM_FN int segment_shift() const { return log2_of(uint32_t(segment_bytes())); }
  RC_TEAM_FN uint32_t pieces(uint64_t bytes) const { return items_of(bytes, segment_shift()); }

  // Returns this channel's part of a span.
  RC_TEAM_FN Part part(Span s) const {
    if constexpr (Team::kDealsTiles)
      return dealt_part(s, cut.sliced ? Deal{} : team.deal(), team.portion(), cut.line_shift);
    else
      return sliced_part(s, team.portion(), cut.line_shift);
  }
  // Returns the bytes of a part from `begin` on. Only bytes that begin at 0 can have gaps; they are
  // the whole part.
  RC_TEAM_FN typename Part::Bytes stretch(const Part& part, uint64_t begin, uint64_t bytes) const {
    return begin == 0 ? part.first(bytes) : typename Part::Bytes(bytes);
  }

  // Returns part(span). A team that deals tiles computes it again and does not keep `known`, since
  // a loop over data needs the registers.
  RC_TEAM_FN Part again(const Part& known, Span span) const {
    if constexpr (Team::kDealsTiles) return part(span);
    return known;
  }

  // Called by one lane, with a sync() before the next reduction of all_sources(). Sets the gaps for
  // that reduction, of the bytes of `part` from `begin` on.
  RC_TEAM_FN void set_gaps(const Part& part, uint64_t begin) const {
    if constexpr (Team::kDealsTiles) *team.gaps() = begin == 0 ? part.gaps : Gaps{};
  }

  RC_TEAM_FN bool zero_copy(const Part& s) const {
    return s.bytes >= kZeroCopyMinBytes && v.in_my_heap(s.ptr, s.reach());
  }
  RC_TEAM_FN uint32_t items(const Part& s) const { return zero_copy(s) ? 1 : pieces(s.bytes); }

  // True if peers that only copy a span of this size copy it from my process (single copy).
  // `all_share`: all ranks share data in this call, not only this rank.
  RC_TEAM_FN bool single_copy(Span s, uint64_t least_bytes, bool all_share) const {
    if constexpr (Team::kReadsProcesses)
      return s.bytes >= least_bytes && team.lends(s.ptr, s.bytes, all_share);
    return false;
  }

  // The call in progress is in v.mine, not here: a block keeps it in shared memory, out of its
  // lanes' registers.
  RC_TEAM_FN const CallId& id() const { return v.mine->id; }
  RC_TEAM_FN double factor() const { return v.mine->factor; }

  RC_TEAM_FN uint32_t sent(Stream s, int reader) const { return in(s, reader).sent; }

  RC_TEAM_FN PeerState& in(Stream s, int peer) const { return v.in[int(s) * v.world + peer]; }
  RC_TEAM_FN const void** sources() const { return v.sources; }
  RC_TEAM_FN double* factors() const { return v.factors; }
  RC_TEAM_FN ReduceSources all_sources() const { return {sources(), factors(), v.world}; }

  // ---- groups of peers ------------------------------------------------------------------------

  // Returns the number of peers in one step of a loop. Lanes that wait for several peers at once
  // take all peers; a lone lane takes one after the other, so that each peer is served as soon as
  // its data are there.
  RC_TEAM_FN int group() const { return Team::kShareWaits ? v.world - 1 : 1; }

  // Calls visit(peer) once for each of the peers, spread over the lanes; for words, not for data.
  template <class Visit>
  RC_TEAM_FN void each_by_lanes(Peers peers, Visit visit) const {
    RC_ROLLED
    for (int d = peers.first + team.lane(); d < peers.last; d += team.num_lanes())
      visit(peer_at(d));
  }

  // Like each_by_lanes, with a visit that returns a Status: a lane's first failure ends the lane's
  // visits. All lanes get the same result.
  template <class Visit>
  RC_TEAM_FN Status wait_by_lanes(Peers peers, Visit visit) const {
    Status status = Status::kOk;
    RC_ROLLED
    for (int d = peers.first + team.lane(); d < peers.last && status == Status::kOk;
         d += team.num_lanes())
      status = visit(peer_at(d));
    return team.share(status);
  }

  // ---- sending ------------------------------------------------------------------------------

  // One lane: waits until `reader` has read my items up to `epoch`; `item` is for the fault record.
  // The value that the call found when it began may suffice, without another load.
  // model: await_reader (tests/proof/model/signal.pml)
  RC_TEAM_FN Status await_reader(Stream s, int reader, uint32_t item, uint32_t epoch) const {
    if (!reached(in(s, reader).consumed, epoch))
      return await_alone(team, v, Site{s, reader, true, item}, epoch);
    team.passing(Point::kAwait, v, s);
    return Status::kOk;
  }

  // One lane: waits until `reader` has read the former item in the slot of my item `item`.
  // model: slot_is_free (tests/proof/model/signal.pml)
  RC_TEAM_FN Status slot_is_free(Stream s, int reader, uint32_t item) const {
    const uint32_t epoch = sent(s, reader) + 1 + item;
    return await_reader(s, reader, item, v.layout.held_before(epoch));
  }

  RC_TEAM_FN char* my_slot(Stream s, int reader, uint32_t item) const {
    return v.slot(v.rank, s, team.channel(), reader, sent(s, reader) + 1 + item);
  }

  RC_TEAM_FN uint64_t heap_offset(const char* ptr) const { return uint64_t(ptr - v.heaps[v.rank]); }

  // One lane, once the first item's slot is free: writes the header into the reader's region.
  // stays: the reader takes the data in place.
  RC_TEAM_FN void write_header(Stream s, int reader, Span span, bool stays, uint64_t item_bytes,
                               uint64_t result_offset = kNotInHeap) const {
    const bool in_heap = stays && v.in_my_heap(span.ptr, span.bytes);
    const uint64_t offset = in_heap ? heap_offset(span.ptr) : kNotInHeap;
    const uint64_t process_ptr = stays && !in_heap ? reinterpret_cast<uintptr_t>(span.ptr) : 0;
    *v.header(reader, s, team.channel(), v.rank, sent(s, reader) + 1) =
        CallHeader{id(), span.bytes, item_bytes, offset, factor(), result_offset, process_ptr};
  }

  // Sends item `item` of span_for(reader) to each reader of the group for which gets_item(reader)
  // is true: the header with the first item, the bytes unless zero copy.
  // model: send (tests/proof/model/endpoint.pml)
  template <class SpanFor, class GetsItem>
  RC_TEAM_FN Status send(Peers readers, uint32_t item, SpanFor span_for, GetsItem gets_item) {
    RC_RETURN_IF_FAILED(wait_by_lanes(readers, [&](int reader) {
      if (!gets_item(reader)) return Status::kOk;
      const Status status = slot_is_free(pairs, reader, item);
      if (status != Status::kOk || item > 0) return status;
      const Part span = span_for(reader);
      const bool in_heap = zero_copy(span);
      write_header(pairs, reader, span, in_heap, in_heap ? span.bytes : segment_bytes());
      return status;
    }));
    for (int d = readers.first; d < readers.last; ++d) {
      const int reader = peer_at(d);
      if (!gets_item(reader)) continue;
      const Part span = span_for(reader);
      if (zero_copy(span)) continue;
      const uint64_t begin = item * segment_bytes(),
                     bytes = item_length(span.bytes, segment_bytes(), item);
      ops.copy_shared(team, my_slot(pairs, reader, item), span.ptr + span.offset(begin), bytes);
    }
    team.sync();
    each_by_lanes(readers, [&](int reader) {
      if (gets_item(reader)) publish(team, v, pairs, reader, sent(pairs, reader) + 1 + item);
    });
    return Status::kOk;
  }

  // For rings: waits for the slot to one reader; the caller fills the slot and then publishes it.
  RC_TEAM_FN Status await_slot(int reader, uint32_t item) {
    Status status = Status::kOk;
    if (team.lane() == 0) status = slot_is_free(pairs, reader, item);
    return team.share(status);
  }

  // model: publish_item (tests/proof/model/ring.pml)
  RC_TEAM_FN void publish_item(int reader, uint32_t item) {
    team.sync();
    if (team.lane() == 0) publish(team, v, pairs, reader, sent(pairs, reader) + 1 + item);
  }

  // Waits until every peer has read the former item in the shared slot of item `item`; the caller
  // then fills the slot.
  // model: acquire_shared (tests/proof/model/endpoint.pml)
  RC_TEAM_FN Status acquire_shared(uint32_t item, char** data) {
    RC_RETURN_IF_FAILED(wait_by_lanes(
        {1, world()}, [&](int peer) { return slot_is_free(Stream::kShared, peer, item); }));
    // All readers' epochs advance together on the shared stream, so any peer determines the slot.
    *data = my_slot(Stream::kShared, peer_at(1), item);
    return Status::kOk;
  }

  // Publishes item `item` of `span`, which this call shares in items of `item_bytes`. before(peer):
  // work for each peer that the lanes do first, once all lanes have arrived here.
  // model: publish_shared (tests/proof/model/endpoint.pml)
  template <class Before = Nothing>
  RC_TEAM_FN void publish_shared(uint32_t item, Span span, bool stays, uint64_t item_bytes,
                                 Before before = {}) {
    if (item == 0)
      each_by_lanes({1, world()}, [&](int peer) {
        write_header(Stream::kShared, peer, span, stays, item_bytes);
      });
    team.sync();
    each_by_lanes({1, world()}, before);
    each_by_lanes({1, world()}, [&](int peer) {
      publish(team, v, Stream::kShared, peer, sent(Stream::kShared, peer) + 1 + item);
    });
  }

  // Zero copy, one lane: waits until `reader` no longer reads my buffer.
  // model: drained (tests/proof/model/lend.pml, signal.pml)
  RC_TEAM_FN Status drained(Stream s, int reader, uint32_t items_sent) const {
    return await_reader(s, reader, items_sent, sent(s, reader) + items_sent);
  }

  // One lane, after the last use of sent() for this reader: stores the new epoch.
  // model: commit_sent (tests/proof/model/signal.pml)
  RC_TEAM_FN void commit_sent(Stream s, int reader, uint32_t items_sent) const {
    in(s, reader).sent += items_sent;
    store_relaxed_sys(&v.epochs(s, team.channel(), reader)->sent, in(s, reader).sent);
  }

  // ---- receiving ----------------------------------------------------------------------------

  // If a call receives from one sender more than once, one lane calls this before each receive, and
  // all lanes call team.sync() afterwards.
  RC_TEAM_FN void receive_anew(Stream s, int sender) const {
    PeerState& st = in(s, sender);
    st.base += st.items;
    st.items = st.acked = 0;
  }

  // One lane: reads the header of the sender's call and compares it with mine. expected: the part
  // that the stream carries; only its sizes are used.
  RC_TEAM_FN Status open(Stream s, int sender, const Part& expected) {
    const uint64_t expected_bytes = expected.bytes;
    PeerState& st = in(s, sender);
    const CallHeader& theirs = *v.header(v.rank, s, team.channel(), sender, st.base + 1);
    // Loads each field once, so that the checked value is the value used, and all fields before the
    // first check, so that they take one trip to memory.
    const uint64_t item_bytes = load_relaxed_sys(&theirs.item_bytes),
                   offset = load_relaxed_sys(&theirs.heap_offset),
                   results = load_relaxed_sys(&theirs.result_offset),
                   stream_bytes = load_relaxed_sys(&theirs.stream_bytes);
    const double factor = theirs.factor;
    uint64_t process_ptr = 0;
    if constexpr (Team::kReadsProcesses) process_ptr = load_relaxed_sys(&theirs.process_ptr);
    if (!(same_call(theirs.id, id()) & (stream_bytes == expected_bytes)))
      return fail(team, v, Status::kMismatch, sender, &theirs, expected_bytes);
    const bool in_heap = offset != kNotInHeap, in_process = process_ptr != 0,
               stays = in_heap || in_process,
               sized = item_bytes == segment_bytes() ||
                       (stays && item_bytes == whole_item(expected_bytes));
    if (!sized || (in_heap && !readable(v, sender, offset, expected.reach())) ||
        (in_process && (in_heap || s != Stream::kShared || !reads_processes())) ||
        !storable(v, stores, sender, results)) {
      return fail(team, v, Status::kCorrupt, sender, &theirs, expected_bytes);
    }
    st.item_shift = item_bytes == segment_bytes() ? segment_shift() : kOneItem;
    st.data =
        in_heap ? v.heaps[sender] + offset : reinterpret_cast<const char*>(uintptr_t(process_ptr));
    st.in_process = in_process;
    reads_peer_buffers |= stays;
    st.items = items_of(expected_bytes, st.item_shift);
    factors()[sender] = factor;
    if (results != kNotInHeap) v.results[sender] = v.heaps[sender] + results;
    return Status::kOk;
  }

  // One lane: waits for bytes [begin, begin + bytes) of the stream from `sender` to me, and stores
  // their address in `data`. expected: as for open().
  // model: arrive (tests/proof/model/endpoint.pml)
  RC_TEAM_FN Status arrive(Stream s, int sender, const Part& expected, uint64_t begin,
                           uint64_t bytes, const void** data) {
    PeerState& st = in(s, sender);
    if (begin == 0) {
      RC_RETURN_IF_FAILED(await_alone(team, v, Site{s, sender, false, 0}, st.base + 1));
      // Data in a slot are on their way while the header is checked.
      prefetch_lines(v.slot(sender, s, team.channel(), v.rank, st.base + 1));
      RC_RETURN_IF_FAILED(open(s, sender, expected));
    }
    const uint32_t last = bytes == 0 ? 0 : uint32_t((begin + bytes - 1) >> st.item_shift);
    if (last > 0)
      RC_RETURN_IF_FAILED(await_alone(team, v, Site{s, sender, false, last}, st.base + 1 + last));
    *data = st.data != nullptr ? st.data + expected.offset(begin)
                               : v.slot(sender, s, team.channel(), v.rank, st.base + 1 + last);
    return Status::kOk;
  }

  // All lanes wait for bytes [begin, begin + bytes) of a sender's stream. Sets sources()[sender].
  // model: receive (tests/proof/model/ring.pml)
  RC_TEAM_FN Status receive(Stream s, int sender, uint64_t expected_bytes, uint64_t begin,
                            uint64_t bytes) {
    Status status = Status::kOk;
    if (team.lane() == 0)
      status = arrive(s, sender, Part{{nullptr, expected_bytes}}, begin, bytes, &sources()[sender]);
    return team.share(status);
  }
  // Returns the number of reads in which I take `bytes` from `sender`. opened: the sender's header
  // arrived before the last sync(); otherwise only the first read is known, and counted.
  RC_TEAM_FN uint32_t reads(Stream s, int sender, uint64_t bytes, bool opened) const {
    if constexpr (Team::kReadsWhole) return opened ? in(s, sender).items : 1;
    return pieces(bytes);
  }
  // Returns the size of read `j`; valid once the read's data have arrived. Read `j` starts at
  // segment `j`.
  RC_TEAM_FN uint64_t read_bytes(Stream s, int sender, uint64_t bytes, uint32_t j) const {
    if (Team::kReadsWhole && in(s, sender).items == 1) return bytes;
    return item_length(bytes, segment_bytes(), j);
  }
  // Returns the largest number of reads() that a peer's bytes_of(peer) bytes take, among the peers
  // for which takes(peer) is true.
  template <class Takes, class BytesOf>
  RC_TEAM_FN uint32_t most_reads(Stream s, bool opened, Takes takes, BytesOf bytes_of) const {
    uint32_t most = 0;
    RC_ROLLED
    for (int d = 1; d < world(); ++d) {
      const int p = peer_at(d);
      if (!takes(p)) continue;
      uint32_t here = 1;
      if constexpr (Team::kReadsWhole)
        here = opened ? in(s, p).items : 1;
      else
        here = pieces(bytes_of(p));
      most = here > most ? here : most;
    }
    return most;
  }

  RC_TEAM_FN const char* received(int sender) const {
    return static_cast<const char*>(sources()[sender]);
  }

  RC_TEAM_FN bool reads_processes() const {
    if constexpr (Team::kReadsProcesses) return team.reads_processes();
    return false;
  }

  // Copies the data that arrive() found on the shared stream to their place. peer_reads: peers have
  // just read this place as a source.
  RC_TEAM_FN Status collect(int sender, char* to, typename Part::Bytes bytes, bool peer_reads) {
    if constexpr (Team::kReadsProcesses) {
      if (in(Stream::kShared, sender).in_process)
        return read_process(sender, to, received(sender), bytes);
    }
    if (peer_reads)
      ops.copy_shared(team, to, received(sender), bytes);
    else
      ops.copy_private(team, to, received(sender), bytes);
    return Status::kOk;
  }

  // See NOTE [Single copy].
  RC_TEAM_FN Status read_process(int sender, char* to, const char* from, uint64_t bytes) {
    Status status = team.read_process(sender, to, from, bytes);
    // If the sender has ended, another process may have its process ID and may have been read.
    if (team.has_ended(sender)) status = Status::kPeerLost;
    if (status == Status::kOk) return status;
    // Either a living sender gave up and its memory is gone, or its header was false.
    if (status != Status::kPeerLost && abort_seen(v)) status = Status::kAborted;
    const uint32_t first = in(Stream::kShared, sender).base + 1;
    return fail(team, v, status, sender,
                v.header(v.rank, Stream::kShared, team.channel(), sender, first), bytes);
  }

  // One lane, after a team.sync(): acknowledges all bytes before `end` of the sender's stream.
  // model: release (tests/proof/model/endpoint.pml, ring.pml)
  RC_TEAM_FN void release(Stream s, int sender, uint64_t expected_bytes, uint64_t end) const {
    PeerState& st = in(s, sender);
    const uint32_t done = end >= expected_bytes ? st.items : uint32_t(end >> st.item_shift);
    if (done == st.acked) return;
    st.acked = done;
    acknowledge(team, v, s, sender, st.base + done);
  }

  // One lane, after the last receive from this sender: stores the new epoch.
  // model: commit_seen (tests/proof/model/signal.pml)
  RC_TEAM_FN void commit_seen(Stream s, int sender) const {
    store_relaxed_sys(&v.epochs(s, team.channel(), sender)->seen,
                      in(s, sender).base + in(s, sender).items);
  }

  // ---- before and after a call ----------------------------------------------------------------

  RC_TEAM_FN PeerState found(Stream s, int peer) const {
    return find_link(v.regions[v.rank], v.layout, s, team.channel(), peer);
  }
  // Loads the state of the collectives' streams when a call begins. Blocks load it with their first
  // words (load_words, kernels/cuda/body.h).
  RC_TEAM_FN void begin_streams() const {
    each_by_lanes({1, world()}, [&](int peer) {
      in(Stream::kPair, peer) = found(Stream::kPair, peer);
      in(Stream::kShared, peer) = found(Stream::kShared, peer);
    });
  }

  RC_TEAM_FN const CallHeader* unread(Stream s, int peer) const {
    const uint32_t next = in(s, peer).base + 1;
    if (!reached(in(s, peer).ready, next)) return nullptr;  // usually there is none
    return other_call_in(v, s, team.channel(), peer, next);
  }
  // An item of an earlier call that a peer published and I did not read shows that our earlier
  // calls differed, although neither waited for the other (two ranks that both broadcast).
  // model: verify_streams (tests/proof/model/endpoint.pml)
  RC_TEAM_FN Status verify_streams() {
    return wait_by_lanes({1, world()}, [&](int peer) {
      const CallHeader* theirs = unread(Stream::kPair, peer);
      if (theirs == nullptr) theirs = unread(Stream::kShared, peer);
      return theirs == nullptr ? Status::kOk : fail(team, v, Status::kMismatch, peer, theirs, 0);
    });
  }

  // After a successful call: checks that the data read in peers' buffers are the data sent. A
  // sender that gave up may use its buffer again, but it raises its abort word before it returns.
  // So if the word is not raised after the last read, the buffer had not changed before that read.
  // model: verify_peer_buffers (tests/proof/model/endpoint.pml, lend.pml)
  RC_TEAM_FN Status verify_peer_buffers() {
    if (reads_peer_buffers)
      fence_seq_cst_sys();  // the reads of data precede the reads of the words
    return wait_by_lanes({1, world()}, [&](int peer) {
      if (!reads_peer_buffers || !aborted(v, peer)) return Status::kOk;
      return fail(team, v, Status::kAborted, v.rank, nullptr, 0);
    });
  }
};

RINGCOMM_NAMESPACE_END
