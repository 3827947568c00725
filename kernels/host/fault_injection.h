// Fault injection for tests: a process arms a fault, and dies, stops or is late when one of its
// ranks passes a chosen point of the protocol (Point, in ringcomm/core/team.h).
#pragma once

#include <cstdint>

#include "ringcomm/protocol/view.h"

namespace ringcomm::host {

enum class FaultAction { kNone, kKill, kStop, kDelay, kSlow };

struct ArmedFault {
  FaultAction action = FaultAction::kNone;  // kNone: passages are only counted
  uint64_t passage = 1;   // where it happens, counted from 1; kSlow: there and from there on
  uint64_t sleep_ns = 0;  // kDelay and kSlow
  int rank = -1;          // only passages of this rank count; -1: of all
  uint64_t sequence = 0;  // only passages of the collective with this number count; 0: of all calls
};

struct Passages {
  uint64_t count[kPoints];
};

// 1 while a fault is armed. The one word that a passage looks at when none is.
inline uint32_t fault_is_armed = 0;

void arm(const ArmedFault& fault);  // counts from 0 again; the fault before it is forgotten
void disarm();
Passages passages();  // since arm()

// `sequence` is that of the collective; 0: send or receive.
void pass_armed(Point point, int rank, uint64_t sequence);

inline void pass(Point point, const View& v, Stream stream) {
  if (load_relaxed_sys(&fault_is_armed) == 0) [[likely]]
    return;
  // The header in the view is that of a collective, which may run beside a message.
  pass_armed(point, v.rank, stream == Stream::kMessage ? 0 : v.mine->id.sequence);
}

}  // namespace ringcomm::host
