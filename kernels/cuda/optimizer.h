// The optimizer's kernels. RINGCOMM_SERIAL_LOOPS (loops.h) takes those of serial/, where one kernel
// takes all algorithms and numbers of ranks.
#pragma once

#if RINGCOMM_SERIAL_LOOPS
#include "kernels/cuda/serial/optimizer_body.h"
#else
#include "kernels/cuda/optimizer_body.h"
#endif
