// SPDX-License-Identifier: Apache-2.0

#include "tests/ptx_interpreter/source/warp.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

namespace ptx {
namespace {

// Backward branches after which a group lets other groups of its warp run, and a warp other warps
// of its block: enough for lanes that left a short loop early to be joined again behind the loop.
constexpr uint32_t kBackwardPerGroup = 64;
constexpr uint32_t kBackwardPerTurn = 256;
// Turns in which all warps of a block only poll, before the block sleeps.
constexpr uint64_t kTurnsAwake = 20;
// Long enough for a peer to return to its host, and to launch its next kernel.
constexpr timespec kLateEnd{0, 50'000'000};

std::mutex failure_mutex;
std::string failure_text;
std::atomic<bool> failed{false};

void fail(const std::string& text) {
  const std::lock_guard lock(failure_mutex);
  if (!failed) failure_text = text;
  failed = true;
}

template <class F>
void each_lane(Mask mask, F f) {
  for (Mask left = mask; left != 0; left &= left - 1) f(__builtin_ctz(left));
}

}  // namespace

Warp::Warp(Block& block, int first_thread)
    : block_(block), constants_(block.launch().module->constants()), first_thread_(first_thread) {
  Frame* frame = make_frame(block.launch().kernel);
  const int count = std::min(kLanes, block.launch().threads - first_thread);
  frame->lanes = count;
  for (int lane = 0; lane < kLanes; ++lane)
    lanes_[size_t(lane)] = {frame, 0, lane < count ? State::kReady : State::kEnded, nullptr};
}

Frame* Warp::make_frame(const Function* function) {
  if (free_frames_.empty()) {
    frames_.emplace_back();
    free_frames_.push_back(&frames_.back());
  }
  Frame* frame = free_frames_.back();
  free_frames_.pop_back();
  frame->function = function;
  frame->rows.assign(size_t(function->rows) * kLanes, 0);
  frame->params.assign(size_t(function->param_bytes) * kLanes, 0);
  if (block_.launch().schedule.counts_trips) frame->ready.assign(function->rows, 0);
  frame->caller = nullptr;
  frame->call = nullptr;
  frame->depth = 0;
  return frame;
}

void Warp::drop_frame(Frame* frame, int lanes) {
  frame->lanes -= lanes;
  if (frame->lanes == 0) free_frames_.push_back(frame);
}

Mask Warp::guarded(const Instruction& i) const {
  if (i.guard == Instruction::kNoRow) return mask_;
  const uint64_t* guard = in(i.guard);
  Mask true_lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) true_lanes |= Mask(guard[lane] & 1) << lane;
  return mask_ & (i.unless ? ~true_lanes : true_lanes);
}

void Warp::park(uint32_t pc) {
  each_lane(mask_, [&](int lane) {
    lanes_[size_t(lane)].pc = pc;
    lanes_[size_t(lane)].frame = frame_;
  });
}

// Chooses the group that runs next; returns false if no lane can run.
bool Warp::pick() {
  struct Group {
    Frame* frame;
    uint32_t pc;
    Mask mask;
  };
  std::array<Group, kLanes> groups;
  size_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Lane& each = lanes_[size_t(lane)];
    if (each.state != State::kReady) continue;
    size_t g = 0;
    while (g < count && (groups[g].frame != each.frame || groups[g].pc != each.pc)) ++g;
    if (g == count) groups[count++] = {each.frame, each.pc, 0};
    groups[g].mask |= Mask(1) << lane;
  }
  if (count == 0) return false;
  std::sort(groups.begin(), groups.begin() + count, [](const Group& a, const Group& b) {
    return a.frame->depth != b.frame->depth ? a.frame->depth > b.frame->depth : a.pc < b.pc;
  });
  const size_t chosen = gives_way_ ? ++turn_ % count : 0;
  gives_way_ = false;
  frame_ = groups[chosen].frame;
  rows_ = frame_->rows.data();
  pc_ = groups[chosen].pc;
  mask_ = groups[chosen].mask;
  meets_at_ = UINT32_MAX;
  for (size_t g = 0; g < count; ++g)
    if (g != chosen && groups[g].frame == frame_ && groups[g].pc > pc_)
      meets_at_ = std::min(meets_at_, groups[g].pc);
  return true;
}

