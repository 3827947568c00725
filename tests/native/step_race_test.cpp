// The optimizer's collectives back to back, ranks x channels x lanes as threads, as race_test.cpp
// does with the others: gradients read where peers keep them, parameters stored where peers keep
// theirs. Every form of a step must give the bits of a step done by one thread.
//
//   step_race_test WORLD CHANNELS LANES ROUNDS
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/host/optimizer_ops.h"
#include "kernels/host/team.h"
#include "ringcomm/adamw_prepare.h"
#include "ringcomm/reduce_scatter_adamw_all_gather.h"

using namespace ringcomm;
using namespace ringcomm::host;

namespace {

constexpr uint32_t kSegmentBytes = 4096;
constexpr int kSlots = 4;
constexpr uint64_t kElems = 5 * kBlockElems + 77;  // the last rank's chunk is short, or empty
constexpr AdamWSegment kSegments[] = {{0, 700, 0}, {704, 1500, 1}, {1536, kElems, 2}};
constexpr int kParams = 3;
constexpr double kActive[kParams] = {1, 0, 1};
constexpr int64_t kGroups[kParams] = {0, 0, 1};
constexpr AdamWHyper kHyper[] = {{1e-2, 0.9, 0.999, 1e-8, 1e-2, 0},
                                 {1e-3, 0.8, 0.99, 1e-8, 0, double(kAdamAmsgrad)}};

float gradient_at(int rank, uint64_t i, int round) {
  return float((uint64_t(rank) * 7 + i * 3 + uint64_t(round)) % 11) - 5;
}

// One rank's optimizer. The factors are the same for all lanes; one of them prepares.
struct Optimizer {
  std::vector<float> exp_avg, exp_avg_sq, max_exp_avg_sq, shard_grad;
  AdamWControl control{1, 1, 0, 0, 0};
  double step[kParams] = {};
  AdamWFactors factors[kParams] = {};
  AdamWShard shard{};

  void begin() {
    prepare_adamw(AdamWTable{&control, kHyper, kGroups, kActive, step, factors, kParams}, 0, 1);
    advance_control(control);
  }
  void own(Run chunk, float* params) {
    const uint64_t n = chunk.end - chunk.begin;
    for (auto* v : {&exp_avg, &exp_avg_sq, &max_exp_avg_sq, &shard_grad}) v->assign(n + 1, 0.0f);
    shard = AdamWShard{kSegments,
                       factors,
                       std::size(kSegments),
                       kElems,
                       chunk.begin,
                       n,
                       nullptr,
                       nullptr,
                       exp_avg.data(),
                       exp_avg_sq.data(),
                       max_exp_avg_sq.data(),
                       reinterpret_cast<char*>(params),
                       DType::kFloat32,
                       Rounding::kNearest,
                       0,
                       0};
  }
};

struct World {
  int world, channels, lanes, rounds;
  Layout layout;
  std::vector<char> arena;
  std::vector<char*> regions, heaps;
  std::vector<uint64_t> heap_bytes;
  std::vector<float*> grads, params;
  std::vector<std::vector<PeerState>> in;
  std::vector<std::vector<const void*>> sources;
  std::vector<std::vector<double>> factors;
  std::vector<std::vector<char*>> results;
  std::vector<std::unique_ptr<CallHeader>> mine;
  std::vector<std::unique_ptr<LaneGroup>> groups;
  std::vector<std::unique_ptr<Optimizer>> optimizers;  // by rank
  Waiter waiter{PausePolicy{20, 2000}};

  World(int w, int c, int l, int n)
      : world(w), channels(c), lanes(l), rounds(n), layout{w, c, kSlots, kSegmentBytes, 0, 0} {
    const uint64_t tensor = (kElems * sizeof(float) + 4095) / 4096 * 4096,
                   share = layout.region_bytes() + 2 * tensor;
    arena.resize(share * uint64_t(world) + 4096);
    char* base =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(arena.data()) + 4095) / 4096 * 4096);
    for (int r = 0; r < world; ++r) {
      regions.push_back(base + share * uint64_t(r));
      heaps.push_back(base);
      heap_bytes.push_back(arena.size() - 4096);
      grads.push_back(reinterpret_cast<float*>(regions.back() + layout.region_bytes()));
      params.push_back(reinterpret_cast<float*>(regions.back() + layout.region_bytes() + tensor));
      optimizers.push_back(std::make_unique<Optimizer>());
      for (uint64_t i = 0; i < kElems; ++i) params.back()[i] = float(i % 13) - 6;
      optimizers.back()->own(bucket(r).chunk(r), params.back());
      for (int ch = 0; ch < channels; ++ch) {
        in.emplace_back(size_t(Stream::kCount) * size_t(world));
        sources.emplace_back(size_t(std::max(world, 2)));
        factors.emplace_back(size_t(std::max(world, 2)));
        results.emplace_back(size_t(world));
        mine.emplace_back(std::make_unique<CallHeader>());
        groups.push_back(std::make_unique<LaneGroup>(lanes));
      }
    }
  }

  Bucket bucket(int rank) const {
    return {reinterpret_cast<char*>(grads[size_t(rank)]),
            reinterpret_cast<char*>(params[size_t(rank)]),
            kElems,
            4,
            4,
            world};
  }

  View view(int rank, int channel) {
    const size_t r = size_t(rank * channels + channel);
    View v{rank,
           world,
           layout,
           regions.data(),
           heaps.data(),
           heap_bytes.data(),
           120'000'000'000,
           in[r].data(),
           sources[r].data(),
           factors[r].data(),
           mine[r].get()};
    v.results = results[r].data();
    return v;
  }
};

