// SPDX-License-Identifier: Apache-2.0

#include "tests/ptx_interpreter/source/memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace ptx {
namespace {

struct Ranges {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> ends;  // by begin
};
Ranges& allowed() {
  static auto* const made = new Ranges;
  return *made;
}

// The functions to call right after a store to a word.
struct Watchers {
  std::mutex mutex;
  std::map<uint64_t, Watcher> by_word;
};
Watchers& watchers() {
  static auto* const made = new Watchers;
  return *made;
}

void tell_watcher(uint64_t word) {
  Watcher watcher = nullptr;
  {
    const std::lock_guard lock(watchers().mutex);
    const auto found = watchers().by_word.find(word);
    if (found != watchers().by_word.end()) watcher = found->second;
  }
  if (watcher != nullptr) watcher();
}

std::atomic<bool> is_strict{true};
constexpr uint64_t kPageBytes = 4096;
constexpr uint32_t kSeveralThreads = 1023, kMostThreads = 1023;  // in a tag

bool is_mapped(uint64_t page) {
  uint8_t byte;
  const iovec mine{&byte, 1}, there{reinterpret_cast<void*>(page), 1};
  return process_vm_readv(getpid(), &mine, 1, &there, 1, 0) == 1;
}

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

// Copies bytes in units that other processes see as a whole.
void copy_out(uint64_t address, const uint8_t* from, uint32_t bytes) {
  while (bytes > 0) {
    if (bytes >= 8 && address % 8 == 0) {
      uint64_t word;
      std::memcpy(&word, from, 8);
      __atomic_store_n(reinterpret_cast<uint64_t*>(address), word, __ATOMIC_RELAXED);
      address += 8, from += 8, bytes -= 8;
    } else {
      __atomic_store_n(reinterpret_cast<uint8_t*>(address), *from, __ATOMIC_RELAXED);
      ++address, ++from, --bytes;
    }
  }
}

uint64_t load_at_once(uint64_t address, uint32_t bytes) {
  switch (bytes) {
    case 1:
      return __atomic_load_n(reinterpret_cast<uint8_t*>(address), __ATOMIC_SEQ_CST);
    case 2:
      return __atomic_load_n(reinterpret_cast<uint16_t*>(address), __ATOMIC_SEQ_CST);
    case 4:
      return __atomic_load_n(reinterpret_cast<uint32_t*>(address), __ATOMIC_SEQ_CST);
    default:
      return __atomic_load_n(reinterpret_cast<uint64_t*>(address), __ATOMIC_SEQ_CST);
  }
}

void store_at_once(uint64_t address, uint64_t value, uint32_t bytes) {
  switch (bytes) {
    case 1:
      return __atomic_store_n(reinterpret_cast<uint8_t*>(address), uint8_t(value),
                              __ATOMIC_SEQ_CST);
    case 2:
      return __atomic_store_n(reinterpret_cast<uint16_t*>(address), uint16_t(value),
                              __ATOMIC_SEQ_CST);
    case 4:
      return __atomic_store_n(reinterpret_cast<uint32_t*>(address), uint32_t(value),
                              __ATOMIC_SEQ_CST);
    default:
      return __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_SEQ_CST);
  }
}

// The view that an acquire of a word gets. Unless strict, other processes may have stored the word,
// and their stores are already in memory.
View stamp_at(const LockedLine& locked, uint64_t address) {
  View told;
  if (!is_strict) told.learn_all(now());
  const LineHistory* history = locked.find();
  if (history == nullptr) return told;
  const auto found = history->stamps.find(uint32_t(address % kLineBytes));
  if (found != history->stamps.end()) told.join(found->second);
  return told;
}

}  // namespace

constinit PtxMemory driver_memory{
    [](uint64_t, uint64_t*, uint64_t*) { return 0; },
    [](uint64_t, uint64_t, uint64_t*, int) { return 0; },
};

void allow(Range range) {
  const std::lock_guard lock(allowed().mutex);
  uint64_t& end = allowed().ends[range.begin];
  end = std::max(end, range.end);
}

void forget_allowed() {
  const std::lock_guard lock(allowed().mutex);
  allowed().ends.clear();
}

bool find_range(uint64_t address, uint64_t bytes, Range& range) {
  uint64_t begin = 0, size = 0;
  if (driver_memory.find(address, &begin, &size) != 0) {
    range = {begin, begin + size};
    return range.holds(address, bytes);
  }
  const std::lock_guard lock(allowed().mutex);
  // Tensors are freed and others take their place, so ranges may overlap: any of them will do.
  for (auto it = allowed().ends.upper_bound(address); it != allowed().ends.begin();) {
    --it;
    range = {it->first, it->second};
    if (range.holds(address, bytes)) return true;
  }
  if (is_strict) return false;
  range = {address & ~(kPageBytes - 1), (address & ~(kPageBytes - 1)) + kPageBytes};
  return range.holds(address, bytes) && is_mapped(range.begin);
}

