// Where the rows of tokens lie that experts work on: by expert at the rank of the tokens, and by
// row at the rank of the experts.
//
// Assignment t k + j is that of token t to its j-th expert. A rank sorts its assignments by expert;
// an expert has those of all ranks one after the other.
#pragma once

#include <cstdint>
#include <vector>

namespace ringcomm::host {

// The assignments of one rank, by expert: order[0 .. sum of counts).
struct Assignments {
  const int64_t* order;
  const int64_t* counts;  // by expert
};

// Sorts assignments by expert, each in their order. An expert of -1 means none. Returns the first
// assignment whose expert is neither -1 nor one of `experts`, and -1 if there is none.
int64_t sort_by_expert(const int64_t* topk_idx, uint64_t assignments, uint64_t experts,
                       int64_t* order, int64_t* counts);

// Writes for each assignment of a rank the rank of its expert and the row there:
// expert_rows[2 a], expert_rows[2 a + 1]; -1 and 0 for one that no expert has. `all` are those of
// all ranks.
void find_expert_rows(const std::vector<Assignments>& all, uint64_t rank, uint64_t experts,
                      uint64_t experts_here, uint64_t assignments, int64_t* expert_rows);

// A row's source, as two entries of a RowTable: the rank of its token, and which of the rows is its
// that this rank has published; the rank again, and the assignment, of which there are weights.
constexpr uint64_t kSourceWords = 4;

// Writes the sources of the rows of experts [first, first + experts_here), and how many rows each
// of these experts has. What is published of a rank are its tokens.
void list_sources(const std::vector<Assignments>& all, uint64_t first, uint64_t experts_here,
                  uint64_t k, int64_t* sources, int64_t* counts);

}  // namespace ringcomm::host
