// SPDX-License-Identifier: Apache-2.0

// Checks that a peer's header is safe to follow: it must point into that peer's heap, and at
// aligned elements, since a GPU faults at an unaligned element or vector.
#pragma once

#include "ringcomm/core/dtypes.h"
#include "ringcomm/protocol/view.h"

RINGCOMM_NAMESPACE_BEGIN

// Results are stored into a peer's heap as aligned vectors of this many bytes.
constexpr uint64_t kResultAlign = 16;

// The bytes that this rank stores into each sender's heap, at the offset in the sender's header.
// Most collectives store nothing.
struct Stores {
  uint64_t bytes = kNotInHeap;
};

// True if `bytes` at an untrusted offset are in the heap; 0 bytes may begin at the heap's very end.
RC_FN bool reachable(const View& v, int owner, uint64_t offset, uint64_t bytes, uint64_t align) {
  if (bytes == 0) return offset <= v.heap_bytes[owner];
  return v.in_heap_of(owner, offset, bytes) && (offset & (align - 1)) == 0;
}

RC_FN bool readable(const View& v, int sender, uint64_t offset, uint64_t bytes) {
  return reachable(v, sender, offset, bytes, uint64_t(size_of(DType(v.mine->id.dtype))));
}

RC_FN bool storable(const View& v, const Stores& stores, int sender, uint64_t offset) {
  if (stores.bytes == kNotInHeap || offset == kNotInHeap) return offset == stores.bytes;
  return reachable(v, sender, offset, stores.bytes, kResultAlign);
}

RINGCOMM_NAMESPACE_END
