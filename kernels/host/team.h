// Teams of host threads.
#pragma once

#include <pthread.h>

#include "kernels/host/waiter.h"

namespace ringcomm::host {

// What every host team can do while it waits.
struct HostTeam {
  const Waiter* waiter;

  bool pause(Pause& p) const { return waiter->pause(p); }
  static uint64_t now_ns() { return Waiter::now_ns(); }
  Status health(int peer) const { return waiter->health(peer); }
  static void wake(uint32_t* word) { Waiter::wake(word); }
};

// One thread executes the channel: the production team, whose lane arithmetic folds to constants.
struct SoloTeam : HostTeam {
  static constexpr int lane() { return 0; }
  static constexpr int num_lanes() { return 1; }
  static constexpr int channel() { return 0; }
  static constexpr int num_channels() { return 1; }
  static void sync() {}
  static Status share(Status status) { return status; }
};

// Several threads execute a channel as the lanes of a CUDA block would; ThreadSanitizer sees every
// access that a block would race on.
struct LaneGroup {
  explicit LaneGroup(int lanes) { pthread_barrier_init(&barrier, nullptr, unsigned(lanes)); }
  ~LaneGroup() { pthread_barrier_destroy(&barrier); }
  pthread_barrier_t barrier;
  Status shared = Status::kOk;
};

struct ThreadTeam : HostTeam {
  int lane_, lanes_, channel_, channels_;
  LaneGroup* group;

  int lane() const { return lane_; }
  int num_lanes() const { return lanes_; }
  int channel() const { return channel_; }
  int num_channels() const { return channels_; }
  void sync() { pthread_barrier_wait(&group->barrier); }
  Status share(Status status) {
    if (lane_ == 0) group->shared = status;
    sync();
    const Status result = group->shared;
    sync();  // nobody overwrites it before all have read it
    return result;
  }
};

}  // namespace ringcomm::host