void be_strict(bool strict) { is_strict = strict; }

void watch(uint64_t word, Watcher watcher) {
  const std::lock_guard lock(watchers().mutex);
  watchers().by_word[word] = watcher;
}

BlockMemory::BlockMemory(KernelHistory& kernel, int threads, bool replicates_reads)
    : kernel_(kernel),
      id_(new_block()),
      replicates_reads_(replicates_reads),
      common_view_(kernel.before()),
      common_alias_view_(common_view_) {
  if (threads > int(kMostThreads)) throw BadAccess("a block of more than 1023 threads");
}

BlockMemory::~BlockMemory() {
  barrier();
  release(0);
  kernel_.block_ends(id_, common_view_);
}

const View& BlockMemory::view(int thread) const {
  const auto own = views_.find(thread);
  return own == views_.end() ? common_view_ : own->second;
}

const View& BlockMemory::alias_view(int thread) const {
  const auto own = alias_views_.find(thread);
  return own == alias_views_.end() ? common_alias_view_ : own->second;
}

void BlockMemory::acquire(int thread, const View& stamp) {
  views_.try_emplace(thread, common_view_).first->second.join(stamp);
}

View BlockMemory::stamp(int thread, Order order, Time time) const {
  View made;
  if (order == Order::kRelease || order == Order::kAcqRel) {
    made = view(thread);
    made.learn(id_, time);
  } else if (const auto fenced = fenced_.find(thread); fenced != fenced_.end()) {
    made = fenced->second;
  }
  return made;
}

// Within its block a thread sees its own changes, and those of other threads before a barrier.
bool BlockMemory::sees(int thread, const Change& change, uint32_t byte, const Line* line) const {
  if (change.block != id_) return view(thread).holds(change.block, change.time);
  if (line == nullptr || line->state[byte] == Byte::kNone) return true;
  return line->released[byte] != change.time || seen(line->tag[byte], thread);
}

BlockMemory::Line* BlockMemory::find_line(uint64_t number) {
  if (number == last_number_) return last_line_;
  const auto found = lines_.find(number);
  if (found == lines_.end()) return nullptr;
  last_number_ = number;
  return last_line_ = &found->second;
}

BlockMemory::Line& BlockMemory::line_of(uint64_t number) {
  if (Line* line = find_line(number)) return *line;
  last_number_ = number;
  last_line_ = &lines_[number];
  return *last_line_;
}

void BlockMemory::check(uint64_t address, uint32_t bytes) {
  for (const Range& range : ranges_)
    if (range.holds(address, bytes)) return;
  Range found;
  if (!find_range(address, bytes, found))
    throw BadAccess("global memory: " + std::to_string(bytes) + " bytes at " + hex(address) +
                    " are of no buffer");
  ranges_[next_range_++ % ranges_.size()] = found;
}

void BlockMemory::load(int thread, uint64_t address, void* to, uint32_t bytes, bool by_multicast) {
  check(address, bytes);
  const uint64_t number = address / kLineBytes, at = address % kLineBytes;
  auto* out = static_cast<uint8_t*>(to);
  const Line* line = lines_.empty() ? nullptr : find_line(number);
  {
    LockedLine locked(number);
    LineHistory& history = locked.make();
    note_read(history, thread, address, bytes);
    std::memcpy(out, reinterpret_cast<const void*>(address), bytes);
    // Undoes the changes that the thread may not see, from the newest to the first visible one.
    Bytes known;
    for (auto c = history.changes.rbegin(); c != history.changes.rend(); ++c) {
      if (c->time <= (by_multicast ? alias_view(thread) : view(thread)).all()) break;
      for (uint32_t i = 0; i < bytes; ++i) {
        if (!c->bytes.has(uint32_t(at) + i) || known.has(uint32_t(at) + i)) continue;
        const bool alias = by_multicast || c->by_multicast.has(uint32_t(at) + i);
        if (alias ? alias_view(thread).holds(c->block, c->time)
                  : sees(thread, *c, uint32_t(at) + i, line))
          known.add(uint32_t(at) + i, 1);
        else
          out[i] = c->before[at + i];
      }
    }
  }
  if (line == nullptr || by_multicast) return;
  for (uint32_t i = 0; i < bytes; ++i) {
    if (line->state[at + i] != Byte::kStored) continue;
    if (!seen(line->tag[at + i], thread)) {
      if (replicates_reads_) continue;
      throw BadAccess("global memory: a race: thread " + std::to_string(thread) +
                      " reads the byte at " + hex(address + i) +
                      " that another one has written with no barrier between");
    }
    if (!line->by_multicast.has(uint32_t(at) + i)) out[i] = line->data[at + i];
  }
}

