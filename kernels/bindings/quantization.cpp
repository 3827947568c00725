// SPDX-License-Identifier: Apache-2.0

// Binds the quantization of ringcomm._native: numbers in few bits, and their sums.
#include <nanobind/stl/vector.h>

#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"
#include "kernels/host/kernel_table.h"
#include "kernels/host/worker_pool.h"

namespace nb = nanobind;

namespace ringcomm::host {

QuantFormat quant_format_of(int format) {
  if (format < 0 || format >= int(QuantFormat::kCount))
    throw nb::value_error("format: no such format");
  return QuantFormat(format);
}

DType float_dtype_of(int dtype) {
  const DType type = DType(dtype);
  if (type != DType::kFloat32 && accumulator_of(type) != DType::kFloat32)
    throw nb::value_error("dtype: expected float32, bfloat16 or float16");
  return type;
}

void check_sources(size_t count) {
  if (count == 0) throw nb::value_error("dequantize_and_sum: expected one source or more");
}

namespace {

int type_of(int dtype) { return float_type_index(float_dtype_of(dtype)); }

void quantize(int format, uintptr_t in, int dtype, uintptr_t out, uint64_t elems,
              uintptr_t error_feedback) {
  const QuantizeFn loop = kernels().quant[int(quant_format_of(format))].quantize[type_of(dtype)];
  const WithoutGil nogil;
  run_in_parts(elems, kQuantBlock, elems * sizeof(float), threads_without_communicator(),
               [&](uint64_t begin, uint64_t end) {
                 loop({reinterpret_cast<const void*>(in), reinterpret_cast<uint8_t*>(out), elems,
                       reinterpret_cast<float*>(error_feedback), begin, end});
               });
}

void sum(int format, const std::vector<uintptr_t>& in, uintptr_t out, int dtype, uint64_t elems,
         int divide_by) {
  check_sources(in.size());
  const DequantizeFn loop = kernels().quant[int(quant_format_of(format))].sum[type_of(dtype)];
  std::vector<const uint8_t*> sources;
  for (const uintptr_t ptr : in) sources.push_back(reinterpret_cast<const uint8_t*>(ptr));
  const WithoutGil nogil;
  run_in_parts(elems, kQuantBlock, elems * sizeof(float), threads_without_communicator(),
               [&](uint64_t begin, uint64_t end) {
                 loop({sources.data(), int(sources.size()), reinterpret_cast<void*>(out), elems,
                       divide_by, begin, end});
               });
}

}  // namespace

void bind_quantization(nb::module_& m) {
  nb::dict formats;
  formats["int8"] = int(QuantFormat::kInt8);
  formats["fp8"] = int(QuantFormat::kFp8);
  formats["int4"] = int(QuantFormat::kInt4);
  add_constant(m, "QUANT_FORMATS", formats, "Number of each quantized format: int8, fp8 and int4.");
  add_constant(m, "QUANT_BLOCK", kQuantBlock, "Numbers that share a scale.");
  m.def(
      "quantized_bytes",
      [](int format, uint64_t elems) { return quantized_bytes(quant_format_of(format), elems); },
      nb::arg("format"), nb::arg("elems"),
      "Returns the bytes of so many numbers in a quantized format, scales included.");
  m.def("quantize", quantize, nb::arg("format"), nb::arg("in_ptr"), nb::arg("dtype"),
        nb::arg("out_ptr"), nb::arg("elems"), nb::arg("error_feedback_ptr") = 0,
        "Quantizes float32, bfloat16 or float16 numbers, in blocks of `QUANT_BLOCK`.\n\n"
        "The numbers are in + error feedback, where there is a buffer [elems] of it in float32;\n"
        "it is overwritten by what is lost, and by 0 in blocks with infinities or NaNs.\n\n"
        "Raises:\n"
        "    ValueError: no such format, or another dtype.");
  m.def("dequantize_and_sum", sum, nb::arg("format"), nb::arg("in_ptrs"), nb::arg("out_ptr"),
        nb::arg("dtype"), nb::arg("elems"), nb::arg("divide_by") = 0,
        "Dequantizes arrays and adds them up in float32, in list order, rounded once to "
        "`dtype`.\n\n"
        "`divide_by` > 0 divides the sum.\n\n"
        "Raises:\n"
        "    ValueError: no array, no such format, or a dtype that is not float32, bfloat16 or\n"
        "        float16.");
}

}  // namespace ringcomm::host
