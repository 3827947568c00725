// SPDX-License-Identifier: Apache-2.0

// The collectives of compiled graphs on the host: each takes a tensor and returns a new one,
// without a Python frame between the graph and the call.
//
// NOTE [Calls of a graph]
// inductor's code, and eager calls without a gradient, call these functions in place of torch's
// operators of the same names, with the same arguments (ringcomm/functional/in_graph.py). A
// function leaves a call to the operator if the op has a factor, a tensor cannot be read directly,
// the key is unknown, or the communicator is on a device, spans several nodes or has queued calls.
// The operator raises the errors.
//
// The functions are Python functions, not kernels of torch's stable ABI (torch/csrc/stable). Such a
// kernel could not leave a call to the operator: aoti_torch_call_dispatcher() returns a code in
// place of an exception, whose type is lost. Torch's dispatcher also takes longer than a small
// collective.
#include <cstring>
#include <initializer_list>
#include <utility>

#include "kernels/bindings/native_comm.h"
#include "kernels/bindings/tensors.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

enum Operator { kGather, kAllReduce, kExchange, kBroadcast, kReduce, kScatter, kOperators };

// An operator's name in torch, and its name in errors: the name of the communicator's method.
struct OperatorNames {
  const char *in_torch, *in_errors;
};
constexpr OperatorNames kNames[kOperators] = {{"all_gather", "all_gather_into_tensor"},
                                              {"all_reduce", "all_reduce"},
                                              {"all_to_all", "all_to_all_single"},
                                              {"broadcast", "broadcast"},
                                              {"reduce", "reduce"},
                                              {"reduce_scatter", "reduce_scatter_tensor"}};

// Used with the GIL held. Never destroyed: threads may still run at exit.
struct Served {
  PyObject* operators[kOperators] = {};
  PyObject *holders = nullptr, *thread = nullptr, *process = nullptr, *world = nullptr;
  PyObject* empty = nullptr;
};

Served& served() {
  static Served* const s = new Served;
  return *s;
}

// Returns a text as a Python string, which the caller keeps.
PyObject* kept_name(const char* text) { return PyUnicode_InternFromString(text); }

// Returns the attribute, or an empty object if there is none. Sets no error.
nb::object read_attribute(nb::handle object, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!found) PyErr_Clear();
  return found;
}

bool is_none(nb::handle object) { return !object || object.is_none(); }

// Returns the communicator of the calling thread's default group.
nb::object default_communicator() {
  static PyObject *const communicator = kept_name("communicator"),
                         *const process = kept_name("_process"),
                         *const default_group = kept_name("_default_pg");
  const Served& s = served();
  nb::object found = read_attribute(s.thread, communicator);
  if (is_none(found)) found = nb::borrow(PyDict_GetItemWithError(s.process, process));
  if (!is_none(found)) return found;
  found = read_attribute(s.world, default_group);
  return is_none(found) ? nb::object() : read_attribute(found, communicator);
}

// Returns the communicator of a key, or an empty object if this process knows none.
nb::object communicator_of(nb::handle key) {
  if (!PyUnicode_CheckExact(key.ptr())) return {};
  if (PyUnicode_GetLength(key.ptr()) == 0) return default_communicator();
  PyObject* const reference = PyDict_GetItemWithError(served().holders, key.ptr());
  return reference == nullptr ? nb::object() : nb::steal(PyObject_CallNoArgs(reference));
}

