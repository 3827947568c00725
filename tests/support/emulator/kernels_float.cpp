#include "tests/support/emulator/registry.h"

void add_float_kernels(KernelMap& kernels) {
  add_arithmetic<float>(kernels, "reduce_float32");
  add_arithmetic<double>(kernels, "reduce_float64");
}
