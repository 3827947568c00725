// SPDX-License-Identifier: Apache-2.0

// The optimizer's collectives of a communicator, and its kernels that need no communicator.
#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "kernels/host/comm.h"
#include "kernels/host/optimizer.h"
#include "kernels/host/worker_pool.h"
#include "ringcomm/optimizer/adamw_prepare.h"
#include "ringcomm/optimizer/fused_steps.h"

namespace ringcomm::host {
namespace {

GradKind kind_of(const GradCall& grads, int world, int sum_group_size) {
  return {grads.dtype, grads.op == RedOp::kAvg ? world : 0, sum_group_size};
}

// Returns the loop that makes the ring's partial sums; the last hop divides them for a mean.
ReduceFn partial_sum(const GradCall& grads) {
  return kernels().reduce[int(grads.dtype)][int(RedOp::kSum)];
}

CallId id_of(Collective collective, const GradCall& grads, uint64_t elems, DType results) {
  const int32_t root = ResultsAndTag{int(results), grads.tag}.as_root();
  return {0, elems, collective, int(grads.dtype), int(grads.op), root, grads.algorithm};
}

bool is_ring(const GradCall& grads) { return grads.algorithm == Algorithm::kRing; }

// Throws unless the bytes are in the heap: peers find them there by their offset.
void check_in_heap(const View& v, const char* what, const char* ptr, uint64_t bytes) {
  if (v.world == 1 || bytes == 0 || v.in_my_heap(ptr, bytes)) return;
  throw std::invalid_argument(std::string(what) +
                              " must lie in the heap (ringcomm.empty), where peers can reach them");
}

// Throws unless peers can store the results by vectors, which must be aligned.
void check_results(const View& v, const char* ptr, uint64_t bytes) {
  check_in_heap(v, "parameters", ptr, bytes);
  if (v.world > 1 && bytes > 0 && reinterpret_cast<uintptr_t>(ptr) % kResultAlign != 0)
    throw std::invalid_argument("parameters must begin at a multiple of " +
                                std::to_string(kResultAlign) + " bytes");
}

// Throws if a segment would end inside a tile: a norm is summed by whole tiles.
void check_segments(const View& v, const GradCall& grads) {
  constexpr uint64_t least = kTileElems * sizeof(float);
  if (is_ring(grads) && v.world > 1 && v.layout.segment_bytes < least)
    throw std::invalid_argument("the ring forms need segments of " + std::to_string(least) +
                                " bytes or more (CommOptions.segment_bytes)");
}

}  // namespace

// The bytes that an update moves per element: it reads a 4-byte gradient, and reads and stores
// three 4-byte numbers.
constexpr uint64_t kUpdateBytes = 28;

void prepare_adamw(const AdamWTable& table) {
  ringcomm::prepare_adamw(table, 0, 1);
  advance_control(*table.control);
}

void adamw_shard(const AdamWShard& shard, const GradCall& grad) {
  const void* ptr = grad.ptr;
  const bool streaming = shard.elems * uint64_t(size_of(shard.param_dtype)) >= kStreamingMinBytes;
  run_in_parts(shard.elems, kTileElems, shard.elems * kUpdateBytes, threads_without_communicator(),
               [&](uint64_t begin, uint64_t end) {
                 kernels().adamw(AdamWJob{
                     &shard, {&ptr, 1, grad.dtype, 0, 0}, nullptr, 0, begin, end, streaming});
               });
}

void grad_norm(const GradCall& grad, uint64_t elems, NormKind kind, NormWords* words) {
  const void* ptr = grad.ptr;
  *words = NormWords{};
  std::mutex mutex;
  run_in_parts(elems, kTileElems, elems * uint64_t(size_of(grad.dtype)),
               threads_without_communicator(), [&](uint64_t begin, uint64_t end) {
                 NormWords part{};
                 kernels().reduce_norm(NormJob{
                     {&ptr, 1, grad.dtype, 0, 0}, nullptr, false, kind, &part, begin, end, false});
                 const std::lock_guard lock(mutex);
                 merge_norms(*words, part, kind);  // in any order: see grad_norm.h
               });
}

Status Comm::reduce_scatter_norm(const GradCall& grads, uint64_t bucket_elems,
                                 const NormCall& norm) {
  const int size = size_of(grads.dtype);
  const Bucket bucket = Bucket::of(grads.ptr, nullptr, bucket_elems, size, 0, view_.world);
  check_segments(view_, grads);
  check_order(grads.algorithm);
  if (!is_ring(grads)) check_in_heap(view_, "gradients", grads.ptr, bucket_elems * uint64_t(size));
  const bool streaming =
      std::max(norm.step_bytes, bucket_elems * uint64_t(size)) >= kStreamingMinBytes;
  for (Channel& each : channels_) each.norm = NormWords{};
  const NormFinish finish{
      &kernels(), kind_of(grads, view_.world, sum_group_size_),         norm.out, norm.accumulate,
      norm.kind,  norm.words == nullptr ? nullptr : &channels_[0].norm, streaming};
  const OptimizerOps<NormFinish> ops{ops_for(partial_sum(grads), 0), finish, bucket,
                                     bucket.grads().get(view_.rank).ptr};
  const CallId id = id_of(Collective::kReduceScatterNorm, grads, bucket_elems, DType::kFloat32);
  const uint64_t bytes = bucket_elems * uint64_t(size);
  const Status status = run_with(id, bytes, 1.0, ops, [&](auto& e) {
    return is_ring(grads) ? reduce_scatter_norm_ring(e, bucket)
                          : reduce_scatter_norm_one_shot(e, bucket);
  });
  if (norm.words == nullptr) return status;
  *norm.words = NormWords{};
  for (const Channel& each : channels_) merge_norms(*norm.words, each.norm, norm.kind);
  return status;
}

template <class Body>
Status Comm::run_update(CallId id, const AdamWShard& shard, const GradCall& grads,
                        uint64_t step_bytes, Body body) {
  const int size = size_of(shard.param_dtype);
  const Bucket bucket = Bucket::of(grads.ptr, shard.params, shard.bucket_elems,
                                   size_of(grads.dtype), size, view_.world);
  check_segments(view_, grads);
  if (!is_ring(grads)) {
    check_results(view_, shard.params, shard.bucket_elems * uint64_t(size));
    if (id.collective == Collective::kReduceScatterAdamWAllGather)
      check_in_heap(view_, "gradients", grads.ptr, bucket.grads().total_bytes);
  }
  // The one-shot forms store into the peers' buckets, whose cache lines other cores have read; the
  // ring's results stay in this rank's own bucket.
  const bool streaming =
      std::max(step_bytes, shard.bucket_elems * uint64_t(size)) >= kStreamingMinBytes;
  const UpdateFinish finish{&kernels(),
                            &shard,
                            kind_of(grads, view_.world, sum_group_size_),
                            is_ring(grads) ? nullptr : view_.results,
                            is_ring(grads) ? 0 : view_.world,
                            streaming};
  const OptimizerOps<UpdateFinish> ops{ops_for(partial_sum(grads), bucket.elems * uint64_t(size)),
                                       finish, bucket, bucket.grads().get(view_.rank).ptr};
  const Status status = run_with(id, shard.bucket_elems * uint64_t(size), 1.0, ops,
                                 [&](auto& e) { return body(e, bucket); });
  if (status != Status::kOk && !is_ring(grads)) held_.push_back(heap_->hold(shard.params));
  return status;
}

Status Comm::adamw_all_gather(const AdamWShard& shard, const GradCall& grad, uint64_t step_bytes) {
  const CallId id = id_of(Collective::kAdamWAllGather, grad, shard.bucket_elems, shard.param_dtype);
  return run_update(id, shard, grad, step_bytes, [&](auto& e, const Bucket& bucket) {
    return is_ring(grad) ? adamw_all_gather_ring(e, bucket, grad.ptr)
                         : adamw_all_gather_one_shot(e, bucket, grad.ptr);
  });
}

Status Comm::reduce_scatter_adamw_all_gather(const AdamWShard& shard, const GradCall& grads,
                                             uint64_t step_bytes) {
  check_order(grads.algorithm);
  const CallId id =
      id_of(Collective::kReduceScatterAdamWAllGather, grads, shard.bucket_elems, shard.param_dtype);
  return run_update(id, shard, grads, step_bytes, [&](auto& e, const Bucket& bucket) {
    return is_ring(grads) ? reduce_scatter_adamw_all_gather_ring(e, bucket)
                          : reduce_scatter_adamw_all_gather_one_shot(e, bucket);
  });
}

}  // namespace ringcomm::host
