// SPDX-License-Identifier: Apache-2.0

// How ranks wait, for tests/proof/races/test_waits.py:
//
//   wait_test wake SECONDS     two ranks answer each other and sleep for an hour at a time, so that
//                              only a wake-up lets them go on
//   wait_test answer SECONDS   two ranks on one core answer each other, and a spin would outlast
//                              every time slice: prints how often they slept
//   wait_test yield SECONDS    a thread yields beside one that computes on its core: prints how
//                              many of its yields were refused, for a small call and for a huge one
//   wait_test suspend SECONDS  a rank waits for nothing by a clock that gains 10 ms at each look,
//                              and once by an hour, as if the machine had been suspended: prints
//                              the number of looks until it gives up
//   wait_test apart SECONDS    sleeps with an affinity that an emulated kernel keeps: prints the
//                              cores of each case, during the sleep and after it
//
// NOTE [Busy cores] in waiter.cpp says why a waiter sleeps on a core that other threads want.
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "ringcomm/protocol/signal.h"
#include "tests/proof/races/race_world.h"

namespace {

// The affinity of the calling thread as masks of eight cores, if `emulated`.
struct Kernel {
  bool emulated = false;
  unsigned cpuset = 0xff, cores = 0xff, asked = 0;
  int calls = 0;
} kernel;

unsigned bits_of(const cpu_set_t& set) {
  unsigned bits = 0;
  for (unsigned core = 0; core < 32; ++core) bits |= unsigned(CPU_ISSET(core, &set) != 0) << core;
  return bits;
}

cpu_set_t set_of(unsigned bits) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (unsigned core = 0; core < 8; ++core)
    if ((bits >> core & 1) != 0) CPU_SET(core, &set);
  return set;
}

}  // namespace

// Replaces the C library's function.
extern "C" int sched_setaffinity(pid_t pid, size_t bytes, const cpu_set_t* set) noexcept {
  if (!kernel.emulated) return int(syscall(SYS_sched_setaffinity, pid, bytes, set));
  kernel.asked = bits_of(*set);
  ++kernel.calls;
  if ((kernel.asked & kernel.cpuset) == 0) return -1;
  kernel.cores = kernel.asked & kernel.cpuset;
  return 0;
}

extern "C" int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t* set) noexcept {
  if (!kernel.emulated) return syscall(SYS_sched_getaffinity, pid, bytes, set) < 0 ? -1 : 0;
  *set = set_of(kernel.cores);
  return 0;
}

namespace {

constexpr uint32_t kWakes = 2000;
const Waiter kSleeper{PausePolicy{0, 0}};

// At every second item, waits until the reader has said that it sleeps or is about to; otherwise
// the two may meet anywhere.
void let_sleep(const uint32_t* flag, uint32_t item) {
  while (item % 2 == 0 && load_relaxed_sys(flag) == 0) sched_yield();
}

void send_all(World& w) {
  const View v = w.view(0, 0);
  ThreadTeam team{{&kSleeper}, 0, 1, 0, 1, w.groups[0].get()};
  for (uint32_t item = 1; item <= kWakes; ++item) {
    let_sleep(&v.sleepers(1, Stream::kPair, 0, 0)->on_ready, item);
    publish(team, v, Stream::kPair, 1, item);
    const Status status = await_alone(team, v, Site{Stream::kPair, 1, true, item}, item);
    if (status != Status::kOk) give_up(0, "status", int(status));
  }
}

void receive_all(World& w) {
  const View v = w.view(1, 0);
  ThreadTeam team{{&kSleeper}, 0, 1, 0, 1, w.groups[1].get()};
  for (uint32_t item = 1; item <= kWakes; ++item) {
    const Status status = await_alone(team, v, Site{Stream::kPair, 0, false, item}, item);
    if (status != Status::kOk) give_up(1, "status", int(status));
    let_sleep(&v.sleepers(0, Stream::kPair, 0, 1)->on_consumed, item);
    acknowledge(team, v, Stream::kPair, 0, item);
  }
}

void wake() {
  Waiter::kSleepNs = 3'600'000'000'000;
  World w(2, 1, 1, 1, 0);
  std::thread sender([&] { send_all(w); }), receiver([&] { receive_all(w); });
  sender.join();
  receiver.join();
  std::puts("ok");
}

constexpr uint32_t kAnswers = 40;
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
void answer_all(World& w, int rank, std::atomic<long>* sleeps) {
  stay_on_first_core();
  const View v = w.view(rank, 0);
  ThreadTeam team{{&kSpinner}, 0, 1, 0, 1, w.groups[size_t(rank)].get()};
  team.tell_core(v);
  const long before = sleeps_of_thread();
  for (uint32_t item = 1; item <= kAnswers; ++item) {
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

void answer() {
  World w(2, 1, 1, 1, 0);
  std::atomic<long> sleeps = 0;
  std::thread first([&] { answer_all(w, 0, &sleeps); }), second([&] { answer_all(w, 1, &sleeps); });
  first.join();
  second.join();
  std::printf("%ld\n", sleeps.load());
}

void yield() {
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
}

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

void suspend() {
  World w(2, 1, 1, 1, 0);
  w.timeout_ns = 100 * kStepNs;
  int looks = 0;
  uint64_t clock_ns = 1;
  const SteppedTeam team{w.team(0, 0, 0), &looks, &clock_ns};
  const Status status = await_slowly(team, w.view(0, 0), Site{Stream::kPair, 1, true, 1}, 1);
  if (status != Status::kTimeout) give_up(0, "status", int(status));
  std::printf("%d\n", looks);
}

// Prints the cores during the sleep and after it, and the first 32 cores of the last mask set.
void sleep_apart(unsigned cpuset, unsigned cores, uint32_t core, unsigned set_meanwhile = 0) {
  kernel = {true, cpuset, cores, 0, 0};
  unsigned asleep;
  {
    const SleepsApart apart(core);
    asleep = kernel.cores;
    if (set_meanwhile != 0) kernel.cores = set_meanwhile;
  }
  std::printf("%x %x %x %d\n", asleep, kernel.cores, kernel.asked, kernel.calls);
}

void pause_apart(const Waiter& waiter, uint32_t core) {
  kernel = {true, 0xff, 0xff, 0, 0};
  uint32_t word = 0, sleeping = 0;
  waiter.pause({&word, 0, &sleeping, 1, false, &core});
  std::printf("%d\n", kernel.calls);
}

void apart() {
  sleep_apart(0xff, 0xff, 1 + 2);
  sleep_apart(0xff, 0xff, 1 + 2);        // now the thread is known to have all cores
  sleep_apart(0xff, 0x0f, 1 + 2);        // the thread has only some cores
  sleep_apart(0xff, 0x0f, 1 + 4);        // the core is not one of these
  sleep_apart(0xff, 0x04, 1 + 2);        // the core is the only one
  sleep_apart(0xff, 0xff, 0);            // the core is not known
  sleep_apart(0xff, 0x0f, 1 + 2, 0x30);  // another process moves the thread meanwhile
  Waiter::kSleepNs = 1'000'000;
  pause_apart(Waiter{PausePolicy{0, 0}}, 1 + 2);
  pause_apart(Waiter{PausePolicy{0, 1}}, 1 + 2);  // ranks outnumber cores
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  alarm(unsigned(std::atoi(argv[2])));  // ends the process where a wait does not end
  const std::string what = argv[1];
  if (what == "wake")
    wake();
  else if (what == "answer")
    answer();
  else if (what == "yield")
    yield();
  else if (what == "apart")
    apart();
  else
    suspend();
  return 0;
}
