// SPDX-License-Identifier: Apache-2.0

// The bodies of the collectives' kernels, for any Team (ringcomm/core/team.h: lanes that share a
// channel). kernels.cu instantiates them for blocks, and tests/support/emulator for host threads.
#pragma once

#include "kernels/cuda/loops.h"
#include "kernels/cuda/workspace.h"
#include "ringcomm/collectives/all_reduce.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// A rank's spans and peers in a launch with lists; null spans: the data are cut evenly.
struct Lists {
  const Span *in, *out;
  Edges edges;
};
RC_TEAM_FN Lists lists_of(const LaunchParams&, int) { return {nullptr, nullptr, Edges{}}; }
RC_TEAM_FN Lists lists_of(const ListParams& p, int rank_in_launch) {
  const ListArgs& of = p.lists[rank_in_launch];
  return {of.in < 0 ? nullptr : p.spans + of.in, of.out < 0 ? nullptr : p.spans + of.out,
          Edges{.my_readers = of.readers, .my_senders = of.senders}};
}

RC_FN int ring_rank(const RankTable& t, int ring, int position) {
  return rings_of(&t)[ring * t.world + position];
}
RC_FN int ring_rank(const InlineTable& t, int ring, int position) {
  return t.order[ring * t.world + position];
}

RC_TEAM_FN int world_of(const LaunchParams& p, const CallArgs& args) {
  return args.inlined ? p.alone.table.world : args.table->world;
}
RC_TEAM_FN int rank_of(const LaunchParams& p, const CallArgs& args) {
  return args.inlined ? p.alone.table.rank : args.table->rank;
}

// Loads the state of the call's streams when the call begins; LL has no streams. The last lanes do
// this, since the first lane has other loads to wait for.
template <class Team, class Table>
RC_TEAM_FN void load_links(Team& team, const CallArgs& args, const Table& t, Workspace& w) {
  const bool message = args.collective == Collective::kSend;
  const int links = args.algorithm == Algorithm::kLL ? 0 : (message ? 1 : 2) * t.world;
  RC_ROLLED
  for (int i = team.num_lanes() - 1 - team.lane(); i < links; i += team.num_lanes()) {
    const bool shared = i >= t.world;
    const Stream s = message ? Stream::kMessage : shared ? Stream::kShared : Stream::kPair;
    const int peer = shared ? i - t.world : i;
    w.peers[int(s) * t.world + peer] =
        find_link(t.regions[t.rank], t.layout, s, team.channel(), peer);
  }
}

// Loads the words of the channel's line and the abort word, by one lane. Stores follow all loads,
// so that the loads overlap.
RC_TEAM_FN void load_channel(const CallArgs& args, char* region, const Layout& layout, int channel,
                             Workspace& w) {
  auto* line = reinterpret_cast<ChannelLine*>(region + layout.channel_offset(channel));
  // Messages are not counted, since a collective may be counting on this channel at the same time.
  const bool counts = args.collective != Collective::kSend;
  const uint64_t sequence = counts ? line->sequence : 0;
  const uint32_t ll_epoch = counts ? line->ll_epoch : 0;
  // See NOTE [One call at a time].
  const uint32_t running = counts ? exchange_relaxed_sys(&line->running, 1) : 0;
  // Pairs with the release in raise_fault(). Loaded last, since later accesses wait for an acquire.
  w.aborted = load_acquire_sys(&reinterpret_cast<ControlPage*>(region)->aborted);
  w.sequence = sequence;
  w.ll_epoch = ll_epoch;
  w.running = running;
}

// Copies the table into shared memory and loads this rank's words of the call; the loads overlap.
// Lanes other than the first may read the view after the next sync().
template <class Team, class Table>
RC_TEAM_FN void load_words(Team& team, const CallArgs& args, const Table& t, Workspace& w) {
  const int ring = t.rings > 0 ? team.channel() % t.rings : -1;
  if (team.lane() == 0) {
    load_channel(args, t.regions[t.rank], t.layout, team.channel(), w);
    // A single rank deals no tiles: reduce_hop() takes whole parts, and reductions have no gaps.
    w.deal = args.sliced || t.world == 1
                 ? Deal{}
                 : Deal::of(team.channel(), team.num_channels(), log2_of(t.layout.segment_bytes));
    w.host = t.host;
  }
  load_links(team, args, t, w);
  for (int p = team.lane(); p < t.world; p += team.num_lanes()) {
    w.regions[p] = t.regions[p];
    w.heaps[p] = t.heaps[p];
    w.heap_bytes[p] = t.heap_bytes[p];
    w.ring[p] = ring < 0 ? p : ring_rank(t, ring, p);
    if (w.ring[p] == t.rank) w.ring_position = p;
  }
  team.sync();
  if (team.lane() == 0)
    w.view = View{t.rank,       t.world,         t.layout,        w.regions, w.heaps,
                  w.heap_bytes, args.timeout_ns, w.peers,         w.sources, w.factors,
                  &w.mine,      w.ring,          w.ring_position, w.results, w.ll_epoch};
}

