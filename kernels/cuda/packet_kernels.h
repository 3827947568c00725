// SPDX-License-Identifier: Apache-2.0

// The kernels of packets: small messages by LL (ringcomm/protocol/ll.h). Packets identify their
// call themselves, so a call loads no stream state first. It waits for memory three times: for its
// own words, while each lane loads its data to send; for packets to reach the peers' memory; and
// for received headers and payloads together.
#pragma once

#include "kernels/cuda/body.h"
#include "ringcomm/protocol/ll.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// The fields of a RankTable that kernels of packets use.
struct TableHead {
  int32_t rank, world;
  Layout layout;
  char* region;
  HostPage* host;
};
template <class Table>
RC_TEAM_FN TableHead head_of(const Table& t) {
  return {t.rank, t.world, t.layout, t.regions[t.rank], t.host};
}

template <class Team>
RC_TEAM_FN void load_packet_words(Team& team, const LaunchParams& p, const CallArgs& args,
                                  const TableHead& head, Workspace& w) {
  if (team.lane() == 0) {
    w.failure = 0;
    load_channel(args, head.region, head.layout, team.channel(), w);
    w.host = head.host;
  }
  const int32_t regions = head.world < kPacketBatch ? kPacketBatch : head.world;
  RC_ROLLED
  for (int r = team.lane(); r < regions; r += team.num_lanes())
    w.regions[r] = r >= head.world ? nullptr
                   : args.inlined  ? p.alone.table.regions[r]
                                   : args.table->regions[r];
  team.sync();
  if (team.lane() == 0)
    // Packets do not use the other fields of View.
    w.view = View{.rank = head.rank,
                  .world = head.world,
                  .layout = head.layout,
                  .regions = w.regions,
                  .timeout_ns = args.timeout_ns,
                  .mine = &w.mine,
                  .ll_epoch = w.ll_epoch};
}

// Sends each rank a message of `bytes` bytes; messages are `stride` bytes apart in args.in. Passes
// the messages received from all ranks to the sink.
template <class Team, class Ops, class Sink>
RC_TEAM_FN void run_packets(Team team, const LaunchParams& p, int rank_in_launch, Workspace& w,
                            Ops ops, uint32_t stride, uint32_t bytes, Sink sink) {
  const CallArgs& args = p.calls[rank_in_launch];
  const TableHead head = args.inlined ? head_of(p.alone.table) : head_of(*args.table);
  const LLLane lane = lane_of(team, args.in, stride, head.rank, bytes);
  FirstWords words = load_first(lane, head.world);
  load_packet_words(team, p, args, head, w);
  if (begin_call(team, args, w) != Status::kOk) return;
  LLEndpoint<Team, Ops> e{team,      w.view,      ops,       w.regions, w.mine,
                          w.factors, head.layout, head.rank, head.world};
  const LLCall call = begin_ll(e);
  send_headers(e, call);
  send_payload(e, call, lane, words);
  end_call(team, w.view, receive_packets(e, call, lane, words.own, sink), true);
}

struct GatheredWords {
  char* out;
  const char* own;
  uint32_t stride;
  template <class E>
  RC_TEAM_FN void take(E& e, int rank, uint64_t word, uint32_t at, uint32_t bytes) {
    char* const to = out + uint64_t(uint32_t(rank)) * stride;
    if (rank != e.rank || to != own) store_payload(to + at, word, bytes);
  }
  template <class E>
  RC_TEAM_FN void finish(E&, uint32_t, uint32_t) {}
};

// Returns x / count, rounded like a division, without the slow path of a division. The FP64
// quotient has 53 correct bits and is rounded to FP32 once: `count` has 7 bits, so the quotient is
// either halfway between two FP32 numbers or at least 2^-32 of itself away from that point.
RC_TEAM_FN float quotient_of(float x, int count) {
  const double n = count, reciprocal = double(0xffffffffu / uint32_t(count)) * 0x1p-32;
  const double q = x * reciprocal, rest = fused_multiply_add(-q, n, double(x));
  if (!(rest < 0 || rest > 0)) return float(q);  // exact; infinities and NaN have no remainder
  const double better = fused_multiply_add(rest, reciprocal, q);
  return float(fused_multiply_add(fused_multiply_add(-better, n, double(x)), reciprocal, better));
}

// Reduces 8 bytes of every rank, in rank order.
template <class T, RedOp op>
struct SummedWords {
  using R = Reducer<T, op>;
  using Acc = typename R::Acc;
  static constexpr int kElems = 8 / sizeof(T);
  char* out;
  Acc acc[kElems] = {};

  template <class E>
  RC_TEAM_FN void take(E& e, int rank, uint64_t word, uint32_t, uint32_t) {
    const bool scales = e.ops.scales();
    const double factor = scales ? e.factors[rank] : 1.0;
    T elems[kElems];
    memcpy(elems, &word, 8);
    RC_UNROLL
    for (int i = 0; i < kElems; ++i) {
      const Acc x = R::prepared(elems[i], factor, scales);
      acc[i] = rank == 0 ? x : combine<op>(acc[i], x);
    }
  }
  template <class E>
  RC_TEAM_FN void finish(E& e, uint32_t at, uint32_t bytes) {
    T elems[kElems];
    const int divide_by = e.ops.scaling(e.world).divide_by;
    RC_UNROLL
    for (int i = 0; i < kElems; ++i) {
      if constexpr (kSame<Acc, float>)
        elems[i] = Traits<T>::store(divide_by > 0 ? quotient_of(acc[i], divide_by) : acc[i]);
      else
        elems[i] = R::finished(acc[i], divide_by);
    }
    uint64_t word;
    memcpy(&word, elems, 8);
    store_payload(out + at, word, bytes);
  }
};

template <class Team>
RC_TEAM_FN void ll_move_kernel(Team team, const LaunchParams& p, int rank_in_launch, Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  run_packets(team, p, rank_in_launch, w, MoveOps{}, 0, uint32_t(args.chunk_bytes),
              GatheredWords{args.out, args.in, uint32_t(args.chunk_bytes)});
}

template <class T, RedOp op, class Team>
RC_TEAM_FN void ll_reduce_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                 Workspace& w) {
  using Ops = ReduceOps<T, op>;
  const CallArgs& args = p.calls[rank_in_launch];
  const bool whole = args.collective == Collective::kAllReduce;
  run_packets(team, p, rank_in_launch, w, Ops(args.redop), whole ? 0 : uint32_t(args.chunk_bytes),
              uint32_t(whole ? args.total_bytes : args.chunk_bytes), SummedWords<T, op>{args.out});
}

}  // namespace device
RINGCOMM_NAMESPACE_END
