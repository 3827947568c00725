# SPDX-License-Identifier: Apache-2.0
"""A roofline model of ringcomm's calls on one GPU that all ranks share: ``python -m bench.model``.

A call takes max(host, fixed + the sum over its parts of bytes / min(memory, in flight / latency)).
The host's time is measured: the time of the same call with few bytes. Bytes are counted in the
algorithms, and the bytes in flight per multiprocessor are read from machine code
(tests/support/cuda_loop_measures.py). The eight other numbers are :class:`Constants`: half of the
recorded rows (every second row of a system) determine them, and the model predicts the other half.
All rows were used to decide which eight these are. The model predicts 60 of these 61 rows within
a tenth; it underestimates a step of two ranks by 14 %. With the halves exchanged, it predicts 54
of 56 rows within a tenth; it overestimates a step of eight ranks by 32 %, and the same step by
separate kernels by 16 %.

These rows are excluded, by rules that do not depend on the prediction:

not modelled    Triton's kernels and torch's fused AdamW, whose bytes in flight are not counted, and
                the optimizer's two passes, since the first pass has loops of several kinds.
host            the call took less than 1.3 times as long as with a quarter of the bytes.
unsettled       the median is more than a tenth above the fastest round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ringcomm.cli import table_lines

from .cases import needed_buffers
from .device_steps import COPY, SEPARATE, SHARD, STEP, SUBJECT
from .report import Row, read, size_label

RECORDED = Path(__file__).parent / "results" / "gpu-nvidia-h100-80gb-hbm3-2026-11-26.csv"
FROM_BYTES = 16 << 20
KIB = 1024
MULTIPROCESSORS = 132
# Multiprocessors per rank that are reserved for messages between ranks.
FOR_MESSAGES = 2
STATE_BYTES = 6 * 4  # per element: two moments and a parameter in FP32, each read and written
HOST_BOUND, SETTLED = 1.3, 1.1
RING, TORCH = "ringcomm:ring", "torch"
# The recorded rows use the name "direct" for "one_shot".
ONE_SHOT = (SUBJECT, "ringcomm:direct", "ringcomm:one_shot")


@dataclass(frozen=True)
class Constants:
    """The fitted numbers.

    Attributes:
        memory: the memory's highest rate for reads and writes, in bytes per microsecond.
        latency_us: latency of a load when few loads are in flight.
        multiprocessor: B bytes in flight add B / multiprocessor microseconds to the latency.
        trip_us: fixed time of a call per rank, and per hop after the first.
        torch_us: fixed time of an operation of torch.
        hand_over: cost of passing a chunk from rank to rank within a call, in reads of the chunk.
        forward: the same cost in a ring's all-gather, which forwards chunks without adding.
        read_again: cost of reading bytes that another rank also reads, relative to a first read.
    """

    memory: float
    latency_us: float
    multiprocessor: float
    trip_us: float
    torch_us: float
    hand_over: float
    forward: float
    read_again: float


H100 = Constants(2.933e6, 0.576, 27.93e3, 4.24, 3.44, 0.920, 0.845, 0.722)


@dataclass(frozen=True)
class InFlight:
    """The most KiB that a multiprocessor has in flight, by loop.

    Attributes:
        reduce: reductions, by dtype.
        copy: copies.
        shard: updates without peers, for the two blocks on a multiprocessor together.
        sources: a step's loop over the peers' gradients.
        state: a step's loop over the state and the rank's own gradient.
    """

    reduce: Mapping[str, float]
    copy: float
    shard: float
    sources: float
    state: float


# The loops of the recorded rows, which RINGCOMM_KERNELS=serial selects.
SERIAL = InFlight({"float": 32, "bfloat16": 16}, copy=32, shard=72, sources=8, state=32)


def blocks(ranks: int) -> int:
    """Returns the number of blocks of all ranks of one GPU together, one per multiprocessor."""
    alone = MULTIPROCESSORS if ranks == 1 else 0
    return alone or (MULTIPROCESSORS // ranks - FOR_MESSAGES) * ranks


def bytes_per_us(kib: float, ranks: int, constants: Constants = H100) -> float:
    """Returns the rate with ``kib`` in flight per multiprocessor, at most the memory's rate."""
    latency_us = constants.latency_us + kib * KIB / constants.multiprocessor
    return min(constants.memory, blocks(ranks) * kib * KIB / latency_us)


