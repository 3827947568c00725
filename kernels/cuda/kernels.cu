// SPDX-License-Identifier: Apache-2.0

// Instantiates the kernels of one compilation unit (docs/cuda.md). One macro selects the unit:
// RINGCOMM_UNIT_MOVE; RINGCOMM_UNIT_TYPE (reductions, with RINGCOMM_UNIT_BITWISE also bitwise);
// RINGCOMM_UNIT_GRADS (optimizer, by gradient type); RINGCOMM_UNIT_MULTICAST;
// RINGCOMM_UNIT_QUANT_FORMAT (quantization); or RINGCOMM_UNIT_ROWS (scattered rows). grid.x:
// channels; grid.y: ranks of this launch.
#include "kernels/cuda/multicast.h"
#include "kernels/cuda/optimizer.h"
#include "kernels/cuda/packets.h"
#include "kernels/cuda/quantization_lanes.h"
#include "kernels/cuda/row_lanes.h"
#include "kernels/cuda/team.h"

namespace {

using ringcomm::RedOp;
using ringcomm::device::BlockTeam;
using ringcomm::device::Workspace;

}  // namespace

// 256 threads per block, which leaves 255 registers per thread.
#define RC_KERNEL(name, ...) RC_KERNEL_OF(256, 1, name, __VA_ARGS__)
// The block has `threads` threads; the host reads the number from the function
// (DeviceComm::kernel). At least `blocks` blocks fit on a multiprocessor.
#define RC_KERNEL_OF(threads, blocks, name, ...) \
  RC_KERNEL_WITH(LaunchParams, threads, blocks, name, __VA_ARGS__)
// 384 threads with 168 registers each: one block per multiprocessor, with 96 KiB of loads in flight
// (ops.h). Not measured on a GPU. The serial loops need the registers of 256 threads.
#if RINGCOMM_SERIAL_LOOPS
#define RC_DATA_THREADS 256
#else
#define RC_DATA_THREADS 384
#endif
#define RC_DATA_KERNEL(name, ...) RC_KERNEL_OF(RC_DATA_THREADS, 1, name, __VA_ARGS__)
// A kernel that takes lists; DeviceComm::kernel recognizes it by "list" in its name.
#define RC_LIST_KERNEL(name, ...) RC_KERNEL_WITH(ListParams, RC_DATA_THREADS, 1, name, __VA_ARGS__)
#define RC_KERNEL_WITH(params, threads, blocks, name, ...)                                       \
  extern "C" __global__ void __launch_bounds__(threads, blocks)                                  \
      name(const __grid_constant__ ringcomm::device::params p) {                                 \
    __shared__ Workspace workspace;                                                              \
    const int rank_in_launch = int(blockIdx.y);                                                  \
    ringcomm::device::__VA_ARGS__(BlockTeam<threads>{&workspace}, p, rank_in_launch, workspace); \
  }

#if defined(RINGCOMM_UNIT_MOVE)

RC_DATA_KERNEL(rc_move, move_kernel)
RC_LIST_KERNEL(rc_list_move, list_move_kernel)
RC_KERNEL(rc_ll_move, ll_move_kernel)

#elif defined(RINGCOMM_UNIT_GRADS)

using Grads = RINGCOMM_UNIT_GRADS;

RC_KERNEL(rc_adamw_prepare, prepare_kernel)
using ringcomm::device::kNormThreads;
using ringcomm::device::kShardBlocks;
using ringcomm::device::kStepThreads;

#if RINGCOMM_SERIAL_LOOPS

