# SPDX-License-Identifier: Apache-2.0
"""Measures the host's cost of calls on a GPU, in microseconds per call.

driver      entry points of the CUDA driver, called in a C++ loop: a launch with 64, 640 and 4,032
            bytes of parameters, record and wait of an event, the query whether a stream is
            capturing, cudaSetDevice, and the launch of a graph.
calls       collectives of a communicator, with and without async_op and wait(), and collectives of
            2, 4 and 8 ranks in one launch; ratios are relative to torch's add_.

The tensors have 256 FP32 elements, so the device works faster than the host. The device is idle
when a turn begins, and the time ends when the calls have returned. ``ringcomm bench --graph``
measures the device's time.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ringcomm

from .devices import ONE_LAUNCH, CudaDevice
from .launch import LaunchError
from .options import option, positive
from .report import Column, Row, RowTable, row_of
from .run import Bench, Run
from .timing import Call, Device, HostClock, Timing, timed

HOST, TORCH = "host", "torch add_"
DRIVER_CALL = "driver_call"
SYNC, ASYNC, TOGETHER = "sync", "async + wait", "one launch"
WORLDS = (2, 4, 8)
ELEMS = 256
# Parameter bytes of a user's kernel, of a collective, and of a collective that takes lists
# (kernels/cuda/args.h).
PARAMETER_BYTES = (64, 640, 4032)
DRIVER_CALLS = (
    *(f"launch, {size} bytes of parameters" for size in PARAMETER_BYTES),
    *("record an event", "wait for an event", "is the stream capturing", "set the device"),
    "launch of a graph",
)
# Heap bytes for a rank's staging memory and signals.
_RANK_BYTES = 64 << 20
_HEAP_SLACK_BYTES = 256 << 20
_SOURCE = Path(__file__).resolve().parent / "driver_costs.cpp"
_WHY_BYTES = 512


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


TABLE = RowTable(
    "# us per call, until it returns; ratio: over torch's add_, median over rounds",
    (
        Column(" call", "", 22, lambda row: row.collective, right=False),
        Column("how", "", 34, lambda row: row.placement, right=False),
        Column("ranks", "", 5, lambda row: row.ranks),
        Column("system", "", 10, lambda row: row.system, right=False),
    ),
    (
        Column("time", "(us)", 8, lambda row: _us(row.time_us)),
        Column("best", "(us)", 8, lambda row: _us(row.best_us)),
        Column("ratio", "", 6, lambda row: _us(row.ratio)),
    ),
)


def libraries() -> tuple[str, str]:
    """Returns the CUDA driver, and the CUDA runtime that torch has loaded."""
    major = str(torch.version.cuda).partition(".")[0]
    return "libcuda.so.1", f"libcudart.so.{major}"


@cache
def _compiled() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or not _SOURCE.exists():
        told = "a C++ compiler (c++, g++ or $CXX), and ringcomm's source tree"
        raise LaunchError(f"the costs of the driver need {told}; --what calls needs neither")
    with tempfile.TemporaryDirectory(prefix="ringcomm-bench-") as folder:
        file, flags = f"{folder}/driver_costs.so", "-std=c++20 -O2 -shared -fPIC"
        command = [compiler, *flags.split(), str(_SOURCE), "-o", file, "-ldl"]
        compiled = subprocess.run(command, check=False, capture_output=True, text=True)
        if compiled.returncode:
            raise LaunchError(f"{compiler} does not compile {_SOURCE.name}: {compiled.stderr}")
        return ctypes.CDLL(file)


def driver_costs(calls: int, rounds: int, device: int = 0) -> dict[str, Timing]:
    """Times entry points of the driver; returns the times by name.

    Raises:
        LaunchError: no C++ compiler, or the driver returned an error; the message names it.
    """
    us = (ctypes.c_double * (len(DRIVER_CALLS) * rounds))()
    sizes = (ctypes.c_int * len(PARAMETER_BYTES))(*PARAMETER_BYTES)
    why = ctypes.create_string_buffer(_WHY_BYTES)
    driver, runtime = (name.encode() for name in libraries())
    numbers = (device, sizes, len(sizes), calls, rounds, us, why, ctypes.c_size_t(_WHY_BYTES))
    if _compiled().driver_costs(driver, runtime, *numbers):
        raise LaunchError(f"the driver: {why.value.decode()}")
    times = [tuple(us[first : first + rounds]) for first in range(0, len(us), rounds)]
    return {name: Timing(each, calls) for name, each in zip(DRIVER_CALLS, times, strict=True)}


def driver_rows(timings: dict[str, Timing]) -> list[Row]:
    base = row_of(DRIVER_CALL, "", 1, 0, mode=ONE_LAUNCH, system=HOST)
    return [timed(replace(base, placement=name), each, None) for name, each in timings.items()]


def _wait(work: ringcomm.Work | None) -> None:
    assert work is not None
    work.wait()


def calls_of(world: ringcomm.LocalWorld, device: Device) -> dict[tuple[str, str], Call]:
    """Returns the calls of a world of one rank, or collectives of several ranks in one launch."""
    ranks = len(world)
    wholes = [torch.zeros(ELEMS, device=device.tensors) for _ in range(ranks)]
    chunks = [torch.zeros(ELEMS // ranks, device=device.tensors) for _ in range(ranks)]
    if ranks > 1:
        return {
            ("all_reduce", TOGETHER): lambda: world.all_reduce(wholes),
            ("reduce_scatter", TOGETHER): lambda: world.reduce_scatter_tensor(chunks, wholes),
            ("all_gather", TOGETHER): lambda: world.all_gather_into_tensor(wholes, chunks),
        }
    comm, whole, other = world[0], wholes[0], chunks[0]
    return {
        ("all_reduce", SYNC): lambda: comm.all_reduce(whole),
        ("reduce_scatter", SYNC): lambda: comm.reduce_scatter_tensor(other, whole),
        ("all_gather", SYNC): lambda: comm.all_gather_into_tensor(other, whole),
        ("barrier", SYNC): comm.barrier,
        ("all_reduce", ASYNC): lambda: _wait(comm.all_reduce(whole, async_op=True)),
    }


def call_rows(ranks: int, timings: dict[tuple[str, str], Timing], of_torch: Timing) -> list[Row]:
    """Returns a row for each call, and a row for torch's add_, timed in the same rounds."""
    base = row_of("", "", ranks, ELEMS, mode=ONE_LAUNCH)
    rows = [
        timed(replace(base, collective=name, placement=how, system=HOST), each, of_torch)
        for (name, how), each in timings.items()
    ]
    torchs = replace(base, collective="add_", placement=SYNC, system=TORCH)
    return [*rows, timed(torchs, of_torch, None)]


