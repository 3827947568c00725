#include "kernels/cuda/wire_lanes.h"
#include "tests/support/emulator/registry.h"

namespace {

namespace device = ringcomm::device;

template <class Code, class T>
void add_numbers(KernelMap& kernels, const std::string& unit, const std::string& name) {
  kernels[unit + "/rc_encode_wire_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::encode_wire_kernel<Code, T>(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_sum_wires_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::sum_wires_kernel<Code, T>(team, params, rank, w);
    });
  }};
}

template <class Code>
void add_wire(KernelMap& kernels, const std::string& unit) {
  add_numbers<Code, float>(kernels, unit, "float32");
  add_numbers<Code, ringcomm::BFloat16>(kernels, unit, "bfloat16");
  add_numbers<Code, ringcomm::Float16>(kernels, unit, "float16");
}

}  // namespace

void add_wire_kernels(KernelMap& kernels) {
  add_wire<ringcomm::Int8Code>(kernels, "wires_int8");
  add_wire<ringcomm::Fp8Code>(kernels, "wires_fp8");
  add_wire<ringcomm::Int4Code>(kernels, "wires_int4");
}
