# SPDX-License-Identifier: Apache-2.0
"""Bounds on the speed of kernels that machine code shows: bars, which the serial loops miss.

``make test`` compiles float32 sums and an optimizer step; ``make cuda-compile`` compiles every
kernel that has a bar.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from ringcomm.bench import model
from ringcomm.cuda.units import BATCHED, SERIAL
from tests.support import cuda_code
from tests.support import cuda_loop_measures as measures
from tests.support.cuda_checks import traffic
from tests.support.cuda_code import Binary, Loop, compile_text, unit_source

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS),
    pytest.mark.timeout(600),
]

EVERYTHING = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
TARGET = "sm_90a"
SUMS, SUMS_OF_16_BITS, SCATTER = "reduce_float32/sum", "reduce_bfloat16/sum", ("reduce_scatter",)
STEPS, FORMS = "adamw_bfloat16/bfloat16", ("adamw_step", "adamw_many")
NORM = "adamw_bfloat16/norm"


class Place(NamedTuple):
    """A loop of a kernel, as it runs with a given number of ranks."""

    binary: Binary
    kernel: str
    loop: Loop
    world: int

    @property
    def turn(self) -> measures.Turn:
        return measures.turn(self.binary, self.kernel, self.loop)


# ---- measures ----------------------------


def left_at_waits(place: Place) -> float:
    """Returns the number of 16-byte loads that are still in flight behind each wait."""
    return measures.loads_left_at_waits(place.turn)


def kib_in_flight(place: Place) -> float:
    """Returns the KiB in flight on a multiprocessor with one block."""
    return measures.kib_in_flight(place.binary, place.kernel, place.turn)


def instructions_per_load(place: Place) -> float:
    return measures.instructions_per_load(place.loop)


def waits_in_series(place: Place) -> float:
    """Returns the load latencies that a turn waits for, or the turn around a loop over sources."""
    whole = place.loop
    if not traffic(whole).stores:
        whole = measures.around(place.binary, place.kernel, whole)
    turn = measures.turn(place.binary, place.kernel, whole, place.world - 1)
    return measures.waits_in_series(turn)


def length(place: Place) -> float:
    return len(place.loop.code)


def length_per_element(place: Place) -> float:
    """Returns the instructions per 16-bit parameter; 8 parameters share six vectors of state."""
    vectors = traffic(place.loop).stores // (6 + place.world)
    return len(place.loop.code) / (8 * max(vectors, 1))


def registers(place: Place) -> float:
    """Registers of a lane."""
    found = place.binary.resources[place.kernel].registers
    assert found is not None
    return found


def stack_bytes(place: Place) -> float:
    """Returns the bytes of a lane's stack, where ptxas keeps values that found no register."""
    return place.binary.resources[place.kernel].stack_bytes


def checked_divisions(place: Place) -> float:
    """Returns the number of divisions that have a slow path of their own."""
    return measures.opcodes_in(place.loop, "FCHK")


def generic_accesses(place: Place) -> float:
    """Returns the number of accesses that test at run time whether they address shared memory."""
    return len(measures.generic_accesses(place.loop))


# ---- loops ----------------------------


def sum_loops(binary: Binary, kernel: str, world: int) -> list[Loop]:
    """Returns the loops that add up ``world`` sources: with and without a factor for averages.

    The serial loops read any number of sources, one after the other. Loops for turns with partial
    vectors are left out; those compare the position of each vector.
    """
    found = [loop for loop in measures.steady_loops(binary, kernel) if traffic(loop).computes]
    of_world = [loop for loop in found if loads(loop) == world * traffic(loop).stores]
    whole = [loop for loop in of_world if measures.opcodes_in(loop, "ISETP") <= 2]
    return whole or found[:1]


def sum_loop(binary: Binary, kernel: str, world: int) -> Loop:
    """Returns the shortest loop, which applies no factor."""
    return min(sum_loops(binary, kernel, world), key=lambda loop: len(loop.code))


def drained_sum_loop(binary: Binary, kernel: str, world: int) -> Loop:
    """Returns the loop with the fewest loads in flight at one of its waits."""
    found = sum_loops(binary, kernel, world)
    return min(found, key=lambda loop: left_at_waits(Place(binary, kernel, loop, world)))


