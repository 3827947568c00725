// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/retired.h"

#include "ringcomm/core/atomics.h"

namespace ringcomm::host {

RetiredRegions& RetiredRegions::instance() {
  // Never destroyed: at exit the kernel reclaims the memory anyway, and threads may still run.
  static auto* const regions = new RetiredRegions;
  return *regions;
}

// model: free_of_peers (tests/proof/model/retired.pml)
bool RetiredRegions::free_of_peers(const Region& region) {
  for (size_t p = 0; p < region.peers.size(); ++p) {
    if (int(p) == region.rank) continue;
    const char* base = region.heap->base() + region.offset;
    const auto* line = reinterpret_cast<const SignalLine*>(
        base + region.layout.signal_offset(Stream::kPair, 0, int(p)));
    // Pairs with the release in Comm::detach() of the peer.
    if (load_acquire_sys(&line->detached) != 0) continue;
    if (region.peers[p].has_ended()) continue;
    return false;
  }
  return true;
}

void RetiredRegions::retire(Region region) {
  {
    const std::lock_guard lock(mutex_);
    regions_.push_back(std::move(region));
  }
  reclaim();
}

// model: reclaim (tests/proof/model/retired.pml)
void RetiredRegions::reclaim() {
  const std::lock_guard lock(mutex_);
  std::erase_if(regions_, [](const Region& region) {
    if (!free_of_peers(region)) return false;
    region.heap->free(region.offset);
    for (const uint64_t held : region.held) region.heap->release(held);
    return true;
  });
}

}  // namespace ringcomm::host
