// The loops that the lanes of a block run over data. RINGCOMM_SERIAL_LOOPS, which
// RINGCOMM_KERNELS=serial defines (ringcomm/cuda/units.py), takes those of serial/: they load one
// source after the other, with the same bits. They stay until a GPU has measured the others.
#pragma once

#if RINGCOMM_SERIAL_LOOPS
#include "kernels/cuda/serial/adamw_lanes.h"
#include "kernels/cuda/serial/norm_lanes.h"
#else
#include "kernels/cuda/adamw_lanes.h"
#include "kernels/cuda/norm_lanes.h"
#endif
