// The Ops of endpoint.h on the host: a KernelTable's loops, each lane taking its part of the bytes.
#pragma once

#include "kernels/host/kernel_table.h"
#include "ringcomm/team.h"

namespace ringcomm::host {

// Memory that peers read is written past the caches from this size on: a regular store first takes
// the line from the cache of the core that read it last. Between Zen 4 cores that share no cache,
// filling a staging slot runs at 2.4 GB/s with regular stores and at 16 GB/s past the caches;
// between cores that share one, the two are level (sweep 32 KiB to 256 KiB per slot).
constexpr uint64_t kSharedStreamingMinBytes = 4096;

struct HostOps {
  const KernelTable* table;
  ReduceFn reduce_fn;  // null for collectives that only move data
  bool streaming;      // results are too large to stay in the cache: store past it

  template <class Team>
  void copy_shared(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    (bytes >= kSharedStreamingMinBytes ? table->copy_streaming : table->copy)(
        at(dst, e), at(src, e), e.end_bytes - e.begin_bytes);
  }

  template <class Team>
  void copy_private(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    (streaming ? table->copy_streaming : table->copy)(at(dst, e), at(src, e),
                                                      e.end_bytes - e.begin_bytes);
  }

  template <class Team>
  void reduce(Team& team, void* dst, const void* const* sources, const double* factors, int count,
              uint64_t bytes, int finish_world, bool shared) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    const bool past_cache = shared ? bytes >= kSharedStreamingMinBytes : streaming;
    if (team.num_lanes() == 1) {
      reduce_fn(dst, sources, factors, count, bytes, finish_world, past_cache);
      return;
    }
    const void* mine[kMaxLaneSources];
    for (int s = 0; s < count; ++s) mine[s] = at(sources[s], e);
    reduce_fn(at(dst, e), mine, factors, count, e.end_bytes - e.begin_bytes, finish_world,
              past_cache);
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