// The communicator of a graph's call. Keeps its objects alive during the call.
class Member {
 public:
  // False: the communicator makes no calls of this kind, or cannot now. No error is set.
  bool find(nb::handle key, nb::handle world_size) {
    static PyObject *const engine = kept_name("engine"), *const fast = kept_name("fast"),
                           *const queue = kept_name("queue"), *const pending = kept_name("pending"),
                           *const kernels = kept_name("kernels");
    const nb::object communicator = communicator_of(key);
    PyErr_Clear();
    if (is_none(communicator)) return false;
    engine_ = read_attribute(communicator, engine);
    if (!engine_ || !read_attribute(engine_, kernels).is_none()) return false;
    const nb::object calls = read_attribute(engine_, queue);
    const nb::object count = calls ? read_attribute(calls, pending) : nb::object();
    native_ = read_attribute(engine_, fast);
    if (!count || !native_ || !nb::isinstance<NativeComm>(native_)) return false;
    comm_ = nb::inst_ptr<NativeComm>(native_);
    const bool is_idle = PyLong_AsLong(count.ptr()) == 0;
    const bool is_of_size = PyLong_AsLong(world_size.ptr()) == comm_->comm.view().world;
    PyErr_Clear();
    return is_idle && is_of_size;
  }

  // Returns the rank in this communicator of the outermost communicator's rank `global`, or -1.
  int rank_of(nb::handle global) const {
    static PyObject *const membership = kept_name("membership"), *const ranks = kept_name("ranks");
    const nb::object found = read_attribute(engine_, membership);
    const nb::object all = found ? read_attribute(found, ranks) : nb::object();
    const Py_ssize_t rank = all ? PySequence_Index(all.ptr(), global.ptr()) : -1;
    PyErr_Clear();
    return int(rank);
  }

  NativeComm& comm() const { return *comm_; }
  int rank() const { return comm_->comm.view().rank; }
  int world() const { return comm_->comm.view().world; }

  // Makes the call, and throws its error if it fails.
  template <class Call>
  void make(Operator which, Call call) const {
    if (recorded_in_turn(*comm_, call) == 0) return;
    const nb::object error = nb::getattr(engine_, "fault")(kNames[which].in_errors);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
  }

 private:
  nb::object engine_, native_;
  NativeComm* comm_ = nullptr;
};

using Arguments = std::initializer_list<nb::handle>;

