// SPDX-License-Identifier: Apache-2.0

// Declarations shared by the parts of the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kernels/cuda/device_comm.h"
#include "kernels/host/comm.h"

namespace ringcomm::host {

using Addresses = std::vector<uintptr_t>;

class DeviceCalls;

inline char* at(uintptr_t address) { return reinterpret_cast<char*>(address); }
template <class T>
T* typed(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

[[noreturn]] inline void raise_os_error(const HeapError& e) {
  const nanobind::object args = nanobind::make_tuple(e.code, e.what());
  PyErr_SetObject(PyExc_OSError, args.ptr());
  throw nanobind::python_error();
}

// Converts any Python text to UTF-8, even with half a surrogate pair (as JSON may contain).
std::string utf8_of(const nanobind::str& text);

// A dict that the generated stub (ringcomm/_native.pyi) shows as dict[str, Value].
template <class Value>
using Named = nanobind::typed<nanobind::dict, nanobind::str, Value>;

// A fault record in words, which ringcomm.errors reads.
using FaultWords = Named<nanobind::any>;
FaultWords fault_dict(const Fault& fault, const std::string& reason);

// A call in the words of call_words(), without a sequence number.
using CallWords = std::tuple<int64_t, int64_t, int64_t, int64_t>;
CallId id_of(const CallWords& words);

// Returns the layout of a region, for the Triton kernels.
Named<int> geometry_of(const Layout& layout);
// Returns a host copy of the rank table that a device communicator keeps in device memory, for a
// kernel that runs in Triton's interpreter.
nanobind::bytes rank_table_of(const Comm& comm, uintptr_t scratch);

// Translates a reduction for a device's kernels: a complex sum becomes a sum of real parts, and an
// unsigned type becomes signed where two's complement gives the same bits.
device::Reduction kernel_reduction(int dtype, int op, double factor, int algorithm,
                                   uint64_t* elems);
// Makes the launches of the call that was just prepared; returns its status, 0.
int launched(device::DeviceComm& comm);

// Check arguments of quantization calls: format, type of numbers, number of sources of a sum.
QuantFormat quant_format_of(int format);
DType float_dtype_of(int dtype);
void check_sources(size_t count);

// Sets a constant of the module, and adds it to the module's docstring.
template <class Value>
void add_constant(nanobind::module_& m, const char* name, const Value& value, const char* doc) {
  m.attr(name) = value;
  m.doc() = nanobind::str("{}\n\n{}: {}").format(m.doc(), name, doc);
}

void bind_device_optimizer(nanobind::module_& m, nanobind::class_<device::DeviceComm>& c,
                           nanobind::class_<DeviceCalls>& calls);
void bind_device_recorder(nanobind::module_& m, nanobind::class_<device::DeviceComm>& c);
void bind_device_rows(nanobind::class_<device::DeviceComm>& c);
void bind_device_quantization(nanobind::class_<device::DeviceComm>& c);
void bind_faults(nanobind::module_& m);
void bind_heap(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_checksums(nanobind::module_& m);
void bind_scratch(nanobind::module_& m);
void bind_triton(nanobind::module_& m);
void bind_quantization(nanobind::module_& m);

}  // namespace ringcomm::host
