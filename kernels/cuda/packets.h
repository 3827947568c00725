// SPDX-License-Identifier: Apache-2.0

// Selects the packet kernels. With RINGCOMM_SERIAL_LOOPS (loops.h) they come from serial/: those
// kernels load the data to send after the words of their call, and wait for payloads after headers.
// They send the same packets.
#pragma once

#if RINGCOMM_SERIAL_LOOPS
#include "kernels/cuda/serial/packet_kernels.h"
#else
#include "kernels/cuda/packet_kernels.h"
#endif