Warp::Stop Warp::run() {
  uint32_t backward = 0;
  while (pick()) {
    run_group(&backward);
    if (block_.gives_up_turn() || backward >= kBackwardPerTurn) return Stop::kTurnOver;
  }
  const bool ended = std::all_of(lanes_.begin(), lanes_.end(),
                                 [](const Lane& lane) { return lane.state == State::kEnded; });
  return ended ? Stop::kEnded : Stop::kBlocked;
}

void Warp::run_group(uint32_t* backward) {
  const std::vector<Instruction>* code = &frame_->function->code;
  for (;;) {
    if (pc_ == meets_at_) return park(pc_);
    const Instruction& i = (*code)[pc_];
    const Mask active = guarded(i);
    bool goes_on = true;
    if (i.site != nullptr && active != 0) i.site->reached = true;
    if (block_.launch().schedule.counts_trips) count_trips(i, active);
    try {
      switch (i.control) {
        case Control::kNone:
          if (active != 0) i.run(*this, i, active);
          ++pc_;
          break;
        case Control::kBranch:
          goes_on = branch(i, active, backward);
          break;
        case Control::kReturn:
          goes_on = finish(active);
          break;
        default:
          if (active == 0) {
            ++pc_;
            break;
          }
          if (active != mask_) throw BadAccess("some lanes of a group do it and others do not");
          goes_on = i.control == Control::kCall      ? call(i)
                    : i.control == Control::kBarrier ? barrier(i)
                                                     : shuffle(i);
      }
    } catch (const BadAccess& error) {
      throw BadAccess("line " + std::to_string(i.line) + ", " + std::string(i.text) + ", block " +
                      std::to_string(block_.x()) + "," + std::to_string(block_.y()) + ", warp " +
                      std::to_string(first_thread_ / kLanes) + ": " + error.what());
    }
    if (!goes_on) return;
    code = &frame_->function->code;
  }
}

void Warp::count_trips(const Instruction& i, Mask active) {
  trips_.guarded(i, frame_->ready);
  if (active == 0) return;
  bool global = i.space == Space::kGlobal;
  if (i.space == Space::kGeneric && i.src[0] != Instruction::kNoRow)
    global = in(i.src[0])[__builtin_ctz(active)] + uint64_t(i.offset) < kSharedWindow;
  trips_.executed(i, frame_->ready, global);
}

bool Warp::others_ready() const {
  for (int lane = 0; lane < kLanes; ++lane)
    if ((mask_ >> lane & 1) == 0 && lanes_[size_t(lane)].state == State::kReady) return true;
  return false;
}

bool Warp::branch(const Instruction& i, Mask taken, uint32_t* backward) {
  const Mask stays = mask_ & ~taken;
  if (taken == 0) {
    ++pc_;
    return true;
  }
  const bool is_backward = i.target <= pc_;
  if (stays == 0 && !is_backward && meets_at_ == UINT32_MAX) {
    pc_ = i.target;
    return true;
  }
  const uint32_t next = pc_ + 1;
  park(next);
  each_lane(taken, [&](int lane) { lanes_[size_t(lane)].pc = i.target; });
  if (is_backward) {
    ++*backward;
    if (*backward % kBackwardPerGroup == 0 && !block_.launch().schedule.no_progress_in_a_warp)
      gives_way_ = true;
    if (failed) throw BadAccess("another block has failed");
    // If all lanes loop back, the group continues while the turn lasts.
    if (stays == 0 && !gives_way_ && *backward < kBackwardPerTurn && !others_ready()) {
      pc_ = i.target;
      return true;
    }
  }
  return false;
}

