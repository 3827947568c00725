// SPDX-License-Identifier: Apache-2.0

// The heap that ranks of one process share.
#pragma once

#include <memory>

#include "kernels/host/comm.h"

namespace {

struct Allocation {
  ringcomm::host::Heap& heap;
  uint64_t offset;
  explicit Allocation(ringcomm::host::Heap& h, uint64_t bytes)
      : heap(h), offset(h.allocate(bytes, ringcomm::host::Heap::Purpose::kTensor)) {}
  ~Allocation() { heap.free(offset); }
  float* data() const { return reinterpret_cast<float*>(heap.base() + offset); }
};

ringcomm::host::PeerAddress address_of(const std::shared_ptr<ringcomm::host::Heap>& heap,
                                       const ringcomm::host::Comm& rank) {
  return {heap, heap->base(), heap->capacity_bytes(), rank.region_offset(), 0, rank.proof()};
}

}  // namespace
