// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/device_comm.h"

#include <algorithm>
#include <cstring>
#include <utility>

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

// Blocks that move fewer bytes spend most of their time on signals. Chosen without measurements.
constexpr uint64_t kMinChannelBytes = 32 << 10;

// The most bytes that one rank sends by LL. LL sends every byte twice, which costs large messages
// more time than LL's fewer synchronizations save. Chosen without measurements.
constexpr uint64_t kMaxLLTrafficBytes = 256 << 10;

// The most items of a call on a stream: their numbers have 32 bits and are compared modulo 2^32.
constexpr uint64_t kMaxItems = uint64_t(1) << 30;

const char* op_name(RedOp op) {
  switch (op) {
    case RedOp::kProduct:
      return "product";
    case RedOp::kMin:
      return "min";
    case RedOp::kMax:
      return "max";
    case RedOp::kBand:
      return "band";
    case RedOp::kBor:
      return "bor";
    case RedOp::kBxor:
      return "bxor";
    default:
      return "sum";  // also for AVG and PREMUL_SUM
  }
}

// The blocks of every LL call of a communicator; all calls need the same number (ll.h). On an H100
// with two ranks, in graphs of 20 calls, all-reduces of 4, 16 and 32 KiB took 5.5, 6.6 and 8.7 us
// with 4 blocks (while other work ran), and 5.9, 5.9 and 6.0 us with 16 blocks.
constexpr unsigned kLLChannels = 16;

}  // namespace

const char* name_of_float(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    default:
      throw std::invalid_argument("expected float32, bfloat16 or float16");
  }
}

DeviceComm::DeviceComm(std::shared_ptr<const Driver> driver, const DeviceConfig& config,
                       FindKernel find)
    : driver_(std::move(driver)), config_(config), find_(std::move(find)) {}

uint64_t DeviceComm::table_bytes() const {
  // Space for one ring per channel.
  const uint64_t rings = uint64_t(config_.layout.channels) * config_.world * sizeof(int32_t);
  return config_.layout.whole_pages(sizeof(RankTable) + rings);
}

uint64_t DeviceComm::scratch_offset() const { return table_offset() + table_bytes(); }

uint64_t DeviceComm::region_bytes() const {
  const uint64_t scratch = config_.layout.channels * scratch_bytes(config_.world);
  return scratch_offset() + config_.layout.whole_pages(scratch);
}

bool DeviceComm::set_window(const Window& window) {
  window_ = window;
  // A channel has two slots; a slot has one piece, of whole lines, per rank.
  piece_bytes_ = window.bytes / (2 * uint64_t(config_.layout.channels) * config_.world) /
                 kLineBytes * kLineBytes;
  return piece_bytes_ > 0;
}

std::string DeviceComm::table(const std::vector<uint64_t>& regions,
                              const std::vector<uint64_t>& heaps,
                              const std::vector<uint64_t>& heap_bytes, uint64_t host_page,
                              const std::vector<std::vector<int>>& rings) {
  const size_t count = std::min(rings.size(), size_t(config_.layout.channels));
  std::string bytes(sizeof(RankTable) + count * size_t(config_.world) * sizeof(int32_t), '\0');
  RankTable t{};
  t.rank = config_.rank;
  t.world = config_.world;
  t.rings = int32_t(count);
  t.layout = config_.layout;
  t.host = reinterpret_cast<HostPage*>(host_page);
  t.scratch = reinterpret_cast<char*>(regions[size_t(config_.rank)]) + scratch_offset();
  t.window = reinterpret_cast<char*>(window_.own);
  t.windows = reinterpret_cast<char*>(window_.all);
  t.heap_windows = reinterpret_cast<char*>(window_.heaps);
  t.piece_bytes = piece_bytes_;
  for (int p = 0; p < config_.world; ++p) {
    t.regions[p] = reinterpret_cast<char*>(regions[size_t(p)]);
    t.heaps[p] = reinterpret_cast<char*>(heaps[size_t(p)]);
    t.heap_bytes[p] = heap_bytes[size_t(p)];
  }
  std::memcpy(bytes.data(), &t, sizeof(t));
  auto* order = reinterpret_cast<int32_t*>(bytes.data() + sizeof(RankTable));
  for (size_t r = 0; r < count; ++r)
    for (int p = 0; p < config_.world; ++p) *order++ = rings[r][size_t(p)];
  make_inline(t, rings);
  own_heap_bytes_ = heap_bytes[size_t(config_.rank)];
  heap_ = heaps[size_t(config_.rank)];
  regions_ = regions;
  table_address_ = regions[size_t(config_.rank)] + table_offset();
  return bytes;
}

