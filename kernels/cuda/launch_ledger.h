// SPDX-License-Identifier: Apache-2.0

// Keeps the communicators of one process on one device from blocking each other.
//
// Kernels of a collective wait for peers, so all blocks that wait at the same time must fit on the
// device together. Launches on one stream follow each other, so only the largest launch of each
// stream counts. A launch that does not fit waits, by events on the device, for the oldest launches
// whose end frees enough blocks. Messages cannot be ordered like this, since a send may wait for a
// receive that comes after a collective. So from a communicator's first message on, the ledger
// reserves blocks for the messages of all its ranks in this process. If ranks launch the
// collectives of several communicators in different orders, the collectives run concurrently as far
// as the device's occupancy allows. Collectives that cannot run concurrently fail at the deadline
// (docs/cuda.md).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/cuda/driver.h"
#include "ringcomm/core/atomics.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

class LaunchLedger {
 public:
  LaunchLedger(std::shared_ptr<const Driver> driver, int device)
      : driver_(std::move(driver)), events_(driver_->events_of(device)) {}

  // members: communicators of this process on the device. capacity: blocks that the device can run
  // at once. kept: blocks reserved for messages.
  void set_members(int members, unsigned capacity, unsigned kept);
  // True if there are several communicators, whose launches may block each other.
  bool is_shared() const { return load_relaxed_sys(&members_) > 1; }

  // Makes `stream` wait for the launches that must end before `blocks` more blocks fit. The
  // launches of a graph follow each other on its streams: do not call before() or after() for a
  // capturing stream. owner: the communicator; its calls follow each other. The device is current.
  void before(uint64_t owner, unsigned blocks, void* stream);
  // Records a launch that was just made on `stream`.
  void after(uint64_t owner, unsigned blocks, void* stream);

 private:
  struct Launch {
    uint64_t owner;
    unsigned blocks;
    void* stream;
    void* done;
  };
  // The launches of other owners and streams whose end frees blocks, oldest first, each with the
  // number of blocks freed. A launch frees none if a later launch on its stream is as large.
  std::vector<std::pair<const Launch*, unsigned>> gains(uint64_t owner, void* stream) const;
  void forget_passed();

  std::shared_ptr<const Driver> driver_;
  EventPool& events_;
  uint32_t members_ = 0;
  std::mutex mutex_;
  unsigned capacity_ = 0, kept_ = 0;
  std::deque<Launch> under_way_;
};

}  // namespace device
RINGCOMM_NAMESPACE_END
