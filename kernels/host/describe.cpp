// SPDX-License-Identifier: Apache-2.0

// Describes calls in words, for messages to users.
#include "kernels/host/describe.h"

#include <cstring>
#include <iterator>

namespace ringcomm::host {
namespace {

// True for the optimizer's calls: their headers name the results' dtype and the bucket's elements.
bool is_optimizers(Collective collective) {
  return collective == Collective::kReduceScatterNorm ||
         collective == Collective::kAdamWAllGather ||
         collective == Collective::kReduceScatterAdamWAllGather;
}

// The kernels that run a call, as an entry of its description; "" for CUDA kernels that deal tiles.
const char* entry_of(Kernels kernels) {
  switch (kernels) {
    case Kernels::kNative:
      break;
    case Kernels::kTriton:
      return "Triton kernels, ";
    case Kernels::kSliced:
      return "slices as RINGCOMM_KERNELS asks, ";
  }
  return "";
}

}  // namespace

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::kNone:
      return "none";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kReduce:
      return "reduce";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kSend:
      return "send";
    case Collective::kReceive:
      return "recv";
    case Collective::kReduceScatterNorm:
      return "reduce_scatter_norm";
    case Collective::kAdamWAllGather:
      return "adamw_all_gather";
    case Collective::kReduceScatterAdamWAllGather:
      return "reduce_scatter_adamw_all_gather";
    case Collective::kReduceScatterPartial:
      return "reduce_scatter_partial";
    case Collective::kReducePartial:
      return "reduce_partial";
    case Collective::kCount:
      break;
  }
  return "unknown";
}

const char* name_of(DType dtype) {
  static const char* const names[] = {"uint8",
                                      "int8",
                                      "uint16",
                                      "int16",
                                      "uint32",
                                      "int32",
                                      "uint64",
                                      "int64",
                                      "bool",
                                      "float16",
                                      "bfloat16",
                                      "float32",
                                      "float64",
                                      "complex64",
                                      "complex128",
                                      "float8_e4m3fn",
                                      "float8_e4m3fnuz",
                                      "float8_e5m2",
                                      "float8_e5m2fnuz",
                                      "float8_e8m0fnu"};
  static_assert(std::size(names) == size_t(DType::kCount),
                "give each value of DType (core/dtypes.h) torch's name of it here, in that order");
  return int(dtype) >= 0 && dtype < DType::kCount ? names[int(dtype)] : "none";
}

const char* name_of(RedOp op) {
  static const char* const names[] = {"SUM", "AVG",  "PREMUL_SUM", "PRODUCT", "MIN",
                                      "MAX", "BAND", "BOR",        "BXOR"};
  static_assert(std::size(names) == size_t(RedOp::kCount),
                "give each value of RedOp (core/reduce.h) a name here, in that order");
  return int(op) >= 0 && op < RedOp::kCount ? names[int(op)] : "none";
}

const char* name_of(Algorithm algorithm, Collective collective) {
  if (algorithm == Algorithm::kOneShot && collective == Collective::kAllReduce) return "two_shot";
  static const char* const names[] = {"auto", "one_shot", "ring", "ll", "copy_engine", "multicast"};
  static_assert(std::size(names) == size_t(Algorithm::kCount));
  return algorithm < Algorithm::kCount ? names[uint32_t(algorithm)] : "unknown";
}

const char* name_of(Status status) {
  static const char* const names[] = {"ok",      "timeout",     "peer_lost",   "mismatch",
                                      "aborted", "interrupted", "peer_closed", "corrupt",
                                      "refused", "overlap"};
  static_assert(std::size(names) == kStatuses,
                "give each value of Status (core/team.h) a name here, in that order");
  return uint32_t(status) < uint32_t(kStatuses) ? names[uint32_t(status)] : "unknown";
}

std::string reason_of(const ControlPage& page) {
  char text[sizeof(page.reason)];
  std::memcpy(text, page.reason, sizeof(text));
  return std::string(text, strnlen(text, sizeof(text)));
}

Fault trusted(const Fault& record, int owner, int world) {
  Fault fault = record;
  fault.rank = owner;
  if (fault.peer < -1 || fault.peer >= world) fault.peer = -1;
  if (fault.status <= Status::kOk || int(fault.status) >= kStatuses)
    fault.status = Status::kAborted;
  return fault;
}

std::string describe_tag(int32_t tag) {
  const GradTag t = GradTag::of(tag);
  return "bucket " + std::to_string(t.bucket) + " of module " + std::to_string(t.module) +
         " in backward " + std::to_string(t.backward);
}

std::string describe(const CallHeader& h) {
  const CallId& id = h.id;
  if (id.collective == Collective::kNone) return "a Triton kernel of the user's";
  std::string text = name_of(id.collective);
  text += '(';
  if (id.collective == Collective::kSend || id.collective == Collective::kReceive)
    return text + name_of(DType(id.dtype)) + ", " + std::to_string(h.stream_bytes) + " bytes, " +
           entry_of(id.kernels) + "tag " + std::to_string(id.root) + ")";
  if (id.collective != Collective::kBarrier) {
    const bool updates = is_optimizers(id.collective);
    text += name_of(DType(id.dtype));
    const auto [results, tag] = ResultsAndTag::of_root(id.root);
    if (updates) text += std::string(" to ") + name_of(DType(results));
    text += ", ";
    if (id.redop >= 0) text += std::string(name_of(RedOp(id.redop))) + ", ";
    // See DeviceComm::all_gather_from() (kernels/cuda/device_comm.h) on plans.
    const char* const rooted = id.algorithm == Algorithm::kCopyEngine ? "plan " : "root ";
    if (id.root >= 0 && !updates) text += rooted + std::to_string(id.root) + ", ";
    text += id.collective == Collective::kAllToAll
                ? std::to_string(h.stream_bytes) + " bytes for this pair"
                : std::to_string(id.match_bytes) + (updates ? " elements" : " bytes");
    text += std::string(", ") + name_of(id.algorithm, id.collective) + ", ";
    if (updates && tag != 0) text += describe_tag(tag) + ", ";
  }
  return text + entry_of(id.kernels) + "call " + std::to_string(id.sequence) +
         " of this communicator)";
}

}  // namespace ringcomm::host
