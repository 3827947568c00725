// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/comm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "kernels/host/retired.h"

namespace ringcomm::host {
namespace {

// All-reduces of up to this many bytes take one hop. One hop against two on Zen 4, 2 ranks, tensors
// outside the heap: 3.7 us against 4.4 us at 32 KiB, 7.6 us against 7.3 us at 64 KiB.
constexpr uint64_t kOneHopBytes = 32 << 10;

// The piece size of a two-shot all-reduce: the piece that a rank shares is still in its caches when
// peers read it. Speedup over pieces of 256 KiB for tensors outside the heap, on a Xeon (AVX-512)
// with 1 MiB of L2 per core. 2 ranks: 1.12 for 256 KiB, 1.20 for 1 MiB, 1.27 for 4 MiB, 1.11 for 64
// MiB. Pieces of 32 KiB gain another 4 % on a quiet machine; but for 1 MiB next to one busy loop,
// their speedup is 0.90, and 0.99 with 64 KiB. 4 ranks: 1.02 to 1.08 (pieces of 32 KiB).
constexpr uint64_t kAllReducePieceBytes = 64 << 10;

Chunks even_chunks(const char* base, uint64_t total, uint64_t chunk) {
  return {const_cast<char*>(base), total, chunk, nullptr};
}

// Checks that the region that rank `p` announced is inside that rank's heap, and belongs to rank
// `p` of this communicator.
void check_region(const Layout& layout, uint64_t bytes, int p, const PeerAddress& peer) {
  const auto refuse = [&](const std::string& what) {
    throw RegionError("what rank " + std::to_string(p) +
                      " announced is no region of its own: " + what);
  };
  if (peer.region_offset % kLineBytes != 0 || peer.region_offset > peer.heap_bytes ||
      bytes > peer.heap_bytes - peer.region_offset)
    refuse(std::to_string(bytes) + " bytes at offset " + std::to_string(peer.region_offset) +
           " do not lie in a heap of " + std::to_string(peer.heap_bytes) + " bytes");
  const auto* page = reinterpret_cast<const ControlPage*>(peer.heap_base + peer.region_offset);
  if (page->magic != kRegionMagic || page->version != kProtocolVersion)
    refuse("it does not begin with the mark of protocol version " +
           std::to_string(kProtocolVersion));
  if (page->rank != p || !page->layout.same(layout))
    refuse("it says it is that of rank " + std::to_string(page->rank) + " of " +
           std::to_string(page->world) + ", or is laid out otherwise");
  if (page->proof != peer.proof) refuse("its proof differs");
}

}  // namespace

Comm::Comm(std::shared_ptr<Heap> heap, const CommConfig& config)
    : heap_(std::move(heap)),
      layout_{config.world, config.channels, config.slots, config.segment_bytes, 0, 0},
      channels_(size_t(config.channels)),
      waiter_(pause_policy(config.world)),
      single_copy_(config.single_copy),
      sum_group_size_(config.sum_group_size) {
  RetiredRegions::instance().reclaim();
  const uint64_t region_bytes = layout_.region_bytes();
  region_ = heap_->allocate(region_bytes + Recorder::memory_bytes(config.records),
                            Heap::Purpose::kRegion);
  char* mine = heap_->base() + region_;
  // The memory may contain old data. Slots need not be cleared: no epoch refers to a slot yet.
  std::memset(mine, 0, layout_.staging_offset());
  auto* control = reinterpret_cast<ControlPage*>(mine);
  begin_page(control, config.rank, layout_);
  control->proof = random_word();
  control->page_ptr = reinterpret_cast<uintptr_t>(control);
  control->fences_for_all = Waiter::can_fence_for_all() ? 1 : 0;
  recorder_.open(mine + region_bytes, config.records, config.rank, config.world, region_bytes,
                 config.name);
  if (recorder_.on()) {
    heap_->list_recorder(region_ + region_bytes);
    waiter_.ask_of_calls([](void* of, const CallId& id,
                            int peer) { return static_cast<Comm*>(of)->other_call(id, peer); },
                         this);
  }
  regions_.assign(config.world, nullptr);
  heaps_.assign(config.world, nullptr);
  heap_bytes_.assign(config.world, 0);
  regions_[config.rank] = mine;
  heaps_[config.rank] = heap_->base();
  heap_bytes_[config.rank] = heap_->capacity_bytes();
  for (Channel& each : channels_) {
    each.in.resize(size_t(Stream::kCount) * config.world);
    each.sources.resize(std::max(config.world, 2));
    each.factors.resize(std::max(config.world, 2));
    each.results.resize(config.world);
    each.view = View{config.rank,         config.world,        layout_,           regions_.data(),
                     heaps_.data(),       heap_bytes_.data(),  config.timeout_ns, each.in.data(),
                     each.sources.data(), each.factors.data(), &each.mine};
    each.view.results = each.results.data();
  }
  view_ = channels_[0].view;
}

Comm::~Comm() { close(); }

void Comm::connect(const std::vector<PeerAddress>& peers) {
  for (int p = 0; p < view_.world; ++p)
    if (p != view_.rank) check_region(layout_, region_bytes(), p, peers[p]);
  for (int p = 0; p < view_.world; ++p) {
    if (p == view_.rank) continue;
    heaps_[p] = peers[p].heap_base;
    heap_bytes_[p] = peers[p].heap_bytes;
    regions_[p] = peers[p].heap_base + peers[p].region_offset;
    owners_.push_back(peers[p].owner);
    waiter_.watch(p, peers[p].pid, &view_.control(p)->left);
  }
  view_.control(view_.rank)->reads_peers =
      single_copy_ && view_.world == kSingleCopyRanks && reads_peers() ? 1 : 0;
  if (!recorder_.on()) return;
  // The world's id comes from words that rank 0 wrote before any peer could read them.
  uint64_t token;
  std::memcpy(&token, peers[0].heap_base, sizeof(token));
  const auto* first = reinterpret_cast<const RecorderHeader*>(recorder_of(0));
  recorder_.set_world_id((token ^ first->created_ns) * 0x9e3779b97f4a7c15 ^ peers[0].region_offset);
}

// True if the operating system lets this process read the memory of every peer.
bool Comm::reads_peers() const {
  for (int p = 0; p < view_.world; ++p) {
    if (p == view_.rank) continue;
    const ControlPage* page = view_.control(p);
    uint64_t proof = 0;
    const auto* theirs = reinterpret_cast<const ControlPage*>(uintptr_t(page->page_ptr));
    if (waiter_.read_process(p, &proof, &theirs->proof, sizeof(proof)) != Status::kOk) return false;
    if (proof != page->proof) return false;
  }
  return true;
}

void Comm::publish_members(uint64_t members) {
  uint64_t* word = &view_.control(view_.rank)->members;
  std::memcpy(word, &members, sizeof(members));
  fence_seq_cst_sys();  // before this rank tells the store that it is ready
}

void Comm::activate() {
  fence_seq_cst_sys();  // after the store has reported that all ranks are ready
  const uint64_t members = load_relaxed_sys(&view_.control(view_.rank)->members);
  for (int p = 0; p < view_.world; ++p)
    if (load_relaxed_sys(&view_.control(p)->members) != members)
      throw RegionError("rank " + std::to_string(p) + " has other members than rank " +
                        std::to_string(view_.rank) +
                        ": what it announced was replaced, or is of an earlier communicator");
  bool all_fence = true, all_read = true;
  for (int p = 0; p < view_.world; ++p) {
    all_fence &= view_.control(p)->fences_for_all == 1;
    all_read &= view_.control(p)->reads_peers == 1;
  }
  if (all_fence) waiter_.fence_for_all();
  if (all_read) waiter_.read_processes(*single_copy_);
  connected_ = true;
}

void Comm::use_threads(int most, bool is_exact, int channels, bool is_crowded) {
  start_workers(std::min(most, channels));
  threads_.emplace(most, is_exact);
  used_channels_ = channels;
  is_crowded_ = is_crowded;
}

// Makes this rank's last stores into the peers' regions; then each peer may reuse its region.
// model: detach (tests/proof/model/retired.pml)
void Comm::detach() {
  for (int p = 0; p < view_.world; ++p) {
    if (p == view_.rank || !connected_) continue;
    // Pairs with the acquire in RetiredRegions::reclaim() of the peer.
    store_release_sys(&view_.signals(p, Stream::kPair, 0, view_.rank)->detached, 1);
  }
}

void Comm::close() {
  const std::lock_guard lock(mutex_);
  if (regions_[view_.rank] == nullptr) return;
  detach();
  if (recorder_.on()) heap_->unlist_recorder(region_ + layout_.region_bytes());
  // No peer knows the region of a rank that never connected, so the region is free at once.
  std::vector<Process> others = waiter_.forget_all();
  if (!owners_.empty()) others.resize(view_.world);
  RetiredRegions::instance().retire(
      {heap_, region_, layout_, view_.rank, std::move(others), std::exchange(held_, {})});
  regions_[view_.rank] = nullptr;
  owners_.clear();
  connected_ = false;
  threads_.reset();
}

template <class Body>
Status Comm::run(CallId id, uint64_t total_bytes, Body body) {
  return run_with(id, total_bytes, 1.0, ops_for(nullptr, total_bytes), body);
}

void Comm::check_order(Algorithm algorithm) const {
  if (sum_group_size_ > 0 && algorithm == Algorithm::kRing)
    throw std::invalid_argument(
        "a ring cannot sum in groups of ranks (CommOptions.sum_group_size)");
}

// Fills `groups` if sums are taken in groups; the returned ops then point to `groups`.
HostOps Comm::reduction_ops(const Reduction& r, DType results, uint64_t total_bytes,
                            GroupedSum* groups) {
  HostOps ops = ops_for(reduction_loop(r.dtype, results, r.op), total_bytes);
  ops.result_widths = uint64_t(size_of(results) / size_of(r.dtype));
  if (sum_group_size_ <= 0 || sum_group_size_ >= view_.world) return ops;
  *groups = GroupedSum::of(sum_group_size_, r.dtype, results, r.op);
  ops.groups = groups;
  return ops;
}

template <class Body>
Status Comm::run_reduction(CallId id, const Reduction& r, uint64_t total_bytes, Body body) {
  check_order(r.algorithm);
  GroupedSum groups;
  const HostOps ops = reduction_ops(r, r.dtype, total_bytes, &groups);
  return run_with(id, total_bytes, r.factor, ops, body);
}

Status Comm::run_partial(CallId id, const Reduction& r, const Chunks& in, char* out, int root) {
  GroupedSum groups;
  const HostOps ops = reduction_ops(r, accumulator_of(r.dtype), id.match_bytes, &groups);
  return run_with(id, id.match_bytes, r.factor, PartialOps{ops, out},
                  [&](auto& e) { return reduce_scatter_one_shot(e, in, out, root); });
}

// True if a reduction in two levels costs less, by the byte counts of two_levels.h. Reading a byte
// from another node costs four times as much as from the own node: an estimate, since the link
// between nodes has about a quarter of the bandwidth of a node's memory. Writing a byte of a
// partial sum costs as much as reading one from the own node. The counts are too high while slots
// stay in the caches: with all ranks on one node (Zen 4, 2 busy cores, 3 rounds, 4 ranks in groups
// of 2), reduce-scatters in two levels took 0.8 to 1.15 times as long as in one level for 64 MiB in
// FP32 (predicted: 1.5), and 1.2 to 1.5 times for 32 MiB in bfloat16 (predicted: 2).
bool Comm::worth_levels(const Reduction& r, uint64_t bytes) const {
  const int ranks = sum_group_size_;
  if (ranks < 2 || view_.world % ranks != 0 || view_.world == ranks) return false;
  if (r.algorithm == Algorithm::kRing) return false;
  if (always_in_levels) return true;
  if (!levels_ || bytes < kLevelsMinBytes) return false;
  // Costs of one_shot and of two levels, in units of one chunk.
  const int others = view_.world / ranks - 1, far = 4, written = 1;
  const int width = size_of(accumulator_of(r.dtype)) / size_of(r.dtype);
  const int one_shot = ranks + far * others * ranks;
  const int levels = view_.world + (far + written) * width * others;
  return levels < one_shot;
}

Status Comm::run_levels(CallId id, const Reduction& r, const Chunks& in, char* out, bool gathers) {
  GroupedSum groups;
  const HostOps ops = reduction_ops(r, r.dtype, id.match_bytes, &groups);
  return run_with(id, id.match_bytes, r.factor, LevelOps{ops}, [&](auto& e) {
    if (!gathers) return reduce_scatter_two_levels(e, in, out, groups.ranks);
    const Chunks results{out, in.total_bytes, in.chunk_bytes, nullptr};
    const Span mine = results.get(view_.rank);
    RC_RETURN_IF_FAILED(reduce_scatter_two_levels(e, in, mine.ptr, groups.ranks));
    return share_one_shot(e, mine, results, -1);
  });
}

Status Comm::all_reduce(const char* in, char* out, uint64_t elems, const Reduction& r) {
  const uint64_t bytes = elems * size_of(r.dtype);
  const CallId id{0, bytes, Collective::kAllReduce, int(r.dtype), int(r.op), -1, r.algorithm};
  const Chunks chunks = even_chunks(in, bytes, balanced_chunk_bytes(bytes, view_.world));
  if (worth_levels(r, bytes)) return run_levels(id, r, chunks, out, true);
  return run_reduction(id, r, bytes, [&](auto& e) {
    if (r.algorithm == Algorithm::kRing) return all_reduce_ring(e, chunks, out);
    e.cut.segment_bytes = std::min<uint64_t>(kAllReducePieceBytes, layout_.segment_bytes);
    return all_reduce_two_shot(e, chunks, out,
                               std::min<uint64_t>(kOneHopBytes, layout_.segment_bytes));
  });
}

Status Comm::reduce(const char* in, char* out, uint64_t elems, const Reduction& r, int root) {
  const uint64_t bytes = elems * size_of(r.dtype);
  const CallId id{0, bytes, Collective::kReduce, int(r.dtype), int(r.op), root, r.algorithm};
  std::vector<Span> spans(view_.world, Span{const_cast<char*>(in), 0});
  spans[root].bytes = bytes;
  const Chunks chunks{nullptr, 0, 0, spans.data()};
  return run_reduction(id, r, bytes,
                       [&](auto& e) { return reduce_scatter_one_shot(e, chunks, out, root); });
}

Status Comm::reduce_scatter(const char* in, char* out, uint64_t out_elems, const Reduction& r) {
  const uint64_t chunk = out_elems * size_of(r.dtype), total = chunk * view_.world;
  const CallId id{0, total, Collective::kReduceScatter, int(r.dtype), int(r.op), -1, r.algorithm};
  const Chunks chunks = even_chunks(in, total, chunk);
  if (worth_levels(r, total)) return run_levels(id, r, chunks, out, false);
  return run_reduction(id, r, total, [&](auto& e) {
    return r.algorithm == Algorithm::kRing ? reduce_scatter_ring(e, chunks, out)
                                           : reduce_scatter_one_shot(e, chunks, out);
  });
}

Status Comm::reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r) {
  const uint64_t total = sum_bytes(in);
  const CallId id{0, total, Collective::kReduceScatter, int(r.dtype), int(r.op), -1, r.algorithm};
  const Chunks chunks{nullptr, 0, 0, in.data()};
  if (worth_levels(r, total)) return run_levels(id, r, chunks, out, false);
  return run_reduction(id, r, total,
                       [&](auto& e) { return reduce_scatter_one_shot(e, chunks, out); });
}

