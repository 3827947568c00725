// SPDX-License-Identifier: Apache-2.0

// All-reduce, reduce-scatter and all-gather by multicast (NVLS): the switch adds all ranks' values,
// and stores a value to all ranks at once.
//
// A *window* is a rank's own memory that is bound, with the other ranks' windows, to one multicast
// object. RankTable.window is the address of a rank's own window. At RankTable.windows a load
// returns the sum over all windows, and a store writes to all. The chunks of a heap that grows are
// bound to the same object: at RankTable.heap_windows + o, a load returns the sum over the bytes at
// offset o of all heaps, and a store writes to all heaps.
//
// The *buffer* of a call is the memory that a call in place accesses by multicast: the output of an
// all-gather, and otherwise the input. (An all-reduce in place has one tensor for both.) A rank
// *publishes* the buffer's offset in its heap, in the header of item 0, if the buffer is bound
// (CallArgs.bound). Every rank reads all headers, so all ranks make the same choice between a call
// in place and a call through slots.
//
// A call runs in place if all ranks have published the same offset. With B bytes in the whole
// buffer and W ranks:
//
//   1. Publish item 0 to every peer, and wait for item 0 of each peer: all buffers are ready.
//   2. Load the sum of my chunk (all-gather: my input). Store it to all buffers (reduce-scatter: to
//      the output). Nothing is copied locally.
//   3. Acknowledge to every peer, and wait for every peer's acknowledgement: no peer reads my
//      buffer any more, and all peers' results are in it.
//
// Otherwise a call runs through slots. A channel alternates between two slots in the window.
// *Piece* j of a call is the j-th part of this channel's slices of all chunks; a slot holds one
// piece. Round j, for pieces j = 0, 1, ...:
//
//   1. Reductions: copy piece j of all chunks into my slot j mod 2.
//   2. Synchronize: publish the round's item to every peer, and wait for this item of each peer.
//      The item means: my piece j is in the slot; piece j - 1 of my chunk is reduced and stored;
//      and I have copied piece j - 2 out, so the slot is free.
//   3. Load the sum of piece j of my chunk (all-gather: my input). Store it to all windows
//      (reduce-scatter: to the output).
//   4. Except reduce-scatter: copy piece j - 1 of all chunks out of my slot; a last round follows.
//
// A rank that publishes a buffer fills no slot before it has read the headers. If only some ranks
// have published one, round 0 of a reduction therefore has a second barrier.
//
// P is the number of pieces. The bytes on a rank's links are the same in place and through slots.
// An all-reduce sends (1 + 1/W) B (all that the switch reads from me, and my results) and receives
// as much. A reduce-scatter sends B and receives B/W. An all-gather sends B/W and receives B.
//
//                    in place                  through slots
//   all-reduce       2 barriers, no copies     P + 1 barriers; 2 B copied locally
//   reduce-scatter   2 barriers, no copies     P barriers; B copied
//   all-gather       2 barriers, no copies     P + 1 barriers; B copied
//
// The switch adds in an unspecified order, and AVG rounds 16-bit types a second time. So results
// differ from those of `one_shot` in the last bits; all ranks have equal results.
#pragma once

#include "kernels/cuda/body.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

#if RC_CUDA

// The header that item 0 of a multicast call carries.
struct MulticastHeader {
  CallHeader call;
  uint64_t buffer_offset;  // of the sender's buffer in its heap; kNotInHeap: it is not bound
};
static_assert(sizeof(MulticastHeader) <= kHeaderBytes);

// This rank's buffer, and the offset that this rank publishes.
struct MulticastBuffer {
  Span span;
  uint64_t offset;
};

// The ranks that have published a buffer. kAll: all ranks, and their offsets are equal. kSome also
// covers different offsets.
enum class Published { kNone, kSome, kAll };

// Multimem instructions access whole vectors, so the host sets CallArgs.bound only for buffers at
// multiples of this size.
constexpr uint64_t kBoundAlign = 16;

// This channel's part of the windows: two slots.
struct WindowSlots {
  char* own;
  char* all;
  uint64_t piece_bytes;
  int world;

  RC_TEAM_FN uint64_t offset(uint32_t piece, int chunk) const {
    return (uint64_t(piece & 1) * world + chunk) * piece_bytes;
  }
};