void BlockMemory::store(int thread, uint64_t address, const void* from, uint32_t bytes,
                        bool by_multicast) {
  check(address, bytes);
  check_readers(thread, address, bytes);
  if (!by_multicast) check_writers(thread, address, static_cast<const uint8_t*>(from), bytes);
  const uint64_t number = address / kLineBytes, at = address % kLineBytes;
  Line& line = line_of(number);
  std::memcpy(line.data.data() + at, from, bytes);
  for (uint32_t i = 0; i < bytes; ++i) {
    line.tag[at + i] = tag(thread);
    line.state[at + i] = Byte::kStored;
  }
  if (by_multicast)
    line.by_multicast.add(uint32_t(at), bytes);
  else
    line.by_multicast.remove(uint32_t(at), bytes);
  if (!line.listed) stored_.push_back(number);
  line.listed = true;
  ++stores_;
}

void BlockMemory::release_line(uint64_t number, Line& line, int thread) {
  const auto goes = [&](uint32_t b) {
    return b < kLineBytes && line.state[b] == Byte::kStored && seen(line.tag[b], thread);
  };
  LockedLine locked(number);
  Change* change = nullptr;
  for (uint32_t i = 0; i < kLineBytes;) {
    if (!goes(i)) {
      ++i;
      continue;
    }
    if (change == nullptr) change = &locked.change(id_);
    const uint32_t begin = i;
    for (; goes(i); ++i) {
      line.state[i] = Byte::kReleased;
      line.released[i] = change->time;
      if (line.by_multicast.has(i)) change->by_multicast.add(i, 1);
    }
    change->bytes.add(begin, i - begin);
    copy_out(number * kLineBytes + begin, line.data.data() + begin, i - begin);
  }
}

void BlockMemory::release(int thread) {
  release_reads(thread);
  size_t kept = 0;
  for (const uint64_t number : stored_) {
    Line& line = lines_.at(number);
    release_line(number, line, thread);
    line.listed =
        std::find(line.state.begin(), line.state.end(), Byte::kStored) != line.state.end();
    if (line.listed) stored_[kept++] = number;
  }
  stored_.resize(kept);
}

void BlockMemory::note_read(LineHistory& history, int thread, uint64_t address, uint32_t bytes) {
  const uint64_t number = address / kLineBytes, at = address % kLineBytes;
  std::vector<Reads>& all = history.reads;
  auto mine = std::find_if(all.begin(), all.end(), [&](const Reads& r) { return r.block == id_; });
  if (mine == all.end()) mine = all.insert(all.end(), Reads{id_});
  if (std::find(mine->released.begin(), mine->released.end(), kNotReleased) == mine->released.end())
    read_lines_.push_back(number);
  for (uint64_t i = at; i < at + bytes; ++i) {
    const bool another = mine->released[i] == kNotReleased && !seen(mine->tag[i], thread);
    mine->tag[i] = another ? phase_ << 10 | kSeveralThreads : tag(thread);
    mine->released[i] = kNotReleased;
  }
}

void BlockMemory::release_reads(int thread) {
  if (read_lines_.empty()) return;
  const Time time = tick();
  std::erase_if(read_lines_, [&](uint64_t number) {
    LockedLine locked(number);
    bool left = false;
    for (Reads& reads : locked.make().reads) {
      if (reads.block != id_) continue;
      for (uint32_t i = 0; i < kLineBytes; ++i) {
        if (reads.released[i] != kNotReleased) continue;
        if (seen(reads.tag[i], thread))
          reads.released[i] = time;
        else
          left = true;
      }
    }
    return !left;
  });
}

void BlockMemory::check_readers(int thread, uint64_t address, uint32_t bytes) const {
  const uint64_t number = address / kLineBytes, at = address % kLineBytes;
  LockedLine locked(number);
  const LineHistory* history = locked.find();
  if (history == nullptr) return;
  for (const Reads& reads : history->reads) {
    if (reads.block == id_ && replicates_reads_) continue;
    for (uint64_t i = at; i < at + bytes; ++i) {
      if (reads.tag[i] == 0) continue;
      const bool before = reads.block == id_ ? seen(reads.tag[i], thread)
                                             : view(thread).holds(reads.block, reads.released[i]);
      if (before) continue;
      throw BadAccess("global memory: a race: thread " + std::to_string(thread) +
                      " writes the byte at " + hex(number * kLineBytes + i) + " that " +
                      (reads.block == id_ ? "another one" : "another block") +
                      " has read and that nothing says it has done with");
    }
  }
}

