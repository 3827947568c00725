// SPDX-License-Identifier: Apache-2.0

// Communicators and messengers of kernels/host under ThreadSanitizer. Ranks of one process make
// collectives, and send and receive from a second thread. A third thread aborts their
// communicators, which are closed and built again over the same memory.
// tests/proof/races/test_comm_races.py also builds it with mutants, each of which must fail.
//
//   comm_race_test WORLD GENERATIONS ROUNDS [MILLISECONDS]    the last: how long a wait lasts
//   comm_race_test SECONDS [MILLISECONDS]    the owner of a fault record stops; an alarm after that
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/host/messenger.h"
#include "kernels/host/retired.h"
#include "tests/proof/races/race_heap.h"

using namespace ringcomm;
using namespace ringcomm::host;

namespace ringcomm {
const KernelTable& kernels() { return kBaselineKernels; }
}  // namespace ringcomm

namespace {

constexpr uint32_t kSegmentBytes = 4096;
constexpr uint64_t kElems = 3 * kSegmentBytes / sizeof(float) + 5;  // four segments, the last short
uint64_t timeout_ns = 120'000'000'000;

[[noreturn]] void give_up(int rank, const char* what) {
  std::fprintf(stderr, "rank %d: %s\n", rank, what);
  std::_Exit(1);
}

float value(int rank, uint64_t i, int round) {
  return float((uint64_t(rank) * 7 + i * 3 + uint64_t(round)) % 11) - 5;
}

struct Rank {
  std::unique_ptr<Comm> comm;
  std::unique_ptr<Messenger> messenger;
};

struct World {
  int size, rounds;
  std::shared_ptr<Heap> heap = std::make_shared<Heap>(64 << 20, "");
  std::vector<Rank> ranks;
  pthread_barrier_t all;

  World(int n, int r) : size(n), rounds(r), ranks(size_t(n)) {
    pthread_barrier_init(&all, nullptr, unsigned(n));
  }
  void sync() { pthread_barrier_wait(&all); }
};

void build(World& w, int rank) {
  Rank& mine = w.ranks[size_t(rank)];
  mine.comm = std::make_unique<Comm>(
      w.heap, CommConfig{rank, w.size, 2, kSegmentBytes, timeout_ns, 8, "race"});
  mine.messenger = std::make_unique<Messenger>(*mine.comm);
  w.sync();
  std::vector<PeerAddress> peers;
  for (const Rank& peer : w.ranks) peers.push_back(address_of(w.heap, *peer.comm));
  mine.comm->connect(peers);
  w.sync();
  mine.comm->activate();
}

bool all_reduce(World& w, int rank, int round, float* data, Algorithm algorithm) {
  for (uint64_t i = 0; i < kElems; ++i) data[i] = value(rank, i, round);
  const Reduction sum{DType::kFloat32, RedOp::kSum, 1.0, algorithm};
  char* bytes = reinterpret_cast<char*>(data);
  if (w.ranks[size_t(rank)].comm->all_reduce(bytes, bytes, kElems, sum) != Status::kOk)
    return false;
  for (uint64_t i = 0; i < kElems; ++i) {
    float wanted = 0;
    for (int r = 0; r < w.size; ++r) wanted += value(r, i, round);
    if (data[i] != wanted) give_up(rank, "a wrong sum");
  }
  return true;
}

// Runs until a call fails or all rounds are made.
void collectives(World& w, int rank) {
  const Allocation in_heap(*w.heap, kElems * sizeof(float));
  std::vector<float> plain(kElems);
  for (int round = 0; round < w.rounds; ++round) {
    const bool ok = all_reduce(w, rank, round, plain.data(), Algorithm::kOneShot) &&
                    all_reduce(w, rank, round, plain.data(), Algorithm::kRing) &&
                    all_reduce(w, rank, round, in_heap.data(), Algorithm::kOneShot) &&
                    w.ranks[size_t(rank)].comm->barrier() == Status::kOk;
    if (!ok) break;
  }
}

// Sends to the next rank and receives from the previous one, from staging and with zero copy
// alternately.
void messages(World& w, int rank) {
  const int next = (rank + 1) % w.size, previous = (rank + w.size - 1) % w.size;
  Messenger& messenger = *w.ranks[size_t(rank)].messenger;
  const Allocation in_heap(*w.heap, kElems * sizeof(float));
  std::vector<float> plain(kElems), received(kElems);
  if (rank % 2 == 0) messenger.drive_in_background();
  for (int round = 0; round < w.rounds; ++round) {
    float* data = round % 2 == 0 ? plain.data() : in_heap.data();
    for (uint64_t i = 0; i < kElems; ++i) data[i] = value(rank, i, round);
    const uint64_t bytes = kElems * sizeof(float);
    const RequestPtr sent = messenger.post_send(reinterpret_cast<const char*>(data), bytes, next,
                                                round, DType::kFloat32),
                     got = messenger.post_receive(reinterpret_cast<char*>(received.data()), bytes,
                                                  previous, round, DType::kFloat32);
    const bool ok = messenger.wait(got, timeout_ns) == Status::kOk;
    for (uint64_t i = 0; ok && i < kElems; ++i)
      if (received[i] != value(previous, i, round)) give_up(rank, "a wrong message");
    if (messenger.wait(sent, timeout_ns) != Status::kOk || !ok) break;
  }
}

// One generation of the communicator; with `abort_by` >= 0 that rank ends it early.
void generation(World& w, int rank, int abort_by) {
  build(w, rank);
  std::thread second(messages, std::ref(w), rank), third;
  if (rank == abort_by)
    third = std::thread([&] { w.ranks[size_t(rank)].comm->abort("by a third thread"); });
  collectives(w, rank);
  second.join();
  if (third.joinable()) third.join();
  FaultReport report;
  const bool faulted = w.ranks[size_t(rank)].comm->faulted(&report);
  if (faulted && (report.fault.rank != abort_by || report.reason != "by a third thread"))
    give_up(rank, "a fault that nobody made");
  w.ranks[size_t(rank)].messenger->stop();
  const uint64_t region_bytes = w.ranks[size_t(rank)].comm->region_bytes();
  w.ranks[size_t(rank)].comm->close();
  {
    // This may be the region just closed, once no peer stores there any more.
    const Allocation next(*w.heap, region_bytes);
    std::fill_n(next.data(), region_bytes / sizeof(float), 1.0f);
  }
  w.sync();
  w.ranks[size_t(rank)] = Rank{};
  w.sync();
}

using Call = void (*)(Rank&);
// Only rank 0 makes these calls, so they fail.
const Call kCalls[] = {
    [](Rank& r) { r.comm->barrier(); },
    [](Rank& r) { r.comm->abort("beside another"); },
    [](Rank& r) {
      char byte = 0;
      r.messenger->wait(r.messenger->post_receive(&byte, 1, 1, 0, DType::kUInt8), timeout_ns);
    },
};

// Two ranks. A thread of rank 0 that makes no call has claimed the rank's fault record.
struct Claimed {
  World w{2, 1};
  ControlPage* page;
  Fault* record;

