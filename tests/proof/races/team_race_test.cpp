// SPDX-License-Identifier: Apache-2.0

// Ranks of one process whose calls several threads share, under ThreadSanitizer; each rank has
// another number of threads. tests/proof/races/test_comm_races.py also builds it with mutants, each
// of which must fail.
//
//   team_race_test WORLD CHANNELS ROUNDS [MILLISECONDS]    the last: how long a wait lasts
#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/host/comm.h"
#include "kernels/host/optimizer.h"
#include "kernels/host/retired.h"
#include "tests/proof/races/race_heap.h"
#include "tests/proof/races/race_optimizer.h"

namespace ringcomm {
const KernelTable& kernels() { return kBaselineKernels; }
}  // namespace ringcomm

namespace {

constexpr int kThreads[] = {3, 2, 1, 8};  // by rank
// Elements: all channels share a large call, some a small call in one hop; both end within a line.
constexpr uint64_t kLarge = 6003, kSmall = 701;

struct Teams {
  int world, channels, rounds;
  uint64_t timeout_ns = 120'000'000'000;
  std::shared_ptr<Heap> heap = std::make_shared<Heap>(64 << 20, "");
  std::vector<std::unique_ptr<Comm>> comms;  // by rank
  pthread_barrier_t all;

  Teams(int w, int c, int r) : world(w), channels(c), rounds(r), comms(size_t(w)) {
    pthread_barrier_init(&all, nullptr, unsigned(w));
  }
  void sync() { pthread_barrier_wait(&all); }
};

const char* bytes_of(const float* data) { return reinterpret_cast<const char*>(data); }
char* bytes_of(float* data) { return reinterpret_cast<char*>(data); }

// One rank, and the data of its calls.
struct Rank {
  Teams& teams;
  int rank, world = teams.world;
  int round = 0;
  Comm& comm = *teams.comms[size_t(rank)];
  std::vector<float> mine = std::vector<float>(kLarge * size_t(world)), result = mine;
  Allocation in_heap{*teams.heap, kLarge * sizeof(float)};
  Allocation grads{*teams.heap, kElems * sizeof(float)},
      params{*teams.heap, kElems * sizeof(float)};
  std::vector<float> sums = std::vector<float>(kElems);
  Optimizer optimizer;
  Reference reference;

  void check(Status status, const char* call) const {
    if (status != Status::kOk) give_up(rank, call, int(status));
  }
  void fill(float* data, uint64_t elems, int of) const {
    for (uint64_t i = 0; i < elems; ++i) data[i] = value(of, i, round);
  }
  template <class Wanted>
  void compare(const float* got, uint64_t elems, const char* call, Wanted wanted) const {
    for (uint64_t i = 0; i < elems; ++i)
      if (got[i] != wanted(i)) give_up(rank, call, int(i));
  }
  Bucket bucket() const {
    return Bucket::of(bytes_of(grads.data()), bytes_of(params.data()), kElems, 4, 4, world);
  }

  void all_reduce(float* data, uint64_t elems, Algorithm algorithm) {
    fill(data, elems, rank);
    const Reduction sum{DType::kFloat32, RedOp::kSum, 1.0, algorithm};
    check(comm.all_reduce(bytes_of(data), bytes_of(data), elems, sum), "all-reduce");
    compare(data, elems, "all-reduce", [&](uint64_t i) { return sum_at(world, i, round); });
  }

  void move(Algorithm algorithm) {
    fill(mine.data(), kLarge * uint64_t(world), rank);
    const Reduction sum{DType::kFloat32, RedOp::kSum, 1.0, algorithm};
    check(comm.reduce_scatter(bytes_of(mine.data()), bytes_of(result.data()), kLarge, sum),
          "reduce-scatter");
    compare(result.data(), kLarge, "reduce-scatter",
            [&](uint64_t i) { return sum_at(world, uint64_t(rank) * kLarge + i, round); });
    check(comm.all_gather(bytes_of(mine.data()), bytes_of(result.data()), kLarge * 4,
                          DType::kFloat32, algorithm),
          "all-gather");
    compare(result.data(), kLarge * uint64_t(world), "all-gather",
            [&](uint64_t i) { return value(int(i / kLarge), i % kLarge, round); });
  }

  void broadcast() {
    const int root = round % world;
    fill(mine.data(), kLarge, rank);
    check(comm.broadcast(bytes_of(mine.data()), kLarge * 4, DType::kFloat32, root), "broadcast");
    compare(mine.data(), kLarge, "broadcast", [&](uint64_t i) { return value(root, i, round); });
  }

