// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/worker_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/host/signals_blocked.h"
#include "kernels/host/waiter.h"

namespace ringcomm::host {
namespace {

// ---- number of threads --------------------------------------------------------------------------

std::atomic<int (*)()> torchs_threads = nullptr;

struct Shares {
  std::mutex mutex;
  std::multiset<int> exact, capped;  // values of the existing shares
  int most = 1;                      // the number of threads while there is no share
  std::multiset<int>& of(bool is_exact_share) { return is_exact_share ? exact : capped; }
};
Shares& shares() {
  static Shares& all = *new Shares;  // outlives every thread
  return all;
}

int threads_of(int most, bool is_exact) {
  if (is_exact || most <= 1) return most;
  int (*const ask)() = torchs_threads.load();
  return std::clamp(ask == nullptr ? 1 : ask(), 1, most);
}

// ---- workers ------------------------------------------------------------------------------------

// Sequentially consistent: a task takes microseconds, and no short path uses these words.
using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == sizeof(uint32_t) && Word::is_always_lock_free);
uint32_t* futex_of(Word& word) { return reinterpret_cast<uint32_t*>(&word); }

// A worker sleeps without a limit: only a wake-up ends its wait.
constexpr uint64_t kForEverNs = uint64_t(1) << 62;

// Spins and then sleeps until the word differs from `seen`, or the limit is reached.
void await_change(Word& word, uint32_t seen, Word& sleepers, uint64_t limit_ns) {
  if (spin_on(futex_of(word), seen)) return;
  // Sequentially consistent: either the sleeper sees the change of the word, or the thread that
  // changes the word sees the sleeper, as in NOTE [signals].
  sleepers.fetch_add(1);
  if (word.load() == seen) {
    const SleepOn on{futex_of(word), seen};
    sleep_on_any(&on, 1, limit_ns);
  }
  sleepers.fetch_sub(1);
}

// A call whose tasks are not all done.
struct Job {
  const Tasks& tasks;
  int wanted;  // workers that may still join; under the pool's mutex
  bool in_background;
  alignas(64) std::atomic<int> next = 0;
  alignas(64) Word workers = 0;  // workers that run its tasks

  void run() {
    for (int i; (i = next.fetch_add(1)) < tasks.count;) tasks.run(tasks.of, i);
  }
};

class Pool {
 public:
  void start(int workers);
  void run(Job& job);
  // True if at least one worker would take a task at once.
  bool is_awake() const { return sleepers_.load() < begun_.load(); }

 private:
  void work();
  Job* take();
  void post(Job& job);
  void await(Job& job);
  void keep_off(int core);

  std::mutex mutex_;
  std::vector<Job*> jobs_;  // jobs that may have tasks left
  int workers_ = 0;
  std::vector<pid_t> threads_;   // ids of the workers that have started
  int kept_off_ = -1;            // the core on which workers may not run; -1: none yet
  alignas(64) Word posted_ = 0;  // a word that changes with each job
  Word sleepers_ = 0;            // number of workers that sleep on posted_
  Word begun_ = 0;               // number of workers that have started
};

// A forked child has none of the threads and starts with a new pool. The parent's pool stays as it
// was. The child inherits the shares, so no other thread may be changing them during the fork. The
// first pool is made when the module is loaded, so no fork can happen while it is being made.
std::atomic<Pool*> pool_of_process = new Pool;

[[maybe_unused]] const int forks_are_watched =
    pthread_atfork([] { shares().mutex.lock(); }, [] { shares().mutex.unlock(); },
                   [] {
                     shares().mutex.unlock();
                     pool_of_process.store(new Pool);
                   });

void Pool::start(int workers) {
  const std::lock_guard lock(mutex_);
  if (workers_ >= workers) return;
  const SignalsBlocked blocked;
  std::string failure;
  try {
    for (; workers_ < workers; ++workers_) std::thread([this] { work(); }).detach();
  } catch (const std::system_error& e) {
    failure = e.what();
  }
  if (!failure.empty())
    throw std::runtime_error(
        "cannot start worker thread " + std::to_string(workers_ + 1) + " of " +
        std::to_string(workers) + ": " + failure +
        ". The limits are RLIMIT_NPROC (ulimit -u), pids.max of the control group, and address "
        "space (ulimit -v); CommOptions(threads=1) or RINGCOMM_THREADS=1 needs no worker");
}

Job* Pool::take() {
  const std::lock_guard lock(mutex_);
  for (Job* job : jobs_) {
    if (job->wanted == 0 || job->next.load() >= job->tasks.count) continue;
    --job->wanted;
    job->workers.fetch_add(1);
    return job;
  }
  return nullptr;
}

// The kernel may wake a worker on the core of the caller that wakes it, although other cores are
// idle; the worker then waits there until the caller has done all tasks. On a virtual machine of 2
// cores (Linux 6.18, Zen 4) this happens to 80 to 100 % of workers that have slept for 0.5 to 5 ms:
// two tasks of 100 us take 202 to 224 us, and 152 to 205 us with the workers kept off that core.
// This rarely changes affinities, since a caller mostly stays on its core. The mutex is held.
void Pool::keep_off(int core) {
  if (core == kept_off_ || core < 0) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0 || core >= CPU_SETSIZE) return;
  CPU_CLR(size_t(core), &cores);
  if (CPU_COUNT(&cores) == 0) return;
  for (const pid_t thread : threads_) sched_setaffinity(thread, sizeof(cores), &cores);
  kept_off_ = core;
}

