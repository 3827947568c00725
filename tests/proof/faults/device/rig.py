# SPDX-License-Identifier: Apache-2.0
"""The device on which a test of this folder runs: an emulated one or a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

import ringcomm
from ringcomm import CommOptions, Communicator, LocalWorld, cuda
from ringcomm.comm.device import lifecycle
from ringcomm.memory.device_heap import close_heaps
from tests.support.emulator import EmulatedRuntime

DEVICE = "cuda:0"
# Longer than a test may take, so that no deadline hides a missing reaction.
LONG_S = 60.0
# Limit for the report of an error that needs no deadline, on a busy machine.
SOON_S = 20.0
HEAP_BYTES = 16 << 20
# Small buffers, so that a few kilobytes use several channels and many segments.
OPTIONS = CommOptions(segment_bytes=4096, channels=2, ll_bytes=1024, copy_engine_bytes=8192)
POLL_S = 0.002


class Rig:
    """A device and the tests' actions on it; closing it closes the worlds that it built."""

    def __init__(self, kind: str, **knobs: Any) -> None:
        self.kind = kind
        if kind == "emulated":
            settings = {"multiprocessors": 8, "threads": 2, "memory_bytes": 2 * HEAP_BYTES, **knobs}
            cuda.use(EmulatedRuntime(**settings))
        runtime: Any = cuda.current()
        self.runtime = runtime
        self.pages: list[Any] = []
        runtime.allocate_pinned = self._counting(runtime.allocate_pinned)
        self._worlds: list[LocalWorld] = []

    def _counting(self, allocate: Callable[[int], Any]) -> Callable[[int], Any]:
        def counted(size_bytes: int) -> Any:
            self.pages.append(allocate(size_bytes))
            return self.pages[-1]

        return counted

    @property
    def emulated(self) -> bool:
        return self.kind == "emulated"

    def world(self, n: int = 2, timeout: float = LONG_S, options: CommOptions = OPTIONS) -> Any:
        """Returns ``n`` ranks of this process with ``timeout`` for calls; rendezvous has longer."""
        made: Callable[..., LocalWorld] = ringcomm.local_world
        world = made(n, device=DEVICE, timeout=LONG_S, options=options, heap_bytes=HEAP_BYTES)
        for each in world:
            each.timeout = timeout
        self._worlds.append(world)
        return world

    def forget(self) -> None:
        """Does not close the worlds built so far any more: the test does."""
        self._worlds.clear()

    def connect(
        self, store: Store, rank: int, n: int, timeout: float = LONG_S, name: str = "world"
    ) -> Any:
        """Returns this process's communicator, as one rank of ``n`` processes."""
        return Communicator.from_store(
            store,
            rank,
            n,
            name=name,
            timeout=timeout,
            options=OPTIONS,
            device=DEVICE,
            heap_bytes=HEAP_BYTES,
        )

    def ordered(self) -> AbstractContextManager[Any]:
        """Inside, torch's operations follow the order of streams, which the emulator enforces."""
        order: AbstractContextManager[Any] = (
            self.runtime.in_stream_order() if self.emulated else nullcontext()
        )
        return order

    @contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Inside, the current stream captures a graph. Yields the function that replays it."""
        if self.emulated:
            with self.runtime.capture() as recorded:
                yield lambda: self.runtime.replay(recorded)
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph.replay

    def full(self, count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device="cpu" if self.emulated else DEVICE)

    def synchronize(self) -> None:
        self.runtime.synchronize(0)

    def used_bytes(self) -> int:
        return int(ringcomm.heap_stats(device=DEVICE)["used_bytes"])

    def close(self) -> None:
        """Closes all open worlds, and checks that no memory, descriptor or thread is left."""
        for world in self._worlds:
            for each in world:
                each.abort("the test is over")
            world.close()
        self._worlds.clear()
        lifecycle._end_abandoned()
        del self.runtime.allocate_pinned
        assert all(page.host_ptr == 0 for page in self.pages)
        assert pidfds() == []
        until(lambda: not watchers())
        if self.emulated:
            self.runtime.synchronize(0)
            close_heaps()
            cuda.use(None)
            assert self.runtime.allocated() == []
            assert self.runtime.opened() == []


def pidfds() -> list[str]:
    """Descriptors of watched processes."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of this loop
            if "pidfd" in str(each.readlink()):
                found.append(each.name)
    return found


def watchers() -> list[str]:
    """Returns the names of the threads that watch the processes of peers."""
    return [each.name for each in threading.enumerate() if each.name == "ringcomm-watch"]


def until(condition: Callable[[], bool], seconds: float = SOON_S) -> None:
    """Waits until the condition holds; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(POLL_S)


class Gate:
    """Holds an emulated stream until the gate is opened."""

    def __init__(self, rig: Rig, stream: int) -> None:
        self._opened = threading.Event()
        self.reached = threading.Event()
        rig.runtime.run_on_stream(0, stream, self._hold)

    def _hold(self) -> None:
        self.reached.set()
        assert self._opened.wait(LONG_S)

    def open(self) -> None:
        self._opened.set()


def error_of(call: Callable[[], Any], within_s: float = SOON_S) -> ringcomm.RingcommError:
    """Returns the error that ``call`` raises; fails if the error comes too late."""
    started = time.monotonic()
    try:
        call()
    except ringcomm.RingcommError as error:
        assert time.monotonic() - started < within_s
        return error
    raise AssertionError("nothing was raised")


def first_error(rig: Rig, comm: Any, call: Callable[[], Any]) -> ringcomm.RingcommError:
    """Returns the error of ``call`` or of a later call: a device notices later than the host."""

    def all_of_it() -> None:
        with rig.ordered():  # also keeps the call's tensors alive
            call()
            while True:
                rig.synchronize()
                comm.barrier()

    return error_of(all_of_it, LONG_S)
