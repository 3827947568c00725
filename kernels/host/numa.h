// Memory policies of NUMA nodes, by system calls alone: libnuma is not on every machine.
#pragma once

#include <cstdint>
#include <vector>

namespace ringcomm::host {

// Has the kernel take pages of [begin, begin + bytes) from these nodes while they have free ones,
// whichever thread touches them first. For a file in memory the policy belongs to the file and
// applies in every process that maps it. Returns 0, or the errno of the refusal: EPERM or ENOSYS by
// a container's filter of system calls, EINVAL by a kernel that has no such node, or that is older
// than 5.15 and takes no more than one.
int prefer_nodes(void* begin, uint64_t bytes, const std::vector<int>& nodes);

// True if somebody has given the calling thread a memory policy (numactl --membind, --interleave).
bool has_memory_policy();

}  // namespace ringcomm::host
