// SPDX-License-Identifier: Apache-2.0

// Warps and blocks: which lanes run next, and which state they share.
//
// Every lane has a program counter of its own. The lanes of a warp at the same instruction of the
// same frame run together, as a group. The group that is deepest in calls runs first and, among
// equals, the earliest in the text, so that groups meet again behind a branch. A group that keeps
// branching backwards lets the others run now and then, as sm_70 and later promise, unless the
// schedule permits otherwise. The warps of a block take turns on one OS thread, so a schedule can
// be repeated; each block has a thread of its own.
#pragma once

#include <deque>
#include <set>
#include <utility>

#include "tests/ptx_interpreter/source/memory.h"
#include "tests/ptx_interpreter/source/trips.h"

namespace ptx {

struct Schedule {
  // The order of the warps: 0 upwards, 1 downwards, else random with this seed, in each turn anew.
  uint32_t seed = 0;
  // A lane that waits for another lane of its own warp may wait forever.
  bool no_progress_in_a_warp = false;
  // Blocks with an even y wait until nothing changes before they first acquire at a line, so that
  // awaited data is there when they look, while their peers mostly have to wait. They nap before
  // they end, so that peers continue with only the block's releases.
  bool even_are_late = false;
  // Several threads may read an element if the thread that stores it is the only one that uses the
  // value. Triton does so with tensors that have fewer elements than the block has threads.
  bool replicates_reads = false;
  // The trips of blocks are counted (trips.h).
  bool counts_trips = false;
};

struct Launch {
  const Module* module;
  const Function* kernel;
  std::vector<uint8_t> parameters;
  int grid_x, grid_y, threads;
  uint32_t dynamic_shared_bytes;
  Schedule schedule;
};

class Block;

// The registers and parameters of a call in progress, for those lanes of a warp that made the call.
struct Frame {
  const Function* function = nullptr;
  Frame* caller = nullptr;
  const Call* call = nullptr;
  uint32_t return_to = 0;
  int depth = 0;
  int lanes = 0;                // that are in it or in a function called by it
  std::vector<uint64_t> rows;   // of kLanes
  std::vector<uint8_t> params;  // param_bytes of each lane
  Trips::Ready ready;           // of the rows, if trips are counted
  uint8_t* param(int lane, uint32_t offset) {
    return params.data() + size_t(lane) * function->param_bytes + offset;
  }
};

class Warp {
 public:
  Warp(Block& block, int first_thread);

  enum class Stop { kBlocked, kTurnOver, kEnded };
  Stop run();

  // For the handlers of instructions.
  uint64_t* out(int32_t row) { return rows_ + size_t(row) * kLanes; }
  const uint64_t* in(int32_t row) const {
    return row >= 0 ? rows_ + size_t(row) * kLanes : constants_ + size_t(~row) * kLanes;
  }
  Block& block() { return block_; }
  Frame& frame() { return *frame_; }
  int thread(int lane) const { return first_thread_ + lane; }

  void pass_barrier();  // all threads have come
  int waiting() const;  // lanes at a barrier or a shuffle
  Trips& trips() { return trips_; }

 private:
  enum class State : uint8_t { kReady, kAtBarrier, kAtShuffle, kEnded };
  struct Lane {
    Frame* frame;
    uint32_t pc;
    State state;
    uint64_t* result;  // of a barrier that reduces
  };

  bool pick();
  void run_group(uint32_t* backward);
  void count_trips(const Instruction& i, Mask active);
  void park(uint32_t pc);  // the group's position
  bool others_ready() const;
  Mask guarded(const Instruction& i) const;
  // Each returns whether the group continues at pc_.
  bool branch(const Instruction& i, Mask taken, uint32_t* backward);
  bool call(const Instruction& i);
  bool finish(Mask leaving);
  bool barrier(const Instruction& i);
  bool shuffle(const Instruction& i);
  Frame* make_frame(const Function* function);
  void drop_frame(Frame* frame, int lanes);

  Block& block_;
  const uint64_t* constants_;
  int first_thread_;
  std::array<Lane, kLanes> lanes_;
  std::deque<Frame> frames_;
  std::vector<Frame*> free_frames_;
  // The group that runs.
  Frame* frame_ = nullptr;
  uint64_t* rows_ = nullptr;
  Mask mask_ = 0;
  uint32_t pc_ = 0;
  uint32_t meets_at_ = UINT32_MAX;  // the position of the frame's next group
  bool gives_way_ = false;
  uint32_t turn_ = 0;
  Trips trips_;
};

class Block {
 public:
  Block(const Launch& launch, KernelHistory& history, int x, int y);
  void run();
  uint32_t trips();  // of the warp with the most trips

  const Launch& launch() const { return launch_; }
  BlockMemory& memory() { return memory_; }
  SharedMemory& shared() { return shared_; }
  int x() const { return x_; }
  int y() const { return y_; }

  // `count` threads have reached a barrier; `any`: whether one of them has a true predicate.
  void arrive(int count, bool any, bool reduces);
  bool reduced() const { return reduced_; }
  bool gives_up_turn() { return std::exchange(gives_up_turn_, false); }
  void give_up_turn() { gives_up_turn_ = true; }
  // See Schedule::even_are_late.
  bool is_late() const { return launch_.schedule.even_are_late && y_ % 2 == 0; }
  void nap_before_end() const;
  bool comes_first(uint32_t line) { return lines_come_to_.insert(line).second; }

 private:
  void order_warps(std::vector<size_t>& order);
  void rest(uint64_t turns) const;

  const Launch& launch_;
  const int x_, y_;
  BlockMemory memory_;
  SharedMemory shared_;
  std::deque<Warp> warps_;
  int arrived_ = 0, arrived_to_reduce_ = 0;
  bool any_ = false, reduced_ = false, gives_up_turn_ = false;
  uint64_t barriers_ = 0;
  std::set<uint32_t> lines_come_to_;
  uint64_t random_;
};

// Runs all blocks of a launch, side by side. A kernel's mistake is kept for failure(), and ends all
// kernels of the process.
void run(const Launch& launch);
// The mistake of the first kernel that failed, or nullptr.
const char* failure();
void forget_failure();

}  // namespace ptx