def measure_world(run: Run, device: Device, ranks: int) -> None:
    """Times the calls of a world that has the device to itself, and torch's add_."""
    how: Any = {"device": device.name, "heap_bytes": max(WORLDS) * _RANK_BYTES + _HEAP_SLACK_BYTES}
    with ringcomm.local_world(ranks, **how) as world:
        calls = calls_of(world, device)
        ones = torch.zeros(ELEMS, device=device.tensors)
        by_text = {f"{name}, {how}": call for (name, how), call in calls.items()}
        entrants = {**by_text, TORCH: lambda: ones.add_(0.0)}
        found = run.time(entrants, batch=run.options.calls, device=HostClock(device))
        timings = dict(zip(calls, (found[text] for text in by_text), strict=True))
        run.add(call_rows(ranks, timings, found[TORCH]), TABLE)


def measure(run: Run) -> None:
    asked = run.options
    try:
        gpu = CudaDevice(0)
    except RuntimeError as error:
        raise LaunchError(str(error)) from error
    run.facts = {**gpu.facts(), "mode": ONE_LAUNCH}
    if "driver" in asked.what:
        run.add(driver_rows(driver_costs(asked.calls, asked.rounds)), TABLE)
    if "calls" in asked.what:
        run.pacing.expect(1 + len(WORLDS))
        for ranks in (1, *WORLDS):
            measure_world(run, gpu, ranks)


_WHAT: Sequence[str] = ("driver", "calls")
BENCH = Bench(
    "device_calls",
    __doc__,
    measure,
    (
        option("--what", "which calls to time", nargs="+", choices=_WHAT, default=_WHAT),
        # With async_op a call takes four entries of the driver's queue, which has 1024.
        option("--calls", "calls in a turn", type=positive, default=200),
    ),
    ranks=0,
)
BENCH.run_as_main(__name__)