Status Comm::reduce_scatter_partial(const std::vector<Span>& in, char* out, const Reduction& r) {
  const CallId id{
      0,  sum_bytes(in),      Collective::kReduceScatterPartial, int(r.dtype), int(r.op),
      -1, Algorithm::kOneShot};
  return run_partial(id, r, Chunks{nullptr, 0, 0, in.data()}, out, -1);
}

Status Comm::reduce_partial(const char* in, char* out, uint64_t elems, const Reduction& r,
                            int root) {
  const uint64_t bytes = elems * size_of(r.dtype);
  const CallId id{0,         bytes, Collective::kReducePartial, int(r.dtype),
                  int(r.op), root,  Algorithm::kOneShot};
  std::vector<Span> spans(view_.world, Span{const_cast<char*>(in), 0});
  spans[root].bytes = bytes;
  return run_partial(id, r, Chunks{nullptr, 0, 0, spans.data()}, out, root);
}

Status Comm::all_gather(const char* in, char* out, uint64_t in_bytes, DType dtype,
                        Algorithm algorithm) {
  const uint64_t total = in_bytes * view_.world;
  const CallId id{0, total, Collective::kAllGather, int(dtype), -1, -1, algorithm};
  return run(id, total, [&](auto& e) {
    const Chunks chunks = even_chunks(out, total, in_bytes);
    const Span input{const_cast<char*>(in), in_bytes};
    return algorithm == Algorithm::kRing ? all_gather_ring(e, input, chunks)
                                         : share_one_shot(e, input, chunks, -1);
  });
}

