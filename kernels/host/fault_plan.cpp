#include "kernels/host/fault_plan.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

namespace ringcomm::host {
namespace {

std::mutex mutex;
FaultPlan armed;
Passages passed;

void sleep_ns(uint64_t ns) {
  timespec left{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

// Counts the passage; what happens at it.
PlannedFault next(Point point, int rank, uint64_t sequence, uint64_t* ns) {
  const std::lock_guard lock(mutex);
  if (load_relaxed_sys(&fault_plan_armed) == 0) return PlannedFault::kNone;
  if (armed.rank >= 0 && armed.rank != rank) return PlannedFault::kNone;
  if (armed.sequence != 0 && armed.sequence != sequence) return PlannedFault::kNone;
  ++passed.count[int(point)];
  uint64_t number = 0;
  for (const uint64_t count : passed.count) number += count;
  *ns = armed.sleep_ns;
  const bool now =
      number == armed.passage || (armed.fault == PlannedFault::kSlow && number > armed.passage);
  return now ? armed.fault : PlannedFault::kNone;
}

}  // namespace

void arm(const FaultPlan& plan) {
  const std::lock_guard lock(mutex);
  armed = plan;
  passed = Passages{};
  store_relaxed_sys(&fault_plan_armed, 1);
}

void disarm() {
  const std::lock_guard lock(mutex);
  store_relaxed_sys(&fault_plan_armed, 0);
}

Passages passages() {
  const std::lock_guard lock(mutex);
  return passed;
}

void pass_armed(Point point, int rank, uint64_t sequence) {
  uint64_t ns = 0;
  switch (next(point, rank, sequence, &ns)) {
    case PlannedFault::kKill:
      kill(getpid(), SIGKILL);
      break;
    case PlannedFault::kStop:
      kill(getpid(), SIGSTOP);
      break;
    case PlannedFault::kDelay:
    case PlannedFault::kSlow:
      sleep_ns(ns);
      break;
    case PlannedFault::kNone:
      break;
  }
}

}  // namespace ringcomm::host
