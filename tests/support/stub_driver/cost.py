# SPDX-License-Identifier: Apache-2.0
"""Prints what calls on a device cost the host: ``python -m tests.support.stub_driver.cost``.

All calls use a driver that does nothing. Times are CPU times of the thread, the minimum of five
rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ringcomm
from ringcomm import Communicator, cuda
from ringcomm.cli import table_lines
from ringcomm.optim import AdamW
from ringcomm.optim.backends import DeviceBackend
from ringcomm.optim.gradients import NORM_WORDS, Into
from tests.support.stub_driver import StubDriver, StubRuntime

LIBRARY = str(Path(ringcomm.__file__).parent)
ROUNDS, CALLS = 5, 20_000


def frames_of(call: Callable[[], object]) -> int:
    """Returns how many of ringcomm's Python functions run in a call."""
    found = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def driver_calls_of(driver: StubDriver, call: Callable[[], object]) -> dict[str, int]:
    """Returns how often a call enters the driver, by entry point."""
    driver.reset()
    call()
    return driver.counted()


def microseconds_of(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        best = min(best, time.thread_time() - begin)
    return best / CALLS * 1e6


def wait(work: ringcomm.Work | None) -> None:
    assert work is not None
    work.wait()


def calls_of(comm: Communicator) -> dict[str, Callable[[], object]]:
    """Returns the measured calls, by their names in the table."""
    tensor, other = torch.ones(1024), torch.ones(1024)
    return {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(other, tensor),
        "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(other, tensor),
        "broadcast": lambda: comm.broadcast(tensor, 0),
        "barrier": comm.barrier,
        "plan of all_reduce": comm.plan_all_reduce(tensor),
        "all_reduce, async, wait": lambda: wait(comm.all_reduce(tensor, async_op=True)),
        "broadcast, async, wait": lambda: wait(comm.broadcast(tensor, 0, async_op=True)),
        "barrier, async, wait": lambda: wait(comm.barrier(async_op=True)),
    }


def step_calls_of(comm: Communicator) -> dict[str, Callable[[], object]]:
    """Returns the calls of an optimizer's step on one bucket, by their names in the table.

    An optimizer on a single rank makes only the first four.
    """
    param = torch.nn.Parameter(torch.ones(1024))
    step = AdamW([param], comm=comm).sharded_step()
    backend, (bucket,) = step.plan.backend, step.buckets
    assert isinstance(backend, DeviceBackend)
    grads, words = torch.ones(bucket.layout.elems), torch.zeros(NORM_WORDS, dtype=torch.int64)
    into = Into(torch.zeros(bucket.chunk.elems), "l2", words, tag=1, zeroed=True)
    reducer = backend.reducer
    return {
        "adamw_prepare": lambda: backend.begin(step.table),
        "adamw_shard": lambda: backend._update(bucket, grads),
        "grad_norm": lambda: reducer.norm(grads, "l2", words),
        "reduce_scatter_norm": lambda: reducer.reduce(grads, into),
        "adamw_all_gather": lambda: backend._update_gather(bucket, grads),
        "reduce_scatter_adamw_all_gather": lambda: backend._one_pass(bucket, grads),
        "reduce_scatter_norm, async, wait": lambda: wait(
            reducer.reduce(grads, into, async_op=True)
        ),
    }


def row_of(runtime: StubRuntime, name: str, call: Callable[[], object]) -> tuple[str, ...]:
    """Returns a row of the table."""
    for _ in range(3):
        call()
    driver = driver_calls_of(runtime.driver, call)
    entered = ", ".join(f"{count} {entry}" for entry, count in driver.items())
    return name, str(frames_of(call)), entered, f"{microseconds_of(call):.2f}"


def triton_rows(runtime: StubRuntime) -> list[tuple[str, ...]]:
    """Returns rows of calls that use Triton's kernels; Triton compiles these first."""
    from tests.support.triton_device import StandIn, executed

    options = ringcomm.CommOptions(kernels="triton")
    with (
        executed(StandIn(90)),
        ringcomm.local_world(1, options=options, device="cuda:0") as (comm,),
    ):
        return [
            row_of(runtime, f"Triton: {name}", call)
            for name, call in calls_of(comm).items()
            if "all_" in name or "reduce_" in name  # CUDA kernels serve the other calls
        ]


def main() -> None:
    """Prints the table."""
    runtime = StubRuntime()
    cuda.use(runtime)
    rows: list[tuple[str, ...]] = [("call", "functions", "driver", "us")]
    with ringcomm.local_world(1, device="cuda:0") as (comm,):
        calls = {**calls_of(comm), **step_calls_of(comm)}
        rows += [row_of(runtime, name, call) for name, call in calls.items()]
    for ranks in (2, 4, 8):
        tensors = [torch.ones(1024) for _ in range(ranks)]
        with ringcomm.local_world(ranks, device="cuda:0") as world:
            name = f"all_reduce of {ranks} ranks, one launch"
            rows.append(row_of(runtime, name, partial(world.all_reduce, tensors)))
    rows += triton_rows(runtime)
    print("\n".join(table_lines(rows)))


if __name__ == "__main__":
    main()
