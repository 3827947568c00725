// SPDX-License-Identifier: Apache-2.0

// Binds the optimizer's calls of a DeviceComm and of its DeviceCalls. A call that the host's Comm
// has, too, gets the same name and parameters.
#include <string>
#include <utility>

#include "kernels/bindings/device_calls.h"
#include "kernels/bindings/module.h"
#include "kernels/cuda/device_comm.h"
#include "ringcomm/optimizer/adamw.h"
#include "ringcomm/protocol/header_check.h"

namespace nb = nanobind;
using namespace ringcomm;

namespace ringcomm::host {
namespace {

using device::DeviceComm;

// Checks the parameters' alignment: kernels store vectors, in this rank's and the peers' buckets.
DeviceComm::ShardOf shard_of(const AdamWShard& s, uint64_t address) {
  if (reinterpret_cast<uintptr_t>(s.params) % kResultAlign != 0)
    throw std::invalid_argument("parameters must begin at a multiple of 16 bytes");
  return {address, s.bucket_elems, s.elems, s.param_dtype};
}

// Returns the shard of a fused step. Refuses 8-bit moments: the step's kernels lack registers for
// them.
DeviceComm::ShardOf fused_shard_of(const AdamWShard& s, uint64_t address) {
  if (s.quantized_state)
    throw std::invalid_argument("8-bit moments are updated by adamw_shard, apart from collectives");
  return shard_of(s, address);
}

DeviceComm::GradsOf grads_of(uintptr_t ptr, int dtype, int op, int algorithm, int tag = 0) {
  return {at(ptr), DType(dtype), RedOp(op), Algorithm(algorithm), tag};
}

DeviceComm::NormOf norm_of(uintptr_t words, int kind, uintptr_t out, bool accumulate) {
  return {reinterpret_cast<NormWords*>(words), NormKind(kind), reinterpret_cast<float*>(out),
          accumulate};
}

template <class T>
nb::bytes bytes_of(const T& value) {
  return nb::bytes(reinterpret_cast<const char*>(&value), sizeof(value));
}

constexpr int kSumOp = int(RedOp::kSum);

// Each prepares a call, or makes it if the communicator has no peers.
void prepare_adamw(DeviceComm& d, uint64_t table) { d.prepare_adamw(table); }
void adamw_shard(DeviceComm& d, const AdamWShard& shard, uint64_t address, uintptr_t grad,
                 int dtype) {
  d.adamw_shard(shard_of(shard, address), grads_of(grad, dtype, kSumOp, 0));
}
void grad_norm(DeviceComm& d, uintptr_t grad, int dtype, uint64_t elems, int kind,
               uintptr_t words) {
  d.grad_norm(grads_of(grad, dtype, kSumOp, 0), elems, norm_of(words, kind, 0, false));
}
void reduce_scatter_norm(DeviceComm& d, uintptr_t grads, uint64_t bucket_elems, int dtype, int op,
                         uintptr_t out, bool accumulate, int kind, uintptr_t words, int algorithm,
                         int tag) {
  d.reduce_scatter_norm(grads_of(grads, dtype, op, algorithm, tag), bucket_elems,
                        norm_of(words, kind, out, accumulate));
}
void adamw_all_gather(DeviceComm& d, const AdamWShard& shard, uint64_t address, uintptr_t grad,
                      int dtype, int algorithm) {
  d.adamw_all_gather(fused_shard_of(shard, address), grads_of(grad, dtype, kSumOp, algorithm));
}
void reduce_scatter_adamw_all_gather(DeviceComm& d, const AdamWShard& shard, uint64_t address,
                                     uintptr_t grads, int dtype, int op, int algorithm, int tag) {
  d.reduce_scatter_adamw_all_gather(fused_shard_of(shard, address),
                                    grads_of(grads, dtype, op, algorithm, tag));
}

constexpr const char* kGradNorm = "grad: int, dtype: int, elems: int, kind: int, words: int";
constexpr const char* kReduceScatterNorm =
    "grads: int, bucket_elems: int, dtype: int, op: int, out: int, accumulate: bool, kind: int, "
    "words: int, algorithm: int, tag: int";

constexpr const char* kOnePass =
    "shard: AdamWShard, address: int, grads: int, grad_dtype: int, op: int, algorithm: int, "
    "tag: int";

// Binds a call of the optimizer, which the communicator launches.
template <class... Given>
void bind(nb::class_<DeviceComm>& c, const std::string& name, const std::string& parameters,
          const char* doc, void (*prepare)(DeviceComm&, Given...)) {
  const std::string signature = "def " + name + "(self, " + parameters + ", /) -> int";
  c.def(
      name.c_str(),
      [prepare](DeviceComm& d, Given... given) {
        prepare(d, given...);
        return launched(d);
      },
      nb::sig(signature.c_str()), doc);
}

// Binds a fast call, for arguments that differ from step to step. Other calls have a plan.
template <class... Given>
void bind_fast(nb::class_<DeviceCalls>& c, const std::string& name, const std::string& parameters,
               void (*prepare)(DeviceComm&, Given...)) {
  const std::string signature = "def " + name + "(self, " + parameters + ", /) -> int";
  c.def(
      name.c_str(),
      [prepare](DeviceCalls& calls, Given... given) {
        if (intercepting_keys() != 0 || is_profiled()) return kNotFast;
        return calls.make([&] { prepare(calls.comm(), given...); });
      },
      nb::sig(signature.c_str()));
}

}  // namespace

void bind_device_optimizer(nb::module_& m, nb::class_<DeviceComm>& c,
                           nb::class_<DeviceCalls>& calls) {
  m.def(
      "adamw_shard_bytes", [](const AdamWShard& s) { return bytes_of(s); }, nb::arg("shard"),
      "A shard's description, for a copy in device memory.");
  m.def(
      "adamw_table_bytes",
      [](uintptr_t control, uintptr_t hyper, uintptr_t group, uintptr_t active, uintptr_t step,
         uintptr_t factors, uint64_t params) {
        return bytes_of(AdamWTable{
            reinterpret_cast<AdamWControl*>(control), reinterpret_cast<const AdamWHyper*>(hyper),
            reinterpret_cast<const int64_t*>(group), reinterpret_cast<const double*>(active),
            reinterpret_cast<double*>(step), reinterpret_cast<AdamWFactors*>(factors), params});
      },
      nb::kw_only(), nb::arg("control"), nb::arg("hyper"), nb::arg("group"), nb::arg("active"),
      nb::arg("step"), nb::arg("factors"), nb::arg("params"),
      "Returns the table that `prepare_adamw` takes, for a copy in device memory.");
  bind(c, "prepare_adamw", "table: int",
       "As the host's; `table` is the device's address of `adamw_table_bytes`.", prepare_adamw);
  bind(c, "adamw_shard", "shard: AdamWShard, address: int, grad: int, grad_dtype: int",
       "As the host's; `address` is the device's of `adamw_shard_bytes`.", adamw_shard);
  bind(c, "adamw_all_gather",
       "shard: AdamWShard, address: int, grad: int, grad_dtype: int, algorithm: int",
       "As the host's.", adamw_all_gather);
  bind(c, "grad_norm", kGradNorm, "Adds to the words, which the caller has zeroed.", grad_norm);
  bind(c, "reduce_scatter_norm", kReduceScatterNorm,
       "As the host's, but adds to the words, which the caller has zeroed.", reduce_scatter_norm);
  bind(c, "reduce_scatter_adamw_all_gather", kOnePass, "As the host's.",
       reduce_scatter_adamw_all_gather);
  bind_fast(calls, "grad_norm_fast", kGradNorm, grad_norm);
  bind_fast(calls, "reduce_scatter_norm_fast", kReduceScatterNorm, reduce_scatter_norm);
  bind_fast(calls, "reduce_scatter_adamw_all_gather_fast", kOnePass,
            reduce_scatter_adamw_all_gather);
  calls.def(
      "start_reduce_scatter_norm",
      [](DeviceCalls& calls, nb::object tensors, uintptr_t grads, uint64_t bucket_elems, int dtype,
         int op, uintptr_t out, bool accumulate, int kind, uintptr_t words, int algorithm,
         int tag) -> std::shared_ptr<DeviceEvent> {
        if (intercepting_keys() != 0 || is_profiled()) return nullptr;
        return calls.start(std::move(tensors), [&] {
          reduce_scatter_norm(calls.comm(), grads, bucket_elems, dtype, op, out, accumulate, kind,
                              words, algorithm, tag);
        });
      },
      nb::sig((std::string("def start_reduce_scatter_norm(self, tensors: object, ") +
               kReduceScatterNorm + ", /) -> DeviceEvent | None")
                  .c_str()),
      "As `start_all_reduce`; `tensors` are kept.");
}

}  // namespace ringcomm::host
