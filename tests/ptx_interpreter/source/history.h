// SPDX-License-Identifier: Apache-2.0

// What kernels of this process have done to global memory, and what one of them may know of it.
//
// Terms. A *change* is what a store did to a line: who made it, when, and what was there before. A
// *view* is what a thread has been told: by the kernels that come before its own, and by each
// release that it or a peer it heard of has acquired. A release leaves a *stamp* at its word: the
// view of its thread and all that its block has released. Times count changes and releases of the
// whole process.
//
// Kernels that come before are the earlier ones of the stream, and all that had ended when somebody
// waited: the stream for another one, or the host. When the host waits and no kernel runs, the
// history ends.
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
  Bytes by_multicast;  // of those, what was stored at a multicast address
  std::array<uint8_t, kLineBytes> before;
};

// The reads of a line by one block: of each byte who read it last, in which phase (0: nobody did),
// and when that was released.
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

// The history of a line, which nobody else may read or write meanwhile, nor the line itself by what
// keeps a history.
class LockedLine {
 public:
  explicit LockedLine(uint64_t number);
  LockedLine(const LockedLine&) = delete;
  LockedLine& operator=(const LockedLine&) = delete;

  LineHistory* find() const;
  LineHistory& make();
  // Notes what the line holds now, before `block` changes some of it. Returns the change.
  Change& change(uint64_t block);

 private:
  const uint64_t number_;
  std::unique_lock<std::mutex> lock_;
};

// A fence.sc of a thread with this view: what those know that are behind it.
View pass_fence_sc(const View& view);

Time now();
Time tick();  // a new time
uint64_t new_block();

// A launch, in the thread of its stream from its begin to its end.
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