// Fills the workspace. Every block does this first, since every later step reads the workspace.
template <class Team, class Params>
RC_TEAM_FN void load_table(Team& team, const Params& p, int rank_in_launch, Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  if (team.lane() == 0) {
    const Lists lists = lists_of(p, rank_in_launch);
    w.failure = 0;
    w.portion = portion_of(team.channel(), team.num_channels());
    w.gaps[0] = w.gaps[kNoGaps] = {};
    w.in = {args.in, args.total_bytes, args.chunk_bytes, lists.in};
    w.out = {args.out, args.total_bytes, args.chunk_bytes, lists.out};
  }
  if (args.inlined)
    load_words(team, args, p.alone.table, w);
  else
    load_words(team, args, *args.table, w);
}

// NOTE [One call at a time]
// A rank's calls take the numbers of their items from words of its region. Two calls at once would
// take the same numbers and mix their data. The host orders the calls that it launches, but it does
// not see when a graph is replayed. So each block checks: it sets `running` of its channel's line
// to 1 while it runs, and a block that finds a 1 there ends the communicator. Messages are not
// counted: sends and receives have items of their own.

// Numbers the call and stores its header for fault records. Returns kAborted if this rank has
// aborted earlier. Call it after load_table(); afterwards all lanes may read the call and the view.
template <class Team>
RC_TEAM_FN Status begin_call(Team& team, const CallArgs& args, Workspace& w) {
  Status status = Status::kOk;
  if (team.lane() == 0) {
    const View& v = w.view;
    const bool counts = args.collective != Collective::kSend;
    const uint64_t sequence = counts ? w.sequence + 1 : 0;
    // Strong, since the host reads the word while the kernel runs (DeviceCore.look()).
    if (counts) store_relaxed_sys(&v.channel_line(team.channel())->sequence, sequence);
    w.mine = CallHeader{
        CallId{sequence, args.match_bytes, args.collective, args.dtype, args.redop, args.root,
               args.algorithm, args.sliced ? Kernels::kSliced : Kernels::kNative},
        0,
        0,
        kNotInHeap,
        args.factor,
        kNotInHeap};
    if (w.aborted != 0)
      status = Status::kAborted;
    else if (w.running != 0)
      status = fail(team, v, Status::kOverlap, v.rank, nullptr, 0);
  }
  return team.share(status);
}

// Ends a block's call with a status that all lanes share.
template <class Team>
RC_TEAM_FN void end_call(const Team& team, const View& v, Status status, bool counts) {
  if (team.lane() != 0) return;
  if (status != Status::kOk)
    await_raised(team, v);
  else if (counts)
    store_relaxed_sys(&v.channel_line(team.channel())->running, 0);
}

template <class E>
RC_TEAM_FN Status move_evenly(E& e, const CallArgs& args, const Chunks& in, const Chunks& out) {
  switch (args.collective) {
    case Collective::kAllGather: {
      // The copy engines move the data; the kernels before and after only synchronize.
      if (args.algorithm == Algorithm::kCopyEngine) return exchange_one_shot(e, in, out, Edges{});
      const Span mine{args.in, out.get(e.rank()).bytes};
      return args.algorithm == Algorithm::kRing ? all_gather_ring(e, mine, out)
                                                : share_one_shot(e, mine, out, -1);
    }
    case Collective::kBroadcast:
      return share_one_shot(e, out.get(e.rank()), out, args.root);
    default:  // barrier
      return exchange_one_shot(e, in, out, Edges{});
  }
}

