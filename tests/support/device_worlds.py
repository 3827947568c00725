# SPDX-License-Identifier: Apache-2.0
"""Ranks on devices, emulated or real, under one interface, and where their tensors lie."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import IntEnum
from typing import Any, TypeVar, cast

import torch

import ringcomm
from ringcomm import CommOptions, Communicator, LocalWorld, cuda
from ringcomm.comm.device import lifecycle
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.memory import device_heap
from ringcomm.memory.device_heap import ALLOCATION_ALIGN
from tests.support.emulator import EmulatedRuntime

T = TypeVar("T")
Tensor = torch.Tensor
# Of the worlds that are kept. Each has three streams, there is one for each world, the default one
# and some of the tests' own: more of them would share hardware queues, of which there are 32.
KEPT_RANKS = 8
MEMORIES = ("plain", "heap", "mixed", "unaligned")
LL_BYTES = 1024
# Small, so that tens of kilobytes go several times around all slots of both channels.
OPTIONS = CommOptions(
    timeout=20.0, segment_bytes=1024, channels=2, ll_bytes=LL_BYTES, copy_engine_bytes=4096
)
# Elements of 4 bytes with which every channel has more to move than fits into its slots.
MANY = 20_011


def emulated_runtime(**settings: Any) -> EmulatedRuntime:
    """Devices on which eight ranks of two channels fit, with as few threads as teams can have.

    So do the messages of the worlds that :class:`Devices` keeps. The streams of eight ranks are
    more than the driver's usual hardware queues (see tests/conftest.py).
    """
    usual = {"devices": 2, "multiprocessors": 64, "threads": 2, "memory_bytes": 256 << 20}
    usual["hardware_queues"] = 32
    return EmulatedRuntime(**{**usual, **settings})


class Devices:
    """The devices of this process, and worlds of ranks that are threads of it.

    Args:
        kind: "emulated": devices that are the process's from here to :meth:`close`; "cuda": its
            real ones.
        settings: of emulated ones.
    """

    def __init__(self, kind: str, **settings: Any) -> None:
        self.emulated = emulated_runtime(**settings) if kind == "emulated" else None
        self._before = cuda.use(self.emulated) if self.emulated else None
        self.runtime: DeviceRuntime = cuda.current()
        self._worlds: dict[Any, LocalWorld] = {}
        self._used_bytes = self._heaps_used()

    def world(
        self, ranks: int, on: Sequence[int] = (0,), options: CommOptions = OPTIONS
    ) -> LocalWorld:
        """``ranks`` ranks, as many on each of the devices ``on``; kept for later tests.

        The oldest are closed where all would have more than ``KEPT_RANKS``.
        """
        key = (ranks, tuple(on), options)
        world = self._worlds.pop(key, None)
        if world is None or any(each.aborted for each in world):
            world = None
            while ranks + sum(key[0] for key in self._worlds) > KEPT_RANKS and self._worlds:
                self._worlds.pop(next(iter(self._worlds))).close()
                gc.collect()  # their streams are to be used again
            world = self.new_world(ranks, on, options)
        self._worlds[key] = world
        return world

    def new_world(
        self, ranks: int, on: Sequence[int] = (0,), options: CommOptions = OPTIONS
    ) -> LocalWorld:
        """Builds a world as :meth:`world` does, for one test alone, which closes it."""
        per_device = -(-ranks // len(on))
        devices = [f"cuda:{on[rank // per_device]}" for rank in range(ranks)]
        # Two communicators of 8 ranks must fit on the device side by side.
        return ringcomm.local_world(ranks, device=devices, options=options)

    def run(self, world: LocalWorld, fn: Callable[..., T], *args: Any) -> list[T]:
        """``world.run``, in which tensors can be used as on a GPU; see :meth:`as_on_gpu`."""

        def body(comm: Communicator) -> T:
            with self.as_on_gpu(comm):
                return fn(comm, *args)

        return world.run(body)

    @contextmanager
    def as_on_gpu(self, comm: Communicator | None = None) -> Iterator[None]:
        """Inside, torch's operations of this thread are in stream order.

        And plain tensors are the device's of ``comm``, if given; else the thread acts for the ranks
        of all devices.
        """
        if self.emulated is None:
            yield
            return
        device = device_of(comm) if comm is not None else 0
        order = self.emulated.in_stream_order(of_all_devices=comm is None)
        with self.emulated.assuming(device), order:
            yield

    def host_tensors(self) -> AbstractContextManager[None]:
        """Inside, new plain tensors are the host's."""
        return nullcontext() if self.emulated is None else self.emulated.assuming(None)

    def _heaps_used(self) -> list[int]:
        """Bytes in use on each device, without the heap's own allocation."""
        devices = range(self.runtime.device_count())
        heaps = [device_heap.existing_heap(device) for device in devices]
        return [
            heap.stats()["used_bytes"] - ALLOCATION_ALIGN if heap is not None else 0
            for heap in heaps
        ]

    def close(self) -> None:
        """Closes the worlds; what they had must have come back."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
        gc.collect()
        for device in range(self.runtime.device_count()):
            self.runtime.synchronize(device)  # space is kept until its streams are idle
        lifecycle.reclaim()
        used_bytes, allocated = self._heaps_used(), []
        if self.emulated is not None:
            device_heap.close_heaps()
            allocated = self.emulated.allocated()
            cuda.use(self._before)
        assert used_bytes == self._used_bytes, used_bytes
        assert allocated == []


def device_of(comm: Communicator) -> int:
    """The ordinal of the communicator's device."""
    index: int = comm.heap_device.index
    return index


