// SPDX-License-Identifier: Apache-2.0

// How a host thread waits: it spins briefly, then sleeps on a futex; see NOTE [Busy cores] in
// waiter.cpp. From time to time it checks whether the awaited process is alive, and whether the
// user pressed Ctrl-C.
#pragma once

#include <sched.h>

#include <climits>
#include <cstdint>
#include <vector>

#include "kernels/host/single_copy.h"
#include "ringcomm/core/atomics.h"
#include "ringcomm/core/team.h"
#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

// Numbers of polls with a pause, and then of polls with a yield, before a waiter sleeps.
struct PausePolicy {
  uint32_t spins;
  uint32_t yields;
};
PausePolicy pause_policy(int ranks_on_node);

// From now on the calling thread leaves the core at once when it must wait: another thread of its
// rank has work there (this is the worker of asynchronous collectives during a backward pass).
void wait_in_background();
// Applies wait_in_background() to a worker thread while it works for a thread in the background.
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

// Keeps the calling thread off a core from constructor to destructor, if it may run on other cores.
// See NOTE [Sleep apart].
class SleepsApart {
 public:
  // `core`: a value of ControlPage.core; 0: none.
  explicit SleepsApart(uint32_t core);
  ~SleepsApart();
  SleepsApart(const SleepsApart&) = delete;
  SleepsApart& operator=(const SleepsApart&) = delete;

 private:
  bool apart_ = false;
  cpu_set_t before_, meanwhile_;
};

// Polls the word as long as a waiter on a core of its own spins; true once it differs from `seen`.
bool spin_on(const uint32_t* word, uint32_t seen);

// A peer's process, distinguished from a later process with the same pid.
class Process {
 public:
  // Represents no process, or a thread of this process (a thread cannot die alone).
  Process() = default;
  // If `with_descriptor`, opens a descriptor of the process, which is faster to check than the
  // system's table of processes. Throws HeapError if this process has no descriptor left.
  explicit Process(int pid, bool with_descriptor = true);
  // Returns a Process for a thread of this process. has_ended() is true while the thread's `left`,
  // a word of its control page, is 1.
  static Process of_thread(const uint32_t* left);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  bool is_thread() const { return left_ != nullptr; }
  // Gives up the descriptor, or the word of a thread.
  void drop_descriptor();
  bool has_ended() const;  // true for a zombie as well
  // True while a signal or a debugger keeps the process stopped.
  bool is_stopped() const;
  // Reads the process's memory; see Waiter::read_process().
  Status read(void* to, const void* from, uint64_t bytes) const;

 private:
  Status await_end() const;

  int pid_ = 0;
  int pidfd_ = -1;        // -1: none; then pid and start time identify the process
  uint64_t started_ = 0;  // in clock ticks since the machine started; 0: unknown
  const uint32_t* left_ = nullptr;
};

class Waiter {
 public:
  // The interval between two looks at the clock during a sleep: the longest delay until a dead
  // peer, an abort or Ctrl-C is noticed. 100 wake-ups per second cost nothing measurable.
  static constexpr uint64_t kSleepNs = 10'000'000;

  explicit Waiter(PausePolicy policy) : policy_(policy) {}
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // pid 0: a thread of this process, whose ControlPage.left is at `left`. Throws HeapError if this
  // process has no descriptor left.
  void watch(int peer, int pid, const uint32_t* left);
  bool is_thread(int peer) const {
    return size_t(peer) < watched_.size() && watched_[size_t(peer)].is_thread();
  }
  // Returns the watched processes by peer, without their descriptors.
  std::vector<Process> forget_all();

  bool pause(const Pause& pause) const;
  // Keeps a thread that is about to sleep off the core of the peer that will wake it. `peer_core`:
  // a word of the peer's control page, or null. Does nothing if ranks outnumber cores.
  SleepsApart sleep_apart(const uint32_t* peer_core) const;
  // Lets another rank run. False, without a yield, if each rank has a core or other programs want
  // this core. Measures how long the yield takes; a call of more bytes may take longer.
  bool yield(uint64_t call_bytes) const;
  static void wake(uint32_t* word, int most = INT_MAX);

  // True if membarrier is available: processes can then execute fences for each other.
  static bool can_fence_for_all();
  // Called when membarrier is available on all ranks.
  void fence_for_all() { fences_for_all_ = true; }
  void fence_as_writer() const;
  void fence_as_sleeper() const;

  // Copies from a peer's process. kCorrupt: no memory is mapped there. kPeerLost: the process has
  // ended. kRefused: the kernel does not let this process read the other one.
  Status read_process(int peer, void* to, const void* from, uint64_t bytes) const {
    return watched_[size_t(peer)].read(to, from, bytes);
  }
  // True if peers can read this memory of this process through the operating system, which cannot
  // read a device's memory, for example.
  static bool peers_can_read(const void* ptr, uint64_t bytes);
  // Called when every rank can read every other rank's process. This rank lends its memory in
  // calls for which `gain` is true.
  void read_processes(SingleCopyGain gain) {
    reads_processes_ = true;
    gain_ = gain;
  }
  bool reads_processes() const { return reads_processes_; }
  // True if peers should read this process's memory rather than slots; `all_share`: all ranks
  // share data in the call, not only this rank.
  bool lends(bool all_share) const {
    return all_share ? gain_.over_two_copies : gain_.over_one_copy;
  }

  static uint64_t now_ns();
  bool has_ended(int peer) const;
  Status health(int peer) const;
  // True while a signal or a debugger keeps the peer's process stopped.
  bool is_stopped(int peer) const;

  // The callback that other_call() calls, and the callback's first argument; both may be null.
  using OtherCall = const CallHeader* (*)(void* of, const CallId& mine, int peer);
  void ask_of_calls(OtherCall ask, void* of) {
    ask_ = ask;
    of_ = of;
  }
  const CallHeader* other_call(const CallId& mine, int peer) const {
    return ask_ == nullptr ? nullptr : ask_(of_, mine, peer);
  }

  // Called on the process's main thread only; nonzero: a signal handler raised an exception.
  static int (*interrupt_hook)();

 private:
  PausePolicy policy_;
  bool fences_for_all_ = false, reads_processes_ = false;
  SingleCopyGain gain_{false, false};
  // The time until which yield() returns false, and the length of the last such pause.
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

// Sleeps until one of the words differs from its seen value, or `timeout_ns` have passed.
struct SleepOn {
  const uint32_t* word;
  uint32_t seen;
};
void sleep_on_any(const SleepOn* words, int count, uint64_t timeout_ns);

}  // namespace ringcomm::host
