// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kernels/host/heap.h"

namespace ringcomm::host {

inline char* at(uintptr_t address) { return reinterpret_cast<char*>(address); }

[[noreturn]] inline void raise_os_error(const HeapError& e) {
  const nanobind::object args = nanobind::make_tuple(e.code, e.what());
  PyErr_SetObject(PyExc_OSError, args.ptr());
  throw nanobind::python_error();
}

void bind_heap(nanobind::module_& m);

}  // namespace ringcomm::host
