// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/scratch.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kernels/host/crc32c.h"
#include "kernels/host/signals_blocked.h"
#include "ringcomm/core/atomics.h"

namespace ringcomm::host {
namespace {

constexpr std::chrono::milliseconds kLook{10};  // the longest delay until Ctrl-C is noticed
constexpr ScratchPool::Limit kNoLimit{1e6};
// After this many system calls that move less than a page, a transfer counts as stalled.
constexpr int kMaxStalls = 8;

bool overlap(const char* a, uint64_t a_bytes, const char* b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

std::chrono::steady_clock::time_point deadline_in(ScratchPool::Limit limit) {
  const auto bounded = std::min(limit, kNoLimit);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(bounded);
}

}  // namespace

bool ScratchRequest::done() const {
  return load_acquire_sys(&done_word_) != 0;  // pairs with the release in ScratchPool::finish()
}

void ScratchPool::Busy::begin() {
  if (threads++ == 0) since = std::chrono::steady_clock::now();
}

void ScratchPool::Busy::end() {
  if (--threads > 0) return;
  const auto passed = std::chrono::steady_clock::now() - since;
  ns += uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count());
}

ScratchPool::ScratchPool(int fd, int threads, uint64_t cut_bytes)
    : fd_(fd), thread_count_(threads), cut_bytes_(cut_bytes) {}

ScratchPool::~ScratchPool() {
  while (!close(kNoLimit)) continue;
}

int ScratchPool::add_extent(uint64_t bytes, uint32_t* extent) {
  bytes = (bytes + kScratchPageBytes - 1) / kScratchPageBytes * kScratchPageBytes;
  const std::lock_guard lock(mutex_);
  int code;
  do {
    code = fallocate(fd_, 0, off_t(file_bytes_), off_t(bytes)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0) {
    // Frees space that was reserved before the failure; if this fails as well, closing the
    // file frees it.
    static_cast<void>(ftruncate(fd_, off_t(file_bytes_)));
    return code;
  }
  ScratchExtent added{file_bytes_, bytes, 0, {}, {}};
  added.sums.resize((bytes + cut_bytes_ - 1) / cut_bytes_);
  *extent = uint32_t(extents_.size());
  extents_.push_back(std::move(added));
  file_bytes_ += bytes;
  return 0;
}

void ScratchPool::start_threads() {
  const SignalsBlocked blocked;
  while (int(threads_.size()) < thread_count_) threads_.emplace_back([this] { run(); });
}

ScratchPool::Refusal ScratchPool::submit(const Wish& wish, ScratchRequestPtr* request) {
  const std::lock_guard lock(mutex_);
  if (closing_) return Refusal::kClosed;
  if (wish.extent >= extents_.size()) return Refusal::kNoExtent;
  ScratchExtent& extent = extents_[wish.extent];
  if (wish.bytes == 0 || wish.bytes % kScratchPageBytes != 0 ||
      uintptr_t(wish.memory) % kScratchPageBytes != 0)
    return Refusal::kUnaligned;
  if (wish.bytes > extent.bytes) return Refusal::kTooLong;
  if (!wish.is_write && extent.content_bytes != 0 && extent.content_bytes != wish.bytes)
    return Refusal::kOtherSize;
  start_threads();
  auto r = std::make_shared<ScratchRequest>();
  r->is_write_ = wish.is_write;
  r->from_disk_ = extent.content_bytes != 0;
  r->extent_ = &extent;
  r->memory_ = wish.memory;
  r->bytes_ = wish.bytes;
  if (wish.is_write) extent.content_bytes = wish.bytes;
  // See NOTE [Order].
  for (const ScratchRequestPtr& earlier : outstanding_) {
    if (earlier->extent_ != &extent &&
        !overlap(earlier->memory_, earlier->bytes_, wish.memory, wish.bytes))
      continue;
    earlier->followers_.push_back(r);
    ++r->blockers_;
  }
  outstanding_.push_back(r);
  *request = r;
  ScratchResult refusal;
  if (r->blockers_ > 0) return Refusal::kNone;
  if (!may_start(*r, &refusal)) {
    finish(r, refusal);
  } else {
    ready_.push_back(std::move(r));
    to_do_.notify_all();
  }
  return Refusal::kNone;
}

ScratchPool::Waited ScratchPool::wait(const ScratchRequest& request, bool (*interrupted)(),
                                      Limit limit) {
  const auto deadline = deadline_in(limit);
  std::unique_lock lock(mutex_);
  while (!request.done()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return Waited::kLate;
    done_.wait_until(lock, std::min(now + kLook, deadline));
    if (request.done()) break;
    lock.unlock();
    if (interrupted()) return Waited::kInterrupted;
    lock.lock();
  }
  return Waited::kDone;
}

ScratchResult ScratchPool::result(const ScratchRequest& request) {
  const std::lock_guard lock(mutex_);
  if (request.done()) return request.result_;
  return {ScratchEnd::kLate, request.is_write_, 0, request.extent_->offset, request.bytes_, 0, 0};
}

ScratchCounters ScratchPool::counters() {
  const std::lock_guard lock(mutex_);
  ScratchCounters now = counters_;
  now.reading_ns = reading_.ns;
  now.writing_ns = writing_.ns;
  return now;
}

bool ScratchPool::close(Limit limit) {
  const auto deadline = deadline_in(limit);
  std::vector<std::thread> ending;
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    const auto unfinished = std::exchange(ready_, {});
    for (const ScratchRequestPtr& r : unfinished) {
      r->taken_bytes_ = r->bytes_;
      if (r->result_.end == ScratchEnd::kDone) r->result_.end = ScratchEnd::kClosed;
      if (r->cuts_under_way_ == 0) finish(r, r->result_);
    }
    if (!done_.wait_until(lock, deadline, [this] { return outstanding_.empty(); })) return false;
    stopping_ = true;
    to_do_.notify_all();
    ending.swap(threads_);
  }
  for (std::thread& thread : ending) thread.join();
  return true;
}

void ScratchPool::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    to_do_.wait(lock, [this] { return stopping_ || !ready_.empty(); });
    if (stopping_) return;
    const ScratchRequestPtr request = ready_.front();
    const Cut cut = take_cut(request);
    Busy* const busy = request->is_write_ ? &writing_ : request->from_disk_ ? &reading_ : nullptr;
    if (busy != nullptr) busy->begin();
    lock.unlock();
    const ScratchResult result = move(*request, cut);
    lock.lock();
    if (busy != nullptr) busy->end();
    settle(request, cut, result);
  }
}

