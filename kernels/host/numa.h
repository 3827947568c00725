// SPDX-License-Identifier: Apache-2.0

// Memory policies of NUMA nodes, by system calls alone: not every machine has libnuma.
#pragma once

#include <cstdint>
#include <vector>

namespace ringcomm::host {

// Makes the kernel place pages of [begin, begin + bytes) on these nodes while they have free pages,
// whichever thread touches the pages first. For a file in memory the policy belongs to the file and
// applies in every process that maps it. Returns 0 or the errno of a refusal: EPERM or ENOSYS from
// a container's filter of system calls; EINVAL if the kernel has no such node, or is older than
// 5.15 and several nodes are given.
int prefer_nodes(void* begin, uint64_t bytes, const std::vector<int>& nodes);

// True if the calling thread has been given a memory policy (numactl --membind, --interleave).
bool has_memory_policy();

}  // namespace ringcomm::host
