// SPDX-License-Identifier: Apache-2.0

// Global memory as the PTX memory model allows a block to see it, at its worst.
//
// A weak load sees what its thread's view holds (history.h), and memory as it was before all else:
// whatever else came it has no right to see. A weak store stays in the block's buffer until a
// release that it happens before: by its own thread, or by another one behind a barrier. A weak
// store over bytes that another thread has read must come after that read: the reader has released
// since, and the writer's view holds that release; and so must one over bytes that another one of
// the block has stored, unless it stores the same. (Two blocks' stores are not compared: memory of
// the host that is freed and given to another rank would look like that.) So an acquire, a release
// or a barrier that lacks is an error every time, not only when a cache happens to be stale.
//
// A fence shows a thread what was told by the words that it has loaded before, strongly, and what
// it knows then is told by the words that it stores behind it. A fence.sc shows what all those knew
// that were before it.
//
// A multicast address is another way to memory, which multimem instructions take: one access to
// each address that is bound there. What was stored by one of the two ways is seen by the other
// only behind a fence.proxy.alias: of the thread itself, or of another one behind a barrier, made
// when that thread's view held the store. (PTX is content with one at the writer's, too.) A relaxed
// multimem load is taken for a weak one, which may see less.
//
// Stores of others (the host, copies, other processes) have no history: they are seen at once.
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

// Thrown where a kernel does what memory does not allow.
struct BadAccess : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Whether all of [address, address + bytes) is memory that kernels may use; what is around it comes
// back as a range that need not be asked for again.
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
// Has `watcher` called, in the thread of the block, whenever a strong store to the word has been
// made: what is in memory then is what others may see. nullptr: nobody any more.
using Watcher = void (*)();
void watch(uint64_t word, Watcher watcher);
bool find_range(uint64_t address, uint64_t bytes, Range& range);

// What a block has stored, and what its threads may see. Of one OS thread alone.
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
  // Of 1, 2, 4 or 8 bytes, at system scope.
  uint64_t load_strong(int thread, uint64_t address, uint32_t bytes, Order order);
  void store_strong(int thread, uint64_t address, uint64_t value, uint32_t bytes, Order order);
  // Replaces the value by change(value) at once, and returns what it was.
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
    std::array<uint32_t, kLineBytes> tag;  // who stored the byte, and in which phase
    std::array<Byte, kLineBytes> state{};
    std::array<Time, kLineBytes> released;  // when the byte was
    Bytes by_multicast;
    bool listed = false;  // among stored_
  };

  uint32_t tag(int thread) const { return phase_ << 10 | uint32_t(thread); }
  // Whether the thread may see a byte: it has stored it, or a barrier lies between.
  bool seen(uint32_t byte_tag, int thread) const {
    return byte_tag >> 10 < phase_ || byte_tag == tag(thread);
  }
  const View& view(int thread) const;
  const View& alias_view(int thread) const;
  void acquire(int thread, const View& stamp);
  void release(int thread);  // what the thread stored, and what a barrier lies behind
  // What a store that releases, or one behind a fence, tells whoever acquires it.
  View stamp(int thread, Order order, Time time) const;
  bool sees(int thread, const Change& change, uint32_t byte, const Line* line) const;
  Line& line_of(uint64_t number);
  Line* find_line(uint64_t number);
  // Makes stored bytes of the line that the thread may see everyone's.
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
  std::map<int, View> views_;   // of the threads that have acquired since the last barrier
  std::map<int, View> fenced_;  // of those that have passed a fence since: what they knew then
  std::map<int, View> heard_;   // what the words told that threads loaded: theirs behind a fence
  // What all threads, and those that have passed a fence.proxy.alias since, knew there.
  View common_alias_view_;
  std::map<int, View> alias_views_;
  uint32_t phase_ = 1;
  uint64_t strong_loads_ = 0, stores_ = 0;
  std::array<Range, 4> ranges_{};
  uint32_t next_range_ = 0;
};

// The shared memory of a block: its bytes know who wrote and read them since the last barrier.
class SharedMemory {
 public:
  explicit SharedMemory(uint32_t bytes);
  // Throw BadAccess out of bounds, of bytes that nobody wrote, and where no barrier lies between
  // one thread's store and another's load, one's load and another's store, two stores of different
  // values, or an atomic update and
  // anything else of another thread.
  void load(int thread, uint64_t address, void* to, uint32_t bytes);
  void store(int thread, uint64_t address, const void* from, uint32_t bytes);
  uint64_t begin_update(int thread, uint64_t address, uint32_t bytes);  // returns the value
  void end_update(uint64_t address, uint64_t value, uint32_t bytes);
  void barrier() { ++phase_; }

 private:
  // Of a byte: who did it last, as phase << 10 | thread. 0: nobody.
  struct Uses {
    uint32_t stored = 0, updated = 0, read = 0;
    bool was_written = false;
  };
  uint64_t checked(uint64_t address, uint32_t bytes) const;
  void check_others(int thread, uint64_t at, uint32_t use, const char* does, const char* did) const;
  void note(int thread, uint32_t& use) const;
  static constexpr uint32_t kSeveral = 1023;  // threads, in place of one
  uint32_t phase_ = 1;
  std::vector<uint8_t> data_;
  std::vector<Uses> uses_;
};

}  // namespace ptx
