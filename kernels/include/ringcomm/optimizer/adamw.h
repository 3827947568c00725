// SPDX-License-Identifier: Apache-2.0

// The data of an optimizer's step on a shard: ringcomm/optim writes them, and the kernels of the
// host, CUDA and Triton read them. The names are AdamW's. Flags may make it a step of SGD or of
// Lion (one_moment_element.h), for which some data have another meaning. Every number that
// changes from step to step is in memory that the device reads, so that no step waits for the host
// and a captured graph can be replayed.
//
// A *bucket* is a run of parameters of one dtype, flat in the heap. Rank r keeps state for *chunk*
// r of the bucket, its *shard*. Offsets count elements.
#pragma once

#include "ringcomm/core/dtypes.h"

RINGCOMM_NAMESPACE_BEGIN

// Chunks begin at multiples of this many elements of their bucket. Norms are summed in tiles of
// this size (grad_norm.h), so that a tile is on one rank only, for any number of ranks.
constexpr int kTileShift = 9;
constexpr uint64_t kTileElems = 1 << kTileShift;

// The hyper-parameters of a group, under the names of torch.optim.AdamW; all doubles, one row of a
// tensor. For SGD beta1 is the dampening and beta2 the momentum.
struct AdamWHyper {
  double lr, beta1, beta2, eps, weight_decay;
  double flags;  // kAdam*, and at most one of kSgd, kLion and kQuantizedState
};

constexpr uint32_t kAdamActive = 1;  // the parameter is updated in this step
constexpr uint32_t kAdamL2 = 2;      // weight decay is added to the gradient (Adam), not decoupled
constexpr uint32_t kAdamAmsgrad = 4;
constexpr uint32_t kAdamMaximize = 8;
constexpr uint32_t kSgd = 16;              // the update is SGD's
constexpr uint32_t kMomentum = 32;         // SGD has a momentum, stored in exp_avg
constexpr uint32_t kNesterov = 64;         // SGD's momentum is Nesterov's
constexpr uint32_t kLion = 128;            // the update is Lion's, with its moment in exp_avg
constexpr uint32_t kQuantizedState = 256;  // AdamW, 8-bit moments (quantized_moments.h); no amsgrad

// The scalars of one optimizer; all doubles, one tensor.
struct AdamWControl {
  double inv_scale;  // 1 / loss scale
  double clip;       // clip coefficient
  double found_inf;  // not 0: this step changes nothing
  double steps;      // steps taken
  double skipped;    // steps skipped because of found_inf
};

// The numbers that one step needs for a parameter, from its hyper-parameters and step number;
// prepare_adamw() fills it.
struct AdamWFactors {
  uint32_t flags;  // without kAdamActive: leave the parameter and its state as they are
  uint32_t step;   // the number of this parameter's step, from 1
  float decay;     // 1 - lr * weight_decay
  float weight_decay;
  union {
    float one_minus_beta1;
    float one_minus_dampening;  // SGD's
  };
  union {
    float beta2;
    float momentum;  // SGD's
  };
  float one_minus_beta2;
  float negative_step_size;  // AdamW: -lr / (1 - beta1^step); others: -lr
  union {
    float bias_correction2_sqrt;  // sqrt(1 - beta2^step)
    float beta1;                  // Lion's
  };
  float eps;
  float grad_scale, clip;  // the gradient is multiplied by grad_scale, then by clip
};
static_assert(sizeof(AdamWFactors) == 48);

// Elements [begin, end) of the bucket belong to parameter `param`. Segments are sorted; elements
// between two segments are padding, which is never written.
struct AdamWSegment {
  uint64_t begin, end, param;
};

enum class Rounding : int32_t { kNearest = 0, kStochastic = 1 };

struct AdamWShard {
  const AdamWSegment* segments;  // [segment_count] the segments of the whole bucket
  const AdamWFactors* factors;   // [params] by AdamWSegment::param
  uint64_t segment_count;
  uint64_t bucket_elems;
  uint64_t begin, elems;  // this rank's chunk
  // FP32 parameters are their own master copy. 16-bit parameters have `master`, or `remainder`
  // (bfloat16: the low halves of the master), or neither of the two (stochastic rounding).
  float* master;        // [elems] or null
  uint16_t* remainder;  // [elems] or null
  // With kQuantizedState (set for all parameters or none): addresses of a QuantizedMoment's bytes.
  float* exp_avg;         // [elems]; null: no group has such a moment (SGD without momentum)
  float* exp_avg_sq;      // [elems]; null: no group has such a moment (SGD, Lion)
  float* max_exp_avg_sq;  // [elems]; null: no group uses amsgrad
  char* params;           // [bucket_elems] of param_dtype
  DType param_dtype;      // kFloat32, kBFloat16 or kFloat16
  Rounding rounding;
  uint64_t seed;         // the seed of stochastic rounding
  uint64_t bucket;       // number of the bucket: two buckets draw different random numbers
  bool quantized_state;  // true: the moments have the format of kQuantizedState
};

// Returns the index of the segment that contains `element` of the bucket, or of the next segment.
RC_FN uint64_t first_segment(const AdamWShard& s, uint64_t element) {
  uint64_t low = 0, high = s.segment_count;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (s.segments[middle].end <= element)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The arrays of prepare_adamw(); `hyper` has a row per group, the others an entry per parameter.
struct AdamWTable {
  AdamWControl* control;
  const AdamWHyper* hyper;  // [groups] the groups' hyper-parameters
  const int64_t* group;     // [params] the index of a parameter's group
  const double* active;     // [params] 0: no rank has a gradient, so the parameter takes no step
  double* step;             // [params] steps taken
  AdamWFactors* factors;    // [params] the factors of this step
  uint64_t params;
};

RINGCOMM_NAMESPACE_END