Status Comm::all_gather_list(const char* in, const std::vector<Span>& out, DType dtype) {
  const uint64_t total = sum_bytes(out);
  const CallId id{0, total, Collective::kAllGather, int(dtype), -1, -1, Algorithm::kOneShot};
  const Chunks chunks{nullptr, 0, 0, out.data()};
  const Span input{const_cast<char*>(in), out[view_.rank].bytes};
  return run(id, total, [&](auto& e) { return share_one_shot(e, input, chunks, -1); });
}

Status Comm::broadcast(char* buffer, uint64_t bytes, DType dtype, int root) {
  const CallId id{0, bytes, Collective::kBroadcast, int(dtype), -1, root, Algorithm::kOneShot};
  std::vector<Span> out(view_.world, Span{buffer, bytes});
  const Chunks chunks{nullptr, 0, 0, out.data()};
  return run(id, bytes,
             [&](auto& e) { return share_one_shot(e, Span{buffer, bytes}, chunks, root); });
}

Status Comm::gather(const char* in, uint64_t bytes, const std::vector<Span>& out, DType dtype,
                    int root) {
  const CallId id{0, bytes, Collective::kGather, int(dtype), -1, root, Algorithm::kOneShot};
  std::vector<Span> send(view_.world, Span{const_cast<char*>(in), bytes});
  const Chunks from{nullptr, 0, 0, send.data()}, to{nullptr, 0, 0, out.data()};
  return run(id, bytes,
             [&](auto& e) { return exchange_one_shot(e, from, to, Edges{.only_reader = root}); });
}