def device_us(row: Row, constants: Constants = H100, in_flight: InFlight = SERIAL) -> float | None:
    """Predicts the device's time for a row; None for a system that is not modelled."""
    if row.collective in (SHARD, STEP):
        return _optimizer_us(row, constants, in_flight)
    buffers = _buffers(row.collective, row.system, row.ranks, constants)
    if buffers is None:
        return None
    if row.system in (COPY, TORCH):
        operations = 2 if (row.collective, row.system) == ("all_reduce", TORCH) else 1
        return operations * constants.torch_us + buffers * row.size_bytes / constants.memory
    # The copies of an all-reduce have as many bytes in flight as its reductions.
    kib = in_flight.copy if row.collective == "all_gather" else in_flight.reduce[row.dtype]
    speed = bytes_per_us(kib, row.ranks, constants)
    trips = row.ranks + _hops(row.collective, row.system, row.ranks) - 1
    return trips * constants.trip_us + buffers * row.size_bytes / speed


def _hops(collective: str, system: str, world: int) -> int:
    each = world - 1 if system == RING else 1
    return 2 * each if collective == "all_reduce" else each


def _buffers(collective: str, system: str, world: int, constants: Constants) -> float | None:
    """Returns a call's bytes in units of its buffer, including the costs of hand-overs."""
    hops, needed = world - 1, needed_buffers(collective, world)
    gathered = world + 1 + hops * constants.read_again
    if needed is None:
        return None
    if system == COPY:
        return needed
    if system == TORCH:  # an all-reduce first stores the sum in a separate buffer
        return needed + (2 if collective == "all_reduce" else 0)
    if system in ONE_SHOT:
        if collective == "all_gather":
            return gathered
        return needed + (constants.hand_over if collective == "all_reduce" else 0)
    if system == RING:
        reduced = 3 * world - 1 + hops * constants.hand_over
        forwarded = hops * (1 + constants.read_again + constants.forward)
        return {
            "reduce_scatter": reduced,
            "all_gather": gathered + hops * constants.forward,
            "all_reduce": reduced + forwarded,
        }[collective]
    return None


def _optimizer_us(row: Row, constants: Constants, in_flight: InFlight) -> float | None:
    """Like :func:`device_us`, for updates of 16-bit parameters with FP32 masters."""
    elems, world, wide = row.count, row.ranks, row.size_bytes // row.count
    fixed_us = world * constants.trip_us

    def us(bytes_each: float, kib: float, ranks: int = world) -> float:
        return elems * bytes_each / bytes_per_us(kib, ranks, constants)

    shard_us = us(STATE_BYTES + 2 * wide, in_flight.shard, 1)
    if row.system == COPY:
        bytes_each = STATE_BYTES + 2 * wide
        return constants.torch_us + elems * bytes_each / constants.memory
    if row.system == SUBJECT and row.collective == SHARD:
        return fixed_us + shard_us
    if row.system == SUBJECT:
        # A rank reads its own gradient together with the state, and does not wait for stores.
        sources_us = us(wide * (world - 1), in_flight.sources)
        stored_us = elems * wide * world / constants.memory
        return fixed_us + sources_us + us(STATE_BYTES + wide, in_flight.state) + stored_us
    if row.system == SEPARATE:
        gathered = world + 1 + (world - 1) * constants.read_again
        reduced_us = us(wide * (world + 1), in_flight.reduce[row.dtype])
        return 3 * fixed_us + reduced_us + shard_us + us(wide * gathered, in_flight.copy)
    return None


def bound_us(row: Row, copy_bytes_per_us: float) -> float | None:
    """Returns the time to copy the bytes that a call must move; None if they are not counted."""
    wide = row.size_bytes // max(row.count, 1)
    if row.collective in (SHARD, STEP):
        each = {SHARD: 2 * wide, STEP: 2 * wide * row.ranks}[row.collective] + STATE_BYTES
        return row.count * each / copy_bytes_per_us
    needed = needed_buffers(row.collective, row.ranks)
    return None if needed is None else needed * row.size_bytes / copy_bytes_per_us


# ---- rows ----------------------------

DEVICE, HOST, UNSETTLED, NOT_MODELLED = "device", "host", "unsettled", "not modelled"
Key = tuple[str, str, int, str, str, int]


def _key(row: Row, size_bytes: int) -> Key:
    return row.collective, row.system, row.ranks, row.placement, row.dtype, size_bytes


@dataclass(frozen=True)
class Predicted:
    """A recorded row and its prediction; ``kind`` has the row's limit, or why it is excluded."""

    row: Row
    kind: str
    host_us: float
    constants: Constants = H100

    @property
    def us(self) -> float:
        return max(self.host_us, device_us(self.row, self.constants) or 0.0)

    @property
    def error(self) -> float:
        """The relative error of the prediction; positive if the prediction is too long."""
        assert self.row.time_us
        return self.us / self.row.time_us - 1