def heap_of(comm: Communicator) -> str:
    """Returns the device of the communicator's heap."""
    return f"cuda:{device_of(comm)}" if comm.launches else "cpu"


def room(comm: Communicator, count: int, dtype: torch.dtype, memory: str, turn: int = 0) -> Tensor:
    """An uninitialised tensor of ``count`` elements on the device of ``comm``, at ``memory``.

    "mixed" is the heap where the rank and ``turn`` make an odd number, "unaligned" begins one
    element into its memory, which lies in the heap where they make an even one.
    """
    odd = (comm.rank + turn) % 2 == 1
    skip = 1 if memory == "unaligned" else 0
    if memory == "heap" or (memory == "mixed" and odd) or (memory == "unaligned" and not odd):
        whole = ringcomm.empty(count + skip, dtype=dtype, device=heap_of(comm))
    else:
        whole = torch.empty(count + skip, dtype=dtype, device=comm.device)
    return whole[skip:]


def put(comm: Communicator, tensor: Tensor, memory: str, turn: int = 0) -> Tensor:
    """A copy of ``tensor`` (of the host, one dimension) as :func:`room` allocates it."""
    target = room(comm, tensor.numel(), tensor.dtype, memory, turn)
    if tensor.numel():
        # As bytes: not every dtype has a copy kernel.
        target.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return target


def on_host(tensor: Tensor) -> Tensor:
    """The tensor's values, once they are there."""
    return tensor.cpu() if tensor.is_cuda else tensor.clone()


# ---- words of the protocol ----------------------------------------------------------------------

# As layout.h has them: lines of 64 bytes behind the control page, one per stream, channel and
# peer, first the signals, then the sleep flags, then the epochs; at last one per channel.
_PAGE_BYTES, _LINE_BYTES, _STREAMS = 4096, 64, 3
_SEQUENCE_BYTES = 8


class Stream(IntEnum):
    """Of collectives; as in layout.h."""

    PAIR = 0
    SHARED = 1


def _write(comm: Communicator, offset: int, *words: int) -> None:
    core = cast(DeviceCallEngine, comm.engine).device_core
    data = b"".join(word.to_bytes(4, "little") for word in words)
    core.runtime.write(core.device, core._allocation.ptr + offset, data)


def _links(comm: Communicator) -> int:
    channels = cast(DeviceCallEngine, comm.engine).device_core.native.channels
    return _STREAMS * channels * comm.world_size


def set_epochs(comm: Communicator, epoch: int) -> None:
    """Puts the signals where ``epoch`` items each way would have; between calls, on all ranks."""
    links = _links(comm)
    for link in range(links):
        _write(comm, _PAGE_BYTES + link * _LINE_BYTES, epoch, epoch)
        _write(comm, _PAGE_BYTES + (2 * links + link) * _LINE_BYTES, epoch, epoch)


def ready_word(comm: Communicator, peer: int, stream: Stream = Stream.PAIR) -> int:
    """The address of the word with which ``peer`` publishes on the first channel."""
    core = cast(DeviceCallEngine, comm.engine).device_core
    link = int(stream) * core.native.channels * comm.world_size + peer
    address: int = core._allocation.ptr + _PAGE_BYTES + link * _LINE_BYTES
    return address


def items_read(comm: Communicator, peer: int, stream: Stream = Stream.PAIR) -> int:
    """How many items ``peer`` has read of the first channel, on an emulated device.

    The look tells no kernel anything, as one through the runtime would.
    """
    return ctypes.c_uint32.from_address(ready_word(comm, peer, stream) + 4).value


def set_ll_epoch(comm: Communicator, epoch: int) -> None:
    """Puts the LL words where ``epoch`` calls would have; between calls, on all ranks."""
    links = _links(comm)
    for channel in range(links // (_STREAMS * comm.world_size)):
        line = _PAGE_BYTES + (3 * links + channel) * _LINE_BYTES
        _write(comm, line + _SEQUENCE_BYTES, epoch)


def ll_flags(comm: Communicator) -> set[int]:
    """The flags of all memories for LL packets; between calls."""
    core = cast(DeviceCallEngine, comm.engine).device_core
    lines = 3 * _links(comm) + core.native.channels
    begin = _PAGE_BYTES + -(-lines * _LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES
    size_bytes = core.native.words_bytes - begin
    words = memoryview(core.runtime.read(core.device, core._allocation.ptr + begin, size_bytes))
    # An LL packet is payload, flag, payload, flag; what rounds the words up to a page stays zero.
    return set(words.cast("I")[1::2])


def with_options(**changes: Any) -> CommOptions:
    """The options of these tests, with changes."""
    return replace(OPTIONS, **changes)
