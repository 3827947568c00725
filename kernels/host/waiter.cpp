// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/waiter.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "kernels/host/heap.h"

#include "ringcomm/core/atomics.h"

namespace ringcomm::host {
namespace {

// The longest wait for the end of a process that is ending, and the interval between two checks.
constexpr uint64_t kExitNs = 10'000'000'000, kExitPollNs = 1'000'000;

// NOTE [Busy cores]
//
// A waiter on a core of its own spins, since a futex wake-up of an idle core takes 10 to 30 us in a
// virtual machine. On a core that other threads want, each way to wait has a price. A spin keeps
// the awaited rank off the core if both share it, so a waiter that shares its core with the awaited
// rank (ControlPage.core) sleeps at once. A yield to a program that computes costs that program's
// whole time slice, 1 to 4 ms. So waiters yield only if ranks outnumber cores, and not for a while
// after a yield that took a slice. A thread that sleeps is soon woken, since it has used less of
// the core than the others.
//
// Sweep: 2 ranks on 2 cores next to 0 to 3 busy loops, 4 KiB to 64 MiB, on a Xeon (AVX-512) at 2.5
// GHz. Spins of 3 to 30 us perform alike; 0 us triples the time of small calls on a quiet machine;
// if a waiter does not check whether it shares the awaited rank's core, spins of 30 us make calls
// take 5 times as long next to one loop. Another policy, 3000 polls and 20 yields, took 3 to 46
// times as long next to three loops. On Zen 4, a spin of only 300 polls takes 3 us, and calls of 4
// KiB through torch.distributed then take a fifth longer on a quiet machine.
constexpr double kSpinNs = 10'000;

// NOTE [Sleep apart]
//
// The kernel often wakes a thread on the core of the thread that wakes it, and a rank is woken by
// the rank that it waits for. If other programs want the cores, the two ranks then share a core:
// only one runs at a time, each call takes two switches, and nothing separates the ranks, since
// each sleeps as soon as it waits. So a sleeper's affinity excludes the awaited rank's core. The
// thread gets its own affinity back when it wakes, unless another one was set during the sleep. If
// ranks outnumber cores, some share a core in any case, and affinities stay unchanged.
//
// A thread that may use all cores of its cpuset gets the mask of all cores back, not the present
// cores, so that the thread still follows a cpuset that a container's manager widens.
//
// Zen 4, 2 ranks on 2 cores, 4 KiB, five interleaved runs with and without this. Next to programs
// that come and go, an all_reduce takes 0.26 of the time, and through torch.distributed 0.40; next
// to three busy loops 0.95 and 0.70.

// The spin of a worker thread, which shares the cores with the thread that computes. It is the best
// of 0 to 30 us on Zen 4 with 2 ranks on 2 cores.
constexpr double kBackgroundSpinNs = 2'000;

// If ranks outnumber cores, a yield passes the core to another rank: calls of 4 KiB by 4 or 8 ranks
// on 2 cores take half as long as if waiters slept at once. (Xeon as above.)
constexpr PausePolicy kCrowdedPolicy{20, 2000};

// A yield is long if it takes more than this time plus a nanosecond per byte of the call. Ranks
// that copy and sum at 1 GB/s or more take turns within this time; another program's time slice
// exceeds it. Without the term per byte, 16 MiB on 8 ranks take a tenth longer on a quiet machine.
// (Xeon as above.)
constexpr uint64_t kLongYieldNs = 1'000'000;
// The pause after a long yield before the next one. It doubles with each long yield, up to a limit
// where a time slice is 2 % of the pause, and halves with each short yield.
constexpr uint64_t kMinBusyNs = 2'000'000, kMaxBusyNs = 256'000'000;

// Look at the clock once in this many yields.
constexpr uint32_t kYieldsPerLook = 64;

constexpr int kMaxSleepWords = 128;  // FUTEX_WAITV_MAX

timespec to_timespec(uint64_t ns) { return {time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)}; }

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns how many polls of a word take `ns` nanoseconds. A pause instruction takes 4 ns on one
// processor and 60 ns on another.
uint32_t polls_of(double ns) {
  static const double poll_ns = [] {
    constexpr int kPolls = 200;
    uint64_t best_ns = UINT64_MAX;
    for (int attempt = 0; attempt < 5; ++attempt) {
      const uint64_t begin_ns = Waiter::now_ns();
      for (int i = 0; i < kPolls; ++i) cpu_relax();
      best_ns = std::min(best_ns, Waiter::now_ns() - begin_ns);
    }
    return std::max(double(best_ns) / kPolls, 0.1);
  }();
  return uint32_t(ns / poll_ns);
}

long futex(const uint32_t* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

// Fields of /proc/<pid>/stat (proc_pid_stat(5)); zeros: unknown.
struct Stat {
  char state = 0;
  uint64_t threads = 0, started = 0;
};

Stat stat_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The state follows the command's name, which may contain any character.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  Stat found;
  fields >> found.state;
  std::string skipped;
  for (int field = 4; field < 20; ++field) fields >> skipped;
  fields >> found.threads >> skipped >> found.started;
  return found;
}

}  // namespace

