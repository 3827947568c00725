// The arguments of a launch: one call for each rank that takes part in it, by value, so that a
// captured graph replays it. Everything that changes from replay to replay (sequence numbers,
// epochs) is in device memory. Read by the host that launches and by the kernels.
#pragma once

#include "ringcomm/collectives/exchange.h"
#include "ringcomm/optimizer/grad_norm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// Ranks of one process on one GPU share a launch, so that they are co-resident by construction.
constexpr int kMaxRanksPerLaunch = 8;
constexpr int kMaxWorld = 64;

// Host memory that the device can reach: how the two sides of one rank talk while kernels run.
struct HostPage {
  uint32_t abort_requested;              // host to device: give up
  uint32_t fault_raised;                 // device to host: `fault` is complete
  alignas(64) uint32_t lost[kMaxWorld];  // host to device: 1, that rank's process has ended
  alignas(64) Fault fault;
};

// Constant while a communicator lives; in device memory, in the rank's region behind the words.
struct RankTable {
  int32_t rank, world, rings;
  Layout layout;
  HostPage* host;  // as the device addresses it
  char* scratch;   // of the Triton kernels: scratch_bytes() per channel
  char* regions[kMaxWorld];
  char* heaps[kMaxWorld];
  // The sizes that peers' heaps may have, and of this rank's own what all peers have mapped: the
  // host writes a larger one when the heap has grown, even while kernels run, each block of which
  // reads it once.
  uint64_t heap_bytes[kMaxWorld];
  // Of algorithm kMulticast (multicast.h): this rank's window, at its own address and at that of
  // all ranks' windows, and the bytes of a slot that one rank owns; null and 0 without a window.
  char* window;
  char* windows;
  uint64_t piece_bytes;
};

// Rings follow the table: int32_t [rings][world], rank by position.
RC_FN const int32_t* rings_of(const RankTable* table) {
  return reinterpret_cast<const int32_t*>(table + 1);
}

// The same again in the parameters of a launch of one rank, which are there before a load of the
// table could be: for worlds of up to kInlineWorld ranks whose rings fit.
constexpr int kInlineWorld = 8, kInlineRingBytes = 312;
struct InlineTable {
  int32_t rank, world, rings;
  Layout layout;
  HostPage* host;
  char* regions[kInlineWorld];
  char* heaps[kInlineWorld];
  uint64_t heap_bytes[kInlineWorld];
  uint8_t order[kInlineRingBytes];  // [rings][world], rank by position
};

// The state of a call that a Triton kernel keeps per channel, since its blocks have no shared
// memory by name: 32 words of 8 bytes, and 9 more per rank. kernels/tl/state.py names them.
constexpr uint64_t kScratchWords = 32, kScratchWordsPerRank = 9;
RC_FN constexpr uint64_t scratch_bytes(int32_t world) {
  return 8 * (kScratchWords + kScratchWordsPerRank * uint64_t(world));
}

// One rank's part of a collective. It is so small that the calls of kMaxRanksPerLaunch ranks take
// no more room than one call and its table.
struct CallArgs {
  const RankTable* table;
  char* in;
  char* out;
  uint64_t total_bytes;
  union {
    uint64_t chunk_bytes;  // of an even cut (schedule.h, Chunks), or between quantized runs
    // The optimizer's; in device memory.
    const void* update;  // AdamWShard or AdamWTable
    NormWords* words;    // added to
  };
  uint64_t match_bytes;
  uint64_t timeout_ns;
  union {
    double factor;  // of a reduction's inputs
    struct {        // of a sum of quantized runs
      int32_t count;
      int32_t divide_by;  // 0: nothing
    } runs;
  };
  Collective collective : 8;
  Algorithm algorithm : 8;
  int32_t dtype : 8, redop : 8;
  int32_t root;
  int32_t norm : 8;     // NormKind
  bool accumulate : 1;  // `out` is added to
  bool inlined : 1;     // the launch carries the table, too
};
static_assert(sizeof(CallArgs) == 80);

// A launch that reads rows which lie apart (row_lanes.h). Row i is row entry[1] of those at
// bases[entry[0]], of the entry at entries + i * entry_words; a negative entry[0] means that there
// is none. Results are [count] rows of `row_bytes`, too.
struct RowsArgs {
  const int64_t* entries;
  uint64_t entry_words;
  uint64_t count, k;  // of a sum count k entries
  uint64_t row_bytes;
  const float* weights;  // by entry; null: none
  const char* with;      // [count] rows, of a scalar product
  char* out;
  float* dots;       // [count]
  bool has_words;    // rows are one word of 4 bytes or two, at multiples of 4
  bool has_vectors;  // rows are vectors of 16 bytes, at multiples of 16
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

// Where a rank's lists begin among the spans (-1: an even cut), and which peers take part in its
// messages, a bit for each.
struct ListArgs {
  int32_t in, out;
  uint64_t readers, senders;
};
// The parameters of a kernel that takes lists (all_gather into tensors of several sizes,
// all-to-all, gather, scatter, messages); the ranks of a launch share the spans.
constexpr int kMaxSpans = 200;
struct ListParams : LaunchParams {
  ListArgs lists[kMaxRanksPerLaunch];
  Span spans[kMaxSpans];
};
static_assert(sizeof(ListParams) <= 4096);  // what a launch may carry on every architecture

}  // namespace device
RINGCOMM_NAMESPACE_END
