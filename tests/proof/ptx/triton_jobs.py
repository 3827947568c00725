# SPDX-License-Identifier: Apache-2.0
"""Small jobs of Triton's kernels on an emulated device, with mistakes in the kernels' PTX.

As a program, this module reads lines ``[job, mutant]`` in JSON and writes ``[job, mutant,
outcome]`` for each, in any order. Each job runs in a process of its own, since a failed kernel
spoils its process. The process is forked from a process that has loaded Triton. The mutant ""
changes nothing, and its outcome is the list of executed accesses. Any other outcome is "right" or
the failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ringcomm
from ringcomm import Communicator
from ringcomm._tl import adamw_launch, launch  # noqa: F401
from ringcomm.algorithms import spelled
from tests import ptx_interpreter as ptx
from tests.proof.ptx.small_jobs import QUICK, new_values, subunit_of
from tests.proof.ptx.triton_accesses import accesses, without
from tests.ptx_interpreter import PtxSchedule
from tests.support.device_worlds import Devices, on_host, put
from tests.support.emulator.library import library
from tests.support.emulator.ptx import PtxKernels
from tests.support.triton_device import PtxLauncher, executed
from tests.tl import device_kernels
from tests.tl.shards import Case, Memory, Steps, differences
from tests.tl.test_device_library import _relay as check_relay
from tests.tl.test_device_library import _rounds as check_rounds
from tests.tl.test_device_library import _shift as check_shift

AT_ONCE = 2
# Limits of a job. A job without a mistake may have to compile its kernels.
LIMIT_S, COMPILES_LIMIT_S = 60.0, 600.0
OPTIONS = replace(QUICK, kernels="triton", segment_bytes=512, slots=2, timeout=60.0)
# For a kernel with a mistake, which may wait forever.
SHORT_S = 5.0
F32, BF16 = torch.float32, torch.bfloat16


def _sums(
    devices: Devices, wait_s: float, algorithm: str, ranks: int, calls: list[tuple[int, str]]
) -> None:
    """Sums in each kind of memory; each rank has a device and a kernel of its own."""

    def body(comm: Communicator) -> None:
        comm.timeout = wait_s
        for turn, (elems, memory) in enumerate(calls):
            values = new_values(turn, ranks, elems)
            tensor = put(comm, values[comm.rank], memory)
            comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))
            assert torch.equal(on_host(tensor), torch.stack(values).sum(0)), (elems, memory)

    with devices.new_world(ranks, range(ranks), OPTIONS) as world:
        devices.run(world, body)


def allow_all(memory: Memory) -> None:
    """Lets kernels use all of the bucket's memory."""
    for tensor in (*memory.tensors.values(), *vars(memory).values()):
        if isinstance(tensor, torch.Tensor):
            ptx.allow(tensor)


def _steps(devices: Devices, wait_s: float) -> None:
    """Takes steps of each form, and compares each with the native kernels of the host."""
    options = replace(OPTIONS, segment_bytes=4096)
    case, ranks = Case(5003, F32, F32, "own", True, op="AVG"), 2
    forms = ("one pass", "norm", "update", "one pass")

    def body(comm: Communicator, kernels: str, memory: list[list[Memory]]) -> None:
        comm.timeout = wait_s
        steps = Steps(comm, "one_shot")
        for form, mine, want in zip(forms, memory[comm.rank], native[comm.rank], strict=True):
            if form == "one pass":
                steps.one_pass(mine, kernels)
            elif form == "norm":
                steps.norm(mine, kernels, "l2", True)
            else:
                steps.update(mine, kernels)
            comm.engine.finish_host_side()
            assert differences(mine, want) == [], form

    native = [[Memory(case, rank, ranks) for _ in forms] for rank in range(ranks)]
    with ringcomm.local_world(ranks, options=replace(options, kernels="native")) as host:
        host.run(body, "native", native)
    with devices.new_world(ranks, range(ranks), options) as world:
        ours = [
            [Memory(case, rank, ranks, device=f"cuda:{rank}") for _ in forms]
            for rank in range(ranks)
        ]
        for memory in (*ours[0], *ours[1]):
            allow_all(memory)
        devices.run(world, body, "triton", ours)
        ours.clear()


