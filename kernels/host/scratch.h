// SPDX-License-Identifier: Apache-2.0

// A scratch file on a disk, written and read by a few threads past the page cache (O_DIRECT).
//
// NOTE [Order]
// Requests that share an extent, or bytes of memory, run in the order in which they were submitted;
// all others run side by side. So write(extent a, buffer x) and then read(extent b, buffer x) may
// be submitted at once: the read waits until the write has taken the buffer's content.
//
// NOTE [Checksums]
// Threads move a request in pieces, called cuts. Each write leaves one CRC32C per cut in RAM, in
// place of the checksums of the extent's previous write; a read compares its data with these
// checksums. The checksums are in RAM, where no disk fault reaches them, and belong to one extent
// and its last write. So they detect a flipped bit, a stale extent, an exchanged extent and the end
// of a truncated file, each with a chance of 2^-32 to miss it.
//
// NOTE [A disk that hangs]
// Nothing ends a system call on a disk that does not answer. So wait() and close() give up at a
// limit, and the transfer continues: its memory, the file and the pool must stay until a later
// close() has returned true, or for the rest of the process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ringcomm::host {

// All offsets, addresses and sizes are multiples of this, a multiple of every disk's sector size.
constexpr uint64_t kScratchPageBytes = 4096;

// While a thread sums a cut, or waits for a core, the disk needs requests from other threads. But
// threads that sum take the cores from the update. Both numbers come from a sweep of 2, 3, 4, 5, 6
// and 8 threads and cuts of 2, 4 and 8 MiB on an idle Xeon (family 6 model 207, 2 cores, virtio
// disk). A step of an optimizer (64 Mi elements, swap units of 8 MiB) was measured in turns with
// bare loops that move whole requests, 4 and 8 at a time, at 2.3 GB/s. Times of the step, relative
// to these loops: 1.06 to 1.10 for 4 threads and 8 MiB, 1.13 to 1.15 for 6 and 4 MiB, 1.05 to 1.26
// for 3 and 8 MiB, 1.20 to 1.29 for 2 and 8 MiB, 1.16 to 1.54 for 8 and 2 MiB. Next to two busy
// loops, 8 threads and 2 MiB moved a sixth more bytes.
constexpr int kScratchThreads = 4;
constexpr uint64_t kScratchCutBytes = 8 << 20;

enum class ScratchEnd : uint32_t {
  kDone,
  kFailed,     // a system call failed, with errno `code`
  kTruncated,  // the file ended before the extent
  kStalled,    // the system moved no bytes and reported no error
  kDamaged,    // the disk returned other bytes than were written
  kClosed,     // the pool was closed before the request ran
  kLate,       // not done yet: the request may still move its bytes
};

// How a request ended, and the place in the file: the cut of `bytes` bytes at `offset`.
struct ScratchResult {
  ScratchEnd end = ScratchEnd::kDone;
  bool is_write = false;
  int code = 0;  // errno
  uint64_t offset = 0, bytes = 0;
  uint32_t wanted_sum = 0, seen_sum = 0;
};

// Bytes moved so far, and the time during which at least one read or write was under way.
struct ScratchCounters {
  uint64_t bytes_read = 0, bytes_written = 0, reading_ns = 0, writing_ns = 0;
};

struct ScratchExtent {
  uint64_t offset, bytes;
  uint64_t content_bytes = 0;  // size of the last submitted write; 0: there was none
  std::vector<uint32_t> sums;  // checksums of the last write, one per cut
  ScratchResult fault;         // the first fault; all later requests end with it
};

class ScratchRequest;
using ScratchRequestPtr = std::shared_ptr<ScratchRequest>;

// Any thread may call its methods.
class ScratchPool {
 public:
  // The file must stay open until close(). A request is cut into pieces of `cut_bytes`, which the
  // threads share.
  ScratchPool(int fd, int threads, uint64_t cut_bytes);
  ~ScratchPool();  // waits for transfers under way
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  // Adds an extent at the file's end and reserves its space; returns 0 or an errno.
  int add_extent(uint64_t bytes, uint32_t* extent);

  enum class Refusal { kNone, kClosed, kNoExtent, kUnaligned, kTooLong, kOtherSize };
  struct Wish {
    bool is_write;
    uint32_t extent;
    char* memory;
    uint64_t bytes;  // for a read: the size of the last write, or any size if there was none
  };
  // Submits a request, whose memory must stay until it is done. Throws std::system_error if no
  // thread can start.
  Refusal submit(const Wish& wish, ScratchRequestPtr* request);
  using Limit = std::chrono::duration<double>;
  enum class Waited { kDone, kLate, kInterrupted };
  // Waits for a request. All results but kDone leave the request as it is: kLate after the limit;
  // kInterrupted if `interrupted`, called about every 10 ms without a lock, returns true.
  Waited wait(const ScratchRequest& request, bool (*interrupted)(), Limit limit);
  ScratchResult result(const ScratchRequest& request);
  ScratchCounters counters();
  // Requests that have not begun end as kClosed. Returns true when no transfer is under way, or
  // false when the limit is reached before; see NOTE [A disk that hangs].
  bool close(Limit limit);

 private:
  struct Cut {
    uint64_t offset, bytes;
  };
  // Measures the time during which at least one thread is busy.
  struct Busy {
    int threads = 0;
    std::chrono::steady_clock::time_point since;
    uint64_t ns = 0;
    void begin();
    void end();
  };

  void start_threads();
  void run();
  Cut take_cut(const ScratchRequestPtr& request);
  ScratchResult move(const ScratchRequest& request, Cut cut) const;
  ScratchResult transfer(bool is_write, char* memory, uint64_t offset, uint64_t bytes) const;
  void settle(const ScratchRequestPtr& request, Cut cut, const ScratchResult& result);
  void finish(const ScratchRequestPtr& request, const ScratchResult& result);
  bool may_start(const ScratchRequest& request, ScratchResult* refusal) const;

  const int fd_, thread_count_;
  const uint64_t cut_bytes_;
  std::mutex mutex_;
  std::condition_variable to_do_, done_;
  std::vector<std::thread> threads_;
  std::deque<ScratchExtent> extents_;           // a deque, since elements must not move
  std::vector<ScratchRequestPtr> outstanding_;  // requests in the order of submission
  std::deque<ScratchRequestPtr> ready_;         // requests with cuts that no thread has taken
  uint64_t file_bytes_ = 0;
  ScratchCounters counters_;
  Busy reading_, writing_;
  bool closing_ = false, stopping_ = false;
};

// One read or write.
class ScratchRequest {
 public:
  bool done() const;

 private:
  friend class ScratchPool;
  bool is_write_ = false, from_disk_ = true;  // false: zeros are read, since nothing was written
  ScratchExtent* extent_ = nullptr;
  char* memory_ = nullptr;
  uint64_t bytes_ = 0;
  int blockers_ = 0;  // requests that must be done before this one
  std::vector<ScratchRequestPtr> followers_;
  uint64_t taken_bytes_ = 0;  // bytes assigned to threads as cuts
  int cuts_under_way_ = 0;
  ScratchResult result_;  // result of the first cut that failed
  uint32_t done_word_ = 0;
};

}  // namespace ringcomm::host
