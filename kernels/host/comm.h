// SPDX-License-Identifier: Apache-2.0

// The communicator of one rank: it owns the rank's region of the heap and the view on which the
// templates work, and has one method per collective. All methods block; calls from several threads
// wait for each other.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/host/heap.h"
#include "kernels/host/optimizer_ops.h"
#include "kernels/host/recorder.h"
#include "kernels/host/single_copy.h"
#include "kernels/host/team.h"
#include "kernels/host/two_levels.h"
#include "kernels/host/worker_pool.h"
#include "ringcomm/collectives/all_reduce.h"
#include "ringcomm/collectives/exchange.h"

namespace ringcomm::host {

// The most channels of a rank: more threads gain no memory bandwidth, and each channel needs slots.
constexpr int kMostChannels = 64;

struct CommConfig {
  int rank, world;
  int slots;               // number of slots: a power of two, at least 2
  uint32_t segment_bytes;  // bytes of a segment, for which is_segment() is true
  uint64_t timeout_ns;
  uint32_t records;  // entries of the flight recorder; 0: no recorder
  std::string name;
  // The calls in which this rank lends its plain memory; null: ranks do not read each other's
  // process memory.
  std::optional<SingleCopyGain> single_copy = SingleCopyGain{true, true};
  int sum_group_size = 0;  // ranks per group of a sum in groups; 0: one sum in rank order
  int channels = 1;        // the largest number of a rank's threads in a collective
};

struct PeerAddress {
  std::shared_ptr<const void> owner;  // keeps the peer's heap mapped
  char* heap_base;                    // the heap's address in this process
  uint64_t heap_bytes;
  uint64_t region_offset;
  int pid;         // 0: a thread of this process
  uint64_t proof;  // the number that the peer announced; its region holds the same number
};

// A peer's announcement does not match the contents of its heap.
struct RegionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The arguments of a reduction except its buffers.
struct Reduction {
  DType dtype;
  RedOp op;
  double factor;
  Algorithm algorithm;
};

// Replaces kAuto by one-shot, which on the host is faster than the ring at every size and number of
// ranks.
inline Algorithm chosen(Algorithm asked) {
  return asked == Algorithm::kAuto ? Algorithm::kOneShot : asked;
}

// The gradients that a call reduces: of a bucket, or of one chunk of a bucket.
struct GradCall {
  char* ptr;
  DType dtype;
  RedOp op;  // kSum or kAvg; kSum for a chunk that is already reduced
  Algorithm algorithm;
  int32_t tag = 0;  // a packed GradTag
};

struct NormCall {
  float* out;       // the shard's gradients: [elements of this rank's chunk]
  bool accumulate;  // true: adds the reduction to `out`, and takes the norm of the new `out`
  NormKind kind;
  NormWords* words;     // overwritten with the norm words of this rank's chunk; null: no norm
  uint64_t step_bytes;  // gradient bytes of all buckets of the step; 0: only those of this call
};

// Calls that move at least this many bytes, or belong to a step that does, store their results past
// the caches. The limit is half of the 32 MiB of L3 that two Zen 4 ranks share, chosen without
// measurements. 32 MiB of FP32 sums take 3.7 ms past the caches and 4.7 ms through them.
constexpr uint64_t kStreamingMinBytes = 16 << 20;

// Reductions from this size on may run in two levels (two_levels.h), whose steps wait for each
// other. Not measured on several NUMA nodes, for lack of a machine. On one node (Zen 4, 4 ranks, 2
// busy cores, 3 rounds, FP32) 8 MiB took 0.8 to 3.7 times as long as in one level, and 64 MiB 0.8
// to 1.15 times.
constexpr uint64_t kLevelsMinBytes = 16 << 20;
// A test knob: sums in groups run in two levels at any size and on any machine.
inline bool always_in_levels = false;

// The fault of this communicator: the record of the rank where it began, and that rank's reason.
struct FaultReport {
  Fault fault;
  std::string reason;
};

class Comm {
 public:
  Comm(std::shared_ptr<Heap> heap, const CommConfig& config);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  uint64_t region_offset() const { return region_; }
  uint64_t region_bytes() const {
    return layout_.region_bytes() + Recorder::memory_bytes(recorder_.capacity());
  }
  // The region's handle must contain this number, which only readers of the region know.
  uint64_t proof() const { return view_.control(view_.rank)->proof; }
  // From this call on, peers may know this region, so its memory returns to the heap only after
  // they detach. Throws RegionError, naming the rank, before it writes to any region.
  void connect(const std::vector<PeerAddress>& peers);
  // Writes `members`, a digest of the handles of all ranks, into this region.
  void publish_members(uint64_t members);
  // Called when all peers are connected: afterwards this rank may write into their regions. Throws
  // RegionError unless all ranks published the same `members`.
  void activate();
  void close();

