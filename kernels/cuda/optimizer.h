// SPDX-License-Identifier: Apache-2.0

// Selects the optimizer's kernels. With RINGCOMM_SERIAL_LOOPS (loops.h) they come from serial/,
// where one kernel serves all algorithms and numbers of ranks.
#pragma once

#if RINGCOMM_SERIAL_LOOPS
#include "kernels/cuda/serial/optimizer_body.h"
#else
#include "kernels/cuda/optimizer_body.h"
#endif
