// SPDX-License-Identifier: Apache-2.0

// A lender's call ends at any moment, and the lender then changes its buffer. If the reader's call
// reports success, it must have returned the lent data. The two ranks run in turn, so every run is
// the same: the reader stops before one of its steps or copies, a later one in each run, until the
// lender has given up. tests/proof/races/test_lending.py builds this program with mutants, each of
// which must fail.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "ringcomm/collectives/all_reduce.h"

using namespace ringcomm;

namespace {

constexpr int kWorld = 2, kLender = 0, kReader = 1, kSlots = 4;
constexpr uint32_t kSegmentBytes = 32'768;
constexpr uint64_t kChunkElems = 36'001;  // zero copy or single copy, five segments
constexpr uint64_t kChunkBytes = kChunkElems * sizeof(float);
constexpr uint64_t kElems = kWorld * kChunkElems, kTensorBytes = 290'816;
constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr float kChanged = 1e6;
static_assert(kElems * sizeof(float) <= kTensorBytes);
static_assert(kChunkBytes >= kSingleCopyMinBytes);

float value(int rank, uint64_t i) { return float((uint64_t(rank) * 7 + i * 3) % 11) - 5; }

// State that the two share outside of the protocol.
struct Shared {
  std::atomic<bool> give_up = false, returned = false, ended = false;
  // If set, the lender ends instead, and another process gets its number and this memory.
  float* taken_over = nullptr;
  int stop_before;  // the reader's event before which it stops
  int events = 0;
};

// The reader stops at an event; from then on the lender's clock runs.
struct Team {
  static constexpr bool kSleeps = false, kShareWaits = false, kReadsWhole = false,
                        kDealsTiles = false, kReadsProcesses = true;
  int rank;
  Shared* shared;
  uint64_t now = 1;

  static constexpr int lane() { return 0; }
  static constexpr int num_lanes() { return 1; }
  static constexpr int channel() { return 0; }
  static constexpr int num_channels() { return 1; }
  static constexpr Portion portion() { return {}; }
  static void sync() {}
  static Status share(Status status) { return status; }
  static Status health(int) { return Status::kOk; }
  static const CallHeader* other_call_recorded(const CallId&, int) { return nullptr; }
  static void wake(uint32_t*) {}
  static bool reads_processes() { return true; }
  static bool lends(const void*, uint64_t, bool) { return true; }
  bool has_ended(int) const { return shared->ended; }
  Status read_process(int, void* to, const void* from, uint64_t bytes) const {
    event();
    std::memcpy(to, from, bytes);
    return Status::kOk;
  }
  static void tell_host(const Fault&) {}
  bool pause(Pause&) const {
    std::this_thread::yield();
    return true;
  }
  uint64_t now_ns() {
    if (rank == kLender && shared->give_up) now += 2 * kTimeoutNs;
    return now;
  }
  void passing(Point, const View&, Stream) const { event(); }
  void event() const {
    if (rank != kReader || shared->events++ != shared->stop_before) return;
    if (shared->taken_over != nullptr) {
      std::fill_n(shared->taken_over, kChunkElems, kChanged);
      shared->ended = true;
      return;
    }
    shared->give_up = true;
    while (!shared->returned) std::this_thread::yield();
  }
};

struct Ops {
  static void copy_shared(Team& team, void* dst, const void* src, uint64_t bytes) {
    team.event();
    std::memmove(dst, src, bytes);
  }
  static void copy_private(Team& team, void* dst, const void* src, uint64_t bytes) {
    copy_shared(team, dst, src, bytes);
  }
  static void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from, uint64_t bytes,
                     int) {
    team.event();
    for (uint64_t i = 0; i < bytes / sizeof(float); ++i) {
      float sum = 0;
      for (int s = 0; s < from.count; ++s) sum += static_cast<const float*>(from.ptrs[s])[i];
      static_cast<float*>(to.dst)[i] = sum;
      if (to.also != nullptr) static_cast<float*>(to.also)[i] = sum;
    }
  }
};

using E = Endpoint<Team, Ops>;

struct Rank {
  std::vector<PeerState> in = std::vector<PeerState>(size_t(Stream::kCount) * kWorld);
  std::vector<const void*> sources = std::vector<const void*>(kWorld);
  std::vector<double> factors = std::vector<double>(kWorld);
  CallHeader mine{};
  float* lent = nullptr;  // in the heap
  std::vector<float> plain = std::vector<float>(kChunkElems);
  std::vector<float> result = std::vector<float>(kElems);
};

struct World {
  Layout layout{kWorld, 1, kSlots, kSegmentBytes, 0, 0};
  std::vector<char> arena;
  char *regions[kWorld], *heaps[kWorld];
  uint64_t heap_bytes[kWorld];
  Rank ranks[kWorld];
  Shared shared;

