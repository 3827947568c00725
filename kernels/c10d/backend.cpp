// SPDX-License-Identifier: Apache-2.0

// The C++ backend of torch.distributed. torch's dispatcher calls the backend. The backend owns a
// process group in Python (ringcomm/c10d/process_group.py), and calls it.
//
// Python alone decides all that concerns a call: checks, order, deadlines, errors and the flight
// recorder. A Python exception passes through torch's C++ as py::error_already_set, so the caller
// gets the same object.
//
// NOTE [Direct calls]
// The common call is synchronous, without a timeout of its own, on plain tensors of the CPU, with
// no call queued before it. It goes to ringcomm's native module without the GIL, by C functions
// (direct_calls.h). They refuse any other call, which Python then makes.
//
// This module fits one version of Python and one of torch. `ringcomm build-backend` compiles it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "kernels/c10d/direct_calls.h"

namespace ringcomm::torch_backend {
namespace {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Milliseconds = std::chrono::milliseconds;

// A Python object that any thread may release.
class Owned {
 public:
  explicit Owned(py::object object) : object_(std::move(object)) {}
  ~Owned() {
    // An object that outlives the interpreter is never released.
    if (!Py_IsInitialized()) {
      static_cast<void>(object_.release());
      return;
    }
    const py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  const py::object& operator*() const { return object_; }

 private:
  py::object object_;
};

// The work that Python returned, with all its methods. torch's own holder of such a work forwards
// only `wait` and `get_future`.
class ForwardedWork : public Work {
 public:
  ForwardedWork(py::object work, c10d::OpType op)
      : Work(-1, op), inner_(work.cast<WorkPtr>()), work_(std::move(work)) {}

