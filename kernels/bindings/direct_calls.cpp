// SPDX-License-Identifier: Apache-2.0

// Exports the calls of a communicator as C functions (kernels/c10d/direct_calls.h).
#include "kernels/c10d/direct_calls.h"

#include "kernels/bindings/fast_calls.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

static_assert(kNotDirect == kNotFast);

// The object that a capsule owns.
struct Exported {
  std::shared_ptr<NativeComm> comm;
  DirectCalls calls;
};

// Makes a call under the communicator's call lock, on a thread that does not hold the GIL.
const auto run = [](NativeComm& n, auto call) {
  if (!n.turn->is_open()) return kNotFast;
  if (n.comm.recorder().on()) {
    const WithGil gil;
    take_call_site();
  }
  signal_raised() = false;
  if (!n.turn->take()) return int(Status::kInterrupted);
  const std::lock_guard held(*n.turn, std::adopt_lock);
  // During the wait the communicator may have been closed. A fork's child may not use it.
  if (!n.turn->is_open()) return kNotFast;
  const Status status = call();
  // A signal handler may raise although the call then succeeds. Its exception is reported.
  return int(signal_raised() ? Status::kInterrupted : status);
};

NativeComm& of(void* comm) { return *static_cast<NativeComm*>(comm); }

TensorMemory memory(void* data, uint64_t elems, int dtype) {
  return {static_cast<char*>(data), elems, DType(dtype)};
}

constexpr int kAuto = int(Algorithm::kAuto);

DirectCalls calls_of(NativeComm* comm) {
  return {
      kDirectCallsVersion,
      sizeof(DirectCalls),
      comm,
      [](void* n, void* data, uint64_t elems, int dtype, int op) {
        return all_reduce_memory(of(n), memory(data, elems, dtype), op, kAuto, run);
      },
      [](void* n, void* in, uint64_t in_elems, void* out, uint64_t out_elems, int dtype, int op) {
        return reduce_scatter_memory(of(n), memory(out, out_elems, dtype),
                                     memory(in, in_elems, dtype), op, kAuto, run);
      },
      [](void* n, void* in, uint64_t in_elems, void* out, uint64_t out_elems, int dtype) {
        return all_gather_memory(of(n), memory(out, out_elems, dtype), memory(in, in_elems, dtype),
                                 kAuto, run);
      },
      [](void* n, void* data, uint64_t elems, int dtype, int64_t root) {
        if (root < 0 || root >= of(n).comm.view().world) return kNotFast;
        const TensorMemory t = memory(data, elems, dtype);
        return run(of(n),
                   [&] { return of(n).comm.broadcast(t.ptr, t.bytes(), t.dtype, int(root)); });
      },
      [](void* n) { return run(of(n), [&] { return of(n).comm.barrier(); }); },
  };
}

}  // namespace

bool& signal_raised() {
  thread_local bool raised = false;
  return raised;
}

void bind_direct_calls(nb::class_<NativeComm>& c) {
  c.def_prop_ro(
      "direct_calls",
      [](const std::shared_ptr<NativeComm>& n) {
        auto* exported = new Exported{n, calls_of(n.get())};
        // The capsule's pointer is the struct; its context owns the struct.
        PyObject* capsule =
            PyCapsule_New(&exported->calls, kDirectCallsName, [](PyObject* dropped) {
              delete static_cast<Exported*>(PyCapsule_GetContext(dropped));
            });
        if (capsule == nullptr || PyCapsule_SetContext(capsule, exported) != 0)
          throw nb::python_error();
        return nb::steal<nb::capsule>(capsule);
      },
      "A capsule with the calls as C functions (`kernels/c10d/direct_calls.h`).\n\n"
      "They make a call only while `turn` is open.");
}

}  // namespace ringcomm::host
