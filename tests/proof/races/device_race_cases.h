// SPDX-License-Identifier: Apache-2.0

// The calls that the ranks of device_race_test.cpp make, one after the other, and their expected
// results. Values are small integers, so every sum is exact.
#pragma once

#include <algorithm>

#include "kernels/cuda/body.h"

namespace races {

using namespace ringcomm;

// The fewest slots for many items, so that senders wait for every slot.
constexpr uint32_t kSegmentBytes = 1024;
constexpr int kSlots = 2;
constexpr uint32_t kLLBytes = 512;
constexpr float kUntouched = 99;

enum class Kernel {
  kMove,
  kListMove,
  kReduceScatter,
  kReduceScatterList,
  kAllReduce,
  kLLMove,
  kLLReduce
};
enum class BufferKind { kPlain, kHeap, kInPlace };  // in place: also in the heap

// The kernels of one stream of a rank run in order; kernels of different streams run concurrently.
enum StreamKind { kCollectives, kSends, kReceives, kStreams };

struct Case {
  Kernel kernel;
  Collective collective;
  Algorithm algorithm = Algorithm::kOneShot;
  BufferKind buffer = BufferKind::kPlain;
  RedOp op = RedOp::kSum;
  uint64_t elems = 0;  // of a chunk; for all-reduce of the whole buffer
  int root = -1;
  int blocks = 0;
  uint64_t step = 0;
};

using enum Kernel;
using enum Algorithm;

inline const Case kCycle[] = {
    {kReduceScatterList, Collective::kReduceScatter},
    {kLLReduce, Collective::kAllReduce, kLL},
    {kLLReduce, Collective::kReduceScatter, kLL, BufferKind::kPlain, RedOp::kPremulSum},
    {kAllReduce, Collective::kAllReduce, kOneShot, BufferKind::kInPlace},
    {kLLMove, Collective::kAllGather, kLL},
    {kLLReduce, Collective::kAllReduce, kLL, BufferKind::kInPlace, RedOp::kPremulSum},
    {kLLMove, Collective::kAllGather, kLL},
    {kAllReduce, Collective::kAllReduce, kOneShot, BufferKind::kPlain, RedOp::kPremulSum},
    {kReduceScatter, Collective::kReduceScatter, kRing},
    {kLLReduce, Collective::kReduceScatter, kLL},
    {kAllReduce, Collective::kAllReduce, kRing, BufferKind::kHeap, RedOp::kPremulSum},
    {kMove, Collective::kAllGather, kRing},
    {kListMove, Collective::kAllGather, kOneShot, BufferKind::kHeap},
    {kLLReduce, Collective::kAllReduce, kLL},
    {kLLMove, Collective::kAllGather, kLL},
    {kMove, Collective::kAllGather},
    {kMove, Collective::kBroadcast, kOneShot, BufferKind::kInPlace},
    {kListMove, Collective::kAllToAll, kOneShot, BufferKind::kHeap},
    {kListMove, Collective::kAllToAll},
    {kReduceScatter, Collective::kReduceScatter, kOneShot, BufferKind::kHeap, RedOp::kPremulSum},
    {kReduceScatter, Collective::kReduce},
    {kListMove, Collective::kGather},
    {kListMove, Collective::kScatter, kOneShot, BufferKind::kHeap},
    {kMove, Collective::kBarrier},
};
constexpr uint64_t kCycleSteps = std::size(kCycle);

// The sizes of LL calls, in turn. The first calls write no second packet, so later calls find the
// second packets of much earlier calls.
constexpr uint64_t kLLElems[] = {1, 2, 2, 1, 2, 1, 128, 100, 3, 127, 17, 64, 1, 5, 40, 77};

inline uint64_t ll_calls_before(uint64_t step) {
  const auto among = [](uint64_t steps) {
    return uint64_t(
        std::count_if(kCycle, kCycle + steps, [](const Case& c) { return c.algorithm == kLL; }));
  };
  return step / kCycleSteps * among(kCycleSteps) + among(step % kCycleSteps);
}

// Longest chunk: each of its `channels` parts is long enough for zero copy.
inline uint64_t heap_elems(int channels) {
  return uint64_t(channels) * (kZeroCopyMinBytes / sizeof(float) + 16) + 64;
}

inline Case case_of(StreamKind stream, uint64_t step, int world, int channels) {
  Case c = stream == kCollectives ? kCycle[step % kCycleSteps] : Case{kListMove, Collective::kSend};
  c.step = step;
  if (stream != kCollectives) {
    c.buffer = step % 2 == 0 ? BufferKind::kPlain : BufferKind::kHeap;
    c.root = int(step % 5);  // the tag
    c.blocks = std::min(channels, kMessageChannels);
  } else if (c.algorithm == kLL) {
    c.elems = kLLElems[ll_calls_before(step) % std::size(kLLElems)];
    c.blocks = std::min(channels, 4);
    return c;
  } else {
    c.blocks = 1 + int(step / 3) % channels;
  }
  c.elems = c.buffer == BufferKind::kPlain ? 1501 + step % 7 : heap_elems(channels);
  const bool whole = c.collective == Collective::kAllReduce;
  if (whole) c.elems *= uint64_t(world);
  if (whole && c.buffer == BufferKind::kPlain && step / kCycleSteps % 2 == 1)
    c.elems = 251;  // one hop
  const bool rooted = c.collective == Collective::kBroadcast ||
                      c.collective == Collective::kReduce || c.collective == Collective::kGather ||
                      c.collective == Collective::kScatter;
  if (rooted) c.root = int(step) % world;
  return c;
}

// Whether `from` sends a message to `to`: to the next rank, the previous rank, or all, in turn.
inline bool talks(const Case& c, int world, int from, int to) {
  const int distance = (to - from + world) % world;
  return distance != 0 && (c.step % 3 == 2 || distance == (c.step % 3 == 0 ? 1 : world - 1));
}

// Ranks of odd number send and receive messages in one kernel, on their stream of sends.
inline bool both_ways(int rank) { return rank % 2 == 1; }
inline bool receives(StreamKind stream, int rank) {
  return stream == kCollectives || (stream == kReceives) != both_ways(rank);
}

// Elements that `from` has for `to` in calls that take lists.
inline uint64_t pair_elems(const Case& c, int world, int from, int to) {
  switch (c.collective) {
    case Collective::kAllGather:
      return c.elems - uint64_t(from) * 3;
    case Collective::kAllToAll:
      return (uint64_t(from + 2 * to) + c.step) % 4 == 0 ? 0
                                                         : c.elems - uint64_t(from * 5 + to * 3);
    case Collective::kGather:
      return to == c.root ? c.elems : 0;
    case Collective::kScatter:
      return from == c.root ? c.elems : 0;
    case Collective::kSend:
      return talks(c, world, from, to) ? c.elems - uint64_t(from + to) : 0;
    case Collective::kReduceScatter:
      return c.elems;
    default:
      return 0;
  }
}

inline float value(const Case& c, int rank, uint64_t i) {
  return float((uint64_t(rank) * 7 + i * 3 + c.step * 5) % 11) - 5;
}

inline double factor_of(const Case& c, int rank) {
  return c.op == RedOp::kPremulSum ? double(rank % 3 + 1) : 1.0;
}

inline float sum_at(const Case& c, int world, uint64_t i) {
  float total = 0;
  for (int r = 0; r < world; ++r) total += float(factor_of(c, r)) * value(c, r, i);
  return total;
}

// Element i of rank `me`'s output; all other elements must stay untouched.
inline float expected(const Case& c, int world, int me, uint64_t i) {
  const uint64_t n = c.elems;
  const int from = int(i / n);
  switch (c.collective) {
    case Collective::kAllReduce:
      return i < n ? sum_at(c, world, i) : kUntouched;
    case Collective::kReduceScatter:
      return i < n ? sum_at(c, world, uint64_t(me) * n + i) : kUntouched;
    case Collective::kReduce:
      return i < n && me == c.root ? sum_at(c, world, i) : kUntouched;
    case Collective::kBroadcast:
      return i < n ? value(c, c.root, i) : kUntouched;
    case Collective::kAllGather:
      if (c.kernel == kListMove && i % n >= pair_elems(c, world, from, me)) return kUntouched;
      return value(c, from, i % n);
    default:
      return i % n < pair_elems(c, world, from, me) ? value(c, from, uint64_t(me) * n + i % n)
                                                    : kUntouched;
  }
}

}  // namespace races
