// SPDX-License-Identifier: Apache-2.0

// Every collective with zero copy. As soon as a call has returned, its user overwrites the lent
// buffer. If a peer still reads the buffer, that is a race, and gives a wrong element.
#pragma once

#include "ringcomm/collectives/all_gather.h"
#include "ringcomm/collectives/exchange.h"
#include "ringcomm/collectives/reduce_scatter.h"
#include "tests/proof/races/race_buffers.h"

namespace {

// One team is its whole rank, and its first lane is also the user. With several channels, the slice
// of each would be too short for zero copy.
template <class Start>
struct Lender {
  BufferWorld& w;
  E& e;
  Start start;
  int number;  // of the call; selects the buffers' contents

  // wanted(i): the expected element i of the result, for i < elems.
  template <class Call, class Wanted>
  Status lend(Collective c, uint64_t elems, Call call, Wanted wanted) {
    Buffers& b = w.buffers[size_t(e.rank())];
    const uint64_t all = kChunkElems * uint64_t(w.world);
    const bool user = e.team.lane() == 0;
    ++number;
    if (user) {
      b.from_lent.assign(all, 99);
      for (uint64_t i = 0; i < all; ++i) b.heap_in[i] = value(e.rank(), i, number);
    }
    start(c);
    RC_RETURN_IF_FAILED(call(reinterpret_cast<char*>(b.from_lent.data())));
    if (!user) return Status::kOk;
    std::fill(b.heap_in, b.heap_in + all, -1.0f);
    for (uint64_t i = 0; i < elems; ++i)
      if (b.from_lent[i] != wanted(i)) give_up(e.rank(), "wrong from a lent buffer", int(c));
    return Status::kOk;
  }
};

template <class Start>
Status lend_in_reductions(BufferWorld& w, E& e, Start start, int round) {
  Lender<Start> user{w, e, start, round * 100};
  const uint64_t chunk = kChunkElems * sizeof(float), total = chunk * uint64_t(w.world);
  char* const heap = reinterpret_cast<char*>(w.buffers[size_t(e.rank())].heap_in);
  const int last = w.world - 1;
  std::vector<Span> to_root(size_t(w.world), Span{heap, 0});
  to_root.back().bytes = total;

  RC_RETURN_IF_FAILED(user.lend(
      Collective::kReduceScatter, kChunkElems,
      [&](char* out) {
        return reduce_scatter_one_shot(e, Chunks{heap, total, chunk, nullptr}, out);
      },
      [&](uint64_t i) {
        return sum_at(w.world, uint64_t(e.rank()) * kChunkElems + i, user.number);
      }));
  return user.lend(
      Collective::kReduce, e.rank() == last ? kChunkElems * uint64_t(w.world) : 0,
      [&](char* out) {
        return reduce_scatter_one_shot(e, Chunks{nullptr, 0, 0, to_root.data()}, out, last);
      },
      [&](uint64_t i) { return sum_at(w.world, i, user.number); });
}

template <class Start>
Status lend_in_moves(BufferWorld& w, E& e, Start start, int round) {
  Lender<Start> user{w, e, start, round * 100 + 50};
  const uint64_t elems = kChunkElems * uint64_t(w.world), chunk = kChunkElems * sizeof(float),
                 total = elems * sizeof(float), mine = uint64_t(e.rank()) * kChunkElems;
  char* const heap = reinterpret_cast<char*>(w.buffers[size_t(e.rank())].heap_in);
  const Span own{heap + mine * sizeof(float), chunk};
  const Chunks in{heap, total, chunk, nullptr};
  const auto chunks = [&](char* out) { return Chunks{out, total, chunk, nullptr}; };
  std::vector<Span> same(size_t(w.world), own);
  const auto one_chunk = [&](char* out) {
    same.assign(size_t(w.world), Span{out, chunk});
    return Chunks{nullptr, 0, 0, same.data()};
  };
  const int last = w.world - 1;
  const auto from_owner = [&](uint64_t i) { return value(int(i / kChunkElems), i, user.number); };

  RC_RETURN_IF_FAILED(user.lend(
      Collective::kGather, e.rank() == last ? elems : 0,
      [&](char* out) {
        return exchange_one_shot(e, Chunks{nullptr, 0, 0, same.data()}, chunks(out),
                                 Edges{.only_reader = last});
      },
      from_owner));
  RC_RETURN_IF_FAILED(user.lend(
      Collective::kScatter, kChunkElems,
      [&](char* out) { return exchange_one_shot(e, in, one_chunk(out), Edges{.only_sender = 0}); },
      [&](uint64_t i) { return value(0, mine + i, user.number); }));
  RC_RETURN_IF_FAILED(user.lend(
      Collective::kAllToAll, elems,
      [&](char* out) { return exchange_one_shot(e, in, chunks(out), Edges{}); },
      [&](uint64_t i) {
        return value(int(i / kChunkElems), mine + i % kChunkElems, user.number);
      }));
  RC_RETURN_IF_FAILED(user.lend(
      Collective::kAllGather, elems,
      [&](char* out) { return share_one_shot(e, own, chunks(out), -1); }, from_owner));
  return user.lend(
      Collective::kBroadcast, kChunkElems,
      [&](char* out) { return share_one_shot(e, Span{heap, chunk}, one_chunk(out), 0); },
      [&](uint64_t i) { return value(0, i, user.number); });
}

}  // namespace
