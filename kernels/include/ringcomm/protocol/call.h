// SPDX-License-Identifier: Apache-2.0

// The description of a call: for its peers (CallHeader), and after a failure (Fault).
#pragma once

#include "ringcomm/core/team.h"
#include "ringcomm/protocol/layout.h"

RINGCOMM_NAMESPACE_BEGIN

enum class Collective : uint32_t {
  kNone,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kReceive,
  kReduceScatterNorm,
  kAdamWAllGather,
  kReduceScatterAdamWAllGather,
  kReduceScatterPartial,
  kReducePartial,
  kCount
};
enum class Algorithm : uint32_t {
  kAuto = 0,
  kOneShot = 1,
  kRing = 2,
  kLL = 3,
  kCopyEngine = 4,
  kMulticast = 5,
  kCount = 6
};

// The kernels that run a call. Their streams have one format, but may cut a buffer differently.
// kSliced: native kernels of a device that deal no tiles (core/tiles.h).
enum class Kernels : uint32_t { kNative = 0, kTriton = 1, kSliced = 2 };

constexpr uint64_t kNotInHeap = ~uint64_t(0);

// The part of a call that must be equal on all ranks.
struct CallId {
  uint64_t sequence;     // number of collectives of this communicator so far
  uint64_t match_bytes;  // total bytes if all ranks must agree on them, else 0
  Collective collective;
  int32_t dtype, redop, root;
  Algorithm algorithm;
  Kernels kernels = Kernels::kNative;
};
// No padding: LL packets carry headers, and compare them, word by word.
static_assert(sizeof(CallId) == 2 * sizeof(uint64_t) + 6 * sizeof(int32_t));

// Distinguishes a reduction of gradients from reductions of equal size, by the sharded module, its
// bucket, and the backward that made the gradients. Counts wrap around; a tag of 0 means no tag.
struct GradTag {
  static constexpr int kBucketBits = 10, kBackwardBits = 6, kModules = 127;
  int32_t module, backward, bucket;  // the module counts from 1

  static RC_FN GradTag of(int32_t tag) {
    const int32_t rest = tag >> kBucketBits;
    return {rest >> kBackwardBits, rest & ((1 << kBackwardBits) - 1),
            tag & ((1 << kBucketBits) - 1)};
  }
  RC_FN int32_t packed() const {
    const int32_t number = (module - 1) % kModules + 1;
    return ((number << kBackwardBits | (backward & ((1 << kBackwardBits) - 1))) << kBucketBits) |
           (bucket & ((1 << kBucketBits) - 1));
  }
};

// An optimizer's collective has no root. Its root field holds the dtype of its results and a packed
// GradTag.
struct ResultsAndTag {
  static constexpr int kDTypeBits = 8;
  int32_t results, tag;

  static RC_FN ResultsAndTag of_root(int32_t root) {
    return {root & ((1 << kDTypeBits) - 1), root >> kDTypeBits};
  }
  RC_FN int32_t as_root() const { return results | tag << kDTypeBits; }
};

RC_FN bool same_call(const CallId& a, const CallId& b) {
  // `&` and not `&&`: a peer's id is in remote memory, and `&` loads all its words at once.
  return (a.sequence == b.sequence) & (a.match_bytes == b.match_bytes) &
         (a.collective == b.collective) & (a.dtype == b.dtype) & (a.redop == b.redop) &
         (a.root == b.root) & (a.algorithm == b.algorithm) & (a.kernels == b.kernels);
}

// Published with the first item of a call on every stream.
struct CallHeader {
  CallId id;
  uint64_t stream_bytes;     // bytes that this stream carries to the reader in this call
  uint64_t item_bytes;       // bytes of one item (the last may have fewer)
  uint64_t heap_offset;      // zero copy: offset of the data in the sender's heap; else kNotInHeap
  double factor;             // PREMUL_SUM: the sender's factor
  uint64_t result_offset;    // offset of the reader's result in the sender's heap; else kNotInHeap
  uint64_t process_ptr = 0;  // single copy: address of the data in the sender's process; else 0
};
static_assert(sizeof(CallHeader) <= kHeaderBytes);

// The record of a wait that gave up. The waiting rank writes it once, before it sets its abort word
// to kRaised; every rank reads the record only after it has seen this value.
struct Fault {
  Status status;
  int32_t rank, peer;     // the reporting rank, and the rank on which it reports
  uint32_t wanted, seen;  // the awaited epoch and the epoch found
  uint32_t item;          // items of this call before the awaited item on its stream
  Stream stream;
  uint32_t on_consumed;  // the awaited word of the line: 1 consumed, 0 ready
  uint64_t waited_ns;
  CallHeader mine, theirs;  // theirs: filled for a mismatch
};

// "ringcomm" as a little-endian word: marks the beginning of a region.
constexpr uint64_t kRegionMagic = 0x6d6d6f63676e6972;
// The version of the protocol: increased with every change of the layout, header or words.
constexpr uint32_t kProtocolVersion = 6;

// The values of a raised abort word. kRaisedWithoutRecord: the thread that claimed the fault record
// did not complete it in time (hosts only), and may still be writing it, so nobody may read the
// record.
constexpr uint32_t kRaised = 1, kRaisedWithoutRecord = 2;

struct ControlPage {
  uint64_t magic;
  uint32_t version;
  int32_t rank, world;
  uint64_t proof;    // a random number; only a rank that has read this region can announce it
  uint64_t members;  // digest of all announcements that the owner has read; until then 0
  Layout layout;
  uint32_t fences_for_all;  // 1: Waiter::can_fence_for_all() is true in the owner's process
  uint32_t reads_peers;     // 1: the owner could read this page of every peer through the kernel
  uint64_t page_ptr;        // address of this page in the owner's process
  uint32_t claimed;         // taken by the only thread of the owner that may write the fault record
  uint32_t waits_for;       // 1 + the rank that the owner has awaited for a while; 0: none
  alignas(64) uint32_t aborted;  // 0 or a raised value; written by the owner, read by every peer
  uint32_t core;                 // 1 + the core on which the owner's thread was last seen; 0: none
  uint32_t left;                 // 1: the owner, a thread, makes no call until this is 0 again
  alignas(64) Fault fault;
  char reason[256];  // text of an explicit abort
};
static_assert(sizeof(ControlPage) <= kPageBytes);

RC_FN void begin_page(ControlPage* page, int32_t rank, const Layout& layout) {
  page->magic = kRegionMagic;
  page->version = kProtocolVersion;
  page->rank = rank;
  page->world = layout.world;
  page->layout = layout;
}

RINGCOMM_NAMESPACE_END
