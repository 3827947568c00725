// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <string>

#include "ringcomm/core/reduce.h"
#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

const char* name_of(Collective collective);
const char* name_of(DType dtype);
const char* name_of(RedOp op);
// Returns the name of an algorithm in calls of `collective`; kNone: its name in an option that
// applies to several collectives. kOneShot runs each phase of a call in one hop. Its name is
// "two_shot" in an all-reduce, which has two phases, and "one_shot" in other calls.
const char* name_of(Algorithm algorithm, Collective collective);
const char* name_of(Status status);

// Returns the reason in a page, cut at the end of its field: a peer may be writing the field now.
std::string reason_of(const ControlPage& page);

// Returns a copy of a peer's fault record that is safe to use: it belongs to rank `owner`, and its
// peer and status are valid or replaced by defaults, so that no field leads outside a table.
Fault trusted(const Fault& record, int owner, int world);

// Describes a call in the user's terms: name, dtype, operator, root, size and sequence number.
std::string describe(const CallHeader& header);

// Describes a packed GradTag other than 0.
std::string describe_tag(int32_t tag);

}  // namespace ringcomm::host
