// The interpreter's lock (GIL), released around what blocks, and taken where a call needs it.
//
// NOTE [Exit]
// A daemon thread may want the lock when the interpreter has begun to end. CPython before 3.14 then
// ends the thread by pthread_exit, which unwinds its stack as an exception does; that would pass
// through destructors, and nanobind's functions, which let none pass: std::terminate, and the
// process aborts at what should be its quiet end. Here such a thread stays where it is until the
// process is gone, as from 3.14 on CPython itself has it. torch's functions have no such guard: a
// daemon thread that calls torch while the interpreter ends aborts the process (torch 2.13).
#pragma once

#include <Python.h>
#include <unistd.h>

namespace ringcomm::host {

// Takes the lock by `take()`, or does not return. See NOTE [Exit].
template <class Take>
auto take_gil(Take take) {
  try {
    return take();
  } catch (...) {
    for (;;) pause();
  }
}

// Without the lock from here to the end of the scope.
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

// With the lock from here to the end of the scope, whether the thread has it or not.
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
