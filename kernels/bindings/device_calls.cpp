// SPDX-License-Identifier: Apache-2.0

#include "kernels/bindings/device_calls.h"

#include <utility>

#include "kernels/bindings/gil.h"
#include "kernels/bindings/torch_options.h"
#include "kernels/host/kernel_table.h"

namespace nb = nanobind;

namespace ringcomm::host {

using device::DeviceComm;
using device::DriverError;

bool DeviceEvent::query() {
  bool passed;
  {
    const WithoutGil nogil;
    passed = driver_->has_passed(handle_);
  }
  if (passed && ends_.records)
    std::exchange(ends_.records, nullptr)->seen_completed(ends_.track, ends_.first, ends_.last);
  return passed;
}

void DeviceEvent::synchronize() {
  {
    const WithoutGil nogil;
    driver_->synchronize(handle_);
  }
  query();
}

DeviceCalls::DeviceCalls(nb::object comm, TensorPlace place, int device, Asked asked,
                         std::shared_ptr<DeviceRecorder> records)
    : owner_(std::move(comm)),
      comm_(nb::cast<DeviceComm&>(owner_)),
      driver_(*comm_.driver()),
      pool_(driver_.events_of(device)),
      place_(place),
      device_(nb::int_(device)),
      asked_(std::move(asked)),
      records_(std::move(records)) {}

bool DeviceCalls::read(nb::handle tensor, TensorMemory* result) const {
  if (!read_memory(tensor, result, place_)) return false;
  return asked_.is_mine.is_none() || nb::cast<bool>(asked_.is_mine(tensor, device_));
}

// ---- the order of calls on streams --------------------------------------------------------------

bool DeviceCalls::has_failed() const {
  // Pairs with the release in tell_host().
  return comm_.page() != nullptr && load_acquire_sys(&comm_.page()->fault_raised) != 0;
}

bool DeviceCalls::is_usable() const {
  return !disabled_ && comm_.page() != nullptr && !has_failed();
}

bool DeviceCalls::names_here(void* stream) const {
  if (stream != nullptr) return true;
  const nb::object found = nb::steal(PyObject_CallNoArgs(asked_.current_device.ptr()));
  if (!found) throw nb::python_error();
  return found.equal(device_);
}

void* DeviceCalls::current_stream() const {
  PyObject* const arguments[] = {device_.ptr()};
  const nb::object found =
      nb::steal(PyObject_Vectorcall(asked_.current_stream.ptr(), arguments, 1, nullptr));
  void* const stream = found ? PyLong_AsVoidPtr(found.ptr()) : nullptr;
  if (PyErr_Occurred()) throw nb::python_error();
  return stream;
}

void DeviceCalls::take_turn() {
  if (turn->try_take()) return;
  bool taken;
  {
    const WithoutGil nogil;
    taken = turn->take();
  }
  if (!taken) throw nb::python_error();
}

bool DeviceCalls::captures(void* stream) const {
  if (stream == nullptr && !has_captured_) return false;
  const WithoutGil nogil;
  return driver_.is_capturing(stream) || (has_captured_ && driver_.is_capturing(side_));
}

void DeviceCalls::follow(void* stream) {
  if (has_last_ && stream == last_ && !has_captured_) return;
  follow(stream, driver_.is_capturing(stream));
}

void DeviceCalls::follow(void* stream, bool captures) {
  void*& last = captures ? captured_ : last_;
  bool& has = captures ? has_captured_ : has_last_;
  check_fits(stream);
  // A capture and the work outside it cannot wait for each other: see docs/cuda.md.
  if (has && last != stream && (!captures || driver_.is_capturing(last))) {
    void* between = pool_.take();
    if (between == nullptr) between = driver_.make_event();
    driver_.record(between, last);
    driver_.wait(stream, between);
    pool_.give(between);  // the wait no longer needs the event
  }
  last = stream;
  has = true;
}

void DeviceCalls::check_fits(void* stream) {
  // Remembers two streams: calls that alternate with asynchronous calls skip the driver's check,
  // too.
  if ((stream == side_ && side_fits_) || (has_fitting_ && stream == fitting_)) return;
  const int there = driver_.multiprocessors_of(stream);
  if (there >= 0 && there < needed_multiprocessors_)
    throw DriverError("the blocks of a call run at the same time on up to " +
                      std::to_string(needed_multiprocessors_) +
                      " multiprocessors, and the stream is of a green context of " +
                      std::to_string(there) +
                      ", where they would wait for each other for ever. Build the communicator "
                      "with CommOptions(channels=) that fit there, or call on a stream of the "
                      "whole device");
  if (stream == side_) {
    side_fits_ = true;
  } else {
    fitting_ = stream;
    has_fitting_ = true;
  }
}

std::shared_ptr<DeviceEvent> DeviceCalls::mark(void* stream, DeviceEvent::Ends ends) {
  void* event = pool_.take();
  if (event == nullptr) event = driver_.make_event();
  auto made = std::make_shared<DeviceEvent>(comm_.driver(), pool_, event, std::move(ends));
  driver_.record(event, stream);
  return made;
}

std::shared_ptr<DeviceEvent> DeviceCalls::take_event() const {
  void* event = pool_.take();
  if (event == nullptr) {
    event = driver_.make_event();
    driver_.record(event, side_);  // throws if the event's device is not current
  }
  return std::make_shared<DeviceEvent>(comm_.driver(), pool_, event, DeviceEvent::Ends{});
}

void DeviceCalls::set_side(void* stream) {
  side_fits_ = side_fits_ && stream == side_;
  side_ = stream;
  if (behind_ == nullptr) behind_ = driver_.make_event();
}

DeviceEvent::Ends DeviceCalls::all_collectives() const {
  constexpr Track track = Track::kCollectives;
  return {records_, track, 1, records_ ? records_->enqueued(track) : 0};
}

void DeviceCalls::keep(nb::object tensors, std::shared_ptr<DeviceEvent> event, void* stream) {
  drop_passed();
  newest_ = event;
  kept_.push_back({std::move(tensors), std::move(event), stream});
}

void DeviceCalls::drop_passed() {
  while (!kept_.empty()) {
    const std::shared_ptr<DeviceEvent> first = kept_.front().event;
    if (!first->query()) return;
    // Another thread may have removed this entry in the meantime.
    if (kept_.empty() || kept_.front().event != first) continue;
    const nb::object tensors = std::move(kept_.front().tensors);
    kept_.pop_front();
  }
}

bool DeviceCalls::join(const DeviceEvent& event, bool checked) {
  if (!checked && (disabled_ || has_failed())) return false;
  void* const stream = current_stream();
  if (!checked && !names_here(stream)) return false;
  try {
    const WithoutGil nogil;
    driver_.wait(stream, event.handle());
  } catch (const DriverError& error) {
    if (!checked && error.is_of_context()) return false;
    throw;
  }
  for (auto each = kept_.begin(); each != kept_.end(); ++each)
    if (each->event.get() == &event) {
      if (each->stream != stream) break;
      // From now on, later work on the owner's stream runs after the call, and may reuse the
      // memory.
      const nb::object tensors = std::move(each->tensors);
      kept_.erase(each);
      break;
    }
  return true;
}

void DeviceCalls::look() {
  drop_passed();
  const std::shared_ptr<DeviceEvent> newest = newest_;
  if (newest) newest->query();
}

// ---- calls --------------------------------------------------------------------------------------

int DevicePlan::launch() {
  if (is_profiled()) return kNotFast;
  auto& calls = nb::cast<DeviceCalls&>(owner_);
  for (const Planned& each : tensors_) {
    TensorMemory now;
    if (!calls.read(each.tensor, &now) || now.ptr != each.memory.ptr ||
        now.bytes() != each.memory.bytes() || now.dtype != each.memory.dtype)
      return kNotFast;
  }
  return calls.make([&] { calls.comm().submit_plan(call_); });
}

namespace {

// True if both ranks make the same call. Otherwise the kernels would report a mismatch, which ends
// the communicator.
bool are_alike(const DeviceComm& one, const DeviceComm& two) {
  const device::CallArgs &a = one.prepared().args, &b = two.prepared().args;
  return one.prepared().kernel.function == two.prepared().kernel.function &&
         a.match_bytes == b.match_bytes && a.total_bytes == b.total_bytes && a.dtype == b.dtype &&
         a.redop == b.redop;
}

// Holds the call locks of ranks. Its destructor withdraws prepared calls that were not launched.
class Held {
 public:
  ~Held() {
    for (DeviceCalls* each : ranks_) {
      if (!launched_ && each->comm().is_prepared()) each->comm().withdraw();
      each->turn->unlock();
    }
  }
  bool take(DeviceCalls& rank) {
    if (!rank.turn->try_take()) return false;
    ranks_.push_back(&rank);
    return true;
  }
  void launched() { launched_ = true; }

