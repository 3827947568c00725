// SPDX-License-Identifier: Apache-2.0

// The bodies of the optimizer's kernels, for any Team; body.h has those of the collectives.
#pragma once

#include "kernels/cuda/body.h"
#include "kernels/cuda/serial/adamw_lanes.h"
#include "kernels/cuda/serial/norm_lanes.h"
#include "ringcomm/optimizer/adamw_prepare.h"
#include "ringcomm/optimizer/fused_steps.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Threads per block, and the least number of blocks per multiprocessor.
constexpr int kNormThreads = 256, kShardBlocks = 2;
template <class G>
constexpr int kStepThreads = 256;

RC_TEAM_FN int divisor_of(const CallArgs& args, int world) {
  return RedOp(args.redop) == RedOp::kAvg ? world : 0;
}

// ---- without peers ------------------------------------------------------------------------------

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
  if (team.lane() == 0) w.sources[0] = args.in;
  load_shard(team, args, w);
  const GradSum<G> grads{w.sources, 1, 0, 0};
  const Run run = run_of_channel(team, w.shard.elems);
  if (w.shard.quantized_state)
    update_blocks<G, P>(w.shard, grads, nullptr, 0, run, team.lane(), team.num_lanes());
  else
    update_lanes<G, P, 1>(w.shard, grads, nullptr, 0, run, team.lane(), team.num_lanes());
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
  norm_lanes(target, run_of_channel(team, args.total_bytes / sizeof(G)), w.norm, team.lane(),
             team.num_lanes());
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
  RC_TEAM_FN void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from,
                         uint64_t bytes, int finish_world) const {
    if (finish_world == 0)
      return ReduceOps<G, RedOp::kSum>::reduce(team, to, from, bytes, finish_world);
    const uint64_t begin = uint64_t(static_cast<char*>(to.dst) - own_grads) / sizeof(G);
    consume(team, Gradients{from.ptrs, from.count}, Run{begin, begin + bytes / sizeof(G)});
  }
};

template <class G, class P>
struct UpdateFinish {
  const AdamWShard* shard;
  int divide_by;
  char* const* copies;
  int copy_count;

  template <class Team>
  RC_TEAM_FN void operator()(Team& team, const Gradients& from, Run run) const {
    // With one block per multiprocessor, registers allow two turns at once. On an H100 (two ranks,
    // 256 Mi BF16 parameters) a step took 4.3 ms with two turns at once, and 6.0 ms with three;
    // single turns were not measured.
    update_lanes<G, P, 2>(*shard, GradSum<G>{from.ptrs, from.count, divide_by, run.begin}, copies,
                          copy_count, run, team.lane(), team.num_lanes());
  }
};

template <class G>
struct NormFinish {
  const CallArgs* args;
  int divide_by;
  NormWords* words;

  template <class Team>
  RC_TEAM_FN void operator()(Team& team, const Gradients& from, Run run) const {
    const NormTarget<G> target{GradSum<G>{from.ptrs, from.count, divide_by, run.begin},
                               reinterpret_cast<float*>(args->out), args->accumulate,
                               NormKind(args->norm)};
    norm_lanes(target, run, *words, team.lane(), team.num_lanes());
  }
};

// The kernel of adamw_all_gather and reduce_scatter_adamw_all_gather.
template <class G, class P, class Team>
RC_TEAM_FN void adamw_step_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                  Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  load_shard(team, args, w);
  const AdamWShard& shard = w.shard;
  const int world = world_of(p, args);
  const bool ring = args.algorithm == Algorithm::kRing,
             whole = args.collective == Collective::kReduceScatterAdamWAllGather;
  const Bucket bucket = Bucket::of(args.in, shard.params, shard.bucket_elems, int32_t(sizeof(G)),
                                   int32_t(sizeof(P)), world);
  const UpdateFinish<G, P> finish{&shard, divisor_of(args, world), w.results, ring ? 0 : world};
  const OptimizerOps<G, UpdateFinish<G, P>> ops{finish, bucket.grads().get(rank_of(p, args)).ptr};
  run_collective(team, p, rank_in_launch, w, ops, [&](auto& e, const CallArgs&) {
    if (whole)
      return ring ? reduce_scatter_adamw_all_gather_ring(e, bucket)
                  : reduce_scatter_adamw_all_gather_one_shot(e, bucket);
    return ring ? adamw_all_gather_ring(e, bucket, args.in)
                : adamw_all_gather_one_shot(e, bucket, args.in);
  });
}

template <class G, class Team>
RC_TEAM_FN void reduce_scatter_norm_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                           Workspace& w) {
  const CallArgs& args = p.calls[rank_in_launch];
  const int world = world_of(p, args);
  const Bucket bucket =
      Bucket::of(args.in, nullptr, args.total_bytes / sizeof(G), int32_t(sizeof(G)), 0, world);
  const NormFinish<G> finish{&args, divisor_of(args, world), &w.norm};
  const OptimizerOps<G, NormFinish<G>> ops{finish, bucket.grads().get(rank_of(p, args)).ptr};
  begin_norm(team, w);
  run_collective(team, p, rank_in_launch, w, ops, [&](auto& e, const CallArgs&) {
    return args.algorithm == Algorithm::kRing ? reduce_scatter_norm_ring(e, bucket)
                                              : reduce_scatter_norm_one_shot(e, bucket);
  });
  end_norm(team, args, w);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
