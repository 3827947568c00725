// SPDX-License-Identifier: Apache-2.0

// Runs the kernels (kernels/cuda/body.h) back to back: ranks x channels x lanes as threads. Each
// rank has a stream of collectives, one of sends and one of receives, all at once. No barrier
// separates ranks: a rank's next kernel begins when its last has ended, as on a GPU.
// ThreadSanitizer reports races of the templates; without it the program reports wrong results.
//
// With ROUNDS 0 each kernel runs once, and the last rank makes another call, or none: all lanes of
// all blocks must end together, and a rank must record the fault. In further cases a lane takes the
// fault record but does not continue until the others have given up, as lanes of one warp may, or
// another kernel of the rank takes it: then the others must not end before that kernel's abort
// word.
//
// device_race_test WORLD CHANNELS LANES ROUNDS FIRST TIMEOUT_MS
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/proof/races/device_race_world.h"

using namespace races;

namespace {

// Ends the process, since the other threads still run.
[[noreturn]] void give_up(int rank, const Case& c, const char* what, int number) {
  std::fprintf(stderr, "rank %d: %s %d: step %d, collective %d, algorithm %d, %d elements\n", rank,
               what, number, int(c.step), int(c.collective), int(c.algorithm), int(c.elems));
  std::_Exit(1);
}

void run_kernel(const Case& c, EmulatedTeam team, const ListParams& p, int rank) {
  switch (c.kernel) {
    case Kernel::kMove:
      return move_kernel(team, p, rank, *team.w);
    case Kernel::kListMove:
      return list_move_kernel(team, p, rank, *team.w);
    case Kernel::kReduceScatter:
      return reduce_scatter_kernel<float, RedOp::kSum>(team, p, rank, *team.w);
    case Kernel::kReduceScatterList:
      return reduce_scatter_list_kernel<float, RedOp::kSum>(team, p, rank, *team.w);
    case Kernel::kAllReduce:
      return all_reduce_kernel<float, RedOp::kSum>(team, p, rank, *team.w);
    case Kernel::kLLMove:
      return ll_move_kernel(team, p, rank, *team.w);
    case Kernel::kLLReduce:
      return ll_reduce_kernel<float, RedOp::kSum>(team, p, rank, *team.w);
  }
}

// Runs one lane of one block of the current kernel of the rank's stream.
void run_block(const Setting& s, Queue& q, int rank, int channel, int lane) {
  host::LaneGroup* const block = q.blocks[size_t(channel)].get();
  Workspace* const workspace = &q.workspaces[size_t(channel)];
  // A block's shared memory begins with another block's data.
  if (lane == 0) std::memset(static_cast<void*>(workspace), 0xa5, sizeof(Workspace));
  block->wait(lane);
  run_kernel(q.running, EmulatedTeam{workspace, block, lane, s.lanes, channel, q.running.blocks},
             q.params, rank % kMaxRanksPerLaunch);
}

// The body of one thread: lane `lane` of every block of `channel` on a rank's stream.
void run_lane(World& w, StreamKind stream, int rank, int channel, int lane) {
  Queue& q = w.queues[size_t(stream)][size_t(rank)];
  const int thread = channel * w.s.lanes + lane;
  const bool leader = thread == 0;
  const uint64_t steps = w.s.rounds * kCycleSteps;
  for (uint64_t step = 0; step <= steps; ++step) {
    q.threads->wait(thread);  // waits for all blocks of the last kernel
    if (leader && step > 0) {
      if (load_acquire_sys(&w.control(rank)->aborted) != 0)
        give_up(rank, q.running, "status", int(w.control(rank)->fault.status));
      if (!check(w, q, stream, rank)) give_up(rank, q.running, "wrong result", 0);
    }
    if (step == steps) return;
    if (leader) prepare(w, q, stream, rank, case_of(stream, step, w.s.world, w.s.channels));
    q.threads->wait(thread);
    if (channel < q.running.blocks) run_block(w.s, q, rank, channel, lane);
  }
}

enum class Fault { kOtherSize, kOtherCall, kNoCall, kCount };

// The call of `rank` at a step at which the last rank makes another call or none.
Case faulty_case(const Setting& s, Fault fault, uint64_t step, int rank) {
  Case c = case_of(kCollectives, step, s.world, s.channels);
  if (rank != s.world - 1) return c;
  if (fault == Fault::kOtherCall)
    return case_of(kCollectives, (step + 1) % kCycleSteps, s.world, s.channels);
  if (fault == Fault::kOtherSize) c.elems += c.elems > 1 ? -1 : 1;
  if (fault == Fault::kNoCall) c.blocks = 0;
  return c;
}

// Whether some rank has given up, after all kernels have ended.
bool ends_with_a_fault(const Setting& s, Fault fault, uint64_t step) {
  World w(s);
  std::vector<std::thread> lanes;
  for (int r = 0; r < s.world; ++r) {
    w.hosts[size_t(r)]->lost[s.world - 1] = fault == Fault::kNoCall;
    Queue& q = w.queues[kCollectives][size_t(r)];
    prepare(w, q, kCollectives, r, faulty_case(s, fault, step, r));
    for (int c = 0; c < q.running.blocks; ++c)
      for (int l = 0; l < s.lanes; ++l)
        lanes.emplace_back([&, r, c, l] { run_block(s, q, r, c, l); });
  }
  for (std::thread& t : lanes) t.join();
  int faults = 0;
  for (int r = 0; r < s.world; ++r) {
    const bool raised = load_acquire_sys(&w.control(r)->aborted) != 0;
    if (raised && w.hosts[size_t(r)]->fault.status == Status::kOk) return false;
    faults += raised;
  }
  return faults > 0;
}

// A barrier carries no size.
bool every_fault_ends(const Setting& s) {
  for (int fault = 0; fault < int(Fault::kCount); ++fault)
    for (uint64_t step = 0; step < kCycleSteps; ++step) {
      if (Fault(fault) == Fault::kOtherSize && kCycle[step].collective == Collective::kBarrier)
        continue;
      if (ends_with_a_fault(s, Fault(fault), step)) continue;
      std::fprintf(stderr, "fault %d of step %d: no rank has reported it\n", fault, int(step));
      return false;
    }
  return true;
}

// The view of a rank's first block, as in its kernel.
View view_of(World& w, int rank, Workspace& workspace) {
  host::LaneGroup alone(1);
  EmulatedTeam team{&workspace, &alone, 0, 1, 0, 1};
  Queue& q = w.queues[kCollectives][size_t(rank)];
  load_table(team, q.params, rank % kMaxRanksPerLaunch, workspace);
  return workspace.view;
}

// Two lanes of one warp fail at once. The lane that has the record continues only after the other
// has reached the point where the warp's lanes meet again. The alarm ends a lane that waits before
// that point.
void a_lane_leaves_the_record_to_its_warp(const Setting& s) {
  World w(s);
  prepare(w, w.queues[kCollectives][0], kCollectives, 0,
          case_of(kCollectives, 0, s.world, s.channels));
  Workspace workspace{};
  const View v = view_of(w, 0, workspace);
  host::LaneGroup alone(1);
  EmulatedTeam team{&workspace, &alone, 0, 1, 0, 1};
  auto* const record = claim_fault(v);
  alarm(60);
  const Status other = fail(team, v, Status::kMismatch, 1, nullptr, 0);
  alarm(0);
  fill_fault(record, v, Status::kPeerLost, 1);
  raise_fault(team, v);
  if (other != Status::kMismatch || w.control(0)->fault.status != Status::kPeerLost)
    give_up(0, w.queues[kCollectives][0].running, "two lanes, one record", int(other));
}

// Whether the failing kernel of a step ended before the rank's abort word was raised: another
// kernel of the rank has the record, and raises the word late.
bool ends_before_the_word(const Setting& s, uint64_t step) {
  World w(s);
  w.hosts[0]->lost[s.world - 1] = 1;
  Queue& q = w.queues[kCollectives][0];
  prepare(w, q, kCollectives, 0, case_of(kCollectives, step, s.world, s.channels));
  uint32_t* const word = &w.control(0)->aborted;
  w.control(0)->claimed = 1;
  std::atomic<int> running = q.running.blocks, early = 0;
  std::vector<std::thread> blocks;
  for (int c = 0; c < q.running.blocks; ++c)
    blocks.emplace_back([&, c] {
      std::vector<std::thread> lanes;
      for (int l = 0; l < s.lanes; ++l) lanes.emplace_back([&, l] { run_block(s, q, 0, c, l); });
      for (std::thread& t : lanes) t.join();
      early += load_acquire_sys(word) == 0;
      --running;
    });
  for (int naps = 0; naps < 40 && running > 0; ++naps) usleep(5000);
  store_release_sys(word, 1);
  for (std::thread& t : blocks) t.join();
  return early > 0;
}

void the_record_is_anothers(const Setting& s) {
  a_lane_leaves_the_record_to_its_warp(s);
  for (uint64_t step : {0, 1})  // a collective, and LL
    if (ends_before_the_word(s, step))
      give_up(0, case_of(kCollectives, step, s.world, s.channels), "ended before the word", 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  World w({std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]),
           std::strtoull(argv[4], nullptr, 10), uint32_t(std::strtoull(argv[5], nullptr, 10)),
           std::strtoull(argv[6], nullptr, 10)});
  if (w.s.rounds == 0) {
    the_record_is_anothers(w.s);
    if (!every_fault_ends(w.s)) return 1;
    std::puts("ok");
    return 0;
  }
  std::vector<std::thread> lanes;
  for (const StreamKind stream : {kCollectives, kSends, kReceives})
    for (int r = 0; r < w.s.world; ++r)
      for (int c = 0; c < w.s.channels; ++c)
        for (int l = 0; l < w.s.lanes; ++l)
          lanes.emplace_back([&w, stream, r, c, l] { run_lane(w, stream, r, c, l); });
  for (std::thread& t : lanes) t.join();
  std::puts("ok");
  return 0;
}
