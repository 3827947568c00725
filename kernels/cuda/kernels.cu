// The kernels of one unit (docs/cuda.md): RINGCOMM_UNIT_MOVE, or the reductions of
// RINGCOMM_UNIT_TYPE, with the bitwise ones if RINGCOMM_UNIT_BITWISE. grid.x: channels; grid.y:
// ranks of this launch.
#include "kernels/cuda/body.h"
#include "kernels/cuda/team.h"

namespace {

using ringcomm::RedOp;
using ringcomm::device::BlockTeam;
using ringcomm::device::LaunchParams;
using ringcomm::device::Workspace;

}  // namespace

#define RC_KERNEL(name, ...)                                                            \
  extern "C" __global__ void __launch_bounds__(ringcomm::device::kThreads, 1)           \
      name(const __grid_constant__ LaunchParams p) {                                    \
    __shared__ Workspace workspace;                                                     \
    const int rank_in_launch = int(blockIdx.y);                                         \
    ringcomm::device::__VA_ARGS__(BlockTeam{&workspace}, p, rank_in_launch, workspace); \
  }

#if defined(RINGCOMM_UNIT_MOVE)

RC_KERNEL(rc_move, move_kernel)
RC_KERNEL(rc_packet_move, packet_move_kernel)

#else

using UnitType = RINGCOMM_UNIT_TYPE;

#define RC_REDUCE_KERNELS(name, op)                                               \
  RC_KERNEL(rc_reduce_scatter_##name, reduce_scatter_kernel<UnitType, RedOp::op>) \
  RC_KERNEL(rc_all_reduce_##name, all_reduce_kernel<UnitType, RedOp::op>)         \
  RC_KERNEL(rc_packet_##name, packet_reduce_kernel<UnitType, RedOp::op>)

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
