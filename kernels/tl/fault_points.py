"""The points at which tests inject faults into the interpreter: publications, acks and waits.

The Triton twin of ``Team::passing`` (ringcomm/core/team.h): the plan that the process
has armed (``ringcomm._native.arm_fault``) counts these passages as it does those of native calls.
"""

import triton
import triton.language as tl

from ringcomm._native import FAULT_POINTS

from .hooks import IS_INTERPRETED, host_passing
from .state import HEADER, RANK, get

PUBLISH = tl.constexpr(FAULT_POINTS["publish"])
ACKNOWLEDGE = tl.constexpr(FAULT_POINTS["acknowledge"])
AWAIT = tl.constexpr(FAULT_POINTS["await"])

if IS_INTERPRETED:

    def passing(ws, point):
        """Before the block does what the point says."""
        host_passing(point, get(ws, RANK), get(ws, HEADER))

else:

    @triton.jit
    def passing(ws, point: tl.constexpr):
        """Nothing happens on a GPU."""
