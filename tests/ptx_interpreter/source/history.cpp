// SPDX-License-Identifier: Apache-2.0

#include "tests/ptx_interpreter/source/history.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>

#include "tests/ptx_interpreter/source/interpreter.h"

namespace ptx {
namespace {

constexpr uint64_t kShards = 256;
struct Shard {
  std::mutex mutex;
  std::unordered_map<uint64_t, LineHistory> lines;
};

// Never destroyed, since kernels may still run when main() ends.
Shard& shard_of(uint64_t number) {
  static auto* const made = new std::array<Shard, kShards>;
  return (*made)[(number ^ number >> 8) % kShards];
}

std::atomic<Time> clock_{1};
std::atomic<uint64_t> blocks_{0};

struct Known {
  std::mutex mutex;
  int running = 0;  // kernels
  View ended;       // the knowledge and changes of ended blocks
  View host;        // the part of `ended` for which the host has waited
  View fence_sc;    // the knowledge of all threads at their fences
};
Known& known() {
  static auto* const made = new Known;
  return *made;
}

thread_local View of_stream;  // the view with which this thread's kernels begin

}  // namespace

bool View::holds(uint64_t block, Time time) const {
  if (time <= all_) return true;
  return std::any_of(of_some_.begin(), of_some_.end(),
                     [&](const auto& each) { return each.first == block && time <= each.second; });
}

void View::learn(uint64_t block, Time time) {
  if (time <= all_) return;
  for (auto& [known, until] : of_some_) {
    if (known != block) continue;
    until = std::max(until, time);
    return;
  }
  of_some_.emplace_back(block, time);
}

void View::learn_all(Time time) {
  all_ = std::max(all_, time);
  std::erase_if(of_some_, [&](const auto& each) { return each.second <= all_; });
}

void View::join(const View& other) {
  learn_all(other.all_);
  for (const auto& [block, time] : other.of_some_) learn(block, time);
}

LockedLine::LockedLine(uint64_t number) : number_(number), lock_(shard_of(number).mutex) {}

LineHistory* LockedLine::find() const {
  auto& lines = shard_of(number_).lines;
  const auto found = lines.find(number_);
  return found == lines.end() ? nullptr : &found->second;
}

LineHistory& LockedLine::make() { return shard_of(number_).lines[number_]; }

Change& LockedLine::change(uint64_t block) {
  Change& made = make().changes.emplace_back();
  made.time = tick();
  made.block = block;
  std::memcpy(made.before.data(), reinterpret_cast<const void*>(number_ * kLineBytes), kLineBytes);
  return made;
}

View pass_fence_sc(const View& view) {
  const std::lock_guard lock(known().mutex);
  known().fence_sc.join(view);
  return known().fence_sc;
}

Time now() { return clock_.load(); }
Time tick() { return ++clock_; }
uint64_t new_block() { return ++blocks_; }

KernelHistory::KernelHistory() {
  const std::lock_guard lock(known().mutex);
  ++known().running;
  of_stream.join(known().host);
  before_ = after_ = of_stream;
}

void KernelHistory::block_ends(uint64_t block, const View& view) {
  const std::lock_guard lock(known().mutex);
  after_.join(view);
  after_.learn(block, now());
}

KernelHistory::~KernelHistory() {
  const std::lock_guard lock(known().mutex);
  --known().running;
  known().ended.join(after_);
  of_stream = after_;
}

}  // namespace ptx

extern "C" {

void ptx_stream_waited() {
  const std::lock_guard lock(ptx::known().mutex);
  ptx::of_stream.join(ptx::known().ended);
}

void ptx_host_waited() {
  const std::lock_guard lock(ptx::known().mutex);
  if (ptx::known().running == 0) {
    for (uint64_t shard = 0; shard < ptx::kShards; ++shard) ptx::shard_of(shard).lines.clear();
    ptx::known().ended = ptx::View();
    ptx::known().ended.learn_all(ptx::now());
    ptx::known().fence_sc = ptx::View();
  }
  ptx::known().host = ptx::known().ended;
}

}  // extern "C"
