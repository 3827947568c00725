// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/launch_ledger.h"

#include <algorithm>
#include <map>

RINGCOMM_NAMESPACE_BEGIN
namespace device {

void LaunchLedger::set_members(int members, unsigned capacity, unsigned kept) {
  const std::lock_guard lock(mutex_);
  capacity_ = capacity;
  kept_ = kept;
  store_relaxed_sys(&members_, uint32_t(members));
}

void LaunchLedger::forget_passed() {
  const auto passed = [&](const Launch& each) {
    if (!driver_->has_passed(each.done)) return false;
    events_.give(each.done);
    return true;
  };
  under_way_.erase(std::remove_if(under_way_.begin(), under_way_.end(), passed), under_way_.end());
}

std::vector<std::pair<const LaunchLedger::Launch*, unsigned>> LaunchLedger::gains(
    uint64_t owner, void* stream) const {
  std::map<void*, unsigned> taken;  // largest later launch, by stream
  std::vector<std::pair<const Launch*, unsigned>> found;
  for (auto each = under_way_.rbegin(); each != under_way_.rend(); ++each) {
    if (each->owner == owner || each->stream == stream) continue;
    unsigned& later = taken[each->stream];
    if (each->blocks <= later) continue;
    found.emplace_back(&*each, each->blocks - later);
    later = each->blocks;
  }
  std::reverse(found.begin(), found.end());
  return found;
}

void LaunchLedger::before(uint64_t owner, unsigned blocks, void* stream) {
  if (!is_shared()) return;
  const std::lock_guard lock(mutex_);
  forget_passed();
  const auto others = gains(owner, stream);
  int64_t free = int64_t(capacity_) - kept_;
  for (const auto& [launch, gain] : others) free -= gain;
  for (const auto& [launch, gain] : others) {
    if (free >= int64_t(blocks)) break;
    driver_->wait(stream, launch->done);
    free += gain;
  }
}

void LaunchLedger::after(uint64_t owner, unsigned blocks, void* stream) {
  if (!is_shared()) return;
  void* done = events_.take();
  if (done == nullptr) done = driver_->make_event();
  driver_->record(done, stream);
  const std::lock_guard lock(mutex_);
  under_way_.push_back({owner, blocks, stream, done});
}

}  // namespace device
RINGCOMM_NAMESPACE_END
