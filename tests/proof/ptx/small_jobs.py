"""Small jobs of two ranks on an emulated device, whose results are known to the bit.

Together they take the kernels through every way that data goes: direct and ring, out of the heap
with no copy and through slots, packets, messages, the optimizer's one-pass step. Run as a program
it does one job with the PTX of its kernels, in which lines that a part names order nothing:

    python -m tests.proof.ptx.small_jobs JOB '{PART: [LINE, ...], ...}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from ringcomm import CommOptions, Communicator
from tests.proof.ptx.orderings import LINE_INFO, without
from tests.support.device_worlds import OPTIONS, Devices, on_host, put, room
from tests.support.emulator.library import PtxSchedule
from tests.support.emulator.ptx import PtxKernels, ptx_of

# What waits in vain says so soon.
QUICK = replace(OPTIONS, timeout=4.0)
# Slots have 1 KiB, and each channel four of them per peer: here each is written several times.
ELEMS = 12_011
FEW_ELEMS = 131


def part_of(unit: str, kernel: str) -> str:
    """The smallest part of a unit that a kernel can be taken from."""
    if unit.startswith("reduce_"):
        return f"{unit}/{kernel.rsplit('_', 1)[1]}"
    if unit.startswith("adamw_"):
        last = kernel.rsplit("_", 1)[1]
        return f"{unit}/{last if last in ('bfloat16', 'float16') else 'float32'}"
    return unit


def _values(turn: int, ranks: int, elems: int) -> list[torch.Tensor]:
    """New values of all ranks for each call, so that nothing old looks like what is awaited."""
    made = torch.Generator().manual_seed(turn)
    return [torch.randint(-999, 1000, (elems,), generator=made).float() for _ in range(ranks)]


def _all_reduce(comm: Communicator, turn: int, algorithm: str, elems: int, place: str) -> None:
    values = _values(turn, comm.world_size, elems)
    tensor = put(comm, values[comm.rank], place)
    comm.all_reduce(tensor, algorithm=algorithm)
    assert torch.equal(on_host(tensor), torch.stack(values).sum(0)), (algorithm, place)


def _halves(comm: Communicator, turn: int, algorithm: str, elems: int, place: str) -> None:
    """The halves of an all-reduce as calls of their own."""
    values = _values(turn, comm.world_size, elems * comm.world_size)
    source = put(comm, values[comm.rank], place)
    output = room(comm, elems, torch.float32, place, 1)
    comm.reduce_scatter_tensor(output, source, algorithm=algorithm)
    want = torch.stack(values).sum(0)
    assert torch.equal(on_host(output), want.chunk(comm.world_size)[comm.rank]), (algorithm, place)
    comm.all_gather_into_tensor(source, output, algorithm=algorithm)
    assert torch.equal(on_host(source), want), (algorithm, place)


Call = Callable[[Communicator, int, str, int, str], None]


def _job(call: Call, algorithm: str, elems: int = ELEMS) -> Callable[[Communicator], None]:
    def body(comm: Communicator) -> None:
        for turn, place in enumerate(("plain", "heap", "mixed", "plain")):
            call(comm, turn, algorithm, elems, place)

    return body


JOBS: dict[str, Callable[[Communicator], None]] = {
    "direct": _job(_all_reduce, "direct"),
    "ring": _job(_all_reduce, "ring"),
    "packet": _job(_all_reduce, "packet", FEW_ELEMS),
    "direct halves": _job(_halves, "direct", ELEMS // 2),
    "ring halves": _job(_halves, "ring", ELEMS // 2),
}


def run(job: str, kernels: PtxKernels, options: CommOptions = QUICK) -> None:
    """Does a job on devices of its own; a wrong result or a wrong step of a kernel is raised."""
    devices = Devices("emulated", ptx=kernels)
    with devices.new_world(2, (0, 1), options) as world:
        devices.run(world, JOBS[job])
    devices.close()


def main() -> None:
    job, changes = sys.argv[1], json.loads(sys.argv[2])
    kernels = PtxKernels(
        PtxSchedule(even_are_late=True),
        part=part_of,
        text_of=lambda part: without(ptx_of(part, LINE_INFO), changes.get(part, ())),
    )
    try:
        run(job, kernels)
    except BaseException as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        os._exit(0)  # after a failure of a kernel the device cannot be given back
    print(json.dumps({"reached": kernels.reached()}), flush=True)


if __name__ == "__main__":
    main()
