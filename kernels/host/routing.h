// SPDX-License-Identifier: Apache-2.0

// Routes the rows of tokens to the experts that work on them, and back.
//
// Assignment t * k + j sends token t to its j-th expert (k experts per token). A rank sorts its
// assignments by expert. The rows of an expert are the assignments of all ranks, in rank order.
#pragma once

#include <cstdint>
#include <vector>

namespace ringcomm::host {

// The assignments of one rank, sorted by expert: order[0 .. sum of counts).
struct Assignments {
  const int64_t* order;
  const int64_t* counts;  // [expert]
};

// Sorts assignments by expert, stably. An expert of -1 means that the assignment has none. Returns
// the first assignment whose expert is neither -1 nor below `experts`, or -1 if all are valid.
int64_t sort_by_expert(const int64_t* topk_idx, uint64_t assignments, uint64_t experts,
                       int64_t* order, int64_t* counts);

// For each assignment `a` of a rank, writes the rank of its expert into expert_rows[2 * a], and the
// number of the assignment's row at that rank into expert_rows[2 * a + 1]; -1 and 0 without an
// expert. `all`: the assignments of all ranks.
void find_expert_rows(const std::vector<Assignments>& all, uint64_t rank, uint64_t experts,
                      uint64_t experts_here, uint64_t assignments, int64_t* expert_rows);

// The source of a row is two entries of a RowTable: (rank, number of the token among the rank's
// published rows), then (rank, number of the assignment, which selects a weight).
constexpr uint64_t kSourceWords = 4;

// Writes the sources of the rows of experts [first, first + experts_here), and the number of rows
// of each of these experts. Each rank has published its tokens.
void list_sources(const std::vector<Assignments>& all, uint64_t first, uint64_t experts_here,
                  uint64_t k, int64_t* sources, int64_t* counts);

}  // namespace ringcomm::host
