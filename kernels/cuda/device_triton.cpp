// SPDX-License-Identifier: Apache-2.0

// Launches a DeviceComm's collectives by kernels that Triton has compiled.
#include <cstring>

#include "kernels/cuda/device_comm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

// The parameters of one rank's launch, in the order of kernels/tl/collectives.py.
struct Values {
  int64_t all[10];  // an all-reduce has 10, the other collectives 9
  size_t count = 0;

  void add(uint64_t value) { all[count++] = int64_t(value); }
  // Adds a number in the form of tagged() in kernels/tl/endpoint.py.
  void add_tagged(uint64_t value) { add((value << 2) + 3); }
  void add_address(const void* address) { add_tagged(reinterpret_cast<uint64_t>(address)); }
};

CallId id_of(const CallArgs& a) {
  return {0, a.match_bytes, a.collective, a.dtype, a.redop, a.root, a.algorithm, Kernels::kTriton};
}

Values values_of(const CallArgs& a) {
  Values v;
  for (const void* each : {static_cast<const void*>(a.table), static_cast<const void*>(a.in),
                           static_cast<const void*>(a.out)})
    v.add_address(each);
  if (a.collective == Collective::kAllReduce) v.add(a.total_bytes);
  v.add(a.chunk_bytes);
  v.add(a.timeout_ns);
  const CallId id = id_of(a);
  uint64_t words[sizeof(id) / 8];
  static_assert(sizeof(words) == sizeof(id));
  std::memcpy(words, &id, sizeof(id));
  for (size_t i = 1; i < std::size(words); ++i) v.add_tagged(words[i]);
  return v;
}

bool are_alike(const CallId& a, const CallId& b) {
  return a.collective == b.collective && a.dtype == b.dtype && a.redop == b.redop &&
         a.root == b.root && a.algorithm == b.algorithm;
}

}  // namespace

void DeviceComm::add_triton(const CallId& call, std::shared_ptr<const TritonKernel> kernel) {
  triton_kernels_.push_back({call, std::move(kernel)});
}

void DeviceComm::submit_triton(CallArgs args) {
  const Values values = values_of(args);
  for (const auto& [call, kernel] : triton_kernels_) {
    if (!are_alike(call, id_of(args)) || !kernel->takes(values.all, values.count)) continue;
    Prepared p{{kernel->function()}, unsigned(config_.layout.channels), args, {}, {}};
    p.triton = kernel.get();
    return submit(std::move(p));
  }
  throw std::invalid_argument("Triton has not compiled the kernel of this call yet");
}

void DeviceComm::launch_triton(void* stream) {
  const Values values = values_of(prepared_.args);
  prepared_.triton->launch(*driver_, prepared_.channels, 1, stream, values.all);
  is_prepared_ = false;
}

void DeviceComm::triton_all_reduce(char* in, char* out, uint64_t elems, const Reduction& r) {
  const uint64_t bytes = elems * uint64_t(size_of(r.dtype));
  CallArgs a = args_of(Collective::kAllReduce, chosen(r.algorithm), r.dtype, bytes, -1);
  a.in = in;
  a.out = out;
  a.total_bytes = bytes;
  a.chunk_bytes = balanced_chunk_bytes(bytes, config_.world);
  a.redop = int32_t(r.op);
  submit_triton(a);
}

void DeviceComm::triton_reduce_scatter(char* in, char* out, uint64_t out_elems,
                                       const Reduction& r) {
  const uint64_t chunk = out_elems * uint64_t(size_of(r.dtype));
  CallArgs a = args_of(Collective::kReduceScatter, chosen(r.algorithm), r.dtype,
                       chunk * uint64_t(config_.world), -1);
  a.in = in;
  a.out = out;
  a.total_bytes = a.match_bytes;
  a.chunk_bytes = chunk;
  a.redop = int32_t(r.op);
  submit_triton(a);
}

void DeviceComm::triton_all_gather(char* in, char* out, uint64_t in_bytes, DType dtype,
                                   Algorithm algorithm) {
  CallArgs a = args_of(Collective::kAllGather, chosen(algorithm), dtype,
                       in_bytes * uint64_t(config_.world), -1);
  a.in = in;
  a.out = out;
  a.total_bytes = a.match_bytes;
  a.chunk_bytes = in_bytes;
  submit_triton(a);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
