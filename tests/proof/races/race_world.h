// SPDX-License-Identifier: Apache-2.0

// Ranks x channels x lanes as threads of one process: their memory, and their contributions.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/host/team.h"
#include "ringcomm/protocol/endpoint.h"

using namespace ringcomm;
using namespace ringcomm::host;

namespace {

constexpr uint32_t kSegmentBytes = 4096;
constexpr int kSlots = 4;

// The contribution of rank r at index i in a round: small integers, so every sum is exact.
float value(int rank, uint64_t i, int round) { return float((rank * 7 + i * 3 + round) % 11) - 5; }

float sum_at(int world, uint64_t i, int round) {
  float total = 0;
  for (int r = 0; r < world; ++r) total += value(r, i, round);
  return total;
}

struct World {
  int world, channels, lanes, rounds;
  uint64_t timeout_ns = 120'000'000'000;
  Layout layout;
  std::vector<char> arena;  // every rank's heap: its region, then its tensors
  std::vector<char*> regions, heaps;
  std::vector<uint64_t> heap_bytes;
  std::vector<std::vector<PeerState>> in;
  std::vector<std::vector<const void*>> sources;
  std::vector<std::vector<double>> factors;
  std::vector<std::vector<char*>> results;
  std::vector<std::unique_ptr<CallHeader>> mine;  // by rank and channel, as the previous four
  std::vector<std::unique_ptr<LaneGroup>> groups;
  Waiter waiter{PausePolicy{20, 2000}};

  // tensor_bytes: bytes of a rank's heap behind its region.
  World(int w, int c, int l, int n, uint64_t tensor_bytes)
      : world(w), channels(c), lanes(l), rounds(n), layout{w, c, kSlots, kSegmentBytes, 0, 0} {
    const uint64_t share = layout.region_bytes() + layout.whole_pages(tensor_bytes);
    arena.resize(share * uint64_t(world) + kPageBytes);
    char* base =
        reinterpret_cast<char*>(layout.whole_pages(reinterpret_cast<uintptr_t>(arena.data())));
    for (int r = 0; r < world; ++r) {
      regions.push_back(base + share * uint64_t(r));
      heaps.push_back(base);
      heap_bytes.push_back(arena.size() - kPageBytes);
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

  char* tensors(int rank) const { return regions[size_t(rank)] + layout.region_bytes(); }

  View view(int rank, int channel) {
    const size_t r = size_t(rank * channels + channel);
    View v{rank,
           world,
           layout,
           regions.data(),
           heaps.data(),
           heap_bytes.data(),
           timeout_ns,
           in[r].data(),
           sources[r].data(),
           factors[r].data(),
           mine[r].get()};
    v.results = results[r].data();
    return v;
  }

  ThreadTeam team(int rank, int channel, int lane) const {
    LaneGroup* const group = groups[size_t(rank * channels + channel)].get();
    return {{&waiter}, lane, lanes, channel, channels, group};
  }
};

// Ends the process, since the other threads wait at a barrier.
[[noreturn]] void give_up(int rank, const char* what, int number = 0) {
  std::fprintf(stderr, "rank %d: %s %d\n", rank, what, number);
  std::_Exit(1);
}

// The main() of a race test: makes a world from the arguments, a thread for each lane, and their
// barrier. A fifth argument sets the limit of a wait in milliseconds, in place of two minutes.
template <class W>
int run_lanes(int argc, char** argv, void (*run)(W&, int, int, int, pthread_barrier_t*)) {
  if (argc != 5 && argc != 6) return 2;
  W w(std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]));
  if (argc == 6) w.timeout_ns = std::strtoull(argv[5], nullptr, 10) * 1'000'000;
  pthread_barrier_t all;
  pthread_barrier_init(&all, nullptr, unsigned(w.world * w.channels * w.lanes));
  std::vector<std::thread> lanes;
  for (int r = 0; r < w.world; ++r)
    for (int c = 0; c < w.channels; ++c)
      for (int l = 0; l < w.lanes; ++l) lanes.emplace_back([&, r, c, l] { run(w, r, c, l, &all); });
  for (std::thread& t : lanes) t.join();
  std::puts("ok");
  return 0;
}

}  // namespace
