// SPDX-License-Identifier: Apache-2.0

// Blocks as host threads: the counterpart of kernels/cuda/team.h, with the same kernel bodies.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "kernels/cuda/packets.h"
#include "kernels/host/team.h"
#include "tests/support/emulator/kernel.h"

// How often blocks have met at their barriers.
inline std::atomic<uint64_t> emulated_barriers{0};

struct EmulatedTeam {
  static constexpr bool kSleeps = false;
  static constexpr bool kReadsProcesses = false;
  static constexpr bool kShareWaits = true;
  static constexpr bool kReadsWhole = true;
  static constexpr bool kDealsTiles = true;
  // A poll yields the core, since the awaited thread may need it. After kYields polls it sleeps
  // instead, since there are many more threads than cores.
  static constexpr uint32_t kPollsPerLook = 64;
  static constexpr uint32_t kYields = 20;

  ringcomm::device::Workspace* w;
  ringcomm::host::LaneGroup* group;
  int lane_, lanes_, channel_, channels_;

  int lane() const { return lane_; }
  int num_lanes() const { return lanes_; }
  int channel() const { return channel_; }
  int num_channels() const { return channels_; }
  const ringcomm::Portion& portion() const { return w->portion; }
  const ringcomm::Deal& deal() const { return w->deal; }
  ringcomm::Gaps* gaps() const { return w->gaps; }
  void sync() const {
    if (lane_ == 0) emulated_barriers.fetch_add(1, std::memory_order_relaxed);
    group->wait(lane_);
  }
  ringcomm::Status share(ringcomm::Status status) const {
    return ringcomm::host::ThreadTeam{{nullptr}, lane_, lanes_, channel_, channels_, group}.share(
        status);
  }
  bool pause(ringcomm::Pause& p) const {
    // More blocks than cores wait at a time: long waiters sleep and leave the cores to others.
    if (p.polls < kYields) {
      sched_yield();
    } else {
      const timespec nap{0, 50'000};
      nanosleep(&nap, nullptr);
    }
    return p.polls % kPollsPerLook == kPollsPerLook - 1;
  }
  static uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
  }
  ringcomm::Status health(int peer) const {
    if (ringcomm::load_relaxed_sys(&w->host->abort_requested) != 0)
      return ringcomm::Status::kAborted;
    return ringcomm::load_relaxed_sys(&w->host->lost[peer]) != 0 ? ringcomm::Status::kPeerLost
                                                                 : ringcomm::Status::kOk;
  }
  const ringcomm::CallHeader* other_call_recorded(const ringcomm::CallId&, int) const {
    return nullptr;
  }
  void wake(uint32_t*) const {}
  void passing(ringcomm::Point, const ringcomm::View&, ringcomm::Stream) const {}
  void tell_host(const ringcomm::Fault& fault) const {
    w->host->fault = fault;
    ringcomm::store_release_sys(&w->host->fault_raised, 1);
  }
};

// The most emulated threads of a block: enough for lanes to race and to wait for several peers at
// once. (tests/proof/races runs the same bodies with more, under ThreadSanitizer.)
constexpr int kMostLanes = 2;

// Runs body(team, params, rank in launch, workspace) on every lane of every block.
template <class Params, class Body>
void run_blocks(const Params& params, int grid_x, int grid_y, int lanes, Body body) {
  lanes = std::min(lanes, kMostLanes);
  std::vector<ringcomm::device::Workspace> workspaces(size_t(grid_x) * size_t(grid_y));
  std::vector<std::unique_ptr<ringcomm::host::LaneGroup>> groups;
  for (size_t b = 0; b < workspaces.size(); ++b)
    groups.push_back(std::make_unique<ringcomm::host::LaneGroup>(lanes));
  std::vector<std::thread> threads;
  for (int y = 0; y < grid_y; ++y)
    for (int x = 0; x < grid_x; ++x)
      for (int lane = 0; lane < lanes; ++lane) {
        const size_t block = size_t(y) * size_t(grid_x) + size_t(x);
        auto* w = &workspaces[block];
        const EmulatedTeam team{w, groups[block].get(), lane, lanes, x, grid_x};
        threads.emplace_back([&params, body, team, w, y] { body(team, params, y, *w); });
      }
  for (std::thread& t : threads) t.join();
}

// Returns a kernel whose blocks run `body` and whose parameters are ListParams.
template <class Body>
EmulatedKernel list_kernel(Body body) {
  using ringcomm::device::ListParams;
  EmulatedKernel made{[body](const auto& p, int x, int y, int lanes) {
    run_blocks(static_cast<const ListParams&>(p), x, y, lanes, body);
  }};
  made.params_bytes = sizeof(ListParams);
  return made;
}

template <class T, ringcomm::RedOp op>
EmulatedKernel reduce_scatter_kernel() {
  return {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      ringcomm::device::reduce_scatter_kernel<T, op>(team, params, rank, w);
    });
  }};
}

template <class T, ringcomm::RedOp op>
EmulatedKernel reduce_scatter_list_kernel() {
  return list_kernel([](auto team, const auto& params, int rank, auto& w) {
    ringcomm::device::reduce_scatter_list_kernel<T, op>(team, params, rank, w);
  });
}

template <class T, ringcomm::RedOp op>
EmulatedKernel all_reduce_kernel() {
  return {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      ringcomm::device::all_reduce_kernel<T, op>(team, params, rank, w);
    });
  }};
}

template <class T, ringcomm::RedOp op>
EmulatedKernel ll_kernel() {
  return {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      ringcomm::device::ll_reduce_kernel<T, op>(team, params, rank, w);
    });
  }};
}