 private:
  std::vector<DeviceCalls*> ranks_;
  bool launched_ = false;
};

}  // namespace

template <class Prepare>
int DeviceCalls::make_together(const std::vector<DeviceCalls*>& ranks, Prepare prepare_call) {
  if (ranks.empty()) return kNotFast;
  void* const stream = ranks[0]->current_stream();
  if (!ranks[0]->names_here(stream)) return kNotFast;
  std::vector<DeviceComm*> comms;
  Held held;
  for (size_t i = 0; i < ranks.size(); ++i) {
    // Do not wait for a call lock that another thread holds: it may wait for a lock held here.
    if (!ranks[i]->is_usable() || !held.take(*ranks[i]) || ranks[i]->captures(stream) ||
        !prepare_call(i, stream) || !are_alike(ranks[0]->comm_, ranks[i]->comm_))
      return kNotFast;
    comms.push_back(&ranks[i]->comm_);
  }
  const WithoutGil nogil;
  try {
    for (DeviceCalls* each : ranks) each->follow(stream, false);
    DeviceComm::launch_prepared(comms);
    held.launched();
    return 0;
  } catch (const DriverError&) {
    return kNotFast;
  }
}

namespace {

device::Reduction device_reduction(DType dtype, int op, int algorithm, uint64_t* elems) {
  return kernel_reduction(int(dtype), op, 1.0, algorithm, elems);
}

// True if collectives can reduce this type by this operator. A missing kernel is reported later.
bool reduces(DType dtype, int op) { return op >= 0 && kernels().reduce[int(dtype)][op] != nullptr; }

// Prepares collectives with the CUDA kernels, or with kernels that Triton has compiled.
struct CudaKernels {
  DeviceComm& comm;
  template <class... Args>
  void all_reduce(Args... args) const {
    comm.all_reduce(args...);
  }
  template <class... Args>
  void reduce_scatter(Args... args) const {
    comm.reduce_scatter(args...);
  }
  template <class... Args>
  void all_gather(Args... args) const {
    comm.all_gather(args...);
  }
};
struct TritonKernels {
  DeviceComm& comm;
  template <class... Args>
  void all_reduce(Args... args) const {
    comm.triton_all_reduce(args...);
  }
  template <class... Args>
  void reduce_scatter(Args... args) const {
    comm.triton_reduce_scatter(args...);
  }
  template <class... Args>
  void all_gather(Args... args) const {
    comm.triton_all_gather(args...);
  }
};

// Each calls `then` with a function that prepares the call, and returns the result of `then`. If
// the checked path must make the call, each returns `otherwise`.
template <class Kernels = CudaKernels, class Result, class Then>
Result all_reduce(DeviceCalls& calls, nb::handle tensor, nb::handle op, nb::handle algorithm,
                  Result otherwise, Then then) {
  TensorMemory t;
  const int code = op_code(op), named = algorithm_code(algorithm, Collective::kAllReduce);
  if (named < 0 || !calls.read(tensor, &t) || !reduces(t.dtype, code)) return otherwise;
  const device::Reduction how = device_reduction(t.dtype, code, named, &t.elems);
  return then(nb::make_tuple(tensor),
              [&, how, t] { Kernels{calls.comm()}.all_reduce(t.ptr, t.ptr, t.elems, how); });
}

template <class Kernels = CudaKernels, class Result, class Then>
Result reduce_scatter(DeviceCalls& calls, nb::handle output, nb::handle input, nb::handle op,
                      nb::handle algorithm, Result otherwise, Then then) {
  TensorMemory out, in;
  const int code = op_code(op), named = algorithm_code(algorithm, Collective::kReduceScatter);
  const device::DeviceConfig& config = calls.comm().config();
  if (named < 0 || !calls.read(output, &out) || !calls.read(input, &in) || out.dtype != in.dtype ||
      in.elems != out.elems * uint64_t(config.world) || !reduces(out.dtype, code) ||
      !is_chunk_or_apart(in, out, config.rank))
    return otherwise;
  const device::Reduction how = device_reduction(out.dtype, code, named, &out.elems);
  return then(nb::make_tuple(output, input), [&, how, in, out] {
    Kernels{calls.comm()}.reduce_scatter(in.ptr, out.ptr, out.elems, how);
  });
}

template <class Kernels = CudaKernels, class Result, class Then>
Result all_gather(DeviceCalls& calls, nb::handle output, nb::handle input, nb::handle algorithm,
                  Result otherwise, Then then) {
  TensorMemory out, in;
  const int named = algorithm_code(algorithm, Collective::kAllGather);
  const device::DeviceConfig& config = calls.comm().config();
  if (named < 0 || !calls.read(output, &out) || !calls.read(input, &in) || out.dtype != in.dtype ||
      out.elems != in.elems * uint64_t(config.world) || !is_chunk_or_apart(out, in, config.rank))
    return otherwise;
  return then(nb::make_tuple(output, input), [&, named, in, out] {
    Kernels{calls.comm()}.all_gather(in.ptr, out.ptr, in.bytes(), in.dtype, Algorithm(named));
  });
}

template <class Result, class Then>
Result broadcast(DeviceCalls& calls, nb::handle tensor, nb::handle source, Result otherwise,
                 Then then) {
  TensorMemory t;
  const int root = rank_of(source, calls.comm().config().world);
  if (root < 0 || !calls.read(tensor, &t)) return otherwise;
  return then(nb::make_tuple(tensor),
              [&, root, t] { calls.comm().broadcast(t.ptr, t.bytes(), t.dtype, root); });
}

template <class Result, class Then>
Result barrier(DeviceCalls& calls, Result otherwise, Then then) {
  if (intercepting_keys() != 0 || is_profiled()) return otherwise;
  return then(nb::make_tuple(), [&] { calls.comm().barrier(); });
}

// Each returns an argument `then` for the functions above: it makes, starts or prepares the call.
auto made_by(DeviceCalls& calls) {
  return [&](const nb::object&, auto prepare) { return calls.make(prepare); };
}
auto started_by(DeviceCalls& calls) {
  return [&](nb::object tensors, auto prepare) { return calls.start(std::move(tensors), prepare); };
}
auto prepared_by(DeviceCalls& calls, void* stream) {
  return
      [&calls, stream](const nb::object&, auto prepare) { return calls.prepare(stream, prepare); };
}
const std::shared_ptr<DeviceEvent> kNotStarted;

using Ranks = std::vector<DeviceCalls*>;
using Tensors = std::vector<nb::handle>;

// Makes calls with one output and one input per rank in one launch; `prepare(rank, then)` passes
// `then` the function that prepares a rank's call.
template <class Prepare>
int make_pairs(const Ranks& ranks, const Tensors& outputs, const Tensors& inputs, Prepare prepare) {
  if (outputs.size() != ranks.size() || inputs.size() != ranks.size()) return kNotFast;
  return DeviceCalls::make_together(
      ranks, [&](size_t i, void* stream) { return prepare(i, prepared_by(*ranks[i], stream)); });
}

void bind_together(nb::module_& m) {
  m.def(
       "all_reduce_together",
       [](const Ranks& ranks, const Tensors& tensors, nb::handle op, nb::handle algorithm) {
         if (tensors.size() != ranks.size()) return kNotFast;
         return DeviceCalls::make_together(ranks, [&](size_t i, void* stream) {
           return all_reduce(*ranks[i], tensors[i], op, algorithm, false,
                             prepared_by(*ranks[i], stream));
         });
       },
       nb::sig("def all_reduce_together(ranks: Sequence[DeviceCalls], tensors: Sequence[object], "
               "op: object, algorithm: object, /) -> int"),
       "Makes the calls of all ranks that this process has on a device in one launch, on the\n"
       "current stream. `NOT_FAST`: nothing was done.")
      .def(
          "reduce_scatter_together",
          [](const Ranks& ranks, const Tensors& outputs, const Tensors& inputs, nb::handle op,
             nb::handle algorithm) {
            return make_pairs(ranks, outputs, inputs, [&](size_t i, auto then) {
              return reduce_scatter(*ranks[i], outputs[i], inputs[i], op, algorithm, false, then);
            });
          },
          nb::sig("def reduce_scatter_together(ranks: Sequence[DeviceCalls], "
                  "outputs: Sequence[object], inputs: Sequence[object], op: object, "
                  "algorithm: object, /) -> int"))
      .def(
          "all_gather_together",
          [](const Ranks& ranks, const Tensors& outputs, const Tensors& inputs,
             nb::handle algorithm) {
            return make_pairs(ranks, outputs, inputs, [&](size_t i, auto then) {
              return all_gather(*ranks[i], outputs[i], inputs[i], algorithm, false, then);
            });
          },
          nb::sig("def all_gather_together(ranks: Sequence[DeviceCalls], "
                  "outputs: Sequence[object], inputs: Sequence[object], algorithm: object, "
                  "/) -> int"));
}

struct DeviceFast {
  using Calls = DeviceCalls;
  static int all_reduce(DeviceCalls& calls, nb::handle tensor, nb::handle op,
                        nb::handle algorithm) {
    return host::all_reduce(calls, tensor, op, algorithm, kNotFast, made_by(calls));
  }
  static int reduce_scatter(DeviceCalls& calls, nb::handle output, nb::handle input, nb::handle op,
                            nb::handle algorithm) {
    return host::reduce_scatter(calls, output, input, op, algorithm, kNotFast, made_by(calls));
  }
  static int all_gather(DeviceCalls& calls, nb::handle output, nb::handle input,
                        nb::handle algorithm) {
    return host::all_gather(calls, output, input, algorithm, kNotFast, made_by(calls));
  }
};

void bind_made(nb::class_<DeviceCalls>& c) {
  const auto any = [] { return nb::arg().none(); };  // accepts None: Python raises the error
  c.def("all_reduce_fast", &DeviceFast::all_reduce,
        nb::sig("def all_reduce_fast(self, tensor: object, op: object, algorithm: object, "
                "/) -> int"),
        any(), any(), any(), "As `Comm.all_reduce_fast`; 0 once the call is on the current stream.")
      .def("reduce_scatter_fast", &DeviceFast::reduce_scatter,
           nb::sig("def reduce_scatter_fast(self, output: object, input: object, op: object, "
                   "algorithm: object, /) -> int"),
           any(), any(), any(), any())
      .def("all_gather_fast", &DeviceFast::all_gather,
           nb::sig("def all_gather_fast(self, output: object, input: object, "
                   "algorithm: object, /) -> int"),
           any(), any(), any())
      .def(
          "broadcast_fast",
          [](DeviceCalls& calls, nb::handle tensor, nb::handle source) {
            return broadcast(calls, tensor, source, kNotFast, made_by(calls));
          },
          nb::sig("def broadcast_fast(self, tensor: object, source: object, /) -> int"), any(),
          any())
      .def("barrier_fast",
           [](DeviceCalls& calls) { return barrier(calls, kNotFast, made_by(calls)); });
}

void bind_started(nb::class_<DeviceCalls>& c) {
  const auto any = [] { return nb::arg().none(); };
  c.def(
       "start_all_reduce",
       [](DeviceCalls& calls, nb::handle tensor, nb::handle op, nb::handle algorithm) {
         return all_reduce(calls, tensor, op, algorithm, kNotStarted, started_by(calls));
       },
       nb::sig("def start_all_reduce(self, tensor: object, op: object, algorithm: object, "
               "/) -> DeviceEvent | None"),
       any(), any(), any(),
       "Launches the call on the side stream, behind the current one, and keeps its tensors;\n"
       "returns an event at its end. None: nothing was done.")
      .def(
          "start_reduce_scatter",
          [](DeviceCalls& calls, nb::handle output, nb::handle input, nb::handle op,
             nb::handle algorithm) {
            return reduce_scatter(calls, output, input, op, algorithm, kNotStarted,
                                  started_by(calls));
          },
          nb::sig("def start_reduce_scatter(self, output: object, input: object, op: object, "
                  "algorithm: object, /) -> DeviceEvent | None"),
          any(), any(), any(), any())
      .def(
          "start_all_gather",
          [](DeviceCalls& calls, nb::handle output, nb::handle input, nb::handle algorithm) {
            return all_gather(calls, output, input, algorithm, kNotStarted, started_by(calls));
          },
          nb::sig("def start_all_gather(self, output: object, input: object, algorithm: object, "
                  "/) -> DeviceEvent | None"),
          any(), any(), any())
      .def(
          "start_broadcast",
          [](DeviceCalls& calls, nb::handle tensor, nb::handle source) {
            return broadcast(calls, tensor, source, kNotStarted, started_by(calls));
          },
          nb::sig("def start_broadcast(self, tensor: object, source: object, "
                  "/) -> DeviceEvent | None"),
          any(), any())
      .def(
          "start_barrier",
          [](DeviceCalls& calls) { return barrier(calls, kNotStarted, started_by(calls)); },
          nb::sig("def start_barrier(self) -> DeviceEvent | None"));
}

// The common calls with kernels that Triton has compiled.
class TritonCalls {
 public:
  explicit TritonCalls(nb::object calls)
      : owner_(std::move(calls)), calls_(nb::cast<DeviceCalls&>(owner_)) {}

