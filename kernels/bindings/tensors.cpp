#include "kernels/bindings/tensors.h"

#include <utility>
#include <vector>

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

// DLPack 1.2: DLTensor, and what `__dlpack_c_exchange_api__` of a tensor class holds.
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
constexpr int32_t kCpu = 1;

// One of torch's constants, whose hash is its kind.
struct Op {
  PyObject* object;
  Py_hash_t kind;
  int code;
};

// With the GIL held. Never destroyed: threads may still run at exit.
struct Torch {
  decltype(Exchange::tensor_from_py_object) read = nullptr;
  PyTypeObject *tensor = nullptr, *parameter = nullptr, *op = nullptr;
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  std::vector<Op> ops;
};

Torch& torch() {
  static Torch* const t = new Torch;
  return *t;
}

// DLPack's codes: 0 signed, 1 unsigned, 2 floating point, 4 bfloat, 6 bool, from 10 on FP8 types.
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

// One element can be a negated view and still be contiguous.
bool may_be_negated(nb::handle tensor) {
  const nb::object answer =
      nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), torch().is_neg, nullptr));
  PyErr_Clear();
  return answer.ptr() != Py_False;
}

}  // namespace

bool read_plain(nb::handle tensor, PlainTensor* result) {
  const Torch& t = torch();
  // A subclass may stand for data elsewhere.
  const PyTypeObject* const type = Py_TYPE(tensor.ptr());
  if (t.read == nullptr || (type != t.tensor && type != t.parameter)) return false;
  DLPackTensor found;
  if (t.read(tensor.ptr(), &found) != 0) {
    PyErr_Clear();
    return false;
  }
  const DType dtype = dtype_of(found.dtype.code, found.dtype.bits);
  if (found.device.kind != kCpu || dtype == DType::kCount || found.dtype.lanes != 1) return false;
  uint64_t elems = 1;
  for (int i = 0; i < found.ndim; ++i) elems *= uint64_t(found.shape[i]);
  char* const ptr = static_cast<char*>(found.data) + found.byte_offset;
  if (elems == 0 || found.data == nullptr || !is_contiguous(found)) return false;
  if (elems == 1 && may_be_negated(tensor)) return false;
  *result = {ptr, elems, dtype};
  return true;
}

bool is_chunk_or_apart(const PlainTensor& whole, const PlainTensor& part, int index) {
  const auto begin = reinterpret_cast<intptr_t>(whole.ptr),
             at = reinterpret_cast<intptr_t>(part.ptr);
  return at >= begin + intptr_t(whole.bytes()) || at + intptr_t(part.bytes()) <= begin ||
         at == begin + index * intptr_t(part.bytes());
}

int op_code(nb::handle op) {
  const Torch& t = torch();
  for (const Op& each : t.ops)
    if (each.object == op.ptr()) return each.code;
  // An options object makes a new ReduceOp each time that it is read, whose hash is its kind's.
  if (Py_TYPE(op.ptr()) != t.op) return -1;
  const Py_hash_t kind = PyObject_Hash(op.ptr());
  PyErr_Clear();
  for (const Op& each : t.ops)
    if (each.kind == kind) return each.code;
  return -1;
}

void bind_tensors(nb::module_& m) {
  m.def("read_tensors_with", [](nb::capsule exchange, nb::handle tensor, nb::handle parameter,
                                nb::handle op, const std::vector<std::pair<nb::object, int>>& ops) {
    Torch& t = torch();
    const auto* found = static_cast<const Exchange*>(exchange.data());
    while (found != nullptr && found->version.major > kMajorVersion) found = found->previous;
    t.read = found == nullptr ? nullptr : found->tensor_from_py_object;
    t.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
    t.parameter = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
    t.op = reinterpret_cast<PyTypeObject*>(op.inc_ref().ptr());
    t.ops.clear();
    for (const auto& [object, code] : ops)
      t.ops.push_back({object.inc_ref().ptr(), nb::hash(object), code});
    return t.read != nullptr;
  });
  m.attr("NOT_PLAIN") = kNotPlain;
  m.def(
      "is_plain",
      [](nb::handle tensor) {
        PlainTensor found;
        return read_plain(tensor, &found);
      },
      nb::arg().none());
}

}  // namespace ringcomm::host
