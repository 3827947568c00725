# SPDX-License-Identifier: Apache-2.0
"""The device of this folder's tests: a GPU or, on a machine without one, an emulated device.

The emulated device has the memory of an H200, so a test that does not fit there does not fit here.
On the emulated device torch's own tensors are in host memory, and torch's operations run at once,
in stream order.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest import mock

import torch

import ringcomm
from ringcomm import Communicator, cuda
from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.optim.sharded import ShardedOptimizer
from tests.support.device_worlds import Devices

T = TypeVar("T")

REAL = torch.cuda.is_available()
# ringcomm's name of the device, and torch's device for plain tensors on it.
DEVICE = "cuda:0"
PLAIN = DEVICE if REAL else "cpu"
_H200 = {"multiprocessors": 132, "threads": 256, "memory_bytes": 140 << 30}
# Multiprocessors of an emulated device that processes share. With an H200's 132, each process would
# have hundreds of threads.
_SHARED_MULTIPROCESSORS = 8
# Keeps the stream busy until the host has queued more work behind it and continued.
_BUSY_CYCLES = 400_000_000
_EMULATED_BUSY_S = 0.02
_HELD_S = 60.0


def _runtime() -> Any:
    return cuda.current()


@contextmanager
def in_use() -> Iterator[None]:
    """Inside, this process uses the device; at the end an emulated one must have no memory left."""
    if REAL:
        torch.cuda.set_device(0)
        yield
        return
    devices = Devices("emulated", devices=1, physical=(0,), **_H200)
    try:
        with mock.patch.object(ShardedOptimizer, "_chosen_comm", _chosen_on_emulated):
            yield
    finally:
        devices.close()


def take() -> None:
    """Gives the device to this process, one of several, until the process ends."""
    if REAL:
        torch.cuda.set_device(0)
    else:
        knobs = {**_H200, "multiprocessors": _SHARED_MULTIPROCESSORS}
        Devices("emulated", devices=1, physical=(0,), **knobs)


_CHOSEN = ShardedOptimizer._chosen_comm


def _chosen_on_emulated(
    self: ShardedOptimizer, comm: CommArgument, params: Any
) -> Communicator | None:
    """Gives the optimizer a one-rank communicator on the emulated device if it has no other."""
    found = _CHOSEN(self, comm, params)
    first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
    if found is not None or _runtime().device_of(first) is None:
        return found
    return ringcomm.local_world(1, device=DEVICE)[0]


def ordered() -> AbstractContextManager[Any]:
    """Inside, torch's operations of this thread run in the order of their streams."""
    order: AbstractContextManager[Any] = nullcontext() if REAL else _runtime().in_stream_order()
    return order


def in_order(fn: Callable[..., T]) -> Callable[..., T]:
    """Wraps ``fn`` for another thread, so that torch's operations there are :func:`ordered`."""

    def call(*args: Any) -> T:
        with ordered():
            return fn(*args)

    return call


def on_host() -> AbstractContextManager[None]:
    """Inside, torch's CPU tensors count as host memory, not as the emulated device's memory."""
    return nullcontext() if REAL else _runtime().assuming(None)


# ---- streams ------------------------------------------------------------------------------------


def synchronize() -> None:
    """Waits for all work of the device."""
    _runtime().synchronize(0)


@contextmanager
def new_stream() -> Iterator[None]:
    """Inside, the work of this thread goes to another stream."""
    if REAL:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
        return
    runtime = _runtime()
    with runtime.on_stream(runtime.make_stream(0)):
        yield


def _here() -> Any:
    """Returns an event behind all work that is now on the current stream."""
    runtime = _runtime()
    return runtime.record_event(0, runtime.current_stream(0))


def is_busy() -> bool:
    """Tells whether the current stream has unfinished work."""
    return not _here().query()


def synchronize_stream() -> None:
    """Waits for the work of the current stream."""
    _here().synchronize()


def keep_busy() -> None:
    """Puts work that takes a while on the current stream."""
    if REAL:
        torch.cuda._sleep(_BUSY_CYCLES)
        return
    runtime = _runtime()
    runtime.run_on_stream(0, runtime.current_stream(0), lambda: time.sleep(_EMULATED_BUSY_S))


@contextmanager
def kept_busy() -> Iterator[None]:
    """Keeps the current stream busy: a GPU's for a while, an emulated one until the block ends."""
    if REAL:
        keep_busy()
        yield
        return
    runtime, ended = _runtime(), threading.Event()
    runtime.run_on_stream(0, runtime.current_stream(0), lambda: _await(ended))
    try:
        yield
    finally:
        ended.set()


def _await(event: threading.Event) -> None:
    assert event.wait(_HELD_S)


@contextmanager
def capture() -> Iterator[Callable[[], None]]:
    """Inside, the current stream captures a graph. Yields the function that replays it later."""
    if REAL:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph.replay
        return
    runtime = _runtime()
    with runtime.capture() as recorded:
        yield lambda: runtime.replay(recorded)


# ---- memory -------------------------------------------------------------------------------------


def settled_bytes() -> int:
    """Returns the device's free bytes after all work has ended and torch has emptied its cache."""
    gc.collect()
    synchronize()
    if REAL:
        torch.cuda.empty_cache()
    return int(_runtime().memory_info(0)[0])


def plain_bytes() -> int:
    """Returns the bytes of torch's own tensors on the device."""
    return torch.cuda.memory_allocated(0) if REAL else 0
