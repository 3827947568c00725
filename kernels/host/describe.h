#pragma once

#include <string>

#include "ringcomm/core/reduce.h"
#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

const char* name_of(Collective collective);
const char* name_of(DType dtype);
const char* name_of(RedOp op);
// The name that calls of a collective have for an algorithm. kOneShot makes each phase of a call in
// one hop: an all-reduce has two phases, so there it is "two_shot", elsewhere "one_shot". kNone: of
// an option that holds for several collectives.
const char* name_of(Algorithm algorithm, Collective collective);
const char* name_of(Status status);

// The reason in a page that a peer may be writing now: at most as much text as fits.
std::string reason_of(const ControlPage& page);

// A peer's fault record with nothing in it that leads outside of a table: it is of the rank in
// whose region it lies, about a rank of the world or nobody.
Fault trusted(const Fault& record, int owner, int world);

// A call as its user would name it, with dtype, operator, root, size and sequence number.
std::string describe(const CallHeader& header);

// A packed GradTag that is not 0.
std::string describe_tag(int32_t tag);

}  // namespace ringcomm::host
