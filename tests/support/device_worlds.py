# SPDX-License-Identifier: Apache-2.0
"""Ranks on emulated or real devices under one interface, and the memory of their tensors."""

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
# The most ranks of the cached worlds. A rank has three streams and a world one, in addition to the
# default stream and streams of tests. More would share the device's 32 hardware queues.
KEPT_RANKS = 8
MEMORIES = ("plain", "heap", "mixed", "unaligned")
LL_BYTES = 1024
# Small segments, so that tens of kilobytes use every slot of both channels several times.
OPTIONS = CommOptions(
    timeout=20.0, segment_bytes=1024, channels=2, ll_bytes=LL_BYTES, copy_engine_bytes=4096
)
# So many 4-byte elements that every channel moves more data than fits into its slots.
MANY = 20_011


def emulated_runtime(**settings: Any) -> EmulatedRuntime:
    """Makes devices that fit eight ranks of two channels, with as few threads as teams can have.

    The messages of the worlds that :class:`Devices` caches fit, too. Eight ranks have more streams
    than the driver's default number of hardware queues (see tests/conftest.py).
    """
    usual = {"devices": 2, "multiprocessors": 64, "threads": 2, "memory_bytes": 256 << 20}
    usual["hardware_queues"] = 32
    return EmulatedRuntime(**{**usual, **settings})


class Devices:
    """The devices of this process, and worlds whose ranks are threads of this process.

    Args:
        kind: "emulated": emulated devices, which exist until :meth:`close`; "cuda": real devices.
        settings: of emulated devices.
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
        """Returns a world of ``ranks`` ranks, evenly spread over the devices ``on``; caches it.

        Closes the oldest worlds while all together would have more than ``KEPT_RANKS`` ranks.
        """
        key = (ranks, tuple(on), options)
        world = self._worlds.pop(key, None)
        if world is None or any(each.aborted for each in world):
            world = None
            while ranks + sum(key[0] for key in self._worlds) > KEPT_RANKS and self._worlds:
                self._worlds.pop(next(iter(self._worlds))).close()
                gc.collect()  # so that their streams can be reused
            world = self.new_world(ranks, on, options)
        self._worlds[key] = world
        return world

    def new_world(
        self, ranks: int, on: Sequence[int] = (0,), options: CommOptions = OPTIONS
    ) -> LocalWorld:
        """Builds a world like :meth:`world`, but for a single test, which closes it."""
        per_device = -(-ranks // len(on))
        devices = [f"cuda:{on[rank // per_device]}" for rank in range(ranks)]
        # Two communicators of 8 ranks must fit on the device side by side.
        return ringcomm.local_world(ranks, device=devices, options=options)

    def run(self, world: LocalWorld, fn: Callable[..., T], *args: Any) -> list[T]:
        """Calls ``world.run``; ``fn`` can use tensors as on a GPU, see :meth:`as_on_gpu`."""

        def body(comm: Communicator) -> T:
            with self.as_on_gpu(comm):
                return fn(comm, *args)

        return world.run(body)

    @contextmanager
    def as_on_gpu(self, comm: Communicator | None = None) -> Iterator[None]:
        """Inside, torch's operations of this thread run in stream order.

        With ``comm``, plain tensors count as tensors of its device. Without it, the thread acts for
        the ranks of all devices.
        """
        if self.emulated is None:
            yield
            return
        device = device_of(comm) if comm is not None else 0
        order = self.emulated.in_stream_order(of_all_devices=comm is None)
        with self.emulated.assuming(device), order:
            yield

    def host_tensors(self) -> AbstractContextManager[None]:
        """Inside, new plain tensors count as host tensors."""
        return nullcontext() if self.emulated is None else self.emulated.assuming(None)

    def _heaps_used(self) -> list[int]:
        """Returns the bytes in use in each device's heap, without the heap's own allocation."""
        devices = range(self.runtime.device_count())
        heaps = [device_heap.existing_heap(device) for device in devices]
        return [
            heap.stats()["used_bytes"] - ALLOCATION_ALIGN if heap is not None else 0
            for heap in heaps
        ]

    def close(self) -> None:
        """Closes the worlds, and checks that they returned all their memory."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
        gc.collect()
        for device in range(self.runtime.device_count()):
            self.runtime.synchronize(device)  # memory is free only when its streams are idle
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
    """Returns an uninitialised tensor of ``count`` elements on the device of ``comm``.

    ``memory``: "mixed" takes the heap if rank plus ``turn`` is odd. "unaligned" begins one element
    after the start of its allocation, which is in the heap if rank plus ``turn`` is even.
    """
    odd = (comm.rank + turn) % 2 == 1
    skip = 1 if memory == "unaligned" else 0
    if memory == "heap" or (memory == "mixed" and odd) or (memory == "unaligned" and not odd):
        whole = ringcomm.empty(count + skip, dtype=dtype, device=heap_of(comm))
    else:
        whole = torch.empty(count + skip, dtype=dtype, device=comm.device)
    return whole[skip:]


