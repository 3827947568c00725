// A rank that waits in vain, whose clock is one that this program steps: 10 ms at each look, and
// once by an hour, as of a machine that was suspended. Prints after how many looks it gives up.
#include "ringcomm/protocol/signal.h"
#include "tests/proof/races/race_world.h"

namespace {

constexpr uint64_t kStepNs = 10'000'000, kSuspendedNs = 3'600'000'000'000;
constexpr int kSuspendedAt = 50, kMostLooks = 1000;

struct SteppedTeam : ThreadTeam {
  int* looks;
  uint64_t* clock_ns;

  // Every poll looks at the clock.
  static bool pause(Pause&) { return true; }
  uint64_t now_ns() const {
    if (++*looks > kMostLooks) give_up(0, "does not give up", *looks);
    return *clock_ns += *looks == kSuspendedAt ? kSuspendedNs : kStepNs;
  }
};

}  // namespace

int main() {
  World w(2, 1, 1, 1, 0);
  w.timeout_ns = 100 * kStepNs;
  int looks = 0;
  uint64_t clock_ns = 1;
  const SteppedTeam team{w.team(0, 0, 0), &looks, &clock_ns};
  const Status status = await_slowly(team, w.view(0, 0), Site{Stream::kPair, 1, true, 1}, 1);
  if (status != Status::kTimeout) give_up(0, "status", int(status));
  std::printf("%d\n", looks);
  return 0;
}
