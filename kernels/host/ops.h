// The Ops of endpoint.h on the host: a KernelTable's loops, each lane taking its part of the bytes.
#pragma once

#include "kernels/host/kernel_table.h"
#include "ringcomm/team.h"

namespace ringcomm::host {

struct HostOps {
  const KernelTable* table;
  ReduceFn reduce_fn;  // null for collectives that only move data
  bool streaming;      // results are too large to stay in the cache: store past it
  int world;

  template <class Team>
  void copy_to_slot(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes > e.begin_bytes)
      table->copy(at(dst, e), at(src, e), e.end_bytes - e.begin_bytes);
  }

  template <class Team>
  void copy_out(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    (streaming ? table->copy_streaming : table->copy)(at(dst, e), at(src, e),
                                                      e.end_bytes - e.begin_bytes);
  }

  template <class Team>
  void reduce(Team& team, void* dst, const void* const* sources, const double* factors, int count,
              uint64_t bytes, int finish_world) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    if (team.num_lanes() == 1) {
      reduce_fn(dst, sources, factors, count, bytes, finish_world, streaming);
      return;
    }
    const void* mine[kMaxLaneSources];
    for (int s = 0; s < count; ++s) mine[s] = at(sources[s], e);
    reduce_fn(at(dst, e), mine, factors, count, e.end_bytes - e.begin_bytes, finish_world,
              streaming);
  }

 private:
  static constexpr int kMaxLaneSources =
      64;  // teams of several lanes are for worlds that tests run
  static void* at(void* ptr, const Extent& e) { return static_cast<char*>(ptr) + e.begin_bytes; }
  static const void* at(const void* ptr, const Extent& e) {
    return static_cast<const char*>(ptr) + e.begin_bytes;
  }
};

}  // namespace ringcomm::host
