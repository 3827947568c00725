// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "kernels/host/numa.h"
#include "ringcomm/core/atomics.h"

namespace ringcomm::host {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kSmallAlign = 256;          // alignment of tensors below kPageAlignFrom
constexpr uint64_t kPageAlignFrom = 64 << 10;  // larger tensors get whole pages
constexpr uint64_t kHugePage = 2 << 20;

// Tensors of at least this size get huge pages: a 64 MiB reduce-scatter of heap tensors on Zen 4 is
// 1.4 times as fast with them (4.6 ms against 6.5 ms). Tensors that fit the second-level TLB gain
// nothing.
constexpr uint64_t kHugeFrom = 4 << 20;

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

std::string mib(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// Returns the value of the line "name: value kB" in /proc/meminfo, converted to bytes.
uint64_t meminfo_bytes(const char* name) {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  for (uint64_t value; file >> key >> value; std::getline(file, unit))
    if (key == name) return value << 10;
  return ~uint64_t(0);
}

uint64_t number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value;
  return file >> value ? value : ~uint64_t(0);  // absent, or "max"
}

// Returns the bytes of a control group's cached file pages, which the kernel reclaims before the
// limit applies. These pages do not include shared memory.
uint64_t reclaimable_bytes(const std::string& group, bool is_v1) {
  std::ifstream file(group + "/memory.stat");
  const std::string prefix = is_v1 ? "total_" : "";
  uint64_t sum = 0, value;
  for (std::string key; file >> key >> value;)
    if (key == prefix + "inactive_file" || key == prefix + "active_file") sum += value;
  return sum;
}

// Returns the memory that a control group of version 1 or 2 still grants.
uint64_t available_in(const std::string& group) {
  uint64_t limit = number_in(group + "/memory.max");
  const bool is_v1 = limit == ~uint64_t(0);
  if (is_v1) limit = number_in(group + "/memory.limit_in_bytes");
  if (limit == ~uint64_t(0)) return limit;
  const uint64_t used = number_in(group + (is_v1 ? "/memory.usage_in_bytes" : "/memory.current"));
  const uint64_t kept = used - std::min(used, reclaimable_bytes(group, is_v1));
  return limit > kept ? limit - kept : 0;
}

// Returns the memory that this process may still take: the least of the machine's and the groups'.
uint64_t available_bytes(const std::vector<std::string>& groups) {
  uint64_t available = meminfo_bytes("MemAvailable:");
  for (const std::string& group : groups) available = std::min(available, available_in(group));
  return available;
}

int open_backing(const std::string& directory) {
  const int fd = directory.empty()
                     ? memfd_create("ringcomm-heap", MFD_CLOEXEC | MFD_ALLOW_SEALING)
                     : open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (fd < 0) {
    const int code = errno;
    throw HeapError(code, "cannot create shared memory in " +
                              (directory.empty() ? "memory" : directory) + ": " +
                              std::strerror(code));
  }
  // Peers require a file whose size is sealed: if it shrank, their accesses would raise SIGBUS.
  if (fcntl(fd, F_GET_SEALS) < 0) {
    close(fd);
    throw HeapError(ENOTSUP, directory + " is not on a tmpfs or hugetlbfs");
  }
  fchmod(fd, 0600);  // memfd_create() gives a file the mode 0777
  return fd;
}

}  // namespace

uint64_t random_word() {
  uint64_t word = 0;
  if (getrandom(&word, sizeof(word), 0) != sizeof(word)) throw HeapError(errno, "getrandom failed");
  return word >> 1;
}

Mapping::Mapping(int fd, uint64_t bytes) : fd_(fd), bytes_(bytes) {
  // The kernel aligns a mapping to huge pages only under some settings: reserve more and align
  // here.
  reserved_bytes_ = round_up(bytes, kHugePage) + kHugePage;
  reserved_ =
      mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* p = MAP_FAILED;
  if (reserved_ != MAP_FAILED) {
    const uint64_t aligned = round_up(reinterpret_cast<uintptr_t>(reserved_), kHugePage);
    p = mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0);
  }
  if (p == MAP_FAILED) {
    const int code = errno;
    close(fd);
    throw HeapError(code, "cannot map " + mib(bytes) + " of shared memory: " + std::strerror(code));
  }
  base_ = static_cast<char*>(p);
}

