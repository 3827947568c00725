// Global memory as the PTX memory model allows a block to see it, at its worst.
//
// Terms. A *change* is what a line held before a store, and when it was stored; the history keeps
// the changes of all kernels of this process. The *view* of a thread is the time of its last
// acquire, or of the last one in its block that a barrier lies behind. A weak load sees memory as
// it was at the view: whatever came later it has no right to see. A weak store stays in the block's
// buffer until a release that it happens before: by its own thread, or by another one behind a
// barrier. So an acquire, a release or a barrier that lacks is a wrong result every time, not only
// when a cache happens to be stale.
//
// Stores of others (the host, copies, other processes) have no history: they are seen at once.
// Source: PTX ISA 9.0, section 8, "Memory Consistency Model".
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "tests/support/ptx/module.h"

namespace ptx {

constexpr uint32_t kLineBytes = 128;

// Thrown where a kernel does what memory does not allow.
struct BadAccess : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The time of this process's kernels: it counts changes.
uint64_t now();
// Kernels that run: the history is dropped when none does.
void history_begins();
void history_ends();

// Whether all of [address, address + bytes) is memory that kernels may use; what is around it comes
// back as a range that need not be asked for again.
struct Range {
  uint64_t begin = 0, end = 0;
  bool holds(uint64_t address, uint64_t bytes) const {
    return begin <= address && address <= end && bytes <= end - address;
  }
};
void allow(Range range);  // besides the emulated devices' own memory
// Unless strict, kernels may use the rest of the process's memory, too.
void be_strict(bool strict);
bool find_range(uint64_t address, uint64_t bytes, Range& range);

// What a block has stored, and what its threads may see. Of one OS thread alone.
class BlockMemory {
 public:
  explicit BlockMemory(int threads);
  ~BlockMemory();  // the end of a block releases
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  // Within a line. Weak.
  void load(int thread, uint64_t address, void* to, uint32_t bytes);
  void store(int thread, uint64_t address, const void* from, uint32_t bytes);
  // Of 1, 2, 4 or 8 bytes, relaxed at system scope.
  uint64_t load_strong(int thread, uint64_t address, uint32_t bytes);
  void store_strong(int thread, uint64_t address, uint64_t value, uint32_t bytes);
  // Replaces the value by change(value) at once, and returns what it was.
  template <class F>
  uint64_t update(int thread, uint64_t address, uint32_t bytes, F change);

  void acquire(int thread) { acquired_[size_t(thread)] = now(); }
  void release(int thread);  // what the thread stored, and what a barrier lies behind
  void barrier();            // of all threads

  void check(uint64_t address, uint32_t bytes);
  uint64_t strong_loads() const { return strong_loads_; }
  uint64_t stores() const { return stores_; }

 private:
  enum class Byte : uint8_t { kNone, kStored, kReleased };
  struct Line {
    std::array<uint8_t, kLineBytes> data;
    std::array<uint32_t, kLineBytes> tag;  // who stored the byte, and in which phase
    std::array<Byte, kLineBytes> state{};
    std::array<uint64_t, kLineBytes> released;  // when the byte was
    uint64_t last_released = 0;
    bool listed = false;  // among stored_
  };

  uint32_t tag(int thread) const { return phase_ << 10 | uint32_t(thread); }
  // Whether the thread may see a byte: it has stored it, or a barrier lies between.
  bool seen(uint32_t byte_tag, int thread) const {
    return byte_tag >> 10 < phase_ || byte_tag == tag(thread);
  }
  uint64_t view(int thread) const { return std::max(acquired_[size_t(thread)], common_view_); }
  Line& line_of(uint64_t number);
  Line* find_line(uint64_t number);
  // Makes stored bytes of the line that the thread may see everyone's.
  void release_line(uint64_t number, Line& line, int thread);
  void release_range(int thread, uint64_t address, uint32_t bytes);
  void note_strong(int thread, uint64_t address, const void* from, uint32_t bytes, uint64_t time);

  std::unordered_map<uint64_t, Line> lines_;
  std::vector<uint64_t> stored_;  // numbers of the lines with stored bytes
  uint64_t last_number_ = ~uint64_t(0);
  Line* last_line_ = nullptr;
  std::vector<uint64_t> acquired_;
  uint64_t common_view_;
  uint64_t latest_acquire_ = 0;
  uint32_t phase_ = 1;
  uint64_t strong_loads_ = 0, stores_ = 0;
  std::array<Range, 4> ranges_{};
  uint32_t next_range_ = 0;
};

// A history entry's lock, for update(): see memory.cpp.
class LockedLine {
 public:
  explicit LockedLine(uint64_t number);
  ~LockedLine();
  LockedLine(const LockedLine&) = delete;
  LockedLine& operator=(const LockedLine&) = delete;
  uint64_t change();  // keeps what the line holds; returns the time

 private:
  uint64_t number_;
};

template <class F>
uint64_t BlockMemory::update(int thread, uint64_t address, uint32_t bytes, F change) {
  check(address, bytes);
  release_range(thread, address, bytes);
  uint64_t before = 0, after = 0, time = 0;
  {
    LockedLine locked(address / kLineBytes);
    time = locked.change();
    // Other processes may do the same.
    const auto exchange = [&](auto* at) {
      auto old = __atomic_load_n(at, __ATOMIC_RELAXED);
      do {
        after = change(uint64_t(old));
      } while (!__atomic_compare_exchange_n(at, &old, std::remove_reference_t<decltype(*at)>(after),
                                            false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
      before = old;
    };
    if (bytes == 4)
      exchange(reinterpret_cast<uint32_t*>(address));
    else
      exchange(reinterpret_cast<uint64_t*>(address));
  }
  note_strong(thread, address, &after, bytes, time);
  ++stores_;
  return before;
}

// The shared memory of a block: its bytes know who wrote and read them since the last barrier.
class SharedMemory {
 public:
  explicit SharedMemory(uint32_t bytes);
  // Throw BadAccess out of bounds, of bytes that nobody wrote, and where no barrier lies between
  // one thread's store and another's load, or one's load and another's store.
  void load(int thread, uint64_t address, void* to, uint32_t bytes);
  void store(int thread, uint64_t address, const void* from, uint32_t bytes, bool atomic = false);
  uint64_t read_for_update(uint64_t address, uint32_t bytes);
  void barrier() { ++phase_; }

 private:
  uint64_t checked(uint64_t address, uint32_t bytes) const;
  static constexpr uint32_t kSeveral = 1023;  // threads, in place of one
  uint32_t phase_ = 1;
  std::vector<uint8_t> data_;
  std::vector<uint32_t> written_, read_;  // phase << 10 | thread; 0: never
};

}  // namespace ptx