def recorded(path: Path = RECORDED) -> list[Predicted]:
    """Returns the rows of a result file of at least 16 MiB, without graphs, in the file's order."""
    rows = [row for row in read(path).rows if row.time_us and not row.graph_calls]
    times = {_key(row, row.size_bytes): row.time_us or 0.0 for row in rows}
    found = []
    for row in rows:
        if row.size_bytes < FROM_BYTES:
            continue
        few = times.get(_key(row, FROM_BYTES // 4), 0.0)
        quarter = times.get(_key(row, row.size_bytes // 4), 0.0)
        found.append(Predicted(row, kind_of(row, quarter), few))
    return found


def kind_of(row: Row, quarter_us: float) -> str:
    """Returns the kind of a row; ``quarter_us`` is the time with a quarter of its bytes."""
    assert row.time_us and row.best_us
    if device_us(row) is None:
        return NOT_MODELLED
    if row.time_us < HOST_BOUND * quarter_us:
        return HOST
    return DEVICE if row.time_us <= SETTLED * row.best_us else UNSETTLED


def halves(rows: Sequence[Predicted]) -> tuple[list[Predicted], list[Predicted]]:
    """Returns the rows for the fit (every second row of a system), and the other rows."""
    seen: Counter[str] = Counter()
    fit: list[Predicted] = []
    between: list[Predicted] = []
    for each in rows:
        seen[each.row.system] += 1
        (between if seen[each.row.system] % 2 else fit).append(each)
    return fit, between


def limited_by_device(rows: Iterable[Predicted]) -> list[Predicted]:
    return [each for each in rows if each.kind == DEVICE]


# ---- fit ----------------------------


def loss(rows: Sequence[Predicted], constants: Constants) -> float:
    """Returns the sum of log(1 + error) ** 4, in which the largest errors weigh most."""
    predictions = (replace(each, constants=constants) for each in rows)
    return sum(math.log1p(each.error) ** 4 for each in predictions)


def fitted(rows: Sequence[Predicted], start: Constants = H100, step: float = 0.1) -> Constants:
    """Returns the constants near ``start`` with the least loss, to a relative precision of 1e-3."""
    best = start
    least = loss(rows, best)
    while step > 1e-3:
        before = least
        for move in _moves(step):
            tried = move(best)
            found = loss(rows, tried)
            if found < least:
                best, least = tried, found
        step = step if least < before else step / 2
    return best


def _moves(step: float) -> list[Callable[[Constants], Constants]]:
    """Returns functions that change one constant, or two constants together, by ``step``."""
    names = [field.name for field in fields(Constants)]
    factors = [1 + step, 1 / (1 + step)]
    alone: list[dict[str, float]] = [{name: factor} for name in names for factor in factors]
    pairs = [a | b for a in alone for b in alone if a.keys() < (a | b).keys()]

    def move(changes: Mapping[str, float]) -> Callable[[Constants], Constants]:
        return lambda constants: replace(
            constants,
            **{name: getattr(constants, name) * factor for name, factor in changes.items()},
        )

    return [move(changes) for changes in [*alone, *pairs]]


# ---- table ----------------------------


def lines(rows: Sequence[Predicted]) -> list[str]:
    """Returns a table of all predictions, and a summary of the errors by half and kind."""
    fit, between = halves(rows)
    table = [("call", "ranks", "size", "system", "us", "predicted", "error", "kind", "half")]
    for each in rows:
        row, half = each.row, "fitted" if each in fit else "predicted"
        known = device_us(row) is not None
        told = (f"{each.us:.0f}", f"{each.error:+.1%}") if known else ("-", "-")
        size = size_label(row.size_bytes)
        call = (row.collective, str(row.ranks), size, row.system, f"{row.time_us:.0f}")
        table.append((*call, *told, each.kind, half))
    summary = [("half", "kind", "rows", "within 10 %", "largest error")]
    for name, half_rows in (("fitted", fit), ("predicted", between)):
        for kind in (DEVICE, HOST, UNSETTLED):
            errors = [abs(each.error) for each in half_rows if each.kind == kind]
            within = sum(error <= 0.1 for error in errors)
            most = f"{max(errors, default=0):.1%}"
            summary.append((name, kind, str(len(errors)), str(within), most))
    left = sum(each.kind == NOT_MODELLED for each in rows)
    return [*table_lines(table), "", *table_lines(summary), "", f"not modelled: {left} rows"]


if __name__ == "__main__":
    print("\n".join(lines(recorded())))
