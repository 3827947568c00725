// The bodies of the kernels, for any Team: kernels.cu instantiates them for blocks, and
// tests/support/emulator for host threads.
#pragma once

#include "kernels/cuda/loops.h"
#include "kernels/cuda/workspace.h"
#include "ringcomm/collectives/all_reduce.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// What a launch with lists says of a rank's call beside CallArgs; null: an even cut.
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

// The streams of the call as it finds them; LL has none. By the last lanes, so that the first
// has nothing else under way.
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

// One lane: the words of its channel's line and the abort word. All are under way side by side: a
// lane that stored one would wait for it before it loaded the next.
RC_TEAM_FN void load_channel(const CallArgs& args, char* region, const Layout& layout, int channel,
                             Workspace& w) {
  auto* line = reinterpret_cast<ChannelLine*>(region + layout.channel_offset(channel));
  // Messages are not counted, and a collective may be counting now.
  const bool counts = args.collective != Collective::kSend;
  const uint64_t sequence = counts ? line->sequence : 0;
  const uint32_t ll_epoch = counts ? line->ll_epoch : 0;
  // See NOTE [One call at a time].
  const uint32_t running = counts ? exchange_relaxed_sys(&line->running, 1) : 0;
  // Pairs with the release in raise_fault(). The last of them: what follows it waits for it.
  w.aborted = load_acquire_sys(&reinterpret_cast<ControlPage*>(region)->aborted);
  w.sequence = sequence;
  w.ll_epoch = ll_epoch;
  w.running = running;
}

// Brings a table into shared memory, and this rank's words of the call, whose loads are under way
// side by side. Lanes other than the first may look at the view after the next sync().
template <class Team, class Table>
RC_TEAM_FN void load_words(Team& team, const CallArgs& args, const Table& t, Workspace& w) {
  const int ring = t.rings > 0 ? team.channel() % t.rings : -1;
  if (team.lane() == 0) {
    load_channel(args, t.regions[t.rank], t.layout, team.channel(), w);
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

// The first thing a block does, since every step uses what it loads.
template <class Team, class Params>
RC_TEAM_FN void load_table(Team& team, const Params& p, int rank_in_launch, Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  if (team.lane() == 0) {
    const Lists lists = lists_of(p, rank_in_launch);
    w.failure = 0;
    w.portion = portion_of(team.channel(), team.num_channels());
    w.in = {args.in, args.total_bytes, args.chunk_bytes, lists.in};
    w.out = {args.out, args.total_bytes, args.chunk_bytes, lists.out};
  }
  if (args.inlined)
    load_words(team, args, p.alone.table, w);
  else
    load_words(team, args, *args.table, w);
}

// NOTE [One call at a time]
// Calls of a rank take the numbers of their items from words of its region, so that two at once
// would take the same ones, and mix their data. The host orders the calls that it makes, but knows
// nothing of when a graph is replayed. So a channel's block finds out by itself: it leaves a 1 in
// its channel's line for as long as it runs, and a block that finds the 1 of another ends the
// communicator. Messages are not counted: sends and receives have items of their own.

// Numbers the call and puts it where fault records find it. kAborted: this rank gave up before.
// Follows load_table(); all lanes know the call, and the view, when it returns.
template <class Team>
RC_TEAM_FN Status begin_call(Team& team, const CallArgs& args, Workspace& w) {
  Status status = Status::kOk;
  if (team.lane() == 0) {
    const View& v = w.view;
    const bool counts = args.collective != Collective::kSend;
    const uint64_t sequence = counts ? w.sequence + 1 : 0;
    if (counts) v.channel_line(team.channel())->sequence = sequence;
    w.mine = CallHeader{CallId{sequence, args.match_bytes, args.collective, args.dtype, args.redop,
                               args.root, args.algorithm},
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

// The last thing a block does with a status that all lanes share.
template <class Team>
RC_TEAM_FN void end_call(const Team& team, const View& v, Status status, bool counts) {
  if (team.lane() != 0) return;
  if (status != Status::kOk)
    await_raised(v);
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
  return exchange_one_shot(e, in, out, edges);  // all-to-all, and messages, which name their peers
}

// The first that a collective does. False: it ends here.
template <class Team, class Params>
RC_TEAM_FN bool enter_call(Team& team, const Params& p, int rank_in_launch, Workspace& w) {
  load_table(team, p, rank_in_launch, w);
  return begin_call(team, p.calls[rank_in_launch], w) == Status::kOk;
}

// The last that it does, with what came of it.
template <class E>
RC_TEAM_FN void leave_call(E& e, Status status) {
  if (status == Status::kOk) status = e.verify_peer_buffers();
  end_call(e.team, e.v, status, e.pairs != Stream::kMessage);
}

// Runs `collective(endpoint, arguments)` between the checks that every call makes.
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
                 [&](auto& e, const CallArgs& args) { return move_evenly(e, args, w.in, w.out); });
}

template <class Team>
RC_TEAM_FN void list_move_kernel(Team team, const ListParams& p, int rank_in_launch, Workspace& w) {
  run_collective(team, p, rank_in_launch, w, MoveOps{}, [&](auto& e, const CallArgs& args) {
    return move_lists(e, args, w.in, w.out, lists_of(p, rank_in_launch).edges);
  });
}

// Reduce-scatter, and reduce, which is one with a single receiver.
template <class T, RedOp op, class Team>
RC_TEAM_FN void reduce_scatter_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                      Workspace& w) {
  run_collective(team, p, rank_in_launch, w, ReduceOps<T, op>(p.calls[rank_in_launch].redop),
                 [&](auto& e, const CallArgs& args) {
                   return args.algorithm == Algorithm::kRing
                              ? reduce_scatter_ring(e, w.in, args.out)
                              : reduce_scatter_one_shot(e, w.in, args.out, args.root);
                 });
}

template <class T, RedOp op, class Team>
RC_TEAM_FN void reduce_scatter_list_kernel(Team team, const ListParams& p, int rank_in_launch,
                                           Workspace& w) {
  run_collective(
      team, p, rank_in_launch, w, ReduceOps<T, op>(p.calls[rank_in_launch].redop),
      [&](auto& e, const CallArgs& args) { return reduce_scatter_one_shot(e, w.in, args.out); });
}

// Two-shot all-reduce up to this size in one hop, which has room for one segment. A choice, not
// swept.
constexpr uint64_t kOneHopBytes = 64 << 10;

template <class E>
RC_TEAM_FN uint64_t one_hop_bytes(const E& e) {
  return e.segment_bytes() < kOneHopBytes ? e.segment_bytes() : kOneHopBytes;
}

template <class T, RedOp op, class Team>
RC_TEAM_FN void all_reduce_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                  Workspace& w) {
  run_collective(team, p, rank_in_launch, w, ReduceOps<T, op>(p.calls[rank_in_launch].redop),
                 [&](auto& e, const CallArgs& args) {
                   return args.algorithm == Algorithm::kRing
                              ? all_reduce_ring(e, w.in, args.out)
                              : all_reduce_two_shot(e, w.in, args.out, one_hop_bytes(e));
                 });
}

}  // namespace device
RINGCOMM_NAMESPACE_END