Mapping::~Mapping() {
  munmap(reserved_, reserved_bytes_);
  close(fd_);
}

Allocator::Allocator(uint64_t bytes) { insert_free(0, bytes); }

uint64_t Allocator::rounded(uint64_t bytes) {
  return round_up(std::max<uint64_t>(bytes, 1), bytes >= kPageAlignFrom ? kPage : kSmallAlign);
}

void Allocator::insert_free(uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  free_[offset] = bytes;
  by_size_.insert({bytes, offset});
}

uint64_t Allocator::allocate(uint64_t bytes, uint64_t align) {
  const uint64_t need = rounded(bytes);
  for (auto it = by_size_.lower_bound({need, 0}); it != by_size_.end(); ++it) {
    const auto [size, offset] = *it;
    const uint64_t begin = round_up(offset, align);
    if (begin + need > offset + size) continue;  // too small once aligned: try the next range
    by_size_.erase(it);
    free_.erase(offset);
    insert_free(offset, begin - offset);
    insert_free(begin + need, offset + size - begin - need);
    live_[begin] = need;
    used_ += need;
    return begin;
  }
  return kNone;
}

uint64_t Allocator::allocation_of(uint64_t offset) const {
  auto allocation = live_.upper_bound(offset);
  if (allocation == live_.begin()) return kNone;
  --allocation;
  return offset - allocation->first < allocation->second ? allocation->first : kNone;
}

void Allocator::free(uint64_t offset) {
  const auto it = live_.find(offset);
  if (it == live_.end()) return;
  uint64_t begin = offset, bytes = it->second;
  used_ -= bytes;
  live_.erase(it);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes) {
    bytes += next->second;
    by_size_.erase({next->second, next->first});
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      by_size_.erase({previous->second, previous->first});
      free_.erase(previous);
    }
  }
  insert_free(begin, bytes);
}

Heap::Heap(uint64_t capacity_bytes, const std::string& directory,
           std::vector<std::string> memory_groups, std::vector<int> nodes)
    : directory_(directory),
      memory_groups_(std::move(memory_groups)),
      nodes_(std::move(nodes)),
      allocator_(round_up(std::max(capacity_bytes, kPage), kPage)) {
  const uint64_t bytes = round_up(std::max(capacity_bytes, kPage), kPage);
  const int fd = open_backing(directory);
  if (ftruncate(fd, off_t(bytes)) != 0) {
    const int code = errno;
    close(fd);
    throw HeapError(code,
                    "cannot size shared memory to " + mib(bytes) + ": " + std::strerror(code));
  }
  // Files in a directory cannot be sealed.
  if (directory.empty()) fcntl(fd, F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL);
  mapping_ = std::make_unique<Mapping>(fd, bytes);
  // Before the first touch: a page stays on the node where it was placed.
  if (!nodes_.empty()) placement_error_ = prefer_nodes(base(), bytes, nodes_);
  huge_.resize(bytes / kHugePage);
  token_ = random_word();
  allocate(sizeof(HeapHeader), Purpose::kRegion);  // the first allocation, never freed: offset 0
  const HeapHeader header{token_, kHeapMagic, 1, HeapHeader::kRecorders, {}};
  std::memcpy(base(), &header, sizeof(header));
}

// Makes sure that [0, end) can be touched. A touch raises SIGBUS on a full tmpfs and starts the OOM
// killer on full memory, so both are checked here, before an allocation in [0, end) is returned.
void Heap::commit(uint64_t end) {
  if (end <= committed_) return;
  const uint64_t target = std::min(round_up(end, kHugePage), capacity_bytes()),
                 growth = target - committed_;
  if (directory_.empty()) {
    const uint64_t available = available_bytes(memory_groups_);
    if (growth > available)
      throw HeapError(ENOMEM, "the heap needs " + mib(growth) + " more memory, and " +
                                  mib(available) + " is available");
  } else if (const int code = posix_fallocate(fd(), off_t(committed_), off_t(growth)); code != 0) {
    struct statvfs fs{};
    statvfs(directory_.c_str(), &fs);
    throw HeapError(code, "the heap needs " + mib(growth) + " more in " + directory_ +
                              ", which has " + mib(uint64_t(fs.f_bavail) * fs.f_frsize) +
                              " free of " + mib(uint64_t(fs.f_blocks) * fs.f_frsize) + ": " +
                              std::strerror(code));
  }
  committed_ = target;
}

