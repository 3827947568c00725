// SPDX-License-Identifier: Apache-2.0

// The changes of global memory by this process's kernels, and what a kernel may know of them.
//
// Terms. A *change* is a store to a line: who made it, when, and the line's previous contents. A
// *view* is the knowledge of a thread: from the kernels that come before its own, and from each
// release that the thread, or a peer whose release it acquired, has acquired. A release leaves a
// *stamp* at its word: the view of its thread and everything that its block has released. Times
// count the changes and releases of the whole process.
//
// A kernel comes after the earlier kernels of its stream, and after all kernels that had ended when
// its stream waited for another stream, or the host waited. When the host waits and no kernel runs,
// the history ends.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace ptx {

constexpr uint32_t kLineBytes = 128;
using Time = uint64_t;

class View {
 public:
  bool holds(uint64_t block, Time time) const;
  Time all() const { return all_; }
  void learn(uint64_t block, Time time);
  void learn_all(Time time);
  void join(const View& other);

 private:
  Time all_ = 0;                                    // of every block
  std::vector<std::pair<uint64_t, Time>> of_some_;  // by block, later than that
};

// Bytes of a line.
struct Bytes {
  std::array<uint64_t, kLineBytes / 64> words{};
  void add(uint32_t begin, uint32_t count) {
    for (uint32_t b = begin; b < begin + count; ++b) words[b / 64] |= uint64_t(1) << b % 64;
  }
  void remove(uint32_t begin, uint32_t count) {
    for (uint32_t b = begin; b < begin + count; ++b) words[b / 64] &= ~(uint64_t(1) << b % 64);
  }
  bool has(uint32_t b) const { return (words[b / 64] >> b % 64 & 1) != 0; }
};

struct Change {
  Time time;
  uint64_t block;
  Bytes bytes;
  Bytes by_multicast;  // the bytes that were stored at a multicast address
  std::array<uint8_t, kLineBytes> before;
};

// The reads of a line by one block: for each byte the last reader, the reader's phase (0: no
// reader), and the time at which the read was released.
struct Reads {
  uint64_t block;
  std::array<uint32_t, kLineBytes> tag{};
  std::array<Time, kLineBytes> released{};
};
constexpr Time kNotReleased = ~Time(0);

struct LineHistory {
  std::vector<Change> changes;      // the oldest first
  std::vector<Reads> reads;         // by block
  std::map<uint32_t, View> stamps;  // by the word's position in the line
};

// The history of a line, locked: no other thread may read or write the history meanwhile, nor the
// line if it keeps a history.
class LockedLine {
 public:
  explicit LockedLine(uint64_t number);
  LockedLine(const LockedLine&) = delete;
  LockedLine& operator=(const LockedLine&) = delete;

  LineHistory* find() const;
  LineHistory& make();
  // Records the contents of the line before `block` changes some of it. Returns the change.
  Change& change(uint64_t block);

 private:
  const uint64_t number_;
  std::unique_lock<std::mutex> lock_;
};

// A fence.sc of a thread with this view: returns the view of all threads that pass it later.
View pass_fence_sc(const View& view);

Time now();
Time tick();  // a new time
uint64_t new_block();

// A launch, in the thread of its stream, from its begin to its end.
class KernelHistory {
 public:
  KernelHistory();
  ~KernelHistory();
  KernelHistory(const KernelHistory&) = delete;
  KernelHistory& operator=(const KernelHistory&) = delete;

  const View& before() const { return before_; }
  void block_ends(uint64_t block, const View& view);

 private:
  View before_, after_;
};

}  // namespace ptx
