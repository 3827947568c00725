// SPDX-License-Identifier: Apache-2.0

// New threads block signals, so that signals reach threads whose waits they must interrupt. Signals
// that a thread raises by its own fault stay unblocked.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace ringcomm::host {

// While this object exists, threads started by the current thread begin with signals blocked.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, own);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace ringcomm::host
