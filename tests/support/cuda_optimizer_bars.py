# SPDX-License-Identifier: Apache-2.0
"""Limits for the machine code of the optimizer's kernels; each check returns the violations."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support import cuda_loop_measures as measures
from tests.support.cuda_code import Binary, Loop

# Elements per lane and turn.
TURN_ELEMS = 8
# Instructions where the lanes of a warp wait for each other, or a lane for its own stack.
_BRANCHES = ("FCHK", "BSSY", "CALL", "LDL", "STL")


@dataclass(frozen=True)
class LoopBar:
    """The limits of a loop.

    Attributes:
        loads: 16-byte loads per turn; identifies the loop.
        kib: least KiB in flight per multiprocessor.
        instructions: most instructions per turn.
    """

    loads: int
    kib: float
    instructions: int


# Steps with bfloat16 gradients: moments and masters take 6 loads, and each source one load.
PAIR = LoopBar(8, 84, 45 * TURN_ELEMS)
MANY = LoopBar(14, 84, 512)
STEP_REGISTERS = 80  # the maximum for blocks of 768 threads
# For sm_100a ptxas uses more registers, so blocks have 640 threads there.
PAIR_OF_SM100, STEP_REGISTERS_OF_SM100 = LoopBar(8, 80, 45 * TURN_ELEMS), 96


def step_loop(binary: Binary, kernel: str, bar: LoopBar) -> list[str]:
    """Returns the defects of the update loop with ``bar.loads`` loads."""
    loops = [
        loop
        for loop in measures.steady_loops(binary, kernel)
        if sum(map(measures.is_load, loop.code)) == bar.loads
    ]
    if not loops:
        return [f"{kernel}: no loop has {bar.loads} loads"]
    (loop,) = loops
    found = _waits(binary, kernel, loop, bar.kib)
    if len(loop.code) > bar.instructions:
        found.append(f"{kernel}: {len(loop.code)} instructions for {TURN_ELEMS} elements")
    if branches := measures.opcodes_in(loop, *_BRANCHES):
        found.append(f"{kernel}: {branches} of {', '.join(_BRANCHES)} in the loop")
    return found


def norm_loops(binary: Binary, kernel: str, kib: float, blocks: int) -> list[str]:
    """Returns the defects of the loops that sum tiles: those with 8 or more loads per turn."""
    loops = [
        loop
        for loop in measures.steady_loops(binary, kernel)
        if sum(map(measures.is_load, loop.code)) >= TURN_ELEMS
    ]
    found = [] if loops else [f"{kernel}: no loop has {TURN_ELEMS} loads"]
    for loop in loops:
        found += _waits(binary, kernel, loop, kib, blocks)
    return found


def _waits(binary: Binary, kernel: str, loop: Loop, kib: float, blocks: int = 1) -> list[str]:
    turn = measures.turn(binary, kernel, loop)
    found = []
    if (waits := measures.waits_in_series(turn)) > 1:
        found.append(f"{kernel}: {waits} waits for loads in a turn, one after the other")
    flying = measures.kib_in_flight(binary, kernel, turn, most_blocks=blocks)
    if flying < kib:
        found.append(f"{kernel}: {flying} KiB in flight, not {kib}")
    return found
