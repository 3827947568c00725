# SPDX-License-Identifier: Apache-2.0
"""Measures of kernels' loops that predict their speed, computed from machine code.

The model runs a warp through several turns of a loop: each 16-byte load is in flight until an
instruction waits for its scoreboard. It takes no forward branch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.support.cuda_checks import blocks_per_multiprocessor, data_loops, innermost
from tests.support.cuda_code import Binary, Instruction, Loop
from tests.support.cuda_control_codes import Control, controls

WARP, LOAD_BYTES, KIB = 32, 16, 1024
# Turns until a loop reaches its steady state, and further turns that are measured.
_FIRST_TURNS, _MORE_TURNS = 4, 4
_DEPBAR = re.compile(r"SB(\d), 0x([0-9a-f]+)")
_GENERIC = re.compile(r"^(?:LD|ST|ATOM)(?:\.|$)")


def is_load(instruction: Instruction) -> bool:
    """True for a 16-byte load of data from global memory; loads of LL packets do not count."""
    return bool(instruction.loaded) and ".STRONG" not in instruction.opcode


@dataclass(frozen=True)
class Turn:
    """The instructions that a warp executes in one turn of a loop."""

    steps: Sequence[tuple[Instruction, Control]]

    @property
    def loads(self) -> int:
        return sum(is_load(instruction) for instruction, _ in self.steps)


def turn(binary: Binary, kernel: str, loop: Loop, inner_turns: int = 1) -> Turn:
    """Returns a turn of ``loop`` whose inner loops that load data run ``inner_turns`` times."""
    codes = controls(binary, kernel)
    steps = list(zip(loop.code, codes[loop.begin : loop.end], strict=True))
    loading = [each for each in data_loops(binary.kernels[kernel]) if loop.encloses(each)]
    # Last loop first, so that the positions of the earlier loops stay valid.
    for inner in sorted(innermost(loading), key=lambda each: -each.begin):
        begin, end = inner.begin - loop.begin, inner.end - loop.begin
        steps[begin:end] = steps[begin:end] * inner_turns
    return Turn(steps)


def steady_loops(binary: Binary, kernel: str) -> list[Loop]:
    """Returns the innermost loops that load data, sorted by loads per turn, most first."""
    loops = innermost(data_loops(binary.kernels[kernel]))
    return sorted(loops, key=lambda loop: -sum(map(is_load, loop.code)))


def steady_loop(
    binary: Binary, kernel: str, where: Callable[[Loop], bool] = lambda loop: True
) -> Loop:
    """Returns the innermost loop with the most 16-byte loads per turn that ``where`` accepts."""
    found = [loop for loop in steady_loops(binary, kernel) if where(loop)]
    assert found, f"{kernel}: no such loop loads data"
    return found[0]


def around(binary: Binary, kernel: str, inner: Loop) -> Loop:
    """Returns the smallest loop that encloses ``inner``."""
    outer = [loop for loop in binary.kernels[kernel].loops() if loop.encloses(inner)]
    return min(outer, key=lambda loop: len(loop.code))


@dataclass(frozen=True)
class _Moment:
    """An event of the walk: a wait for loads, or the issue of a load.

    Attributes:
        turn: the number of the turn.
        waits: True for a wait.
        left: loads in flight after the event.
        time: in latencies of one load; other instructions take no time.
    """

    turn: int
    waits: bool
    left: int
    time: float


def _walk(one: Turn) -> Iterator[_Moment]:
    # By scoreboard, the times at which loads in flight return: one latency after their issue.
    flying: dict[int, list[float]] = {}
    now = 0.0
    for number in range(_FIRST_TURNS + _MORE_TURNS):
        for instruction, control in one.steps:
            waited = dict.fromkeys(control.waits, 0)
            if depbar := _DEPBAR.search(instruction.operands):
                waited[int(depbar[1])] = int(depbar[2], 16)
            returned = [
                time
                for scoreboard, may_fly in waited.items()
                for time in _land(flying.get(scoreboard, []), may_fly)
            ]
            if returned:
                now = max(now, *returned)
                yield _Moment(number, True, sum(map(len, flying.values())), now)
            if is_load(instruction):
                assert control.write_scoreboard is not None, f"{instruction}: nothing waits for it"
                flying.setdefault(control.write_scoreboard, []).append(now + 1)
                yield _Moment(number, False, sum(map(len, flying.values())), now)


def _land(flying: list[float], may_fly: int) -> list[float]:
    """Removes and returns a scoreboard's loads, except the last ``may_fly``."""
    landed = flying[: len(flying) - may_fly]
    del flying[: len(landed)]
    return landed


def _steady(one: Turn) -> list[_Moment]:
    return [moment for moment in _walk(one) if moment.turn >= _FIRST_TURNS]


def loads_left_at_waits(one: Turn) -> int:
    """Returns the fewest 16-byte loads still in flight after a wait for such loads.

    If none is left, memory idles until the loop issues the next load.
    """
    return min(moment.left for moment in _steady(one) if moment.waits)


def most_loads_in_flight(one: Turn) -> int:
    """Returns the most 16-byte loads of a lane that are in flight at once."""
    return max(moment.left for moment in _steady(one))


def waits_in_series(one: Turn) -> float:
    """Returns the least time of a turn in load latencies; other instructions take no time.

    Loads that are issued together take one latency. A load that is issued after a wait for other
    loads adds one latency.
    """
    ends = dict.fromkeys(range(_FIRST_TURNS + _MORE_TURNS), 0.0)
    ends |= {moment.turn: moment.time for moment in _walk(one)}
    last, first = _FIRST_TURNS + _MORE_TURNS - 1, _FIRST_TURNS - 1
    return (ends[last] - ends[first]) / _MORE_TURNS


def kib_in_flight(binary: Binary, kernel: str, one: Turn, most_blocks: int = 1) -> float:
    """Returns the most KiB that a multiprocessor has in flight.

    Args:
        binary, kernel: where the loop is.
        one: a turn of the loop.
        most_blocks: the blocks that a launch gives a multiprocessor, if their registers fit.
    """
    threads = binary.thread_bounds[kernel]
    assert threads is not None
    blocks = min(most_blocks, blocks_per_multiprocessor(binary, kernel))
    return most_loads_in_flight(one) * LOAD_BYTES * threads * blocks / KIB


def instructions_per_load(loop: Loop) -> float:
    """Returns the instructions of a loop per 16 bytes that it loads."""
    return len(loop.code) / sum(map(is_load, loop.code))


def opcodes_in(loop: Loop, *names: str) -> int:
    """Counts the instructions of these names, such as ``FCHK``, in a loop."""
    return sum(_name(instruction) in names for instruction in loop.code)


def _name(instruction: Instruction) -> str:
    """Returns the name of an instruction without its modifiers.

    For sm_80, ptxas leaves some loops by a CALL of a label in the same function, which is a jump.
    """
    name = instruction.opcode.partition(".")[0]
    return "BRA" if name == "CALL" and "`(.L_" in instruction.operands else name


def generic_accesses(loop: Loop) -> list[str]:
    """Returns accesses that decide at run time whether an address is in global or shared memory."""
    return [i.opcode for i in loop.code if _GENERIC.match(i.opcode)]
