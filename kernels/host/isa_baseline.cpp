// SPDX-License-Identifier: Apache-2.0

#define RINGCOMM_ISA isa_baseline
#include "kernels/host/isa_table.h"

const ringcomm::KernelTable ringcomm::kBaselineKernels = ringcomm::host::make_table("baseline");
