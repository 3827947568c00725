// SPDX-License-Identifier: Apache-2.0

// Regions of closed communicators. A peer may still be about to store an acknowledgement into a
// region, so the region returns to the heap only after every peer has detached or has ended.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "kernels/host/heap.h"
#include "kernels/host/waiter.h"
#include "ringcomm/protocol/layout.h"

namespace ringcomm::host {

class RetiredRegions {
 public:
  static RetiredRegions& instance();

  struct Region {
    std::shared_ptr<Heap> heap;
    uint64_t offset;
    Layout layout;
    int rank;
    std::vector<Process> peers;  // empty: the communicator never connected
    std::vector<uint64_t> held;  // results of Heap::hold(): allocations into which peers may store
  };
  void retire(Region region);
  // Frees regions into which no peer can store. Called when a communicator is made or closed.
  void reclaim();

 private:
  static bool free_of_peers(const Region& region);

  std::mutex mutex_;
  std::vector<Region> regions_;
};

}  // namespace ringcomm::host
