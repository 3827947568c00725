// SPDX-License-Identifier: Apache-2.0

// Counts the dependent trips to memory of a kernel.
//
// A warp issues in order. Its clock counts trips. The result of a load from global memory is ready
// one trip after the load was issued, and the result of arithmetic when its operands are ready. A
// warp waits for a value that it uses to address, store, branch, or call a function. It also waits
// for each acquire and each ordering atomic. At a barrier all warps of a block wait for the last
// warp. The clock at the end is therefore the longest chain of loads in which each waited for the
// previous one: by its address, by a branch, or at a barrier. Each poll of a wait takes one trip.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/ptx_interpreter/source/module.h"

namespace ptx {

class Trips {
 public:
  // The trip at which each row of a frame is ready.
  using Ready = std::vector<uint32_t>;

  // `global`: a load or a store of global memory.
  void executed(const Instruction& i, Ready& ready, bool global) {
    uint32_t known = now_;
    for (const int32_t row : i.src)
      if (row >= 0) known = std::max(known, ready[size_t(row)]);
    const std::string_view name = i.text.substr(i.text.find_first_not_of("@!%p0123456789 \t"));
    const bool loads = name.starts_with("ld.") || name.starts_with("atom.");
    if (loads || name.starts_with("st.") || name.starts_with("red.") || i.control != Control::kNone)
      now_ = known;
    const uint32_t there = loads && global ? now_ + 1 : known;
    if (loads && global && i.order >= Order::kAcquire) now_ = there;
    for (const int32_t row : i.dst)
      if (row >= 0) ready[size_t(row)] = there;
  }
  // A warp must know which of its lanes execute, so it waits for the guard.
  void guarded(const Instruction& i, const Ready& ready) {
    if (i.guard >= 0) now_ = std::max(now_, ready[size_t(i.guard)]);
  }

  uint32_t now() const { return now_; }
  void wait_until(uint32_t time) { now_ = std::max(now_, time); }

 private:
  uint32_t now_ = 0;
};

}  // namespace ptx
