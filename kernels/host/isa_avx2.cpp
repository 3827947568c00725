// SPDX-License-Identifier: Apache-2.0

#define RINGCOMM_ISA isa_avx2
#include "kernels/host/isa_table.h"

const ringcomm::KernelTable ringcomm::kAvx2Kernels = ringcomm::host::make_table("avx2");
