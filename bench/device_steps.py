"""The optimizer's step on one GPU, against torch's and a copy.

``python -m ringcomm.bench.device_steps`` runs it.

What is timed, each in one run and interleaved (see :mod:`.timing`):

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

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm

from . import provenance
from .board import Board
from .device_systems import SHARD, STEP, SUBJECT, KernelCase, Systems
from .devices import Device, Gpu
from .modes import ONE_LAUNCH
from .report import Report, Row, write_csv, write_json
from .session import quartiles
from .timing import Call, Clock, Entrant, Pace, Timing, measure, ratios

NO_GPU_STATUS = 2
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
        timings = measure(Board(dist.HashStore(), 0, 1), entrants, pace, clock)
    finally:
        entrants.clear()
        systems.close()
    late = getattr(clock, "late", 0)
    return rows_of(case, timings, f"{late} turns were queued too late" if late else "")


def rows_of(case: KernelCase, timings: Mapping[str, Timing], note: str = "") -> list[Row]:
    """A row per system; ``algbw_gbps`` of a shard counts the bytes that its update must move."""
    moved_bytes = case.bytes_per_parameter * case.elems
    rows = []
    for name, timing in timings.items():
        low, middle, high = quartiles(ratios(timing, timings[SUBJECT]))
        rows.append(
            Row(
                collective=case.what,
                size_bytes=case.elems * case.dtype.itemsize,
                count=case.elems,
                dtype=str(case.dtype).removeprefix("torch."),
                op="none" if case.what == SHARD else "avg",
                root=-1,
                ranks=case.world,
                system=name,
                placement="in",
                time_us=round(timing.median_us, 3),
                best_us=round(timing.best_us, 3),
                algbw_gbps=(
                    round(moved_bytes / timing.median_us / 1e3, 4) if case.what == SHARD else None
                ),
                ratio=middle,
                ratio_low=low,
                ratio_high=high,
                rounds=len(timing.times_us),
                batch=timing.batch,
                note=note,
                mode=ONE_LAUNCH,
            )
        )
    return rows


def _line(row: Row) -> str:
    speed = "" if row.algbw_gbps is None else f"{row.algbw_gbps:9.1f} GB/s"
    return (
        f"{row.collective:<12} {row.ranks} ranks {row.count / 2**20:7g} Mi {row.dtype:<9} "
        f"{row.system:<17} {row.time_us:10.1f} us  ratio {row.ratio:6.3f} {speed} {row.note}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line: ``what``, ``ranks``, ``millions``, ``dtype``, ``rounds`` and files."""
    parser = argparse.ArgumentParser(
        prog="python -m ringcomm.bench.device_steps", description=__doc__
    )
    parser.add_argument("what", choices=tuple(_WHAT))
    parser.add_argument("-n", "--ranks", type=int, default=2, choices=(2, 4, 8), help="of a step")
    parser.add_argument(
        "-m", "--millions", type=int, default=256, help="Mi parameters, if memory holds them"
    )
    parser.add_argument("-d", "--dtype", default="bfloat16", choices=tuple(_DTYPES))
    parser.add_argument("-r", "--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="a file of rows and where they come from")
    parser.add_argument("--csv", type=Path, help="the same as CSV")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 2 without a usable GPU."""
    asked = parse(arguments)
    world = asked.ranks if asked.what == "step" else 1
    case = KernelCase(_WHAT[asked.what], _DTYPES[asked.dtype], asked.millions << 20, world)
    try:
        gpu = Gpu(0)
    except RuntimeError as error:
        print(f"device_steps: {error}")
        return NO_GPU_STATUS
    # It copies between two large tensors, which are to be gone before memory is dealt out.
    facts = gpu.facts()
    _cuda.empty_cache()
    case = fitting(case, int(_cuda.mem_get_info(0)[0]))
    words = list(sys.argv[1:] if arguments is None else arguments)
    versions = {SUBJECT: ringcomm.__version__}
    collected = provenance.collect(words, versions, {**facts, "mode": ONE_LAUNCH})
    collected["command"] = collected["command"].replace(
        "ringcomm bench", "python -m ringcomm.bench.device_steps"
    )
    report = Report(collected, run_case(case, gpu, SleepingClock(), asked.rounds))
    print("\n".join(map(_line, report.rows)))
    if asked.json:
        write_json(report, asked.json)
    if asked.csv:
        write_csv(report, asked.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
