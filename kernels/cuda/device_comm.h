// SPDX-License-Identifier: Apache-2.0

// One rank of a communicator on a GPU: turns calls into launches of kernels. The kernels read the
// rank's RankTable (args.h) in device memory. No method blocks. Kernels report faults in the
// HostPage (args.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/args.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/launch_ledger.h"
#include "kernels/cuda/triton_kernel.h"
#include "ringcomm/core/quantization.h"
#include "ringcomm/core/reduce.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

struct DeviceConfig {
  int rank, world;
  Layout layout;
  uint64_t timeout_ns;
  Algorithm family;      // the algorithm of kAuto for large messages: kOneShot or kRing
  int message_channels;  // blocks per message; the blocks of all messages on a GPU must fit on it
};

struct Kernel {
  void* function = nullptr;
  unsigned threads = 0;      // threads per block
  bool sliced = false;       // true: its channels get slices, else tiles (core/tiles.h)
  bool takes_lists = false;  // true: parameters are ListParams, else LaunchParams
};

// A call that is ready to be launched.
struct Prepared {
  Kernel kernel;
  unsigned channels;
  CallArgs args;
  std::vector<Span> in, out;  // the spans of lists; empty if the data are cut evenly
  bool continues = false;     // true: a later launch of the same call
  bool alone = false;         // true: waits for no peer, and is not recorded
  // Peers that receive messages from this rank, and peers that send to it; one bit per peer.
  uint64_t readers = ~uint64_t(0), senders = ~uint64_t(0);
  // If not null: a kernel of Triton that is launched in place of `kernel`; DeviceComm owns it.
  const TritonKernel* triton = nullptr;
};

// Observes the calls of a communicator as they are enqueued; called with or without the GIL.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  // captured: a graph captured the call, and may replay it any number of times.
  virtual void enqueues(const Prepared& call, bool captured) = 0;
  // Called if the last enqueued call is not launched after all.
  virtual void withdraws() = 0;
};

struct Reduction {
  DType dtype;
  RedOp op;
  double factor;
  Algorithm algorithm;
};

// Returns a type's name in kernel names; throws std::invalid_argument unless 16-bit or FP32.
const char* name_of_float(DType dtype);

class DeviceComm {
 public:
  // Returns a kernel's CUfunction, which stays loaded, its threads per block, and Kernel.sliced.
  using FindKernel = std::function<std::tuple<uint64_t, unsigned, bool>(const std::string& unit,
                                                                        const std::string& name)>;

  DeviceComm(std::shared_ptr<const Driver> driver, const DeviceConfig& config, FindKernel find);

  // Returns the size of the region with the table and Triton's scratch memory, which follow it.
  uint64_t region_bytes() const;
  uint64_t words_bytes() const { return config_.layout.staging_offset(); }
  uint64_t table_offset() const { return config_.layout.region_bytes(); }
  // Valid after table().
  uint64_t table_address() const { return table_address_; }
  const Layout& layout() const { return config_.layout; }
  // Returns the algorithm of a call that does not use LL.
  Algorithm chosen(Algorithm asked) const {
    return asked == Algorithm::kAuto ? config_.family : asked;
  }
  const DeviceConfig& config() const { return config_; }

  // A rank's window (multicast.h): the rank's own address, the multicast address of all windows,
  // the size of a window, and the multicast address of all ranks' heaps (0: heaps are not bound).
  struct Window {
    uint64_t own, all, bytes, heaps;
  };
  // Call it before table(). Returns false if the window is too small.
  bool set_window(const Window& window);
  // Sets how many bytes of this rank's heap, from its start, are bound to the multicast object.
  // A captured launch keeps the number that was set at its capture. Any thread may call this.
  void set_bound_heap_bytes(uint64_t bytes) { bound_heap_bytes_ = bytes; }
  // Returns the bytes to write at table_offset() of the region. All addresses are device addresses.
  std::string table(const std::vector<uint64_t>& regions, const std::vector<uint64_t>& heaps,
                    const std::vector<uint64_t>& heap_bytes, uint64_t host_page,
                    const std::vector<std::vector<int>>& rings);
  // Sets how many bytes of this rank's heap later launches may lend to peers: the part that all
  // peers have mapped. A captured launch keeps its number. For launches without an inlined table,
  // the caller also writes the number at own_heap_bytes_offset() of the region. Any thread may call
  // this.
  void set_own_heap_bytes(uint64_t bytes) { own_heap_bytes_ = bytes; }
  uint64_t own_heap_bytes_offset() const {
    return table_offset() + offsetof(RankTable, heap_bytes) +
           sizeof(uint64_t) * uint64_t(config_.rank);
  }
  // Allows launches from now on. host_page: the address of the host page in this process.
  void activate(HostPage* host_page) { page_ = host_page; }