  // knobs: `triton.knobs.runtime`. Once it is set, calls may take the fast path.
  void set_knobs(nb::object knobs) { knobs_ = std::move(knobs); }
  // True if calls may bypass Triton: Triton calls the hooks of profilers at each launch.
  bool pass_by() const { return !knobs_.is_none() && !has_hook(enter_) && !has_hook(exit_); }
  DeviceCalls& calls() const { return calls_; }

 private:
  // A hook is None, or a chain of functions.
  bool has_hook(const nb::str& name) const {
    const nb::object hook = nb::getattr(knobs_, name, nb::none());
    if (hook.is_none()) return false;
    const nb::object chain = nb::getattr(hook, chain_, nb::none());
    return chain.is_none() || nb::len(chain) > 0;
  }

  nb::object owner_;
  DeviceCalls& calls_;
  nb::object knobs_ = nb::none();
  // Made once: making a name costs as much as looking it up.
  const nb::str enter_{"launch_enter_hook"}, exit_{"launch_exit_hook"}, chain_{"calls"};
};

void bind_triton_started(nb::class_<TritonCalls>& c) {
  const auto any = [] { return nb::arg().none(); };
  c.def(
       "start_all_reduce",
       [](TritonCalls& t, nb::handle tensor, nb::handle op, nb::handle algorithm) {
         if (!t.pass_by()) return kNotStarted;
         return all_reduce<TritonKernels>(t.calls(), tensor, op, algorithm, kNotStarted,
                                          started_by(t.calls()));
       },
       nb::sig("def start_all_reduce(self, tensor: object, op: object, algorithm: object, "
               "/) -> DeviceEvent | None"),
       any(), any(), any())
      .def(
          "start_reduce_scatter",
          [](TritonCalls& t, nb::handle output, nb::handle input, nb::handle op,
             nb::handle algorithm) {
            if (!t.pass_by()) return kNotStarted;
            return reduce_scatter<TritonKernels>(t.calls(), output, input, op, algorithm,
                                                 kNotStarted, started_by(t.calls()));
          },
          nb::sig("def start_reduce_scatter(self, output: object, input: object, op: object, "
                  "algorithm: object, /) -> DeviceEvent | None"),
          any(), any(), any(), any())
      .def(
          "start_all_gather",
          [](TritonCalls& t, nb::handle output, nb::handle input, nb::handle algorithm) {
            if (!t.pass_by()) return kNotStarted;
            return all_gather<TritonKernels>(t.calls(), output, input, algorithm, kNotStarted,
                                             started_by(t.calls()));
          },
          nb::sig("def start_all_gather(self, output: object, input: object, algorithm: object, "
                  "/) -> DeviceEvent | None"),
          any(), any(), any());
}

void bind_triton_made(nb::class_<TritonCalls>& c) {
  const auto any = [] { return nb::arg().none(); };
  c.def(
       "all_reduce_fast",
       [](TritonCalls& t, nb::handle tensor, nb::handle op, nb::handle algorithm) {
         if (!t.pass_by()) return kNotFast;
         return all_reduce<TritonKernels>(t.calls(), tensor, op, algorithm, kNotFast,
                                          made_by(t.calls()));
       },
       nb::sig("def all_reduce_fast(self, tensor: object, op: object, algorithm: object, "
               "/) -> int"),
       any(), any(), any(), "As `DeviceCalls.all_reduce_fast`.")
      .def(
          "reduce_scatter_fast",
          [](TritonCalls& t, nb::handle output, nb::handle input, nb::handle op,
             nb::handle algorithm) {
            if (!t.pass_by()) return kNotFast;
            return reduce_scatter<TritonKernels>(t.calls(), output, input, op, algorithm, kNotFast,
                                                 made_by(t.calls()));
          },
          nb::sig("def reduce_scatter_fast(self, output: object, input: object, op: object, "
                  "algorithm: object, /) -> int"),
          any(), any(), any(), any())
      .def(
          "all_gather_fast",
          [](TritonCalls& t, nb::handle output, nb::handle input, nb::handle algorithm) {
            if (!t.pass_by()) return kNotFast;
            return all_gather<TritonKernels>(t.calls(), output, input, algorithm, kNotFast,
                                             made_by(t.calls()));
          },
          nb::sig("def all_gather_fast(self, output: object, input: object, "
                  "algorithm: object, /) -> int"),
          any(), any(), any());
}

void bind_triton_calls(nb::module_& m) {
  nb::class_<TritonCalls> c(
      m, "TritonCalls",
      "The calls of a rank on a device that take tensors as they are, by kernels that Triton has\n"
      "compiled. They are not fast until `DeviceComm.add_triton` was given the kernel.");
  c.def(nb::init<nb::object>(), nb::arg("calls"),
        nb::sig("def __init__(self, calls: DeviceCalls) -> None"))
      .def("set_knobs", &TritonCalls::set_knobs, nb::arg("knobs"),
           "Allows fast calls while `triton.knobs.runtime` has no hooks of launches.");
  bind_triton_made(c);
  bind_triton_started(c);
}

// Returns the prepared call, or none if `run` makes anything but one launch.
std::optional<device::Prepared> planned(DeviceCalls& calls, const nb::callable& run) {
  try {
    const DeviceComm::Preparing preparing(calls.comm());
    run(nb::cast(&calls.comm(), nb::rv_policy::reference));
  } catch (...) {
    calls.comm().take_plan();
    throw;
  }
  return calls.comm().take_plan();
}

void bind_plans(nb::module_& m, nb::class_<DeviceCalls>& c) {
  nb::class_<DevicePlan>(
      m, "DevicePlan",
      "A call that was prepared once, to be launched many times with the same tensors.")
      .def("launch", &DevicePlan::launch,
           "Launches the call on the current stream; returns `NOT_FAST` of a stream that is\n"
           "capturing, an unusable communicator, or a tensor whose memory is another one now:\n"
           "nothing was done.");
  c.def(
      "plan",
      [](nb::handle self, const nb::callable& run,
         const std::vector<nb::object>& tensors) -> std::shared_ptr<DevicePlan> {
        auto& calls = nb::cast<DeviceCalls&>(self);
        std::vector<DevicePlan::Planned> read;
        for (const nb::object& tensor : tensors) {
          read.push_back({tensor, {}});
          if (!calls.read(tensor, &read.back().memory)) return nullptr;
        }
        std::optional<device::Prepared> call = planned(calls, run);
        if (!call) return nullptr;
        return std::make_shared<DevicePlan>(nb::borrow(self), std::move(read), *call);
      },
      nb::arg("run"), nb::arg("tensors"),
      nb::sig("def plan(self, run: Callable[[Any], int], tensors: Sequence[object]) -> "
              "DevicePlan | None"),
      "Prepares the call that `run` makes of the native communicator, and keeps its tensors;\n"
      "None: it is not one launch, or a tensor does not take the fast path. The caller holds the\n"
      "turn.");
}

void bind_order(nb::class_<DeviceCalls>& c) {
  c.def_prop_ro(
       "turn", [](const DeviceCalls& calls) { return calls.turn; },
       "Fast calls take it themselves, all others are made by who holds it.")
      .def(
          "follow",
          [](DeviceCalls& calls, uintptr_t stream) {
            const WithoutGil nogil;
            calls.follow(at(stream));
          },
          nb::arg("stream"),
          "Puts a stream behind the last call, and makes it that of the last call. The caller\n"
          "holds the turn, and the device is current.")
      .def_prop_ro(
          "last_stream",
          [](const DeviceCalls& calls) -> std::optional<uintptr_t> {
            void* const* const last = calls.last_stream();
            if (last == nullptr) return std::nullopt;
            return reinterpret_cast<uintptr_t>(*last);
          },
          "The stream of the last call that was not captured; None: there was none.")
      .def_prop_ro("has_captured", &DeviceCalls::has_captured,
                   "Tells whether a graph has captured a call.")
      .def(
          "mark",
          [](DeviceCalls& calls, uintptr_t stream) {
            const DeviceEvent::Ends ends = calls.all_collectives();
            const WithoutGil nogil;
            return calls.mark(at(stream), ends);
          },
          nb::arg("stream"),
          "Returns an event at the end of a stream, behind all collectives so far. The device is\n"
          "current.")
      .def(
          "mark_messages",
          [](DeviceCalls& calls, uintptr_t stream, uint64_t first, uint64_t last) {
            DeviceEvent::Ends ends = calls.all_collectives();
            ends.track = Track::kMessages;
            ends.first = first;
            ends.last = last;
            const WithoutGil nogil;
            return calls.mark(at(stream), std::move(ends));
          },
          nb::arg("stream"), nb::arg("first"), nb::arg("last"),
          "The same behind the messages with these numbers.")
      .def(
          "keep",
          [](DeviceCalls& calls, nb::object tensors, std::shared_ptr<DeviceEvent> event,
             uintptr_t stream) { calls.keep(std::move(tensors), std::move(event), at(stream)); },
          nb::arg("tensors"), nb::arg("event"), nb::arg("stream"),
          "Keeps tensors until the event has passed, or `join` has put the stream behind it.")
      .def("join", &DeviceCalls::join, nb::arg("event"), nb::arg("checked") = false,
           "Makes the current stream wait for the event; False, unless `checked`: a call may have\n"
           "failed, or another device is current, and nothing waits.")
      .def("look", &DeviceCalls::look, "Notes in the records what is done by now.")
      .def(
          "set_side", [](DeviceCalls& calls, uintptr_t stream) { calls.set_side(at(stream)); },
          nb::arg("stream"), "Has calls be started on this stream; the device is current.")
      .def("set_needed_multiprocessors", &DeviceCalls::set_needed_multiprocessors,
           nb::arg("number"),
           "How many multiprocessors the blocks of a call take, which run at the same time.")
      .def("set_shared", &DeviceCalls::set_shared, nb::arg("shared"),
           "Ranks of this process share their launches: no call is fast.")
      .def("disable", &DeviceCalls::disable, "The communicator is unusable, or closed.")
      .def(
          "kept",
          [](const DeviceCalls& calls) {
            std::vector<std::shared_ptr<DeviceEvent>> events;
            nb::list tensors;
            for (const DeviceCalls::Kept& each : calls.kept()) {
              events.push_back(each.event);
              tensors.append(each.tensors);
            }
            return std::pair(events, tensors);
          },
          nb::sig("def kept(self) -> tuple[list[DeviceEvent], list[object]]"),
          "The events behind calls whose tensors are kept, and these tensors.")
      .def("forget_kept", &DeviceCalls::forget_kept);
}

}  // namespace

nb::class_<DeviceCalls> bind_device_calls(nb::module_& m) {
  nb::class_<DeviceEvent>(
      m, "DeviceEvent",
      "A point on a stream behind calls, whose passing is noted in the records of the calls.")
      .def("query", &DeviceEvent::query, "True once all work before it is done.")
      .def("synchronize", &DeviceEvent::synchronize, "Blocks this thread until then.")
      .def_prop_ro("handle",
                   [](const DeviceEvent& e) { return reinterpret_cast<uintptr_t>(e.handle()); });
  nb::class_<device::LaunchLedger>(
      m, "LaunchLedger",
      "Keeps the communicators of one process on one device from blocking each other.")
      .def(
          "__init__",
          [](device::LaunchLedger* self, std::shared_ptr<device::Driver> driver, int device) {
            new (self) device::LaunchLedger(std::move(driver), device);
          },
          nb::arg("driver"), nb::arg("device"))
      .def("set_members", &device::LaunchLedger::set_members, nb::arg("members"),
           nb::arg("capacity"), nb::arg("kept"),
           "`members`: communicators on the device. `capacity`: blocks that run there at once.\n"
           "`kept`: blocks that are kept for messages.")
      .def(
          "before",
          [](device::LaunchLedger& ledger, uint64_t owner, unsigned blocks, uintptr_t stream) {
            const WithoutGil nogil;
            ledger.before(owner, blocks, at(stream));
          },
          nb::arg("owner"), nb::arg("blocks"), nb::arg("stream"),
          "Puts a stream that captures nothing behind the launches that must end before so many\n"
          "more blocks fit.")
      .def(
          "after",
          [](device::LaunchLedger& ledger, uint64_t owner, unsigned blocks, uintptr_t stream) {
            const WithoutGil nogil;
            ledger.after(owner, blocks, at(stream));
          },
          nb::arg("owner"), nb::arg("blocks"), nb::arg("stream"),
          "Notes a launch that was just made on a stream that captures nothing.");
  nb::class_<DeviceCalls> c(
      m, "DeviceCalls",
      "The calls of a rank on a device that take tensors as they are, and the order of all its\n"
      "calls on streams.");
  c.def(
      "__init__",
      [](DeviceCalls* self, nb::object comm, std::pair<int, int> place, int device,
         nb::object current_stream, nb::object current_device, nb::object is_mine,
         std::shared_ptr<DeviceRecorder> records) {
        new (self)
            DeviceCalls(std::move(comm), {place.first, place.second}, device,
                        {std::move(current_stream), std::move(current_device), std::move(is_mine)},
                        std::move(records));
      },
      nb::arg("comm"), nb::arg("place"), nb::arg("device"), nb::arg("current_stream"),
      nb::arg("current_device"), nb::arg("is_mine").none(), nb::arg("records").none(),
      nb::sig("def __init__(self, comm: DeviceComm, place: tuple[int, int], device: int, "
              "current_stream: Callable[[int], int], current_device: Callable[[], int], "
              "is_mine: Callable[[Any, int], bool] | None, "
              "records: DeviceRecorder | None) -> None"),
      "`place`: kind and number of the device as DLPack has them. `is_mine`: tells of a tensor\n"
      "whether it lies on the device, where the place does not.");
  bind_made(c);
  bind_for_torch<DeviceFast>(c);
  bind_started(c);
  bind_order(c);
  bind_together(m);
  bind_plans(m, c);
  bind_triton_calls(m);
  return c;
}

}  // namespace ringcomm::host