// Returns piece `j` of a chunk. `slice`: the channel's part of a full chunk; the last chunks may be
// shorter or empty.
RC_TEAM_FN Span piece_of(const Span& chunk, const Extent& slice, uint64_t piece_bytes, uint32_t j) {
  const uint64_t begin = slice.begin_bytes + j * piece_bytes;
  uint64_t end = begin + piece_bytes < slice.end_bytes ? begin + piece_bytes : slice.end_bytes;
  if (end > chunk.bytes) end = chunk.bytes;
  return {chunk.ptr + begin, begin < end ? end - begin : 0};
}

// Loads or stores the first `bytes` bytes of a vector, at any alignment.
RC_TEAM_FN Vec16 load_some(const char* from, uint64_t bytes) {
  Vec16 v{};
  RC_UNROLL
  for (int i = 0; i < 16; ++i)
    if (uint64_t(i) < bytes) v.word[i / 4] |= uint32_t(uint8_t(from[i])) << (i % 4 * 8);
  return v;
}
RC_TEAM_FN void store_some(char* to, const Vec16& v, uint64_t bytes) {
  RC_UNROLL
  for (int i = 0; i < 16; ++i)
    if (uint64_t(i) < bytes) to[i] = char(uint8_t(v.word[i / 4] >> (i % 4 * 8)));
}

template <class T>
RC_TEAM_FN Vec16 divided(Vec16 v, int by) {
  if (by == 0) return v;
  T elems[16 / sizeof(T)];
  memcpy(elems, &v, 16);
  RC_UNROLL
  for (T& x : elems) x = Reducer<T, RedOp::kSum>::finished(Traits<T>::load(x), by);
  memcpy(&v, elems, 16);
  return v;
}

// The number of vectors that a lane loads together, also for AVG, where the lane only divides the
// sums that it has loaded. Chosen without measurements.
constexpr int kWindowLoads = 8;

// Calls store(at, load(at)) for vectors [first, last), `at` in bytes; `unroll` loads overlap.
template <int unroll, class Team, class Load, class Store>
RC_TEAM_FN void each_vector(const Team& team, uint64_t first, uint64_t last, Load load,
                            Store store) {
  const uint64_t lanes = team.num_lanes(), stride = lanes * unroll;
  uint64_t i = first + team.lane();
  for (; i + stride - lanes < last; i += stride) {
    Vec16 v[unroll];
    RC_UNROLL
    for (int u = 0; u < unroll; ++u) v[u] = load((i + u * lanes) * 16);
    RC_UNROLL
    for (int u = 0; u < unroll; ++u) store((i + u * lanes) * 16, v[u]);
  }
  for (; i < last; i += lanes) store(i * 16, load(i * 16));
}

// Publishes item `item` to every peer and waits for every peer's item. Bound memory has two
// addresses: its own and a multicast address. Accesses by either address before the barrier precede
// accesses by the other address after it, on any rank. With item 0 the ranks also exchange the
// places of their buffers (View.results).
template <class E>
RC_TEAM_FN Status sync_peers(E& e, uint32_t item, uint64_t stream_bytes,
                             const MulticastBuffer& mine) {
  const auto header = [&](int reader, int sender, uint32_t epoch) {
    return reinterpret_cast<MulticastHeader*>(
        e.v.header(reader, Stream::kShared, e.team.channel(), sender, epoch));
  };
  if (item == 0 && e.team.lane() == 0) e.v.results[e.rank()] = mine.span.ptr;
  // Only item 0 carries data: the call's header.
  e.publish_shared(item, Span{nullptr, stream_bytes}, false, e.segment_bytes(), [&](int p) {
    if (item > 0) return;
    header(p, e.rank(), e.sent(Stream::kShared, p) + 1)->buffer_offset = mine.offset;
  });
  return e.wait_by_lanes({1, e.world()}, [&](int p) {
    const uint32_t first = e.in(Stream::kShared, p).base + 1;
    Status status = await_alone(e.team, e.v, Site{Stream::kShared, p, false, item}, first + item);
    if (status == Status::kOk && item == 0) {
      status = e.open(Stream::kShared, p, {{nullptr, stream_bytes}});
      const MulticastHeader* const theirs = header(e.rank(), p, first);
      const uint64_t offset = load_relaxed_sys(&theirs->buffer_offset);
      if (status == Status::kOk && offset != kNotInHeap &&
          !reachable(e.v, p, offset, mine.span.bytes, kBoundAlign))
        status = fail(e.team, e.v, Status::kCorrupt, p, &theirs->call, stream_bytes);
      e.v.results[p] = offset == kNotInHeap ? nullptr : e.v.heaps[p] + offset;
    }
    fence_proxy_alias();
    return status;
  });
}

