// Coded wires of ringcomm._native: numbers as codes of few bits, and sums of such codes.
#include <nanobind/stl/vector.h>

#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"
#include "kernels/host/kernel_table.h"

namespace nb = nanobind;

namespace ringcomm::host {

Wire wire_of(int wire) {
  if (wire < 0 || wire >= int(Wire::kCount)) throw nb::value_error("wire: no such wire");
  return Wire(wire);
}

DType wire_dtype_of(int dtype) {
  const DType type = DType(dtype);
  if (type != DType::kFloat32 && accumulator_of(type) != DType::kFloat32)
    throw nb::value_error("wire: expected float32, bfloat16 or float16");
  return type;
}

void check_sources(size_t count) {
  if (count == 0) throw nb::value_error("sum_wires: expected one source or more");
}

namespace {

int type_of(int dtype) { return wire_type_index(wire_dtype_of(dtype)); }

void encode(int wire, uintptr_t in, int dtype, uintptr_t out, uint64_t elems, uintptr_t residual) {
  const EncodeFn loop = kernels().wires[int(wire_of(wire))].encode[type_of(dtype)];
  const WithoutGil nogil;
  loop({reinterpret_cast<const void*>(in), reinterpret_cast<uint8_t*>(out), elems,
        reinterpret_cast<float*>(residual)});
}

void sum(int wire, const std::vector<uintptr_t>& in, uintptr_t out, int dtype, uint64_t elems,
         int divide_by) {
  check_sources(in.size());
  const DecodeFn loop = kernels().wires[int(wire_of(wire))].sum[type_of(dtype)];
  std::vector<const uint8_t*> sources;
  for (const uintptr_t ptr : in) sources.push_back(reinterpret_cast<const uint8_t*>(ptr));
  const WithoutGil nogil;
  loop({sources.data(), int(sources.size()), reinterpret_cast<void*>(out), elems, divide_by});
}

}  // namespace

void bind_wires(nb::module_& m) {
  nb::dict wires;
  wires["int8"] = int(Wire::kInt8);
  wires["fp8"] = int(Wire::kFp8);
  wires["int4"] = int(Wire::kInt4);
  add_constant(m, "WIRES", wires, "Code of each coded wire: int8, fp8 and int4.");
  add_constant(m, "WIRE_BLOCK", kWireBlock, "Numbers that share a scale.");
  m.def(
      "wire_bytes", [](int wire, uint64_t elems) { return wire_bytes(wire_of(wire), elems); },
      nb::arg("wire"), nb::arg("elems"),
      "Returns the bytes of so many numbers in a coded wire, scales included.");
  m.def("encode_wire", encode, nb::arg("wire"), nb::arg("in_ptr"), nb::arg("dtype"),
        nb::arg("out_ptr"), nb::arg("elems"), nb::arg("residual_ptr") = 0,
        "Encodes float32, bfloat16 or float16 numbers, in blocks of `WIRE_BLOCK`.\n\n"
        "The numbers are in + residual, where there is a residual [elems] in float32; it is\n"
        "overwritten by what the codes leave out, and by 0 in blocks with infinities or NaNs.\n\n"
        "Raises:\n"
        "    ValueError: no such wire, or another dtype.");
  m.def("sum_wires", sum, nb::arg("wire"), nb::arg("in_ptrs"), nb::arg("out_ptr"), nb::arg("dtype"),
        nb::arg("elems"), nb::arg("divide_by") = 0,
        "Decodes arrays of codes and adds them up in float32, in list order, rounded once to "
        "`dtype`.\n\n"
        "`divide_by` > 0 divides the sum.\n\n"
        "Raises:\n"
        "    ValueError: no array, no such wire, or a dtype that is not float32, bfloat16 or\n"
        "        float16.");
}

}  // namespace ringcomm::host