// Calls torch's operator.
nb::object ask(Operator which, Arguments arguments) {
  PyObject* passed[6];
  size_t count = 0;
  for (const nb::handle each : arguments) passed[count++] = each.ptr();
  PyObject* const result = PyObject_Vectorcall(served().operators[which], passed, count, nullptr);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

// A tensor that a graph reads.
struct Source {
  TensorMemory memory;
  TensorShape shape;

  bool read(nb::handle tensor) {
    return !is_none(served().empty) && !is_profiled() && read_source(tensor, &memory, &shape);
  }
  bool has_rows() const { return shape.dims > 0; }
  uint64_t rows() const { return uint64_t(shape.sizes[0]); }
};

// A new contiguous tensor of the dtype of `like`. `rows`: its first size, if not negative.
struct Result {
  nb::object tensor;
  TensorMemory memory;

  Result(nb::handle like, const Source& source, int64_t rows = -1) {
    static PyObject* const dtype = kept_name("dtype");
    const int dims = source.shape.dims;
    const nb::object sizes = nb::steal(PyTuple_New(dims)), strides = nb::steal(PyTuple_New(dims));
    int64_t stride = 1;
    for (int i = dims - 1; i >= 0; --i) {
      const int64_t size = i == 0 && rows >= 0 ? rows : source.shape.sizes[i];
      PyTuple_SetItem(sizes.ptr(), i, PyLong_FromLongLong(size));
      PyTuple_SetItem(strides.ptr(), i, PyLong_FromLongLong(stride));
      stride *= size;
    }
    const nb::object type = nb::steal(PyObject_GetAttr(like.ptr(), dtype));
    PyObject* const passed[] = {sizes.ptr(), strides.ptr(), type.ptr()};
    tensor = nb::steal(PyObject_Vectorcall(served().empty, passed, 3, nullptr));
    if (!tensor) throw nb::python_error();
    TensorShape shape;
    if (!read_source(tensor, &memory, &shape))
      throw std::runtime_error("a new tensor of torch cannot be read");
  }
};

// Returns the code of an op without a factor, by its name; negative: no op has this name.
int op_named(nb::handle op) {
  if (!PyUnicode_CheckExact(op.ptr())) return -1;
  for (int code = 0; code < int(RedOp::kCount); ++code)
    if (code != int(RedOp::kPremulSum) &&
        PyUnicode_CompareWithASCIIString(op.ptr(), name_of(RedOp(code))) == 0)
      return code;
  return -1;
}

bool reduces(const TensorMemory& memory, int code) {
  return code >= 0 && kernels().reduce[int(memory.dtype)][code] != nullptr;
}

Reduction reduction(const TensorMemory& memory, int code) {
  return {memory.dtype, RedOp(code), 1.0, chosen(Algorithm::kAuto)};
}

nb::object all_gather(nb::handle input, nb::handle group, nb::handle world_size) {
  Member member;
  Source in;
  if (!in.read(input) || !in.has_rows() || !member.find(group, world_size))
    return ask(kGather, {input, group, world_size});
  const Result out(input, in, int64_t(in.rows()) * member.world());
  member.make(kGather, [&] {
    return member.comm().comm.all_gather(in.memory.ptr, out.memory.ptr, in.memory.bytes(),
                                         in.memory.dtype, chosen(Algorithm::kAuto));
  });
  return out.tensor;
}

nb::object reduce_scatter(nb::handle input, nb::handle op, nb::handle factor, nb::handle group,
                          nb::handle world_size) {
  Member member;
  Source in;
  const int code = op_named(op);
  if (!in.read(input) || !in.has_rows() || !reduces(in.memory, code) ||
      !member.find(group, world_size) || in.rows() % uint64_t(member.world()) != 0)
    return ask(kScatter, {input, op, factor, group, world_size});
  const Result out(input, in, int64_t(in.rows()) / member.world());
  member.make(kScatter, [&] {
    return member.comm().comm.reduce_scatter(in.memory.ptr, out.memory.ptr, out.memory.elems,
                                             reduction(in.memory, code));
  });
  return out.tensor;
}

nb::object all_reduce(nb::handle input, nb::handle op, nb::handle factor, nb::handle group,
                      nb::handle world_size) {
  Member member;
  Source in;
  const int code = op_named(op);
  if (!in.read(input) || !reduces(in.memory, code) || !member.find(group, world_size))
    return ask(kAllReduce, {input, op, factor, group, world_size});
  const Result out(input, in);
  member.make(kAllReduce, [&] {
    return member.comm().comm.all_reduce(in.memory.ptr, out.memory.ptr, in.memory.elems,
                                         reduction(in.memory, code));
  });
  return out.tensor;
}

nb::object broadcast(nb::handle input, nb::handle src, nb::handle group, nb::handle world_size) {
  Member member;
  Source in;
  if (!in.read(input) || !member.find(group, world_size))
    return ask(kBroadcast, {input, src, group, world_size});
  const int root = member.rank_of(src);
  if (root < 0) return ask(kBroadcast, {input, src, group, world_size});
  const Result out(input, in);
  member.make(kBroadcast, [&] {
    if (member.rank() == root) std::memcpy(out.memory.ptr, in.memory.ptr, in.memory.bytes());
    return member.comm().comm.broadcast(out.memory.ptr, out.memory.bytes(), in.memory.dtype, root);
  });
  return out.tensor;
}

// Returns the sum on rank `dst`, and zeros on other ranks.
nb::object reduce(nb::handle input, nb::handle dst, nb::handle group, nb::handle world_size) {
  Member member;
  Source in;
  const int code = int(RedOp::kSum);
  if (!in.read(input) || !reduces(in.memory, code) || !member.find(group, world_size))
    return ask(kReduce, {input, dst, group, world_size});
  const int root = member.rank_of(dst);
  if (root < 0) return ask(kReduce, {input, dst, group, world_size});
  const Result out(input, in);
  member.make(kReduce, [&] {
    if (member.rank() != root) std::memset(out.memory.ptr, 0, out.memory.bytes());
    return member.comm().comm.reduce(in.memory.ptr, out.memory.ptr, in.memory.elems,
                                     reduction(in.memory, code), root);
  });
  return out.tensor;
}

// Cuts a tensor's rows into equal parts, one per rank; false if the rows cannot be divided equally.
bool cut(const TensorMemory& memory, uint64_t rows, int world, std::vector<Span>* parts) {
  if (rows % uint64_t(world) != 0) return false;
  const uint64_t bytes = memory.bytes() / uint64_t(world);
  for (int rank = 0; rank < world; ++rank)
    parts->push_back({memory.ptr + uint64_t(rank) * bytes, bytes});
  return true;
}

nb::object all_to_all(nb::handle input, nb::handle output_splits, nb::handle input_splits,
                      nb::handle group, nb::handle world_size) {
  Member member;
  Source in;
  std::vector<Span> from, to;
  if (!output_splits.is_none() || !input_splits.is_none() || !in.read(input) || !in.has_rows() ||
      !member.find(group, world_size) || !cut(in.memory, in.rows(), member.world(), &from))
    return ask(kExchange, {input, output_splits, input_splits, group, world_size});
  const Result out(input, in);
  cut(out.memory, in.rows(), member.world(), &to);
  member.make(kExchange, [&] { return member.comm().comm.all_to_all(from, to, in.memory.dtype); });
  return out.tensor;
}

void serve(const nb::dict& names, const nb::dict& operators) {
  Served& s = served();
  const auto keep = [](PyObject*& at, const nb::dict& of, const char* name) {
    PyObject* const before = std::exchange(at, nb::object(of[name]).release().ptr());
    Py_XDECREF(before);
  };
  for (int i = 0; i < kOperators; ++i) keep(s.operators[i], operators, kNames[i].in_torch);
  keep(s.holders, names, "holders");
  keep(s.thread, names, "thread");
  keep(s.process, names, "process");
  keep(s.world, names, "world");
  keep(s.empty, names, "empty");
}

}  // namespace

