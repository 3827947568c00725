// Ranks of race_test as threads of one process: their memory, and what they compute on.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/host/ops.h"
#include "kernels/host/team.h"

using namespace ringcomm;
using namespace ringcomm::host;

namespace {

constexpr uint32_t kSegmentBytes = 4096;
constexpr int kSlots = 4;
// Not a multiple of a segment, a line or a vector; per rank, so that the heap forms go zero copy.
constexpr uint64_t kChunkElems = 5003;
constexpr uint64_t kSmallElems = 37;

// A rank may come late to a reduction: what it reads must stand until then.
struct LateOps : HostOps {
  bool late;

  template <class Team>
  void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from, uint64_t bytes,
              int finish_world) const {
    if (late) usleep(2000);
    HostOps::reduce(team, to, from, bytes, finish_world);
  }
};

using E = Endpoint<ThreadTeam, LateOps>;

// What rank r contributes at index i in a round: small integers, so that every sum is exact.
float value(int rank, uint64_t i, int round) { return float((rank * 7 + i * 3 + round) % 11) - 5; }

float sum_at(int world, uint64_t i, int round) {
  float total = 0;
  for (int r = 0; r < world; ++r) total += value(r, i, round);
  return total;
}

struct Buffers {
  std::vector<float> in, all_reduced, scattered, gathered, ring_reduced, ring_scattered,
      ring_gathered;
  std::vector<float> small, broadcast, exchanged, reduced, collected, dealt;
  std::vector<float> heap_reduced, from_lent;
  float* heap_in;  // zero copy, reduced in place
};

struct World {
  int world, channels, lanes, rounds;
  Layout layout;
  std::vector<char> arena;
  std::vector<char*> regions, heaps;
  std::vector<uint64_t> heap_bytes;
  std::vector<Buffers> buffers;
  std::vector<std::vector<PeerState>> in;
  std::vector<std::vector<const void*>> sources;
  std::vector<std::vector<double>> factors;
  std::vector<std::unique_ptr<CallHeader>> mine;  // by rank and channel, as the three above
  std::vector<std::unique_ptr<LaneGroup>> groups;
  Waiter waiter{PausePolicy{20, 2000}};

  World(int w, int c, int l, int n)
      : world(w), channels(c), lanes(l), rounds(n), layout{w, c, kSlots, kSegmentBytes, 0, 0} {
    const uint64_t elems = kChunkElems * uint64_t(world),
                   tensor = (elems * sizeof(float) + 4095) / 4096 * 4096;
    const uint64_t share = layout.region_bytes() + tensor;
    arena.resize(share * uint64_t(world) + 4096);
    char* base =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(arena.data()) + 4095) / 4096 * 4096);
    buffers.resize(size_t(world));
    for (int r = 0; r < world; ++r) {
      regions.push_back(base + share * uint64_t(r));
      heaps.push_back(base);
      heap_bytes.push_back(arena.size() - 4096);
      buffers[size_t(r)].heap_in = reinterpret_cast<float*>(regions.back() + layout.region_bytes());
      for (int ch = 0; ch < channels; ++ch) {
        in.emplace_back(size_t(Stream::kCount) * size_t(world));
        sources.emplace_back(size_t(std::max(world, 2)));
        factors.emplace_back(size_t(std::max(world, 2)));
        mine.emplace_back(std::make_unique<CallHeader>());
        groups.push_back(std::make_unique<LaneGroup>(lanes));
      }
    }
  }

  View view(int rank, int channel) {
    const size_t r = size_t(rank * channels + channel);
    return {rank,
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
  }
};

// The other threads wait at a barrier: the process ends here.
[[noreturn]] void give_up(int rank, const char* what, int number = 0) {
  std::fprintf(stderr, "rank %d: %s %d\n", rank, what, number);
  std::_Exit(1);
}

}  // namespace
