// SPDX-License-Identifier: Apache-2.0

// The pool of a scratch file, whose system calls are late, short or interrupted.
// tests/proof/races/test_scratch_races.py runs it under ThreadSanitizer, and mutants of the pool.
//
//   scratch_test SEED SECONDS
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernels/host/scratch.h"
#include "tests/proof/races/scratch_calls.h"

namespace {

using namespace ringcomm::host;

constexpr uint64_t kPage = kScratchPageBytes, kCut = 2 * kPage, kExtent = 3 * kCut;
constexpr int kThreads = 4, kExtents = 3, kCuts = 8;  // pieces of memory, each a cut long
constexpr int kPlays = 60;
constexpr ScratchPool::Limit kAMinute{60};

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::_Exit(1);  // exit() hangs if two threads call it
}

struct Memory {
  explicit Memory(uint64_t bytes)
      : begin(static_cast<char*>(std::aligned_alloc(kPage, bytes))), bytes(bytes) {}
  ~Memory() { std::free(begin); }
  char* const begin;
  const uint64_t bytes;
};

struct Bench {
  int fd = memfd_create("scratch", 0);
  ScratchPool pool{fd, kThreads, kCut};
  uint32_t extent[kExtents];
  Bench() {
    for (uint32_t& each : extent) expect(pool.add_extent(kExtent, &each) == 0, "an extent");
  }
  ~Bench() {
    expect(pool.close(kAMinute), "a pool that ends");
    close(fd);
  }
  ScratchRequestPtr begin(bool is_write, uint32_t which, char* memory, uint64_t bytes) {
    ScratchRequestPtr request;
    const auto refusal = pool.submit({is_write, which, memory, bytes}, &request);
    expect(refusal == ScratchPool::Refusal::kNone, "a request that fits");
    return request;
  }
  ScratchResult end(const ScratchRequestPtr& request) {
    const auto waited = pool.wait(*request, [] { return false; }, kAMinute);
    expect(waited == ScratchPool::Waited::kDone, "a wait that nobody interrupts");
    return pool.result(*request);
  }
  ScratchResult run(bool is_write, uint32_t which, Memory& memory) {
    return end(begin(is_write, which, memory.begin, memory.bytes));
  }
};

// Requests that share extents and memory, all submitted at once, end as if they ran one by one.
void play_in_order(unsigned seed) {
  std::mt19937 drawn(seed);
  Bench bench;
  Memory memory(kCuts * kCut);
  std::vector<char> model(memory.bytes), contents[kExtents];
  for (char& byte : model) byte = char(drawn());
  std::memcpy(memory.begin, model.data(), model.size());
  std::vector<ScratchRequestPtr> requests;
  for (int play = 0; play < kPlays; ++play) {
    const unsigned which = drawn() % kExtents;
    std::vector<char>& content = contents[which];
    const bool reads = drawn() % 2 == 0;
    const bool zeros = reads && content.empty();
    const uint64_t cuts = reads && !zeros ? content.size() / kCut : drawn() % 2 == 0 ? 1 : 3;
    const uint64_t start = drawn() % (kCuts - cuts + 1) * kCut, bytes = cuts * kCut;
    requests.push_back(bench.begin(!reads, bench.extent[which], memory.begin + start, bytes));
    if (zeros)
      std::memset(model.data() + start, 0, bytes);
    else if (reads)
      std::memcpy(model.data() + start, content.data(), bytes);
    else
      content.assign(model.begin() + long(start), model.begin() + long(start + bytes));
  }
  for (const ScratchRequestPtr& request : requests)
    expect(bench.end(request).end == ScratchEnd::kDone, "a request that ends well");
  expect(std::memcmp(memory.begin, model.data(), model.size()) == 0, "the bytes of the model");
}

