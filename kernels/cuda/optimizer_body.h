// SPDX-License-Identifier: Apache-2.0

// The bodies of the optimizer's kernels, for any Team; fused_steps.h counts their steps and bytes.
#pragma once

#include "kernels/cuda/body.h"
#include "kernels/cuda/loops.h"
#include "ringcomm/optimizer/adamw_prepare.h"
#include "ringcomm/optimizer/fused_steps.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Threads per block, and the least number of blocks per multiprocessor: at least 64 KiB of loads
// are in flight per multiprocessor, and 84 KiB in steps for sm_90, with enough registers for loops
// without spills. For sm_100 ptxas uses more registers. Chosen after reading the machine code, not
// measured on a GPU.
constexpr int kNormThreads = 512, kShardBlocks = 2;
template <class G>
constexpr int kStepThreads = sizeof(G) == 4 ? (RC_IS_SM100 ? 512 : 640)
                             : RC_IS_SM100  ? 640
                                            : 768;
template <class G>
constexpr int kManyThreads = sizeof(G) == 4 ? 384
                             : RC_IS_SM100  ? 512
                                            : 640;

RC_TEAM_FN int divisor_of(const CallArgs& args, int world) {
  return RedOp(args.redop) == RedOp::kAvg ? world : 0;
}

// ---- kernels that do not wait for peers ---------------------------------------------------------

template <class Team>
RC_TEAM_FN void prepare_kernel(Team team, const LaunchParams& p, int, Workspace&) {
  const AdamWTable& table = *static_cast<const AdamWTable*>(p.calls[0].update);
  prepare_adamw(table, team.lane(), team.num_lanes());
  team.sync();
  if (team.lane() == 0) advance_control(*table.control);
}

template <class Team>
RC_TEAM_FN Run run_of_channel(const Team& team, uint64_t elems) {
  const Extent extent = extent_of(elems, team.channel(), team.num_channels(), kTileShift);
  return {extent.begin_bytes, extent.end_bytes};
}

// Copies the shard to shared memory: its dozen addresses would cost the loops 24 registers.
template <class Team>
RC_TEAM_FN void load_shard(Team& team, const CallArgs& args, Workspace& w) {
  if (team.lane() == 0) w.shard = *static_cast<const AdamWShard*>(args.update);
  team.sync();
}

template <class G, class P, class Team>
RC_TEAM_FN void adamw_shard_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                   Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  load_shard(team, args, w);
  const Run run = run_of_channel(team, w.shard.elems);
  if (team.lane() == 0) {
    w.sources[0] = args.in + run.begin * sizeof(G);
    w.update = {w.sources, 1, 0, 0, run.begin, run.end};
  }
  team.sync();
  if (w.shard.quantized_state)
    update_blocks<G, P>(w.shard, GradSum<G>{w.sources, 1, 0, run.begin}, nullptr, 0, run,
                        team.lane(), team.num_lanes());
  else
    update_lanes<G, P, UpdateKind::kAlone>(team, w);
}

// Between begin_norm() and end_norm() a team sums its tiles in shared memory: 132 multiprocessors
// that added each tile of 512 elements to six words of global memory would wait for each other.
template <class Team>
RC_TEAM_FN void begin_norm(Team& team, Workspace& w) {
  for (int k = team.lane(); k < kNormWords; k += team.num_lanes()) w.norm.word[k] = 0;
  team.sync();
}

template <class Team>
RC_TEAM_FN void end_norm(Team& team, const CallArgs& args, Workspace& w) {
  team.sync();
  for (int k = team.lane(); k < kNormWords; k += team.num_lanes()) {
    const bool largest = NormKind(args.norm) == NormKind::kInf && k == 0;
    if (largest)
      max_relaxed_sys(&args.words->word[k], w.norm.word[k]);
    else if (w.norm.word[k] != 0)
      add_relaxed_sys(&args.words->word[k], w.norm.word[k]);
  }
}

// Computes the norm of a reduced gradient of args.total_bytes bytes.
template <class G, class Team>
RC_TEAM_FN void grad_norm_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                 Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  if (team.lane() == 0) w.sources[0] = args.in;
  begin_norm(team, w);
  const NormTarget<G> target{GradSum<G>{w.sources, 1, 0, 0}, nullptr, false, NormKind(args.norm)};
  norm_lanes<G, NormKernel::kAlone>(target, run_of_channel(team, args.total_bytes / sizeof(G)),
                                    w.norm, team.lane(), team.num_lanes());
  end_norm(team, args, w);
}

