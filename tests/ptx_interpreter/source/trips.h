// How many trips to memory a kernel makes one after the other.
//
// A warp issues in order. Its clock counts trips: what a load of global memory brings is there one
// trip after it was issued, arithmetic hands on when its operands are there, and a warp waits where
// it must know them, to address, store, branch, or pass to another function. An acquire and an
// atomic that orders wait for themselves. At a barrier the warps of a block wait for the last. So
// the clock at the end is the longest chain of loads each of which had to wait for another: by its
// address, by a branch, or behind a barrier. What a poll waits for takes one trip a look.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/ptx_interpreter/source/module.h"

namespace ptx {

class Trips {
 public:
  // When each row of a frame is there.
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
  // A warp knows which of its lanes execute.
  void guarded(const Instruction& i, const Ready& ready) {
    if (i.guard >= 0) now_ = std::max(now_, ready[size_t(i.guard)]);
  }

  uint32_t now() const { return now_; }
  void wait_until(uint32_t time) { now_ = std::max(now_, time); }

 private:
  uint32_t now_ = 0;
};

}  // namespace ptx
