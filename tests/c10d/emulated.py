# SPDX-License-Identifier: Apache-2.0
"""Groups of ringcomm with tensors on an emulated device, in processes of a ``RankPool``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

import ringcomm.c10d
from ringcomm import cuda
from ringcomm.c10d import calls
from ringcomm.c10d import process_group as messages
from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.process_group import create_process_group
from ringcomm.comm.communicator import Communicator
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.in_stream_order import InStreamOrder

WRAPPERS = (AsyncCollectiveTensor, DTensor)


class EmulatedCommunicators(Communicators):
    """Asks the runtime for a tensor's device, since torch sees emulated tensors on the CPU."""

    def of(self, tensors: Sequence[torch.Tensor], operation: str) -> Communicator:
        return self._elsewhere(tensors, operation)

    def _device_of(self, tensor: torch.Tensor, operation: str) -> int | None:
        return runtime().device_of(tensor._values() if tensor.is_sparse else tensor)


class InStreamOrderBelowWrappers(InStreamOrder):
    """Skips wrapping tensors, and orders the operations on the tensors inside them.

    An asynchronous functional collective returns a tensor whose first use makes the stream wait for
    the collective. The operation must wait for the stream only after that.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


@cache
def runtime() -> EmulatedRuntime:
    """Returns the runtime of this process; plain tensors of a thread count as device 0's."""
    made = EmulatedRuntime(threads=2, memory_bytes=128 << 20)
    cuda.use(made)
    return made


def _create(group: Any, pg_options: Any) -> Any:
    return create_process_group(group, pg_options, EmulatedCommunicators)


def _await_streams() -> None:
    for device in range(runtime().device_count()):
        runtime().record_event(device, runtime().current_stream(device)).synchronize()


def _resize_in_stream_order(storage: torch.UntypedStorage, size_bytes: int) -> Any:
    # FSDP frees memory in this way. A GPU's allocator would not reuse it before the stream's work.
    _await_streams()
    return _resize(storage, size_bytes)


_resize = torch.UntypedStorage.resize_


def _never() -> bool:
    return False


@contextmanager
def emulated(backend: str) -> Iterator[None]:
    """Inside, ringcomm treats this thread's tensors as tensors of an emulated device."""
    if backend != "ringcomm":
        yield
        return
    dist.Backend.register_backend("ringcomm", _create, extended_api=True, devices=["cpu", "cuda"])
    try:
        runtime()
        with (
            InStreamOrderBelowWrappers(_await_streams),
            mock.patch.object(torch.UntypedStorage, "resize_", _resize_in_stream_order),
            # The mode emulates the device and is not a user's mode: it must also see the operations
            # inside ringcomm's calls, which otherwise run below the modes.
            mock.patch.object(calls, "is_watched", _never),
            mock.patch.object(messages, "is_watched", _never),
        ):
            yield
    finally:
        ringcomm.c10d.register()