void Pool::work() {
  {
    const std::lock_guard lock(mutex_);
    threads_.push_back(pid_t(syscall(SYS_gettid)));
    kept_off_ = -1;  // the new thread may still run on every core
    begun_.fetch_add(1);
  }
  for (;;) {
    const uint32_t seen = posted_.load();
    Job* const job = take();
    if (job == nullptr) {
      await_change(posted_, seen, sleepers_, kForEverNs);
      continue;
    }
    const WaitsInBackground waits(job->in_background);
    job->run();
    // Pairs with the acquire in await(), which ends the job: the wake-up may find no sleeper.
    uint32_t* const word = futex_of(job->workers);
    job->workers.fetch_sub(1);
    Waiter::wake(word);
  }
}

void Pool::post(Job& job) {
  const int wanted = job.wanted;  // read before posting: awake workers may then count it down
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(&job);
    keep_off(sched_getcpu());
  }
  posted_.fetch_add(1);
  if (sleepers_.load() != 0) Waiter::wake(futex_of(posted_), wanted);
}

// Returns once no worker uses the job.
void Pool::await(Job& job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  }
  Word sleepers = 0;
  // Pairs with the release in work().
  for (uint32_t left; (left = job.workers.load()) != 0;) {
    await_change(job.workers, left, sleepers, Waiter::kSleepNs);
    if (job.tasks.waiting != nullptr) job.tasks.waiting(job.tasks.of);
  }
}

void Pool::run(Job& job) {
  post(job);
  job.run();
  await(job);
}

}  // namespace

ThreadShare::ThreadShare(int most, bool is_exact) : most_(most), is_exact_(is_exact) {
  const std::lock_guard lock(shares().mutex);
  shares().of(is_exact_).insert(most_);
}

ThreadShare::~ThreadShare() {
  const std::lock_guard lock(shares().mutex);
  std::multiset<int>& all = shares().of(is_exact_);
  all.erase(all.find(most_));
}

int ThreadShare::threads() const { return threads_of(most_, is_exact_); }

int threads_without_communicator() {
  int most;
  bool is_exact;
  {
    const std::lock_guard lock(shares().mutex);
    is_exact = !shares().exact.empty();
    const std::multiset<int>& all = shares().of(is_exact);
    most = all.empty() ? shares().most : *all.begin();
  }
  return threads_of(most, is_exact);
}

void limit_threads_without_communicator(int most) {
  const std::lock_guard lock(shares().mutex);
  shares().most = most;
}

void ask_torch_for_threads(int (*threads)()) { torchs_threads.store(threads); }

int threads_for(uint64_t bytes, int threads) {
  return int(std::clamp<uint64_t>(bytes / kBytesPerThread, 1, uint64_t(std::max(threads, 1))));
}

void start_workers(int threads) {
  if (threads > 1) pool_of_process.load()->start(threads - 1);
}

void run_tasks(const Tasks& tasks, int threads) {
  const int workers = std::min(threads, tasks.count) - 1;
  Pool& pool = *pool_of_process.load();
  const bool alone =
      (tasks.is_crowded && !crowds) || (tasks.bytes < bytes_to_wake_for && !pool.is_awake());
  if (workers <= 0 || alone) {
    for (int i = 0; i < tasks.count; ++i) tasks.run(tasks.of, i);
    return;
  }
  pool.start(workers);
  Job job{tasks, workers, waits_in_background()};
  pool.run(job);
}

}  // namespace ringcomm::host