  // captures: whether the stream is capturing; nullopt if the caller does not know.
  void set_stream(void* stream, std::optional<bool> captures = std::nullopt) {
    stream_ = stream;
    captures_ = captures;
  }
  // From now on, launches wait for the launches of other communicators in `ledger`, which records
  // them under `owner`. Launches of messages do neither, since the ledger reserves blocks for them.
  void set_ledger(std::shared_ptr<LaunchLedger> ledger, uint64_t owner) {
    ledger_ = std::move(ledger);
    owner_ = owner;
  }
  // A function that is called in place of each launch, so that ranks can share a launch. During the
  // call, prepared() returns the launch. Null: this class makes its launches itself.
  using Submit = std::function<void()>;
  void set_submit(Submit submit) { submit_ = std::move(submit); }
  const Submit& submit_to() const { return submit_; }
  void* stream() const { return stream_; }
  void set_observer(std::shared_ptr<CallObserver> observer) { observer_ = std::move(observer); }
  // Call it before the first message, with the same number on all ranks.
  void limit_message_channels(int most) {
    config_.message_channels = most < config_.message_channels ? most : config_.message_channels;
  }
  void set_timeout_ns(uint64_t timeout_ns) { config_.timeout_ns = timeout_ns; }
  HostPage* page() const { return page_; }

