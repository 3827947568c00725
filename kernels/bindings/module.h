// Declarations that the parts of the Python module share.
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

// Any text of Python's, half a surrogate pair (as JSON may hold it) included.
std::string utf8_of(const nanobind::str& text);

// What the generated stub (ringcomm/_native.pyi) calls dict[str, Value].
template <class Value>
using Named = nanobind::typed<nanobind::dict, nanobind::str, Value>;

// A fault record in words, as ringcomm.errors reads it.
using FaultWords = Named<nanobind::any>;
FaultWords fault_dict(const Fault& fault, const std::string& reason);

// A call as call_words() returns it; it has no sequence number.
using CallWords = std::tuple<int64_t, int64_t, int64_t, int64_t>;
CallId id_of(const CallWords& words);

// The layout of a region, for the Triton kernels.
Named<int> geometry_of(const Layout& layout);
// The host's twin of what a device communicator keeps in device memory, for a kernel that runs in
// Triton's interpreter.
nanobind::bytes rank_table_of(const Comm& comm, uintptr_t scratch);

// The reduction that the kernels of a device have for what was asked: complex sums are sums of
// their parts, and where two's complement makes no difference an unsigned type is its signed twin.
device::Reduction kernel_reduction(int dtype, int op, double factor, int algorithm,
                                   uint64_t* elems);
// Makes the launches of a call that was just prepared; returns its status, 0.
int launched(device::DeviceComm& comm);

// What calls of quantization take: a format, the type of numbers, and sources of a sum.
QuantFormat quant_format_of(int format);
DType float_dtype_of(int dtype);
void check_sources(size_t count);

// Sets a constant of the module, and describes it in the module's docstring.
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