void DeviceComm::make_inline(const RankTable& t, const std::vector<std::vector<int>>& rings) {
  const size_t world = size_t(t.world);
  inline_table_ = {};
  if (t.world > kInlineWorld || size_t(t.rings) * world > size_t(kInlineRingBytes)) return;
  InlineTable& n = inline_table_;
  n.rank = t.rank;
  n.world = t.world;
  n.rings = t.rings;
  n.layout = t.layout;
  n.host = t.host;
  std::copy_n(t.regions, world, n.regions);
  std::copy_n(t.heaps, world, n.heaps);
  std::copy_n(t.heap_bytes, world, n.heap_bytes);
  for (size_t r = 0; r < size_t(t.rings); ++r)
    std::copy(rings[r].begin(), rings[r].end(), n.order + r * world);
}

CallArgs DeviceComm::args_of(Collective collective, Algorithm algorithm, DType dtype,
                             uint64_t match_bytes, int root) const {
  CallArgs a{};
  a.table = reinterpret_cast<const RankTable*>(table_address_);
  a.match_bytes = match_bytes;
  a.timeout_ns = config_.timeout_ns;
  a.factor = 1.0;
  a.collective = collective;
  a.algorithm = algorithm;
  a.dtype = int32_t(dtype);
  a.redop = -1;
  a.root = root;
  return a;
}

// payload_bytes: the bytes that one rank would send to one peer by LL.
Algorithm DeviceComm::chosen_for(Algorithm asked, uint64_t payload_bytes, bool has_ll) const {
  const bool sends = config_.world > 1 && payload_bytes > 0;
  if (asked == Algorithm::kLL && !sends) return Algorithm::kOneShot;
  const bool fits = has_ll && sends && payload_bytes <= config_.layout.ll_bytes;
  if (asked == Algorithm::kLL && !fits)
    throw std::invalid_argument(
        "algorithm: \"ll\" takes up to " + std::to_string(config_.layout.ll_bytes) +
        " bytes per peer (CommOptions.ll_bytes), dtypes of up to 8 bytes and 2 ranks or more, "
        "got " +
        std::to_string(payload_bytes) + " bytes and " + std::to_string(config_.world) + " ranks");
  if (asked == Algorithm::kCopyEngine)
    throw std::invalid_argument("algorithm: \"copy_engine\" is for all_gather_into_tensor alone");
  if (asked != Algorithm::kAuto) return asked;
  const bool small = payload_bytes * uint64_t(config_.world - 1) <= kMaxLLTrafficBytes;
  return fits && small ? Algorithm::kLL : chosen(asked);
}

unsigned DeviceComm::channels_for(uint64_t bytes) const {
  const uint64_t wanted = (bytes + kMinChannelBytes - 1) / kMinChannelBytes;
  return unsigned(std::clamp<uint64_t>(wanted, 1, uint64_t(config_.layout.channels)));
}

void DeviceComm::check_pieces(uint64_t chunk_bytes, unsigned channels) const {
  const uint64_t pieces = chunk_bytes / channels / config_.layout.segment_bytes + 1;
  if (pieces * uint64_t(config_.world) > kMaxItems)
    throw std::invalid_argument("a chunk of " + std::to_string(chunk_bytes) +
                                " bytes is more than staging can pipe in segments of " +
                                std::to_string(config_.layout.segment_bytes) +
                                " bytes; raise CommOptions.segment_bytes or channels");
}

const Kernel& DeviceComm::kernel(const std::string& unit, const std::string& name) {
  Kernel& found = kernels_[unit + "/" + name];
  if (found.function == nullptr) {
    const auto [function, threads, sliced] = find_(unit, name);
    found = {reinterpret_cast<void*>(function), threads, sliced,
             name.find("_list_") != std::string::npos};
  }
  return found;
}

// The caller passes complex numbers as pairs of real numbers.
const Kernel& DeviceComm::reduction_kernel(const char* form, const Reduction& r) {
  static const char* const units[] = {
      "uint8",   "int8",    "", "int16", "", "int32", "", "int64", "bool", "float16", "bfloat16",
      "float32", "float64", "", "",      "", "",      "", "",      ""};  // complex and float8 types
  static_assert(std::size(units) == size_t(DType::kCount), "a new type needs its unit, or none");
  const size_t index = size_t(r.dtype);
  const char* unit = index < std::size(units) ? units[index] : "";
  if (unit[0] == '\0')
    throw std::invalid_argument(
        "this dtype cannot be reduced on a GPU; convert it to a signed or "
        "wider one, or reduce a CPU copy");
  return kernel(std::string("reduce_") + unit, std::string("rc_") + form + "_" + op_name(r.op));
}

