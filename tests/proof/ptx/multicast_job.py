# SPDX-License-Identifier: Apache-2.0
"""Multicast calls on an emulated switch, whose results are known to the bit.

As a program, this module makes the calls in a world of two, with the PTX of a file in place of the
unit ``multicast_float32``, and prints the failure, if any:

    python -m tests.proof.ptx.multicast_job FILE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import cast

import torch

from ringcomm import Communicator, ReduceOp
from ringcomm.comm.device.launch import DeviceCallEngine
from tests.proof.ptx.small_jobs import subunit_of
from tests.ptx_interpreter import PtxSchedule
from tests.support.device_worlds import MEMORIES, OPTIONS, Devices, on_host, put, room
from tests.support.emulator.ptx import PtxKernels, ptx_of

UNIT = "multicast_float32"
# Each of the two channels has pieces of 256 bytes for two ranks, of 128 bytes for four.
WINDOW_BYTES = 2048
# Fewer bytes than a vector, in a single piece; and an odd number of pieces.
COUNTS = (3, 555)
# In place: a partial vector alone, whole vectors with a partial vector, and whole vectors alone.
IN_PLACE_COUNTS = (3, 555, 560)
MULTICAST = "multicast"


def multicast_kernels(
    schedule: PtxSchedule | None = None, strict: bool = True, text: str | None = None
) -> PtxKernels:
    """Returns kernels for a world with windows. Compiling later would delay ranks' rendezvous.

    ``text`` replaces the compiler's PTX of ``UNIT``.
    """
    texts = {subunit: ptx_of(subunit) for subunit in ("move", "reduce_float32/sum", UNIT)}
    if text is not None:
        texts[UNIT] = text

    def text_of(subunit: str) -> str:
        return texts[subunit] if subunit in texts else ptx_of(subunit)

    return PtxKernels(schedule or PtxSchedule(), strict=strict, subunit=subunit_of, text_of=text_of)


class Calls:
    """Lets ranks, which are threads of this process, exchange the heap offsets of their tensors."""

    def __init__(self, world: int) -> None:
        self._offsets = [-1] * world
        self._barrier = Barrier(world, timeout=60.0)

    def offsets(self, comm: Communicator, tensor: torch.Tensor) -> list[int]:
        """Returns the heap offsets of all ranks' tensors."""
        self._offsets[comm.rank] = heap_offset(comm, tensor)
        self._barrier.wait()
        found = list(self._offsets)
        self._barrier.wait()
        return found

    def same_place(self, comm: Communicator, tensor: torch.Tensor) -> None:
        assert len(set(self.offsets(comm, tensor))) == 1


