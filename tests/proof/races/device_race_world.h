// SPDX-License-Identifier: Apache-2.0

// The memory of the ranks of device_race_test.cpp: regions as the host lays them out, buffers in
// the heap and outside, and the arguments of each launch.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/proof/races/device_race_cases.h"
#include "tests/support/emulator/block.h"

namespace races {

using namespace ringcomm::device;

struct Setting {
  int world, channels, lanes;
  uint64_t rounds;
  uint32_t first;  // numbers of earlier calls and items, for the words' initial values
  uint64_t timeout_ms;
};

struct Buffers {
  std::vector<float> plain_in, plain_out;
  float *heap_in, *heap_out;
};

// One stream of a rank: at most one kernel runs at a time.
struct Queue {
  ListParams params;  // kernels without lists read only its first part
  Case running;
  Buffers buffers;
  std::unique_ptr<host::LaneGroup> threads;  // the threads that run its kernels
  std::vector<Workspace> workspaces;         // by block, like `blocks`
  std::vector<std::unique_ptr<host::LaneGroup>> blocks;
};

struct World {
  Setting s;
  Layout layout;
  std::vector<char> arena;
  std::vector<char*> regions;
  std::vector<std::unique_ptr<HostPage>> hosts;
  std::vector<std::vector<Queue>> queues;  // [stream][rank]

  explicit World(const Setting& setting)
      : s(setting),
        layout{s.world, s.channels, kSlots, kSegmentBytes, kLLBytes, 0},
        queues(kStreams) {
    const uint64_t table = layout.whole_pages(sizeof(RankTable) + 2 * kMaxWorld * sizeof(int32_t)),
                   buffer = layout.whole_pages(buffer_elems() * sizeof(float)),
                   share = layout.region_bytes() + table + 2 * kStreams * buffer;
    arena.resize(share * uint64_t(s.world) + kPageBytes);
    char* const base =
        arena.data() + (-reinterpret_cast<uintptr_t>(arena.data()) & (kPageBytes - 1));
    for (int r = 0; r < s.world; ++r) {
      regions.push_back(base + share * uint64_t(r));
      hosts.push_back(std::make_unique<HostPage>());
    }
    for (int r = 0; r < s.world; ++r) {
      write_table(r, base);
      write_words(r);
      char* at = regions[size_t(r)] + layout.region_bytes() + table;
      for (int stream = 0; stream < kStreams; ++stream, at += 2 * buffer)
        queues[size_t(stream)].push_back(make_queue(at, at + buffer));
    }
  }

  // One more element, for inputs that begin at an odd element.
  uint64_t buffer_elems() const { return heap_elems(s.channels) * uint64_t(s.world) + 1; }
  RankTable* table(int rank) const {
    return reinterpret_cast<RankTable*>(regions[size_t(rank)] + layout.region_bytes());
  }
  ControlPage* control(int rank) const {
    return reinterpret_cast<ControlPage*>(regions[size_t(rank)]);
  }

 private:
  // Writes two rings: the ranks in order, and the even ranks followed by the odd ranks backwards.
  void write_table(int rank, char* heap) {
    RankTable* t = table(rank);
    t->rank = rank;
    t->world = s.world;
    t->rings = 2;
    t->layout = layout;
    t->host = hosts[size_t(rank)].get();
    auto* order = const_cast<int32_t*>(rings_of(t));
    for (int p = 0; p < s.world; ++p) {
      t->regions[p] = regions[size_t(p)];
      t->heaps[p] = heap;
      t->heap_bytes[p] = arena.size() - kPageBytes;
      const int evens = (s.world + 1) / 2;
      order[p] = p;
      order[s.world + p] = p < evens ? 2 * p : 2 * (s.world - 1 - p) + 1;
    }
  }

  // Sets the words to their state after `first` items and LL calls. The buffers hold packets of the
  // flags' previous cycle, whose flags come again unless the buffers are cleared.
  void write_words(int rank) {
    char* const region = regions[size_t(rank)];
    for (int i = 0; i < int(Stream::kCount); ++i)
      for (int c = 0; c < s.channels; ++c)
        for (int p = 0; p < s.world; ++p) {
          const Stream stream = Stream(i);
          *reinterpret_cast<SignalLine*>(region + layout.signal_offset(stream, c, p)) = {
              s.first, s.first, 0};
          *reinterpret_cast<EpochLine*>(region + layout.epoch_offset(stream, c, p)) = {s.first,
                                                                                       s.first};
        }
    for (int c = 0; c < s.channels; ++c)
      *reinterpret_cast<ChannelLine*>(region + layout.channel_offset(c)) = {0, s.first, 0};
    if (s.first == 0) return;
    uint32_t flag = s.first;
    for (int calls = 0; calls < 6; ++calls) flag = next_flag(flag);
    for (int turn = 0; turn < 2; ++turn) {
      flag = next_flag(flag);
      auto* packet = reinterpret_cast<LLPacket*>(region + layout.ll_offset(flag & 1, 0));
      const uint64_t count = layout.ll_set_bytes() / sizeof(LLPacket) * uint64_t(s.world);
      std::fill(packet, packet + count, LLPacket{1, flag, 1, flag});
    }
  }

