// The Ops of endpoint.h on the host: a KernelTable's loops, each lane taking its part of the bytes.
#pragma once

#include "kernels/host/kernel_table.h"
#include "kernels/host/store_path.h"
#include "ringcomm/protocol/endpoint.h"

namespace ringcomm::host {

struct HostOps {
  const KernelTable* table;
  ReduceFn reduce_fn;  // null for collectives that only move data
  bool streaming;      // results are too large to stay in the cache: store past it
  StorePath* path;     // how memory that peers read is written

  template <class Team>
  void copy_shared(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    path->store(bytes, [&](bool past_caches) {
      (past_caches ? table->copy_streaming : table->copy)(at(dst, e), at(src, e),
                                                          e.end_bytes - e.begin_bytes);
    });
  }

  template <class Team>
  void copy_private(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    (streaming ? table->copy_streaming : table->copy)(at(dst, e), at(src, e),
                                                      e.end_bytes - e.begin_bytes);
  }

  template <class Team>
  void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from, uint64_t bytes,
              int finish_world) const {
    const Extent e = part_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    const void* const* sources = from.ptrs;
    const void* mine[kMaxLaneSources];
    if (team.num_lanes() > 1) {
      for (int s = 0; s < from.count; ++s) mine[s] = at(from.ptrs[s], e);
      sources = mine;
    }
    ReduceJob job{at(to.dst, e),
                  to.also == nullptr ? nullptr : at(to.also, e),
                  streaming,
                  streaming,
                  sources,
                  from.factors,
                  from.count,
                  finish_world,
                  e.end_bytes - e.begin_bytes};
    if (to.shared) job.streaming = path->past_caches(bytes);
    reduce_fn(job);
  }

 private:
  static constexpr int kMaxLaneSources = 64;  // several lanes are for worlds that tests run
  static void* at(void* ptr, const Extent& e) { return static_cast<char*>(ptr) + e.begin_bytes; }
  static const void* at(const void* ptr, const Extent& e) {
    return static_cast<const char*>(ptr) + e.begin_bytes;
  }
};

}  // namespace ringcomm::host
