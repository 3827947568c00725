// Waiters on a core that others want (NOTE [Busy cores] in waiter.cpp).
//
//   busy_test answer SECONDS   two ranks on one core answer each other, and a spin would outlast
//                              every time slice: prints how often they slept
//   busy_test yield SECONDS    a thread yields beside one that computes on its core: prints how
//                              many of its yields were refused, for a small call and for a huge one
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "ringcomm/protocol/signal.h"
#include "tests/proof/races/race_world.h"

namespace {

constexpr uint32_t kItems = 40;
constexpr int kYields = 100;
constexpr uint64_t kHuge = uint64_t(1) << 40;

const Waiter kSpinner{PausePolicy{UINT32_MAX, 0}};
const Waiter kYielder{PausePolicy{0, 2000}};

void stay_on_first_core() {
  cpu_set_t mine, first;
  CPU_ZERO(&mine);
  CPU_ZERO(&first);
  sched_getaffinity(0, sizeof(mine), &mine);
  int core = 0;
  while (!CPU_ISSET(core, &mine)) ++core;
  CPU_SET(core, &first);
  if (sched_setaffinity(0, sizeof(first), &first) != 0) give_up(0, "sched_setaffinity");
}

long sleeps_of_thread() {
  rusage used{};
  getrusage(RUSAGE_THREAD, &used);
  return used.ru_nvcsw;
}

// Rank 0 publishes and rank 1 acknowledges, item by item.
void answer(World& w, int rank, std::atomic<long>* sleeps) {
  stay_on_first_core();
  const View v = w.view(rank, 0);
  ThreadTeam team{{&kSpinner}, 0, 1, 0, 1, w.groups[size_t(rank)].get()};
  team.tell_core(v);
  const long before = sleeps_of_thread();
  for (uint32_t item = 1; item <= kItems; ++item) {
    if (rank == 0) publish(team, v, Stream::kPair, 1, item);
    const Status status =
        await_alone(team, v, Site{Stream::kPair, 1 - rank, rank == 0, item}, item);
    if (status != Status::kOk) give_up(rank, "status", int(status));
    if (rank == 1) acknowledge(team, v, Stream::kPair, 0, item);
  }
  *sleeps += sleeps_of_thread() - before;
}

int refused(uint64_t call_bytes) {
  int count = 0;
  for (int i = 0; i < kYields; ++i) count += !kYielder.yield(call_bytes);
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  alarm(unsigned(std::atoi(argv[2])));
  if (std::strcmp(argv[1], "answer") == 0) {
    World w(2, 1, 1, 1, 0);
    std::atomic<long> sleeps = 0;
    std::thread first([&] { answer(w, 0, &sleeps); }), second([&] { answer(w, 1, &sleeps); });
    first.join();
    second.join();
    std::printf("%ld\n", sleeps.load());
    return 0;
  }
  stay_on_first_core();
  std::atomic<bool> over = false;
  std::thread computes([&] {
    while (!over) {
    }
  });
  const int huge = refused(kHuge), small = refused(0);
  over = true;
  computes.join();
  std::printf("%d %d\n", small, huge);
  return 0;
}
