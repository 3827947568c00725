# SPDX-License-Identifier: Apache-2.0
"""The device that the tests of this folder run on: a GPU, or where there is none an emulated one.

The emulated device is as large as an H200, so what does not fit there does not fit here either.
torch's own tensors are the host's there, and its operations run at once, but in stream order.
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
# What ringcomm calls the device, and where torch makes tensors that are on it.
DEVICE = "cuda:0"
PLAIN = DEVICE if REAL else "cpu"
_H200 = {"multiprocessors": 132, "threads": 256, "memory_bytes": 140 << 30}
# Of an emulated device that processes share: with all of them, each would have hundreds of threads.
_SHARED_MULTIPROCESSORS = 8
# Long enough that what is queued behind it has not begun when the host goes on.
_BUSY_CYCLES = 400_000_000
_EMULATED_BUSY_S = 0.02
_HELD_S = 60.0


def _runtime() -> Any:
    return cuda.current()


@contextmanager
def in_use() -> Iterator[None]:
    """Inside, this process has the device; all that was made on an emulated one must be gone."""
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
    """Gives this process, which is one of several, the device until it ends."""
    if REAL:
        torch.cuda.set_device(0)
    else:
        knobs = {**_H200, "multiprocessors": _SHARED_MULTIPROCESSORS}
        Devices("emulated", devices=1, physical=(0,), **knobs)


_CHOSEN = ShardedOptimizer._chosen_comm


def _chosen_on_emulated(
    self: ShardedOptimizer, comm: CommArgument, params: Any
) -> Communicator | None:
    """An optimizer's own communicator on a GPU, whose tensors look like the host's here."""
    found = _CHOSEN(self, comm, params)
    first = params[0]["params"][0] if isinstance(params[0], dict) else params[0]
    if found is not None or _runtime().device_of(first) is None:
        return found
    return ringcomm.local_world(1, device=DEVICE)[0]


def ordered() -> AbstractContextManager[Any]:
    """Inside, torch's operations of this thread are in the order of its streams."""
    order: AbstractContextManager[Any] = nullcontext() if REAL else _runtime().in_stream_order()
    return order


def in_order(fn: Callable[..., T]) -> Callable[..., T]:
    """``fn`` for a thread of its own, with torch's operations :func:`ordered`."""

    def call(*args: Any) -> T:
        with ordered():
            return fn(*args)

    return call


def on_host() -> AbstractContextManager[None]:
    """Inside, plain tensors of torch's CPU device are the host's."""
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
    """An event behind all work that the current stream has by now."""
    runtime = _runtime()
    return runtime.record_event(0, runtime.current_stream(0))


def is_busy() -> bool:
    """Tells whether the current stream has work to do."""
    return not _here().query()


def synchronize_stream() -> None:
    """Waits for the work of the current stream."""
    _here().synchronize()


def keep_busy() -> None:
    """Gives the current stream work that takes a while."""
    if REAL:
        torch.cuda._sleep(_BUSY_CYCLES)
        return
    runtime = _runtime()
    runtime.run_on_stream(0, runtime.current_stream(0), lambda: time.sleep(_EMULATED_BUSY_S))


@contextmanager
def kept_busy() -> Iterator[None]:
    """Does as :func:`keep_busy`; an emulated stream is busy until the end of the block."""
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
    """Inside, the current stream is capturing a graph; what it gives replays that afterwards."""
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
    """Free bytes of the device when nothing is under way and torch keeps nothing for itself."""
    gc.collect()
    synchronize()
    if REAL:
        torch.cuda.empty_cache()
    return int(_runtime().memory_info(0)[0])


def plain_bytes() -> int:
    """Bytes in torch's own tensors on the device."""
    return torch.cuda.memory_allocated(0) if REAL else 0
