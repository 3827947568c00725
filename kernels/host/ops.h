// SPDX-License-Identifier: Apache-2.0

// The Ops of endpoint.h on the host: a KernelTable's loops. Each lane takes its part of the bytes.
#pragma once

#include "kernels/host/partial_sums.h"
#include "kernels/host/store_path.h"
#include "ringcomm/optimizer/grad_norm.h"
#include "ringcomm/protocol/endpoint.h"

namespace ringcomm::host {

// The state of one channel of a communicator; one thread uses it at a time.
struct Channel {
  View view;
  std::vector<PeerState> in;
  std::vector<const void*> sources;
  std::vector<double> factors;
  std::vector<char*> results;
  CallHeader mine{};
  StorePath store_path;
  NormWords norm;  // norm of the gradients that this channel reduces
};

struct HostOps {
  const KernelTable* table;
  ReduceFn reduce_fn;                  // null for collectives that only move data
  bool streaming;                      // results are too large for the cache: store past it
  StorePath* path;                     // how to write memory that peers read
  const GroupedSum* groups = nullptr;  // null: sources are reduced one after the other
  uint64_t result_widths = 1;          // size of a result / size of a source's element

  // Returns these ops for another channel.
  HostOps on(Channel& channel) const {
    HostOps same = *this;
    same.path = &channel.store_path;
    return same;
  }

  template <class Team>
  void copy_shared(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = extent_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    path->store(bytes, [&](bool past_caches) {
      (past_caches ? table->copy_streaming : table->copy)(at(dst, e), at(src, e),
                                                          e.end_bytes - e.begin_bytes);
    });
  }

  template <class Team>
  void copy_private(Team& team, void* dst, const void* src, uint64_t bytes) const {
    const Extent e = extent_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    (streaming ? table->copy_streaming : table->copy)(at(dst, e), at(src, e),
                                                      e.end_bytes - e.begin_bytes);
  }

  template <class Team>
  void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from, uint64_t bytes,
              int finish_world) const {
    const Extent e = extent_of(bytes, team.lane(), team.num_lanes());
    if (e.end_bytes == e.begin_bytes) return;
    const void* const* sources = from.ptrs;
    const void* mine[kMaxLaneSources];
    if (team.num_lanes() > 1) {
      for (int s = 0; s < from.count; ++s) mine[s] = at(from.ptrs[s], e);
      sources = mine;
    }
    ReduceJob job{static_cast<char*>(to.dst) + e.begin_bytes * result_widths,
                  to.also == nullptr ? nullptr : at(to.also, e),
                  streaming,
                  streaming,
                  sources,
                  from.factors,
                  from.count,
                  finish_world,
                  e.end_bytes - e.begin_bytes};
    if (to.shared) job.streaming = path->past_caches(bytes);
    if (groups != nullptr && from.count > groups->ranks) return reduce_in_groups(*groups, job);
    reduce_fn(job);
  }

 private:
  static constexpr int kMaxLaneSources = 64;  // only tests run several lanes, with few ranks
  static void* at(void* ptr, const Extent& e) { return static_cast<char*>(ptr) + e.begin_bytes; }
  static const void* at(const void* ptr, const Extent& e) {
    return static_cast<const char*>(ptr) + e.begin_bytes;
  }
};

// The Ops of a call that leaves results unfinished, in the accumulator's type, which may be wider
// than the elements' type.
struct PartialOps : HostOps {
  char* out;  // where results begin

  PartialOps on(Channel& channel) const { return {HostOps::on(channel), out}; }

  template <class Team>
  void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from, uint64_t bytes,
              int) const {
    // The caller sets to.dst as if results were as wide as elements.
    const auto begin = uint64_t(static_cast<char*>(to.dst) - out);
    const ReduceTarget wide{out + begin * result_widths, to.shared, nullptr};
    HostOps::reduce(team, wide, from, bytes, 0);
  }
};

// The Ops of a sum in groups whose partial sums travel between ranks (two_levels.h).
struct LevelOps : HostOps {
  LevelOps on(Channel& channel) const { return {HostOps::on(channel)}; }

  uint64_t partial_widths() const { return groups->acc_bytes / groups->source_bytes; }

  template <class Team>
  void reduce_group(Team& team, char* partial, const ReduceSources& from, uint64_t bytes) const {
    const Extent e = extent_of(bytes, team.lane(), team.num_lanes());
    run(groups->of_group, partial + e.begin_bytes * partial_widths(), from, e, false, 0);
  }

  template <class Team>
  void reduce_groups(Team& team, char* dst, const ReduceSources& from, uint64_t bytes,
                     int finish_world) const {
    const Extent e = extent_of(bytes, team.lane(), team.num_lanes());
    const uint64_t begin = e.begin_bytes / groups->acc_bytes * groups->result_bytes;
    run(groups->of_last, dst + begin, from, e, streaming, finish_world);
  }

 private:
  static void run(ReduceFn fn, char* dst, const ReduceSources& from, const Extent& e,
                  bool past_caches, int finish_world) {
    if (e.end_bytes == e.begin_bytes) return;
    std::vector<const void*> sources(from.ptrs, from.ptrs + from.count);
    for (const void*& each : sources) each = static_cast<const char*>(each) + e.begin_bytes;
    fn(ReduceJob{dst, nullptr, past_caches, false, sources.data(), from.factors, from.count,
                 finish_world, e.end_bytes - e.begin_bytes});
  }
};

}  // namespace ringcomm::host
