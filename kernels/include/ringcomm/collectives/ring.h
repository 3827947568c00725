// SPDX-License-Identifier: Apache-2.0

// The parts that ring collectives share: the neighbours, the slots, and the end of a round.
#pragma once

#include "ringcomm/protocol/endpoint.h"

RINGCOMM_NAMESPACE_BEGIN

// The two neighbours of a rank in the ring of its channel.
struct Neighbours {
  int next, prev;
};

RC_TEAM_FN Neighbours neighbours(const View& v) {
  const int position = v.position_in_ring();
  return {v.ring_rank(ring_next(position, v.world)), v.ring_rank(ring_prev(position, v.world))};
}

// Returns the number of pieces of the longest part of any chunk, so that all ranks count the same
// rounds. A shorter chunk may have a longer part, by one line.
template <class E>
RC_TEAM_FN uint32_t rounds_of(const E& e, const Chunks& chunks) {
  uint64_t most = e.part(chunks.get(0)).bytes;
  RC_ROLLED
  for (int r = 1; r < e.world() && e.team.num_channels() > 1; ++r) {
    const uint64_t bytes = e.part(chunks.get(r)).bytes;
    most = bytes > most ? bytes : most;
  }
  return e.pieces(most);
}

// Waits until the slot for item `item` to the successor is free. Writes the first item's header.
// model: ring_slot (tests/proof/model/ring.pml)
template <class E>
RC_TEAM_FN Status ring_slot(E& e, int next, uint32_t item, uint64_t stream_bytes, char** data) {
  RC_RETURN_IF_FAILED(e.await_slot(next, item));
  if (item == 0 && e.team.lane() == 0)
    e.write_header(e.pairs, next, Span{nullptr, stream_bytes}, false, e.segment_bytes());
  *data = e.my_slot(e.pairs, next, item);
  return Status::kOk;
}

// Lane 0: commits the epochs of the ring's streams, which this call no longer uses.
// model: commit_ring (tests/proof/model/ring.pml)
template <class E>
RC_TEAM_FN void commit_ring(E& e, const Neighbours& at, uint32_t items) {
  if (e.team.lane() == 0) {
    e.commit_seen(e.pairs, at.prev);
    e.commit_sent(e.pairs, at.next, items);
  }
  e.team.sync();
}

RINGCOMM_NAMESPACE_END
