// SPDX-License-Identifier: Apache-2.0

// The Ops of buckets.h on the host: they process the gradients of a run, which is a range of
// elements of a chunk, and each lane takes whole tiles of the run.
#pragma once

#include "kernels/host/ops.h"
#include "ringcomm/optimizer/buckets.h"

namespace ringcomm::host {

// finish(mine, from, first) does a lane's work. mine: the lane's part of a run; from: the gradients
// of the whole run; first: the element at which the whole run begins.
template <class Finish>
struct OptimizerOps : HostOps {
  Finish finish;
  Bucket bucket;
  char* own_grads;  // my chunk's gradients: the target of the ring's last hop, which stores nothing

  OptimizerOps on(Channel& channel) const {
    return {HostOps::on(channel), finish.on(channel), bucket, own_grads};
  }

  template <class Team>
  void consume(Team& team, const Gradients& from, Run run) const {
    const Extent extent = extent_of(run.end - run.begin, team.lane(), team.num_lanes(), kTileShift);
    const Run mine{run.begin + extent.begin_bytes, run.begin + extent.end_bytes};
    if (mine.begin < mine.end) finish(mine, from, run.begin);
  }

  template <class Team>
  void reduce(Team& team, const ReduceTarget& to, const ReduceSources& from, uint64_t bytes,
              int finish_world) const {
    if (finish_world == 0) return HostOps::reduce(team, to, from, bytes, finish_world);
    const uint64_t size = uint64_t(bucket.grad_bytes);
    const uint64_t begin = uint64_t(static_cast<char*>(to.dst) - own_grads) / size;
    consume(team, Gradients{from.ptrs, from.count}, Run{begin, begin + bytes / size});
  }
};

// The sum or the mean of the gradients of W ranks. A rank of a ring receives the sum of the other
// ranks as one source, so the divisor cannot be the number of sources.
struct GradKind {
  DType dtype;
  int divide_by;           // the divisor of the sum; 0: no division
  int sum_group_size = 0;  // as in GradSources
};

struct UpdateFinish {
  const KernelTable* table;
  const AdamWShard* shard;
  GradKind grads;
  char* const* copies;  // View::results, or null
  int copy_count;
  bool streaming;

  UpdateFinish on(Channel& channel) const {
    UpdateFinish same = *this;
    if (copies != nullptr) same.copies = channel.view.results;
    return same;
  }

  void operator()(Run run, const Gradients& from, uint64_t first) const {
    table->adamw(
        AdamWJob{shard,
                 {from.ptrs, from.count, grads.dtype, grads.divide_by, first, grads.sum_group_size},
                 copies,
                 copy_count,
                 run.begin,
                 run.end,
                 streaming});
  }
};

struct NormFinish {
  const KernelTable* table;
  GradKind grads;
  float* out;
  bool accumulate;
  NormKind kind;
  NormWords* words;  // of this channel alone; or null
  bool streaming;

  NormFinish on(Channel& channel) const {
    NormFinish same = *this;
    if (words != nullptr) same.words = &channel.norm;
    return same;
  }

  void operator()(Run run, const Gradients& from, uint64_t first) const {
    NormWords mine{};
    table->reduce_norm(
        NormJob{{from.ptrs, from.count, grads.dtype, grads.divide_by, first, grads.sum_group_size},
                out,
                accumulate,
                kind,
                words == nullptr ? nullptr : &mine,
                run.begin,
                run.end,
                streaming});
    if (words != nullptr) merge_norms(*words, mine, kind);
  }
};

}  // namespace ringcomm::host
