// All-reduce, reduce-scatter and all-gather by multicast (NVLS): the switch adds all ranks' values,
// and stores a value to all ranks at once.
//
// A *window* is a rank's own memory that is bound, with the other ranks' windows, to one multicast
// object. RankTable.window is the address of a rank's own window. At RankTable.windows a load
// returns the sum over all windows, and a store writes to all. A channel alternates between two
// slots in the window. *Piece* j of a call is the j-th part of this channel's slices of all chunks;
// a slot holds one piece. Round j, for pieces j = 0, 1, ...:
//
//   1. Reductions: copy piece j of all chunks into my slot j mod 2.
//   2. Synchronize: publish item j to every peer, and wait for item j of each peer. Item j means:
//      my piece j is in the slot; piece j - 1 of my chunk is reduced and stored; and I have copied
//      piece j - 2 out, so the slot is free.
//   3. Load the sum of piece j of my chunk (all-gather: my input). Store it to all windows
//      (reduce-scatter: to the output).
//   4. Except reduce-scatter: copy piece j - 1 of all chunks out of my slot; a last round follows.
//
// B bytes of the whole buffer, W ranks, P pieces:
//
//   all-reduce      P + 1 barriers; over each rank's links (1 + 1/W) B out (what the switch reads
//                   of my window, and my results) and as much in; 2 B copied locally.
//   reduce-scatter  P barriers; B out, B/W in; B copied.
//   all-gather      P + 1 barriers; B/W out, B in; B copied.
//
// The switch adds in an unspecified order, and AVG rounds 16-bit types a second time. So results
// differ from those of `one_shot` in the last bits; all ranks have equal results.
#pragma once

#include "kernels/cuda/body.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

#if RC_CUDA

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

// Vectors that a lane loads together; chosen without measurements. AVG only divides the sums.
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

// Publishes item `item` to every peer and waits for every peer's item. Accesses before the barrier
// by one address of the windows precede accesses after it, on any rank, by the other address.
template <class E>
RC_TEAM_FN Status sync_peers(E& e, uint32_t item, uint64_t stream_bytes) {
  // Only item 0 carries data: the call's header.
  e.publish_shared(item, Span{nullptr, stream_bytes}, false, e.segment_bytes());
  return e.wait_by_lanes({1, e.world()}, [&](int p) {
    const uint32_t epoch = e.in(Stream::kShared, p).base + 1 + item;
    Status status = await_alone(e.team, e.v, Site{Stream::kShared, p, false, item}, epoch);
    if (status == Status::kOk && item == 0) status = e.open(Stream::kShared, p, stream_bytes);
    fence_proxy_alias();
    return status;
  });
}

// Step 3 of a round: reduces `bytes` bytes of my chunk, whose sum and results are at `all`. A
// partial vector in the user's memory is stored byte by byte; pieces are whole vectors.
template <class T, class E>
RC_TEAM_FN void reduce_by_multicast(E& e, const CallArgs& args, char* all, char* out,
                                    uint64_t bytes) {
  const bool shares = args.collective == Collective::kAllReduce;
  const int by = RedOp(args.redop) == RedOp::kAvg ? e.world() : 0;
  const uint64_t vectors = (bytes + 15) / 16, aligned = misalignment(out) == 0 ? bytes / 16 : 0;
  const uint64_t whole = shares ? vectors : aligned;
  const auto sum = [&](uint64_t at) { return multicast_sum16<T>(all + at); };
  each_vector<kWindowLoads>(e.team, 0, whole, sum, [&](uint64_t at, const Vec16& v) {
    const Vec16 result = divided<T>(v, by);
    if (shares)
      multicast_store16(all + at, result);
    else
      store16(out + at, result);
  });
  each_vector<1>(e.team, whole, vectors, sum, [&](uint64_t at, const Vec16& v) {
    store_some(out + at, divided<T>(v, by), bytes - at);
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

template <class T, class E>
RC_TEAM_FN Status multicast_collective(E& e, const CallArgs& args, const Chunks& in,
                                       const Chunks& out) {
  const bool reduces = args.collective != Collective::kAllGather,
             shares = args.collective != Collective::kReduceScatter;
  const RankTable& t = *args.table;
  const uint64_t piece_bytes = t.piece_bytes,
                 own_begin = 2 * uint64_t(e.team.channel()) * t.world * piece_bytes;
  const WindowSlots slots{t.window + own_begin, t.windows + own_begin, piece_bytes, t.world};
  const Extent slice = extent_of(args.chunk_bytes, e.team.portion(), e.cut.line_shift);
  const auto pieces =
      uint32_t((slice.end_bytes - slice.begin_bytes + piece_bytes - 1) / piece_bytes);
  const uint32_t rounds = pieces == 0 || shares ? pieces + 1 : pieces;
  const uint64_t stream_bytes = uint64_t(rounds) * e.segment_bytes();
  const Peers all{1, e.world()};
  // Wait until no peer reads my window, or my header of an earlier call.
  RC_RETURN_IF_FAILED(
      e.wait_by_lanes(all, [&](int p) { return e.drained(Stream::kShared, p, 0); }));
  for (uint32_t j = 0; j < rounds; ++j) {
    for (int r = 0; reduces && j < pieces && r < e.world(); ++r) {
      const Span from = piece_of(in.get(r), slice, piece_bytes, j);
      e.ops.copy_shared(e.team, slots.own + slots.offset(j, r), from.ptr, from.bytes);
    }
    RC_RETURN_IF_FAILED(sync_peers(e, j, stream_bytes));
    if (j < pieces) {
      const uint64_t begin = slice.begin_bytes + j * piece_bytes,
                     bytes =
                         piece_of((reduces ? in : out).get(e.rank()), slice, piece_bytes, j).bytes;
      char* const results = slots.all + slots.offset(j, e.rank());
      if (reduces)
        reduce_by_multicast<T>(e, args, results, args.out + begin, bytes);
      else
        share_by_multicast(e, results, args.in + begin, bytes);
    }
    for (int r = 0; shares && j > 0 && r < e.world(); ++r) {
      const Span to = piece_of(out.get(r), slice, piece_bytes, j - 1);
      e.ops.copy_private(e.team, to.ptr, slots.own + slots.offset(j - 1, r), to.bytes);
    }
    if (reduces && shares) e.team.sync();  // the next round fills the slot that was copied out
  }
  e.team.sync();
  e.each_by_lanes(all, [&](int p) {
    e.release(Stream::kShared, p, stream_bytes, stream_bytes);
    e.commit_seen(Stream::kShared, p);
    e.commit_sent(Stream::kShared, p, rounds);
  });
  return Status::kOk;
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