// If two stores write the same value, nobody can see which of them is later.
void BlockMemory::check_writers(int thread, uint64_t address, const uint8_t* from, uint32_t bytes) {
  const uint64_t at = address % kLineBytes;
  const Line* line =
      lines_.empty() || replicates_reads_ ? nullptr : find_line(address / kLineBytes);
  if (line == nullptr) return;
  for (uint32_t i = 0; i < bytes; ++i) {
    const bool differs = line->state[at + i] == Byte::kStored && line->data[at + i] != from[i];
    if (differs && !seen(line->tag[at + i], thread))
      throw BadAccess("global memory: a race: thread " + std::to_string(thread) +
                      " writes the byte at " + hex(address + i) +
                      " that another one has written with no barrier between");
  }
}

// Before a strong access to a location: earlier stores to this location keep their order.
void BlockMemory::release_range(int thread, uint64_t address, uint32_t bytes) {
  if (stored_.empty()) return;
  Line* line = find_line(address / kLineBytes);
  if (line == nullptr) return;
  const uint64_t at = address % kLineBytes;
  for (uint32_t i = 0; i < bytes; ++i)
    if (line->state[at + i] == Byte::kStored && seen(line->tag[at + i], thread))
      return release_line(address / kLineBytes, *line, thread);
}

uint64_t BlockMemory::load_strong(int thread, uint64_t address, uint32_t bytes, Order order) {
  check(address, bytes);
  release_range(thread, address, bytes);
  ++strong_loads_;
  LockedLine locked(address / kLineBytes);
  const uint64_t value = load_at_once(address, bytes);
  const View told = stamp_at(locked, address);
  if (order == Order::kAcquire)
    acquire(thread, told);
  else
    heard_[thread].join(told);
  return value;
}

void BlockMemory::store_strong(int thread, uint64_t address, uint64_t value, uint32_t bytes,
                               Order order) {
  check(address, bytes);
  if (order == Order::kRelease) release(thread);
  release_range(thread, address, bytes);
  const auto at = uint32_t(address % kLineBytes);
  Time time = 0;
  {
    LockedLine locked(address / kLineBytes);
    Change& change = locked.change(id_);
    change.bytes.add(at, bytes);
    time = change.time;
    store_at_once(address, value, bytes);
    locked.make().stamps[at] = stamp(thread, order, time);
  }
  note_strong(thread, address, &value, bytes, time);
  tell_watcher(address);
  ++stores_;
}

