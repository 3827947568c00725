// All-reduce, reduce-scatter and all-gather by multicast (NVLS): the switch adds up what all ranks
// hold, and stores to all of them at once.
//
// A *window* is memory of a rank's own that is bound, with those of all ranks, to one multicast
// object. At RankTable.window a rank reaches its own; at RankTable.windows a load gives the sum of
// all, and a store reaches all. A channel has two slots in it, used by turns, and a slot has a part
// for each rank's chunk. *Piece* j of a call is what one slot holds of this channel's slices of all
// chunks. Round j, for pieces j = 0, 1, ...:
//
//   1. Reductions: copy piece j of all chunks into my slot j mod 2.
//   2. Synchronize: publish item j to every peer, and await item j of each. It says that my
//      piece j is in the slot, that piece j - 1 of my chunk is reduced and stored, and that I have
//      copied piece j - 2 out, so that the slot is free.
//   3. Load the sum of piece j of my chunk, or all-gather: load it from my input. Store it to all
//      windows; reduce-scatter: to the output.
//   4. All but reduce-scatter: copy piece j - 1 of all chunks out of my slot, in a last round, too.
//
// B bytes of the whole buffer, W ranks, P pieces:
//
//   all-reduce      P + 1 barriers; over each rank's links (1 + 1/W) B out (what the switch reads
//                   of my window, and my results) and as much in; 2 B copied locally.
//   reduce-scatter  P barriers; B out, B/W in; B copied.
//   all-gather      P + 1 barriers; B/W out, B in; B copied.
//
// The switch adds in an order that nobody knows, and 16-bit types are rounded again where AVG
// divides: results differ from those of `one_shot` in the last bits, and are equal on all ranks.
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

// Piece `j` of a chunk of a buffer; `slice` is the channel's of a whole chunk, and the last chunks
// may be shorter or empty.
RC_TEAM_FN Span piece_of(const Span& chunk, const Extent& slice, uint64_t piece_bytes, uint32_t j) {
  const uint64_t begin = slice.begin_bytes + j * piece_bytes;
  uint64_t end = begin + piece_bytes < slice.end_bytes ? begin + piece_bytes : slice.end_bytes;
  if (end > chunk.bytes) end = chunk.bytes;
  return {chunk.ptr + begin, begin < end ? end - begin : 0};
}

// The first `bytes` bytes of a vector, from or to memory of any alignment.
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

// Vectors that a lane loads together: a choice, not swept. Sums are divided at most.
constexpr int kWindowLoads = 8;

// store(at, load(at)) for vectors [first, last), `at` in bytes: several loads under way at a time.
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

// Item `item` of mine to every peer, and theirs to me. What the ranks did before, by either address
// of the windows, comes before what they do afterwards by the other.
template <class E>
RC_TEAM_FN Status sync_peers(E& e, uint32_t item, uint64_t stream_bytes) {
  // Items carry nothing but the header of the first.
  e.publish_shared(item, Span{nullptr, stream_bytes}, false, e.segment_bytes());
  return e.wait_by_lanes({1, e.world()}, [&](int p) {
    const uint32_t epoch = e.in(Stream::kShared, p).base + 1 + item;
    Status status = await_alone(e.team, e.v, Site{Stream::kShared, p, false, item}, epoch);
    if (status == Status::kOk && item == 0) status = e.open(Stream::kShared, p, stream_bytes);
    fence_proxy_alias();
    return status;
  });
}

// Step 3 of a round: `bytes` bytes of my chunk, whose sum and results lie at `all`. What is not a
// whole vector in the user's memory goes by bytes; pieces are of whole vectors.
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
  // Nobody reads my window any more, nor my header of another call.
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
  run_collective(team, p, rank_in_launch, w, MoveOps{}, [&](auto& e, const CallArgs& args) {
    return multicast_collective<T>(e, args, w.in, w.out);
  });
}

#endif

}  // namespace device
RINGCOMM_NAMESPACE_END