// ---- collectives --------------------------------------------------------------------------------

// The Ops of buckets.h. A ring's partial sums are made by reduce_scatter_ring() itself.
template <class G, class Finish>
struct OptimizerOps : ReduceOps<G, RedOp::kSum> {
  Finish finish;
  char* own_grads;  // my chunk's gradients: the target of the ring's last hop, which stores nothing

  RC_TEAM_FN OptimizerOps(const Finish& f, char* own)
      : ReduceOps<G, RedOp::kSum>(int32_t(RedOp::kSum)), finish(f), own_grads(own) {}

  template <class Team>
  RC_TEAM_FN void consume(Team& team, const Gradients& from, Run run) const {
    if (run.begin < run.end) finish(team, from, run);
  }
  template <class Team>
  RC_TEAM_FN void reduce(Team& team, const ReduceTarget& to, const HopSources& from, uint64_t bytes,
                         int finish_world) const {
    if (finish_world == 0)
      return ReduceOps<G, RedOp::kSum>::reduce(team, to, from, bytes, finish_world);
    const uint64_t begin = uint64_t(static_cast<char*>(to.dst) - own_grads) / sizeof(G);
    consume(team, Gradients{from.ptrs, from.count}, Run{begin, begin + bytes / sizeof(G)});
  }
};

// Makes a ring's update; out of line because the kernel calls it at several places.
template <class G, class P, class Team>
RC_COLD void update_at(Team team, Workspace& w) {
  update_lanes<G, P, UpdateKind::kRing>(team, w);
}

template <class G, class P>
struct UpdateFinish {
  Workspace* w;
  int divide_by;

  template <class Team>
  RC_TEAM_FN void operator()(Team& team, const Gradients& from, Run run) const {
    team.sync();
    if (team.lane() == 0) w->update = {from.ptrs, from.count, divide_by, 0, run.begin, run.end};
    team.sync();
    update_at<G, P>(team, *w);
  }
};

template <class G, bool ring>
struct NormFinish {
  const CallArgs* args;
  int divide_by;
  Workspace* w;

  template <class Team>
  RC_TEAM_FN void operator()(Team& team, const Gradients& from, Run run) const {
    // One-shot: use w->sources, so that the compiler sees that the pointers are in shared memory.
    const void* const* ptrs = ring ? from.ptrs : w->sources;
    const NormTarget<G> target{GradSum<G>{ptrs, from.count, divide_by, run.begin},
                               reinterpret_cast<float*>(args->out), args->accumulate,
                               NormKind(args->norm)};
    norm_lanes<G, ring ? NormKernel::kRing : NormKernel::kOneShot>(target, run, w->norm,
                                                                   team.lane(), team.num_lanes());
  }
};

template <class G, class P>
RC_TEAM_FN Bucket bucket_of(const CallArgs& args, const AdamWShard& shard, int world) {
  return Bucket::of(args.in, shard.params, shard.bucket_elems, int32_t(sizeof(G)),
                    int32_t(sizeof(P)), world);
}

RC_TEAM_FN bool sums_gradients(const CallArgs& args) {
  return args.collective == Collective::kReduceScatterAdamWAllGather;
}

// One-shot adamw_all_gather and reduce_scatter_adamw_all_gather. The bucket is in shared memory and
// few other values stay in registers during a step, so that the update has nearly all registers.

// Runs a step up to its update. Returns false if the call must end here.
template <class G, class P, class E>
RC_TEAM_FN bool begin_step(E& e, const LaunchParams& p, int rank_in_launch, Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  load_shard(e.team, args, w);
  if (e.team.lane() == 0) {
    w.bucket = bucket_of<G, P>(args, w.shard, world_of(p, args));
    if (!sums_gradients(args)) w.bucket.base = nullptr;
  }
  if (!enter_call(e.team, p, rank_in_launch, w)) return false;
  Status status = e.verify_streams();
  if (status == Status::kOk) status = begin_step_one_shot(e, w.bucket, w.in.base);
  if (status != Status::kOk) {
    end_call(e.team, e.v, status, true);
    return false;
  }
  if (e.team.lane() == 0) {
    const Run run = slice_of(e, w.bucket, e.rank());
    const int peers = e.world() - 1;
    const bool sums = w.bucket.base != nullptr;
    w.update = {w.sources, sums ? e.world() : 1, divisor_of(args, e.world()), peers, run.begin,
                run.end};
    w.results[e.rank()] = w.results[peers];  // replaces my entry: only peers' buckets are left
  }
  e.team.sync();
  return true;
}

