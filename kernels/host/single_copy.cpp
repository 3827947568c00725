// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/single_copy.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/host/waiter.h"

namespace ringcomm::host {
namespace {

// The fastest round counts, since other programs can only slow a round down.
constexpr size_t kBytes = 1 << 20, kSlotBytes = 256 << 10;
constexpr int kRounds = 5;

struct Buffers {
  std::vector<char> from = std::vector<char>(kBytes, 1), slot = std::vector<char>(kSlotBytes),
                    to = std::vector<char>(kBytes);
};

bool read_own_process(Buffers& b) {
  const iovec mine{b.to.data(), kBytes}, theirs{b.from.data(), kBytes};
  return process_vm_readv(getpid(), &mine, 1, &theirs, 1, 0) == ssize_t(kBytes);
}

void copy_in(Buffers& b, size_t begin) {
  std::memcpy(b.slot.data(), b.from.data() + begin, kSlotBytes);
}

void copy_out(Buffers& b, size_t begin) {
  std::memcpy(b.to.data() + begin, b.slot.data(), kSlotBytes);
}

SingleCopyGain measure() {
  Buffers b;
  uint64_t read_ns = UINT64_MAX, both_ns = UINT64_MAX, in_ns = UINT64_MAX;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t start_ns = Waiter::now_ns();
    if (!read_own_process(b)) return {false, false};
    const uint64_t read_end_ns = Waiter::now_ns();
    for (size_t begin = 0; begin < kBytes; begin += kSlotBytes) {
      copy_in(b, begin);
      copy_out(b, begin);
    }
    const uint64_t both_end_ns = Waiter::now_ns();
    for (size_t begin = 0; begin < kBytes; begin += kSlotBytes) copy_in(b, begin);
    const uint64_t in_end_ns = Waiter::now_ns();
    read_ns = std::min(read_ns, read_end_ns - start_ns);
    both_ns = std::min(both_ns, both_end_ns - read_end_ns);
    in_ns = std::min(in_ns, in_end_ns - both_end_ns);
  }
  // The reader's copy is as long as the sharer's, or longer: it writes memory outside the caches.
  return {read_ns < both_ns, read_ns < std::max(in_ns, both_ns - in_ns)};
}

}  // namespace

SingleCopyGain SingleCopyGain::measured() {
  static const SingleCopyGain gain = measure();
  return gain;
}

}  // namespace ringcomm::host
