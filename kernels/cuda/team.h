// SPDX-License-Identifier: Apache-2.0

// A CUDA block as a Team: its threads are the lanes.
#pragma once

#include "kernels/cuda/loops.h"
#include "kernels/cuda/ptx.h"
#include "kernels/cuda/workspace.h"
#include "ringcomm/protocol/signal.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// A poll of a local word takes about 0.7 us, so a block reads the clock about every 50 us.
constexpr uint32_t kPollsPerLook = 64;

// threads: per block.
template <int threads>
struct BlockTeam {
  static constexpr bool kSleeps = false;
  static constexpr bool kReadsProcesses = false;
  static constexpr bool kShareWaits = true;
  static constexpr bool kReadsWhole = true;
  static constexpr bool kDealsTiles = kLoopsDealTiles;

  Workspace* w;

  __device__ __forceinline__ int lane() const { return int(threadIdx.x); }
  __device__ __forceinline__ int num_lanes() const { return threads; }
  __device__ __forceinline__ int channel() const { return int(blockIdx.x); }
  __device__ __forceinline__ int num_channels() const { return int(gridDim.x); }
  __device__ __forceinline__ const Portion& portion() const { return w->portion; }
  __device__ __forceinline__ const Deal& deal() const { return w->deal; }
  __device__ __forceinline__ Gaps* gaps() const { return w->gaps; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }

  __device__ __forceinline__ Status share(Status status) const {
    if (__syncthreads_or(int(status)) == 0) return Status::kOk;
    // Atomic, since several lanes may fail: all lanes return the greatest status.
    if (status != Status::kOk) {
      assume_shared(&w->failure);
      atomicMax(&w->failure, int(status));
    }
    __syncthreads();
    return Status(w->failure);
  }

  __device__ __forceinline__ bool pause(Pause& p) const {
    return p.polls % kPollsPerLook == kPollsPerLook - 1;
  }
  __device__ __forceinline__ uint64_t now_ns() const { return global_timer_ns(); }

  __device__ __forceinline__ Status health(int peer) const {
    if (load_relaxed_sys(&w->host->abort_requested) != 0) return Status::kAborted;
    return load_relaxed_sys(&w->host->lost[peer]) != 0 ? Status::kPeerLost : Status::kOk;
  }
  // Devices keep no flight recorder.
  __device__ __forceinline__ const CallHeader* other_call_recorded(const CallId&, int) const {
    return nullptr;
  }
  __device__ __forceinline__ void wake(uint32_t*) const {}
  __device__ __forceinline__ void passing(Point, const View&, Stream) const {}

  __device__ __forceinline__ void tell_host(const Fault& fault) const {
    const auto* from = reinterpret_cast<const uint64_t*>(&fault);
    auto* to = reinterpret_cast<uint64_t*>(&w->host->fault);
    RC_ROLLED
    for (size_t i = 0; i < sizeof(Fault) / sizeof(uint64_t); ++i) to[i] = from[i];
    // Pairs with the acquire in DeviceComm::faulted().
    store_release_sys(&w->host->fault_raised, 1);
  }
};

}  // namespace device
RINGCOMM_NAMESPACE_END
