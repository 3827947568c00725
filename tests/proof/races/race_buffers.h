// SPDX-License-Identifier: Apache-2.0

// The buffers of the ranks of race_test: a result of every collective each.
#pragma once

#include <unistd.h>

#include <vector>

#include "kernels/host/ops.h"
#include "tests/proof/races/race_world.h"

namespace {

// Per rank. Not a multiple of a segment, line or vector; long enough for zero copy from the heap.
constexpr uint64_t kChunkElems = 5003;
constexpr uint64_t kSmallElems = 37;

// A rank may come late to a reduction; the data that it reads must not change until then.
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

struct Buffers {
  std::vector<float> in, all_reduced, scattered, gathered, ring_reduced, ring_scattered,
      ring_gathered;
  std::vector<float> small, broadcast, exchanged, reduced, collected, dealt;
  std::vector<float> heap_reduced, from_lent, level_scattered;
  float* heap_in;  // for zero copy; reduced in place
};

struct BufferWorld : World {
  std::vector<Buffers> buffers;  // by rank

  BufferWorld(int w, int c, int l, int n)
      : World(w, c, l, n, kChunkElems * uint64_t(w) * sizeof(float)), buffers(size_t(w)) {
    for (int r = 0; r < world; ++r)
      buffers[size_t(r)].heap_in = reinterpret_cast<float*>(tensors(r));
  }
};

}  // namespace