  // A collective or a message only prepares its launches; most calls have one launch. The caller
  // then makes the launches, all at once or one by one:
  //
  //   comm.all_reduce(...);
  //   comm.launch_all();  // or: while (comm.next()) comm.launch_prepared();
  void all_reduce(char* in, char* out, uint64_t elems, const Reduction& r);
  void reduce(char* in, char* out, uint64_t elems, const Reduction& r, int root);
  void reduce_scatter(char* in, char* out, uint64_t out_elems, const Reduction& r);
  void reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r);
  void all_gather(char* in, char* out, uint64_t in_bytes, DType dtype, Algorithm algorithm);
  // All-gather by the copy engines from the peers' inputs. inputs: addresses by rank, as mapped for
  // this rank. plan: a number that all ranks pass for this plan. If ranks pass different numbers,
  // and so would copy from the inputs of different plans, the kernels report a mismatch.
  void all_gather_from(char* in, char* out, uint64_t in_bytes, DType dtype,
                       const std::vector<uint64_t>& inputs, int plan);
  void all_gather_list(char* in, const std::vector<Span>& out, DType dtype);
  void broadcast(char* buffer, uint64_t bytes, DType dtype, int root);
  void gather(char* in, uint64_t bytes, const std::vector<Span>& out, DType dtype, int root);
  void scatter(const std::vector<Span>& in, char* out, uint64_t bytes, DType dtype, int root);
  void all_to_all(const std::vector<Span>& in, const std::vector<Span>& out, DType dtype);
  void barrier();
  // At most one message to and from each peer. A message may have 0 bytes; `readers` and `senders`
  // have a bit for each peer with a message.
  void messages(const std::vector<Span>& send, uint64_t readers, const std::vector<Span>& receive,
                uint64_t senders, int tag);

  // The optimizer's calls. Shards and tables are device addresses of AdamWShard and AdamWTable; the
  // host has only the sizes of a shard. The first three calls wait for no peers, and are launched
  // at once.
  struct ShardOf {
    uint64_t address;
    uint64_t bucket_elems, elems;
    DType param_dtype;
  };
  struct GradsOf {
    char* ptr;
    DType dtype;
    RedOp op;  // kSum or kAvg
    Algorithm algorithm;
    int32_t tag = 0;  // a packed GradTag
  };
  struct NormOf {
    NormWords* words;  // the norm is added to them
    NormKind kind;
    float* out;
    bool accumulate;
  };
  void prepare_adamw(uint64_t table);
  void adamw_shard(const ShardOf& shard, const GradsOf& grad);
  void grad_norm(const GradsOf& grad, uint64_t elems, const NormOf& norm);
  void reduce_scatter_norm(const GradsOf& grads, uint64_t bucket_elems, const NormOf& norm);
  void adamw_all_gather(const ShardOf& shard, const GradsOf& grad);
  void reduce_scatter_adamw_all_gather(const ShardOf& shard, const GradsOf& grads);

  // Quantization, by kernels that wait for no peers and are launched at once. The kernels are fast
  // if quantized runs of `elems` numbers begin at multiples of 4 bytes; else they access single
  // bytes. The runs of a sum are `stride_bytes` apart. divide_by 0: no division.
  void quantize(QuantFormat format, char* in, DType dtype, char* out, uint64_t elems);
  struct QuantizedRuns {
    char* first;
    int count;
    uint64_t stride_bytes;
  };
  void dequantize_and_sum(QuantFormat format, const QuantizedRuns& runs, char* out, DType dtype,
                          uint64_t elems, int divide_by);

  // Scattered rows in mapped memory, by kernels that wait for no peers and are launched at once.
  // These calls set has_words and has_vectors of RowsArgs themselves.
  void copy_rows(RowsArgs rows);
  void sum_rows(RowsArgs rows, DType dtype);
  void scale_rows(RowsArgs rows, DType dtype);

  // Collectives by Triton's kernels, each compiled for one kind of call of one rank; launched like
  // the others. They throw std::invalid_argument if this kind of call has no compiled kernel.
  void add_triton(const CallId& call, std::shared_ptr<const TritonKernel> kernel);
  void triton_all_reduce(char* in, char* out, uint64_t elems, const Reduction& r);
  void triton_reduce_scatter(char* in, char* out, uint64_t out_elems, const Reduction& r);
  void triton_all_gather(char* in, char* out, uint64_t in_bytes, DType dtype, Algorithm algorithm);

  // While an object of this class exists, all calls are only prepared, also calls without peers.
  class Preparing {
   public:
    explicit Preparing(DeviceComm& comm) : comm_(comm) { comm_.only_prepares_ = true; }
    ~Preparing() { comm_.only_prepares_ = false; }
    Preparing(const Preparing&) = delete;
    Preparing& operator=(const Preparing&) = delete;

   private:
    DeviceComm& comm_;
  };
  bool only_prepares() const { return only_prepares_; }
  // Returns and removes the prepared launch; nullopt if the call has several launches, or copies.
  std::optional<Prepared> take_plan();
  // Prepares a planned launch.
  void submit_plan(Prepared plan);

  // Enqueues the copies that precede the next launch, and prepares this launch, which prepared()
  // then returns. Returns false if the call has no more launches.
  bool next();
  // Makes all launches of the call on stream(); does not call submit_to().
  void launch_all();
  // Launches prepared(); for several ranks, all their prepared calls in one launch on the stream of
  // the first rank.
  void launch_prepared() { launch_prepared({this}); }
  static void launch_prepared(const std::vector<DeviceComm*>& ranks);
  // Drops the launch that next() prepared, and all later launches of its call.
  void withdraw();
  const Prepared& prepared() const { return prepared_; }
  // True if next() has prepared a launch that was neither made nor withdrawn.
  bool is_prepared() const { return is_prepared_; }
  const std::shared_ptr<const Driver>& driver() const { return driver_; }
  // Launches the prepared calls of ranks of one device in one grid, on `stream`.
  static void launch(const std::vector<DeviceComm*>& ranks, void* stream);

 private:
  static void write_calls(const std::vector<DeviceComm*>& ranks, LaunchParams& params);
  uint64_t table_bytes() const;
  uint64_t scratch_offset() const;
  void make_inline(const RankTable& table, const std::vector<std::vector<int>>& rings);
  CallArgs args_of(Collective collective, Algorithm algorithm, DType dtype, uint64_t match_bytes,
                   int root) const;
  Algorithm chosen_for(Algorithm asked, uint64_t payload_bytes, bool has_ll) const;
  unsigned channels_for(uint64_t bytes) const;
  void check_pieces(uint64_t chunk_bytes, unsigned channels) const;
  const Kernel& kernel(const std::string& unit, const std::string& name);
  const Kernel& reduction_kernel(const char* form, const Reduction& r);
  // A pending part of a call: a launch, or a copy by the copy engines before the next launch.
  struct Pending {
    Prepared launch;
    uint64_t copy_to, copy_from, copy_bytes;  // 0 bytes: the part is `launch`
  };
  bool captures();
  void submit(Prepared prepared);
  void submit_copy(uint64_t to, uint64_t from, uint64_t bytes);
  void launch_alone(const Kernel& kernel, uint64_t elems, const CallArgs& args);
  void launch_rows(const std::string& name, const RowsArgs& rows);
  struct OptimizerKernels {
    std::string one_shot, ring;
  };
  Prepared optimizer_call(Collective collective, const OptimizerKernels& names,
                          const GradsOf& grads, uint64_t bucket_elems, DType results);
  void adamw_step(Collective collective, const ShardOf& shard, const GradsOf& grads);
  void sync_for_copies(uint64_t total_bytes, DType dtype, int plan, bool continues);
  void copy_engine_all_gather(char* in, char* out, uint64_t in_bytes, DType dtype);
  bool is_bound(const CallArgs& args) const;
  void multicast(Prepared p, const Reduction& r);
  void submit_triton(CallArgs args);
  void launch_triton(void* stream);

  std::shared_ptr<const Driver> driver_;
  DeviceConfig config_;
  FindKernel find_;
  Submit submit_;
  std::shared_ptr<CallObserver> observer_;  // or null
  std::map<std::string, Kernel> kernels_;
  std::vector<std::pair<CallId, std::shared_ptr<const TritonKernel>>> triton_kernels_;
  std::vector<uint64_t> regions_;
  uint64_t table_address_ = 0;
  Window window_{};
  uint64_t piece_bytes_ = 0, heap_ = 0;  // as in RankTable; this rank's heap
  InlineTable inline_table_{};           // its world is 0 if the table does not fit
  // Written by the heap's thread, read by each launch; a launch may use the old or the new value.
  std::atomic<uint64_t> own_heap_bytes_{0}, bound_heap_bytes_{0};
  HostPage* page_ = nullptr;
  void* stream_ = nullptr;
  std::optional<bool> captures_;          // whether stream_ is capturing, if known
  std::shared_ptr<LaunchLedger> ledger_;  // the ledger, or null
  uint64_t owner_ = 0;
  std::deque<Pending> pending_;
  Prepared prepared_{};
  bool is_prepared_ = false, only_prepares_ = false;
};

}  // namespace device
RINGCOMM_NAMESPACE_END
