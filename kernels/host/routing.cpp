// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/routing.h"

namespace ringcomm::host {
namespace {

uint64_t sum(const int64_t* counts, uint64_t begin, uint64_t end) {
  uint64_t total = 0;
  for (uint64_t i = begin; i < end; ++i) total += uint64_t(counts[i]);
  return total;
}

}  // namespace

int64_t sort_by_expert(const int64_t* topk_idx, uint64_t assignments, uint64_t experts,
                       int64_t* order, int64_t* counts) {
  std::vector<uint64_t> next(experts, 0);
  for (uint64_t a = 0; a < assignments; ++a) {
    if (topk_idx[a] == -1) continue;
    if (topk_idx[a] < 0 || uint64_t(topk_idx[a]) >= experts) return int64_t(a);
    ++next[uint64_t(topk_idx[a])];
  }
  uint64_t begin = 0;
  for (uint64_t e = 0; e < experts; ++e) {
    counts[e] = int64_t(next[e]);
    next[e] = begin;
    begin += uint64_t(counts[e]);
  }
  for (uint64_t a = 0; a < assignments; ++a)
    if (topk_idx[a] >= 0) order[next[uint64_t(topk_idx[a])]++] = int64_t(a);
  return -1;
}

void find_expert_rows(const std::vector<Assignments>& all, uint64_t rank, uint64_t experts,
                      uint64_t experts_here, uint64_t assignments, int64_t* expert_rows) {
  for (uint64_t a = 0; a < assignments; ++a) {
    expert_rows[2 * a] = -1;
    expert_rows[2 * a + 1] = 0;
  }
  const int64_t* order = all[rank].order;
  for (uint64_t first = 0; first < experts; first += experts_here) {
    uint64_t row = 0;  // first row of the expert's rows at its rank
    for (uint64_t e = first; e < first + experts_here; ++e) {
      for (uint64_t source = 0; source < all.size(); ++source) {
        const auto count = uint64_t(all[source].counts[e]);
        if (source == rank)
          for (uint64_t i = 0; i < count; ++i, ++order) {
            expert_rows[2 * *order] = int64_t(first / experts_here);
            expert_rows[2 * *order + 1] = int64_t(row + i);
          }
        row += count;
      }
    }
  }
}

void list_sources(const std::vector<Assignments>& all, uint64_t first, uint64_t experts_here,
                  uint64_t k, int64_t* sources, int64_t* counts) {
  std::vector<const int64_t*> next;
  for (const Assignments& each : all) next.push_back(each.order + sum(each.counts, 0, first));
  for (uint64_t e = 0; e < experts_here; ++e) {
    counts[e] = 0;
    for (uint64_t source = 0; source < all.size(); ++source) {
      const int64_t count = all[source].counts[first + e];
      for (int64_t i = 0; i < count; ++i, sources += kSourceWords) {
        const int64_t assignment = *next[source]++;
        sources[0] = sources[2] = int64_t(source);
        sources[1] = assignment / int64_t(k);
        sources[3] = assignment;
      }
      counts[e] += count;
    }
  }
}

}  // namespace ringcomm::host
