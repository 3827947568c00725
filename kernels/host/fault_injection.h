// SPDX-License-Identifier: Apache-2.0

// Fault injection for tests: a process arms a fault; it then ends, stops or sleeps when one of its
// ranks passes a chosen point of the protocol (Point, in ringcomm/core/team.h).
#pragma once

#include <cstdint>

#include "ringcomm/protocol/view.h"

namespace ringcomm::host {

enum class FaultAction { kNone, kKill, kStop, kDelay, kSlow };

struct ArmedFault {
  FaultAction action = FaultAction::kNone;  // kNone: only counts passages
  uint64_t passage = 1;   // the passage that triggers it, from 1 on; kSlow: this and all later ones
  uint64_t sleep_ns = 0;  // how long kDelay and kSlow sleep
  int rank = -1;          // counts only passages of this rank; -1: of all ranks
  uint64_t sequence = 0;  // counts only passages of this collective; 0: of all calls
};

struct Passages {
  uint64_t count[kPoints];
};

// 1 while a fault is armed; while it is 0, pass() reads no other word.
inline uint32_t fault_is_armed = 0;

void arm(const ArmedFault& fault);  // counts from 0 again; replaces the fault armed before
void disarm();
Passages passages();  // since arm()

// `sequence`: the number of the collective; 0: a send or receive.
void pass_armed(Point point, int rank, uint64_t sequence);

inline void pass(Point point, const View& v, Stream stream) {
  if (load_relaxed_sys(&fault_is_armed) == 0) [[likely]]
    return;
  // `v.mine` is the header of a collective, which may run at the same time as a message.
  pass_armed(point, v.rank, stream == Stream::kMessage ? 0 : v.mine->id.sequence);
}

}  // namespace ringcomm::host