int (*Waiter::interrupt_hook)() = nullptr;

PausePolicy pause_policy(int ranks_on_node) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return ranks_on_node <= cores ? PausePolicy{polls_of(kSpinNs), 0} : kCrowdedPolicy;
}

const PausePolicy& background_policy() {
  static const PausePolicy policy{polls_of(kBackgroundSpinNs), 0};
  return policy;
}

thread_local bool in_background = false;

void wait_in_background() { in_background = true; }
bool waits_in_background() { return in_background; }

WaitsInBackground::WaitsInBackground(bool now) : before_(in_background) { in_background = now; }
WaitsInBackground::~WaitsInBackground() { in_background = before_; }

namespace {

struct Affinity {
  cpu_set_t cores;
  bool follows_cpuset;
};

cpu_set_t all_cores() {
  cpu_set_t all;
  memset(&all, 0xff, sizeof all);
  return all;
}

// Returns the mask to restore: the thread's affinity, or a mask of all cores if the thread may use
// all cores of its cpuset.
const cpu_set_t& restoring(const cpu_set_t& cores) {
  static const cpu_set_t all = all_cores();
  static thread_local Affinity known{};
  if (!CPU_EQUAL(&known.cores, &cores)) {
    cpu_set_t widest;
    known.cores = cores;
    known.follows_cpuset = sched_setaffinity(0, sizeof all, &all) == 0 &&
                           sched_getaffinity(0, sizeof widest, &widest) == 0 &&
                           CPU_EQUAL(&widest, &cores);
    if (!known.follows_cpuset) sched_setaffinity(0, sizeof cores, &cores);
  }
  return known.follows_cpuset ? all : known.cores;
}

}  // namespace

SleepsApart::SleepsApart(uint32_t core) {
  if (core == 0 || core > CPU_SETSIZE || sched_getaffinity(0, sizeof before_, &before_) != 0)
    return;
  meanwhile_ = before_;
  CPU_CLR(core - 1, &meanwhile_);
  if (CPU_COUNT(&meanwhile_) == 0 || CPU_EQUAL(&meanwhile_, &before_)) return;
  before_ = restoring(before_);
  apart_ = sched_setaffinity(0, sizeof meanwhile_, &meanwhile_) == 0;
}

SleepsApart::~SleepsApart() {
  cpu_set_t now;
  if (apart_ && sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &meanwhile_))
    sched_setaffinity(0, sizeof before_, &before_);
}

bool spin_on(const uint32_t* word, uint32_t seen) {
  static const uint32_t own_core = polls_of(kSpinNs);
  const uint32_t spins = in_background ? background_policy().spins : own_core;
  for (uint32_t polls = 0; polls < spins; ++polls) {
    if (load_relaxed_sys(word) != seen) return true;
    cpu_relax();
  }
  return load_relaxed_sys(word) != seen;
}

Process::Process(int pid, bool with_descriptor) : pid_(pid) {
  if (pid == 0) return;
  if (with_descriptor) pidfd_ = int(syscall(SYS_pidfd_open, pid, 0));
  if (with_descriptor && pidfd_ < 0 && (errno == EMFILE || errno == ENFILE))
    throw HeapError(errno, "no file descriptor is left to watch process " + std::to_string(pid) +
                               " (ulimit -n)");
  started_ = stat_of(pid).started;
}