void DeviceComm::submit(Prepared prepared) {
  if (page_ == nullptr) throw std::invalid_argument("the communicator is not connected");
  pending_.push_back({std::move(prepared), 0, 0, 0});
}

void DeviceComm::submit_copy(uint64_t to, uint64_t from, uint64_t bytes) {
  if (bytes != 0) pending_.push_back({{}, to, from, bytes});
}

bool DeviceComm::next() {
  while (!pending_.empty()) {
    const Pending next = std::move(pending_.front());
    pending_.pop_front();
    if (next.copy_bytes != 0) {
      try {
        driver_->copy(next.copy_to, next.copy_from, next.copy_bytes, stream_);
      } catch (...) {
        pending_.clear();
        throw;
      }
      continue;
    }
    prepared_ = next.launch;
    is_prepared_ = true;
    if (observer_ && !prepared_.alone) observer_->enqueues(prepared_, captures());
    return true;
  }
  return false;
}

void DeviceComm::launch_all() {
  while (next()) {
    try {
      launch_prepared();
    } catch (...) {
      withdraw();
      throw;
    }
  }
}

bool DeviceComm::captures() {
  if (!captures_) captures_ = driver_->is_capturing(stream_);
  return *captures_;
}

void DeviceComm::launch_prepared(const std::vector<DeviceComm*>& ranks) {
  DeviceComm& first = *ranks[0];
  LaunchLedger* const ledger = first.ledger_.get();
  const bool waits = !first.prepared_.alone && first.prepared_.args.collective != Collective::kSend;
  const bool noted = ledger != nullptr && ledger->is_shared() && waits && !first.captures();
  const unsigned blocks = first.prepared_.channels * unsigned(ranks.size());
  if (noted) ledger->before(first.owner_, blocks, first.stream_);
  launch(ranks, first.stream_);
  if (noted) ledger->after(first.owner_, blocks, first.stream_);
}

void DeviceComm::withdraw() {
  pending_.clear();
  is_prepared_ = false;
  if (observer_ && !prepared_.alone) observer_->withdraws();
}

std::optional<Prepared> DeviceComm::take_plan() {
  const std::deque<Pending> planned = std::exchange(pending_, {});
  if (planned.size() != 1 || planned.front().copy_bytes != 0) return std::nullopt;
  return planned.front().launch;
}

void DeviceComm::submit_plan(Prepared plan) {
  if (plan.args.timeout_ns != 0) plan.args.timeout_ns = config_.timeout_ns;
  submit(std::move(plan));
}

namespace {

// Appends lists to the spans in a launch's parameters.
class SpanWriter {
 public:
  explicit SpanWriter(ListParams& params) : params_(params) {}

  // Appends a list and returns its first index, or -1 if the list is empty.
  int32_t add(const std::vector<Span>& list) {
    if (list.empty()) return -1;
    if (spans_ + list.size() > size_t(kMaxSpans))
      throw std::invalid_argument(
          "too many list entries for one launch: use the tensor forms "
          "(all_gather_into_tensor and so on), or fewer ranks per GPU");
    std::copy(list.begin(), list.end(), params_.spans + spans_);
    spans_ += list.size();
    return int32_t(spans_ - list.size());
  }

 private:
  ListParams& params_;
  size_t spans_ = 0;
};

}  // namespace

void DeviceComm::write_calls(const std::vector<DeviceComm*>& ranks, LaunchParams& params) {
  const bool inlined = ranks.size() == 1 && ranks[0]->inline_table_.world > 0;
  if (inlined) {
    params.alone.table = ranks[0]->inline_table_;
    params.alone.table.heap_bytes[ranks[0]->config_.rank] = ranks[0]->own_heap_bytes_;
  }
  const Prepared& first = ranks[0]->prepared_;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Prepared& p = ranks[r]->prepared_;
    if (p.kernel.function != first.kernel.function || p.channels != first.channels)
      throw std::invalid_argument("the ranks of this process made different calls");
    params.calls[r] = p.args;
    params.calls[r].inlined = inlined;
    params.calls[r].sliced = p.kernel.sliced;
  }
}