  Status all_reduce(const char* in, char* out, uint64_t elems, const Reduction& r);
  Status reduce(const char* in, char* out, uint64_t elems, const Reduction& r, int root);
  Status reduce_scatter(const char* in, char* out, uint64_t out_elems, const Reduction& r);
  Status reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r);
  // Like reduce_scatter_list and reduce, but with results of the accumulator's type, and without
  // the division of AVG.
  Status reduce_scatter_partial(const std::vector<Span>& in, char* out, const Reduction& r);
  Status reduce_partial(const char* in, char* out, uint64_t elems, const Reduction& r, int root);
  Status all_gather(const char* in, char* out, uint64_t in_bytes, DType dtype, Algorithm algorithm);
  Status all_gather_list(const char* in, const std::vector<Span>& out, DType dtype);
  Status broadcast(char* buffer, uint64_t bytes, DType dtype, int root);
  Status gather(const char* in, uint64_t bytes, const std::vector<Span>& out, DType dtype,
                int root);
  Status scatter(const std::vector<Span>& in, char* out, uint64_t bytes, DType dtype, int root);
  Status all_to_all(const std::vector<Span>& in, const std::vector<Span>& out, DType dtype);
  Status barrier();

  Status reduce_scatter_norm(const GradCall& grads, uint64_t bucket_elems, const NormCall& norm);
  // step_bytes: bytes of all parameters that the step updates; 0: those of this bucket alone.
  Status adamw_all_gather(const AdamWShard& shard, const GradCall& grad, uint64_t step_bytes = 0);
  Status reduce_scatter_adamw_all_gather(const AdamWShard& shard, const GradCall& grads,
                                         uint64_t step_bytes = 0);

  void abort(const std::string& reason);
  bool aborted() const;
  // True if a call of this rank has given up; in this case returns only once the abort word is
  // raised.
  bool has_failed() const;
  // Sets whether this rank has left: if so, threads of this process stop waiting for it.
  void set_left(bool left);
  // True if the peer has closed its communicator; it makes no more calls.
  bool has_closed(int peer) const;
  // Returns the rank for which this rank has waited for a while, or -1. A hint, without a lock.
  int awaited() const;
  // Returns a number that changes when a peer publishes to this rank or acknowledges: a hint.
  uint64_t arrivals() const;
  bool faulted(FaultReport* report) const;  // false: no fault
  void set_timeout_ns(uint64_t timeout_ns) { view_.timeout_ns = timeout_ns; }
  uint64_t timeout_ns() const { return view_.timeout_ns; }

  Recorder& recorder() { return recorder_; }
  // Records a call that another engine runs on this region, under the next sequence number.
  void record_begin(CallId id);
  void record_end(Status status);
  // Records a call that consists of the next calls on this region. Its sequence number precedes
  // theirs and is the same on all ranks. Returns this number; 0: the communicator is closed.
  uint64_t record_around(CallId id);
  void record_around_end(uint64_t number, Status status);
  // Returns the records of `rank` (see Recorder::snapshot()), after a header with the layout, rank
  // and world that this rank knows; empty if nothing is recorded or the rank is not connected.
  std::vector<char> recorded(int rank, uint32_t most) const;