def put(comm: Communicator, tensor: Tensor, memory: str, turn: int = 0) -> Tensor:
    """Returns a copy of ``tensor`` (on the host, one dimension), allocated by :func:`room`."""
    target = room(comm, tensor.numel(), tensor.dtype, memory, turn)
    if tensor.numel():
        # Copied as bytes, since some dtypes have no copy kernel.
        target.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return target


def on_host(tensor: Tensor) -> Tensor:
    """Returns the tensor's values on the host, once the device has computed them."""
    return tensor.cpu() if tensor.is_cuda else tensor.clone()


# ---- words of the protocol ----------------------------------------------------------------------

# As in layout.h: after the control page, lines of 64 bytes, one per stream, channel and peer: first
# the signals, then the sleep flags, then the epochs; last one line per channel.
_PAGE_BYTES, _LINE_BYTES, _STREAMS = 4096, 64, 3
_SEQUENCE_BYTES = 8


class Stream(IntEnum):
    """The streams of collectives, as in layout.h."""

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
    """Sets the signals as after ``epoch`` items each way; all ranks call it, between calls."""
    links = _links(comm)
    for link in range(links):
        _write(comm, _PAGE_BYTES + link * _LINE_BYTES, epoch, epoch)
        _write(comm, _PAGE_BYTES + (2 * links + link) * _LINE_BYTES, epoch, epoch)


def ready_word(comm: Communicator, peer: int, stream: Stream = Stream.PAIR) -> int:
    """Returns the address of the word by which ``peer`` publishes items on the first channel."""
    core = cast(DeviceCallEngine, comm.engine).device_core
    link = int(stream) * core.native.channels * comm.world_size + peer
    address: int = core._allocation.ptr + _PAGE_BYTES + link * _LINE_BYTES
    return address


def items_read(comm: Communicator, peer: int, stream: Stream = Stream.PAIR) -> int:
    """Returns how many items of the first channel ``peer`` has read, on an emulated device.

    Kernels do not notice this look at the word; they might notice a read through the runtime.
    """
    return ctypes.c_uint32.from_address(ready_word(comm, peer, stream) + 4).value


def set_ll_epoch(comm: Communicator, epoch: int) -> None:
    """Sets the LL words as after ``epoch`` calls; all ranks call it, between collectives."""
    links = _links(comm)
    for channel in range(links // (_STREAMS * comm.world_size)):
        line = _PAGE_BYTES + (3 * links + channel) * _LINE_BYTES
        _write(comm, line + _SEQUENCE_BYTES, epoch)


def ll_flags(comm: Communicator) -> set[int]:
    """Returns the flags in all memory for LL packets, between calls."""
    core = cast(DeviceCallEngine, comm.engine).device_core
    lines = 3 * _links(comm) + core.native.channels
    begin = _PAGE_BYTES + -(-lines * _LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES
    size_bytes = core.native.words_bytes - begin
    words = memoryview(core.runtime.read(core.device, core._allocation.ptr + begin, size_bytes))
    # An LL packet is payload, flag, payload, flag. The padding at the end of the page stays zero.
    return set(words.cast("I")[1::2])


def with_options(**changes: Any) -> CommOptions:
    """Returns the options of these tests with changes."""
    return replace(OPTIONS, **changes)
