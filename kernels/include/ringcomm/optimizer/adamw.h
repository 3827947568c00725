// The data of an optimizer's step on a shard: written by ringcomm/optim, read by the kernels of the
// host, CUDA and Triton alike. The step is AdamW's, whose names the data have, or, by its flags,
// that of SGD or Lion (one_moment_element.h), which use some of them otherwise. Every number that
// changes from step to step lies in memory that the device reads, so that no step waits for the
// host and a captured graph replays.
//
// A *bucket* is a run of parameters of one dtype, flat in the heap. Its *chunk* r, the part of rank
// r, is what that rank keeps state for: its *shard*. Offsets count elements.
#pragma once

#include "ringcomm/core/dtypes.h"

RINGCOMM_NAMESPACE_BEGIN

// Chunks begin at multiples of this many elements of their bucket. Norms are summed by tiles of
// this size (grad_norm.h), so that no tile lies on two ranks, however many ranks there are.
constexpr int kTileShift = 9;
constexpr uint64_t kTileElems = 1 << kTileShift;

// The hyper-parameters of a group, as torch.optim.AdamW names them; all doubles, one row of a
// tensor. SGD has its dampening as beta1 and its momentum as beta2.
struct AdamWHyper {
  double lr, beta1, beta2, eps, weight_decay;
  double flags;  // kAdam*, and one of kSgd, kLion and kQuantizedState or neither
};

constexpr uint32_t kAdamActive = 1;  // the parameter takes this step
constexpr uint32_t kAdamL2 = 2;      // weight decay is added to the gradient (Adam), not decoupled
constexpr uint32_t kAdamAmsgrad = 4;
constexpr uint32_t kAdamMaximize = 8;
constexpr uint32_t kSgd = 16;       // the update is that of SGD
constexpr uint32_t kMomentum = 32;  // SGD has a momentum, which lies in exp_avg
constexpr uint32_t kNesterov = 64;  // Nesterov's
constexpr uint32_t kLion = 128;     // the update is that of Lion, whose moment lies in exp_avg
constexpr uint32_t kQuantizedState = 256;  // of AdamW (quantized_moments.h); no amsgrad

// The scalars of one optimizer; all doubles, one tensor.
struct AdamWControl {
  double inv_scale;  // 1 / loss scale
  double clip;       // clip coefficient
  double found_inf;  // not 0: this step changes nothing
  double steps;      // taken
  double skipped;    // because of found_inf
};

// The numbers that one step needs for a parameter, from its hyper-parameters and step number;
// prepare_adamw() fills it.
struct AdamWFactors {
  uint32_t flags;  // without kAdamActive: leave the parameter and its state as they are
  uint32_t step;   // of this parameter, from 1
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
  float grad_scale, clip;  // the gradient is multiplied by one, then by the other
};
static_assert(sizeof(AdamWFactors) == 48);

// Elements [begin, end) of the bucket belong to parameter `param`. Sorted; what lies between two
// segments is padding, which is never written.
struct AdamWSegment {
  uint64_t begin, end, param;
};

enum class Rounding : int32_t { kNearest = 0, kStochastic = 1 };

struct AdamWShard {
  const AdamWSegment* segments;  // [segment_count] those of the whole bucket
  const AdamWFactors* factors;   // [params] by AdamWSegment::param
  uint64_t segment_count;
  uint64_t bucket_elems;
  uint64_t begin, elems;  // this rank's chunk
  // FP32 parameters are their own master copy. Parameters of 16 bits have one of: `master`;
  // `remainder` (bfloat16: the master's low halves); neither (with stochastic rounding).
  float* master;        // [elems] or null
  uint16_t* remainder;  // [elems] or null
  // With kQuantizedState, which all parameters have then, addresses of a QuantizedMoment's bytes.
  float* exp_avg;         // [elems]; null: no group has such a moment (SGD without momentum)
  float* exp_avg_sq;      // [elems]; null: no group has such a moment (SGD, Lion)
  float* max_exp_avg_sq;  // [elems]; null: no group uses amsgrad
  char* params;           // [bucket_elems] of param_dtype
  DType param_dtype;      // kFloat32, kBFloat16 or kFloat16
  Rounding rounding;
  uint64_t seed;         // of stochastic rounding
  uint64_t bucket;       // its number, so that two buckets draw different numbers
  bool quantized_state;  // the moments are those of kQuantizedState
};

// The segment that holds element `element` of the bucket, or the first behind it.
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

// The arrays that prepare_adamw() works on; all by parameter but `hyper` and `control`.
struct AdamWTable {
  AdamWControl* control;
  const AdamWHyper* hyper;  // [groups]
  const int64_t* group;     // [params]
  const double* active;     // [params] 0: no rank has a gradient for it, it takes no step
  double* step;             // [params] steps taken
  AdamWFactors* factors;    // [params]
  uint64_t params;
};

RINGCOMM_NAMESPACE_END