def step_loop(binary: Binary, kernel: str, world: int) -> Loop:
    """Returns the loop that updates 8 elements per lane: a gradient per rank, six vectors of state.

    Among serial loops that is the longest, whose inner loops read the sources.
    """
    found = measures.steady_loops(binary, kernel)
    of_world = [loop for loop in found if loads(loop) == traffic(loop).stores == world + 6]
    if of_world:
        return smoothest(binary, kernel, of_world)
    outer = [measures.around(binary, kernel, loop) for loop in found if traffic(loop).computes]
    return max(outer, key=lambda loop: len(loop.code))


def norm_loop(binary: Binary, kernel: str, world: int) -> Loop:
    """Returns the loop that adds up eight sources at once, or one source in the serial form."""
    assert world == 8
    return measures.steady_loop(binary, kernel)


def copy_loop(binary: Binary, kernel: str, world: int) -> Loop:
    found = measures.steady_loops(binary, kernel)
    copies = [loop for loop in found if loads(loop) == traffic(loop).stores]
    plain = [loop for loop in copies if not traffic(loop).computes]
    most = max(map(loads, plain))
    return smoothest(binary, kernel, [loop for loop in plain if loads(loop) == most])


def loads(loop: Loop) -> int:
    return sum(map(measures.is_load, loop.code))


def smoothest(binary: Binary, kernel: str, found: list[Loop]) -> Loop:
    """Returns the copy of a loop that drains the least, among copies for aligned and other data."""

    def drained(loop: Loop) -> tuple[int, int]:
        left = measures.loads_left_at_waits(measures.turn(binary, kernel, loop))
        return -left, len(loop.code)

    return min(found, key=drained)


# ---- bars ----------------------------


class Bar(NamedTuple):
    measure: Callable[[Place], float]
    sign: str
    limit: float

    def holds(self, value: float) -> bool:
        return bool({">=": operator.ge, "<=": operator.le}[self.sign](value, self.limit))


class Row(NamedTuple):
    """A kernel with its loop for a number of ranks, and the bars of that loop."""

    unit: str
    forms: tuple[str, ...]
    kernel: str
    world: int
    pick: Callable[[Binary, str, int], Loop]
    bars: tuple[Bar, ...]
    in_test: bool = True

    def place(self, loops: str) -> Place:
        binary = compiled(self.unit, self.forms, loops)
        # All numbers of ranks share the same serial kernel.
        name = self.kernel.replace("_many_", "_step_") if loops == SERIAL else self.kernel
        return Place(binary, name, self.pick(binary, name, self.world), self.world)


DRAIN, IN_FLIGHT = Bar(left_at_waits, ">=", 4), Bar(kib_in_flight, ">=", 96)
SUM_BARS = (Bar(instructions_per_load, "<=", 8), Bar(generic_accesses, "<=", 0))
COPY_BARS = (DRAIN, IN_FLIGHT, Bar(instructions_per_load, "<=", 6))
SERIES = Bar(waits_in_series, "<=", 1)
STEP_BARS = (
    *(Bar(length, "<=", 512), Bar(checked_divisions, "<=", 0), SERIES),
    *(Bar(kib_in_flight, ">=", 84), Bar(stack_bytes, "<=", 0)),
)
# 80 registers allow blocks of 768 threads; with 72, code around the loop needs 40 bytes of stack.
STEP_BARS_OF_2 = (*STEP_BARS, Bar(length_per_element, "<=", 45), Bar(registers, "<=", 80))
NORM_BARS = (SERIES, Bar(kib_in_flight, ">=", 64))


def sum_rows(unit: str, world: int, bars: tuple[Bar, ...], in_test: bool = True) -> tuple[Row, Row]:
    """Returns the rows of a reduce-scatter: ``bars`` hold for its shortest loop."""
    kernel = "rc_reduce_scatter_sum"
    # The serial loops, too, add two sources in one wait, so world 2 has no such bar.
    flight = (DRAIN, IN_FLIGHT, *((SERIES,) if world > 2 else ()))
    return (
        Row(unit, SCATTER, kernel, world, drained_sum_loop, flight, in_test),
        Row(unit, SCATTER, kernel, world, sum_loop, bars, in_test),
    )