Process Process::of_thread(const uint32_t* left) {
  Process made;
  made.left_ = left;
  return made;
}

Process::Process(Process&& other) noexcept { *this = std::move(other); }

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(started_, other.started_);
  std::swap(left_, other.left_);
  return *this;
}

Process::~Process() { drop_descriptor(); }

void Process::drop_descriptor() {
  if (pidfd_ >= 0) close(pidfd_);
  pidfd_ = -1;
  left_ = nullptr;
}

bool Process::has_ended() const {
  // Pairs with the release in Comm::set_left(): items that the thread published before it left are
  // valid.
  if (left_ != nullptr) return load_acquire_sys(left_) != 0;
  if (pid_ == 0) return false;
  if (pidfd_ >= 0) {
    // A pidfd becomes readable when its process ends, even if the process is still a zombie.
    pollfd poller{pidfd_, POLLIN, 0};
    return poll(&poller, 1, 0) == 1;
  }
  if (kill(pid_, 0) != 0 && errno == ESRCH) return true;
  const Stat now = stat_of(pid_);
  if (now.started != 0 && started_ != 0 && now.started != started_) return true;
  // The first thread of a process may end before the others.
  return (now.state == 'Z' && now.threads <= 1) || now.state == 'X';
}

bool Process::is_stopped() const {
  if (pid_ == 0) return false;
  const char state = stat_of(pid_).state;
  return state == 'T' || state == 't';
}

// A process frees its memory before it counts as ended: 57 ms earlier for 1 GiB.
// Status::kRefused: the process has not ended within kExitNs.
Status Process::await_end() const {
  const uint64_t deadline_ns = Waiter::now_ns() + kExitNs;
  while (!has_ended()) {
    if (Waiter::now_ns() > deadline_ns) return Status::kRefused;
    const timespec pause = to_timespec(kExitPollNs);
    nanosleep(&pause, nullptr);
  }
  return Status::kPeerLost;
}

// For the purpose see NOTE [Single copy] (endpoint.h).
Status Process::read(void* to, const void* from, uint64_t bytes) const {
  const pid_t pid = pid_ == 0 ? getpid() : pid_;
  for (uint64_t done = 0; done < bytes;) {
    const iovec mine{static_cast<char*>(to) + done, size_t(bytes - done)},
        theirs{const_cast<char*>(static_cast<const char*>(from)) + done, size_t(bytes - done)};
    const ssize_t got = process_vm_readv(pid, &mine, 1, &theirs, 1, 0);
    if (got < 0 && errno == ESRCH) return await_end();
    if (got < 0 && errno != EFAULT) return Status::kRefused;
    if (got <= 0) return Status::kCorrupt;
    done += uint64_t(got);
  }
  return Status::kOk;
}

bool Waiter::peers_can_read(const void* ptr, uint64_t bytes) {
  char ends[2];
  auto* const first = static_cast<char*>(const_cast<void*>(ptr));
  const iovec mine{ends, 2}, theirs[] = {{first, 1}, {first + bytes - 1, 1}};
  return process_vm_readv(getpid(), &mine, 1, theirs, 2, 0) == 2;
}

std::vector<Process> Waiter::forget_all() {
  for (Process& each : watched_) each.drop_descriptor();
  return std::exchange(watched_, {});
}

void Waiter::watch(int peer, int pid, const uint32_t* left) {
  if (watched_.size() <= size_t(peer)) watched_.resize(size_t(peer) + 1);
  watched_[size_t(peer)] = pid == 0 ? Process::of_thread(left) : Process(pid);
}

bool Waiter::yield(uint64_t call_bytes) const {
  if (policy_.yields == 0) return false;
  const uint64_t begin_ns = now_ns(), until_ns = load_relaxed_sys(&busy_until_ns_);
  if (begin_ns < until_ns) return false;
  sched_yield();
  const uint64_t end_ns = now_ns();
  const bool is_long = end_ns - begin_ns > kLongYieldNs + call_bytes;
  if (!is_long && until_ns == 0) return true;
  const uint64_t busy_ns = load_relaxed_sys(&busy_ns_);
  const uint64_t next_ns = is_long ? std::clamp(busy_ns * 2, kMinBusyNs, kMaxBusyNs) : busy_ns / 2;
  store_relaxed_sys(&busy_ns_, next_ns);
  store_relaxed_sys(&busy_until_ns_, is_long ? end_ns + next_ns : 0);
  return true;
}

