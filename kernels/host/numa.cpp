// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ringcomm::host {
namespace {

// From linux/mempolicy.h; kPreferredMany exists since Linux 5.15.
constexpr int kDefault = 0, kPreferred = 1, kPreferredMany = 5;

}  // namespace

int prefer_nodes(void* begin, uint64_t bytes, const std::vector<int>& nodes) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  const size_t most = size_t(*std::max_element(nodes.begin(), nodes.end()));
  std::vector<unsigned long> mask(most / kBits + 1);
  for (const int node : nodes) mask[size_t(node) / kBits] |= 1ul << (size_t(node) % kBits);
  const int mode = nodes.size() == 1 ? kPreferred : kPreferredMany;
  // The kernel reads one bit fewer than the given number.
  if (syscall(SYS_mbind, begin, bytes, mode, mask.data(), mask.size() * kBits + 1, 0) == 0)
    return 0;
  return errno;
}

bool has_memory_policy() {
  int mode = kDefault;
  return syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) == 0 && mode != kDefault;
}

}  // namespace ringcomm::host