void DeviceComm::launch(const std::vector<DeviceComm*>& ranks, void* stream) {
  if (ranks.empty() || ranks.size() > size_t(kMaxRanksPerLaunch))
    throw std::invalid_argument("a launch carries 1 to 8 ranks");
  const Prepared& first = ranks[0]->prepared_;
  if (first.triton != nullptr) return ranks[0]->launch_triton(stream);
  const auto launch_with = [&](const auto& params) {
    ranks[0]->driver_->launch(first.kernel.function, first.channels, unsigned(ranks.size()),
                              first.kernel.threads, stream, &params, sizeof params);
  };
  if (first.kernel.takes_lists) {
    ListParams params;
    write_calls(ranks, params);
    SpanWriter spans(params);
    for (size_t r = 0; r < ranks.size(); ++r) {
      const Prepared& p = ranks[r]->prepared_;
      params.lists[r] = {spans.add(p.in), spans.add(p.out), p.readers, p.senders};
    }
    launch_with(params);
  } else {
    LaunchParams params;
    write_calls(ranks, params);
    launch_with(params);
  }
  for (DeviceComm* each : ranks) each->is_prepared_ = false;
}

// ---- the launches of each collective: kernel, number of blocks, arguments -----------------------

// True if all ranks can reach the call's buffer (multicast.h) by multicast: it is bound, peers have
// mapped it, and it consists of whole vectors, except at the end of an all-reduce.
bool DeviceComm::is_bound(const CallArgs& args) const {
  const bool gathers = args.collective == Collective::kAllGather,
             shares = args.collective == Collective::kAllReduce;
  const auto begin = reinterpret_cast<uint64_t>(gathers ? args.out : args.in);
  const uint64_t end_bytes = std::min<uint64_t>(bound_heap_bytes_, own_heap_bytes_),
                 offset = begin - heap_;
  return window_.heaps != 0 && args.total_bytes > 0 && offset < end_bytes &&
         args.total_bytes <= end_bytes - offset && begin % 16 == 0 &&
         (shares ? args.in == args.out : args.chunk_bytes % 16 == 0);
}

// Submits a prepared all-reduce, reduce-scatter or all-gather (which ignores r.op) by multicast.
void DeviceComm::multicast(Prepared p, const Reduction& r) {
  const bool gathers = p.args.collective == Collective::kAllGather;
  const char* unit = gathers || r.dtype == DType::kFloat32 ? "multicast_float32"
                     : r.dtype == DType::kBFloat16         ? "multicast_bfloat16"
                     : r.dtype == DType::kFloat16          ? "multicast_float16"
                                                           : nullptr;
  if (piece_bytes_ == 0)
    throw std::invalid_argument("algorithm: \"multicast\" needs CommOptions.multicast_bytes > 0");
  if (unit == nullptr || (!gathers && r.op != RedOp::kSum && r.op != RedOp::kAvg))
    throw std::invalid_argument("algorithm: \"multicast\" has no kernel for this dtype and op");
  if (p.args.chunk_bytes / p.channels / piece_bytes_ >= kMaxItems)
    throw std::invalid_argument("algorithm: a chunk of " + std::to_string(p.args.chunk_bytes) +
                                " bytes is more than \"multicast\" can pass through its window; "
                                "raise CommOptions.multicast_bytes");
  p.kernel = kernel(unit, "rc_multicast_sum");
  p.args.algorithm = Algorithm::kMulticast;
  p.args.bound = is_bound(p.args);
  submit(std::move(p));
}

