// Codes of wires as launches.
#include "kernels/cuda/device_comm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

const char* unit_of(Wire wire) {
  switch (wire) {
    case Wire::kInt8:
      return "wires_int8";
    case Wire::kFp8:
      return "wires_fp8";
    case Wire::kInt4:
      return "wires_int4";
    default:
      throw std::invalid_argument("wire: no such wire");
  }
}

}  // namespace

void DeviceComm::encode_wire(Wire wire, char* in, DType dtype, char* out, uint64_t elems) {
  CallArgs args{};
  args.in = in;
  args.out = out;
  args.total_bytes = elems * uint64_t(size_of(dtype));
  const std::string name = std::string("rc_encode_wire_") + name_of_float(dtype);
  launch_alone(kernel(unit_of(wire), name), elems, args);
}

void DeviceComm::sum_wires(Wire wire, const CodedRuns& runs, char* out, DType dtype, uint64_t elems,
                           int divide_by) {
  CallArgs args{};
  args.in = runs.first;
  args.out = out;
  args.total_bytes = elems * uint64_t(size_of(dtype));
  args.chunk_bytes = runs.stride_bytes;
  args.sources = runs.count;
  args.divide_by = divide_by;
  const std::string name = std::string("rc_sum_wires_") + name_of_float(dtype);
  launch_alone(kernel(unit_of(wire), name), elems, args);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
