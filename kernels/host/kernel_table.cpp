// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/kernel_table.h"

#include <atomic>
#include <cstring>

#include "kernels/host/processor.h"

namespace ringcomm {
namespace {

bool runs_here(const KernelTable& table) {
#if defined(__x86_64__)
  static const Processor processor = find_processor();
  if (&table == &kAvx512Kernels) return processor.avx512;
  if (&table == &kAvx2Kernels) return processor.avx2;
#endif
  return &table == &kBaselineKernels;
}

const KernelTable* const kTables[] = {
#if defined(__x86_64__)
    &kAvx512Kernels, &kAvx2Kernels,
#endif
    &kBaselineKernels};

const KernelTable* best() {
  for (const KernelTable* table : kTables)
    if (runs_here(*table)) return table;
  return &kBaselineKernels;
}

std::atomic<const KernelTable*>& current() {
  static std::atomic<const KernelTable*> table{best()};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *current().load(); }

bool force_isa(const char* name) {
  if (*name == '\0') {
    current().store(best());
    return true;
  }
  for (const KernelTable* table : kTables) {
    if (std::strcmp(table->isa, name) != 0) continue;
    if (!runs_here(*table)) return false;
    current().store(table);
    return true;
  }
  return false;
}

}  // namespace ringcomm
