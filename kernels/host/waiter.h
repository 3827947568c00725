// The waiting of a host thread: it spins briefly, then sleeps on a futex; see NOTE [Busy cores] in
// waiter.cpp. From time to time it looks whether the awaited process is alive, and whether the user
// pressed Ctrl-C.
#pragma once

#include <sched.h>

#include <climits>
#include <cstdint>
#include <vector>

#include "ringcomm/core/atomics.h"
#include "ringcomm/core/team.h"
#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

// Polls with a pause, and then polls that let another thread run, before a waiter sleeps.
struct PausePolicy {
  uint32_t spins;
  uint32_t yields;
};
PausePolicy pause_policy(int ranks_on_node);

// From here on the calling thread leaves the core at once when it must wait: another thread of its
// rank has work to do there (the worker that runs asynchronous collectives beside a backward pass).
void wait_in_background();
// The same for a worker thread, while it works for a thread that does.
class WaitsInBackground {
 public:
  explicit WaitsInBackground(bool in_background);
  ~WaitsInBackground();
  WaitsInBackground(const WaitsInBackground&) = delete;
  WaitsInBackground& operator=(const WaitsInBackground&) = delete;

 private:
  bool before_;
};
bool waits_in_background();

// Keeps the calling thread off a core, from the constructor to the destructor, as far as it may run
// on others. See NOTE [Sleep apart].
class SleepsApart {
 public:
  // `core`: as ControlPage.core has it, 0: none.
  explicit SleepsApart(uint32_t core);
  ~SleepsApart();
  SleepsApart(const SleepsApart&) = delete;
  SleepsApart& operator=(const SleepsApart&) = delete;

 private:
  bool apart_ = false;
  cpu_set_t before_, meanwhile_;
};

// Polls the word for as long as a waiter on a core of its own spins; true once it has left `seen`.
bool spin_on(const uint32_t* word, uint32_t seen);

// The process of a peer, told from one that gets its pid later.
class Process {
 public:
  Process() = default;  // a thread of this process, which cannot die alone, or nobody
  // With a descriptor, which costs less to ask than the system's table of processes. Throws
  // HeapError when this process has none left.
  explicit Process(int pid, bool with_descriptor = true);
  // A thread of this process: it counts as ended while the word, of its control page, is 1.
  static Process of_thread(const uint32_t* left);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  bool is_thread() const { return left_ != nullptr; }
  // Gives up the descriptor, or the word of a thread.
  void drop_descriptor();
  bool has_ended() const;  // also while it is a zombie
  // True while a signal or a debugger has stopped it.
  bool is_stopped() const;
  // Reads its memory; see Waiter::read_process().
  Status read(void* to, const void* from, uint64_t bytes) const;

 private:
  Status await_end() const;

  int pid_ = 0;
  int pidfd_ = -1;        // -1: none, so that pid and start must do
  uint64_t started_ = 0;  // in clock ticks since the machine started; 0: not known
  const uint32_t* left_ = nullptr;
};

class Waiter {
 public:
  // Between two looks at the clock a sleeper sleeps this long: it bounds how late a dead peer, an
  // abort or Ctrl-C is noticed, and 100 wake-ups a second cost nothing.
  static constexpr uint64_t kSleepNs = 10'000'000;

  explicit Waiter(PausePolicy policy) : policy_(policy) {}
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // pid 0: a thread of this process, whose ControlPage.left is at `left`.
  // Throws HeapError when this process has no descriptor left.
  void watch(int peer, int pid, const uint32_t* left);
  bool is_thread(int peer) const {
    return size_t(peer) < watched_.size() && watched_[size_t(peer)].is_thread();
  }
  // Returns the watched processes by peer, without their descriptors.
  std::vector<Process> forget_all();

  bool pause(const Pause& pause) const;
  // For a thread that is about to sleep until a peer wakes it; `peer_core`: of the peer's control
  // page, or null. Does nothing where ranks outnumber cores.
  SleepsApart sleep_apart(const uint32_t* peer_core) const;
  // Lets another rank run. False, and nothing done: each has a core, or other programs want this
  // one. It looks at how long that took; the bytes that the call moves are taken into account.
  bool yield(uint64_t call_bytes) const;
  static void wake(uint32_t* word, int most = INT_MAX);

  // True where this process can fence for others, and others for it (membarrier).
  static bool can_fence_for_all();
  // From here on all ranks can.
  void fence_for_all() { fences_for_all_ = true; }
  void fence_as_writer() const;
  void fence_as_sleeper() const;

  // Copies out of a peer's process. kCorrupt: nothing is there. kPeerLost: the process has ended.
  // kRefused: the kernel does not let this process read that one.
  Status read_process(int peer, void* to, const void* from, uint64_t bytes) const {
    return watched_[size_t(peer)].read(to, from, bytes);
  }
  // True where the operating system can read this memory of this process for others; it cannot read
  // that of a device, say.
  static bool peers_can_read(const void* ptr, uint64_t bytes);
  // From here on each rank can read every other's process.
  void read_processes() { reads_processes_ = true; }
  bool reads_processes() const { return reads_processes_; }

  static uint64_t now_ns();
  bool has_ended(int peer) const;
  Status health(int peer) const;
  // True while a signal or a debugger has stopped its process.
  bool is_stopped(int peer) const;

  // The function that other_call() asks, and its first argument; both null: nobody.
  using OtherCall = const CallHeader* (*)(void* of, const CallId& mine, int peer);
  void ask_of_calls(OtherCall ask, void* of) {
    ask_ = ask;
    of_ = of;
  }
  const CallHeader* other_call(const CallId& mine, int peer) const {
    return ask_ == nullptr ? nullptr : ask_(of_, mine, peer);
  }

  // Called on the process's main thread only; nonzero means "a signal handler raised".
  static int (*interrupt_hook)();

 private:
  PausePolicy policy_;
  bool fences_for_all_ = false, reads_processes_ = false;
  // yield() says false until then, and so long after the last long yield.
  mutable uint64_t busy_until_ns_ = 0, busy_ns_ = 0;
  OtherCall ask_ = nullptr;
  void* of_ = nullptr;
  std::vector<Process> watched_;  // by peer
};

// model: fence_as_writer (tests/proof/model/sleep.pml)
inline void Waiter::fence_as_writer() const {
  if (fences_for_all_)
    fence_seq_cst_compiler();
  else
    fence_seq_cst_sys();
}

// Sleeps until one of the words leaves the value seen there, or `timeout_ns` passed.
struct SleepOn {
  const uint32_t* word;
  uint32_t seen;
};
void sleep_on_any(const SleepOn* words, int count, uint64_t timeout_ns);

}  // namespace ringcomm::host