template <class E>
RC_TEAM_FN Status move_lists(E& e, const CallArgs& args, const Chunks& in, const Chunks& out,
                             Edges edges) {
  if (args.collective == Collective::kAllGather)
    return share_one_shot(e, {args.in, out.get(e.rank()).bytes}, out, -1);
  if (args.collective == Collective::kGather) edges.only_reader = args.root;
  if (args.collective == Collective::kScatter) edges.only_sender = args.root;
  return exchange_one_shot(e, in, out, edges);  // also all-to-all and messages
}

// Begins a collective. Returns false if the call must end here.
template <class Team, class Params>
RC_TEAM_FN bool enter_call(Team& team, const Params& p, int rank_in_launch, Workspace& w) {
  load_table(team, p, rank_in_launch, w);
  return begin_call(team, p.calls[rank_in_launch], w) == Status::kOk;
}

// Ends a collective that finished with `status`.
template <class E>
RC_TEAM_FN void leave_call(E& e, Status status) {
  if (status == Status::kOk) status = e.verify_peer_buffers();
  end_call(e.team, e.v, status, e.pairs != Stream::kMessage);
}

// Runs `collective(endpoint, arguments)` between enter_call() and leave_call().
template <class Team, class Params, class Ops, class Run>
RC_TEAM_FN void run_collective(Team team, const Params& p, int rank_in_launch, Workspace& w,
                               Ops ops, Run run) {
  if (!enter_call(team, p, rank_in_launch, w)) return;
  const CallArgs& args = p.calls[rank_in_launch];
  const bool message = args.collective == Collective::kSend;
  Endpoint<Team, Ops> e{team, w.view, ops, message ? Stream::kMessage : Stream::kPair};
  Status status = message ? Status::kOk : e.verify_streams();
  if (status == Status::kOk) status = run(e, args);
  leave_call(e, status);
}

template <class Team>
RC_TEAM_FN void move_kernel(Team team, const LaunchParams& p, int rank_in_launch, Workspace& w) {
  run_collective(team, p, rank_in_launch, w, MoveOps{},
                 [&](auto& e, const CallArgs& args)
                     RC_INLINED { return move_evenly(e, args, w.in, w.out); });
}

template <class Team>
RC_TEAM_FN void list_move_kernel(Team team, const ListParams& p, int rank_in_launch, Workspace& w) {
  run_collective(team, p, rank_in_launch, w, MoveOps{},
                 [&](auto& e, const CallArgs& args) RC_INLINED {
                   return move_lists(e, args, w.in, w.out, lists_of(p, rank_in_launch).edges);
                 });
}

// Reduce-scatter, and reduce, which is a reduce-scatter with a single receiver.
template <class T, RedOp op, class Team>
RC_TEAM_FN void reduce_scatter_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                      Workspace& w) {
  run_collective(team, p, rank_in_launch, w, ReduceOps<T, op>(p.calls[rank_in_launch].redop),
                 [&](auto& e, const CallArgs& args) RC_INLINED {
                   return args.algorithm == Algorithm::kRing
                              ? reduce_scatter_ring(e, w.in, args.out)
                              : reduce_scatter_one_shot(e, w.in, args.out, args.root);
                 });
}

template <class T, RedOp op, class Team>
RC_TEAM_FN void reduce_scatter_list_kernel(Team team, const ListParams& p, int rank_in_launch,
                                           Workspace& w) {
  run_collective(team, p, rank_in_launch, w, ReduceOps<T, op>(p.calls[rank_in_launch].redop),
                 [&](auto& e, const CallArgs& args)
                     RC_INLINED { return reduce_scatter_one_shot(e, w.in, args.out); });
}

// Up to this size, the two-shot all-reduce takes one hop if the data fit into one segment. Chosen
// without measurements.
constexpr uint64_t kOneHopBytes = 64 << 10;

template <class E>
RC_TEAM_FN uint64_t one_hop_bytes(const E& e) {
  return e.segment_bytes() < kOneHopBytes ? e.segment_bytes() : kOneHopBytes;
}

template <class T, RedOp op, class Team>
RC_TEAM_FN void all_reduce_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                  Workspace& w) {
  run_collective(team, p, rank_in_launch, w, ReduceOps<T, op>(p.calls[rank_in_launch].redop),
                 [&](auto& e, const CallArgs& args) RC_INLINED {
                   return args.algorithm == Algorithm::kRing
                              ? all_reduce_ring(e, w.in, args.out)
                              : all_reduce_two_shot(e, w.in, args.out, one_hop_bytes(e));
                 });
}

}  // namespace device
RINGCOMM_NAMESPACE_END
