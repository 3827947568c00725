// SPDX-License-Identifier: Apache-2.0

// Launches the quantization kernels.
#include "kernels/cuda/device_comm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

const char* unit_of(QuantFormat format) {
  switch (format) {
    case QuantFormat::kInt8:
      return "quantize_int8";
    case QuantFormat::kFp8:
      return "quantize_fp8";
    case QuantFormat::kInt4:
      return "quantize_int4";
    default:
      throw std::invalid_argument("format: no such format");
  }
}

}  // namespace

void DeviceComm::quantize(QuantFormat format, char* in, DType dtype, char* out, uint64_t elems) {
  CallArgs args{};
  args.in = in;
  args.out = out;
  args.total_bytes = elems * uint64_t(size_of(dtype));
  const std::string name = std::string("rc_quantize_") + name_of_float(dtype);
  launch_alone(kernel(unit_of(format), name), elems, args);
}

void DeviceComm::dequantize_and_sum(QuantFormat format, const QuantizedRuns& runs, char* out,
                                    DType dtype, uint64_t elems, int divide_by) {
  CallArgs args{};
  args.in = runs.first;
  args.out = out;
  args.total_bytes = elems * uint64_t(size_of(dtype));
  args.chunk_bytes = runs.stride_bytes;
  args.runs = {runs.count, divide_by};
  const std::string name = std::string("rc_dequantize_and_sum_") + name_of_float(dtype);
  launch_alone(kernel(unit_of(format), name), elems, args);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