uint64_t BlockMemory::update(int thread, uint64_t address, uint32_t bytes, Order order,
                             const std::function<uint64_t(uint64_t)>& change) {
  check(address, bytes);
  if (order == Order::kRelease || order == Order::kAcqRel) release(thread);
  release_range(thread, address, bytes);
  const auto at = uint32_t(address % kLineBytes);
  uint64_t before = 0, after = 0;
  Time time = 0;
  {
    LockedLine locked(address / kLineBytes);
    Change& made = locked.change(id_);
    made.bytes.add(at, bytes);
    time = made.time;
    // Other processes may update the word at the same time.
    const auto exchange = [&](auto* word) {
      auto old = __atomic_load_n(word, __ATOMIC_RELAXED);
      do {
        after = change(uint64_t(old));
      } while (!__atomic_compare_exchange_n(word, &old,
                                            std::remove_reference_t<decltype(*word)>(after), false,
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
      before = old;
    };
    if (bytes == 4)
      exchange(reinterpret_cast<uint32_t*>(address));
    else
      exchange(reinterpret_cast<uint64_t*>(address));
    // The word still passes on its previous stamp: a release sequence.
    const View told = stamp_at(locked, address);
    if (order == Order::kAcquire || order == Order::kAcqRel)
      acquire(thread, told);
    else
      heard_[thread].join(told);
    locked.make().stamps[at].join(stamp(thread, order, time));
  }
  note_strong(thread, address, &after, bytes, time);
  ++stores_;
  return before;
}

void BlockMemory::fence(int thread) {
  release(thread);
  if (const auto heard = heard_.find(thread); heard != heard_.end()) acquire(thread, heard->second);
  View& told = fenced_[thread] = view(thread);
  told.learn(id_, now());
}

void BlockMemory::fence_sc(int thread) {
  fence(thread);
  acquire(thread, pass_fence_sc(fenced_.at(thread)));
  fenced_.at(thread).join(view(thread));
}

void BlockMemory::fence_alias(int thread) {
  View& told = alias_views_.try_emplace(thread, common_alias_view_).first->second;
  told.join(view(thread));
  told.learn(id_, now());
}

// The thread's own weak loads must see its strong store, whatever its view contains.
void BlockMemory::note_strong(int thread, uint64_t address, const void* from, uint32_t bytes,
                              Time time) {
  Line& line = line_of(address / kLineBytes);
  const uint64_t at = address % kLineBytes;
  std::memcpy(line.data.data() + at, from, bytes);
  for (uint32_t i = 0; i < bytes; ++i) {
    line.tag[at + i] = tag(thread);
    line.state[at + i] = Byte::kReleased;
    line.released[at + i] = time;
  }
}

void BlockMemory::barrier() {
  ++phase_;
  for (const auto& [thread, view] : views_) common_view_.join(view);
  for (const auto& [thread, view] : alias_views_) common_alias_view_.join(view);
  views_.clear();
  fenced_.clear();
  alias_views_.clear();
  // From now on all threads see the released bytes.
  last_number_ = ~uint64_t(0);
  std::erase_if(lines_, [](const auto& item) { return !item.second.listed; });
}

SharedMemory::SharedMemory(uint32_t bytes) : data_(bytes), uses_(bytes) {}

uint64_t SharedMemory::checked(uint64_t address, uint32_t bytes) const {
  const uint64_t at = address - kSpaceBase;
  if (address < kSpaceBase || at > data_.size() || bytes > data_.size() - at)
    throw BadAccess("shared memory: " + std::to_string(bytes) + " bytes at " + hex(address) +
                    " are out of bounds");
  return at;
}

// Since the last barrier no other thread may have used the byte in this way.
void SharedMemory::check_others(int thread, uint64_t at, uint32_t use, const char* does,
                                const char* did) const {
  if (use >> 10 != phase_ || (use & 1023) == uint32_t(thread)) return;
  throw BadAccess("shared memory: a race: thread " + std::to_string(thread) + does +
                  " the byte at " + hex(at + kSpaceBase) + " that another one " + did +
                  " with no barrier between");
}

void SharedMemory::note(int thread, uint32_t& use) const {
  const bool first = use >> 10 != phase_ || (use & 1023) == uint32_t(thread);
  use = phase_ << 10 | (first ? uint32_t(thread) : kSeveral);
}

void SharedMemory::load(int thread, uint64_t address, void* to, uint32_t bytes) {
  const uint64_t at = checked(address, bytes);
  for (uint64_t i = at; i < at + bytes; ++i) {
    if (!uses_[i].was_written)
      throw BadAccess("shared memory: nobody has written the byte at " + hex(i + kSpaceBase));
    check_others(thread, i, uses_[i].stored, " reads", "has written");
    check_others(thread, i, uses_[i].updated, " reads", "has updated");
    note(thread, uses_[i].read);
  }
  std::memcpy(to, data_.data() + at, bytes);
}

// Several threads may store the same value (a status that all of them have).
void SharedMemory::store(int thread, uint64_t address, const void* from, uint32_t bytes) {
  const uint64_t at = checked(address, bytes);
  for (uint64_t i = at; i < at + bytes; ++i) {
    check_others(thread, i, uses_[i].read, " writes", "has read");
    check_others(thread, i, uses_[i].updated, " writes", "has updated");
    if (data_[i] != static_cast<const uint8_t*>(from)[i - at])
      check_others(thread, i, uses_[i].stored, " writes", "has written");
    note(thread, uses_[i].stored);
    uses_[i].was_written = true;
  }
  std::memcpy(data_.data() + at, from, bytes);
}

uint64_t SharedMemory::begin_update(int thread, uint64_t address, uint32_t bytes) {
  const uint64_t at = checked(address, bytes);
  for (uint64_t i = at; i < at + bytes; ++i) {
    if (!uses_[i].was_written)
      throw BadAccess("shared memory: nobody has written the byte at " + hex(i + kSpaceBase));
    check_others(thread, i, uses_[i].read, " updates", "has read");
    check_others(thread, i, uses_[i].stored, " updates", "has written");
    note(thread, uses_[i].updated);
  }
  uint64_t value = 0;
  std::memcpy(&value, data_.data() + at, bytes);
  return value;
}

void SharedMemory::end_update(uint64_t address, uint64_t value, uint32_t bytes) {
  std::memcpy(data_.data() + checked(address, bytes), &value, bytes);
}

}  // namespace ptx