SleepsApart Waiter::sleep_apart(const uint32_t* peer_core) const {
  const bool crowded = policy_.yields != 0;
  return SleepsApart(crowded || peer_core == nullptr ? 0 : load_relaxed_sys(peer_core));
}

// model: pause (tests/proof/model/sleep.pml)
bool Waiter::pause(const Pause& pause) const {
  const PausePolicy& policy = in_background ? background_policy() : policy_;
  const uint32_t spins = pause.core_shared ? 0 : policy.spins;
  if (pause.polls < spins) {
    cpu_relax();
    return false;
  }
  const uint32_t yields = pause.polls - spins;
  if (yields < policy.yields && yield(pause.call_bytes))
    return yields % kYieldsPerLook == kYieldsPerLook - 1;
  store_relaxed_sys(pause.sleeping, 1);
  fence_as_sleeper();  // raise the flag, then look again: see NOTE [signals]
  if (load_relaxed_sys(pause.word) == pause.seen) {
    const SleepsApart apart = sleep_apart(pause.peer_core);
    const timespec timeout = to_timespec(kSleepNs);
    futex(pause.word, FUTEX_WAIT, pause.seen, &timeout);
  }
  store_relaxed_sys(pause.sleeping, 0);
  return true;
}

bool Waiter::can_fence_for_all() {
#if defined(SYS_membarrier)
  // Registered once, for all present and future threads of this process.
  static const bool registered =
      syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
  return registered;
#else
  return false;
#endif
}

// model: fence_as_sleeper (tests/proof/model/sleep.pml)
void Waiter::fence_as_sleeper() const {
  // Fences every running thread of the registered processes, this thread included. On a virtual
  // Xeon (AVX-512) with 2 ranks, it takes 2 us while the peer runs; a sleep takes about 10 us. An
  // all-reduce of 256 bytes takes 2.1 us if writers do not fence, and 3.4 us if they do.
#if defined(SYS_membarrier)
  if (fences_for_all_ && syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0)
    return;
#endif
  fence_seq_cst_sys();
}

void Waiter::wake(uint32_t* word, int most) { futex(word, FUTEX_WAKE, uint32_t(most), nullptr); }

uint64_t Waiter::now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

bool Waiter::has_ended(int peer) const {
  return size_t(peer) < watched_.size() && watched_[size_t(peer)].has_ended();
}

Status Waiter::health(int peer) const {
  if (has_ended(peer)) return Status::kPeerLost;
  if (interrupt_hook != nullptr && syscall(SYS_gettid) == getpid() && interrupt_hook() != 0)
    return Status::kInterrupted;
  return Status::kOk;
}

bool Waiter::is_stopped(int peer) const {
  return size_t(peer) < watched_.size() && watched_[size_t(peer)].is_stopped();
}

void sleep_on_any(const SleepOn* words, int count, uint64_t timeout_ns) {
  if (count == 1) {
    const timespec timeout = to_timespec(timeout_ns);
    futex(words[0].word, FUTEX_WAIT, words[0].seen, &timeout);
    return;
  }
#if defined(SYS_futex_waitv)
  if (count > 0 && count <= kMaxSleepWords) {
    futex_waitv vector[kMaxSleepWords] = {};
    for (int i = 0; i < count; ++i) {
      vector[i].val = words[i].seen;
      vector[i].uaddr = reinterpret_cast<uintptr_t>(words[i].word);
      vector[i].flags = FUTEX_32;
    }
    const timespec deadline = to_timespec(Waiter::now_ns() + timeout_ns);
    if (syscall(SYS_futex_waitv, vector, count, 0, &deadline, CLOCK_MONOTONIC) >= 0 ||
        errno != ENOSYS)
      return;
  }
#endif
  // Kernels before 5.16 cannot sleep on several words: nap for at most the time of one hop.
  const timespec nap = to_timespec(std::min<uint64_t>(timeout_ns, 100'000));
  nanosleep(&nap, nullptr);
}

}  // namespace ringcomm::host