// Requests huge pages for the whole 2 MiB pages of an allocation that is about to be handed out.
// MADV_COLLAPSE grants them even where shmem_enabled says "never"; it needs at least one small page
// to be present. If the kernel refuses, small pages remain, which work as well.
void Heap::take_huge_pages(uint64_t begin, uint64_t end) {
  for (uint64_t i = round_up(begin, kHugePage) / kHugePage; i < end / kHugePage; ++i) {
    if (huge_[i]) continue;
    char* page = base() + i * kHugePage;
    static_cast<void>(*static_cast<volatile char*>(page));
    if (madvise(page, kHugePage, MADV_COLLAPSE) != 0) return;
    huge_[i] = true;
  }
}

uint64_t Heap::allocate(uint64_t bytes, Purpose purpose) {
  const std::lock_guard lock(mutex_);
  const bool huge = purpose == Purpose::kTensor && bytes >= kHugeFrom;
  const uint64_t align = huge ? kHugePage : bytes >= kPageAlignFrom ? kPage : kSmallAlign;
  const uint64_t offset = allocator_.allocate(bytes, align);
  if (offset == Allocator::kNone)
    throw HeapError(ENOBUFS, "an allocation of " + std::to_string(bytes) +
                                 " bytes does not fit into the heap of " + mib(capacity_bytes()) +
                                 ": " + mib(allocator_.used_bytes()) +
                                 " in use, largest free range " +
                                 std::to_string(allocator_.largest_free_bytes()) + " bytes");
  try {
    commit(offset + Allocator::rounded(bytes));
    if (huge) take_huge_pages(offset, offset + Allocator::rounded(bytes));
  } catch (...) {
    allocator_.free(offset);
    throw;
  }
  return offset;
}

void Heap::free(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto held = held_.find(offset);
  if (held != held_.end())
    held->second.freed = true;
  else
    allocator_.free(offset);
}

uint64_t Heap::hold(const void* ptr) {
  const std::lock_guard lock(mutex_);
  const uint64_t allocation =
      allocator_.allocation_of(uint64_t(static_cast<const char*>(ptr) - base()));
  if (allocation != Allocator::kNone)
    ++held_.try_emplace(allocation, Held{0, false}).first->second.times;
  return allocation;
}

void Heap::release(uint64_t allocation) {
  const std::lock_guard lock(mutex_);
  const auto held = held_.find(allocation);
  if (held == held_.end() || --held->second.times > 0) return;
  if (held->second.freed) allocator_.free(allocation);
  held_.erase(held);
}

void Heap::replace_recorder(uint64_t from, uint64_t to) {
  const std::lock_guard lock(mutex_);
  for (uint64_t& entry : reinterpret_cast<HeapHeader*>(base())->recorders) {
    if (entry != from) continue;
    store_relaxed_sys(&entry, to);  // a hint: readers check whether a recorder is there
    return;
  }
}

uint64_t Heap::committed_bytes() const {
  const std::lock_guard lock(mutex_);
  return committed_;
}

uint64_t Heap::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return allocator_.used_bytes();
}

uint64_t Heap::largest_free_bytes() const {
  const std::lock_guard lock(mutex_);
  return allocator_.largest_free_bytes();
}

uint64_t Heap::huge_bytes() const {
  const std::lock_guard lock(mutex_);
  return uint64_t(std::count(huge_.begin(), huge_.end(), true)) * kHugePage;
}

bool Heap::contains(const void* ptr, uint64_t bytes) const {
  const uint64_t offset = uint64_t(static_cast<const char*>(ptr) - base());
  return offset < capacity_bytes() && bytes <= capacity_bytes() - offset;
}

}  // namespace ringcomm::host