// Call it after the barrier of item 0. All ranks have read the same headers and get equal values.
template <class E>
RC_TEAM_FN Published published_by(const E& e, const MulticastBuffer& mine) {
  const bool published = mine.offset != kNotInHeap;
  bool all = published, some = published;
  RC_ROLLED
  for (int d = 1; d < e.world(); ++d) {
    const int p = e.peer_at(d);
    all &= e.v.results[p] == e.v.heaps[p] + mine.offset;
    some |= e.v.results[p] != nullptr;
  }
  return all ? Published::kAll : some ? Published::kSome : Published::kNone;
}

// A part of my chunk. Its sums are loaded from the multicast address `all`, where an all-reduce
// also stores the results.
struct MulticastSums {
  char* all;
  char* out;  // my own address of the results; unused for all-reduces through slots
  uint64_t bytes;
  bool padded;  // true: an all-reduce may store a partial last vector as a whole vector
};

// Reduces a part of my chunk. A partial vector is stored byte by byte. In an all-reduce in place, a
// lane loads its sum once and stores it to each rank's buffer, so that all ranks get equal bits.
template <class T, class E>
RC_TEAM_FN void reduce_by_multicast(E& e, const CallArgs& args, const MulticastSums& part) {
  const bool shares = args.collective == Collective::kAllReduce;
  const int by = RedOp(args.redop) == RedOp::kAvg ? e.world() : 0;
  const uint64_t vectors = (part.bytes + 15) / 16;
  uint64_t whole = part.bytes / 16;
  if (shares && part.padded) whole = vectors;
  if (!shares && misalignment(part.out) != 0) whole = 0;
  const auto sum = [&](uint64_t at) { return multicast_sum16<T>(part.all + at); };
  each_vector<kWindowLoads>(e.team, 0, whole, sum, [&](uint64_t at, const Vec16& v) {
    const Vec16 result = divided<T>(v, by);
    if (shares)
      multicast_store16(part.all + at, result);
    else
      store16(part.out + at, result);
  });
  each_vector<1>(e.team, whole, vectors, sum, [&](uint64_t at, const Vec16& v) {
    const Vec16 result = divided<T>(v, by);
    if (!shares) return store_some(part.out + at, result, part.bytes - at);
    RC_ROLLED
    for (int p = 0; p < e.world(); ++p)
      store_some(e.v.results[p] + (part.out + at - e.v.results[e.rank()]), result, part.bytes - at);
  });
}

template <class E>
RC_TEAM_FN void share_by_multicast(E& e, char* all, const char* in, uint64_t bytes) {
  const uint64_t whole = misalignment(in) == 0 ? bytes / 16 : 0;
  const auto share = [&](uint64_t at, const Vec16& v) { multicast_store16(all + at, v); };
  each_vector<kWindowLoads>(e.team, 0, whole, [&](uint64_t at) { return load16(in + at); }, share);
  each_vector<1>(
      e.team, whole, (bytes + 15) / 16, [&](uint64_t at) { return load_some(in + at, bytes - at); },
      share);
}

// One rank's call on one channel.
template <class T, class E>
struct MulticastCall {
  E& e;
  const CallArgs& args;
  const Chunks &in, &out;
  const bool reduces = args.collective != Collective::kAllGather,
             shares = args.collective != Collective::kReduceScatter;
  const WindowSlots slots = slots_of(*args.table);
  const Extent slice = extent_of(args.chunk_bytes, e.team.portion(), e.cut.line_shift);
  const uint32_t pieces =
      uint32_t((slice.end_bytes - slice.begin_bytes + slots.piece_bytes - 1) / slots.piece_bytes);
  const uint32_t rounds = pieces == 0 || shares ? pieces + 1 : pieces;
  // One item per round, and one more for the second barrier that round 0 may have. All calls count
  // this item: epochs only grow, so a call need not publish all of its items.
  const uint32_t items = rounds + 1;
  const uint64_t stream_bytes = uint64_t(items) * e.segment_bytes();
  const MulticastBuffer buffer = {
      {reduces ? args.in : args.out, args.total_bytes},
      args.bound ? e.heap_offset(reduces ? args.in : args.out) : kNotInHeap};

  RC_TEAM_FN WindowSlots slots_of(const RankTable& t) const {
    const uint64_t begin = 2 * uint64_t(e.team.channel()) * t.world * t.piece_bytes;
    return {t.window + begin, t.windows + begin, t.piece_bytes, t.world};
  }
  RC_TEAM_FN Chunks chunks() const { return reduces ? in : out; }

