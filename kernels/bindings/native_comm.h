// SPDX-License-Identifier: Apache-2.0

// The communicator object that Python holds, and how its calls block.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>

#include "kernels/bindings/call_site.h"
#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"
#include "kernels/host/messenger.h"

namespace ringcomm::host {

// True on a thread whose signal handler has raised since the thread last set it to false. Without
// the GIL a thread cannot check whether a Python exception is set.
bool& signal_raised();

// The lock of the thread that runs a communicator's call. Fast calls take it without Python; a
// Python lock would need Python. A wait for the lock has no deadline, since the call that holds the
// lock has a deadline.
//
// Callers without the GIL also read here whether they may run a call: no call is queued, and the
// communicator is usable.
class CallLock {
 public:
  bool is_open() const { return queued_.load() == 0 && is_usable_.load(); }
  void set_queued(int64_t calls) { queued_.store(calls); }
  void shut() { is_usable_.store(false); }
  bool try_take() { return mutex_.try_lock(); }
  // False: a signal handler raised, and its exception is set. Called without the GIL.
  bool take() {
    // Tried first, since a wait with a deadline reads the clock.
    if (mutex_.try_lock()) return true;
    while (!mutex_.try_lock_for(kLook)) {
      const bool on_main_thread = syscall(SYS_gettid) == getpid();
      if (on_main_thread && Waiter::interrupt_hook() != 0) return false;
    }
    return true;
  }
  bool take_within(double seconds) {
    return mutex_.try_lock_for(std::chrono::duration<double>(seconds));
  }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr std::chrono::milliseconds kLook{10};  // longest delay until Ctrl-C is noticed
  std::timed_mutex mutex_;
  // Written with the GIL held (CallQueue in engine.py). is_open() reads them without the GIL.
  std::atomic<int64_t> queued_{0};
  std::atomic<bool> is_usable_{true};
};

// A communicator with its messenger, closed in the right order. In a forked child both belong to
// the parent and are never destroyed, since their destructors would write into the peers' memory.
struct NativeComm {
  std::unique_ptr<Comm> owned_comm;
  std::unique_ptr<Messenger> owned_messenger;
  Comm& comm;
  Messenger& messenger;
  std::shared_ptr<CallLock> turn = std::make_shared<CallLock>();
  pid_t pid = getpid();

  NativeComm(std::shared_ptr<Heap> heap, const CommConfig& config)
      : owned_comm(std::make_unique<Comm>(std::move(heap), config)),
        owned_messenger(std::make_unique<Messenger>(*owned_comm)),
        comm(*owned_comm),
        messenger(*owned_messenger) {}
  ~NativeComm() {
    if (getpid() == pid) {
      close();
    } else {
      static_cast<void>(owned_messenger.release());
      static_cast<void>(owned_comm.release());
    }
  }
  void close() {
    if (getpid() != pid) return;
    messenger.stop();
    comm.close();
  }
};

// Runs a blocking call without the GIL. If Ctrl-C ended it, the exception is already set.
template <class Call>
int blocking(Call call) {
  Status status;
  {
    const WithoutGil nogil;
    status = call();
  }
  // A signal handler may raise although the call succeeded: its exception is reported as well.
  if (PyErr_Occurred()) throw nanobind::python_error();
  return int(status);
}

// Runs a blocking call that the flight recorder records.
template <class Call>
int recorded(NativeComm& n, Call call) {
  if (n.comm.recorder().on()) take_call_site();
  return blocking(call);
}

// Runs a blocking, recorded call under the communicator's call lock.
template <class Call>
int recorded_in_turn(NativeComm& n, Call call) {
  return recorded(n, [&] {
    if (!n.turn->take()) return Status::kInterrupted;
    const std::lock_guard held(*n.turn, std::adopt_lock);
    return call();
  });
}

void bind_direct_calls(nanobind::class_<NativeComm>& c);
void bind_graph_calls(nanobind::module_& m);
void bind_optimizer(nanobind::module_& m, nanobind::class_<NativeComm>& c);
void bind_recorder(nanobind::module_& m, nanobind::class_<NativeComm>& c);

}  // namespace ringcomm::host