  explicit World(int stop_before) : shared{.stop_before = stop_before} {
    const uint64_t share = layout.region_bytes() + kTensorBytes;
    arena.resize(share * kWorld + 4096);
    char* base =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(arena.data()) + 4095) / 4096 * 4096);
    for (int r = 0; r < kWorld; ++r) {
      regions[r] = base + share * uint64_t(r);
      heaps[r] = base;
      heap_bytes[r] = share * kWorld;
      ranks[r].lent = reinterpret_cast<float*>(regions[r] + layout.region_bytes());
      for (uint64_t i = 0; i < kElems; ++i) ranks[r].lent[i] = value(r, i);
      std::copy_n(ranks[r].lent, kChunkElems, ranks[r].plain.data());
    }
  }
  View view(int r) {
    Rank& rank = ranks[r];
    return {r,
            kWorld,
            layout,
            regions,
            heaps,
            heap_bytes,
            kTimeoutNs,
            rank.in.data(),
            rank.sources.data(),
            rank.factors.data(),
            &rank.mine};
  }
};

struct Form {
  const char* name;
  bool from_process;
  Collective collective;
  Status (*run)(E& e, Rank& mine);
  bool (*right)(const Rank& mine);
};

char* bytes_of(float* ptr) { return reinterpret_cast<char*>(ptr); }
Chunks chunks_of(float* ptr) { return {bytes_of(ptr), 2 * kChunkBytes, kChunkBytes, nullptr}; }
float sum_at(uint64_t i) { return value(0, i) + value(1, i); }

template <class Expected>
bool all_are(const float* found, uint64_t count, Expected expected) {
  for (uint64_t i = 0; i < count; ++i)
    if (found[i] != expected(i)) return false;
  return true;
}

Status gather(E& e, float* from, Rank& mine) {
  return share_one_shot(e, Span{bytes_of(from), kChunkBytes}, chunks_of(mine.result.data()), -1);
}
bool is_gathered(const Rank& mine) {
  return all_are(mine.result.data(), kElems,
                 [](uint64_t i) { return value(int(i / kChunkElems), i % kChunkElems); });
}

const Form kForms[] = {
    {"all_gather", false, Collective::kAllGather,
     [](E& e, Rank& mine) { return gather(e, mine.lent, mine); }, is_gathered},
    {"single_copy", true, Collective::kAllGather,
     [](E& e, Rank& mine) { return gather(e, mine.plain.data(), mine); }, is_gathered},
    {"reduce_scatter", false, Collective::kReduceScatter,
     [](E& e, Rank& mine) {
       const Chunks in = chunks_of(mine.lent);
       return reduce_scatter_one_shot(e, in, bytes_of(mine.result.data()));
     },
     [](const Rank& mine) {
       return all_are(mine.result.data(), kChunkElems,
                      [](uint64_t i) { return sum_at(kReader * kChunkElems + i); });
     }},
    {"all_reduce", false, Collective::kAllReduce,
     [](E& e, Rank& mine) {
       const Chunks in = chunks_of(mine.lent);
       return all_reduce_two_shot(e, in, bytes_of(mine.lent), 0);
     },
     [](const Rank& mine) { return all_are(mine.lent, kElems, sum_at); }},
};

Status call(World& w, const Form& form, int rank) {
  View view = w.view(rank);
  Team team{rank, &w.shared};
  Ops ops;
  E e{team, view, ops};
  Rank& mine = w.ranks[rank];
  mine.mine = CallHeader{{1, 2 * kChunkBytes, form.collective, 0, 0, -1, Algorithm::kOneShot},
                         0,
                         0,
                         kNotInHeap,
                         1.0,
                         kNotInHeap};
  e.begin_streams();
  Status status = form.run(e, mine);
  if (status == Status::kOk) status = e.verify_peer_buffers();
  if (status != Status::kOk) await_raised(team, view);
  return status;
}

// Whether the reader reached the event; false also at the end of the program.
bool stopped(const Form& form, int before, bool ends) {
  World w(before);
  if (ends) w.shared.taken_over = w.ranks[kLender].plain.data();
  std::thread lender([&] {
    call(w, form, kLender);
    std::fill_n(w.ranks[kLender].lent, kElems, kChanged);
    std::fill_n(w.ranks[kLender].plain.data(), kChunkElems, kChanged);
    w.shared.returned = true;
  });
  const Status status = call(w, form, kReader);
  const bool right = form.right(w.ranks[kReader]);
  const bool came = w.shared.events > before;
  w.shared.give_up = true;  // the reader may have failed before its event
  lender.join();
  if (status == Status::kOk && !right) {
    std::printf("%s: a success with data of after the lender's call, event %d\n", form.name,
                before);
    std::exit(1);
  }
  if (!came && status != Status::kOk) {
    std::printf("%s: an undisturbed call failed\n", form.name);
    std::exit(1);
  }
  return came;
}

}  // namespace

int main() {
  for (const Form& form : kForms) {
    int events = 0;
    while (stopped(form, events, false)) ++events;
    for (int e = 0; e < events && form.from_process; ++e) stopped(form, e, true);
    std::printf("%s %d\n", form.name, events);
  }
  return 0;
}
