// SPDX-License-Identifier: Apache-2.0

// Binds the optimizer's kernels for Python.
#include "kernels/host/optimizer.h"

#include <sys/mman.h>

#include "kernels/bindings/gil.h"
#include "kernels/bindings/native_comm.h"
#include "ringcomm/optimizer/buckets.h"
#include "ringcomm/optimizer/quantized_moments.h"

namespace nb = nanobind;
using namespace ringcomm;

namespace ringcomm::host {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

GradCall grad_call(uintptr_t ptr, int dtype, int op, int algorithm, int tag = 0) {
  return {at(ptr), DType(dtype), RedOp(op), chosen(Algorithm(algorithm)), tag};
}

void bind_shard(nb::module_& m) {
  nb::class_<AdamWShard>(
      m, "AdamWShard",
      "One rank's shard of a bucket; addresses, 0: null (ringcomm/optimizer/adamw.h).")
      .def(
          "__init__",
          [](AdamWShard* self, uintptr_t segments, uint64_t segment_count, uintptr_t factors,
             uint64_t bucket_elems, uint64_t begin, uint64_t elems, uintptr_t master,
             uintptr_t remainder, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t max_exp_avg_sq,
             uintptr_t params, int param_dtype, bool stochastic, uint64_t seed, uint64_t bucket,
             bool quantized_state) {
            new (self) AdamWShard{pointer<const AdamWSegment>(segments),
                                  pointer<const AdamWFactors>(factors),
                                  segment_count,
                                  bucket_elems,
                                  begin,
                                  elems,
                                  pointer<float>(master),
                                  pointer<uint16_t>(remainder),
                                  pointer<float>(exp_avg),
                                  pointer<float>(exp_avg_sq),
                                  pointer<float>(max_exp_avg_sq),
                                  at(params),
                                  DType(param_dtype),
                                  stochastic ? Rounding::kStochastic : Rounding::kNearest,
                                  seed,
                                  bucket,
                                  quantized_state};
          },
          nb::kw_only(), nb::arg("segments"), nb::arg("segment_count"), nb::arg("factors"),
          nb::arg("bucket_elems"), nb::arg("begin"), nb::arg("elems"), nb::arg("master"),
          nb::arg("remainder"), nb::arg("exp_avg"), nb::arg("exp_avg_sq"),
          nb::arg("max_exp_avg_sq"), nb::arg("params"), nb::arg("param_dtype"),
          nb::arg("stochastic"), nb::arg("seed"), nb::arg("bucket"),
          nb::arg("quantized_state") = false);
}

// Requests huge pages for the whole pages in a range; the system may use small pages instead.
void advise_huge_pages(uintptr_t begin, uint64_t bytes) {
  constexpr uintptr_t page = 4096;
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + bytes) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void bind_local(nb::module_& m) {
  m.def("advise_huge_pages", &advise_huge_pages, nb::arg("ptr"), nb::arg("size_bytes"),
        "Asks for huge pages under memory that is not touched yet; a hint.");
  m.def(
      "chunk_elems",
      [](uint64_t bucket_elems, int world) {
        return Bucket::of(nullptr, nullptr, bucket_elems, 0, 0, world).chunk_elems;
      },
      nb::arg("bucket_elems"), nb::arg("world"),
      "Elements of a rank's chunk; the last chunks may be shorter, or empty.");
  m.def(
      "prepare_adamw",
      [](uintptr_t control, uintptr_t hyper, uintptr_t group, uintptr_t active, uintptr_t step,
         uintptr_t factors, uint64_t params) {
        prepare_adamw(AdamWTable{pointer<AdamWControl>(control), pointer<const AdamWHyper>(hyper),
                                 pointer<const int64_t>(group), pointer<const double>(active),
                                 pointer<double>(step), pointer<AdamWFactors>(factors), params});
      },
      nb::kw_only(), nb::arg("control"), nb::arg("hyper"), nb::arg("group"), nb::arg("active"),
      nb::arg("step"), nb::arg("factors"), nb::arg("params"),
      "Begins a step: advances the step numbers, or counts a skipped step, and fills the factors.");
  m.def(
      "adamw_shard",
      [](const AdamWShard& shard, uintptr_t grad, int grad_dtype) {
        const WithoutGil nogil;
        adamw_shard(shard, grad_call(grad, grad_dtype, int(RedOp::kSum), 0));
      },
      nb::arg("shard"), nb::arg("grad"), nb::arg("grad_dtype"),
      "Updates a shard from its chunk's gradient.");
  m.def(
      "grad_norm",
      [](uintptr_t grad, int dtype, uint64_t elems, int kind, uintptr_t words) {
        const WithoutGil nogil;
        grad_norm(grad_call(grad, dtype, int(RedOp::kSum), 0), elems, NormKind(kind),
                  pointer<NormWords>(words));
      },
      nb::arg("grad"), nb::arg("dtype"), nb::arg("elems"), nb::arg("kind"), nb::arg("words"),
      "Overwrites the words with the norm of a chunk's gradient.");
}

}  // namespace