def values_of(comm: Communicator, turn: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns new values of all ranks; sums are exact in 16 bits and multiples of the world."""
    made = torch.Generator().manual_seed(1000 * turn + count)
    world = comm.world_size
    each = [torch.randint(-9, 10, (count,), generator=made) * world for _ in range(world)]
    return [values.to(dtype) for values in each]


def all_reduce(comm: Communicator, turn: int, count: int, dtype: torch.dtype, memory: str) -> None:
    values = values_of(comm, turn, count, dtype)
    want = torch.stack(values).sum(0)
    for op, result in ((ReduceOp.SUM, want), (ReduceOp.AVG, want / comm.world_size)):
        tensor = put(comm, values[comm.rank], memory, turn)
        comm.all_reduce(tensor, op=op, algorithm=MULTICAST)
        assert torch.equal(on_host(tensor), result), ("all_reduce", op, count, memory)


def halves(comm: Communicator, turn: int, count: int, dtype: torch.dtype, memory: str) -> None:
    """Makes a reduce-scatter and an all-gather, one after the other, in place and out of place."""
    world, rank = comm.world_size, comm.rank
    values = values_of(comm, turn, count * world, dtype)
    want = torch.stack(values).sum(0)
    source = put(comm, values[rank], memory, turn)
    own = source[rank * count : (rank + 1) * count]
    output = own if turn % 2 else room(comm, count, dtype, memory, turn + 1)
    comm.reduce_scatter_tensor(output, source, algorithm=MULTICAST)
    chunk = want[rank * count : (rank + 1) * count]
    assert torch.equal(on_host(output), chunk), ("reduce_scatter", count, memory)
    comm.all_gather_into_tensor(source, output, algorithm=MULTICAST)
    assert torch.equal(on_host(source), want), ("all_gather", count, memory)


def in_a_row(comm: Communicator, calls: int, count: int) -> None:
    """Launches several reduce-scatters before it reads the first result."""
    world, rank = comm.world_size, comm.rank
    every = [values_of(comm, turn, count * world, torch.float32) for turn in range(calls)]
    sources = [put(comm, values[rank], "plain") for values in every]
    outputs = [room(comm, count, torch.float32, "plain") for _ in every]
    for output, source in zip(outputs, sources, strict=True):
        comm.reduce_scatter_tensor(output, source, algorithm=MULTICAST)
    for output, values in zip(outputs, every, strict=True):
        assert torch.equal(on_host(output), torch.stack(values).sum(0).chunk(world)[rank]), "row"


def heap_offset(comm: Communicator, tensor: torch.Tensor) -> int:
    """Returns the offset of a tensor in its rank's heap."""
    return tensor.data_ptr() - cast(DeviceCallEngine, comm.engine).device_core.heap.base_ptr


def in_place(comm: Communicator, calls: Calls, count: int, dtype: torch.dtype) -> None:
    """Runs all three collectives on tensors of the heap that have the same offset on all ranks.

    Checks that the memory after the tensors is unchanged, and that no window is used.
    """
    world, rank = comm.world_size, comm.rank
    values = values_of(comm, 3, count * world, dtype)
    want, own = torch.stack(values).sum(0), slice(rank * count, (rank + 1) * count)
    behind = (torch.arange(8) + 10 * rank).to(dtype)
    guarded = put(comm, torch.cat([values[rank], behind]), "heap")
    source = guarded[: count * world]
    calls.same_place(comm, source)
    comm.all_reduce(source, op=ReduceOp.AVG, algorithm=MULTICAST)
    # The host does not wait in between: the first kernel of the next call copies the results.
    everywhere = room(comm, count * world * world, dtype, "plain")
    comm.all_gather_into_tensor(everywhere, source, algorithm="one_shot")
    assert torch.equal(on_host(everywhere), (want / world).repeat(world)), ("gathered", count)
    assert torch.equal(on_host(source), want / world), ("all_reduce", count)
    assert torch.equal(on_host(guarded[count * world :]), behind), "behind"
    if count * dtype.itemsize % 16 != 0:
        return  # the other two collectives would use the windows
    source.copy_(values[rank])
    output = room(comm, count, dtype, "unaligned", 0)
    comm.reduce_scatter_tensor(output, source, algorithm=MULTICAST)
    assert torch.equal(on_host(output), want[own]), ("reduce_scatter", count)
    assert torch.equal(on_host(source), values[rank]), ("input", count)
    comm.all_gather_into_tensor(source, output, algorithm=MULTICAST)
    assert torch.equal(on_host(source), want), ("all_gather", count)
    comm.reduce_scatter_tensor(source[own], source, algorithm=MULTICAST)
    comm.all_gather_into_tensor(source, source[own], algorithm=MULTICAST)
    assert torch.equal(on_host(source), want * world), ("into their input", count)


def every_call(comm: Communicator, dtype: torch.dtype, memories: Sequence[str] = MEMORIES) -> None:
    for turn, memory in enumerate(memories):
        for count in COUNTS:
            all_reduce(comm, turn, count, dtype, memory)
            halves(comm, turn, count, dtype, memory)


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    kernels = multicast_kernels(PtxSchedule(even_are_late=True), text=text)
    devices = Devices("emulated", ptx=kernels)
    options = replace(OPTIONS, timeout=4.0, multicast_bytes=WINDOW_BYTES)

    calls = Calls(2)

    def some_calls(comm: Communicator) -> None:
        all_reduce(comm, 0, COUNTS[-1], torch.float32, "plain")
        halves(comm, 0, COUNTS[-1], torch.float32, "plain")
        in_a_row(comm, 8, COUNTS[-1])
        for count in IN_PLACE_COUNTS[1:]:
            in_place(comm, calls, count, torch.float32)
        all_reduce(comm, 0, IN_PLACE_COUNTS[-1], torch.float32, "mixed")

    try:
        devices.run(devices.new_world(2, (0, 1), options), some_calls)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)  # after a kernel has failed, the devices cannot be closed


if __name__ == "__main__":
    main()