  RC_TEAM_FN void fill_slot(uint32_t j) {
    for (int r = 0; r < e.world(); ++r) {
      const Span from = piece_of(in.get(r), slice, slots.piece_bytes, j);
      e.ops.copy_shared(e.team, slots.own + slots.offset(j, r), from.ptr, from.bytes);
    }
  }

  RC_TEAM_FN void move_in_place() {
    const uint64_t slice_bytes = slice.end_bytes - slice.begin_bytes;
    const Span part = piece_of(chunks().get(e.rank()), slice, slice_bytes, 0);
    char* const all = args.table->heap_windows + e.heap_offset(part.ptr);
    if (reduces)
      reduce_by_multicast<T>(
          e, args, {all, shares ? part.ptr : args.out + slice.begin_bytes, part.bytes, false});
    else
      share_by_multicast(e, all, args.in + slice.begin_bytes, part.bytes);
    // Before the call succeeds, check that no peer gave up and used its buffer again meanwhile.
    e.reads_peer_buffers = true;
  }

  // Makes a call's rounds through slots, after item 0. syncs_anew: round 0 has a second barrier.
  RC_TEAM_FN Status move_through_slots(bool syncs_anew) {
    for (uint32_t j = 0; j < rounds; ++j) {
      if (reduces && j < pieces && (j > 0 || args.bound)) fill_slot(j);
      if (j > 0 || syncs_anew)
        RC_RETURN_IF_FAILED(sync_peers(e, j + (syncs_anew ? 1 : 0), stream_bytes, buffer));
      if (j < pieces) {
        const uint64_t begin = slice.begin_bytes + j * slots.piece_bytes,
                       bytes = piece_of(chunks().get(e.rank()), slice, slots.piece_bytes, j).bytes;
        char* const results = slots.all + slots.offset(j, e.rank());
        if (reduces)
          reduce_by_multicast<T>(e, args, {results, args.out + begin, bytes, true});
        else
          share_by_multicast(e, results, args.in + begin, bytes);
      }
      for (int r = 0; shares && j > 0 && r < e.world(); ++r) {
        const Span to = piece_of(out.get(r), slice, slots.piece_bytes, j - 1);
        e.ops.copy_private(e.team, to.ptr, slots.own + slots.offset(j - 1, r), to.bytes);
      }
      if (reduces && shares) e.team.sync();  // the next round fills the slot that was copied out
    }
    return Status::kOk;
  }

  RC_TEAM_FN Status run() {
    const Peers all{1, e.world()};
    // Wait until no peer reads my window, or my header of an earlier call.
    RC_RETURN_IF_FAILED(
        e.wait_by_lanes(all, [&](int p) { return e.drained(Stream::kShared, p, 0); }));
    if (reduces && pieces > 0 && !args.bound) fill_slot(0);
    RC_RETURN_IF_FAILED(sync_peers(e, 0, stream_bytes, buffer));
    const Published published = published_by(e, buffer);
    if (published == Published::kAll)
      move_in_place();
    else
      RC_RETURN_IF_FAILED(move_through_slots(reduces && published == Published::kSome));
    e.team.sync();
    e.each_by_lanes(all, [&](int p) { e.release(Stream::kShared, p, stream_bytes, stream_bytes); });
    if (published == Published::kAll)
      RC_RETURN_IF_FAILED(e.wait_by_lanes(all, [&](int p) {
        const Status status = e.drained(Stream::kShared, p, items);
        fence_proxy_alias();
        return status;
      }));
    e.each_by_lanes(all, [&](int p) {
      e.commit_seen(Stream::kShared, p);
      e.commit_sent(Stream::kShared, p, items);
    });
    return Status::kOk;
  }
};

template <class T, class E>
RC_TEAM_FN Status multicast_collective(E& e, const CallArgs& args, const Chunks& in,
                                       const Chunks& out) {
  return MulticastCall<T, E>{e, args, in, out}.run();
}

template <class T, class Team>
RC_TEAM_FN void multicast_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                 Workspace& w) {
  run_collective(team, p, rank_in_launch, w, MoveOps{},
                 [&](auto& e, const CallArgs& args)
                     RC_INLINED { return multicast_collective<T>(e, args, w.in, w.out); });
}

#endif

}  // namespace device
RINGCOMM_NAMESPACE_END