  Queue make_queue(char* in, char* out) {
    Queue q{};
    q.buffers = {std::vector<float>(buffer_elems()), std::vector<float>(buffer_elems()),
                 reinterpret_cast<float*>(in), reinterpret_cast<float*>(out)};
    q.threads = std::make_unique<host::LaneGroup>(s.channels * s.lanes);
    q.workspaces.resize(size_t(s.channels));
    for (int c = 0; c < s.channels; ++c)
      q.blocks.push_back(std::make_unique<host::LaneGroup>(s.lanes));
    return q;
  }
};

inline float* input_of(Queue& q) {
  if (q.running.buffer != BufferKind::kPlain) return q.buffers.heap_in;
  return q.buffers.plain_in.data() + q.running.step % 2;  // aligned differently from the output
}

inline float* output_of(Queue& q) {
  const Case& c = q.running;
  if (c.buffer == BufferKind::kInPlace) return q.buffers.heap_in;
  return c.buffer == BufferKind::kHeap ? q.buffers.heap_out : q.buffers.plain_out.data();
}

// Writes a call's lists into the launch, in a row: inputs by reader, outputs by sender.
inline void write_lists(const World& w, Queue& q, int rank) {
  const Case& c = q.running;
  const int world = w.s.world;
  Span* const in = q.params.spans;
  Span* const out = in + world;
  ListArgs& lists = q.params.lists[rank % kMaxRanksPerLaunch];
  const uint64_t peers = c.collective == Collective::kSend ? 0 : ~uint64_t(0);
  lists = {0, world, peers, peers};
  const auto at = [&](float* base, uint64_t elem) { return reinterpret_cast<char*>(base + elem); };
  for (int p = 0; p < world; ++p) {
    const uint64_t begin = uint64_t(p) * c.elems;
    in[p] = {at(input_of(q), begin), pair_elems(c, world, rank, p) * sizeof(float)};
    out[p] = {at(output_of(q), begin), pair_elems(c, world, p, rank) * sizeof(float)};
    if (c.collective == Collective::kSend) {
      lists.readers |= uint64_t(talks(c, world, rank, p)) << p;
      lists.senders |= uint64_t(talks(c, world, p, rank)) << p;
    }
  }
}

// Fills the input, as a user's kernel before the call, and sets the launch's arguments.
inline void prepare(World& w, Queue& q, StreamKind stream, int rank, const Case& c) {
  q.running = c;
  const uint64_t capacity = w.buffer_elems() - 1, bytes = c.elems * sizeof(float);
  float *in = input_of(q), *out = output_of(q);
  std::fill(out, out + std::min(capacity, c.elems * uint64_t(w.s.world)), kUntouched);
  const bool fills = c.collective != Collective::kBroadcast || rank == c.root;
  const bool chunks = c.collective != Collective::kAllReduce && c.collective != Collective::kReduce;
  const uint64_t filled = chunks ? c.elems * uint64_t(w.s.world) : c.elems;
  for (uint64_t i = 0; fills && i < filled; ++i) in[i] = value(c, rank, i);

  CallArgs& args = q.params.calls[rank % kMaxRanksPerLaunch];
  args = CallArgs{};
  args.table = w.table(rank);
  args.in = reinterpret_cast<char*>(in);
  args.out = reinterpret_cast<char*>(out);
  const bool whole = c.collective == Collective::kAllReduce;
  args.total_bytes = whole ? bytes : bytes * uint64_t(w.s.world);
  args.chunk_bytes = whole ? balanced_chunk_bytes(bytes, w.s.world) : bytes;
  if (c.collective == Collective::kReduce || c.collective == Collective::kBroadcast)
    args.total_bytes = bytes, args.chunk_bytes = 0;
  if (c.collective == Collective::kBarrier) args.total_bytes = args.chunk_bytes = 0;
  const bool sized = c.collective != Collective::kAllToAll && c.collective != Collective::kSend &&
                     c.collective != Collective::kBarrier;
  args.match_bytes = sized ? args.total_bytes : 0;  // only sizes on which all ranks agree
  args.timeout_ns = w.s.timeout_ms * 1'000'000;
  args.factor = factor_of(c, rank);
  args.collective = c.collective;
  args.algorithm = c.algorithm;
  args.redop = int32_t(c.op);
  args.root = c.root;
  if (c.kernel == kListMove || c.kernel == kReduceScatterList) write_lists(w, q, rank);
  if (!receives(stream, rank)) q.params.lists[rank % kMaxRanksPerLaunch].senders = 0;
  if (stream == kReceives) q.params.lists[rank % kMaxRanksPerLaunch].readers = 0;
  if (stream == kReceives && both_ways(rank)) q.running.blocks = 0;
}

// Checks the output and overwrites the input, as a user's kernel after the call.
inline bool check(World& w, Queue& q, StreamKind stream, int rank) {
  const Case& c = q.running;
  const float* out = output_of(q);
  const uint64_t elems = std::min(w.buffer_elems() - 1, c.elems * uint64_t(w.s.world));
  bool ok = true;
  for (uint64_t i = 0; receives(stream, rank) && i < elems; ++i) {
    const bool beyond = c.buffer == BufferKind::kInPlace && i >= c.elems;
    ok &= beyond || out[i] == expected(c, w.s.world, rank, i);
  }
  std::fill(input_of(q), input_of(q) + elems, -1.0f);
  return ok;
}

}  // namespace races
