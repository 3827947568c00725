# SPDX-License-Identifier: Apache-2.0
"""Communicators that record their calls, and tensors that claim to be on a device.

The tensors are on torch's device "meta": not on the CPU, and without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import HashStore

from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.process_group import ProcessGroup
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.core import NoFastCalls
from ringcomm.comm.host.options import CommOptions
from ringcomm.rendezvous.same_node import Lookout

RANK, WORLD_SIZE = 1, 2
OPTIONS = CommOptions(slots=8)
TIMEOUT = timedelta(seconds=77)


class NotedWork:
    """A communicator's work; ``waits`` are the timeouts that were passed to wait()."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait(self, timeout: Any = None) -> bool:
        self.waits.append(timeout)
        return True


class NotedCommunicator:
    """Records all calls as (method, arguments); a call with an argument True returns a work."""

    name = "group"
    rank, world_size = RANK, WORLD_SIZE

    def __init__(self, timeout: timedelta = TIMEOUT, options: CommOptions = OPTIONS) -> None:
        self.timeout = timeout
        self.options = options
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.works: list[NotedWork] = []
        self.aborted = False
        self.group_at: Callable[..., Any] | None = None
        self.engine = self.messages = self
        # Like an engine without fast calls, so that each call of the group is a method call.
        self.queue = SimpleNamespace(pending=0)
        self.fast = NoFastCalls()
        self.kernels = None
        self.membership = SimpleNamespace(name=self.name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def method(*args: Any, **options: Any) -> NotedWork | None:
            self.calls.append((name, (*args, *options.values())))
            if name in ("isend", "irecv", "exchange_messages") or any(
                argument is True for argument in args
            ):
                self.works.append(NotedWork())
                return self.works[-1]
            return None

        method.__name__ = name
        return method

    def lookout(self) -> Lookout:
        return Lookout(tuple(range(WORLD_SIZE)), {})

    def submit(self, fn: Callable[[], Any], opname: str, timeout: Any = None) -> NotedWork:
        self.calls.append(("submit", (opname, timeout)))
        fn()
        self.works.append(NotedWork())
        return self.works[-1]

    def abort(self, reason: str) -> None:
        self.aborted = True
        self.calls.append(("abort", (reason,)))

    @property
    def methods(self) -> list[str]:
        return [name for name, _ in self.calls]


class OnPretendedDevice(Communicators):
    """Takes a tensor's device from :func:`on_device`."""

    def _device_of(self, tensor: Tensor, operation: str) -> int | None:
        return getattr(tensor, "pretended_device", None)


def on_device(*shape: int, device: int = 0) -> Tensor:
    """Makes a tensor that counts as a tensor on ``device``."""
    tensor = torch.empty(*shape, device="meta")
    cast(Any, tensor).pretended_device = device
    return tensor


class NotedGroup:
    """A process group over such communicators; ``connected`` are the arguments of each connection.

    Attributes:
        group: the real process group.
        host: its communicator for CPU tensors.
        devices: its communicators for devices, in the order of their connection.
    """

    def __init__(self, kind: type[Communicators] = OnPretendedDevice) -> None:
        self.host: Any = NotedCommunicator()
        self.devices: list[NotedCommunicator] = []
        self.connected: list[dict[str, Any]] = []
        store = HashStore()
        self.host.group_at = self._connect
        communicators = kind(store, cast(Communicator, self.host))
        self.group = ProcessGroup(store, communicators)

    def _connect(self, store: Any, members: Any, **options: Any) -> Any:
        assert tuple(members) == tuple(range(WORLD_SIZE))
        self.connected.append(options)
        self.devices.append(NotedCommunicator())
        return self.devices[-1]