ROWS = (
    *sum_rows(SUMS, 2, SUM_BARS),
    *sum_rows(SUMS, 4, SUM_BARS),
    *sum_rows(SUMS, 8, SUM_BARS),
    # Two bfloat16 sources are added as pairs. Sums of more sources use FP32: each element of a
    # source is widened and added, so a loop needs 17.8 instructions per load for 4 sources, 19.2
    # for 8.
    *sum_rows(SUMS_OF_16_BITS, 2, SUM_BARS, in_test=False),
    *sum_rows(SUMS_OF_16_BITS, 4, (Bar(instructions_per_load, "<=", 18),), in_test=False),
    *sum_rows(SUMS_OF_16_BITS, 8, (Bar(instructions_per_load, "<=", 20),), in_test=False),
    Row(SUMS, SCATTER, "rc_reduce_scatter_sum", 1, copy_loop, COPY_BARS),
    Row("move", (), "rc_move", 1, copy_loop, COPY_BARS, in_test=False),
    Row(STEPS, FORMS, "rc_adamw_step_bfloat16", 2, step_loop, STEP_BARS_OF_2),
    Row(STEPS, FORMS, "rc_adamw_many_bfloat16", 4, step_loop, STEP_BARS, in_test=False),
    Row(STEPS, FORMS, "rc_adamw_many_bfloat16", 8, step_loop, STEP_BARS, in_test=False),
    Row(NORM, SCATTER, "rc_reduce_scatter_norm", 8, norm_loop, NORM_BARS, in_test=False),
)
CASES = [(row, bar) for row in ROWS if EVERYTHING or row.in_test for bar in row.bars]
# The serial step takes longer to compile than all others.
SERIAL_CASES = [(row, bar) for row, bar in CASES if EVERYTHING or row.unit != STEPS]


def named(cases: list[tuple[Row, Bar]]) -> list[str]:
    return [
        f"{row.unit.partition('/')[0]}-{row.kernel}-{row.world}-{bar.measure.__name__}"
        for row, bar in cases
    ]


# A line of the macro that defines a kernel for each operator or dtype.
_OF_A_MACRO = re.compile(r"^ +RC_(?:\w+_)?KERNEL(?:_\w+)?\(.*\brc_(\w+)_##name,.*$", re.MULTILINE)


@cache
def compiled(unit: str, forms: tuple[str, ...], loops: str) -> Binary:
    """Compiles the kernels of a unit; of those defined per operator or dtype only ``forms``."""
    text, headers, macros = unit_source(unit, loops)

    def kept(line: re.Match[str]) -> str:
        return line[0] if line[1] in forms else " \\" if line[0].endswith("\\") else ""

    return compile_text(_OF_A_MACRO.sub(kept, text), TARGET, headers, macros)


@pytest.mark.parametrize(("row", "bar"), CASES, ids=named(CASES))
def test_a_bar_is_reached(row, bar):
    found = bar.measure(row.place(BATCHED))
    assert bar.holds(found), found


@pytest.mark.parametrize(("row", "bar"), SERIAL_CASES, ids=named(SERIAL_CASES))
def test_serial_loops_miss_it(row, bar):
    found = bar.measure(row.place(SERIAL))
    assert not bar.holds(found), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_roofline_has_what_serial_loops_have_in_flight(dtype):
    binary = compiled(f"reduce_{dtype}/sum", SCATTER, SERIAL)
    kernel = "rc_reduce_scatter_sum"
    loops = {"reduce": sum_loop(binary, kernel, 2), "copy": copy_loop(binary, kernel, 1)}
    kib = {what: kib_in_flight(Place(binary, kernel, loop, 2)) for what, loop in loops.items()}
    named = {"float32": "float"}.get(dtype, dtype)
    assert kib == {"reduce": model.SERIAL.reduce[named], "copy": model.SERIAL.copy}


@pytest.mark.skipif(not EVERYTHING, reason="compiles the serial step: make cuda-compile")
def test_the_roofline_has_what_serial_steps_have_in_flight():
    binary = compiled(STEPS, ("adamw_step", "adamw_shard"), SERIAL)
    step, shard = "rc_adamw_step_bfloat16", "rc_adamw_shard_bfloat16"
    # The loop over the sources of 8 elements loads two vectors per source.
    (sources,) = (
        loop
        for loop in measures.steady_loops(binary, step)
        if sum(map(measures.is_load, loop.code)) == 2 and traffic(loop).computes
    )
    state = measures.around(binary, step, sources)
    alone = measures.steady_loops(binary, shard)[0]

    def kib(kernel: str, loop: Loop, blocks: int = 1) -> float:
        one = measures.turn(binary, kernel, loop)
        return measures.kib_in_flight(binary, kernel, one, blocks)

    found = model.SERIAL
    assert kib(step, sources) == found.sources
    assert kib(step, state) == found.state
    assert kib(shard, alone, blocks=2) == found.shard