  bool wait(Milliseconds timeout) override { return inner_->wait(timeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  bool isCompleted() override { return ask<bool>("is_completed"); }
  bool isSuccess() const override { return ask<bool>("is_success"); }
  int sourceRank() const override { return ask<int>("source_rank"); }
  Tensors result() override { return ask<Tensors>("result"); }
  void synchronize() override {
    const py::gil_scoped_acquire gil;
    (*work_).attr("synchronize")();
  }
  std::exception_ptr exception() const override {
    const py::gil_scoped_acquire gil;
    const py::object error = (*work_).attr("exception")();
    if (error.is_none()) return nullptr;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    return std::make_exception_ptr(py::error_already_set());
  }

 private:
  template <class Answer>
  Answer ask(const char* method) const {
    const py::gil_scoped_acquire gil;
    return (*work_).attr(method)().template cast<Answer>();
  }

  WorkPtr inner_;  // the same object; its virtual calls reach Python
  Owned work_;
};

WorkPtr forwarded_work(py::object work) {
  const auto op = c10d::OpType(work.attr("_get_op_type")().cast<int>());
  return c10::make_intrusive<ForwardedWork>(std::move(work), op);
}

// The work of a direct call, which is already done.
class DoneWork : public Work {
 public:
  DoneWork(Tensors tensors, c10d::OpType op) : Work(-1, op), tensors_(std::move(tensors)) {}

  bool wait(Milliseconds) override { return true; }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  void synchronize() override {}
  Tensors result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  Tensors tensors_;
};

// The native module's calls on tensors. See NOTE [Direct calls].
class Direct {
 public:
  // `capsule` contains the functions, or is None if no call is direct. `dtypes` maps a torch dtype,
  // and `ops` a ReduceOp::RedOpType, to the native module's code. `fault(name)` makes the error of
  // a failed call.
  Direct(py::object capsule, const py::dict& dtypes, const std::vector<int>& ops, py::object fault)
      : plain_keys_(at::empty({1}, at::kCPU).key_set().raw_repr()),
        ops_(ops),
        capsule_(std::move(capsule)),
        fault_(std::move(fault)) {
    dtypes_.fill(-1);
    for (const auto& [dtype, code] : dtypes)
      dtypes_.at(size_t(dtype.cast<at::ScalarType>())) = code.cast<int>();
    if ((*capsule_).is_none()) return;
    calls_ =
        static_cast<const DirectCalls*>(PyCapsule_GetPointer((*capsule_).ptr(), kDirectCallsName));
    if (calls_ == nullptr) throw py::error_already_set();
    if (calls_->version != kDirectCallsVersion || calls_->size_bytes != sizeof(DirectCalls))
      throw std::runtime_error(
          "the C++ backend of ringcomm was built for another version of ringcomm._native: build "
          "both anew");
  }

  // Each of these calls returns false if it did nothing.
  bool all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
    return is_direct() && is_plain(tensor) && has(op) &&
           made(calls_->all_reduce(calls_->comm, tensor.data_ptr(), elems(tensor), code(tensor),
                                   ops_[op]),
                "all_reduce", &tensor);
  }
  bool reduce_scatter(const at::Tensor& out, const at::Tensor& in, c10d::ReduceOp::RedOpType op) {
    return is_direct() && is_plain(out) && is_plain(in) && code(out) == code(in) && has(op) &&
           made(calls_->reduce_scatter(calls_->comm, in.data_ptr(), elems(in), out.data_ptr(),
                                       elems(out), code(out), ops_[op]),
                "reduce_scatter_tensor", &out);
  }
  bool all_gather(const at::Tensor& out, const at::Tensor& in) {
    return is_direct() && is_plain(out) && is_plain(in) && code(out) == code(in) &&
           made(calls_->all_gather(calls_->comm, in.data_ptr(), elems(in), out.data_ptr(),
                                   elems(out), code(out)),
                "all_gather_into_tensor", &out);
  }
  bool broadcast(const at::Tensor& tensor, int64_t root, bool is_root) {
    return is_direct() && is_plain(tensor) &&
           made(calls_->broadcast(calls_->comm, tensor.data_ptr(), elems(tensor), code(tensor),
                                  root),
                "broadcast", is_root ? nullptr : &tensor);
  }
  bool barrier() { return is_direct() && made(calls_->barrier(calls_->comm), "barrier", nullptr); }

  // Returns the number of calls made since the last restart.
  uint64_t count() const { return count_.load(); }
  void restart() { count_.store(0); }

 private:
  // False while torch observes functions, as for a profiler: then Python records the events.
  bool is_direct() const { return calls_ != nullptr && !at::hasCallbacks(); }
  static uint64_t elems(const at::Tensor& tensor) { return uint64_t(tensor.numel()); }
  int code(const at::Tensor& tensor) const { return dtypes_[size_t(tensor.scalar_type())]; }
  bool has(c10d::ReduceOp::RedOpType op) const { return size_t(op) < ops_.size(); }

  // True if a tensor's memory can be used directly. A backward, a subclass or a pending negation
  // needs Python, as does memory that was freed.
  bool is_plain(const at::Tensor& tensor) const {
    if ((tensor.key_set().raw_repr() & ~plain_keys_) != 0 || code(tensor) < 0 ||
        tensor.requires_grad() || !tensor.is_contiguous() || tensor.numel() == 0 ||
        tensor.is_inference())
      return false;
    const size_t end = size_t(tensor.storage_offset() + tensor.numel()) * tensor.element_size();
    return tensor.storage().nbytes() >= end;
  }

  // True if the call was made. Throws Python's error after a fault.
  bool made(int status, const char* name, const at::Tensor* written) {
    if (status == kNotDirect) return false;
    if (status != 0) {
      const py::gil_scoped_acquire gil;
      if (!PyErr_Occurred()) {
        const py::object error = (*fault_)(name);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
      }
      throw py::error_already_set();
    }
    if (written != nullptr) written->unsafeGetTensorImpl()->bump_version();
    ++count_;
    return true;
  }

  const uint64_t plain_keys_;
  std::array<int, size_t(at::ScalarType::NumOptions)> dtypes_;
  const std::vector<int> ops_;
  const DirectCalls* calls_ = nullptr;
  std::atomic<uint64_t> count_{0};
  Owned capsule_, fault_;
};

// True for options with which torch.distributed makes a synchronous call.
template <class Options>
bool is_plain(const Options& opts) {
  return !opts.asyncOp && opts.timeout == c10d::kUnsetTimeout;
}

WorkPtr done(Tensors tensors, c10d::OpType op) {
  return c10::make_intrusive<DoneWork>(std::move(tensors), op);
}

class Backend : public c10d::Backend {
 public:
  // `direct`: the arguments of Direct.
  Backend(py::object group, py::object split, const py::tuple& direct)
      : c10d::Backend(group.attr("rank")().cast<int>(), group.attr("size")().cast<int>()),
        group_(std::move(group)),
        split_(std::move(split)),
        direct_(direct[0], direct[1], direct[2].cast<std::vector<int>>(), direct[3]) {}

  py::object group() const { return *group_; }
  uint64_t direct_count() const { return direct_.count(); }
  py::object communicator() const { return (*group_).attr("communicator"); }