ScratchPool::Cut ScratchPool::take_cut(const ScratchRequestPtr& request) {
  ScratchRequest& r = *request;
  const Cut cut{r.taken_bytes_, std::min(cut_bytes_, r.bytes_ - r.taken_bytes_)};
  r.taken_bytes_ += cut.bytes;
  ++r.cuts_under_way_;
  if (r.taken_bytes_ == r.bytes_) ready_.pop_front();
  return cut;
}

// Runs without the lock: no other thread touches these bytes of memory or the cut's checksum.
ScratchResult ScratchPool::move(const ScratchRequest& r, Cut cut) const {
  char* const memory = r.memory_ + cut.offset;
  const uint64_t offset = r.extent_->offset + cut.offset;
  uint32_t& sum = r.extent_->sums[cut.offset / cut_bytes_];
  if (r.is_write_) {
    sum = crc32c(memory, cut.bytes);
    return transfer(true, memory, offset, cut.bytes);
  }
  if (!r.from_disk_) {
    std::memset(memory, 0, cut.bytes);
    return {};
  }
  const ScratchResult result = transfer(false, memory, offset, cut.bytes);
  if (result.end != ScratchEnd::kDone) return result;
  const uint32_t seen = crc32c(memory, cut.bytes);
  if (seen == sum) return {};
  return {ScratchEnd::kDamaged, false, 0, offset, cut.bytes, sum, seen};
}

ScratchResult ScratchPool::transfer(bool is_write, char* memory, uint64_t offset,
                                    uint64_t bytes) const {
  const auto failed = [&](ScratchEnd end, int code) {
    return ScratchResult{end, is_write, code, offset, bytes, 0, 0};
  };
  int stalls = 0;
  for (uint64_t at = 0; at < bytes;) {
    const auto file_offset = off_t(offset + at);
    const ssize_t moved = is_write ? pwrite(fd_, memory + at, bytes - at, file_offset)
                                   : pread(fd_, memory + at, bytes - at, file_offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return failed(ScratchEnd::kFailed, errno);
    if (moved == 0 && !is_write) return failed(ScratchEnd::kTruncated, 0);
    // O_DIRECT can continue only at a whole page.
    const uint64_t pages = uint64_t(moved) / kScratchPageBytes * kScratchPageBytes;
    if (pages == 0 && ++stalls == kMaxStalls) return failed(ScratchEnd::kStalled, 0);
    at += pages;
  }
  return {};
}

void ScratchPool::settle(const ScratchRequestPtr& request, Cut cut, const ScratchResult& result) {
  ScratchRequest& r = *request;
  --r.cuts_under_way_;
  if (result.end == ScratchEnd::kDone) {
    if (r.is_write_) counters_.bytes_written += cut.bytes;
    if (!r.is_write_ && r.from_disk_) counters_.bytes_read += cut.bytes;
  } else {
    if (r.result_.end == ScratchEnd::kDone) r.result_ = result;
    if (r.taken_bytes_ < r.bytes_) {  // do not begin the other cuts
      r.taken_bytes_ = r.bytes_;
      std::erase(ready_, request);
    }
  }
  if (r.cuts_under_way_ == 0 && r.taken_bytes_ == r.bytes_) finish(request, r.result_);
}

bool ScratchPool::may_start(const ScratchRequest& request, ScratchResult* refusal) const {
  *refusal = request.extent_->fault;
  if (refusal->end == ScratchEnd::kDone && closing_) refusal->end = ScratchEnd::kClosed;
  return refusal->end == ScratchEnd::kDone;
}

// Ends a request and starts the requests that waited for it; if their extent is damaged, ends them.
void ScratchPool::finish(const ScratchRequestPtr& request, const ScratchResult& result) {
  std::vector<std::pair<ScratchRequestPtr, ScratchResult>> ended{{request, result}};
  while (!ended.empty()) {
    const auto [r, how] = std::move(ended.back());
    ended.pop_back();
    r->result_ = how;
    ScratchResult& fault = r->extent_->fault;
    if (fault.end == ScratchEnd::kDone && how.end != ScratchEnd::kClosed) fault = how;
    std::erase(outstanding_, r);
    for (const ScratchRequestPtr& follower : std::exchange(r->followers_, {})) {
      if (--follower->blockers_ > 0) continue;
      ScratchResult refusal;
      if (may_start(*follower, &refusal))
        ready_.push_back(follower);
      else
        ended.emplace_back(follower, refusal);
    }
    store_release_sys(&r->done_word_, 1);  // pairs with ScratchRequest::done()
  }
  done_.notify_all();
  to_do_.notify_all();
}

}  // namespace ringcomm::host