  const View& view() const { return view_; }
  int sum_group_size() const { return sum_group_size_; }
  const Waiter& waiter() const { return waiter_; }
  bool connected() const { return connected_; }
  // Called before activate(). `channels`: the channels of large calls, equal on all ranks, at most
  // the number in the layout. `most`, `is_exact`: see ThreadShare; `is_crowded`: the ranks have
  // more threads than the machine has cores. Throws as start_workers() does.
  void use_threads(int most, bool is_exact, int channels, bool is_crowded);
  // Makes sums run in two levels, one NUMA node per group. Before activate(), on all ranks or none.
  void sum_in_levels() { levels_ = true; }
  bool sums_in_levels() const { return levels_; }
  int threads() const { return threads_ ? threads_->threads() : 1; }
  int used_channels() const { return used_channels_; }

 private:
  template <class Body>
  Status run(CallId id, uint64_t total_bytes, Body body);  // for a call that only moves data
  template <class Body>
  Status run_reduction(CallId id, const Reduction& r, uint64_t total_bytes, Body body);
  // Runs a reduce-scatter in two levels, or an all-reduce if `gathers`; see worth_levels().
  Status run_levels(CallId id, const Reduction& r, const Chunks& in, char* out, bool gathers);
  bool worth_levels(const Reduction& r, uint64_t bytes) const;
  Status run_partial(CallId id, const Reduction& r, const Chunks& in, char* out, int root);
  template <class Ops, class Body>
  Status run_with(CallId id, uint64_t bytes, double factor, Ops ops, Body body);
  // Runs `body` on a given number of channels; `body` itself divides the bytes among them.
  template <class Ops, class Body>
  Status run_divided(int channels, CallId id, uint64_t bytes, Ops ops, Body body);
  template <class Ops, class Body>
  Status run_on(int channels, bool cuts, CallId id, uint64_t bytes, double factor, const Ops& ops,
                const Body& body);
  template <class Ops, class Body>
  Status run_channels(int channels, bool cuts, uint64_t bytes, const CallHeader& call,
                      const Ops& ops, const Body& body);
  template <class Team, class Ops, class Body>
  Status run_channel(Team team, const CallHeader& call, Ops ops, const Body& body);
  // Fails the call if a signal handler raised an exception while the call waited for its workers.
  void look_for_interrupt();
  template <class Body>
  Status run_update(CallId id, const AdamWShard& shard, const GradCall& grads, uint64_t step_bytes,
                    Body body);
  HostOps ops_for(ReduceFn fn, uint64_t total_bytes) {
    return {&kernels(), fn, total_bytes >= kStreamingMinBytes, &channels_[0].store_path};
  }
  HostOps reduction_ops(const Reduction& r, DType results, uint64_t total_bytes,
                        GroupedSum* groups);
  // Throws std::invalid_argument for a ring of partial sums where sums are taken in groups.
  void check_order(Algorithm algorithm) const;
  bool reads_peers() const;
  // Returns a view in which only this rank's region may be read; `regions` holds its pointers.
  View own_region(std::vector<char*>* regions) const;
  // Called before a call ends with `status`: after a failure, waits until the abort word is raised.
  void settle(Status status) const;
  // Waits until the abort word is raised, outside of a call.
  void await_own_word() const;
  void detach();
  const char* recorder_of(int rank) const { return regions_[rank] + layout_.region_bytes(); }
  const CallHeader* other_call(const CallId& mine, int peer);

  std::shared_ptr<Heap> heap_;
  Layout layout_;
  uint64_t region_;
  std::vector<char*> regions_, heaps_;
  std::vector<uint64_t> heap_bytes_;
  std::vector<std::shared_ptr<const void>> owners_;
  std::vector<Channel> channels_;  // channels of the region
  std::vector<uint64_t> held_;     // allocations in which peers of a failed call may still store
  std::optional<ThreadShare> threads_;
  int used_channels_ = 1;
  bool is_crowded_ = false;
  Waiter waiter_;
  Recorder recorder_;
  uint64_t outside_call_ = 0;  // the sequence number of record_begin()'s call
  View view_;                  // the view of channel 0
  std::mutex mutex_;
  std::optional<SingleCopyGain> single_copy_;
  bool connected_ = false;
  int sum_group_size_;
  bool levels_ = false;
};

