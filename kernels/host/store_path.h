// SPDX-License-Identifier: Apache-2.0

// Chooses how to write memory that peers read: through the caches, or past them.
//
// Before a regular store, a cache line that another core read last must be taken from that core's
// cache. Between Zen 4 cores that share a cache this is cheap, and the reader then finds the data
// in the cache: a staged reduce-scatter of 1 MiB takes 29 us, and 56 us with stores past the
// caches. Between cores that share no cache, regular stores reach 2.4 GB/s and stores past the
// caches 16 GB/s: 230 us against 44 us. A virtual machine may move between the two cases without
// notice, so a topology file does not help. The speed of the copies themselves is measured instead.
#pragma once

#include "kernels/host/waiter.h"

namespace ringcomm::host {

class StorePath {
 public:
  // Below this size the store buffer hides the difference (sweep 1 KiB to 256 KiB).
  static constexpr uint64_t kMinBytes = 4096;

  bool past_caches(uint64_t bytes) const { return past_caches_ && bytes >= kMinBytes; }

  // Runs copy(past_caches) and learns from its speed.
  template <class Copy>
  void store(uint64_t bytes, Copy copy) {
    const bool timed = bytes >= kTimedMinBytes;
    const bool probe = timed && past_caches_ && ++copies_ % kProbeEvery == 0;
    const bool past = past_caches(bytes) && !probe;
    if (!timed || past) {
      copy(past);
      return;
    }
    const uint64_t begin_ns = Waiter::now_ns();
    copy(false);
    // Bytes per nanosecond are GB/s. A preempted copy looks slow; the next probe corrects it.
    past_caches_ = double(bytes) < kSlowGbps * double(Waiter::now_ns() - begin_ns);
  }

 private:
  // A copy of this size takes 2 us or more, so reading the clock, about 50 ns, hardly slows it.
  static constexpr uint64_t kTimedMinBytes = 32768;
  static constexpr double kSlowGbps = 5;  // between 2.4 and 16 GB/s, see above
  // A slow probe takes as long as 6 fast copies: it adds 2 % to the time of 256 copies.
  static constexpr uint32_t kProbeEvery = 256;

  bool past_caches_ = false;
  uint32_t copies_ = 0;
};

}  // namespace ringcomm::host
