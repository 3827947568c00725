"""The optimizer's step on one GPU, against torch's and a copy.

shard       the update of one rank alone: ringcomm; torch's fused AdamW; and a plain copy of as many
            bytes as the update must move. With bfloat16 parameters and FP32 masters, which torch
            serves by casting the gradient, fused AdamW on the masters, and casting the result, that
            is 28 bytes per parameter.
step        a whole step of data parallelism of W ranks in this process, whose gradients and
            parameters all lie on the GPU: ringcomm in one pass, in two passes and as separate
            kernels; and torch's sum of the gradients, fused AdamW, and copies to the ranks.

The time is the device's: it sleeps while the host queues the calls of a turn. Turns for which
that was not long enough are counted in the rows' notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from . import run
from .board import Board
from .device_systems import SHARD, STEP, SUBJECT, KernelCase, Systems
from .devices import ONE_LAUNCH, Device, Gpu
from .launch import LaunchError
from .options import option
from .report import Row, row_of
from .run import Bench, Run
from .timing import Call, Clock, Entrant, Pace, Timing, rows_of
from .timing import measure as time_in_turns

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_WHAT = {"shard": SHARD, "step": STEP}
# About 30 ms: eight threads queue the launches of a few steps in less.
_SLEEP_CYCLES = 50_000_000
_CALLS_PER_TURN = 3
_WARMUP_ROUNDS = 2
# Of the memory that is free; the systems' sizes are known, torch's caching of them is not.
_MEMORY_SHARE = 0.8
_LEAST_ELEMS = 1 << 20

_cuda: Any = torch.cuda


class SleepingClock:
    """Times calls that are queued while the device sleeps, so that it does not wait for the host.

    ``late`` counts the turns in which it did.
    """

    def __init__(self) -> None:
        self.late = 0

    def elapsed_us(self, calls: Iterable[Call]) -> float:
        begin = _cuda.Event(enable_timing=True)
        end = _cuda.Event(enable_timing=True)
        _cuda._sleep(_SLEEP_CYCLES)
        begin.record()
        for call in calls:
            call()
        end.record()
        self.late += bool(begin.query())
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        _cuda.synchronize()


def fitting(case: KernelCase, free_bytes: int) -> KernelCase:
    """``case`` with as many parameters, halved as often as it takes, as the memory holds.

    Raises:
        RuntimeError: not even a Mi of them.
    """
    while case.memory_bytes > _MEMORY_SHARE * free_bytes:
        case = replace(case, elems=case.elems // 2)
        if case.elems < _LEAST_ELEMS:
            raise RuntimeError(f"{free_bytes} bytes of memory are too few for {case}")
    return case


def run_case(case: KernelCase, device: Device, clock: Clock, rounds: int) -> list[Row]:
    """Times all systems of the case, in turns."""
    pace = Pace(rounds, _WARMUP_ROUNDS, _CALLS_PER_TURN, turn_us=0)
    systems = Systems(case, device)
    entrants = {name: Entrant([call]) for name, call in systems.calls.items()}
    try:
        timings = time_in_turns(Board(dist.HashStore(), 0, 1), entrants, pace, clock)
    finally:
        entrants.clear()
        systems.close()
    late = getattr(clock, "late", 0)
    return case_rows(case, timings, f"{late} turns were queued too late" if late else "")


def case_rows(case: KernelCase, timings: Mapping[str, Timing], note: str = "") -> list[Row]:
    """A row per system; ``algbw_gbps`` of a shard counts the bytes that its update must move."""
    op = "none" if case.what == SHARD else "avg"
    base = row_of(case.what, "in", case.world, case.elems, case.dtype, op=op, mode=ONE_LAUNCH)
    moved_bytes = case.bytes_per_parameter * case.elems if case.what == SHARD else 0
    return [
        replace(row, note=note, algbw_gbps=round(moved_bytes / row.time_us / 1e3, 4) or None)
        for row in rows_of(base, timings, SUBJECT)
        if row.time_us
    ]


def measure(run: Run) -> None:
    asked = run.options
    case = KernelCase(
        _WHAT[asked.what],
        _DTYPES[asked.dtype],
        asked.millions << 20,
        asked.ranks if asked.what == "step" else 1,
    )
    try:
        gpu = Gpu(0)
    except RuntimeError as error:
        raise LaunchError(str(error)) from error
    # It copies between two large tensors, which are to be gone before memory is dealt out.
    run.facts = {**gpu.facts(), "mode": ONE_LAUNCH}
    _cuda.empty_cache()
    case = fitting(case, int(_cuda.mem_get_info(0)[0]))
    run.add(run_case(case, gpu, SleepingClock(), asked.rounds))


BENCH = Bench(
    "device_steps",
    __doc__,
    measure,
    (
        option("what", choices=tuple(_WHAT)),
        option("-n --ranks", type=int, default=2, choices=(2, 4, 8), help="of a step"),
        option("-m --millions", type=int, default=256, help="Mi parameters, if memory holds it"),
        option("-d --dtype", default="bfloat16", choices=tuple(_DTYPES)),
    ),
    ranks=0,
)
parse = BENCH.parse

if __name__ == "__main__":
    run.run_process(BENCH)
