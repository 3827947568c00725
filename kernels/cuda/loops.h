// SPDX-License-Identifier: Apache-2.0

// Selects the loops that the lanes of a block run over data. With RINGCOMM_SERIAL_LOOPS, which
// RINGCOMM_KERNELS=serial defines (ringcomm/cuda/units.py), they come from serial/ and load one
// source after the other, with equal results. serial/ stays until both are measured on a GPU.
#pragma once

#include "ringcomm/core/platform.h"

#if RINGCOMM_SERIAL_LOOPS
#include "kernels/cuda/serial/adamw_lanes.h"
#include "kernels/cuda/serial/norm_lanes.h"
#else
#include "kernels/cuda/adamw_lanes.h"
#include "kernels/cuda/norm_lanes.h"
#endif

RINGCOMM_NAMESPACE_BEGIN
namespace device {

#if RINGCOMM_SERIAL_LOOPS
constexpr bool kLoopsDealTiles = false;
#else
constexpr bool kLoopsDealTiles = true;  // unless a call is sliced (args.h)
#endif

}  // namespace device
RINGCOMM_NAMESPACE_END