// One kernel serves all algorithms and worlds (units.py, kernel_name()).
#define RC_NORM_KERNELS(name, type)                            \
  RC_KERNEL_OF(256, 2, rc_grad_##name, grad_norm_kernel<type>) \
  RC_KERNEL_OF(kNormThreads, 1, rc_reduce_scatter_##name, reduce_scatter_norm_kernel<type>)
#define RC_ADAMW_KERNELS(name, type)                                                      \
  RC_KERNEL_OF(256, kShardBlocks, rc_adamw_shard_##name, adamw_shard_kernel<Grads, type>) \
  RC_KERNEL_OF(kStepThreads<Grads>, 1, rc_adamw_step_##name, adamw_step_kernel<Grads, type>)

#else

using ringcomm::device::kManyThreads;

// Rings have kernels of their own: their code needs registers that the other kernels lack.
#define RC_NORM_KERNELS(name, type)                                                         \
  RC_KERNEL_OF(256, 2, rc_grad_##name, grad_norm_kernel<type>)                              \
  RC_KERNEL_OF(kNormThreads, 1, rc_reduce_scatter_##name, reduce_scatter_norm_kernel<type>) \
  RC_KERNEL(rc_ring_##name, reduce_scatter_norm_ring_kernel<type>)
#define RC_ADAMW_KERNELS(name, type)                                                         \
  RC_KERNEL_OF(256, kShardBlocks, rc_adamw_shard_##name, adamw_shard_kernel<Grads, type>)    \
  RC_KERNEL_OF(kStepThreads<Grads>, 1, rc_adamw_step_##name, adamw_step_kernel<Grads, type>) \
  RC_KERNEL_OF(kManyThreads<Grads>, 1, rc_adamw_many_##name, adamw_many_kernel<Grads, type>) \
  RC_KERNEL(rc_adamw_ring_##name, adamw_ring_kernel<Grads, type>)

#endif

RC_NORM_KERNELS(norm, Grads)
RC_ADAMW_KERNELS(float32, float)
RC_ADAMW_KERNELS(bfloat16, ringcomm::BFloat16)
RC_ADAMW_KERNELS(float16, ringcomm::Float16)

#elif defined(RINGCOMM_UNIT_MULTICAST)

// A build for several architectures compiles the unit for each; below sm_90 it is empty.
#if !RC_DEVICE_PASS || RC_HAS_MULTIMEM
RC_KERNEL(rc_multicast_sum, multicast_kernel<RINGCOMM_UNIT_MULTICAST>)
#endif

#elif defined(RINGCOMM_UNIT_QUANT_FORMAT)

using Format = RINGCOMM_UNIT_QUANT_FORMAT;

// These kernels do not wait for peers.
#define RC_QUANT_KERNELS(name, type)                                      \
  RC_KERNEL_OF(256, 4, rc_quantize_##name, quantize_kernel<Format, type>) \
  RC_KERNEL_OF(256, 4, rc_dequantize_and_sum_##name, dequantize_and_sum_kernel<Format, type>)

RC_QUANT_KERNELS(float32, float)
RC_QUANT_KERNELS(bfloat16, ringcomm::BFloat16)
RC_QUANT_KERNELS(float16, ringcomm::Float16)

#elif defined(RINGCOMM_UNIT_ROWS)

RC_KERNEL_OF(256, 2, rc_copy_rows, copy_rows_kernel)

#define RC_ROW_KERNELS(name, type)                                \
  RC_KERNEL_OF(256, 2, rc_sum_rows_##name, sum_rows_kernel<type>) \
  RC_KERNEL_OF(256, 2, rc_scale_rows_##name, scale_rows_kernel<type>)

RC_ROW_KERNELS(float32, float)
RC_ROW_KERNELS(bfloat16, ringcomm::BFloat16)
RC_ROW_KERNELS(float16, ringcomm::Float16)

#else

using UnitType = RINGCOMM_UNIT_TYPE;

#define RC_REDUCE_KERNELS(name, op)                                                              \
  RC_DATA_KERNEL(rc_reduce_scatter_##name, reduce_scatter_kernel<UnitType, RedOp::op>)           \
  RC_LIST_KERNEL(rc_reduce_scatter_list_##name, reduce_scatter_list_kernel<UnitType, RedOp::op>) \
  RC_DATA_KERNEL(rc_all_reduce_##name, all_reduce_kernel<UnitType, RedOp::op>)                   \
  RC_KERNEL(rc_ll_##name, ll_reduce_kernel<UnitType, RedOp::op>)

RC_REDUCE_KERNELS(sum, kSum)
RC_REDUCE_KERNELS(product, kProduct)
RC_REDUCE_KERNELS(min, kMin)
RC_REDUCE_KERNELS(max, kMax)
#if defined(RINGCOMM_UNIT_BITWISE)
RC_REDUCE_KERNELS(band, kBand)
RC_REDUCE_KERNELS(bor, kBor)
RC_REDUCE_KERNELS(bxor, kBxor)
#endif

#endif
