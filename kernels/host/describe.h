#pragma once

#include <string>

#include "ringcomm/call.h"
#include "ringcomm/reduce.h"

namespace ringcomm::host {

const char* name_of(Collective collective);
const char* name_of(DType dtype);
const char* name_of(RedOp op);
const char* name_of(Algorithm algorithm);

// A call as its user would name it, with dtype, operator, root, size and sequence number.
std::string describe(const CallHeader& header);

}  // namespace ringcomm::host
