// SPDX-License-Identifier: Apache-2.0

// The optimizer's collectives back to back, with ranks x channels x lanes as threads, like the
// other collectives in race_test.cpp: a rank reads gradients in its peers' memory, and stores
// parameters into its peers' memory. Every form of a step must give the bits of a step by one
// thread.
//
// step_race_test WORLD CHANNELS LANES ROUNDS
#include <algorithm>
#include <vector>

#include "kernels/host/optimizer_ops.h"
#include "ringcomm/optimizer/fused_steps.h"
#include "tests/proof/races/race_optimizer.h"

namespace {

struct StepWorld : World {
  std::vector<float*> grads, params;  // by rank
  std::vector<Optimizer> optimizers;

  StepWorld(int w, int c, int l, int n)
      : World(w, c, l, n, 2 * kTensorBytes), optimizers(size_t(w)) {
    for (int r = 0; r < world; ++r) {
      grads.push_back(reinterpret_cast<float*>(tensors(r)));
      params.push_back(reinterpret_cast<float*>(tensors(r) + kTensorBytes));
      for (uint64_t i = 0; i < kElems; ++i) params.back()[i] = first_param(i);
      optimizers[size_t(r)].own(bucket(r).chunk(r), params.back());
    }
  }

  Bucket bucket(int rank) const {
    return Bucket::of(reinterpret_cast<char*>(grads[size_t(rank)]),
                      reinterpret_cast<char*>(params[size_t(rank)]), kElems, 4, 4, world);
  }
};

template <class Finish, class Body>
Status call(StepWorld& w, ThreadTeam& team, const View& v, uint64_t sequence, Finish finish,
            Body body) {
  StorePath path;
  const Bucket bucket = w.bucket(v.rank);
  const OptimizerOps<Finish> ops{
      {&kBaselineKernels, kBaselineKernels.reduce[int(DType::kFloat32)][int(RedOp::kSum)], false,
       &path},
      finish,
      bucket,
      bucket.grads().get(v.rank).ptr};
  const CallId id{
      sequence,           0, Collective::kReduceScatterAdamWAllGather, int(DType::kFloat32), 0, -1,
      Algorithm::kOneShot};
  team.sync();  // the lanes may still compare the previous call's header
  if (team.lane() == 0) *v.mine = CallHeader{id, 0, 0, kNotInHeap, 1.0, kNotInHeap};
  OptimizerOps<Finish> mine = ops;
  Endpoint<ThreadTeam, OptimizerOps<Finish>> e{team, v, mine};
  e.begin_streams();
  team.sync();  // as begin_call() does
  return body(e, bucket);
}

// Takes step `round` in the form that is its turn; a step is 1 or 2 calls.
Status step(StepWorld& w, ThreadTeam& team, const View& v, int round) {
  Optimizer& o = w.optimizers[size_t(v.rank)];
  const bool ring = round % 2 != 0;
  const GradKind sum{DType::kFloat32, 0};
  const UpdateFinish update{&kBaselineKernels,          &o.shard,           sum,
                            ring ? nullptr : v.results, ring ? 0 : w.world, false};
  uint64_t sequence = uint64_t(round) * 2 + 1;
  if (round % 4 < 2)
    return call(w, team, v, sequence, update, [&](auto& e, const Bucket& b) {
      return ring ? reduce_scatter_adamw_all_gather_ring(e, b)
                  : reduce_scatter_adamw_all_gather_one_shot(e, b);
    });
  NormWords words{};
  const NormFinish norm{
      &kBaselineKernels, sum, o.shard_grad.data(), false, NormKind::kTwo, &words, false};
  RC_RETURN_IF_FAILED(call(w, team, v, sequence, norm, [&](auto& e, const Bucket& b) {
    return ring ? reduce_scatter_norm_ring(e, b) : reduce_scatter_norm_one_shot(e, b);
  }));
  const char* const grad = reinterpret_cast<const char*>(o.shard_grad.data());
  return call(w, team, v, sequence + 1, update, [&](auto& e, const Bucket& b) {
    return ring ? adamw_all_gather_ring(e, b, grad) : adamw_all_gather_one_shot(e, b, grad);
  });
}

void run_lane(StepWorld& w, int rank, int channel, int lane, pthread_barrier_t* all) {
  const View v = w.view(rank, channel);
  ThreadTeam team = w.team(rank, channel, lane);
  const bool leader = lane == 0 && channel == 0;
  Reference reference;
  for (int round = 0; round < w.rounds; ++round) {
    if (leader) {
      for (uint64_t i = 0; i < kElems; ++i) w.grads[size_t(rank)][i] = value(rank, i, round);
      w.optimizers[size_t(rank)].begin();
    }
    pthread_barrier_wait(all);
    const Status status = step(w, team, v, round);
    if (status != Status::kOk) give_up(rank, "status", int(status));
    // The call has returned: the gradients belong to the user again, and the parameters are new.
    if (leader && w.channels == 1)
      std::fill(w.grads[size_t(rank)], w.grads[size_t(rank)] + kElems, -1.0f);
    if (leader) reference.step(w.world, round);
    if (w.channels > 1) pthread_barrier_wait(all);
    if (leader)
      for (uint64_t i = 0; i < kElems; ++i)
        if (w.params[size_t(rank)][i] != reference.params[i]) give_up(rank, "wrong at", int(i));
    pthread_barrier_wait(all);
  }
}

}  // namespace

int main(int argc, char** argv) { return run_lanes(argc, argv, run_lane); }