template <class G, class P, UpdateKind kind, class Team>
RC_TEAM_FN void step_kernel(Team team, const LaunchParams& p, int rank_in_launch, Workspace& w) {
  MoveOps none;
  Endpoint<Team, MoveOps> e{team, w.view, none};
  if (!begin_step<G, P>(e, p, rank_in_launch, w)) return;
  update_lanes<G, P, kind>(team, w);
  const Status status = return_offers(e, w.bucket);
  // If the bucket has gradients, a lane with a peer has read the peer's gradients in place. This
  // flag is computed here again, since the update's loop for sm_90 has no register to keep it.
  if constexpr (!RC_IS_SM100)
    e.reads_peer_buffers = w.bucket.base != nullptr && team.lane() < e.world() - 1;
  leave_call(e, status);
}

// The one-shot step for two ranks, or for gradients that are reduced already.
template <class G, class P, class Team>
RC_TEAM_FN void adamw_step_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                  Workspace& w) {
  step_kernel<G, P, UpdateKind::kPair>(team, p, rank_in_launch, w);
}

// The one-shot step for more ranks; loading their gradients takes more registers.
template <class G, class P, class Team>
RC_TEAM_FN void adamw_many_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                  Workspace& w) {
  step_kernel<G, P, UpdateKind::kMany>(team, p, rank_in_launch, w);
}

// The step for rings, which update at two places and need more registers for their copies.
template <class G, class P, class Team>
RC_TEAM_FN void adamw_ring_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                  Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  load_shard(team, args, w);
  const int world = world_of(p, args);
  const Bucket bucket = bucket_of<G, P>(args, w.shard, world);
  const UpdateFinish<G, P> finish{&w, divisor_of(args, world)};
  const OptimizerOps<G, UpdateFinish<G, P>> ops{finish, bucket.grads().get(rank_of(p, args)).ptr};
  run_collective(team, p, rank_in_launch, w, ops, [&](auto& e, const CallArgs&) RC_INLINED {
    return sums_gradients(args) ? reduce_scatter_adamw_all_gather_ring(e, bucket)
                                : adamw_all_gather_ring(e, bucket, args.in);
  });
}

// Calls `run` with the bucket; clears the team's norm before, and adds it to the call's norm
// afterwards.
template <class G, bool ring, class Team, class Run>
RC_TEAM_FN void reduce_scatter_norm_by(Team& team, const LaunchParams& p, int rank_in_launch,
                                       Workspace& w, Run run) {
  const CallArgs& args = p.calls[rank_in_launch];
  const int world = world_of(p, args);
  const Bucket bucket =
      Bucket::of(args.in, nullptr, args.total_bytes / sizeof(G), int32_t(sizeof(G)), 0, world);
  const NormFinish<G, ring> finish{&args, divisor_of(args, world), &w};
  const OptimizerOps<G, NormFinish<G, ring>> ops{finish, bucket.grads().get(rank_of(p, args)).ptr};
  begin_norm(team, w);
  run_collective(team, p, rank_in_launch, w, ops,
                 [&](auto& e, const CallArgs&) RC_INLINED { return run(e, bucket); });
  end_norm(team, args, w);
}

template <class G, class Team>
RC_TEAM_FN void reduce_scatter_norm_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                           Workspace& w) {
  reduce_scatter_norm_by<G, false>(team, p, rank_in_launch, w,
                                   [](auto& e, const Bucket& bucket) RC_INLINED {
                                     return reduce_scatter_norm_one_shot(e, bucket);
                                   });
}

template <class G, class Team>
RC_TEAM_FN void reduce_scatter_norm_ring_kernel(Team team, const LaunchParams& p,
                                                int rank_in_launch, Workspace& w) {
  reduce_scatter_norm_by<G, true>(team, p, rank_in_launch, w,
                                  [](auto& e, const Bucket& bucket)
                                      RC_INLINED { return reduce_scatter_norm_ring(e, bucket); });
}

}  // namespace device
RINGCOMM_NAMESPACE_END
