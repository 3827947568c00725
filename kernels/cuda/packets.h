// The kernels of packets. RINGCOMM_SERIAL_LOOPS (loops.h) takes those of serial/, which load what
// they send behind the words of their call, and await payloads behind headers; the packets are the
// same.
#pragma once

#if RINGCOMM_SERIAL_LOOPS
#include "kernels/cuda/serial/packet_kernels.h"
#else
#include "kernels/cuda/packet_kernels.h"
#endif
