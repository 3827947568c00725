// SPDX-License-Identifier: Apache-2.0

// The arguments of a launch: one call per rank that takes part in the launch. They are passed by
// value, so that a captured graph replays them. Everything that changes between replays (sequence
// numbers, epochs) is in device memory. The host writes these structs, the kernels read them.
#pragma once

#include "ringcomm/collectives/exchange.h"
#include "ringcomm/optimizer/grad_norm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Ranks of one process on one GPU share a launch, so that they are co-resident by construction.
constexpr int kMaxRanksPerLaunch = 8;
constexpr int kMaxWorld = 64;

// Host memory that the device can access: it connects a rank's host and kernels while these run.
struct HostPage {
  uint32_t abort_requested;              // host to device: give up
  uint32_t fault_raised;                 // device to host: `fault` is complete
  alignas(64) uint32_t lost[kMaxWorld];  // host to device: 1 if the rank's process has ended
  alignas(64) Fault fault;
};

// A rank's addresses, fixed for a communicator's life. In device memory the table is in the rank's
// region, at DeviceComm::table_offset().
struct RankTable {
  int32_t rank, world, rings;
  Layout layout;
  HostPage* host;  // the page's device address
  char* scratch;   // scratch memory for Triton kernels, scratch_bytes() per channel
  char* regions[kMaxWorld];
  char* heaps[kMaxWorld];
  // For a peer: the most bytes that its heap may have. For this rank: the bytes of its heap that
  // all peers have mapped; when the heap has grown, the host writes a larger number, even while
  // kernels run. Each block reads it once.
  uint64_t heap_bytes[kMaxWorld];
  // For algorithm kMulticast (multicast.h): the addresses of this rank's window, of all ranks'
  // windows and of all ranks' heaps, and the bytes of a slot per rank; null and 0 without a window.
  char* window;
  char* windows;
  char* heap_windows;  // null: heaps are not bound
  uint64_t piece_bytes;
};

// The rings follow the table: int32_t [rings][world], the rank at each position.
RC_FN const int32_t* rings_of(const RankTable* table) {
  return reinterpret_cast<const int32_t*>(table + 1);
}

// A rank's table in the launch parameters, where a kernel reads it without a load from memory. Only
// launches of one rank have it, in worlds of up to kInlineWorld ranks whose rings fit.
constexpr int kInlineWorld = 8, kInlineRingBytes = 312;
struct InlineTable {
  int32_t rank, world, rings;
  Layout layout;
  HostPage* host;
  char* regions[kInlineWorld];
  char* heaps[kInlineWorld];
  uint64_t heap_bytes[kInlineWorld];
  uint8_t order[kInlineRingBytes];  // [rings][world], the rank at each position
};

// The state of a call that a Triton kernel keeps per channel, since Triton has no named shared
// memory: 32 words of 8 bytes, and 9 more per rank. kernels/tl/state.py names the words.
constexpr uint64_t kScratchWords = 32, kScratchWordsPerRank = 9;
RC_FN constexpr uint64_t scratch_bytes(int32_t world) {
  return 8 * (kScratchWords + kScratchWordsPerRank * uint64_t(world));
}

// One rank's part of a collective. The calls of kMaxRanksPerLaunch ranks take no more space than
// one call and its table.
struct CallArgs {
  const RankTable* table;
  char* in;
  char* out;
  uint64_t total_bytes;
  union {
    uint64_t chunk_bytes;  // per chunk, if evenly cut; or from one quantized run to the next
    // Arguments of the optimizer, in device memory:
    const void* update;  // an AdamWShard or an AdamWTable
    NormWords* words;    // the words to which the norm is added
  };
  uint64_t match_bytes;
  uint64_t timeout_ns;
  union {
    double factor;  // the factor of a reduction's inputs
    struct {        // the inputs of a sum of quantized runs
      int32_t count;
      int32_t divide_by;  // 0: no division
    } runs;
  };
  Collective collective : 8;
  Algorithm algorithm : 8;
  int32_t dtype : 8, redop : 8;
  int32_t root;
  int32_t norm : 8;     // a NormKind
  bool accumulate : 1;  // true: add the result to `out`
  bool inlined : 1;     // true: the launch carries the table
  bool bound : 1;       // true: the buffer is bound to the multicast object (multicast.h)
  bool sliced : 1;      // true: channels get slices of each chunk; else tiles (core/tiles.h)
};
static_assert(sizeof(CallArgs) == 80);

// A launch that reads scattered rows (row_lanes.h). Entry i begins at entries + i * entry_words and
// is a pair (rank, row): row i is row entry[1] at bases[entry[0]]. A negative entry[0] means "no
// row". The results are [count] rows of `row_bytes` each.
struct RowsArgs {
  const int64_t* entries;
  uint64_t entry_words;
  uint64_t count, k;  // a sum has count * k entries
  uint64_t row_bytes;
  const float* weights;  // a weight per entry; null: no weights
  const char* with;      // the [count] rows of a scalar product
  char* out;
  float* dots;       // [count] scalar products
  bool has_words;    // true: rows are 1 or 2 words of 4 bytes, at multiples of 4
  bool has_vectors;  // true: rows are whole vectors of 16 bytes, at multiples of 16
  const char* bases[kMaxWorld];
};

// The parameters of a kernel, few because the driver copies all of them at each launch.
struct LaunchParams {
  union {
    CallArgs calls[kMaxRanksPerLaunch];
    RowsArgs rows;
    struct {
      CallArgs call;
      InlineTable table;  // if call.inlined
    } alone;
  };
};
static_assert(sizeof(LaunchParams) <= 640);

// Indices of a rank's first input and output span (-1: evenly cut), and bit masks of the peers in
// its messages.
struct ListArgs {
  int32_t in, out;
  uint64_t readers, senders;
};
// The parameters of a kernel that takes lists (all_gather into tensors of several sizes,
// all-to-all, gather, scatter, messages). The ranks of a launch share the array of spans.
constexpr int kMaxSpans = 200;
struct ListParams : LaunchParams {
  ListArgs lists[kMaxRanksPerLaunch];
  Span spans[kMaxSpans];
};
static_assert(sizeof(ListParams) <= 4096);  // the limit of a launch on every architecture

}  // namespace device
RINGCOMM_NAMESPACE_END
