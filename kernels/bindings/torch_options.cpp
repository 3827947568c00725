// SPDX-License-Identifier: Apache-2.0

#include "kernels/bindings/torch_options.h"

#include <cstring>
#include <vector>

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

constexpr int kNoOp = -1;

// Where the objects of an options class have their fields: the object points to the C++ value,
// which has the fields at these offsets.
struct OptionsLayout {
  PyTypeObject* type;
  size_t value_at, timeout_at, async_at;
  int op_at;         // offset of the op; kNoOp: the class has no op
  int64_t unset_ms;  // the timeout in ms if a caller has set none
};

// Used with the GIL held. Never destroyed: threads may still run at exit.
std::vector<OptionsLayout>& options_layouts() {
  static auto* const found = new std::vector<OptionsLayout>;
  return *found;
}

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

bool is_plain(nb::handle options, nb::handle* op) {
  for (const OptionsLayout& each : options_layouts()) {
    if (Py_TYPE(options.ptr()) != each.type) continue;
    const auto* value = load<const char*>(reinterpret_cast<char*>(options.ptr()) + each.value_at);
    if (load<uint8_t>(value + each.async_at) != 0 ||
        load<int64_t>(value + each.timeout_at) != each.unset_ms)
      return false;
    if (each.op_at == kNoOp) return true;
    *op = op_of_kind(load<uint8_t>(value + each.op_at));
    return op->is_valid();
  }
  return false;
}

nb::handle only_tensor(nb::handle list) {
  if (!PyList_CheckExact(list.ptr()) || PyList_Size(list.ptr()) != 1) return {};
  return PyList_GetItem(list.ptr(), 0);
}

nb::handle auto_algorithm() {
  static PyObject* const name =
      PyUnicode_InternFromString(name_of(Algorithm::kAuto, Collective::kNone));
  return name;
}

void bind_torch_options(nb::module_& m) {
  m.def(
      "read_options_at",
      [](nb::handle type, size_t value_offset, size_t timeout_offset, size_t async_offset,
         int op_offset, int64_t unset_ms) {
        options_layouts().push_back({reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()),
                                     value_offset, timeout_offset, async_offset, op_offset,
                                     unset_ms});
      },
      nb::sig("def read_options_at(type: object, value_offset: int, timeout_offset: int, "
              "async_offset: int, op_offset: int, unset_ms: int, /) -> None"),
      "Has the objects of a class of torch's options read from memory.\n\n"
      "The first offset is that of the pointer to the value in an object, the others are those of\n"
      "its fields in the value: the timeout in milliseconds, `asyncOp`, and the op's kind (-1:\n"
      "none). `unset_ms` is the timeout of callers who have named none.");
  m.def(
      "plain_op",
      [](nb::handle options) -> nb::object {
        nb::handle op;
        if (!is_plain(options, &op)) return nb::bool_(false);
        return op.is_valid() ? nb::borrow(op) : nb::object(nb::bool_(true));
      },
      nb::sig("def plain_op(options: object, /) -> typing.Any"), nb::arg().none(),
      "Returns the op of options for a synchronous call without a timeout of its own.\n\n"
      "True for options that have no op; False where Python has to read the options.");
}

}  // namespace ringcomm::host