void bind_graph_calls(nb::module_& m) {
  m.def("serve_graphs", serve,
        nb::sig("def serve_graphs(names: dict[str, object], operators: dict[str, object], /) "
                "-> None"),
        "Has `graph_*` find communicators, and torch's operators for what they do not take.\n\n"
        "`names` has the weak references to communicators by key (`holders`), what has the\n"
        "communicator of a `thread`, the names of the module that has that of the `process`, what\n"
        "has torch's default group (`world`), and `empty`, which makes a tensor of sizes, strides\n"
        "and a dtype.");
  const auto any = [] { return nb::arg().none(); };  // accepts None: the operator raises the error
  m.def("graph_all_gather", all_gather,
        nb::sig("def graph_all_gather(input: object, group: object, world_size: object, /) "
                "-> Any"),
        any(), any(), any(), "Makes the operator's call for a compiled graph; so do the others.");
  m.def("graph_all_reduce", all_reduce,
        nb::sig("def graph_all_reduce(input: object, op: object, factor: object, group: object, "
                "world_size: object, /) -> Any"),
        any(), any(), any(), any(), any());
  m.def("graph_all_to_all", all_to_all,
        nb::sig("def graph_all_to_all(input: object, output_splits: object, "
                "input_splits: object, group: object, world_size: object, /) -> Any"),
        any(), any(), any(), any(), any());
  m.def("graph_broadcast", broadcast,
        nb::sig("def graph_broadcast(input: object, src: object, group: object, "
                "world_size: object, /) -> Any"),
        any(), any(), any(), any());
  m.def("graph_reduce", reduce,
        nb::sig("def graph_reduce(input: object, dst: object, group: object, "
                "world_size: object, /) -> Any"),
        any(), any(), any(), any());
  m.def("graph_reduce_scatter", reduce_scatter,
        nb::sig("def graph_reduce_scatter(input: object, op: object, factor: object, "
                "group: object, world_size: object, /) -> Any"),
        any(), any(), any(), any(), any());
}

}  // namespace ringcomm::host
