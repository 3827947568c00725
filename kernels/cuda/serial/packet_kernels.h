// SPDX-License-Identifier: Apache-2.0

// The kernels of packets. They load words, headers and payloads one after the other.
#pragma once

#include "kernels/cuda/body.h"
#include "kernels/cuda/serial/ll.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Packets identify their call themselves, so a call loads no stream state first: a small message
// costs one transfer.
template <class Team, class Ops, class Run>
RC_TEAM_FN void run_ll(Team team, const LaunchParams& p, int rank_in_launch, Workspace& w, Ops ops,
                       Run run) {
  const CallArgs& args = p.calls[rank_in_launch];
  load_table(team, p, rank_in_launch, w);
  if (begin_call(team, args, w) != Status::kOk) return;
  Endpoint<Team, Ops> e{team, w.view, ops};
  end_call(team, w.view, run(e, args), true);
}

template <class Team>
RC_TEAM_FN void ll_move_kernel(Team team, const LaunchParams& p, int rank_in_launch, Workspace& w) {
  run_ll(team, p, rank_in_launch, w, MoveOps{}, [](auto& e, const CallArgs& args) {
    return all_gather_ll(e, args.in, args.out, args.chunk_bytes);
  });
}

template <class T, RedOp op, class Team>
RC_TEAM_FN void ll_reduce_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                 Workspace& w) {
  run_ll(team, p, rank_in_launch, w, ReduceOps<T, op>(p.calls[rank_in_launch].redop),
         [](auto& e, const CallArgs& args) {
           if (args.collective == Collective::kAllReduce)
             return all_reduce_ll(e, args.in, args.out, args.total_bytes);
           return reduce_scatter_ll(e, args.in, args.out, args.chunk_bytes);
         });
}

}  // namespace device
RINGCOMM_NAMESPACE_END
