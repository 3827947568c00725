#include "kernels/host/waiter.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "kernels/host/heap.h"

#include "ringcomm/atomics.h"

namespace ringcomm::host {
namespace {

// Between two looks at the clock a sleeper sleeps this long: it bounds how late a dead peer, an
// abort or Ctrl-C is noticed, and 100 wake-ups a second cost nothing.
constexpr uint64_t kSleepNs = 10'000'000;

// Looks at the clock once in this many yields.
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

long futex(const uint32_t* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

// Of proc_pid_stat(5); zeros: not known.
struct Stat {
  char state = 0;
  uint64_t threads = 0, started = 0;
};

Stat stat_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The state stands behind the command's name, which may hold any character.
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
  // 2 ranks on 2 cores, Zen 4: 3000 polls with a pause are about 30 us, longer than any hop of a
  // small message and shorter than a time slice. Yielding longer than a moment only keeps a core
  // from the ranks that still compute: DDP lost 5 to 15% of its speed to 4000 yields (sweep 0 to
  // 4000).
  if (ranks_on_node <= cores) return {3000, 20};
  // With more ranks than cores the awaited rank may be the one that a spin keeps off the core.
  return {20, 2000};
}

// The same sweep, calls made by the worker thread: best of 0 to 3000 spins with 0 to 4000 yields.
constexpr PausePolicy kBackgroundPolicy{200, 0};

thread_local bool in_background = false;

void wait_in_background() { in_background = true; }

Process::Process(int pid, bool with_descriptor) : pid_(pid) {
  if (pid == 0) return;
  if (with_descriptor) pidfd_ = int(syscall(SYS_pidfd_open, pid, 0));
  if (with_descriptor && pidfd_ < 0 && (errno == EMFILE || errno == ENFILE))
    throw HeapError(errno, "no file descriptor is left to watch process " + std::to_string(pid) +
                               " (ulimit -n)");
  started_ = stat_of(pid).started;
}

Process::Process(Process&& other) noexcept { *this = std::move(other); }

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(started_, other.started_);
  return *this;
}

Process::~Process() { drop_descriptor(); }

void Process::drop_descriptor() {
  if (pidfd_ >= 0) close(pidfd_);
  pidfd_ = -1;
}

bool Process::has_ended() const {
  if (pid_ == 0) return false;
  if (pidfd_ >= 0) {
    // A pidfd becomes readable when its process ends, also while it is a zombie.
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

std::vector<Process> Waiter::forget_all() {
  for (Process& each : watched_) each.drop_descriptor();
  return std::exchange(watched_, {});
}

void Waiter::watch(int peer, int pid) {
  if (watched_.size() <= size_t(peer)) watched_.resize(size_t(peer) + 1);
  watched_[size_t(peer)] = Process(pid);
}

// model: pause (tests/model/sleep.pml)
bool Waiter::pause(const Pause& pause) const {
  const PausePolicy& policy = in_background ? kBackgroundPolicy : policy_;
  if (pause.polls < policy.spins) {
    cpu_relax();
    return false;
  }
  if (pause.polls < policy.spins + policy.yields) {
    sched_yield();
    return (pause.polls - policy.spins) % kYieldsPerLook == kYieldsPerLook - 1;
  }
  store_relaxed_sys(pause.sleeping, 1);
  fence_seq_cst_sys();  // raise the flag, then look again: see NOTE [signals]
  if (load_relaxed_sys(pause.word) == pause.seen) {
    const timespec timeout = to_timespec(kSleepNs);
    futex(pause.word, FUTEX_WAIT, pause.seen, &timeout);
  }
  store_relaxed_sys(pause.sleeping, 0);
  return true;
}

void Waiter::wake(uint32_t* word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

uint64_t Waiter::now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

Status Waiter::health(int peer) const {
  if (size_t(peer) < watched_.size() && watched_[size_t(peer)].has_ended())
    return Status::kPeerLost;
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
  // Kernels before 5.16 cannot sleep on several words: nap, at most as long as a hop may take.
  const timespec nap = to_timespec(std::min<uint64_t>(timeout_ns, 100'000));
  nanosleep(&nap, nullptr);
}

}  // namespace ringcomm::host
