// SPDX-License-Identifier: Apache-2.0

// A peer that writes junk: headers, messages, fault records and announced regions whose fields and
// bytes are changed at random. Whatever the peer writes, this rank must access only memory inside
// the heaps, and its call must end with success or a status. tests/proof/fuzz/test_hostile.py runs
// this program under AddressSanitizer and UBSan, and also without each check of the code, which
// this program must notice.
//
// hostile_test SEED CASES
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "kernels/host/describe.h"
#include "kernels/host/messenger.h"
#include "ringcomm/optimizer/adamw.h"

using namespace ringcomm;
using namespace ringcomm::host;

namespace {

constexpr uint64_t kHeapBytes = 4 << 20;
constexpr uint32_t kSegmentBytes = 4096;
constexpr int kSlots = 4;
constexpr uint64_t kSizes[] = {0, 1, 4, 1000, 4096, 12'293, 16'384, 40'000};

std::mt19937_64 random_bits;
uint64_t below(uint64_t limit) { return random_bits() % limit; }
template <class T, size_t N>
T any_of(const T (&values)[N]) {
  return values[below(N)];
}

std::vector<Span> allowed;  // memory that this rank may access

// The peer's slots, if this case's header says that the data are in slots. An access to the peer's
// heap must then stay inside the payload of a single slot.
struct Slots {
  const char* heap = nullptr;
  const char* first = nullptr;
  uint64_t segment_bytes = 0;
};
Slots staged;

bool in_one_slot(const char* p, uint64_t bytes) {
  const uint64_t at = uint64_t(p - staged.first) % staged.segment_bytes;
  return p >= staged.first && bytes <= staged.segment_bytes - at;
}

void check_inside(const void* ptr, uint64_t bytes, const char* what) {
  if (bytes == 0) return;
  const char* p = static_cast<const char*>(ptr);
  if (staged.heap != nullptr && p >= staged.heap && p < staged.heap + kHeapBytes &&
      !in_one_slot(p, bytes)) {
    std::fprintf(stderr, "%s: not in a slot\n", what);
    std::abort();
  }
  for (const Span& s : allowed)
    if (p >= s.ptr && uint64_t(p - s.ptr) <= s.bytes && bytes <= s.bytes - uint64_t(p - s.ptr))
      return;
  std::fprintf(stderr, "%s: %llu bytes outside\n", what, static_cast<unsigned long long>(bytes));
  std::abort();
}

void copy(void* dst, const void* src, uint64_t bytes) {
  check_inside(src, bytes, "read");
  check_inside(dst, bytes, "written");
  if (dst != src) std::memmove(dst, src, bytes);
}

void reduce(const ReduceJob& job) {
  for (int s = 0; s < job.count; ++s) check_inside(job.sources[s], job.bytes, "reduced");
  check_inside(job.dst, job.bytes, "reduced into");
}

void update(const AdamWJob& job) {
  const uint64_t bytes = job.shard->bucket_elems * sizeof(float);
  for (int c = 0; c < job.copy_count; ++c) {
    if (job.copies[c] == nullptr) continue;
    check_inside(job.copies[c], bytes, "stored");
    // A GPU stores the copies in units of 16 bytes.
    if (reinterpret_cast<uintptr_t>(job.copies[c]) % 16 != 0) std::abort();
  }
  for (int s = 0; s < job.grads.count; ++s)
    check_inside(job.grads.ptrs[s], (job.end - job.begin) * sizeof(float), "summed");
}

// One to three changes at `at`: a flipped bit, a random byte, or a special value in a word.
void damage(void* at, uint64_t bytes) {
  auto* raw = static_cast<unsigned char*>(at);
  const uint64_t values[] = {0,
                             1,
                             ~uint64_t(0),
                             ~uint64_t(0) - below(70'000),
                             kHeapBytes,
                             kHeapBytes - below(50'000),
                             below(kHeapBytes),
                             below(kHeapBytes) / 4 * 4,
                             uint64_t(1) << below(64),
                             random_bits()};
  for (uint64_t changes = 1 + below(3); changes > 0; --changes) {
    if (below(3) != 0) {
      const uint64_t value = any_of(values);
      std::memcpy(raw + below(bytes / 8) * 8, &value, 8);
    } else if (below(2) != 0) {
      raw[below(bytes)] ^= static_cast<unsigned char>(1u << below(8));
    } else {
      raw[below(bytes)] = static_cast<unsigned char>(random_bits());
    }
  }
}

struct Pair {
  std::shared_ptr<Heap> heaps[2] = {std::make_shared<Heap>(kHeapBytes, ""),
                                    std::make_shared<Heap>(kHeapBytes, "")};
  std::unique_ptr<Comm> comms[2];
  char* memory;  // in the peer's heap: the memory to which a sound header points
  char* own;     // in this rank's heap
  std::vector<char> out = std::vector<char>(1 << 20);

  Pair() {
    memory = heaps[1]->base() + heaps[1]->allocate(1 << 17, Heap::Purpose::kTensor);
    own = heaps[0]->base() + heaps[0]->allocate(1 << 17, Heap::Purpose::kTensor);
    for (const auto& heap : heaps) allowed.push_back({heap->base(), kHeapBytes});
    allowed.push_back({out.data(), out.size()});
    for (int i = 0; i < 1 << 17; ++i) memory[i] = char(i * 7);
  }

  std::vector<PeerAddress> addresses() {
    std::vector<PeerAddress> all;
    for (int r = 0; r < 2; ++r)
      all.push_back({heaps[r], heaps[r]->base(), kHeapBytes, comms[r]->region_offset(), 0,
                     comms[r]->proof()});
    return all;
  }
  void build() {
    for (int r = 0; r < 2; ++r)
      comms[r] =
          std::make_unique<Comm>(heaps[r], CommConfig{r, 2, kSlots, kSegmentBytes, 1'000'000'000});
  }
  // As if the peer had joined, published everything and left, so no wait blocks.
  void join(Stream published) {
    build();
    comms[0]->connect(addresses());
    for (const auto& comm : comms) comm->publish_members(1);
    const View& v = comms[0]->view();
    v.control(1)->reads_peers = 1;
    comms[0]->activate();
    for (int s = 0; s < int(Stream::kCount); ++s)
      v.signals(0, Stream(s), 0, 1)->consumed = 1u << 30;
    v.signals(0, published, 0, 1)->ready = 1u << 30;
    v.signals(0, Stream::kPair, 0, 1)->detached = 1;
  }
  void leave() {
    staged = {};
    if (comms[0]) comms[0]->view().signals(0, Stream::kPair, 0, 1)->detached = 1;
    for (auto& comm : comms) comm.reset();
  }
  // The peer's header for this rank; one case in eight keeps it unchanged and must succeed.
  bool publish(Stream s, CallHeader header) {
    const View& v = comms[0]->view();
    CallHeader* const lying = v.header(0, s, 0, 1, 1);
    *lying = header;
    const bool changed = below(8) != 0;
    if (changed) damage(lying, sizeof(header));
    if (lying->heap_offset == kNotInHeap && lying->process_ptr == 0)
      staged = {v.heaps[1], v.slot(1, Stream::kPair, 0, 0, 1), v.layout.segment_bytes};
    return changed;
  }
  CallHeader header(Collective collective, DType dtype, uint64_t bytes, uint64_t match, int redop) {
    // qemu-user has no process_vm_readv, so ranks under qemu cannot read another process.
    const bool in_heap = bytes > 0 && below(2) != 0,
               in_process = !in_heap && collective == Collective::kAllGather && below(2) != 0 &&
                            comms[0]->view().control(0)->reads_peers != 0;
    const CallId id{1, match, collective, int(dtype), redop, -1, Algorithm::kOneShot};
    const uint64_t offset = in_heap ? uint64_t(memory - heaps[1]->base()) : kNotInHeap;
    const uint64_t item_bytes = in_heap || (in_process && bytes > 0) ? bytes : kSegmentBytes;
    return {id,
            bytes,
            item_bytes,
            offset,
            1.0,
            kNotInHeap,
            in_process ? reinterpret_cast<uintptr_t>(memory) : 0};
  }
};

void must_be_ok(Status status, bool changed, const char* what) {
  if (changed || status == Status::kOk) return;
  std::fprintf(stderr, "%s: a sound header ended with status %d\n", what, int(status));
  std::abort();
}

Status gather(Pair& p) {
  const uint64_t bytes = any_of(kSizes);
  p.join(Stream::kShared);
  const CallHeader h = p.header(Collective::kAllGather, DType::kUInt8, bytes, 2 * bytes, -1);
  const bool changed = p.publish(Stream::kShared, h);
  const Status status =
      p.comms[0]->all_gather(p.own, p.out.data(), bytes, DType::kUInt8, Algorithm::kOneShot);
  must_be_ok(status, changed, "all_gather");
  if (!changed && (h.heap_offset != kNotInHeap || h.process_ptr != 0) &&
      std::memcmp(p.out.data() + bytes, p.memory, bytes) != 0)
    std::abort();
  return status;
}

Status scatter(Pair& p) {
  const uint64_t bytes = any_of(kSizes) / 4 * 4;
  p.join(Stream::kPair);
  const bool changed = p.publish(
      Stream::kPair, p.header(Collective::kReduceScatter, DType::kFloat32, bytes, 2 * bytes, 0));
  const Status status = p.comms[0]->reduce_scatter(
      p.own, p.out.data(), bytes / 4, {DType::kFloat32, RedOp::kSum, 1.0, Algorithm::kOneShot});
  must_be_ok(status, changed, "reduce_scatter");
  return status;
}

Status step(Pair& p) {
  constexpr uint64_t kElems = 8192;
  p.join(Stream::kPair);
  AdamWShard shard{};
  shard.bucket_elems = kElems;
  shard.param_dtype = DType::kFloat32;
  shard.params = p.own + (1 << 16);
  const GradCall grads{p.own, DType::kFloat32, RedOp::kSum, Algorithm::kOneShot};
  CallHeader h = p.header(Collective::kReduceScatterAdamWAllGather, DType::kFloat32, kElems / 2 * 4,
                          kElems, int(RedOp::kSum));
  h.id.root = int(DType::kFloat32);
  h.item_bytes = h.stream_bytes;
  h.heap_offset = uint64_t(p.memory - p.heaps[1]->base());
  h.result_offset = h.heap_offset + (1 << 16);
  const bool changed = p.publish(Stream::kPair, h);
  const Status status = p.comms[0]->reduce_scatter_adamw_all_gather(shard, grads);
  must_be_ok(status, changed, "step");
  return status;
}

Status receive(Pair& p) {
  const uint64_t bytes = any_of(kSizes), wanted = below(4) == 0 ? any_of(kSizes) : bytes;
  p.join(Stream::kMessage);
  CallHeader h = p.header(Collective::kSend, DType::kUInt8, bytes, bytes, -1);
  h.id.sequence = 0;
  h.id.root = 3;
  const bool changed = p.publish(Stream::kMessage, h);
  const bool fits = h.heap_offset != kNotInHeap || bytes <= kSlots * kSegmentBytes;
  // As many items as there are slots, or sometimes more than a sender can have published.
  const uint32_t ready = below(16) != 0 ? kSlots : uint32_t(random_bits());
  p.comms[0]->view().signals(0, Stream::kMessage, 0, 1)->ready = ready;
  Messenger messenger(*p.comms[0]);
  const int tag = below(4) == 0 ? 4 : 3;
  const RequestPtr r =
      messenger.post_receive(p.out.data(), wanted, below(2) ? 1 : -1, tag, DType::kUInt8);
  const Status status = messenger.wait(r, 30'000'000);
  must_be_ok(status, changed || wanted != bytes || tag != 3 || !fits || ready != kSlots, "receive");
  if (r->done() && int(r->message_dtype) > int(DType::kCount)) std::abort();
  messenger.stop();
  return status;
}

Status fault(Pair& p) {
  p.join(Stream::kPair);
  ControlPage* page = p.comms[0]->view().control(1);
  for (uint64_t turns = 1 + below(20); turns > 0; --turns) damage(&page->fault, sizeof(Fault));
  std::memset(page->reason, 'x', sizeof(page->reason) - below(3));
  page->aborted = 1;
  FaultReport report;
  if (!p.comms[0]->faulted(&report)) std::abort();
  const Fault& f = report.fault;
  if (f.rank != 1 || f.peer < -1 || f.peer > 1 || f.status <= Status::kOk ||
      f.status > Status::kRefused || report.reason.size() > sizeof(page->reason))
    std::abort();
  if (describe(f.mine).empty() || describe(f.theirs).empty()) std::abort();
  return f.status;
}

Status announce(Pair& p) {
  p.build();
  std::vector<PeerAddress> all = p.addresses();
  PeerAddress& peer = all[1];
  auto* page = reinterpret_cast<ControlPage*>(p.heaps[1]->base() + peer.region_offset);
  const uint64_t region_bytes = p.comms[1]->region_bytes();
  const uint64_t kind = below(6);
  const bool changed = kind != 0;
  if (kind == 1) peer.region_offset = below(2) ? ~below(kHeapBytes) : below(kHeapBytes) / 64 * 64;
  if (kind == 2) peer.heap_bytes = peer.region_offset + below(region_bytes);
  if (kind == 3) peer.proof = random_bits() >> 1;
  if (kind == 4) page->rank = below(2) ? 0 : int32_t(random_bits());
  if (kind == 5) damage(page, offsetof(ControlPage, members));
  try {
    p.comms[0]->connect(all);
  } catch (const RegionError&) {
    must_be_ok(Status::kCorrupt, changed, "announce");
    return Status::kCorrupt;
  }
  if (page->rank != 1 || page->proof != peer.proof || page->magic != kRegionMagic ||
      region_bytes > peer.heap_bytes - peer.region_offset)
    std::abort();
  return Status::kOk;
}

}  // namespace

const KernelTable& ringcomm::kernels() {
  static const KernelTable table = [] {
    KernelTable t{};
    t.isa = "checked";
    t.copy = t.copy_streaming = copy;
    t.adamw = update;
    for (auto& row : t.reduce)
      for (ReduceFn& fn : row) fn = reduce;
    return t;
  }();
  return table;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  random_bits.seed(std::strtoull(argv[1], nullptr, 10));
  using Case = Status (*)(Pair&);
  const std::pair<const char*, Case> cases[] = {{"gather", gather}, {"scatter", scatter},
                                                {"step", step},     {"receive", receive},
                                                {"fault", fault},   {"announce", announce}};
  Pair pair;
  std::map<std::pair<std::string, int>, int> ended;
  for (long i = 0; i < std::atol(argv[2]); ++i) {
    const auto& [name, run] = cases[size_t(i) % std::size(cases)];
    ++ended[{name, int(run(pair))}];
    pair.leave();
  }
  for (const auto& [how, times] : ended)
    std::printf("%s %d %d\n", how.first.c_str(), how.second, times);
  return 0;
}
