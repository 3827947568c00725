// SPDX-License-Identifier: Apache-2.0

// Launches the optimizer's kernels.
#include <algorithm>

#include "kernels/cuda/device_comm.h"
#include "ringcomm/optimizer/buckets.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

// For kernels that do not wait for peers: at most 1,056 blocks (two for each of 132
// multiprocessors, times four), so that multiprocessors finish at similar times; and enough
// elements per block that each block has several turns of work. Chosen without measurements.
constexpr uint64_t kElemsPerBlock = 8192, kMostBlocks = 1056;

std::string unit_of(DType grads) { return std::string("adamw_") + name_of_float(grads); }

}  // namespace

void DeviceComm::launch_alone(const Kernel& kernel, uint64_t elems, const CallArgs& args) {
  const uint64_t blocks =
      std::clamp<uint64_t>((elems + kElemsPerBlock - 1) / kElemsPerBlock, 1, kMostBlocks);
  if (only_prepares_) {
    Prepared p{kernel, unsigned(blocks), args, {}, {}};
    p.alone = true;
    return submit(std::move(p));
  }
  LaunchParams params{};
  params.calls[0] = args;
  driver_->launch(kernel.function, unsigned(blocks), 1, kernel.threads, stream_, &params,
                  sizeof params);
}

void DeviceComm::prepare_adamw(uint64_t table) {
  CallArgs args{};
  args.update = reinterpret_cast<const void*>(table);
  launch_alone(kernel("adamw_float32", "rc_adamw_prepare"), 0, args);
}

void DeviceComm::adamw_shard(const ShardOf& shard, const GradsOf& grad) {
  CallArgs args{};
  args.update = reinterpret_cast<const void*>(shard.address);
  args.in = grad.ptr;
  const std::string name = std::string("rc_adamw_shard_") + name_of_float(shard.param_dtype);
  launch_alone(kernel(unit_of(grad.dtype), name), shard.elems, args);
}

void DeviceComm::grad_norm(const GradsOf& grad, uint64_t elems, const NormOf& norm) {
  CallArgs args{};
  args.in = grad.ptr;
  args.total_bytes = elems * uint64_t(size_of(grad.dtype));
  args.words = norm.words;
  args.norm = int32_t(norm.kind);
  launch_alone(kernel(unit_of(grad.dtype), "rc_grad_norm"), elems, args);
}

Prepared DeviceComm::optimizer_call(Collective collective, const OptimizerKernels& names,
                                    const GradsOf& grads, uint64_t bucket_elems, DType results) {
  const int size = size_of(grads.dtype);
  const Bucket bucket = Bucket::of(grads.ptr, nullptr, bucket_elems, size, 0, config_.world);
  const uint64_t chunk_bytes = bucket.chunk_elems * uint64_t(size);
  const Algorithm algorithm = chosen(grads.algorithm);
  if (algorithm != Algorithm::kOneShot && algorithm != Algorithm::kRing)
    throw std::invalid_argument("algorithm: the optimizer's collectives are one-shot or ring");
  const uint64_t least = kTileElems * sizeof(float);
  if (algorithm == Algorithm::kRing && config_.layout.segment_bytes < least)
    throw std::invalid_argument(
        "the ring forms of the optimizer's collectives need segment_bytes of " +
        std::to_string(least) + " or more");
  const std::string& name = algorithm == Algorithm::kRing ? names.ring : names.one_shot;
  Prepared p{kernel(unit_of(grads.dtype), name),
             channels_for(chunk_bytes),
             args_of(collective, algorithm, grads.dtype, bucket_elems,
                     ResultsAndTag{int(results), grads.tag}.as_root()),
             {},
             {}};
  p.args.in = grads.ptr;
  p.args.redop = int32_t(grads.op);
  p.args.total_bytes = bucket_elems * uint64_t(size);
  check_pieces(chunk_bytes, p.channels);
  return p;
}

void DeviceComm::reduce_scatter_norm(const GradsOf& grads, uint64_t bucket_elems,
                                     const NormOf& norm) {
  Prepared p =
      optimizer_call(Collective::kReduceScatterNorm, {"rc_reduce_scatter_norm", "rc_ring_norm"},
                     grads, bucket_elems, DType::kFloat32);
  p.args.out = reinterpret_cast<char*>(norm.out);
  p.args.words = norm.words;
  p.args.norm = int32_t(norm.kind);
  p.args.accumulate = norm.accumulate;
  submit(std::move(p));
}

void DeviceComm::adamw_step(Collective collective, const ShardOf& shard, const GradsOf& grads) {
  // Loading the gradients of more than two ranks takes more registers.
  const bool many = collective == Collective::kReduceScatterAdamWAllGather && config_.world > 2;
  const std::string type = name_of_float(shard.param_dtype);
  const OptimizerKernels names{(many ? "rc_adamw_many_" : "rc_adamw_step_") + type,
                               "rc_adamw_ring_" + type};
  Prepared p = optimizer_call(collective, names, grads, shard.bucket_elems, shard.param_dtype);
  p.args.update = reinterpret_cast<const void*>(shard.address);
  submit(std::move(p));
}

void DeviceComm::adamw_all_gather(const ShardOf& shard, const GradsOf& grad) {
  adamw_step(Collective::kAdamWAllGather, shard, grad);
}

void DeviceComm::reduce_scatter_adamw_all_gather(const ShardOf& shard, const GradsOf& grads) {
  adamw_step(Collective::kReduceScatterAdamWAllGather, shard, grads);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
