#include "tests/support/ptx/memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

extern "C" int emu_memory_find(uint64_t address, uint64_t* begin, uint64_t* bytes);

namespace ptx {
namespace {

struct Change {
  uint64_t time;
  std::array<uint8_t, kLineBytes> before;
};

constexpr uint64_t kShards = 256;
struct Shard {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::vector<Change>> lines;
};

// Never destroyed: kernels may run when main() ends.
Shard& shard_of(uint64_t number) {
  static auto* const made = new std::array<Shard, kShards>;
  return (*made)[(number ^ number >> 8) % kShards];
}
std::atomic<uint64_t> clock_{1};
// One per hash of a line: whether it may have a history. Saves most loads the lock.
constexpr uint64_t kFilterBytes = 1 << 16;
std::array<std::atomic<uint8_t>, kFilterBytes> filter_;
std::atomic<uint8_t>& filter_of(uint64_t number) {
  return filter_[(number ^ number >> 16) % kFilterBytes];
}

std::mutex running_mutex;
int running = 0;

struct Ranges {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> ends;  // by begin
};
Ranges& allowed() {
  static auto* const made = new Ranges;
  return *made;
}

std::atomic<bool> is_strict{true};
constexpr uint64_t kPageBytes = 4096;

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

// Bytes move in units that other processes see whole.
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

}  // namespace

uint64_t now() { return clock_.load(); }

void history_begins() {
  const std::lock_guard lock(running_mutex);
  ++running;
}

void history_ends() {
  const std::lock_guard lock(running_mutex);
  if (--running > 0) return;
  for (uint64_t shard = 0; shard < kShards; ++shard) shard_of(shard).lines.clear();
  for (auto& byte : filter_) byte = 0;
}

void allow(Range range) {
  const std::lock_guard lock(allowed().mutex);
  uint64_t& end = allowed().ends[range.begin];
  end = std::max(end, range.end);
}

bool find_range(uint64_t address, uint64_t bytes, Range& range) {
  uint64_t begin = 0, size = 0;
  if (emu_memory_find(address, &begin, &size) != 0) {
    range = {begin, begin + size};
    return range.holds(address, bytes);
  }
  const std::lock_guard lock(allowed().mutex);
  // Tensors die and others take their place, so that ranges overlap: any will do.
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

LockedLine::LockedLine(uint64_t number) : number_(number) { shard_of(number).mutex.lock(); }
LockedLine::~LockedLine() { shard_of(number_).mutex.unlock(); }

uint64_t LockedLine::change() {
  Change& made = shard_of(number_).lines[number_].emplace_back();
  std::memcpy(made.before.data(), reinterpret_cast<const void*>(number_ * kLineBytes), kLineBytes);
  filter_of(number_) = 1;
  return made.time = ++clock_;
}

BlockMemory::BlockMemory(int threads) : acquired_(size_t(threads), 0), common_view_(now()) {}

BlockMemory::~BlockMemory() {
  ++phase_;
  release(0);
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

void BlockMemory::load(int thread, uint64_t address, void* to, uint32_t bytes) {
  check(address, bytes);
  const uint64_t number = address / kLineBytes, at = address % kLineBytes;
  auto* out = static_cast<uint8_t*>(to);
  const uint64_t seen_until = view(thread);
  bool from_memory = true;
  if (filter_of(number) != 0) {
    Shard& shard = shard_of(number);
    const std::lock_guard lock(shard.mutex);
    if (const auto found = shard.lines.find(number); found != shard.lines.end()) {
      const Change* oldest = nullptr;
      for (auto change = found->second.rbegin();
           change != found->second.rend() && change->time > seen_until; ++change)
        oldest = &*change;
      if (oldest != nullptr) {
        std::memcpy(out, oldest->before.data() + at, bytes);
        from_memory = false;
      }
    }
  }
  if (from_memory) std::memcpy(out, reinterpret_cast<const void*>(address), bytes);
  if (lines_.empty()) return;
  const Line* line = find_line(number);
  if (line == nullptr) return;
  for (uint32_t i = 0; i < bytes; ++i) {
    const Byte state = line->state[at + i];
    if (state == Byte::kNone || !seen(line->tag[at + i], thread)) continue;
    if (state == Byte::kStored || line->released[at + i] > seen_until) out[i] = line->data[at + i];
  }
}

void BlockMemory::store(int thread, uint64_t address, const void* from, uint32_t bytes) {
  check(address, bytes);
  const uint64_t number = address / kLineBytes, at = address % kLineBytes;
  Line& line = line_of(number);
  std::memcpy(line.data.data() + at, from, bytes);
  for (uint32_t i = 0; i < bytes; ++i) {
    line.tag[at + i] = tag(thread);
    line.state[at + i] = Byte::kStored;
  }
  if (!line.listed) stored_.push_back(number);
  line.listed = true;
  ++stores_;
}

void BlockMemory::release_line(uint64_t number, Line& line, int thread) {
  LockedLine locked(number);
  bool changed = false;
  for (uint32_t i = 0; i < kLineBytes;) {
    const auto goes = [&](uint32_t b) {
      return b < kLineBytes && line.state[b] == Byte::kStored && seen(line.tag[b], thread);
    };
    if (!goes(i)) {
      ++i;
      continue;
    }
    if (!changed) line.last_released = locked.change();
    changed = true;
    const uint32_t begin = i;
    for (; goes(i); ++i) {
      line.state[i] = Byte::kReleased;
      line.released[i] = line.last_released;
    }
    copy_out(number * kLineBytes + begin, line.data.data() + begin, i - begin);
  }
}

void BlockMemory::release(int thread) {
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

// Before an access of one location that is not weak: stores to it keep their order.
void BlockMemory::release_range(int thread, uint64_t address, uint32_t bytes) {
  if (stored_.empty()) return;
  Line* line = find_line(address / kLineBytes);
  if (line == nullptr) return;
  const uint64_t at = address % kLineBytes;
  for (uint32_t i = 0; i < bytes; ++i)
    if (line->state[at + i] == Byte::kStored && seen(line->tag[at + i], thread))
      return release_line(address / kLineBytes, *line, thread);
}

uint64_t BlockMemory::load_strong(int thread, uint64_t address, uint32_t bytes) {
  check(address, bytes);
  release_range(thread, address, bytes);
  ++strong_loads_;
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

void BlockMemory::store_strong(int thread, uint64_t address, uint64_t value, uint32_t bytes) {
  check(address, bytes);
  release_range(thread, address, bytes);
  uint64_t time = 0;
  {
    LockedLine locked(address / kLineBytes);
    time = locked.change();
    switch (bytes) {
      case 1:
        __atomic_store_n(reinterpret_cast<uint8_t*>(address), uint8_t(value), __ATOMIC_SEQ_CST);
        break;
      case 2:
        __atomic_store_n(reinterpret_cast<uint16_t*>(address), uint16_t(value), __ATOMIC_SEQ_CST);
        break;
      case 4:
        __atomic_store_n(reinterpret_cast<uint32_t*>(address), uint32_t(value), __ATOMIC_SEQ_CST);
        break;
      default:
        __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_SEQ_CST);
    }
  }
  note_strong(thread, address, &value, bytes, time);
  ++stores_;
}

// The thread's own weak loads must see its strong store, whatever its view is.
void BlockMemory::note_strong(int thread, uint64_t address, const void* from, uint32_t bytes,
                              uint64_t time) {
  Line& line = line_of(address / kLineBytes);
  const uint64_t at = address % kLineBytes;
  std::memcpy(line.data.data() + at, from, bytes);
  for (uint32_t i = 0; i < bytes; ++i) {
    line.tag[at + i] = tag(thread);
    line.state[at + i] = Byte::kReleased;
    line.released[at + i] = time;
  }
  line.last_released = time;
}

void BlockMemory::barrier() {
  ++phase_;
  const uint64_t latest = *std::max_element(acquired_.begin(), acquired_.end());
  if (latest <= common_view_) return;
  common_view_ = latest;
  // What is older than the view is in memory, or has been stored over by others.
  last_number_ = ~uint64_t(0);
  std::erase_if(lines_, [&](const auto& item) {
    return !item.second.listed && item.second.last_released <= common_view_;
  });
}

SharedMemory::SharedMemory(uint32_t bytes) : data_(bytes), written_(bytes), read_(bytes) {}

uint64_t SharedMemory::checked(uint64_t address, uint32_t bytes) const {
  const uint64_t at = address - kSpaceBase;
  if (address < kSpaceBase || at > data_.size() || bytes > data_.size() - at)
    throw BadAccess("shared memory: " + std::to_string(bytes) + " bytes at " + hex(address) +
                    " are out of bounds");
  return at;
}

void SharedMemory::load(int thread, uint64_t address, void* to, uint32_t bytes) {
  const uint64_t at = checked(address, bytes);
  for (uint64_t i = at; i < at + bytes; ++i) {
    if (written_[i] == 0)
      throw BadAccess("shared memory: nobody has written the byte at " + hex(i + kSpaceBase));
    const uint32_t writer = written_[i] & 1023;
    if (written_[i] >> 10 == phase_ && writer != uint32_t(thread) && writer != kSeveral)
      throw BadAccess("shared memory: a race: thread " + std::to_string(thread) +
                      " reads the byte at " + hex(i + kSpaceBase) + " that thread " +
                      std::to_string(writer) + " wrote with no barrier between");
    const bool first = read_[i] >> 10 != phase_;
    const bool mine = first || (read_[i] & 1023) == uint32_t(thread);
    read_[i] = phase_ << 10 | (mine ? uint32_t(thread) : kSeveral);
  }
  std::memcpy(to, data_.data() + at, bytes);
}

void SharedMemory::store(int thread, uint64_t address, const void* from, uint32_t bytes,
                         bool atomic) {
  const uint64_t at = checked(address, bytes);
  for (uint64_t i = at; i < at + bytes; ++i) {
    if (!atomic && read_[i] >> 10 == phase_ && (read_[i] & 1023) != uint32_t(thread))
      throw BadAccess("shared memory: a race: thread " + std::to_string(thread) +
                      " writes the byte at " + hex(i + kSpaceBase) +
                      " that another one read with no barrier between");
    written_[i] = phase_ << 10 | (atomic ? kSeveral : uint32_t(thread));
  }
  std::memcpy(data_.data() + at, from, bytes);
}

uint64_t SharedMemory::read_for_update(uint64_t address, uint32_t bytes) {
  const uint64_t at = checked(address, bytes);
  for (uint64_t i = at; i < at + bytes; ++i)
    if (written_[i] == 0)
      throw BadAccess("shared memory: nobody has written the byte at " + hex(i + kSpaceBase));
  uint64_t value = 0;
  std::memcpy(&value, data_.data() + at, bytes);
  return value;
}

}  // namespace ptx
