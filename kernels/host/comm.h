// The owner of one rank's end of a communicator: its region of the heap, the view that the
// templates work on, and one method per collective. All methods block; calls from several threads
// queue up.
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
#include "kernels/host/team.h"
#include "kernels/host/two_levels.h"
#include "kernels/host/worker_pool.h"
#include "ringcomm/collectives/all_reduce.h"
#include "ringcomm/collectives/exchange.h"

namespace ringcomm::host {

// Threads of a rank beyond these find no memory bandwidth left, and each channel has slots.
constexpr int kMostChannels = 64;

struct CommConfig {
  int rank, world;
  int slots;               // a power of two, at least 2
  uint32_t segment_bytes;  // is_segment()
  uint64_t timeout_ns;
  uint32_t records;  // of the flight recorder; 0: none
  std::string name;
  bool single_copy = true;  // false: ranks do not read each other's processes
  int sum_group_size = 0;   // ranks of a group in which reductions are made; 0: all in rank order
  int channels = 1;         // the most threads of a rank that take part in a collective
};

struct PeerAddress {
  std::shared_ptr<const void> owner;  // keeps the peer's heap mapped
  char* heap_base;                    // as mapped here
  uint64_t heap_bytes;
  uint64_t region_offset;
  int pid;         // 0: a thread of this process
  uint64_t proof;  // what the peer announced; it stands in its region, too
};

// A peer announced something other than what lies in its heap.
struct RegionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The arguments of a reduction beside its buffers.
struct Reduction {
  DType dtype;
  RedOp op;
  double factor;
  Algorithm algorithm;
};

// The algorithm that a call runs. The host has a table of one row: one-shot is the faster of the
// two at every size and world.
inline Algorithm chosen(Algorithm asked) {
  return asked == Algorithm::kAuto ? Algorithm::kOneShot : asked;
}

// Gradients of a bucket, or of one chunk of it.
struct GradCall {
  char* ptr;
  DType dtype;
  RedOp op;  // kSum or kAvg; of a chunk that is reduced already: kSum
  Algorithm algorithm;
  int32_t tag = 0;  // a packed GradTag
};

struct NormCall {
  float* out;       // [elements of this rank's chunk]
  bool accumulate;  // out += the reduction, and the norm is that of the result
  NormKind kind;
  NormWords* words;     // overwritten: of this rank's chunk; null: no norm
  uint64_t step_bytes;  // gradients that the step reduces in all its buckets; 0: these
};

// Calls that move at least this much, or belong to a step that does, store their results past the
// caches. Half of the 32 MiB of L3 that two Zen 4 ranks share: a choice, not swept. 32 MiB of FP32
// sums take 3.7 ms past the caches and 4.7 ms through them.
constexpr uint64_t kStreamingMinBytes = 16 << 20;

// Reductions of at least this much may be made in two levels, whose steps wait for each other. A
// choice: no machine of several nodes was at hand. On one node (Zen 4, 4 ranks on 2 busy cores, 3
// rounds) 8 MiB in FP32 took 0.8 to 3.7 times as long as in one level, and 64 MiB 0.8 to 1.15.
constexpr uint64_t kLevelsMinBytes = 16 << 20;
// A test knob: sums in groups are made in two levels however small, and on any machine.
inline bool always_in_levels = false;

// The fault of this communicator, of the rank where it began, and the reason that it gave.
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
  // A number that this region's handle must repeat; only who can read the region knows it.
  uint64_t proof() const { return view_.control(view_.rank)->proof; }
  // Peers know this region from here on; it returns to the heap only once they detach.
  // Throws RegionError, naming the rank, before any region is written to.
  void connect(const std::vector<PeerAddress>& peers);
  // Writes into this region the members that this rank knows: a digest of all handles.
  void publish_members(uint64_t members);
  // All peers are connected: from here on this rank may write into their regions. Throws
  // RegionError unless all of them know the same members.
  void activate();
  void close();