  const std::string getBackendName() const override { return "ringcomm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    const py::gil_scoped_acquire gil;
    const auto timeout = communicator().attr("timeout").cast<Milliseconds>();
    return c10::make_intrusive<Options>("ringcomm", timeout);
  }
  bool supportsSplitting() const override { return true; }
  void setTimeout(Milliseconds timeout) override { tell("set_timeout", timeout); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (is_plain(opts) && tensors.size() == 1 && direct_.all_reduce(tensors[0], opts.reduceOp))
      return done(tensors, c10d::OpType::ALLREDUCE);
    return forwarded("allreduce", tensors, opts);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return forwarded("allreduce", tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return forwarded("allreduce_coalesced", tensors, opts);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    if (is_plain(opts) && tensors.size() == 1 &&
        direct_.broadcast(tensors[0], opts.rootRank, opts.rootRank == getRank()))
      return done(tensors, c10d::OpType::BROADCAST);
    return forwarded("broadcast", tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return forwarded("reduce", tensors, opts);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return forwarded("allgather", outputs, inputs, opts);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return forwarded("allgather_coalesced", outputs, inputs, opts);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return forwarded("gather", outputs, inputs, opts);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& opts) override {
    return forwarded("scatter", outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return forwarded("reduce_scatter", outputs, inputs, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return forwarded("alltoall", outputs, inputs, opts);
  }

  // torch has renamed these methods, first in the class that Python sees. Each is defined here
  // under both names; torch's headers decide which of the two is virtual.
  // clang-format off
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& opts) {
    return all_gather_single(out, in, opts);
  }
  WorkPtr all_gather_single(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& opts) {
    if (is_plain(opts) && direct_.all_gather(out, in))
      return done({out}, c10d::OpType::_ALLGATHER_BASE);
    return forwarded("all_gather_single", out, in, opts);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& opts) {
    return reduce_scatter_single(out, in, opts);
  }
  WorkPtr reduce_scatter_single(at::Tensor& out, at::Tensor& in,
                                const c10d::ReduceScatterOptions& opts) {
    if (is_plain(opts) && direct_.reduce_scatter(out, in, opts.reduceOp))
      return done({out}, c10d::OpType::_REDUCE_SCATTER_BASE);
    return forwarded("reduce_scatter_single", out, in, opts);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& opts) {
    return all_to_all_single(out, in, out_splits, in_splits, opts);
  }
  WorkPtr all_to_all_single(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                            std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& opts) {
    return forwarded("all_to_all_single", out, in, out_splits, in_splits, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& opts) {
    return all_gather_single_coalesced(outs, ins, opts);
  }
  WorkPtr all_gather_single_coalesced(Tensors& outs, Tensors& ins,
                                      const c10d::AllgatherOptions& opts) {
    return forwarded("all_gather_single_coalesced", outs, ins, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& opts) {
    return reduce_scatter_single_coalesced(outs, ins, opts);
  }
  WorkPtr reduce_scatter_single_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& opts) {
    return forwarded("reduce_scatter_single_coalesced", outs, ins, opts);
  }
  // clang-format on

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return forwarded("send", tensors, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return forwarded("recv", tensors, from, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return forwarded("recv_anysource", tensors, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    const bool on_host = opts.device ? opts.device->is_cpu() : !is_bound_.load();
    if (is_plain(opts) && on_host && opts.device_ids.empty() && direct_.barrier())
      return done({}, c10d::OpType::BARRIER);
    return forwarded("barrier", opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const bool has_timeout = opts.timeout != c10d::kUnsetTimeout;
    tell("monitored_barrier", has_timeout ? std::optional(opts.timeout) : std::nullopt,
         wait_all_ranks);
  }

  void startCoalescing() override { tell("_start_coalescing", std::nullopt); }
  WorkPtr endCoalescing() override { return forwarded("_end_coalescing", std::nullopt); }
  void waitForPendingWorks() override { tell("_wait_for_pending_works"); }
  void setSequenceNumberForGroup() override {
    direct_.restart();
    tell("_set_sequence_number_for_group");
  }
  uint64_t getSequenceNumberForGroup() override {
    const py::gil_scoped_acquire gil;
    const auto forwarded = (*group_).attr("_get_sequence_number_for_group")().cast<uint64_t>();
    return direct_.count() + forwarded;
  }
  void eagerConnectSingleDevice(at::Device device) override {
    is_bound_ = is_bound_ || !device.is_cpu();
    tell("eager_connect_single_device", device);
  }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override {
    const py::gil_scoped_acquire gil;
    const auto timeout = opts ? opts->timeout : getBackendOptions()->timeout;
    const py::object child = (*split_)(*group_, store, ranks, timeout);
    if (child.is_none()) return nullptr;
    return child.cast<c10::intrusive_ptr<c10d::Backend>>();
  }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long elems, at::TensorOptions options) override {
    const py::gil_scoped_acquire gil;
    const auto how = py::dict(py::arg("dtype") = options.dtype().toScalarType(),
                              py::arg("device") = options.device());
    return (*group_).attr("allocate_tensor")(elems, **how).cast<at::Tensor>();
  }

  void abort() override { tell("abort"); }
  void shutdown() override { tell("shutdown"); }

 private:
  // These call a method of the process group. torch's dispatcher has already notified autograd of
  // the call; below autograd the process group does not notify it again.
  template <class... Args>
  WorkPtr forwarded(const char* method, const Args&... args) const {
    const at::AutoDispatchBelowAutograd below;
    const py::gil_scoped_acquire gil;
    return forwarded_work((*group_).attr(method)(args...));
  }
  template <class... Args>
  void tell(const char* method, const Args&... args) const {
    const py::gil_scoped_acquire gil;
    (*group_).attr(method)(args...);
  }

  Owned group_, split_;
  Direct direct_;
  std::atomic<bool> is_bound_{false};  // true: a barrier runs on the device
};

}  // namespace
}  // namespace ringcomm::torch_backend

PYBIND11_MODULE(_backend, m) {
  using ringcomm::torch_backend::Backend;
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init<py::object, py::object, py::tuple>())
      .def_property_readonly("group", &Backend::group)
      .def_property_readonly("communicator", &Backend::communicator)
      .def_property_readonly("direct_count", &Backend::direct_count)
      // The options that a split passes to its child: none, so that the child takes the defaults.
      .def_property_readonly("options", [](const Backend&) { return py::none(); });
}