bool Warp::call(const Instruction& i) {
  const Function* callee = i.call->function;
  Frame* made = make_frame(callee);
  made->caller = frame_;
  made->call = i.call;
  made->return_to = pc_ + 1;
  made->depth = frame_->depth + 1;
  made->lanes = __builtin_popcount(mask_);
  each_lane(mask_, [&](int lane) {
    for (size_t p = 0; p < callee->parameters.size(); ++p)
      std::memcpy(made->param(lane, callee->parameters[p].offset),
                  frame_->param(lane, i.call->arguments[p]), callee->parameters[p].bytes);
  });
  frame_ = made;
  pc_ = 0;
  park(0);
  return false;
}

bool Warp::finish(Mask leaving) {
  if (leaving == 0) {
    ++pc_;
    return true;
  }
  park(pc_ + 1);
  Frame* left = frame_;
  Frame* caller = left->caller;
  each_lane(leaving, [&](int lane) {
    Lane& each = lanes_[size_t(lane)];
    if (caller == nullptr) {
      each.state = State::kEnded;
      return;
    }
    for (size_t r = 0; r < left->function->results.size(); ++r)
      std::memcpy(caller->param(lane, left->call->results[r]),
                  left->param(lane, left->function->results[r].offset),
                  left->function->results[r].bytes);
    each.frame = caller;
    each.pc = left->return_to;
  });
  drop_frame(left, __builtin_popcount(leaving));
  return false;
}

bool Warp::barrier(const Instruction& i) {
  bool any = false;
  const uint64_t* given = i.reduces ? in(i.src[0]) : nullptr;
  uint64_t* result = i.reduces ? out(i.dst[0]) : nullptr;
  park(pc_ + 1);
  each_lane(mask_, [&](int lane) {
    lanes_[size_t(lane)].state = State::kAtBarrier;
    lanes_[size_t(lane)].result = result == nullptr ? nullptr : result + lane;
    if (given != nullptr) any |= (given[lane] & 1) != 0;
  });
  block_.arrive(__builtin_popcount(mask_), any, i.reduces);
  return false;
}

int Warp::waiting() const {
  return int(std::count_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return lane.state == State::kAtBarrier || lane.state == State::kAtShuffle;
  }));
}

// bar.sync is a single instruction for all lanes of a warp.
void Warp::pass_barrier() {
  const Lane* first = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.state != State::kAtBarrier) continue;
    if (first == nullptr) first = &lane;
    if (lane.pc != first->pc || lane.frame->function != first->frame->function)
      throw BadAccess("a lane that waits at another barrier than others of its warp");
    lane.state = State::kReady;
    if (lane.result != nullptr) *lane.result = block_.reduced() ? 1 : 0;
  }
}

// All lanes in the mask exchange values, once all have arrived.
bool Warp::shuffle(const Instruction& i) {
  const auto wanted = Mask(in(i.src[3])[__builtin_ctz(mask_)]);
  if ((mask_ & ~wanted) != 0) throw BadAccess("a lane that the mask does not name");
  park(pc_);
  Mask here = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Lane& each = lanes_[size_t(lane)];
    const bool came = each.state == State::kAtShuffle || (mask_ >> lane & 1) != 0;
    if (came && each.frame == frame_ && each.pc == pc_) here |= Mask(1) << lane;
  }
  if ((wanted & ~here) != 0) {
    each_lane(mask_, [&](int lane) { lanes_[size_t(lane)].state = State::kAtShuffle; });
    return false;
  }
  each_lane(here, [&](int lane) { lanes_[size_t(lane)].state = State::kReady; });
  mask_ = here;
  i.run(*this, i, here);
  ++pc_;
  park(pc_);
  return false;
}

Block::Block(const Launch& launch, KernelHistory& history, int x, int y)
    : launch_(launch),
      x_(x),
      y_(y),
      memory_(history, launch.threads, launch.schedule.replicates_reads),
      shared_(launch.kernel->shared_bytes + launch.dynamic_shared_bytes),
      random_(0x9e3779b97f4a7c15 * (uint64_t(launch.schedule.seed) + 1)) {
  for (int thread = 0; thread < launch.threads; thread += kLanes)
    warps_.emplace_back(*this, thread);
}

