// SPDX-License-Identifier: Apache-2.0

// Global memory as a block sees it, with the weakest behaviour that the PTX memory model allows.
//
// A weak load sees the stores in its thread's view (history.h), and otherwise the memory's old
// contents: it has no right to see any other store. A weak store stays in the block's buffer until
// a release that it happens before: a release by its own thread, or by another thread behind a
// barrier. If a weak store overwrites bytes that another thread has read, it must come after this
// read: the reader has released since, and the writer's view contains that release. The same holds
// for bytes that another thread of the block has stored, unless the value is the same. (Stores of
// two blocks are not compared: host memory that is freed and given to another rank would look like
// a conflict.) So a missing acquire, release or barrier is an error every time, not only when a
// cache happens to be stale.
//
// A fence gives its thread the stamps of the words that the thread has loaded before with strong
// loads, and passes the resulting knowledge on to the words that the thread stores behind the
// fence. A fence.sc also gives its thread the knowledge of all earlier fence.sc.
//
// A multicast address is a second way to memory, for multimem instructions: one access reaches each
// address that is bound there. A store by one way is visible to the other way only behind a
// fence.proxy.alias. This fence must be executed by the reading thread, or by another thread before
// a barrier, when the view of that thread contains the store. (PTX also accepts a fence by the
// writer.) A relaxed multimem load counts as a weak load, which may see less.
//
// Stores by others (the host, copies, other processes) have no history and are visible at once.
// Source: PTX ISA 9.0, section 8, "Memory Consistency Model".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "tests/ptx_interpreter/source/history.h"
#include "tests/ptx_interpreter/source/interpreter.h"
#include "tests/ptx_interpreter/source/module.h"

namespace ptx {

// Thrown when a kernel makes an access that the memory model does not allow.
struct BadAccess : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Whether kernels may use all of [address, address + bytes); `range` returns the surrounding range,
// for which no further look is needed.
struct Range {
  uint64_t begin = 0, end = 0;
  bool holds(uint64_t address, uint64_t bytes) const {
    return begin <= address && address <= end && bytes <= end - address;
  }
};
extern PtxMemory driver_memory;
void allow(Range range);  // besides the driver's own memory
void forget_allowed();
// Unless strict, kernels may use the rest of the process's memory, too.
void be_strict(bool strict);
// Calls `watcher`, in the thread of the block, after each strong store to the word: other observers
// may then see the current contents of memory. nullptr ends this.
using Watcher = void (*)();
void watch(uint64_t word, Watcher watcher);
bool find_range(uint64_t address, uint64_t bytes, Range& range);

// The stores of a block, and what its threads may see. One OS thread uses it.
class BlockMemory {
 public:
  BlockMemory(KernelHistory& kernel, int threads, bool replicates_reads);
  ~BlockMemory();  // the end of a block releases
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  // Within a line. Weak.
  void load(int thread, uint64_t address, void* to, uint32_t bytes, bool by_multicast = false);
  void store(int thread, uint64_t address, const void* from, uint32_t bytes,
             bool by_multicast = false);
  // Accesses of 1, 2, 4 or 8 bytes, at system scope.
  uint64_t load_strong(int thread, uint64_t address, uint32_t bytes, Order order);
  void store_strong(int thread, uint64_t address, uint64_t value, uint32_t bytes, Order order);
  // Replaces the value by change(value) atomically, and returns the old value.
  uint64_t update(int thread, uint64_t address, uint32_t bytes, Order order,
                  const std::function<uint64_t(uint64_t)>& change);
  void fence(int thread);
  void fence_sc(int thread);
  void fence_alias(int thread);
  void barrier();  // of all threads

  void check(uint64_t address, uint32_t bytes);
  uint64_t strong_loads() const { return strong_loads_; }
  uint64_t stores() const { return stores_; }

