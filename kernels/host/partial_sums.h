// SPDX-License-Identifier: Apache-2.0

// Reductions in parts: partial sums in the accumulator's type, and their combination. Sums in
// groups of ranks (CommOptions.sum_group_size) take the same two steps as a reduction in each node
// followed by a combination between the nodes, so both give the same bits.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/host/kernel_table.h"
#include "kernels/host/worker_pool.h"

namespace ringcomm::host {

// Returns the loop from sources of one element type to results of another, or null if there is
// none. The types are equal, or one is the accumulator's type of the other.
inline ReduceFn reduction_loop(DType sources, DType results, RedOp op) {
  const KernelTable& table = kernels();
  if (sources == results) return table.reduce[int(sources)][int(op)];
  if (accumulator_of(sources) == results) return table.widening[half_index(sources)][int(op)];
  if (accumulator_of(results) == sources) return table.narrowing[half_index(results)][int(op)];
  return nullptr;
}

// Returns the operator that combines partial results of `op`, which contain kPremulSum's factors.
inline RedOp combining_op(RedOp op) { return op == RedOp::kPremulSum ? RedOp::kSum : op; }

// ((s_0 + .. + s_(L-1)) + (s_L + ..)) + ..: the reduction of sources in groups of L.
struct GroupedSum {
  int ranks;          // ranks per group: L
  ReduceFn of_group;  // loop from sources to the accumulator's type
  ReduceFn of_two;    // loop over two partial sums
  ReduceFn of_last;   // loop over the last two, with the results' rounding and division
  uint64_t source_bytes, acc_bytes, result_bytes;  // bytes of an element

  static GroupedSum of(int ranks, DType dtype, DType results, RedOp op) {
    const DType acc = accumulator_of(dtype);
    const RedOp combine = combining_op(op);
    return {ranks,
            reduction_loop(dtype, acc, op),
            reduction_loop(acc, acc, combine),
            reduction_loop(acc, results, combine),
            uint64_t(size_of(dtype)),
            uint64_t(size_of(acc)),
            uint64_t(size_of(results))};
  }
};

// Runs `job` in at least two groups. Partial sums stay in the first-level cache.
inline void reduce_in_groups(const GroupedSum& groups, const ReduceJob& job) {
  alignas(64) char total[4096], next[4096];
  const uint64_t elems = job.bytes / groups.source_bytes, most = sizeof(total) / groups.acc_bytes;
  std::vector<const void*> sources(size_t(job.count));
  const double ones[] = {1.0, 1.0};
  const void* const pair[] = {total, next};
  for (uint64_t begin = 0; begin < elems; begin += most) {
    const uint64_t n = std::min(most, elems - begin);
    for (int s = 0; s < job.count; ++s)
      sources[size_t(s)] = static_cast<const char*>(job.sources[s]) + begin * groups.source_bytes;
    const auto sum_group = [&](int first, char* to) {
      groups.of_group(ReduceJob{to, nullptr, false, false, sources.data() + first,
                                job.factors + first, std::min(groups.ranks, job.count - first), 0,
                                n * groups.source_bytes});
    };
    sum_group(0, total);
    int first = groups.ranks;
    for (; first + groups.ranks < job.count; first += groups.ranks) {
      sum_group(first, next);
      groups.of_two(
          ReduceJob{total, nullptr, false, false, pair, ones, 2, 0, n * groups.acc_bytes});
    }
    sum_group(first, next);
    const auto from_begin = [&](void* to) {
      return to == nullptr ? nullptr : static_cast<char*>(to) + begin * groups.result_bytes;
    };
    groups.of_last(ReduceJob{from_begin(job.dst), from_begin(job.also), job.streaming,
                             job.also_streaming, pair, ones, 2, job.finish_world,
                             n * groups.acc_bytes});
  }
}

// The options of combine_partials(), which combines local arrays.
struct PartialSums {
  DType sources, results;
  RedOp op;
  int divide_by;  // 0: no division; else op is a sum
  bool streaming;
};

// Combines arrays element by element, in list order and in the accumulator's type, divides by
// `divide_by` unless it is 0, and rounds once. False: not defined for these types and operator.
inline bool combine_partials(const std::vector<const void*>& in, void* out, uint64_t elems,
                             const PartialSums& how) {
  const bool adds = how.op == RedOp::kSum || how.op == RedOp::kAvg || how.op == RedOp::kPremulSum;
  if (how.divide_by > 0 && !adds) return false;
  const RedOp op = how.divide_by > 0 ? RedOp::kAvg : combining_op(how.op);
  const ReduceFn loop = reduction_loop(how.sources, how.results, op);
  if (loop == nullptr) return false;
  const std::vector<double> ones(in.size(), 1.0);
  const uint64_t size = uint64_t(size_of(how.sources)), result = uint64_t(size_of(how.results));
  run_in_parts(elems, 64, elems * size * in.size(), threads_without_communicator(),
               [&](uint64_t begin, uint64_t end) {
                 std::vector<const void*> sources = in;
                 for (const void*& each : sources)
                   each = static_cast<const char*>(each) + begin * size;
                 loop(ReduceJob{static_cast<char*>(out) + begin * result, nullptr, how.streaming,
                                false, sources.data(), ones.data(), int(in.size()), how.divide_by,
                                (end - begin) * size});
               });
  return true;
}

}  // namespace ringcomm::host
