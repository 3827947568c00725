// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/quantization_lanes.h"
#include "tests/support/emulator/registry.h"

namespace {

namespace device = ringcomm::device;

template <class Format, class T>
void add_numbers(KernelMap& kernels, const std::string& unit, const std::string& name) {
  kernels[unit + "/rc_quantize_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::quantize_kernel<Format, T>(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_dequantize_and_sum_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::dequantize_and_sum_kernel<Format, T>(team, params, rank, w);
    });
  }};
}

template <class Format>
void add_quantization(KernelMap& kernels, const std::string& unit) {
  add_numbers<Format, float>(kernels, unit, "float32");
  add_numbers<Format, ringcomm::BFloat16>(kernels, unit, "bfloat16");
  add_numbers<Format, ringcomm::Float16>(kernels, unit, "float16");
}

}  // namespace

void add_quantization_kernels(KernelMap& kernels) {
  add_quantization<ringcomm::Int8Format>(kernels, "quantize_int8");
  add_quantization<ringcomm::Fp8Format>(kernels, "quantize_fp8");
  add_quantization<ringcomm::Int4Format>(kernels, "quantize_int4");
}
