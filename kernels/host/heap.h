// SPDX-License-Identifier: Apache-2.0

// The symmetric heap of one rank: unnamed shared memory, which the kernel reclaims with the last
// process that maps it, however that process ends.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ringcomm::host {

// An errno, and a text that names the memory needed and the memory available.
struct HeapError : std::runtime_error {
  HeapError(int code, const std::string& text) : std::runtime_error(text), code(code) {}
  int code;
};

// A shared mapping of a file, aligned for huge pages; its destructor unmaps and closes it.
class Mapping {
 public:
  Mapping(int fd, uint64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* base() const { return base_; }
  int fd() const { return fd_; }
  uint64_t bytes() const { return bytes_; }

 private:
  int fd_;
  uint64_t bytes_;
  char* base_;
  void* reserved_;
  uint64_t reserved_bytes_;
};

// Best-fit allocator with immediate coalescing over one range of addresses. Best fit's worst case
// needs M * log2(n) bytes for M live bytes in allocations of at most n (Robson 1977). Free
// neighbours merge at once, in any order of freeing, so an empty heap is always one free range.
class Allocator {
 public:
  explicit Allocator(uint64_t bytes);
  static constexpr uint64_t kNone = ~uint64_t(0);
  uint64_t allocate(uint64_t bytes, uint64_t align);  // offset, or kNone
  void free(uint64_t offset);
  uint64_t allocation_of(uint64_t offset) const;  // the live allocation with `offset`, or kNone
  uint64_t used_bytes() const { return used_; }
  uint64_t largest_free_bytes() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  static uint64_t rounded(uint64_t bytes);

 private:
  void insert_free(uint64_t offset, uint64_t bytes);
  uint64_t used_ = 0;
  std::map<uint64_t, uint64_t> free_;                // free ranges: offset -> bytes
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // free ranges: (bytes, offset)
  std::map<uint64_t, uint64_t> live_;                // allocations: offset -> bytes
};

// The beginning of every heap.
struct HeapHeader {
  uint64_t token;  // proves that this is the announced heap
  uint64_t magic;
  uint32_t version, count;
  // Offsets of flight recorders in the heap, for `ringcomm trace --pid`; 0: unused. Only the heap's
  // own process writes them.
  static constexpr int kRecorders = 250;
  uint64_t recorders[kRecorders];
};
constexpr uint64_t kHeapMagic = 0x3150414548474e52;  // "RNGHEAP1"

// Touching memory past the end of a shrunk file raises SIGBUS, so a heap's size is sealed.
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// From the kernel's random generator; below 2^63, so that it is positive as a signed integer.
uint64_t random_word();

class Heap {
 public:
  // directory: "" for anonymous memory (memfd), else a tmpfs or hugetlbfs directory, in which the
  // heap is an unnamed file (O_TMPFILE). memory_groups: folders of the memory control groups that
  // limit this process. nodes: the NUMA nodes that shall hold the memory. If `nodes` is empty, or
  // the kernel refuses, each page is on the node of the thread that touches it first;
  // placement_error() names the kernel's reason.
  Heap(uint64_t capacity_bytes, const std::string& directory,
       std::vector<std::string> memory_groups = {}, std::vector<int> nodes = {});

  // Allocates `bytes` and returns their offset; throws HeapError. Large tensors get huge pages.
  enum class Purpose { kTensor, kRegion };
  uint64_t allocate(uint64_t bytes, Purpose purpose);
  void free(uint64_t offset);
  // Keeps the allocation that contains `ptr` until release() of the returned value, even if it is
  // freed before: a peer may still store into it.
  uint64_t hold(const void* ptr);
  void release(uint64_t held);

  // Adds a flight recorder to the header if an entry is free; the next function removes it.
  void list_recorder(uint64_t offset) { replace_recorder(0, offset); }
  void unlist_recorder(uint64_t offset) { replace_recorder(offset, 0); }

  char* base() const { return mapping_->base(); }
  int fd() const { return mapping_->fd(); }
  uint64_t capacity_bytes() const { return mapping_->bytes(); }
  uint64_t token() const { return token_; }
  uint64_t committed_bytes() const;
  uint64_t used_bytes() const;
  uint64_t largest_free_bytes() const;
  uint64_t huge_bytes() const;  // bytes backed by huge pages so far
  const std::vector<int>& nodes() const { return nodes_; }
  int placement_error() const { return placement_error_; }  // an errno; 0: none
  bool contains(const void* ptr, uint64_t bytes) const;

 private:
  void replace_recorder(uint64_t from, uint64_t to);
  void commit(uint64_t end);
  void take_huge_pages(uint64_t begin, uint64_t end);
  std::string directory_;
  std::vector<std::string> memory_groups_;
  std::vector<int> nodes_;
  int placement_error_ = 0;
  std::unique_ptr<Mapping> mapping_;
  mutable std::mutex mutex_;
  Allocator allocator_;
  struct Held {
    int times;
    bool freed;
  };
  std::map<uint64_t, Held> held_;  // by offset of the allocation
  uint64_t committed_ = 0;
  uint64_t token_ = 0;
  std::vector<bool> huge_;  // per 2 MiB page of the heap: true if it is a huge page
};

// Maps a peer process's heap, opened through /proc/<pid>/fd/<fd>: this needs no name in a file
// system and no socket, and the kernel checks that this process may read the peer's memory. A root
// process may read all memory. So the file must also belong to this user and be closed to others,
// and its size must be sealed where the file system can seal it. `token` proves that it is the
// announced heap.
std::unique_ptr<Mapping> map_peer_heap(int pid, int fd, uint64_t capacity_bytes, uint64_t token);

}  // namespace ringcomm::host
