// Two ranks that answer each other and sleep whenever they wait. tests/proof/races/test_wakes.py
// lets them sleep for an hour at a time, so that only a wake-up lets them go on.
//
//   wake_test ITEMS SECONDS
#include <sched.h>
#include <unistd.h>

#include <thread>

#include "ringcomm/protocol/signal.h"
#include "tests/proof/races/race_world.h"

namespace {

const Waiter kSleeper{PausePolicy{0, 0}};

// Every second time the reader has told that it sleeps, or is about to; else they may meet
// anywhere.
void let_sleep(const uint32_t* flag, uint32_t item) {
  while (item % 2 == 0 && load_relaxed_sys(flag) == 0) sched_yield();
}

void send_all(World& w, uint32_t items) {
  const View v = w.view(0, 0);
  ThreadTeam team{{&kSleeper}, 0, 1, 0, 1, w.groups[0].get()};
  for (uint32_t item = 1; item <= items; ++item) {
    let_sleep(&v.sleepers(1, Stream::kPair, 0, 0)->on_ready, item);
    publish(team, v, Stream::kPair, 1, item);
    const Status status = await_alone(team, v, Site{Stream::kPair, 1, true, item}, item);
    if (status != Status::kOk) give_up(0, "status", int(status));
  }
}

void receive_all(World& w, uint32_t items) {
  const View v = w.view(1, 0);
  ThreadTeam team{{&kSleeper}, 0, 1, 0, 1, w.groups[1].get()};
  for (uint32_t item = 1; item <= items; ++item) {
    const Status status = await_alone(team, v, Site{Stream::kPair, 0, false, item}, item);
    if (status != Status::kOk) give_up(1, "status", int(status));
    let_sleep(&v.sleepers(0, Stream::kPair, 0, 1)->on_consumed, item);
    acknowledge(team, v, Stream::kPair, 0, item);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto items = uint32_t(std::atoi(argv[1]));
  alarm(unsigned(std::atoi(argv[2])));  // ends the process where nobody wakes a sleeper
  World w(2, 1, 1, 1, 0);
  std::thread sender([&] { send_all(w, items); }), receiver([&] { receive_all(w, items); });
  sender.join();
  receiver.join();
  std::puts("ok");
  return 0;
}
