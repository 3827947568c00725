// An endpoint: one rank's end of all streams during one call on one channel. The collectives are
// written in its four verbs: send and share (publish an item to one peer, or to all), receive (wait
// for an item and find its data), release (acknowledge what was read).
//
// Ops is what moves and reduces bytes, with all lanes of the team:
//   void copy_shared(Team&, void* dst, const void* src, uint64_t bytes)
//       peers read dst
//   void copy_private(Team&, void* dst, const void* src, uint64_t bytes)
//       dst is a result of the call
//   void reduce(Team&, const ReduceTarget&, const ReduceSources&, uint64_t bytes, int finish_world)
#pragma once

#include "ringcomm/schedule.h"
#include "ringcomm/signal.h"

#define RC_RETURN_IF_FAILED(expression)                         \
  do {                                                          \
    const ::ringcomm::Status rc_status = (expression);          \
    if (rc_status != ::ringcomm::Status::kOk) return rc_status; \
  } while (0)

RINGCOMM_NAMESPACE_BEGIN

// Pieces sent before the first is awaited. 1 overlaps my copy of piece j+1 with the peers' of piece
// j; it must stay below the number of slots, or ranks would wait for each other in a circle.
constexpr uint32_t kLookahead = 1;

// Below this many bytes staging is preferred to zero copy, which must wait at the end for the
// readers to have finished: the copy (about 1 us at 16 GB/s) costs no more than that hop. A choice
// by this estimate, not swept.
constexpr uint64_t kZeroCopyMinBytes = 16384;

// Where a reduction goes: one place, or two from one pass over the sources.
struct ReduceTarget {
  void* dst;
  bool shared;  // peers read dst
  void* also;   // private; may be null
};

struct ReduceSources {
  const void* const* ptrs;
  const double* factors;
  int count;
};

template <class Team, class Ops>
struct Endpoint {
  Team& team;
  const View& v;
  Ops& ops;
  CallId id;
  double factor;
  bool reads_peer_buffers = false;  // lane 0's: some data of this call came zero copy

  int rank() const { return v.rank; }
  int world() const { return v.world; }
  uint64_t segment_bytes() const { return v.layout.segment_bytes; }
  int peer_at(int d) const { return rotated_peer(v.rank, d, v.world); }
  uint32_t pieces(uint64_t bytes) const { return items_of(bytes, segment_bytes()); }

  // This channel's part of a span.
  Span slice(Span s) const {
    const Extent e = part_of(s.bytes, team.channel(), team.num_channels());
    return {s.ptr + e.begin_bytes, e.end_bytes - e.begin_bytes};
  }

  bool zero_copy(Span s) const {
    return s.bytes >= kZeroCopyMinBytes && v.in_my_heap(s.ptr, s.bytes);
  }
  uint32_t items(Span s) const { return zero_copy(s) ? 1 : pieces(s.bytes); }

  CallHeader header(Span s, bool in_heap, uint64_t item_bytes) const {
    return {id, s.bytes, item_bytes, in_heap ? uint64_t(s.ptr - v.heaps[v.rank]) : kNotInHeap,
            factor};
  }
  CallHeader header() const { return {id, 0, 0, kNotInHeap, factor}; }

  uint32_t sent(Stream s, int reader) const { return v.epochs(s, team.channel(), reader)->sent; }

  PeerState& in(Stream s, int peer) const {
    return v.in[(team.channel() * int(Stream::kCount) + int(s)) * v.world + peer];
  }
  const void** sources() const { return v.sources + team.channel() * v.world; }
  double* factors() const { return v.factors + team.channel() * v.world; }
  ReduceSources all_sources() const { return {sources(), factors(), v.world}; }

  // ---- sending ------------------------------------------------------------------------------

  // Waits until `reader` has read the item that used the slot of my item `item` before.
  Status await_slot(Stream s, int reader, uint32_t item) {
    const uint32_t epoch = sent(s, reader) + 1 + item;
    return await(team, v, Site{s, reader, true, item}, epoch - v.layout.slots, header());
  }

  char* my_slot(Stream s, int reader, uint32_t item) const {
    return v.slot(v.rank, s, team.channel(), reader, sent(s, reader) + 1 + item);
  }

  // Item `item` of `span` to one reader: the header with the first, the bytes unless zero copy.
  Status send(int reader, Span span, uint32_t item) {
    RC_RETURN_IF_FAILED(await_slot(Stream::kPair, reader, item));
    char* slot = my_slot(Stream::kPair, reader, item);
    const bool in_heap = zero_copy(span);
    const uint64_t item_bytes = in_heap ? span.bytes : segment_bytes();
    if (item == 0 && team.lane() == 0)
      *reinterpret_cast<CallHeader*>(slot) = header(span, in_heap, item_bytes);
    if (!in_heap) {
      const uint64_t begin = item * item_bytes, bytes = item_length(span.bytes, item_bytes, item);
      ops.copy_shared(team, slot + kHeaderBytes, span.ptr + begin, bytes);
    }
    publish_item(Stream::kPair, reader, item);
    return Status::kOk;
  }

  void publish_item(Stream s, int reader, uint32_t item) {
    team.sync();
    if (team.lane() == 0) publish(team, v, s, reader, sent(s, reader) + 1 + item);
  }

  // The shared slot for item `item`, once every peer has read what it held; the caller fills it.
  Status acquire_shared(uint32_t item, char** data) {
    for (int d = 1; d < world(); ++d)
      RC_RETURN_IF_FAILED(await_slot(Stream::kShared, peer_at(d), item));
    // All readers' epochs advance together on the shared stream, so any peer names the slot.
    *data = my_slot(Stream::kShared, peer_at(1), item) + kHeaderBytes;
    return Status::kOk;
  }

