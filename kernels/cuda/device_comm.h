// The owner of one rank's end of a communicator on a GPU: it turns calls into launches. What the
// kernels work on is RankTable (args.h). No method blocks; faults are read from the host page.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
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
  Algorithm family;      // what kAuto means for large messages: kOneShot or kRing
  int message_channels;  // blocks of a message; sends and receives of all ranks of a GPU must fit
};

struct Kernel {
  void* function = nullptr;
  unsigned threads = 0;      // of a block
  bool takes_lists = false;  // its parameters are ListParams, else LaunchParams
};

// A call that is ready to be launched.
struct Prepared {
  Kernel kernel;
  unsigned channels;
  CallArgs args;
  std::vector<Span> in, out;  // lists; empty for an even cut
  bool continues = false;     // one more launch of the call before it
  bool alone = false;         // waits for no peer, and is not recorded
  // Peers that take part in messages, a bit for each.
  uint64_t readers = ~uint64_t(0), senders = ~uint64_t(0);
  // Of a kernel of Triton's, which its DeviceComm keeps: it takes other parameters.
  const TritonKernel* triton = nullptr;
};

// Is told of the calls of a communicator as they are enqueued; with or without the GIL.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  // captured: a graph captured the call, and may replay it any number of times.
  virtual void enqueues(const Prepared& call, bool captured) = 0;
  // The call that it was told of last is not launched.
  virtual void withdraws() = 0;
};

struct Reduction {
  DType dtype;
  RedOp op;
  double factor;
  Algorithm algorithm;
};

// As kernels have it in their names; std::invalid_argument for other types than three floats.
const char* name_of_float(DType dtype);

class DeviceComm {
 public:
  // find: the CUfunction of a kernel, loaded for good, and the threads of its blocks.
  using FindKernel = std::function<std::pair<uint64_t, unsigned>(const std::string& unit,
                                                                 const std::string& name)>;

  DeviceComm(std::shared_ptr<const Driver> driver, const DeviceConfig& config, FindKernel find);

  // The region, with the table and the scratch memory of Triton kernels behind it.
  uint64_t region_bytes() const;
  uint64_t words_bytes() const { return config_.layout.staging_offset(); }
  uint64_t table_offset() const { return config_.layout.region_bytes(); }
  // The address of the table, once it is made.
  uint64_t table_address() const { return table_address_; }
  const Layout& layout() const { return config_.layout; }
  // The algorithm that a call runs where it is too large for LL, or has none.
  Algorithm chosen(Algorithm asked) const {
    return asked == Algorithm::kAuto ? config_.family : asked;
  }
  const DeviceConfig& config() const { return config_; }

  // Gives this rank a window (multicast.h) of `bytes` bytes, before table(): its address, and that
  // of all ranks' windows. False: it is too small.
  bool set_window(uint64_t own, uint64_t all, uint64_t bytes);
  // The bytes to write at table_offset() of this rank's region. Device addresses, by rank.
  std::string table(const std::vector<uint64_t>& regions, const std::vector<uint64_t>& heaps,
                    const std::vector<uint64_t>& heap_bytes, uint64_t host_page,
                    const std::vector<std::vector<int>>& rings);
  // The size of this rank's own heap as kernels know it: what lies beyond it is not lent to peers,
  // which may not have mapped it yet. Launches have it from here on; captured ones keep what they
  // have. For those without an inlined table it is to be written at own_heap_bytes_offset() of the
  // region, too. From any thread.
  void set_own_heap_bytes(uint64_t bytes) { own_heap_bytes_ = bytes; }
  uint64_t own_heap_bytes_offset() const {
    return table_offset() + offsetof(RankTable, heap_bytes) +
           sizeof(uint64_t) * uint64_t(config_.rank);
  }
  // From here on calls may be launched. host_page: as this process addresses it.
  void activate(HostPage* host_page) { page_ = host_page; }

  // captures: whether the stream is capturing, where the caller knows.
  void set_stream(void* stream, std::optional<bool> captures = std::nullopt) {
    stream_ = stream;
    captures_ = captures;
  }
  // Launches wait for those of other communicators, and are noted for them, under the number
  // `owner`. Messages are not: the ledger keeps blocks for them.
  void set_ledger(std::shared_ptr<LaunchLedger> ledger, uint64_t owner) {
    ledger_ = std::move(ledger);
    owner_ = owner;
  }
  // Takes over each launch of this communicator, which is prepared() meanwhile; null: nobody does.
  // For ranks that share a launch.
  using Submit = std::function<void()>;
  void set_submit(Submit submit) { submit_ = std::move(submit); }
  const Submit& submit_to() const { return submit_; }
  void* stream() const { return stream_; }
  void set_observer(std::shared_ptr<CallObserver> observer) { observer_ = std::move(observer); }
  // Equal on all ranks, before the first message.
  void limit_message_channels(int most) {
    config_.message_channels = most < config_.message_channels ? most : config_.message_channels;
  }
  void set_timeout_ns(uint64_t timeout_ns) { config_.timeout_ns = timeout_ns; }
  HostPage* page() const { return page_; }

