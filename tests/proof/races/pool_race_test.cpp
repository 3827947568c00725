// SPDX-License-Identifier: Apache-2.0

// The workers of a process under ThreadSanitizer; tests/proof/races/test_pool_races.py also builds
// it with mutants, each of which must fail.
//
//   pool_race_test jobs SECONDS    several threads make jobs at once, whose tasks write plain
//                                  memory that the caller reads and later jobs overwrite
//   pool_race_test forks SECONDS   children of a process that does so make jobs of their own
//   pool_race_test ranks SECONDS   the tasks of two ranks with different numbers of threads wait
//                                  for each other
//   pool_race_test wakes SECONDS   the tasks of a job wait for each other, so that all its workers
//                                  must come, and a sleep lasts an hour
//
// A wait that does not end is ended by SIGALRM.
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "kernels/host/waiter.h"
#include "kernels/host/worker_pool.h"

using namespace ringcomm::host;

namespace {

[[noreturn]] void give_up(const char* what, int number = 0) {
  std::fprintf(stderr, "%s %d\n", what, number);
  std::_Exit(1);
}

void nap(int look) { look < 100 ? sched_yield() : static_cast<int>(usleep(20)); }

// ---- jobs ---------------------------------------------------------------------------------------

constexpr int kCallers = 3, kRounds = 150, kMostTasks = 13, kMostThreads = 9;
std::atomic<int> tasks_of_workers = 0;

// Only threads that run Python take signals, except for the signals of a worker's own mistakes.
void check_signals() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  if (!sigismember(&blocked, SIGINT)) give_up("a worker takes the process's signals");
  if (sigismember(&blocked, SIGSEGV)) give_up("a worker does not take its own signals");
}

// A caller and the data of its jobs, in plain memory.
struct Caller {
  int number;
  int given = 0;
  std::vector<std::vector<int>> rows = std::vector<std::vector<int>>(kMostTasks);
  std::vector<int> times = std::vector<int>(kMostTasks);

  void job(int round, int count, int threads) {
    given = round + number;
    for (std::vector<int>& row : rows) row.assign(64, -1);
    times.assign(kMostTasks, 0);
    const std::thread::id caller = std::this_thread::get_id();
    run_tasks(count, 0, threads, [&](int i) {
      ++times[size_t(i)];
      for (int& cell : rows[size_t(i)]) cell = given * i;
      if (std::this_thread::get_id() != caller && tasks_of_workers.fetch_add(1) == 0)
        check_signals();
      if (i % 3 == 0) sched_yield();
    });
    given = -1;
    for (int i = 0; i < kMostTasks; ++i) {
      if (times[size_t(i)] != (i < count ? 1 : 0)) give_up("not once:", i);
      for (const int cell : rows[size_t(i)])
        if (cell != (i < count ? (round + number) * i : -1)) give_up("not done:", i);
    }
  }

  void work(int rounds) {
    for (int round = 0; round < rounds; ++round)
      job(round, 1 + (round * 5 + number) % kMostTasks, 1 + (round + number) % kMostThreads);
  }
};

void jobs() {
  std::vector<std::thread> callers;
  for (int c = 0; c < kCallers; ++c) callers.emplace_back([c] { Caller{c}.work(kRounds); });
  for (std::thread& caller : callers) caller.join();
  // A call ends even if all workers are busy.
  std::atomic<bool> over = false;
  std::atomic<int> begun = 0;
  std::thread holder([&] {
    run_tasks(kMostThreads, 0, kMostThreads, [&](int) {
      ++begun;
      for (int look = 0; !over; ++look) nap(look);
    });
  });
  for (int look = 0; begun < kMostThreads; ++look) nap(look);
  Caller{0}.work(20);
  over = true;
  holder.join();
  if (tasks_of_workers == 0) give_up("no worker came");
}

// ---- jobs whose tasks wait ----------------------------------------------------------------------

// Runs a job that ends once `threads` threads run tasks of it at the same time.
void meet(int threads, int worker_naps_us = 0) {
  std::atomic<int> begun = 0;
  std::vector<int> plain(size_t(threads), 0);
  const std::thread::id caller = std::this_thread::get_id();
  run_tasks(threads, 0, threads, [&](int i) {
    ++begun;
    for (int look = 0; begun < threads; ++look) nap(look);
    if (worker_naps_us > 0 && std::this_thread::get_id() != caller) usleep(worker_naps_us);
    plain[size_t(i)] = i + 1;
  });
  for (int i = 0; i < threads; ++i)
    if (plain[size_t(i)] != i + 1) give_up("did not come:", i);
}

void wakes() {
  Waiter::kSleepNs = 3'600'000'000'000;
  for (int round = 0; round < 160; ++round) {
    // At this point the workers sleep, or are about to.
    if (round % 2 == 0) usleep(round % 32 == 0 ? 5'000 : useconds_t(round * 7 % 200));
    // In some rounds the caller sleeps, too.
    meet(2 + round % 3, round % 8 == 0 ? 2000 : 0);
  }
}

constexpr int kRankTasks = 9;

struct Meeting {
  std::atomic<bool> came[2][kRankTasks] = {};
  int data[2][kRankTasks] = {};  // plain
};

void make_rank(std::vector<Meeting>& meetings, int rank, int threads) {
  for (Meeting& m : meetings)
    run_tasks(kRankTasks, 0, threads, [&](int i) {
      m.data[rank][i] = i + 1;
      m.came[rank][i].store(true, std::memory_order_release);
      for (int look = 0; !m.came[1 - rank][i].load(std::memory_order_acquire); ++look) nap(look);
      if (m.data[1 - rank][i] != i + 1) give_up("not what the peer has stored:", i);
    });
}

void ranks() {
  constexpr int kTeams[][2] = {{1, 3}, {2, 5}, {4, 9}, {3, 1}, {1, 1}};
  for (const auto& threads : kTeams) {
    std::vector<Meeting> meetings(30);
    // Another caller takes workers away.
    std::thread other([] { Caller{1}.work(20); });
    std::thread peer([&] { make_rank(meetings, 1, threads[1]); });
    make_rank(meetings, 0, threads[0]);
    peer.join();
    other.join();
  }
}

// ---- forks --------------------------------------------------------------------------------------

void forks(unsigned limit_s) {
  std::atomic<bool> over = false;
  std::vector<std::thread> others;
  for (int c = 0; c < 2; ++c)
    others.emplace_back([&over, c] {
      while (!over) Caller{c}.work(3);
    });
  others.emplace_back([&over] {
    while (!over) {
      const ThreadShare share(3, true);
      if (share.threads() != 3 || threads_without_communicator() != 3) give_up("not 3 threads");
    }
  });
  for (int i = 0; i < 12; ++i) {
    usleep(3000);
    const pid_t child = fork();
    if (child < 0) give_up("no fork");
    if (child == 0) {
      alarm(limit_s);
      if (threads_without_communicator() < 1) give_up("no threads");
      meet(3);
      Caller{2}.work(3);
      _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) give_up("a child failed:", status);
  }
  over = true;
  for (std::thread& each : others) each.join();
}

}  // namespace

int main(int argc, char** argv) {
  bytes_to_wake_for = 0;
  if (argc != 3) return 2;
  const auto limit_s = unsigned(std::atoi(argv[2]));
  alarm(limit_s);
  const std::string what = argv[1];
  if (what == "jobs")
    jobs();
  else if (what == "forks")
    forks(limit_s);
  else if (what == "ranks")
    ranks();
  else
    wakes();
  std::puts("ok");
  return 0;
}
