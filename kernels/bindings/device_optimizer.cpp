// The optimizer's calls of a DeviceComm, with the names and parameters of the host's Comm where
// they have one.
#include "kernels/bindings/module.h"
#include "kernels/cuda/device_comm.h"
#include "ringcomm/optimizer/adamw.h"
#include "ringcomm/protocol/header_check.h"

namespace nb = nanobind;
using namespace ringcomm;

namespace ringcomm::host {
namespace {

using device::DeviceComm;

// The kernels store parameters by vectors, here and in the peers' buckets.
DeviceComm::ShardOf shard_of(const AdamWShard& s, uint64_t address) {
  if (reinterpret_cast<uintptr_t>(s.params) % kResultAlign != 0)
    throw nb::value_error("parameters must begin at a multiple of 16 bytes");
  return {address, s.bucket_elems, s.elems, s.param_dtype};
}

// Of a fused step, which has no registers for 8-bit moments.
DeviceComm::ShardOf fused_shard_of(const AdamWShard& s, uint64_t address) {
  if (s.quantized_state)
    throw nb::value_error("8-bit moments are updated by adamw_shard, apart from collectives");
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

}  // namespace

void bind_device_optimizer(nb::module_& m, nb::class_<DeviceComm>& c) {
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
  c.def(
       "prepare_adamw",
       [](DeviceComm& d, uint64_t table) {
         d.prepare_adamw(table);
         return 0;
       },
       nb::sig("def prepare_adamw(self, table: int, /) -> int"),
       "As the host's; `table` is the device's address of `adamw_table_bytes`.")
      .def(
          "adamw_shard",
          [](DeviceComm& d, const AdamWShard& shard, uint64_t address, uintptr_t grad, int dtype) {
            d.adamw_shard(shard_of(shard, address), grads_of(grad, dtype, kSumOp, 0));
            return 0;
          },
          nb::sig("def adamw_shard(self, shard: AdamWShard, address: int, grad: int, "
                  "grad_dtype: int, /) -> int"),
          "As the host's; `address` is the device's of `adamw_shard_bytes`.")
      .def(
          "grad_norm",
          [](DeviceComm& d, uintptr_t grad, int dtype, uint64_t elems, int kind, uintptr_t words) {
            d.grad_norm(grads_of(grad, dtype, kSumOp, 0), elems, norm_of(words, kind, 0, false));
            return 0;
          },
          nb::sig("def grad_norm(self, grad: int, dtype: int, elems: int, kind: int, "
                  "words: int, /) -> int"),
          "Adds to the words, which the caller has zeroed.")
      .def(
          "reduce_scatter_norm",
          [](DeviceComm& d, uintptr_t grads, uint64_t bucket_elems, int dtype, int op,
             uintptr_t out, bool accumulate, int kind, uintptr_t words, int algorithm, int tag) {
            d.reduce_scatter_norm(grads_of(grads, dtype, op, algorithm, tag), bucket_elems,
                                  norm_of(words, kind, out, accumulate));
            return launched(d);
          },
          nb::sig("def reduce_scatter_norm(self, grads: int, bucket_elems: int, dtype: int, "
                  "op: int, out: int, accumulate: bool, kind: int, words: int, algorithm: int, "
                  "tag: int, /) -> int"),
          "As the host's, but adds to the words, which the caller has zeroed.")
      .def(
          "adamw_all_gather",
          [](DeviceComm& d, const AdamWShard& shard, uint64_t address, uintptr_t grad, int dtype,
             int algorithm) {
            d.adamw_all_gather(fused_shard_of(shard, address),
                               grads_of(grad, dtype, kSumOp, algorithm));
            return launched(d);
          },
          nb::sig("def adamw_all_gather(self, shard: AdamWShard, address: int, grad: int, "
                  "grad_dtype: int, algorithm: int, /) -> int"))
      .def(
          "reduce_scatter_adamw_all_gather",
          [](DeviceComm& d, const AdamWShard& shard, uint64_t address, uintptr_t grads, int dtype,
             int op, int algorithm, int tag) {
            d.reduce_scatter_adamw_all_gather(fused_shard_of(shard, address),
                                              grads_of(grads, dtype, op, algorithm, tag));
            return launched(d);
          },
          nb::sig("def reduce_scatter_adamw_all_gather(self, shard: AdamWShard, address: int, "
                  "grads: int, grad_dtype: int, op: int, algorithm: int, tag: int, /) -> int"));
}

}  // namespace ringcomm::host
