"""Where the kernels of a communicator run, and whether they can run there at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import triton.language as tl

from ringcomm import _native
from ringcomm._tl.geometry import Geometry
from ringcomm._tl.hooks import IS_INTERPRETED, interpreting, lives
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device_communicator import DeviceCommunicator
from ringcomm.comm.triton_calls import ONE_RANK
from ringcomm.errors import UnsupportedError, where

# In the interpreter the blocks of a grid run one after another: more of them only take longer.
HOST_BLOCKS = 8
# Whether Triton's own device functions, too, are the interpreter's: TRITON_INTERPRET counts when a
# function is defined.
_IS_INTERPRETED = IS_INTERPRETED and type(tl.zeros).__name__ == "InterpretedFunction"
_SCRATCH = _native.STRUCTURES["table.scratch"]
_HEAPS = _native.STRUCTURES["table.heaps"]

__all__ = ["Place", "place_of"]


@dataclass(frozen=True)
class Place:
    """What there is to know of it.

    Attributes:
        table: bytes of a rank table of this rank.
        geometry: of the communicator's regions.
        heap_device: in whose heap symmetric memory lies, as ``ringcomm.empty`` names it.
        most_blocks: so many blocks of each rank's kernel run at once, whatever they need: a
            multiprocessor for each, and the ranks that share a device share those.
        default_blocks: of a context that does not say.
        health: status of a peer's process, for the interpreter; on a GPU kernels see it themselves.
        around: what a launch happens inside.
    """

    table: bytes
    geometry: Geometry
    heap_device: str
    most_blocks: int
    default_blocks: int
    health: Callable[[int], int]
    around: Callable[[], AbstractContextManager[None]]

    @property
    def heaps(self) -> list[int]:
        """By rank: the address of its heap as mapped here."""
        words = torch.frombuffer(bytearray(self.table), dtype=torch.int64)
        first = _HEAPS // 8
        return [int(word) for word in words[first : first + self.geometry.world]]

    def table_with(self, scratch_ptr: int) -> bytes:
        """The rank table, with other memory for the blocks' states."""
        after = _SCRATCH + 8
        return self.table[:_SCRATCH] + scratch_ptr.to_bytes(8, "little") + self.table[after:]

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What a launch needs around it; one kernel of a process at a time in the interpreter."""
        with self.around(), interpreting(self.health) if IS_INTERPRETED else nullcontext():
            yield


def place_of(comm: Communicator, operation: str) -> Place:
    """The place of a communicator's kernels.

    Raises:
        UnsupportedError: Triton kernels cannot run there, in this process.
    """
    head = where(operation, comm.rank, comm.world_size)
    if comm.world_size > _native.MAX_DEVICE_WORLD:
        raise UnsupportedError(
            f"{head}: expected a communicator of at most {_native.MAX_DEVICE_WORLD} ranks. Divide "
            "it with split()"
        )
    if isinstance(comm, DeviceCommunicator):
        return _device_place(comm, head)
    return _host_place(comm, head)


def _host_place(comm: Communicator, head: str) -> Place:
    if not _IS_INTERPRETED:
        raise UnsupportedError(
            f"{head}: on the host a Triton kernel runs only in Triton's interpreter. Set "
            "TRITON_INTERPRET=1 before Triton is imported, or use a communicator of a GPU"
        )
    heaps = comm._membership.heaps
    threads = [rank for rank, heap in enumerate(heaps) if heap.pid == 0 and rank != comm.rank]
    if threads:
        raise UnsupportedError(
            f"{head}: rank {threads[0]} is a thread of this process, and Triton's interpreter runs "
            "one kernel of a process at a time, so the two would wait for each other. Give each "
            "rank a process"
        )
    core = comm._core
    geometry = Geometry.of(core.geometry)
    table = core.rank_table(0)
    return Place(table, geometry, "cpu", 1 << 20, HOST_BLOCKS, core.health, nullcontext)


def _device_place(comm: DeviceCommunicator, head: str) -> Place:
    core = comm._device_core
    runtime, device = core.runtime, core.device
    if (runtime.kind == "emulated") != IS_INTERPRETED:
        raise UnsupportedError(
            f"{head}: Triton's interpreter, which TRITON_INTERPRET=1 chooses, reaches the memory "
            f"of emulated devices alone, and compiled kernels that of GPUs; the device is of kind "
            f"{runtime.kind!r}. Change TRITON_INTERPRET before Triton is imported"
        )
    if IS_INTERPRETED and comm._meeting is not None:
        raise UnsupportedError(f"{head}: {ONE_RANK}")
    table = runtime.read(device, core.native.table_ptr, _native.STRUCTURES["table"])
    blocks = comm._multiprocessors
    geometry = Geometry.of(core.native.geometry)
    name = f"cuda:{device}"
    return Place(table, geometry, name, blocks, blocks, lives, lambda: runtime.on_device(device))