void Block::arrive(int count, bool any, bool reduces) {
  arrived_ += count;
  arrived_to_reduce_ += reduces ? count : 0;
  any_ |= any;
  if (arrived_ < launch_.threads) return;
  if (arrived_to_reduce_ != 0 && arrived_to_reduce_ != arrived_)
    throw BadAccess("threads of a block wait at barriers of different kinds");
  arrived_ = arrived_to_reduce_ = 0;
  reduced_ = std::exchange(any_, false);
  ++barriers_;
  memory_.barrier();
  shared_.barrier();
  const uint32_t now = trips();
  for (Warp& warp : warps_) {
    warp.trips().wait_until(now);
    warp.pass_barrier();
  }
}

uint32_t Block::trips() {
  uint32_t most = 0;
  for (Warp& warp : warps_) most = std::max(most, warp.trips().now());
  return most;
}

void Block::order_warps(std::vector<size_t>& order) {
  for (size_t w = 0; w < order.size(); ++w) order[w] = w;
  if (launch_.schedule.seed == 1) std::reverse(order.begin(), order.end());
  if (launch_.schedule.seed < 2) return;
  for (size_t w = order.size(); w > 1; --w) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    std::swap(order[w - 1], order[random_ % w]);
  }
}

// Other blocks and processes, for which this block waits, may need the core.
void Block::rest(uint64_t turns) const {
  if (turns < kTurnsAwake) {
    sched_yield();
    return;
  }
  const timespec nap{0, 50'000};
  nanosleep(&nap, nullptr);
}

void Block::nap_before_end() const { nanosleep(&kLateEnd, nullptr); }

void Block::run() {
  std::vector<size_t> order(warps_.size());
  uint64_t idle_turns = 0;
  for (;;) {
    const uint64_t barriers = barriers_, stores = memory_.stores(), polls = memory_.strong_loads();
    size_t ended = 0, blocked = 0;
    order_warps(order);
    for (const size_t w : order) {
      const Warp::Stop stop = warps_[w].run();
      ended += stop == Warp::Stop::kEnded ? 1 : 0;
      blocked += stop == Warp::Stop::kBlocked ? 1 : 0;
    }
    if (ended == warps_.size()) return;
    if (barriers != barriers_ || stores != memory_.stores()) {
      idle_turns = 0;
      continue;
    }
    int waiting = 0;
    for (const Warp& warp : warps_) waiting += warp.waiting();
    if (ended + blocked == warps_.size())
      throw BadAccess("block " + std::to_string(x_) + "," + std::to_string(y_) + ": " +
                      std::to_string(waiting) + " of " + std::to_string(launch_.threads) +
                      " threads wait at a barrier or a shuffle for others that never come");
    if (polls != memory_.strong_loads()) rest(idle_turns++);
  }
}

void run(const Launch& launch) {
  KernelHistory history;
  std::atomic<uint32_t> trips = 0;
  std::vector<std::thread> threads;
  for (int y = 0; y < launch.grid_y; ++y)
    for (int x = 0; x < launch.grid_x; ++x)
      threads.emplace_back([&launch, &history, &trips, x, y] {
        if (failed) return;
        try {
          Block block(launch, history, x, y);
          block.run();
          uint32_t most = trips;
          while (most < block.trips() && !trips.compare_exchange_weak(most, block.trips())) {
          }
          if (block.is_late()) block.nap_before_end();
        } catch (const std::exception& error) {
          fail(launch.kernel->name + ": " + error.what());
        }
      });
  for (std::thread& thread : threads) thread.join();
  if (!launch.schedule.counts_trips || failed) return;
  uint32_t fewest = *launch.kernel->fewest_trips;
  while (trips < fewest && !launch.kernel->fewest_trips->compare_exchange_weak(fewest, trips)) {
  }
}

const char* failure() { return failed ? failure_text.c_str() : nullptr; }

void forget_failure() {
  const std::lock_guard lock(failure_mutex);
  failed = false;
}

}  // namespace ptx