 private:
  enum class Byte : uint8_t { kNone, kStored, kReleased };
  struct Line {
    std::array<uint8_t, kLineBytes> data;
    std::array<uint32_t, kLineBytes> tag;  // the thread that stored the byte, and its phase
    std::array<Byte, kLineBytes> state{};
    std::array<Time, kLineBytes> released;  // when the byte was
    Bytes by_multicast;
    bool listed = false;  // among stored_
  };

  uint32_t tag(int thread) const { return phase_ << 10 | uint32_t(thread); }
  // Whether the thread may see a byte: the thread has stored it, or a barrier was in between.
  bool seen(uint32_t byte_tag, int thread) const {
    return byte_tag >> 10 < phase_ || byte_tag == tag(thread);
  }
  const View& view(int thread) const;
  const View& alias_view(int thread) const;
  void acquire(int thread, const View& stamp);
  void release(int thread);  // releases the thread's stores, and those before a barrier
  // The stamp of a releasing store, or of one behind a fence: the view that its acquirers get.
  View stamp(int thread, Order order, Time time) const;
  bool sees(int thread, const Change& change, uint32_t byte, const Line* line) const;
  Line& line_of(uint64_t number);
  Line* find_line(uint64_t number);
  // Makes stored bytes of the line, as far as the thread may see them, visible to everybody.
  void release_line(uint64_t number, Line& line, int thread);
  void release_range(int thread, uint64_t address, uint32_t bytes);
  void note_strong(int thread, uint64_t address, const void* from, uint32_t bytes, Time time);
  void note_read(LineHistory& history, int thread, uint64_t address, uint32_t bytes);
  void release_reads(int thread);
  void check_readers(int thread, uint64_t address, uint32_t bytes) const;
  void check_writers(int thread, uint64_t address, const uint8_t* from, uint32_t bytes);

  KernelHistory& kernel_;
  const uint64_t id_;
  const bool replicates_reads_;
  std::vector<uint64_t> read_lines_;  // numbers of the lines with reads that are not released
  std::unordered_map<uint64_t, Line> lines_;
  std::vector<uint64_t> stored_;  // numbers of the lines with stored bytes
  uint64_t last_number_ = ~uint64_t(0);
  Line* last_line_ = nullptr;
  View common_view_;
  std::map<int, View> views_;   // after an acquire since the last barrier
  std::map<int, View> fenced_;  // after a fence since: the view at the fence
  std::map<int, View> heard_;   // stamps of loaded words: views after a fence
  // The views of all threads, and of single threads since, at their fence.proxy.alias.
  View common_alias_view_;
  std::map<int, View> alias_views_;
  uint32_t phase_ = 1;
  uint64_t strong_loads_ = 0, stores_ = 0;
  std::array<Range, 4> ranges_{};
  uint32_t next_range_ = 0;
};

// The shared memory of a block: each byte knows its writers and readers since the last barrier.
class SharedMemory {
 public:
  explicit SharedMemory(uint32_t bytes);
  // Throw BadAccess out of bounds, for bytes that nobody wrote, and for accesses of two threads
  // without a barrier in between: a store and a load in either order, two stores of different
  // values, or an atomic update and any other access.
  void load(int thread, uint64_t address, void* to, uint32_t bytes);
  void store(int thread, uint64_t address, const void* from, uint32_t bytes);
  uint64_t begin_update(int thread, uint64_t address, uint32_t bytes);  // returns the value
  void end_update(uint64_t address, uint64_t value, uint32_t bytes);
  void barrier() { ++phase_; }

 private:
  // The last thread that used a byte in each way, as phase << 10 | thread. 0: nobody.
  struct Uses {
    uint32_t stored = 0, updated = 0, read = 0;
    bool was_written = false;
  };
  uint64_t checked(uint64_t address, uint32_t bytes) const;
  void check_others(int thread, uint64_t at, uint32_t use, const char* does, const char* did) const;
  void note(int thread, uint32_t& use) const;
  static constexpr uint32_t kSeveral = 1023;  // several threads
  uint32_t phase_ = 1;
  std::vector<uint8_t> data_;
  std::vector<Uses> uses_;
};

}  // namespace ptx