void DeviceComm::all_reduce(char* in, char* out, uint64_t elems, const Reduction& r) {
  const uint64_t bytes = elems * uint64_t(size_of(r.dtype));
  const Algorithm algorithm = chosen_for(r.algorithm, bytes, size_of(r.dtype) <= 8);
  Prepared p{{},
             channels_for(bytes),
             args_of(Collective::kAllReduce, algorithm, r.dtype, bytes, -1),
             {},
             {}};
  const bool ll = algorithm == Algorithm::kLL;
  if (ll) p.channels = std::min(kLLChannels, unsigned(config_.layout.channels));
  p.args.in = in;
  p.args.out = out;
  p.args.total_bytes = bytes;
  p.args.chunk_bytes = balanced_chunk_bytes(bytes, config_.world);
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  if (algorithm == Algorithm::kMulticast) return multicast(std::move(p), r);
  p.kernel = reduction_kernel(ll ? "ll" : "all_reduce", r);
  check_pieces(p.args.chunk_bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::reduce(char* in, char* out, uint64_t elems, const Reduction& r, int root) {
  const uint64_t bytes = elems * uint64_t(size_of(r.dtype));
  Prepared p{reduction_kernel("reduce_scatter", r),
             channels_for(bytes),
             args_of(Collective::kReduce, Algorithm::kOneShot, r.dtype, bytes, root),
             {},
             {}};
  p.args.in = in;
  p.args.out = out;
  p.args.total_bytes = bytes;  // the root's chunk is the whole buffer
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::reduce_scatter(char* in, char* out, uint64_t out_elems, const Reduction& r) {
  const uint64_t chunk = out_elems * uint64_t(size_of(r.dtype)),
                 total = chunk * uint64_t(config_.world);
  const Algorithm algorithm = chosen_for(r.algorithm, chunk, size_of(r.dtype) <= 8);
  const bool ll = algorithm == Algorithm::kLL;
  Prepared p{{},
             channels_for(chunk),
             args_of(Collective::kReduceScatter, algorithm, r.dtype, total, -1),
             {},
             {}};
  if (ll) p.channels = std::min(kLLChannels, unsigned(config_.layout.channels));
  p.args.in = in;
  p.args.out = out;
  p.args.total_bytes = total;
  p.args.chunk_bytes = chunk;
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  if (algorithm == Algorithm::kMulticast) return multicast(std::move(p), r);
  p.kernel = reduction_kernel(ll ? "ll" : "reduce_scatter", r);
  check_pieces(chunk, p.channels);
  submit(std::move(p));
}

void DeviceComm::reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r) {
  const uint64_t total = sum_bytes(in);
  Prepared p{reduction_kernel("reduce_scatter_list", r),
             channels_for(total / uint64_t(config_.world)),
             args_of(Collective::kReduceScatter, Algorithm::kOneShot, r.dtype, total, -1),
             in,
             {}};
  p.args.out = out;
  p.args.redop = int32_t(r.op);
  p.args.factor = r.factor;
  check_pieces(total, p.channels);
  submit(std::move(p));
}

void DeviceComm::all_gather(char* in, char* out, uint64_t in_bytes, DType dtype,
                            Algorithm algorithm) {
  if (algorithm == Algorithm::kCopyEngine) return copy_engine_all_gather(in, out, in_bytes, dtype);
  const uint64_t total = in_bytes * uint64_t(config_.world);
  const Algorithm how = chosen_for(algorithm, in_bytes, true);
  const bool ll = how == Algorithm::kLL;
  Prepared p{
      {}, channels_for(in_bytes), args_of(Collective::kAllGather, how, dtype, total, -1), {}, {}};
  if (ll) p.channels = std::min(kLLChannels, unsigned(config_.layout.channels));
  p.args.in = in;
  p.args.out = out;
  p.args.total_bytes = total;
  p.args.chunk_bytes = in_bytes;
  if (how == Algorithm::kMulticast) return multicast(std::move(p), {dtype, RedOp::kSum, 1.0, how});
  p.kernel = kernel("move", ll ? "rc_ll_move" : "rc_move");
  check_pieces(in_bytes, p.channels);
  submit(std::move(p));
}

// Synchronizes by a kernel that moves no data: later copies follow all ranks' earlier work.
void DeviceComm::sync_for_copies(uint64_t total_bytes, DType dtype, int plan, bool continues) {
  submit({kernel("move", "rc_move"),
          1,
          args_of(Collective::kAllGather, Algorithm::kCopyEngine, dtype, total_bytes, plan),
          {},
          {},
          continues});
}

void DeviceComm::all_gather_from(char* in, char* out, uint64_t in_bytes, DType dtype,
                                 const std::vector<uint64_t>& inputs, int plan) {
  const uint64_t to = reinterpret_cast<uint64_t>(out), total = in_bytes * uint64_t(config_.world);
  sync_for_copies(total, dtype, plan, false);  // every rank's input is complete
  const bool in_place = in == out + uint64_t(config_.rank) * in_bytes;
  for (int d = in_place ? 1 : 0; d < config_.world; ++d) {
    const int p = rotated_peer(config_.rank, d, config_.world);
    submit_copy(to + uint64_t(p) * in_bytes, inputs[size_t(p)], in_bytes);
  }
  sync_for_copies(total, dtype, plan, true);  // every rank has copied it: inputs may change
}

void DeviceComm::copy_engine_all_gather(char* in, char* out, uint64_t in_bytes, DType dtype) {
  const auto device = [](const void* ptr) { return reinterpret_cast<uint64_t>(ptr); };
  const uint64_t staging = config_.layout.copy_engine_bytes,
                 total = in_bytes * uint64_t(config_.world);
  if (staging == 0)
    throw std::invalid_argument(
        "algorithm: \"copy_engine\" needs CommOptions.copy_engine_bytes > 0, or a plan "
        "(plan_all_gather_into_tensor)");
  const auto at_copy = [&](int p) {
    return regions_[size_t(p)] + config_.layout.copy_engine_offset();
  };
  if (in != out + uint64_t(config_.rank) * in_bytes)
    submit_copy(device(out) + uint64_t(config_.rank) * in_bytes, device(in), in_bytes);
  for (uint64_t begin = 0; begin == 0 || begin < in_bytes; begin += staging) {
    const uint64_t bytes = std::min(staging, in_bytes - begin);
    submit_copy(at_copy(config_.rank), device(in) + begin, bytes);
    sync_for_copies(total, dtype, -1, begin > 0);  // every rank's piece is staged
    for (int d = 1; d < config_.world; ++d) {
      const int p = rotated_peer(config_.rank, d, config_.world);
      submit_copy(device(out) + uint64_t(p) * in_bytes + begin, at_copy(p), bytes);
    }
    sync_for_copies(total, dtype, -1, true);  // every rank has fetched it: staging is free again
  }
}

void DeviceComm::all_gather_list(char* in, const std::vector<Span>& out, DType dtype) {
  const uint64_t total = sum_bytes(out);
  Prepared p{kernel("move", "rc_list_move"),
             channels_for(total / uint64_t(config_.world)),
             args_of(Collective::kAllGather, Algorithm::kOneShot, dtype, total, -1),
             {},
             out};
  p.args.in = in;
  check_pieces(total, p.channels);
  submit(std::move(p));
}

void DeviceComm::broadcast(char* buffer, uint64_t bytes, DType dtype, int root) {
  Prepared p{kernel("move", "rc_move"),
             channels_for(bytes),
             args_of(Collective::kBroadcast, Algorithm::kOneShot, dtype, bytes, root),
             {},
             {}};
  p.args.out = buffer;
  p.args.total_bytes = bytes;  // sent by the root to each rank
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::gather(char* in, uint64_t bytes, const std::vector<Span>& out, DType dtype,
                        int root) {
  Prepared p{kernel("move", "rc_list_move"),
             channels_for(bytes),
             args_of(Collective::kGather, Algorithm::kOneShot, dtype, bytes, root),
             {},
             out};
  p.args.in = in;
  p.args.total_bytes = bytes;
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::scatter(const std::vector<Span>& in, char* out, uint64_t bytes, DType dtype,
                         int root) {
  Prepared p{kernel("move", "rc_list_move"),
             channels_for(bytes),
             args_of(Collective::kScatter, Algorithm::kOneShot, dtype, bytes, root),
             in,
             {}};
  p.args.out = out;
  p.args.total_bytes = bytes;
  check_pieces(bytes, p.channels);
  submit(std::move(p));
}

void DeviceComm::all_to_all(const std::vector<Span>& in, const std::vector<Span>& out,
                            DType dtype) {
  // Sizes differ by pair of ranks, but all ranks need the same number of channels: use all.
  Prepared p{kernel("move", "rc_list_move"), unsigned(config_.layout.channels),
             args_of(Collective::kAllToAll, Algorithm::kOneShot, dtype, 0, -1), in, out};
  check_pieces(sum_bytes(in) + sum_bytes(out), p.channels);
  submit(std::move(p));
}

void DeviceComm::barrier() {
  submit({kernel("move", "rc_move"),
          1,
          args_of(Collective::kBarrier, Algorithm::kOneShot, DType::kUInt8, 0, -1),
          {},
          {}});
}

void DeviceComm::messages(const std::vector<Span>& send, uint64_t readers,
                          const std::vector<Span>& receive, uint64_t senders, int tag) {
  Prepared p{kernel("move", "rc_list_move"), unsigned(config_.message_channels),
             args_of(Collective::kSend, Algorithm::kOneShot, DType::kUInt8, 0, tag), send, receive};
  p.readers = readers;
  p.senders = senders;
  check_pieces(sum_bytes(send) + sum_bytes(receive), p.channels);
  submit(std::move(p));
}

}  // namespace device
RINGCOMM_NAMESPACE_END
