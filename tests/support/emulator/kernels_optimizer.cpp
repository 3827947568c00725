// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/optimizer_body.h"
#include "tests/support/emulator/registry.h"

namespace {

namespace device = ringcomm::device;

template <class G, class P>
void add_parameters(KernelMap& kernels, const std::string& unit, const std::string& name) {
  kernels[unit + "/rc_adamw_shard_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::adamw_shard_kernel<G, P>(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_adamw_step_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::adamw_step_kernel<G, P>(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_adamw_step_" + name].threads = device::kStepThreads<G>;
  kernels[unit + "/rc_adamw_step_" + name].registers = sizeof(G) == 4 ? 96 : 80;
  kernels[unit + "/rc_adamw_many_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::adamw_many_kernel<G, P>(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_adamw_many_" + name].threads = device::kManyThreads<G>;
  kernels[unit + "/rc_adamw_many_" + name].registers = sizeof(G) == 4 ? 128 : 96;
  kernels[unit + "/rc_adamw_ring_" + name] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::adamw_ring_kernel<G, P>(team, params, rank, w);
    });
  }};
}

template <class G>
void add_gradients(KernelMap& kernels, const std::string& unit) {
  kernels[unit + "/rc_adamw_prepare"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::prepare_kernel(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_grad_norm"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::grad_norm_kernel<G>(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_reduce_scatter_norm"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::reduce_scatter_norm_kernel<G>(team, params, rank, w);
    });
  }};
  kernels[unit + "/rc_ring_norm"] = {[](const auto& p, int x, int y, int lanes) {
    run_blocks(p, x, y, lanes, [](auto team, const auto& params, int rank, auto& w) {
      device::reduce_scatter_norm_ring_kernel<G>(team, params, rank, w);
    });
  }};
  add_parameters<G, float>(kernels, unit, "float32");
  add_parameters<G, ringcomm::BFloat16>(kernels, unit, "bfloat16");
  add_parameters<G, ringcomm::Float16>(kernels, unit, "float16");
}

}  // namespace

void add_optimizer_kernels(KernelMap& kernels) {
  add_gradients<float>(kernels, "adamw_float32");
  add_gradients<ringcomm::BFloat16>(kernels, "adamw_bfloat16");
  add_gradients<ringcomm::Float16>(kernels, "adamw_float16");
}