  // A collective or a message only prepares its launches, of which most calls have one. The caller
  // then makes them, all at once or one by one:
  //
  //   comm.all_reduce(...);
  //   comm.launch_all();  // or: while (comm.next()) comm.launch_prepared();
  void all_reduce(char* in, char* out, uint64_t elems, const Reduction& r);
  void reduce(char* in, char* out, uint64_t elems, const Reduction& r, int root);
  void reduce_scatter(char* in, char* out, uint64_t out_elems, const Reduction& r);
  void reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r);
  void all_gather(char* in, char* out, uint64_t in_bytes, DType dtype, Algorithm algorithm);
  // By the copy engines, from where the peers' inputs lie: their addresses by rank, as this rank
  // reaches them. plan: a number that the ranks have agreed on, by which they find out that one of
  // them copies from other inputs.
  void all_gather_from(char* in, char* out, uint64_t in_bytes, DType dtype,
                       const std::vector<uint64_t>& inputs, int plan);
  void all_gather_list(char* in, const std::vector<Span>& out, DType dtype);
  void broadcast(char* buffer, uint64_t bytes, DType dtype, int root);
  void gather(char* in, uint64_t bytes, const std::vector<Span>& out, DType dtype, int root);
  void scatter(const std::vector<Span>& in, char* out, uint64_t bytes, DType dtype, int root);
  void all_to_all(const std::vector<Span>& in, const std::vector<Span>& out, DType dtype);
  void barrier();
  // One message at most to and from each peer; sizes of 0 bytes count, absent peers do not.
  void messages(const std::vector<Span>& send, uint64_t readers, const std::vector<Span>& receive,
                uint64_t senders, int tag);

  // The optimizer's: shards and tables are addresses of AdamWShard and AdamWTable on the device,
  // and what the host knows of a shard is its sizes. The first three have no peers and are launched
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
    NormWords* words;  // added to
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

  // Quantization, by kernels that have no peers and are launched at once. Quantized runs of `elems`
  // numbers begin at multiples of 4 bytes, or the kernels go byte by byte; of a sum they are
  // `stride_bytes` apart, and 0 divides by nothing.
  void quantize(QuantFormat format, char* in, DType dtype, char* out, uint64_t elems);
  struct QuantizedRuns {
    char* first;
    int count;
    uint64_t stride_bytes;
  };
  void dequantize_and_sum(QuantFormat format, const QuantizedRuns& runs, char* out, DType dtype,
                          uint64_t elems, int divide_by);

  // Rows that lie apart, in memory that is mapped here, by kernels that wait for no peer and are
  // launched at once; see RowsArgs, of which these find out how rows lie.
  void copy_rows(RowsArgs rows);
  void sum_rows(RowsArgs rows, DType dtype);
  void scale_rows(RowsArgs rows, DType dtype);

  // The collectives by kernels that Triton has compiled for such a call of one rank, to be launched
  // like the others. They throw std::invalid_argument of a call for which there is none.
  void add_triton(const CallId& call, std::shared_ptr<const TritonKernel> kernel);
  void triton_all_reduce(char* in, char* out, uint64_t elems, const Reduction& r);
  void triton_reduce_scatter(char* in, char* out, uint64_t out_elems, const Reduction& r);
  void triton_all_gather(char* in, char* out, uint64_t in_bytes, DType dtype, Algorithm algorithm);

  // While it lives calls are prepared and not made, those without peers among them.
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
  // Takes back the launch of the one call that was prepared; none if it has several, or copies.
  std::optional<Prepared> take_plan();
  // Prepares a planned launch again.
  void submit_plan(Prepared plan);

  // Makes the copies on the stream that come before the next launch, and makes that one prepared();
  // false: the call has no more.
  bool next();
  // Makes all launches of the call on stream(), without asking submit_to().
  void launch_all();
  // Makes the launch that next() gave, or those of ranks that share a launch, on the stream of the
  // first one.
  void launch_prepared() { launch_prepared({this}); }
  static void launch_prepared(const std::vector<DeviceComm*>& ranks);
  // The launch that next() gave is not made, and neither is what follows it in its call.
  void withdraw();
  const Prepared& prepared() const { return prepared_; }
  // next() gave a launch that was neither made nor withdrawn.
  bool is_prepared() const { return is_prepared_; }
  const std::shared_ptr<const Driver>& driver() const { return driver_; }
  // Launches the prepared calls of ranks on one device, all in one grid, on `stream`.
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
  // A part of a call that is still to come: a launch, or a copy by the copy engines before it.
  struct Pending {
    Prepared launch;
    uint64_t copy_to, copy_from, copy_bytes;  // 0 bytes: it is the launch
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
  void multicast(Prepared p, const Reduction& r);
  void submit_triton(CallArgs args);
  void launch_triton(void* stream);

  std::shared_ptr<const Driver> driver_;
  DeviceConfig config_;
  FindKernel find_;
  Submit submit_;
  std::shared_ptr<CallObserver> observer_;  // or none
  std::map<std::string, Kernel> kernels_;
  std::vector<std::pair<CallId, std::shared_ptr<const TritonKernel>>> triton_kernels_;
  std::vector<uint64_t> regions_;
  uint64_t table_address_ = 0;
  uint64_t window_ = 0, windows_ = 0, piece_bytes_ = 0;  // as in RankTable
  InlineTable inline_table_{};                           // world 0: it does not fit
  std::atomic<uint64_t> own_heap_bytes_{0};
  HostPage* page_ = nullptr;
  void* stream_ = nullptr;
  std::optional<bool> captures_;          // the stream, as far as is known
  std::shared_ptr<LaunchLedger> ledger_;  // or none
  uint64_t owner_ = 0;
  std::deque<Pending> pending_;
  Prepared prepared_{};
  bool is_prepared_ = false, only_prepares_ = false;
};

}  // namespace device
RINGCOMM_NAMESPACE_END