void bind_optimizer(nb::module_& m, nb::class_<NativeComm>& c) {
  nb::dict flags, kinds;
  flags["active"] = kAdamActive;
  flags["l2"] = kAdamL2;
  flags["amsgrad"] = kAdamAmsgrad;
  flags["maximize"] = kAdamMaximize;
  flags["sgd"] = kSgd;
  flags["momentum"] = kMomentum;
  flags["nesterov"] = kNesterov;
  flags["lion"] = kLion;
  flags["quantized_state"] = kQuantizedState;
  kinds["l2"] = int(NormKind::kTwo);
  kinds["l1"] = int(NormKind::kOne);
  kinds["inf"] = int(NormKind::kInf);
  add_constant(m, "ADAMW_TILE_ELEMS", kTileElems,
               "Chunks of a bucket begin at multiples of this many elements.");
  add_constant(m, "ADAMW_FLAGS", flags,
               "Bits of a group's flags: l2, amsgrad, maximize; and of a parameter's: active.");
  add_constant(m, "MOMENT_BLOCK_ELEMS", kMomentBlock,
               "Elements that share an exponent of 8-bit moments (optimizer/quantized_moments.h).");
  add_constant(m, "GRAD_NORM_WORDS", kNormWords,
               "int64 words of a norm that is added up exactly (ringcomm/optimizer/grad_norm.h).");
  add_constant(m, "GRAD_NORM_KINDS", kinds, "Code of each norm: l2, l1, inf.");
  bind_shard(m);
  bind_local(m);
  c.def(
       "reduce_scatter_norm",
       [](NativeComm& n, uintptr_t grads, uint64_t bucket_elems, int dtype, int op, uintptr_t out,
          bool accumulate, int kind, uintptr_t words, int algorithm, uint64_t step_bytes, int tag) {
         const NormCall norm{pointer<float>(out), accumulate, NormKind(kind),
                             pointer<NormWords>(words), step_bytes};
         return recorded(n, [&] {
           return n.comm.reduce_scatter_norm(grad_call(grads, dtype, op, algorithm, tag),
                                             bucket_elems, norm);
         });
       },
       nb::sig("def reduce_scatter_norm(self, grads: int, bucket_elems: int, dtype: int, "
               "op: int, out: int, accumulate: bool, kind: int, words: int, algorithm: int, "
               "step_bytes: int, tag: int, /) -> int"),
       "Reduces a bucket in the heap into this rank's FP32 chunk, with the norm of its chunk.\n\n"
       "``words`` 0: without. ``step_bytes``: gradients that the whole step reduces, or 0.\n"
       "``tag``: see `grad_tag`; equal on all ranks; 0: none.")
      .def(
          "adamw_all_gather",
          [](NativeComm& n, const AdamWShard& shard, uintptr_t grad, int grad_dtype, int algorithm,
             uint64_t step_bytes) {
            return recorded(n, [&] {
              return n.comm.adamw_all_gather(
                  shard, grad_call(grad, grad_dtype, int(RedOp::kSum), algorithm), step_bytes);
            });
          },
          nb::sig("def adamw_all_gather(self, shard: AdamWShard, grad: int, grad_dtype: int, "
                  "algorithm: int, step_bytes: int, /) -> int"),
          "Updates the shards; every rank's bucket in the heap ends with all new parameters.\n\n"
          "``step_bytes``: parameters that the whole step updates, or 0.")
      .def(
          "reduce_scatter_adamw_all_gather",
          [](NativeComm& n, const AdamWShard& shard, uintptr_t grads, int grad_dtype, int op,
             int algorithm, uint64_t step_bytes, int tag) {
            return recorded(n, [&] {
              return n.comm.reduce_scatter_adamw_all_gather(
                  shard, grad_call(grads, grad_dtype, op, algorithm, tag), step_bytes);
            });
          },
          nb::sig("def reduce_scatter_adamw_all_gather(self, shard: AdamWShard, grads: int, "
                  "grad_dtype: int, op: int, algorithm: int, step_bytes: int, tag: int, "
                  "/) -> int"),
          "`reduce_scatter_norm` and `adamw_all_gather` in one pass, without a norm.");
}

}  // namespace ringcomm::host