template <class Finish, class Body>
Status call(World& w, ThreadTeam& team, const View& v, uint64_t sequence, Finish finish,
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
      sequence,          0, Collective::kReduceScatterAdamWAllGather, int(DType::kFloat32), 0, -1,
      Algorithm::kDirect};
  team.sync();  // the lanes may still compare the header of the call before
  if (team.lane() == 0) *v.mine = CallHeader{id, 0, 0, kNotInHeap, 1.0, kNotInHeap};
  team.sync();  // as begin_call() does
  OptimizerOps<Finish> mine = ops;
  Endpoint<ThreadTeam, OptimizerOps<Finish>> e{team, v, mine};
  return body(e, bucket);
}

// Step `round` in the form that is its turn; a step is 1 or 2 calls.
Status step(World& w, ThreadTeam& team, const View& v, int round) {
  Optimizer& o = *w.optimizers[size_t(v.rank)];
  const bool ring = round % 2 != 0;
  const GradKind sum{DType::kFloat32, 0};
  const UpdateFinish update{&kBaselineKernels,          &o.shard,           sum,
                            ring ? nullptr : v.results, ring ? 0 : w.world, false};
  uint64_t sequence = uint64_t(round) * 2 + 1;
  if (round % 4 < 2)
    return call(w, team, v, sequence, update, [&](auto& e, const Bucket& b) {
      return ring ? reduce_scatter_adamw_all_gather_ring(e, b)
                  : reduce_scatter_adamw_all_gather_direct(e, b);
    });
  NormWords words{};
  const NormFinish norm{&kBaselineKernels, sum, o.shard_grad.data(), false, NormKind::kTwo, &words};
  RC_RETURN_IF_FAILED(call(w, team, v, sequence, norm, [&](auto& e, const Bucket& b) {
    return ring ? reduce_scatter_norm_ring(e, b) : reduce_scatter_norm_direct(e, b);
  }));
  const char* const grad = reinterpret_cast<const char*>(o.shard_grad.data());
  return call(w, team, v, sequence + 1, update, [&](auto& e, const Bucket& b) {
    return ring ? adamw_all_gather_ring(e, b, grad) : adamw_all_gather_direct(e, b, grad);
  });
}

// What a step leaves, done by one thread over the whole bucket. Integers: their sums are exact.
struct Reference {
  std::vector<float> params = std::vector<float>(kElems), grads = std::vector<float>(kElems);
  Optimizer o;

  Reference() {
    for (uint64_t i = 0; i < kElems; ++i) params[i] = float(i % 13) - 6;
    o.own(Run{0, kElems}, params.data());
  }
  void step(int world, int round) {
    for (uint64_t i = 0; i < kElems; ++i) {
      grads[i] = 0;
      for (int r = 0; r < world; ++r) grads[i] += gradient_at(r, i, round);
    }
    o.begin();
    const void* source = grads.data();
    kBaselineKernels.adamw(
        AdamWJob{&o.shard, {&source, 1, DType::kFloat32, 0, 0}, nullptr, 0, 0, kElems, false});
  }
};

// The other threads wait at a barrier: the process ends here.
[[noreturn]] void give_up(int rank, const char* what, int number) {
  std::fprintf(stderr, "rank %d: %s %d\n", rank, what, number);
  std::_Exit(1);
}

void run_lane(World& w, int rank, int channel, int lane, pthread_barrier_t* all) {
  const View v = w.view(rank, channel);
  ThreadTeam team{{&w.waiter}, lane,       w.lanes,
                  channel,     w.channels, w.groups[size_t(rank * w.channels + channel)].get()};
  const bool leader = lane == 0 && channel == 0;
  Reference reference;
  for (int round = 0; round < w.rounds; ++round) {
    if (leader) {
      for (uint64_t i = 0; i < kElems; ++i) w.grads[size_t(rank)][i] = gradient_at(rank, i, round);
      w.optimizers[size_t(rank)]->begin();
    }
    pthread_barrier_wait(all);
    const Status status = step(w, team, v, round);
    if (status != Status::kOk) give_up(rank, "status", int(status));
    // The call has returned: the gradients are the user's again, and the parameters are new.
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

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  World w(std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]));
  const int threads = w.world * w.channels * w.lanes;
  pthread_barrier_t all;
  pthread_barrier_init(&all, nullptr, unsigned(threads));
  std::vector<std::thread> lanes;
  for (int r = 0; r < w.world; ++r)
    for (int c = 0; c < w.channels; ++c)
      for (int l = 0; l < w.lanes; ++l)
        lanes.emplace_back([&, r, c, l] { run_lane(w, r, c, l, &all); });
  for (std::thread& t : lanes) t.join();
  std::puts("ok");
  return 0;
}
