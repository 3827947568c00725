// SPDX-License-Identifier: Apache-2.0

// Every collective back to back, with ranks x channels x lanes as threads: ThreadSanitizer reports
// races of the templates, and without it the program reports wrong results.
// tests/proof/races/test_races.py also builds this program with mutated headers, each of which must
// fail.
//
// race_test WORLD CHANNELS LANES ROUNDS
#include "kernels/host/two_levels.h"
#include "ringcomm/collectives/all_reduce.h"
#include "ringcomm/collectives/exchange.h"
#include "tests/proof/races/race_buffers.h"
#include "tests/proof/races/race_lent.h"

namespace {

constexpr int kLevelRanks = 2;  // of a group that sums first

// Fills and reads buffers as their users, between the two barriers around a round.
void fill(BufferWorld& w, int rank, int round) {
  Buffers& b = w.buffers[size_t(rank)];
  const uint64_t elems = kChunkElems * uint64_t(w.world);
  for (auto* v : {&b.in, &b.all_reduced, &b.gathered, &b.ring_reduced, &b.ring_gathered,
                  &b.exchanged, &b.reduced, &b.collected, &b.heap_reduced})
    v->assign(elems, 99);
  for (auto* v : {&b.scattered, &b.ring_scattered, &b.level_scattered, &b.broadcast, &b.dealt})
    v->assign(kChunkElems, 99);
  b.small.resize(kSmallElems);
  for (uint64_t i = 0; i < elems; ++i) b.in[i] = b.heap_in[i] = value(rank, i, round);
  for (uint64_t i = 0; i < kSmallElems; ++i) b.small[i] = value(rank, i, round);
  for (uint64_t i = 0; i < kChunkElems; ++i) b.broadcast[i] = value(rank, i, round);
}

bool in_levels(const BufferWorld& w) { return w.world >= 4 && w.world % kLevelRanks == 0; }

bool check(BufferWorld& w, int rank, int round) {
  const Buffers& b = w.buffers[size_t(rank)];
  const uint64_t elems = kChunkElems * uint64_t(w.world);
  const float* in_place = w.channels == 1 ? b.heap_reduced.data() : b.heap_in;
  bool ok = true;
  for (uint64_t i = 0; i < elems; ++i) {
    const float sum = sum_at(w.world, i, round);
    const int owner = int(i / kChunkElems);
    ok &= b.all_reduced[i] == sum && b.ring_reduced[i] == sum && in_place[i] == sum;
    ok &= b.gathered[i] == value(owner, uint64_t(owner) * kChunkElems + i % kChunkElems, round);
    ok &= b.ring_gathered[i] == b.gathered[i];
    ok &= b.exchanged[i] == value(owner, uint64_t(rank) * kChunkElems + i % kChunkElems, round);
    ok &= rank != w.world - 1 || (b.reduced[i] == sum && b.collected[i] == b.gathered[i]);
  }
  for (uint64_t i = 0; i < kChunkElems; ++i) {
    const float sum = sum_at(w.world, uint64_t(rank) * kChunkElems + i, round);
    ok &=
        b.scattered[i] == sum && b.ring_scattered[i] == sum && b.broadcast[i] == value(0, i, round);
    ok &= !in_levels(w) || b.level_scattered[i] == sum;
    ok &= b.dealt[i] == value(0, uint64_t(rank) * kChunkElems + i, round);
  }
  for (uint64_t i = 0; i < kSmallElems; ++i) ok &= b.small[i] == sum_at(w.world, i, round);
  return ok;
}

char* bytes_of(std::vector<float>& v) { return reinterpret_cast<char*>(v.data()); }

template <class Start>
Status rooted_and_exchanged(BufferWorld& w, E& e, Start start) {
  Buffers& b = w.buffers[size_t(e.rank())];
  const uint64_t chunk = kChunkElems * sizeof(float), total = chunk * uint64_t(w.world);
  const Chunks in{bytes_of(b.in), total, chunk, nullptr};
  const Span own = in.get(e.rank());
  start(Collective::kAllToAll);
  RC_RETURN_IF_FAILED(
      exchange_one_shot(e, in, Chunks{bytes_of(b.exchanged), total, chunk, nullptr}, Edges{}));
  start(Collective::kReduce);
  std::vector<Span> to_root(size_t(w.world), Span{bytes_of(b.in), 0});
  to_root.back().bytes = total;
  RC_RETURN_IF_FAILED(reduce_scatter_one_shot(e, Chunks{nullptr, 0, 0, to_root.data()},
                                              bytes_of(b.reduced), w.world - 1));
  start(Collective::kGather);
  std::vector<Span> mine(size_t(w.world), own), dealt(size_t(w.world), {bytes_of(b.dealt), chunk});
  RC_RETURN_IF_FAILED(exchange_one_shot(e, Chunks{nullptr, 0, 0, mine.data()},
                                        Chunks{bytes_of(b.collected), total, chunk, nullptr},
                                        Edges{.only_reader = w.world - 1}));
  start(Collective::kScatter);
  return exchange_one_shot(e, in, Chunks{nullptr, 0, 0, dealt.data()}, Edges{.only_sender = 0});
}

Status collectives(BufferWorld& w, ThreadTeam& team, const View& v, int round) {
  Buffers& b = w.buffers[size_t(v.rank)];
  StorePath path;  // this lane's own; its measurements change no result
  LateOps ops{{&kBaselineKernels, kBaselineKernels.reduce[int(DType::kFloat32)][int(RedOp::kSum)],
               false, &path},
              false};
  uint64_t sequence = uint64_t(round) * 100;
  E e{team, v, ops};
  const auto start = [&](Collective c) {
    const CallId id{++sequence, 0, c, int(DType::kFloat32), 0, -1, Algorithm::kOneShot};
    team.sync();  // the lanes may still compare the previous call's header
    if (team.lane() == 0) *v.mine = CallHeader{id, 0, 0, kNotInHeap, 1.0, kNotInHeap};
    e.begin_streams();
    team.sync();
  };
  const uint64_t chunk = kChunkElems * sizeof(float), total = chunk * uint64_t(w.world);
  const Chunks in{bytes_of(b.in), total, chunk, nullptr};
  const Span own = in.get(v.rank);
  const Chunks balanced{bytes_of(b.in), total, balanced_chunk_bytes(total, w.world), nullptr};

  start(Collective::kReduceScatter);
  RC_RETURN_IF_FAILED(reduce_scatter_one_shot(e, in, bytes_of(b.scattered)));
  start(Collective::kAllReduce);
  RC_RETURN_IF_FAILED(all_reduce_two_shot(e, balanced, bytes_of(b.all_reduced), 0));
  start(Collective::kAllReduce);
  char* heap = reinterpret_cast<char*>(b.heap_in);
  const Chunks in_heap{heap, total, balanced.chunk_bytes, nullptr};
  RC_RETURN_IF_FAILED(all_reduce_two_shot(e, in_heap, heap, 0));
  if (team.lane() == 0 && team.channel() == 0 && team.num_channels() == 1) {
    // The call has returned, so its user may change the buffer, whatever the peers still do.
    std::copy(b.heap_in, b.heap_in + b.heap_reduced.size(), b.heap_reduced.begin());
    std::fill(b.heap_in, b.heap_in + b.heap_reduced.size(), -1.0f);
  }
  start(Collective::kAllGather);
  RC_RETURN_IF_FAILED(
      share_one_shot(e, own, Chunks{bytes_of(b.gathered), total, chunk, nullptr}, -1));
  start(Collective::kReduceScatter);
  RC_RETURN_IF_FAILED(reduce_scatter_ring(e, in, bytes_of(b.ring_scattered)));
  start(Collective::kAllReduce);
  RC_RETURN_IF_FAILED(all_reduce_ring(e, balanced, bytes_of(b.ring_reduced)));
  start(Collective::kAllGather);
  RC_RETURN_IF_FAILED(
      all_gather_ring(e, own, Chunks{bytes_of(b.ring_gathered), total, chunk, nullptr}));
  start(Collective::kAllReduce);
  const uint64_t small = kSmallElems * sizeof(float);
  // The root finishes first, and its next call fills all shared slots without a signal from the
  // others.
  ops.late = v.rank != 0;
  RC_RETURN_IF_FAILED(all_reduce_two_shot(e, Chunks{bytes_of(b.small), small, 64, nullptr},
                                          bytes_of(b.small), small));
  ops.late = false;
  start(Collective::kBroadcast);
  std::vector<Span> spans(size_t(w.world), Span{bytes_of(b.broadcast), chunk});
  RC_RETURN_IF_FAILED(share_one_shot(e, spans[0], Chunks{nullptr, 0, 0, spans.data()}, 0));
  RC_RETURN_IF_FAILED(rooted_and_exchanged(w, e, start));
  if (w.channels == 1) {
    RC_RETURN_IF_FAILED(lend_in_reductions(w, e, start, round));
    RC_RETURN_IF_FAILED(lend_in_moves(w, e, start, round));
  }
  if (in_levels(w)) {
    const ReduceFn sum = ops.reduce_fn;
    const GroupedSum groups{kLevelRanks,   sum,           sum,          sum,
                            sizeof(float), sizeof(float), sizeof(float)};
    LevelOps level_ops{ops};
    level_ops.groups = &groups;
    Endpoint<ThreadTeam, LevelOps> levels{team, v, level_ops};
    start(Collective::kReduceScatter);
    RC_RETURN_IF_FAILED(
        reduce_scatter_two_levels(levels, in, bytes_of(b.level_scattered), kLevelRanks));
  }
  start(Collective::kBarrier);
  const Chunks nothing{nullptr, 0, 0, nullptr};
  return exchange_one_shot(e, nothing, nothing, Edges{});
}

void run_lane(BufferWorld& w, int rank, int channel, int lane, pthread_barrier_t* all) {
  const View v = w.view(rank, channel);
  ThreadTeam team = w.team(rank, channel, lane);
  const bool leader = lane == 0 && channel == 0;
  for (int round = 0; round < w.rounds; ++round) {
    if (leader) fill(w, rank, round);
    pthread_barrier_wait(all);
    const Status status = collectives(w, team, v, round);
    if (status != Status::kOk) give_up(rank, "status", int(status));
    pthread_barrier_wait(all);
    if (leader && !check(w, rank, round)) give_up(rank, "wrong result");
  }
}

}  // namespace

int main(int argc, char** argv) { return run_lanes(argc, argv, run_lane); }