  Claimed() {
    std::thread other(build, std::ref(w), 1);
    build(w, 0);
    other.join();
    Comm& comm = *w.ranks[0].comm;
    comm.set_timeout_ns(1'000'000);
    page = comm.view().control(0);
    record = claim_fault(comm.view());
  }
  ~Claimed() {
    for (Rank& rank : w.ranks) rank.messenger->stop();
    for (Rank& rank : w.ranks) rank.comm->close();
  }
  Status reported() const {
    FaultReport report;
    if (!w.ranks[1].comm->faulted(&report) || report.fault.rank != 0) give_up(1, "no report");
    return report.fault.status;
  }
};

// The record's owner raises the abort word late; no call may return before that.
void nothing_returns_before_the_word() {
  for (const Call call : kCalls) {
    Claimed c;
    std::atomic<bool> returned = false;
    std::thread caller([&] {
      call(c.w.ranks[0]);
      if (load_acquire_sys(&c.page->aborted) == 0) give_up(0, "returned before the abort word");
      returned = true;
    });
    for (int naps = 0; naps < 40 && !returned; ++naps) usleep(5000);
    store_release_sys(&c.page->aborted, kRaised);
    caller.join();
  }
}

// The record's owner stops in the middle of the record. Every call returns with the word raised,
// and no rank reads the record until the owner has continued and completed it.
void calls_outlast_the_owner(unsigned seconds) {
  alarm(seconds);
  Claimed claimed[std::size(kCalls)];
  std::vector<std::thread> callers;
  for (size_t i = 0; i < std::size(kCalls); ++i) {
    claimed[i].record->status = Status::kTimeout;
    callers.emplace_back([call = kCalls[i], &c = claimed[i]] {
      call(c.w.ranks[0]);
      if (load_acquire_sys(&c.page->aborted) == 0) give_up(0, "returned before the abort word");
    });
  }
  for (std::thread& t : callers) t.join();
  for (Claimed& c : claimed) {
    if (c.reported() != Status::kAborted) give_up(1, "a record that is not complete");
    Comm& comm = *c.w.ranks[0].comm;
    raise_fault(SoloTeam{{&comm.waiter()}}, comm.view());
    if (c.reported() != Status::kTimeout) give_up(1, "a record that was lost");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 || argc == 3) {
    calls_outlast_the_owner(unsigned(std::atoi(argv[1])));
    std::puts("ok");
    return 0;
  }
  if (argc != 4 && argc != 5) return 2;
  if (argc == 5) timeout_ns = std::strtoull(argv[4], nullptr, 10) * 1'000'000;
  nothing_returns_before_the_word();
  World w(std::atoi(argv[1]), std::atoi(argv[3]));
  const uint64_t before = w.heap->used_bytes();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < w.size; ++rank)
    threads.emplace_back([&w, rank, generations = std::atoi(argv[2])] {
      // Every second generation is aborted, by each rank in turn.
      for (int g = 0; g < generations; ++g) generation(w, rank, g % 2 == 0 ? -1 : g / 2 % w.size);
    });
  for (std::thread& t : threads) t.join();
  RetiredRegions::instance().reclaim();
  if (w.heap->used_bytes() != before) give_up(-1, "memory that was not given back");
  std::puts("ok");
  return 0;
}
