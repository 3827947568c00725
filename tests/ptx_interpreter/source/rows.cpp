// SPDX-License-Identifier: Apache-2.0

// Assigns registers to rows: compilers number registers without limit, but a warp needs rows only
// for the registers that are live at the same time.
//
// Liveness by the usual data-flow over basic blocks (Aho et al., "Compilers", 9.2.5), intervals
// over the text, then a linear scan (Poletto and Sarkar, TOPLAS 21(5), 1999).
#include <algorithm>
#include <bit>
#include <queue>
#include <set>

#include "tests/ptx_interpreter/source/module.h"

namespace ptx {
namespace {

using Bits = std::vector<uint64_t>;
bool test(const Bits& bits, uint32_t i) { return (bits[i / 64] >> (i % 64) & 1) != 0; }
void set(Bits& bits, uint32_t i) { bits[i / 64] |= uint64_t(1) << (i % 64); }

template <class F>
void for_each_set(const Bits& bits, F f) {
  for (size_t word = 0; word < bits.size(); ++word)
    for (uint64_t left = bits[word]; left != 0; left &= left - 1)
      f(uint32_t(word * 64) + uint32_t(std::countr_zero(left)));
}

template <class F>
void for_each_use(const Instruction& i, F f) {
  if (i.guard >= 0) f(uint32_t(i.guard));
  for (const int32_t row : i.src)
    if (row >= 0) f(uint32_t(row));
}

template <class F>
void for_each_definition(const Instruction& i, F f) {
  for (const int32_t row : i.dst)
    if (row >= 0) f(uint32_t(row));
}

struct BasicBlock {
  uint32_t begin, end;
  std::vector<uint32_t> next;
  Bits used, defined, live_in, live_out;
};

std::vector<BasicBlock> blocks_of(const std::vector<Instruction>& code, uint32_t count) {
  std::set<uint32_t> starts = {0};
  for (uint32_t at = 0; at < code.size(); ++at) {
    if (code[at].control == Control::kBranch) starts.insert(code[at].target);
    if (code[at].control == Control::kBranch || code[at].control == Control::kReturn)
      starts.insert(at + 1);
  }
  starts.erase(uint32_t(code.size()));
  std::vector<BasicBlock> blocks;
  std::vector<uint32_t> block_at(code.size() + 1, 0);
  for (auto it = starts.begin(); it != starts.end(); ++it) {
    const auto after = std::next(it);
    block_at[*it] = uint32_t(blocks.size());
    blocks.push_back(
        {*it, after == starts.end() ? uint32_t(code.size()) : *after, {}, {}, {}, {}, {}});
  }
  for (BasicBlock& block : blocks) {
    const Instruction& last = code[block.end - 1];
    const bool falls_through =
        last.guard != Instruction::kNoRow ||
        (last.control != Control::kBranch && last.control != Control::kReturn);
    if (last.control == Control::kBranch) block.next.push_back(block_at[last.target]);
    if (falls_through && block.end < code.size()) block.next.push_back(block_at[block.end]);
    for (Bits* bits : {&block.used, &block.defined, &block.live_in, &block.live_out})
      bits->assign(count / 64 + 1, 0);
    for (uint32_t at = block.begin; at < block.end; ++at) {
      for_each_use(code[at], [&](uint32_t r) {
        if (!test(block.defined, r)) set(block.used, r);
      });
      for_each_definition(code[at], [&](uint32_t r) {
        // Under a guard some lanes keep the old value, so the register is also used.
        if (code[at].guard != Instruction::kNoRow && !test(block.defined, r)) set(block.used, r);
        set(block.defined, r);
      });
    }
  }
  return blocks;
}

void spread_liveness(std::vector<BasicBlock>& blocks) {
  for (bool changed = true; changed;) {
    changed = false;
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block)
      for (size_t word = 0; word < block->used.size(); ++word) {
        uint64_t out = 0;
        for (const uint32_t next : block->next) out |= blocks[next].live_in[word];
        const uint64_t in = block->used[word] | (out & ~block->defined[word]);
        changed |= in != block->live_in[word];
        block->live_out[word] = out;
        block->live_in[word] = in;
      }
  }
}

struct Interval {
  uint32_t begin = UINT32_MAX, end = 0;
  void cover(uint32_t at) {
    begin = std::min(begin, at);
    end = std::max(end, at);
  }
};

}  // namespace

uint32_t assign_rows(std::vector<Instruction>& code, uint32_t count) {
  if (code.empty()) return 0;
  std::vector<BasicBlock> blocks = blocks_of(code, count);
  spread_liveness(blocks);
  // An instruction has the points 2 * at and 2 * at + 1. All its sources and results cover the
  // second point, so a result never shares a row with a source.
  std::vector<Interval> intervals(count);
  for (const BasicBlock& block : blocks) {
    for_each_set(block.live_in, [&](uint32_t r) { intervals[r].cover(2 * block.begin); });
    for_each_set(block.live_out, [&](uint32_t r) { intervals[r].cover(2 * block.end); });
    for (uint32_t at = block.begin; at < block.end; ++at) {
      for_each_use(code[at], [&](uint32_t r) { intervals[r].cover(2 * at + 1); });
      for_each_definition(code[at], [&](uint32_t r) { intervals[r].cover(2 * at + 1); });
    }
  }
  std::vector<uint32_t> order;
  for (uint32_t r = 0; r < count; ++r)
    if (intervals[r].begin != UINT32_MAX) order.push_back(r);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return intervals[a].begin < intervals[b].begin; });
  using Busy = std::pair<uint32_t, uint32_t>;  // end, row
  std::priority_queue<Busy, std::vector<Busy>, std::greater<>> busy;
  std::vector<uint32_t> free, row_of(count, 0);
  uint32_t rows = 0;
  for (const uint32_t r : order) {
    for (; !busy.empty() && busy.top().first < intervals[r].begin; busy.pop())
      free.push_back(busy.top().second);
    if (free.empty()) free.push_back(rows++);
    row_of[r] = free.back();
    free.pop_back();
    busy.emplace(intervals[r].end, row_of[r]);
  }
  const auto renumber = [&](int32_t& row) {
    if (row >= 0) row = int32_t(row_of[uint32_t(row)]);
  };
  for (Instruction& i : code) {
    renumber(i.guard);
    for (int32_t& row : i.dst) renumber(row);
    for (int32_t& row : i.src) renumber(row);
  }
  return rows;
}

}  // namespace ptx