  Status all_reduce(const char* in, char* out, uint64_t elems, const Reduction& r);
  Status reduce(const char* in, char* out, uint64_t elems, const Reduction& r, int root);
  Status reduce_scatter(const char* in, char* out, uint64_t out_elems, const Reduction& r);
  Status reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r);
  // As reduce_scatter_list and reduce, but results are of the accumulator's type, and unfinished: a
  // sum that AVG would divide.
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
  // step_bytes: parameters that the step updates in all its buckets, where it has several.
  Status adamw_all_gather(const AdamWShard& shard, const GradCall& grad, uint64_t step_bytes = 0);
  Status reduce_scatter_adamw_all_gather(const AdamWShard& shard, const GradCall& grads,
                                         uint64_t step_bytes = 0);

  void abort(const std::string& reason);
  bool aborted() const;
  // Ends, or does not end, the waits of ranks that are threads of this process for this one.
  void set_left(bool left);
  // The peer has closed its end: it makes no call any more.
  bool has_closed(int peer) const;
  // Only hints, at any time. The rank that this one has waited for, for a while; -1: none.
  int awaited() const;
  // A number that changes when a peer publishes something to this rank, or acknowledges.
  uint64_t arrivals() const;
  bool faulted(FaultReport* report) const;  // false: no fault
  void set_timeout_ns(uint64_t timeout_ns) { view_.timeout_ns = timeout_ns; }
  uint64_t timeout_ns() const { return view_.timeout_ns; }

  Recorder& recorder() { return recorder_; }
  // A call that another engine runs on this region: the rest of its CallId; its number is the next.
  void record_begin(CallId id);
  void record_end(Status status);
  // A call that is made of the next ones on this region: it takes a number before them,
  // on all ranks alike. Returns it; 0: the communicator is closed.
  uint64_t record_around(CallId id);
  void record_around_end(uint64_t number, Status status);
  // The records of `rank` (see Recorder::snapshot()) under a header with the layout, the rank and
  // the world as this rank knows them; empty: nothing is recorded, or it is not connected.
  std::vector<char> recorded(int rank, uint32_t most) const;

  const View& view() const { return view_; }
  int sum_group_size() const { return sum_group_size_; }
  const Waiter& waiter() const { return waiter_; }
  bool connected() const { return connected_; }
  // Before activate(). `channels`, equal on all ranks: those that large calls use, 1 to those that
  // the region has. `most` and `is_exact` as of ThreadShare; `is_crowded`: the ranks have more
  // threads than cores. Throws as start_workers().
  void use_threads(int most, bool is_exact, int channels, bool is_crowded);
  // Before activate(), on all ranks or none: the groups of sums lie on different NUMA nodes.
  void sum_in_levels() { levels_ = true; }
  bool sums_in_levels() const { return levels_; }
  int threads() const { return threads_ ? threads_->threads() : 1; }
  int used_channels() const { return used_channels_; }

 private:
  template <class Body>
  Status run(CallId id, uint64_t total_bytes, Body body);  // of a call that only moves data
  template <class Body>
  Status run_reduction(CallId id, const Reduction& r, uint64_t total_bytes, Body body);
  // A reduce-scatter, or with `gathers` an all-reduce, in two levels; see worth_levels().
  Status run_levels(CallId id, const Reduction& r, const Chunks& in, char* out, bool gathers);
  bool worth_levels(const Reduction& r, uint64_t bytes) const;
  Status run_partial(CallId id, const Reduction& r, const Chunks& in, char* out, int root);
  template <class Ops, class Body>
  Status run_with(CallId id, uint64_t bytes, double factor, Ops ops, Body body);
  // With a number of channels, among which `body` divides the bytes by itself.
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
  // Fails the call where a signal handler raised while its workers were waited for.
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
  // A view of which only this rank's own region may be read; `regions` holds what it needs.
  View own_region(std::vector<char*>* regions) const;
  // Before a call ends with `status`.
  void settle(Status status) const;
  void detach();
  const char* recorder_of(int rank) const { return regions_[rank] + layout_.region_bytes(); }
  const CallHeader* other_call(const CallId& mine, int peer);

  std::shared_ptr<Heap> heap_;
  Layout layout_;
  uint64_t region_;
  std::vector<char*> regions_, heaps_;
  std::vector<uint64_t> heap_bytes_;
  std::vector<std::shared_ptr<const void>> owners_;
  std::vector<Channel> channels_;  // of the region
  std::vector<uint64_t> held_;     // allocations in which peers of a failed call may still store
  std::optional<ThreadShare> threads_;
  int used_channels_ = 1;
  bool is_crowded_ = false;
  Waiter waiter_;
  Recorder recorder_;
  uint64_t outside_call_ = 0;  // the number of record_begin()'s call
  View view_;                  // that of channel 0
  std::mutex mutex_;
  bool single_copy_, connected_ = false;
  int sum_group_size_;
  bool levels_ = false;
};

// Every rank finds the same number of channels: all know the bytes, and none its peers' threads.
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
  // Between ranks bytes are copied and read, alone only copied.
  const uint64_t moved = bytes * (view_.world > 1 ? 2 : 1);
  run_tasks(Tasks{run, &all, channels, moved, is_crowded_, waiting}, threads());
  // A channel that fails aborts the others: what they say is not the reason.
  Status status = Status::kOk;
  for (const Status each : all.statuses)
    if (status == Status::kOk || status == Status::kAborted)
      status = each == Status::kOk ? status : each;
  return status;
}

// The staging segment that suits a world, if the user names none.
uint32_t default_segment_bytes(int world, int channels);

}  // namespace ringcomm::host