// Every fault ends its request at its place, and all later requests of that extent, but no others.
template <class Damage>
void fault(ScratchEnd end, int code, Damage damage) {
  Bench bench;
  Memory memory(kExtent), other(kExtent);
  std::memset(memory.begin, 7, kExtent);
  std::memset(other.begin, 9, kExtent);
  expect(bench.run(true, bench.extent[0], memory).end == ScratchEnd::kDone, "a write");
  expect(bench.run(true, bench.extent[1], other).end == ScratchEnd::kDone, "a write");
  damage(bench.fd);
  const ScratchRequestPtr first = bench.begin(false, bench.extent[1], memory.begin, kExtent);
  const ScratchRequestPtr second = bench.begin(true, bench.extent[1], memory.begin, kExtent);
  const ScratchResult result = bench.end(first);
  const uint64_t offset = result.offset;
  expect(result.end == end, "the fault");
  // A damaged extent has one damaged cut; other faults name the first of the three cuts that ends.
  if (end == ScratchEnd::kDamaged) expect(offset == kExtent + kCut, "the cut that is damaged");
  expect(offset >= kExtent && offset < 2 * kExtent && result.bytes == kCut, "a cut of the extent");
  expect(result.code == code, "the error of the system");
  for (const ScratchResult& later : {bench.end(second), bench.run(false, bench.extent[1], other)})
    expect(later.end == end && later.offset == offset, "the first fault again");
  fail_next_calls(0, 0);
  expect(bench.run(false, bench.extent[0], other).end == ScratchEnd::kDone, "a sound extent");
  expect(other.begin[0] == 7 && other.begin[kExtent - 1] == 7, "what is in it");
}

void all_faults() {
  fault(ScratchEnd::kDamaged, 0, [](int fd) {
    const char flipped = 8;
    expect(pwrite(fd, &flipped, 1, off_t(kExtent + kCut)) == 1, "a byte that flips");
  });
  fault(ScratchEnd::kTruncated, 0,
        [](int fd) { expect(ftruncate(fd, off_t(kExtent)) == 0, "a file cut short"); });
  fault(ScratchEnd::kFailed, EIO, [](int) { fail_next_calls(-1, EIO); });
  fault(ScratchEnd::kStalled, 0, [](int) { fail_next_calls(1, 0); });
}

// At close() running requests may end, waiting requests must not begin, and none is left under way.
void close_under_way() {
  Bench bench;
  Memory memory(kExtent);
  std::memset(memory.begin, 1, kExtent);
  std::vector<ScratchRequestPtr> requests;
  hanging = true;
  const int calls_before = calls;
  for (int i = 0; i < kPlays; ++i)
    requests.push_back(bench.begin(true, bench.extent[i % 2], memory.begin, kExtent));
  while (calls == calls_before) usleep(100);
  // Two threads close it; both wait for the end, and neither returns before.
  const auto close_and_look = [&] {
    expect(bench.pool.close(kAMinute), "a pool that ends");
    for (const ScratchRequestPtr& request : requests)
      expect(request->done(), "a request that is over after close()");
  };
  std::thread other(close_and_look);
  std::thread ends([] {
    usleep(200'000);
    hanging = false;
  });
  close_and_look();
  other.join();
  ends.join();
  bool closed = false;
  for (const ScratchRequestPtr& request : requests) {
    const ScratchEnd end = bench.pool.result(*request).end;
    expect(end == ScratchEnd::kDone || end == ScratchEnd::kClosed, "done, or closed");
    expect(!closed || end == ScratchEnd::kClosed, "nothing that ran after what did not");
    closed |= end == ScratchEnd::kClosed;
  }
  expect(closed, "some that did not run");
  std::memset(memory.begin, 2, kExtent);  // a race, if a transfer were under way
}

// Waiting and closing give up at their limits, and a transfer that hung ends well.
void hang() {
  constexpr ScratchPool::Limit kShort{0.02};
  Bench bench;
  Memory memory(kExtent);
  std::memset(memory.begin, 1, kExtent);
  hanging = true;
  const ScratchRequestPtr request = bench.begin(true, bench.extent[1], memory.begin, kExtent);
  const auto waited = bench.pool.wait(*request, [] { return false; }, kShort);
  expect(waited == ScratchPool::Waited::kLate, "a wait that gives up");
  const ScratchResult late = bench.pool.result(*request);
  expect(late.end == ScratchEnd::kLate && late.is_write, "a write that is late");
  expect(late.offset == kExtent && late.bytes == kExtent, "where it is");
  expect(!bench.pool.close(kShort), "a pool that does not end");
  expect(!request->done(), "a request that goes on");
  hanging = false;
  expect(bench.pool.close(kAMinute), "a pool that ends");
  std::memset(memory.begin, 2, kExtent);  // a race, if the transfer were under way
  const ScratchEnd end = bench.pool.result(*request).end;
  // Perhaps no thread began some of its three cuts.
  expect(end == ScratchEnd::kDone || end == ScratchEnd::kClosed, "an end of its own");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  alarm(unsigned(std::atoi(argv[2])));  // ends the process if it hangs
  const auto seed = unsigned(std::atoi(argv[1]));
  for (unsigned round = 0; round < 4; ++round) play_in_order(seed + round);
  all_faults();
  close_under_way();
  hang();
  std::puts("ok");
  return 0;
}
