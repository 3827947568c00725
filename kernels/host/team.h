// SPDX-License-Identifier: Apache-2.0

// Teams of host threads, which execute channels.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <vector>

#include "kernels/host/fault_injection.h"
#include "kernels/host/waiter.h"
#include "ringcomm/core/atomics.h"
#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

// The functions with which every host team waits.
struct HostTeam {
  static constexpr bool kSleeps = true;
  static constexpr bool kDealsTiles = false;
  const Waiter* waiter;

  // Publishes this thread's core to the peers: a hint, since the scheduler may move the thread.
  static void tell_core(const View& v) {
    uint32_t* core = &v.control(v.rank)->core;
    const uint32_t here = uint32_t(sched_getcpu()) + 1;
    if (load_relaxed_sys(core) != here) store_relaxed_sys(core, here);
  }
  static bool shares_core(const View& v, int peer) {
    tell_core(v);
    return load_relaxed_sys(&v.control(peer)->core) == load_relaxed_sys(&v.control(v.rank)->core);
  }
  bool pause(Pause& p) const { return waiter->pause(p); }
  static uint64_t now_ns() { return Waiter::now_ns(); }
  Status health(int peer) const { return waiter->health(peer); }
  bool is_stopped(int peer) const { return waiter->is_stopped(peer); }
  const CallHeader* other_call_recorded(const CallId& mine, int peer) const {
    return waiter->other_call(mine, peer);
  }
  void fence_as_writer() const { waiter->fence_as_writer(); }
  static void wake(uint32_t* word) { Waiter::wake(word); }
  static void tell_host(const Fault&) {}  // the host reads the fault record in place
};

// The team of a single thread, which executes a whole channel. Lane arithmetic folds to constants.
struct SoloTeam : HostTeam {
  static constexpr bool kShareWaits = false;
  static constexpr bool kReadsWhole = false;
  static constexpr bool kReadsProcesses = true;
  bool reads_processes() const { return waiter->reads_processes(); }
  bool lends(const void* ptr, uint64_t bytes, bool all_share) const {
    return waiter->lends(all_share) && waiter->peers_can_read(ptr, bytes);
  }
  // A thread that has left counts as alive here, since its memory can still be read.
  bool has_ended(int peer) const { return !waiter->is_thread(peer) && waiter->has_ended(peer); }
  Status read_process(int peer, void* to, const void* from, uint64_t bytes) const {
    return waiter->read_process(peer, to, from, bytes);
  }
  static constexpr int lane() { return 0; }
  static constexpr int num_lanes() { return 1; }
  static constexpr int channel() { return 0; }
  static constexpr int num_channels() { return 1; }
  static constexpr Portion portion() { return {}; }
  static void sync() {}
  static Status share(Status status) { return status; }
  static void passing(Point point, const View& v, Stream stream) { pass(point, v, stream); }
};

// One of several threads of a rank, each of which executes channels of its own; see
// NOTE [Threads of a rank] in worker_pool.h.
struct ChannelTeam : SoloTeam {
  int channel_, channels_;
  bool cuts_ = true;  // false: the call itself divides its buffers among the channels

  int channel() const { return channel_; }
  int num_channels() const { return channels_; }
  Portion portion() const { return cuts_ ? portion_of(channel_, channels_) : Portion{}; }
  // The control page names the core of the rank's calling thread alone.
  static bool shares_core(const View&, int) { return false; }
};

// Several threads execute a channel as the lanes of a CUDA block do, so that ThreadSanitizer sees
// every access on which a block would race.
struct LaneGroup {
  explicit LaneGroup(int lanes) : turns(size_t(lanes)) {
    for (pthread_barrier_t& b : barriers) pthread_barrier_init(&b, nullptr, unsigned(lanes));
  }
  ~LaneGroup() {
    for (pthread_barrier_t& b : barriers) pthread_barrier_destroy(&b);
  }
  // Two barriers in turn: with one, the sanitizer would assume that a lane that wakes late has seen
  // all that others did before they came to the barrier again, and hide races.
  void wait(int lane) { pthread_barrier_wait(&barriers[turns[size_t(lane)].passed++ % 2]); }

  struct alignas(64) Turn {
    uint32_t passed = 0;
  };
  pthread_barrier_t barriers[2];
  std::vector<Turn> turns;  // how many barriers each lane has passed
  uint32_t failure = 0;     // a lane's failure; never reset: a failure ends the communicator
};

struct ThreadTeam : HostTeam {
  static constexpr bool kShareWaits = true;
  static constexpr bool kReadsWhole = true;
  static constexpr bool kReadsProcesses = false;
  int lane_, lanes_, channel_, channels_;
  LaneGroup* group;

  int lane() const { return lane_; }
  int num_lanes() const { return lanes_; }
  int channel() const { return channel_; }
  int num_channels() const { return channels_; }
  Portion portion() const { return portion_of(channel_, channels_); }
  void sync() { group->wait(lane_); }
  static void passing(Point, const View&, Stream) {}
  Status share(Status status) {
    if (status != Status::kOk) store_relaxed_sys(&group->failure, uint32_t(status));
    sync();
    const auto result = Status(load_relaxed_sys(&group->failure));
    sync();  // no lane overwrites it before all have read it
    return result;
  }
};

}  // namespace ringcomm::host
