// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/fault_injection.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

namespace ringcomm::host {
namespace {

std::mutex mutex;
ArmedFault armed;
Passages passed;

void sleep_ns(uint64_t ns) {
  timespec left{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

// Counts this fault point and returns the action planned for it.
FaultAction next(Point point, int rank, uint64_t sequence, uint64_t* ns) {
  const std::lock_guard lock(mutex);
  if (load_relaxed_sys(&fault_is_armed) == 0) return FaultAction::kNone;
  if (armed.rank >= 0 && armed.rank != rank) return FaultAction::kNone;
  if (armed.sequence != 0 && armed.sequence != sequence) return FaultAction::kNone;
  ++passed.count[int(point)];
  uint64_t number = 0;
  for (const uint64_t count : passed.count) number += count;
  *ns = armed.sleep_ns;
  const bool now =
      number == armed.passage || (armed.action == FaultAction::kSlow && number > armed.passage);
  return now ? armed.action : FaultAction::kNone;
}

}  // namespace

void arm(const ArmedFault& fault) {
  const std::lock_guard lock(mutex);
  armed = fault;
  passed = Passages{};
  store_relaxed_sys(&fault_is_armed, 1);
}

void disarm() {
  const std::lock_guard lock(mutex);
  store_relaxed_sys(&fault_is_armed, 0);
}

Passages passages() {
  const std::lock_guard lock(mutex);
  return passed;
}

void pass_armed(Point point, int rank, uint64_t sequence) {
  uint64_t ns = 0;
  switch (next(point, rank, sequence, &ns)) {
    case FaultAction::kKill:
      kill(getpid(), SIGKILL);
      break;
    case FaultAction::kStop:
      kill(getpid(), SIGSTOP);
      break;
    case FaultAction::kDelay:
    case FaultAction::kSlow:
      sleep_ns(ns);
      break;
    case FaultAction::kNone:
      break;
  }
}

}  // namespace ringcomm::host
