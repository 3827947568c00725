// SPDX-License-Identifier: Apache-2.0

// The interpreter's lock (GIL): released around calls that block, and taken where a call needs it.
//
// NOTE [Exit]
// A daemon thread may request the GIL when the interpreter has begun to end. CPython before 3.14
// then ends the thread by pthread_exit, which unwinds its stack like an exception, through
// destructors and functions of nanobind that let no exception pass: std::terminate then aborts the
// process. So here the thread stays where it is until the process ends, as in CPython from 3.14 on.
// torch's functions have no such guard: a daemon thread that calls torch while the interpreter ends
// aborts the process (torch 2.13).
#pragma once

#include <Python.h>
#include <unistd.h>

namespace ringcomm::host {

// Takes the GIL by `take()`, or does not return. See NOTE [Exit].
template <class Take>
auto take_gil(Take take) {
  try {
    return take();
  } catch (...) {
    for (;;) pause();
  }
}

// Releases the GIL from here to the end of the scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    take_gil([&] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the GIL from here to the end of the scope, whether or not the thread holds it already.
class WithGil {
 public:
  WithGil() : state_(take_gil([] { return PyGILState_Ensure(); })) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace ringcomm::host
