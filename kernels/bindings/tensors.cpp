// SPDX-License-Identifier: Apache-2.0

#include "kernels/bindings/tensors.h"

#include <dlfcn.h>
#include <sys/auxv.h>

#include <cstring>
#include <utility>
#include <vector>

#include "kernels/host/describe.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

// DLPack 1.2: DLTensor, and the contents of `__dlpack_c_exchange_api__` of a tensor class.
// (https://dmlc.github.io/dlpack/latest/c_api.html)
struct DLPackTensor {
  void* data;
  struct {
    int32_t kind, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Exchange {
  struct {
    uint32_t major, minor;
  } version;
  const Exchange* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*tensor_from_py_object)(void* object, DLPackTensor* result);
  void* current_work_stream;
};

constexpr uint32_t kMajorVersion = 1;

// A ReduceOp constant of torch; its hash is its enum value.
struct Op {
  PyObject* object;
  Py_hash_t kind;
  int code;
};

// The keys that torch's dispatcher adds to and removes from the keys of every call of a thread
// (c10::impl::raw_local_dispatch_key_set). Each word is XORed with its default.
struct LocalKeys {
  uint64_t included, excluded;
};

// The address of the program, below which Linux maps no memory. A lower address is mostly an offset
// into a storage that was freed.
const uintptr_t program_begin = getauxval(AT_PHDR);

// Used with the GIL held. Never destroyed: threads may still run at exit.
struct Torch {
  decltype(Exchange::tensor_from_py_object) read = nullptr;
  PyTypeObject *tensor = nullptr, *parameter = nullptr, *op = nullptr;
  PyObject *is_neg = nullptr, *forward_ad = nullptr, *increment_version = nullptr;
  PyObject* requires_grad = nullptr;  // the property, whose getter is called
  descrgetfunc get = nullptr;
  // Offset of the TensorImpl pointer in a tensor's Python object, and of the dispatch keys in the
  // TensorImpl; 0 if they are not known.
  size_t impl_offset = 0, keys_offset = 0;
  uint64_t known_keys = 0;
  PyObject *int8 = nullptr, *uint8 = nullptr;
  PyObject* profiler = nullptr;  // the names of torch.autograd.profiler
  PyObject* profiler_enabled = PyUnicode_InternFromString("_is_profiler_enabled");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* current_level = PyUnicode_InternFromString("_current_level");
  PyObject* no_level = PyLong_FromLong(-1);
  std::vector<Op> ops;
};

Torch& torch() {
  static Torch* const t = new Torch;
  return *t;
}

// DLPack's codes: 0 signed, 1 unsigned, 2 floating point, 4 bfloat, 6 bool, FP8 types from 10 on.
DType dtype_of(int code, int bits) {
  constexpr DType kFP8[] = {DType::kFloat8E4M3FN, DType::kFloat8E4M3FNUZ, DType::kFloat8E5M2,
                            DType::kFloat8E5M2FNUZ, DType::kFloat8E8M0FNU};
  constexpr DType kSigned[] = {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64};
  constexpr DType kUnsigned[] = {DType::kUInt8, DType::kUInt16, DType::kUInt32, DType::kUInt64};
  constexpr DType kFloating[] = {DType::kCount, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  const int power = bits == 8 ? 0 : bits == 16 ? 1 : bits == 32 ? 2 : bits == 64 ? 3 : -1;
  if (power < 0) return DType::kCount;
  if (code == 0) return kSigned[power];
  if (code == 1) return kUnsigned[power];
  if (code == 2) return kFloating[power];
  if (code == 4 && bits == 16) return DType::kBFloat16;
  if (code >= 10 && code < 15 && bits == 8) return kFP8[code - 10];
  return code == 6 && bits == 8 ? DType::kBool : DType::kCount;
}

bool is_contiguous(const DLPackTensor& t) {
  if (t.strides == nullptr) return true;
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

// Each thread has keys of its own, whose address it finds once.
void* library_of_keys = nullptr;
uint64_t watched_keys = 0;
thread_local const LocalKeys* local_keys = nullptr;

const LocalKeys* find_local_keys() {
  constexpr const char* kSymbol = "_ZN3c104impl26raw_local_dispatch_key_setE";
  return library_of_keys == nullptr
             ? nullptr
             : static_cast<const LocalKeys*>(dlsym(library_of_keys, kSymbol));
}

bool is_true(PyObject* callable, PyObject* const* arguments, size_t count) {
  const nb::object answer = nb::steal(PyObject_Vectorcall(callable, arguments, count, nullptr));
  PyErr_Clear();
  return answer.ptr() != Py_False;
}

nb::object attribute(nb::handle object, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(object.ptr(), name));
  PyErr_Clear();
  return found;
}

// True if a negation may be pending; a view with a pending negation can be contiguous.
bool may_be_lazy(nb::handle tensor) {
  const Torch& t = torch();
  if (t.keys_offset != 0) {
    const char* impl;
    uint64_t keys;
    std::memcpy(&impl, reinterpret_cast<const char*>(tensor.ptr()) + t.impl_offset, sizeof impl);
    std::memcpy(&keys, impl + t.keys_offset, sizeof keys);
    return (keys & ~t.known_keys) != 0;
  }
  PyObject* const arguments[] = {tensor.ptr()};
  return is_true(t.is_neg, arguments, 1);
}

bool may_have_tangent() {
  const Torch& t = torch();
  // The interpreter has one object for each small integer.
  return PyDict_GetItemWithError(t.forward_ad, t.current_level) != t.no_level;
}

// True if a backward, or a tangent of forward mode, may pass through the tensor. Without grad mode
// none passes. But a graph may have saved a tensor that requires grad, such as a parameter, and its
// backward must detect that the tensor was overwritten: the checked path advances the version.
bool may_have_gradient(nb::handle tensor) {
  const Torch& t = torch();
  PyObject* const type = reinterpret_cast<PyObject*>(t.tensor);
  const nb::object requires_grad = nb::steal(t.get(t.requires_grad, tensor.ptr(), type));
  PyErr_Clear();
  return requires_grad.ptr() != Py_False || may_have_tangent();
}

// DLPack reports 8 bits for the packed types, from int1 to uint7, as well.
bool may_be_packed(nb::handle tensor, DType dtype) {
  if (dtype != DType::kInt8 && dtype != DType::kUInt8) return false;
  const PyObject* const found = attribute(tensor, torch().dtype).ptr();
  return found != torch().int8 && found != torch().uint8;
}

// Like read_memory(), without its check for gradients.
bool read_dense(nb::handle tensor, TensorMemory* result, TensorShape* shape, TensorPlace place) {
  const Torch& t = torch();
  // A subclass may represent data elsewhere.
  const PyTypeObject* const type = Py_TYPE(tensor.ptr());
  if (t.read == nullptr || (type != t.tensor && type != t.parameter) || intercepting_keys() != 0)
    return false;
  DLPackTensor found;
  if (t.read(tensor.ptr(), &found) != 0) {
    PyErr_Clear();
    return false;
  }
  const DType dtype = dtype_of(found.dtype.code, found.dtype.bits);
  if (found.device.kind != place.kind || (!place.is_cpu() && found.device.id != place.id) ||
      dtype == DType::kCount || found.dtype.lanes != 1)
    return false;
  uint64_t elems = 1;
  for (int i = 0; i < found.ndim; ++i) elems *= uint64_t(found.shape[i]);
  char* const ptr = static_cast<char*>(found.data) + found.byte_offset;
  // Device addresses have no bound like program_begin. The address of a freed storage is null, or,
  // for elements at an offset, the offset alone, so addresses below 1 MiB are refused.
  const uintptr_t lowest = place.is_cpu() ? program_begin : uintptr_t(1) << 20;
  if (elems == 0 || reinterpret_cast<uintptr_t>(ptr) < lowest || !is_contiguous(found))
    return false;
  if (may_be_packed(tensor, dtype) || may_be_lazy(tensor)) return false;
  *result = {ptr, elems, dtype};
  *shape = {found.shape, found.ndim};
  return true;
}

}  // namespace

uint64_t intercepting_keys() {
  if (local_keys == nullptr && (local_keys = find_local_keys()) == nullptr) return 0;
  return local_keys->included & ~local_keys->excluded & watched_keys;
}

bool read_memory(nb::handle tensor, TensorMemory* result, TensorPlace place) {
  TensorShape unused;
  return !is_profiled() && read_dense(tensor, result, &unused, place) && !may_have_gradient(tensor);
}

bool is_profiled() {
  const Torch& t = torch();
  return t.profiler != nullptr &&
         PyDict_GetItemWithError(t.profiler, t.profiler_enabled) == Py_True;
}

bool read_source(nb::handle tensor, TensorMemory* result, TensorShape* shape) {
  return read_dense(tensor, result, shape, kCpu) && !may_have_tangent();
}

bool is_chunk_or_apart(const TensorMemory& whole, const TensorMemory& tensor, int index) {
  const auto begin = reinterpret_cast<intptr_t>(whole.ptr),
             at = reinterpret_cast<intptr_t>(tensor.ptr);
  return at >= begin + intptr_t(whole.bytes()) || at + intptr_t(tensor.bytes()) <= begin ||
         at == begin + index * intptr_t(tensor.bytes());
}

void advance_version(nb::handle tensor) {
  PyObject* const tensors = PyTuple_Pack(1, tensor.ptr());
  if (tensors == nullptr) throw nb::python_error();
  PyObject* const arguments[] = {tensors};
  PyObject* const result = PyObject_Vectorcall(torch().increment_version, arguments, 1, nullptr);
  Py_DECREF(tensors);
  if (result == nullptr) throw nb::python_error();
  Py_DECREF(result);
}

int op_code(nb::handle op) {
  const Torch& t = torch();
  for (const Op& each : t.ops)
    if (each.object == op.ptr()) return each.code;
  // An options object creates a new ReduceOp at each read, with the hash of the constant.
  if (Py_TYPE(op.ptr()) != t.op) return -1;
  const Py_hash_t kind = PyObject_Hash(op.ptr());
  PyErr_Clear();
  for (const Op& each : t.ops)
    if (each.kind == kind) return each.code;
  return -1;
}

nb::handle op_of_kind(Py_hash_t kind) {
  for (const Op& each : torch().ops)
    if (each.kind == kind) return each.object;
  return {};
}

int algorithm_code(nb::handle name, Collective collective) {
  // The name is usually the default, a string that Python interns: compare addresses first.
  static PyObject* const usual =
      PyUnicode_InternFromString(name_of(Algorithm::kAuto, Collective::kNone));
  if (name.ptr() == usual) return int(Algorithm::kAuto);
  if (!PyUnicode_CheckExact(name.ptr())) return -1;
  for (const Algorithm each : {Algorithm::kAuto, Algorithm::kOneShot, Algorithm::kRing})
    if (PyUnicode_CompareWithASCIIString(name.ptr(), name_of(each, collective)) == 0)
      return int(each);
  return -1;
}

int rank_of(nb::handle rank, int world) {
  if (!PyLong_CheckExact(rank.ptr())) return -1;
  int overflow;
  const long found = PyLong_AsLongAndOverflow(rank.ptr(), &overflow);
  return overflow == 0 && found >= 0 && found < world ? int(found) : -1;
}

void bind_tensors(nb::module_& m) {
  m.def(
      "watch_keys",
      [](uint64_t watched) {
        library_of_keys = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
        watched_keys = watched;
        return find_local_keys() != nullptr;
      },
      nb::arg("watched"),
      "Sets the keys of torch's dispatcher that `intercepting_keys` tells of.\n\n"
      "False: this torch does not keep them where they are looked for, and none is ever told of.");
  m.def("intercepting_keys", &intercepting_keys,
        "Returns the watched keys that the calling thread adds to each dispatch, as a word.");
  m.def(
      "read_tensors_with",
      [](nb::capsule exchange, const nb::dict& names,
         const std::vector<std::pair<nb::object, int>>& ops) {
        Torch& t = torch();
        const auto* found = static_cast<const Exchange*>(exchange.data());
        while (found != nullptr && found->version.major > kMajorVersion) found = found->previous;
        t.read = found == nullptr ? nullptr : found->tensor_from_py_object;
        const auto kept = [&](const char* name) { return nb::object(names[name]).release().ptr(); };
        t.tensor = reinterpret_cast<PyTypeObject*>(kept("Tensor"));
        t.parameter = reinterpret_cast<PyTypeObject*>(kept("Parameter"));
        t.op = reinterpret_cast<PyTypeObject*>(kept("ReduceOp"));
        t.is_neg = kept("is_neg");
        t.forward_ad = kept("forward_ad");
        t.profiler = kept("profiler");
        t.increment_version = kept("increment_version");
        t.requires_grad = kept("requires_grad");
        t.get = reinterpret_cast<descrgetfunc>(
            PyType_GetSlot(Py_TYPE(t.requires_grad), Py_tp_descr_get));
        t.int8 = kept("int8");
        t.uint8 = kept("uint8");
        t.ops.clear();
        for (const auto& [object, code] : ops)
          t.ops.push_back({object.inc_ref().ptr(), nb::hash(object), code});
        return t.read != nullptr;
      },
      nb::sig("def read_tensors_with(exchange: object, names: dict[str, object], "
              "ops: Sequence[tuple[object, int]], /) -> bool"),
      "Has tensors read through DLPack's C exchange interface.\n\n"
      "`names` has torch's `Tensor` and `Parameter`, of exactly which classes tensors are read,\n"
      "their method `is_neg` and property `requires_grad`, its dtypes `int8` and `uint8`, the "
      "names\n"
      "of its modules `forward_ad` and `profiler`, its function `increment_version`, and "
      "`ReduceOp`, the class of\n"
      "whatever has the hash of one of `ops` and means the same. `ops` are the constants that\n"
      "stand for the codes of `OPS`. False: the interface is one that cannot read, and no tensor\n"
      "takes the fast path.");
  m.def(
      "read_keys_at",
      [](size_t impl_offset, size_t keys_offset, uint64_t known_keys) {
        Torch& t = torch();
        t.impl_offset = impl_offset;
        t.keys_offset = keys_offset;
        t.known_keys = known_keys;
      },
      nb::arg("impl_offset"), nb::arg("keys_offset"), nb::arg("known_keys"),
      "Has the dispatch keys of tensors read from memory, instead of asking each for a "
      "negation.\n\n"
      "The offsets in bytes are those of the implementation in a tensor's object, and of the keys\n"
      "in it. A tensor with a key beyond `known_keys` does not take the fast path.");
  add_constant(
      m, "NOT_FAST", kNotFast,
      "What a `*_fast` method returns of tensors, an op or an algorithm that it does not take.");
  m.def(
      "takes_fast_path",
      [](nb::handle tensor) {
        TensorMemory found;
        return read_memory(tensor, &found);
      },
      nb::sig("def takes_fast_path(tensor: object, /) -> bool"), nb::arg().none(),
      "Tells whether a tensor's memory can be used as it is.\n\n"
      "The tensor is contiguous and on the CPU, has neither a pending negation nor a gradient,\n"
      "and no mode, transform or trace of torch is active on the thread.");
}

}  // namespace ringcomm::host