  // Large pairs are divided among the channels, and the first channel sends small pairs.
  void all_to_all() {
    std::vector<Span> in, out;
    const auto elems = [](int from, int to) { return (from + to) % 2 == 0 ? kLarge : kSmall / 8; };
    fill(mine.data(), kLarge * uint64_t(world), rank);
    for (int p = 0; p < world; ++p) {
      const uint64_t begin = uint64_t(p) * kLarge;
      in.push_back({bytes_of(mine.data() + begin), elems(rank, p) * 4});
      out.push_back({bytes_of(result.data() + begin), elems(p, rank) * 4});
    }
    check(comm.all_to_all(in, out, DType::kFloat32), "all-to-all");
    for (int p = 0; p < world; ++p)
      compare(result.data() + uint64_t(p) * kLarge, elems(p, rank), "all-to-all",
              [&](uint64_t i) { return value(p, uint64_t(rank) * kLarge + i, round); });
  }

  // Sums this rank's gradients and their norm, and then takes a step with the same sums.
  void step(Algorithm algorithm) {
    const Run chunk = bucket().chunk(rank);
    const uint64_t elems = chunk.end - chunk.begin;
    const GradCall call{bytes_of(grads.data()), DType::kFloat32, RedOp::kSum, algorithm};
    NormWords words{}, wanted{};
    fill(grads.data(), kElems, rank);
    check(comm.reduce_scatter_norm(call, kElems,
                                   {optimizer.shard_grad.data(), false, NormKind::kTwo, &words, 0}),
          "reduce-scatter with norm");
    for (uint64_t i = 0; i < elems; ++i) sums[i] = sum_at(world, chunk.begin + i, round);
    compare(optimizer.shard_grad.data(), elems, "reduce-scatter with norm",
            [&](uint64_t i) { return sums[i]; });
    grad_norm({bytes_of(sums.data()), DType::kFloat32, RedOp::kSum, algorithm}, elems,
              NormKind::kTwo, &wanted);
    if (!std::equal(words.word, words.word + kNormWords, wanted.word)) give_up(rank, "norm");
    fill(grads.data(), kElems, rank);
    optimizer.begin();
    check(comm.reduce_scatter_adamw_all_gather(optimizer.shard, call), "step");
    reference.step(world, round);
    compare(params.data(), kElems, "step", [&](uint64_t i) { return reference.params[i]; });
  }

  void make_round() {
    all_reduce(mine.data(), kSmall, Algorithm::kOneShot);
    all_reduce(in_heap.data(), kLarge, Algorithm::kOneShot);
    for (const Algorithm each : {Algorithm::kOneShot, Algorithm::kRing}) {
      all_reduce(mine.data(), kLarge, each);
      move(each);
      step(each);
    }
    broadcast();
    all_to_all();
    check(comm.barrier(), "barrier");
  }
};

void run_rank(Teams& teams, int rank) {
  std::unique_ptr<Comm>& comm = teams.comms[size_t(rank)];
  CommConfig config{rank, teams.world, 2, kSegmentBytes, teams.timeout_ns, 8, "team"};
  config.channels = teams.channels;
  comm = std::make_unique<Comm>(teams.heap, config);
  comm->use_threads(kThreads[rank], true, teams.channels, false);
  teams.sync();
  std::vector<PeerAddress> peers;
  for (const auto& each : teams.comms) peers.push_back(address_of(teams.heap, *each));
  comm->connect(peers);
  teams.sync();
  comm->activate();
  {
    Rank mine{teams, rank};
    mine.optimizer.own(mine.bucket().chunk(rank), mine.params.data());
    for (uint64_t i = 0; i < kElems; ++i) mine.params.data()[i] = first_param(i);
    teams.sync();
    for (; mine.round < teams.rounds; ++mine.round) mine.make_round();
    teams.sync();
  }
  comm->close();
}

}  // namespace

int main(int argc, char** argv) {
  bytes_to_wake_for = 0;
  if (argc != 4 && argc != 5) return 2;
  Teams teams(std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]));
  if (argc == 5) teams.timeout_ns = std::strtoull(argv[4], nullptr, 10) * 1'000'000;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < teams.world; ++rank)
    ranks.emplace_back(run_rank, std::ref(teams), rank);
  for (std::thread& each : ranks) each.join();
  teams.comms.clear();
  RetiredRegions::instance().reclaim();
  std::puts("ok");
  return 0;
}
