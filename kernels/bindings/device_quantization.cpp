// SPDX-License-Identifier: Apache-2.0

// Binds the quantization of a DeviceComm.
#include "kernels/bindings/module.h"
#include "kernels/cuda/device_comm.h"

namespace nb = nanobind;

namespace ringcomm::host {

using device::DeviceComm;

void bind_device_quantization(nb::class_<DeviceComm>& c) {
  c.def(
       "quantize",
       [](DeviceComm& d, int format, uintptr_t in, int dtype, uintptr_t out, uint64_t elems) {
         d.quantize(quant_format_of(format), at(in), float_dtype_of(dtype), at(out), elems);
         return 0;
       },
       nb::arg("format"), nb::arg("in_ptr"), nb::arg("dtype"), nb::arg("out_ptr"), nb::arg("elems"),
       "As the host's. Values that begin at a multiple of 4 bytes are stored by words.")
      .def(
          "dequantize_and_sum",
          [](DeviceComm& d, int format, uintptr_t in, int count, uint64_t stride_bytes,
             uintptr_t out, int dtype, uint64_t elems, int divide_by) {
            check_sources(size_t(count > 0 ? count : 0));
            d.dequantize_and_sum(quant_format_of(format), {at(in), count, stride_bytes}, at(out),
                                 float_dtype_of(dtype), elems, divide_by);
            return 0;
          },
          nb::arg("format"), nb::arg("in_ptr"), nb::arg("count"), nb::arg("stride_bytes"),
          nb::arg("out_ptr"), nb::arg("dtype"), nb::arg("elems"), nb::arg("divide_by") = 0,
          "As the host's; `count` quantized arrays are `stride_bytes` apart.");
}

}  // namespace ringcomm::host