// The number of channels follows from the call's bytes, not from threads, so all ranks agree on it.
template <class Ops, class Body>
Status Comm::run_with(CallId id, uint64_t bytes, double factor, Ops ops, Body body) {
  return run_on(used_channels_ == 1 ? 1 : threads_for(bytes, used_channels_), true, id, bytes,
                factor, ops, body);
}

template <class Ops, class Body>
Status Comm::run_divided(int channels, CallId id, uint64_t bytes, Ops ops, Body body) {
  return run_on(channels, false, id, bytes, 1.0, ops, body);
}

template <class Ops, class Body>
Status Comm::run_on(int channels, bool cuts, CallId id, uint64_t bytes, double factor,
                    const Ops& ops, const Body& body) {
  const std::lock_guard lock(mutex_);
  if (!connected_ || aborted()) return Status::kAborted;
  id.sequence = ++view_.channel_line(0)->sequence;
  HostTeam::tell_core(view_);
  const CallHeader call{id, 0, 0, kNotInHeap, factor, kNotInHeap};
  recorder_.begin(Track::kCollectives, id, bytes, -1);
  const Status status = channels == 1 ? run_channel(SoloTeam{{&waiter_}}, call, ops, body)
                                      : run_channels(channels, cuts, bytes, call, ops, body);
  settle(status);
  recorder_.end(Track::kCollectives, id.sequence, status, awaited());
  return status;
}

template <class Team, class Ops, class Body>
Status Comm::run_channel(Team team, const CallHeader& call, Ops ops, const Body& body) {
  Channel& channel = channels_[size_t(team.channel())];
  channel.mine = call;
  channel.view.timeout_ns = view_.timeout_ns;
  Endpoint<Team, Ops> e{team, channel.view, ops};
  e.begin_streams();
  Status status = e.verify_streams();
  if (status == Status::kOk) status = body(e);
  if (status == Status::kOk) status = e.verify_peer_buffers();
  return status;
}

// See NOTE [Threads of a rank].
template <class Ops, class Body>
Status Comm::run_channels(int channels, bool cuts, uint64_t bytes, const CallHeader& call,
                          const Ops& ops, const Body& body) {
  struct Call {
    Comm* comm;
    int channels;
    bool cuts;
    const CallHeader& header;
    const Ops& ops;
    const Body& body;
    std::vector<Status> statuses;
  } all{this, channels, cuts, call, ops, body, std::vector<Status>(size_t(channels), Status::kOk)};
  const auto run = [](const void* of, int i) {
    auto& c = *static_cast<Call*>(const_cast<void*>(of));
    Channel& channel = c.comm->channels_[size_t(i)];
    const ChannelTeam team{{{&c.comm->waiter_}}, i, c.channels, c.cuts};
    c.statuses[size_t(i)] = c.comm->run_channel(team, c.header, c.ops.on(channel), c.body);
  };
  const auto waiting = [](const void* of) {
    static_cast<const Call*>(of)->comm->look_for_interrupt();
  };
  // Several ranks copy and read the bytes, a single rank only copies them.
  const uint64_t moved = bytes * (view_.world > 1 ? 2 : 1);
  run_tasks(Tasks{run, &all, channels, moved, is_crowded_, waiting}, threads());
  // A channel that fails aborts the others, so their status kAborted is not the reason.
  Status status = Status::kOk;
  for (const Status each : all.statuses)
    if (status == Status::kOk || status == Status::kAborted)
      status = each == Status::kOk ? status : each;
  return status;
}

// Returns the default size of a staging segment for a world.
uint32_t default_segment_bytes(int world, int channels);

}  // namespace ringcomm::host
