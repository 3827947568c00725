// SPDX-License-Identifier: Apache-2.0

// Measures whether single copies are fast on this machine; see NOTE [Single copy] in endpoint.h.
#pragma once

namespace ringcomm::host {

// Whether a copy by the kernel (process_vm_readv) takes less time than staging.
struct SingleCopyGain {
  bool over_two_copies;  // than a copy into a slot and a copy out of it: all ranks share data
  bool over_one_copy;    // than the longer of these copies: one rank shares data, and another rank
                         // copies out of the slots at the same time

  // Measures at the first call in this process, which takes about 2 ms; later calls return the same
  // gain. Both members are false if this process cannot read itself.
  static SingleCopyGain measured();
};

}  // namespace ringcomm::host