  void publish_shared(uint32_t item, char* data, const CallHeader& h) {
    if (item == 0 && team.lane() == 0) *reinterpret_cast<CallHeader*>(data - kHeaderBytes) = h;
    team.sync();
    if (team.lane() != 0) return;
    for (int d = 1; d < world(); ++d)
      publish(team, v, Stream::kShared, peer_at(d), sent(Stream::kShared, peer_at(d)) + 1 + item);
  }

  // Zero copy: waits until `reader` no longer reads my buffer.
  Status drain(Stream s, int reader, uint32_t items_sent) {
    const uint32_t epoch = sent(s, reader) + items_sent;
    return await(team, v, Site{s, reader, true, items_sent}, epoch, header());
  }

  void commit_sent(Stream s, int reader, uint32_t items_sent) {
    if (team.lane() == 0) v.epochs(s, team.channel(), reader)->sent += items_sent;
  }

  // ---- receiving ----------------------------------------------------------------------------

  // Before the first receive of a call on stream `s`, for every sender; then one team.sync().
  void begin_receive(Stream s, int sender) {
    if (team.lane() == 0)
      in(s, sender) = PeerState{nullptr, 1, v.epochs(s, team.channel(), sender)->seen, 0, 0};
  }

  // Reads the header of the sender's call and compares it with mine.
  Status open(Stream s, int sender, uint64_t expected_bytes) {
    Status status = Status::kOk;
    if (team.lane() == 0) {
      PeerState& st = in(s, sender);
      const char* slot = v.slot(sender, s, team.channel(), v.rank, st.base + 1);
      const CallHeader& theirs = *reinterpret_cast<const CallHeader*>(slot);
      if (!same_call(theirs.id, id) || theirs.stream_bytes != expected_bytes ||
          theirs.item_bytes == 0) {
        Fault fault{};
        fault.status = Status::kMismatch;
        fault.peer = sender;
        fault.stream = s;
        fault.mine = header();
        fault.mine.stream_bytes = expected_bytes;
        fault.theirs = theirs;
        status = fail(v, fault);
      } else {
        st.data = theirs.heap_offset == kNotInHeap ? nullptr : v.heaps[sender] + theirs.heap_offset;
        reads_peer_buffers |= st.data != nullptr;
        st.item_bytes = theirs.item_bytes;
        st.items = items_of(expected_bytes, theirs.item_bytes);
        factors()[sender] = theirs.factor;
      }
    }
    return team.share(status);
  }

  // Waits for bytes [begin, begin + bytes) of what `sender` sends me and says where they lie.
  Status receive(Stream s, int sender, uint64_t expected_bytes, uint64_t begin, uint64_t bytes,
                 const char** data) {
    PeerState& st = in(s, sender);
    if (begin == 0) {
      RC_RETURN_IF_FAILED(await(team, v, Site{s, sender, false, 0}, st.base + 1, header()));
      RC_RETURN_IF_FAILED(open(s, sender, expected_bytes));
    }
    const uint32_t last = bytes == 0 ? 0 : uint32_t((begin + bytes - 1) / st.item_bytes);
    if (last > 0)
      RC_RETURN_IF_FAILED(
          await(team, v, Site{s, sender, false, last}, st.base + 1 + last, header()));
    *data = st.data != nullptr
                ? st.data + begin
                : v.slot(sender, s, team.channel(), v.rank, st.base + 1 + last) + kHeaderBytes;
    return Status::kOk;
  }

  // After a team.sync(): everything before `end` of the sender's stream has been read.
  void release(Stream s, int sender, uint64_t expected_bytes, uint64_t end) {
    if (team.lane() != 0) return;
    PeerState& st = in(s, sender);
    const uint32_t done = end >= expected_bytes ? st.items : uint32_t(end / st.item_bytes);
    if (done == st.acked) return;
    st.acked = done;
    acknowledge(team, v, s, sender, st.base + done);
  }

  // Lane 0, before the call: what a peer published in an earlier call and I did not read shows that
  // we made different calls then, in which neither waited for the other (two ranks that both
  // broadcast).
  Status verify_streams() const {
    CallHeader theirs;
    for (int d = 1; d < world(); ++d) {
      if (!other_call_seen(v, team.channel(), peer_at(d), id, &theirs)) continue;
      Fault fault{};
      fault.status = Status::kMismatch;
      fault.peer = peer_at(d);
      fault.mine = header();
      fault.theirs = theirs;
      return fail(v, fault);
    }
    return Status::kOk;
  }

  // Lane 0, after the call succeeded: what was read in peers' buffers is what they meant to send. A
  // sender that gave up may use its buffer again, but it raises its abort word before it returns;
  // so if no word is up after the last read, no buffer changed before it.
  Status verify_peer_buffers() const {
    if (!reads_peer_buffers) return Status::kOk;
    fence_seq_cst_sys();  // the reads of data come before the reads of the words
    if (!abort_seen(v)) return Status::kOk;
    Fault fault{};
    fault.status = Status::kAborted;
    fault.mine = header();
    return fail(v, fault);
  }

  void commit_seen(Stream s, int sender) {
    if (team.lane() == 0)
      v.epochs(s, team.channel(), sender)->seen = in(s, sender).base + in(s, sender).items;
  }
};

RINGCOMM_NAMESPACE_END