@contextmanager
def open_context(comm: Communicator, blocks: int) -> Iterator[Any]:
    """Yields a context whose launches may use only the tensors that they get."""
    from ringcomm import tl as rc

    class Context(rc.Context):
        def _passed(self, name: str, arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                ptx.allow(arg)
            return super()._passed(name, arg)

    with Context(comm, blocks) as context:
        for tensor in (context._state, context._table):
            ptx.allow(tensor)
        yield context


def _library(devices: Devices, wait_s: float) -> None:
    def body(comm: Communicator) -> None:
        comm.timeout = wait_s
        with open_context(comm, 4) as context:
            check_relay(context, device_kernels)
            assert check_rounds(context, device_kernels)
            check_shift(context, device_kernels, BF16)

    assert devices.emulated is not None
    devices.emulated.kind = "cuda"  # Triton must take the device for a GPU
    with devices.new_world(2, (0, 1), replace(OPTIONS, kernels="native")) as world:
        devices.run(world, body)


# Calls through slots, and at last calls where peers read the heap in place.
_SMALL = [(3011, "plain"), (3011, "heap"), (2005, "mixed"), (3011, "unaligned")]
_LARGE = [(18_500, "heap"), (18_501, "heap")]
JOBS: dict[str, Callable[[Devices, float], None]] = {
    "one_shot": partial(_sums, algorithm="one_shot", ranks=2, calls=[*_SMALL, *_LARGE]),
    "ring": partial(_sums, algorithm="ring", ranks=3, calls=_SMALL),
    "steps": _steps,
    "library": _library,
}
# Other mistakes than an access without its order: a pattern of the text, and the replacement.
EDITS = {
    "a vector a word too far": (r"(\bld\.global\.v4\.b32 .*) \+ 0 \]", r"\1 + 4 ]"),
    "a signal's other operand": (
        r"(\batom\.global\.sys\.release\.exch\.b32 (%r\d+), \[ %rd\d+ \+ 0 \], )%r\d+",
        r"\1\2",
    ),
    "another lane of a shuffle": (
        r"(\bshfl\.sync\.bfly\.b32\s+[^,]+, [^,]+, )(\d+)(, 31, -1)",
        r"\1 3\3",
    ),
}
ONE_WARP_LESS = "a warp less"


def changed(text: str, mutant: str) -> str:
    """Returns the mutant of a text, or the same text if the mutant does not apply."""
    if mutant in EDITS:
        return re.sub(*EDITS[mutant], text)
    return without(text, accesses(text).get(mutant, []))


def _outcome(job: str, mutant: str) -> str | list[str]:
    gpu = PtxLauncher(
        PtxSchedule(even_are_late=True),
        lambda text: changed(text, mutant),
        7 if mutant == ONE_WARP_LESS else None,
    )
    with executed(gpu):
        devices = Devices("emulated", devices=3, ptx=PtxKernels(subunit=subunit_of))
        JOBS[job](devices, SHORT_S if mutant else OPTIONS.timeout_s)
        devices.close()
    if mutant:
        return "right"
    reached = gpu.reached()
    texts = {each.metadata.hash: each.asm["ptx"] for each in gpu.made}
    return sorted(
        {
            name
            for digest, lines in reached.items()
            for name, copies in accesses(texts[digest]).items()
            if set(copies) & set(lines)
        }
    )


def _do(job: str, mutant: str, path: Path) -> None:
    """Runs a job in this process, which is its own."""
    refused: list[str] = []
    sys.unraisablehook = lambda seen: refused.append(f"{seen.exc_value!r}")
    try:
        outcome = _outcome(job, mutant)
    except BaseException as error:
        outcome = ptx.failure() or f"{type(error).__name__}: {error}"
    if refused:
        outcome = f"REFUSED: {refused}"
    path.write_text(json.dumps(outcome))
    os._exit(0)  # after a kernel has failed, the device cannot be closed


def main() -> None:
    library()
    waiting: list[tuple[str, str]] = [tuple(json.loads(line)) for line in sys.stdin]
    running: dict[int, tuple[tuple[str, str], Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                task = waiting.pop(0)
                path = Path(folder) / str(len(waiting))
                if (pid := os.fork()) == 0:
                    _do(*task, path)
                running[pid] = task, path, time.monotonic()
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                task, path, _ = running.pop(pid)
                outcome = json.loads(path.read_text()) if path.exists() else "it hung, or died"
                print(json.dumps([*task, outcome]), flush=True)
                continue
            for hung, ((_, mutant), _, since) in running.items():
                if time.monotonic() - since > (LIMIT_S if mutant else COMPILES_LIMIT_S):
                    os.kill(hung, signal.SIGKILL)
            time.sleep(0.02)


if __name__ == "__main__":
    main()