Status Comm::scatter(const std::vector<Span>& in, char* out, uint64_t bytes, DType dtype,
                     int root) {
  const CallId id{0, bytes, Collective::kScatter, int(dtype), -1, root, Algorithm::kOneShot};
  std::vector<Span> receive(view_.world, Span{out, bytes});
  const Chunks from{nullptr, 0, 0, in.data()}, to{nullptr, 0, 0, receive.data()};
  return run(id, bytes,
             [&](auto& e) { return exchange_one_shot(e, from, to, Edges{.only_sender = root}); });
}

// Only the two ranks of a pair know the size of their message. So this size decides: a large
// message is divided among all channels that large calls use, any other message uses channel 0.
Status Comm::all_to_all(const std::vector<Span>& in, const std::vector<Span>& out, DType dtype) {
  const CallId id{0, 0, Collective::kAllToAll, int(dtype), -1, -1, Algorithm::kOneShot};
  const int most = view_.world <= 64 ? used_channels_ : 1;  // Edges has masks of 64 ranks
  const auto is_large = [&](const Span& s) { return s.bytes >= uint64_t(most) * kBytesPerThread; };
  const bool any =
      std::any_of(in.begin(), in.end(), is_large) || std::any_of(out.begin(), out.end(), is_large);
  const auto part = [&](const std::vector<Span>& whole, int channel, uint64_t* peers) {
    std::vector<Span> result = whole;
    for (size_t p = 0; p < whole.size(); ++p) {
      if (is_large(whole[p])) {
        const Extent e = extent_of(whole[p].bytes, channel, most);
        result[p] = {whole[p].ptr + e.begin_bytes, e.end_bytes - e.begin_bytes};
      } else if (channel != 0) {
        *peers &= ~(uint64_t(1) << p);
      }
    }
    return result;
  };
  const auto body = [&](auto& e) {
    if (most == 1 || !any)
      return exchange_one_shot(e, {nullptr, 0, 0, in.data()}, {nullptr, 0, 0, out.data()}, Edges{});
    Edges edges;
    const std::vector<Span> from = part(in, e.team.channel(), &edges.my_readers),
                            to = part(out, e.team.channel(), &edges.my_senders);
    return exchange_one_shot(e, {nullptr, 0, 0, from.data()}, {nullptr, 0, 0, to.data()}, edges);
  };
  const uint64_t bytes = sum_bytes(out);
  return run_divided(any ? most : 1, id, bytes, ops_for(nullptr, bytes), body);
}

Status Comm::barrier() {
  const CallId id{0, 0, Collective::kBarrier, -1, -1, -1, Algorithm::kOneShot};
  const Chunks nothing{nullptr, 0, 0, nullptr};
  return run(id, 0, [&](auto& e) { return exchange_one_shot(e, nothing, nothing, Edges{}); });
}

// Returns the segment size with which one rank's pair slots take 2 to 4 MiB for any number of
// peers. It is at least 16 KiB, and at most 256 KiB; with several channels at most 128 KiB, since
// each channel has slots of its own.
uint32_t default_segment_bytes(int world, int channels) {
  const uint32_t share = (4u << 20) / 4 / uint32_t(std::max(world - 1, 1));
  return std::clamp(std::bit_floor(share), 16u << 10, channels > 1 ? 128u << 10 : 256u << 10);
}

}  // namespace ringcomm::host
