# SPDX-License-Identifier: Apache-2.0
"""The communicators of one process group: one for the host, and one for each device in use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import without_memory
from ringcomm.comm.host.options import CommOptions
from ringcomm.errors import AbortedError, ArgumentError, where

__all__ = ["Communicators"]

_Made = TypeVar("_Made", bound="Communicators")


class Communicators:
    """Finds the communicator for the tensors of a call.

    The communicator of a device is built at the first call with tensors on the device. If all
    members of the group make this call, building needs no further agreement. A first call by only
    some members, such as a message, would wait for the other members: bind the device instead
    (``init_process_group(device_id=...)``), or call a collective first.

    Args:
        store: a store that only the members of the group use.
        host: the communicator for CPU tensors; closed with this object.
    """

    def __init__(self, store: Store, host: Communicator) -> None:
        self.host = host
        self._store = store
        self._by_device: dict[int, Communicator] = {}
        self._guard = threading.Lock()

    @classmethod
    def rendezvous(
        cls: type[_Made],
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str,
        timeout: timedelta,
        options: CommOptions | None,
        split_from: tuple[Communicator, Sequence[int]] | None = None,
    ) -> _Made:
        """Builds the communicators of a group called ``name``, which may contain blanks.

        Args:
            store: a store that only the members of the group use.
            rank: the rank of this process in the group.
            world_size: the size of the group.
            name: the name of the group.
            timeout: the timeout of the group.
            options: the options of the group, except the timeout.
            split_from: the communicator from which the members are split, if any, and their ranks
                in it, by rank in the group.
        """
        name = "_".join(name.split()) or "unnamed"
        if split_from is None:
            host = Communicator.from_store(
                store, rank, world_size, name=name, timeout=timeout, options=options
            )
        else:
            options = replace(options or CommOptions(), timeout=timeout)
            parent, members = split_from
            host = parent.group_at(store, members, name=name, options=options)
        return cls(store, host)

    @classmethod
    def over(cls, group: ProcessGroup, user: str, options: CommOptions) -> Communicators:
        """Builds the communicators for the ranks of another backend's group, over its store.

        Args:
            group: a group of torch; all its members must call this.
            user: the feature that uses the communicators; part of their names.
            options: the options of the communicators, including the timeout.
        """
        return cls.rendezvous(
            group.get_group_store(),
            group.rank(),
            group.size(),
            name=f"{user}:{group.group_name}",
            timeout=timedelta(seconds=options.timeout_s),
            options=options,
        )

    def of(self, tensors: Sequence[Tensor], operation: str) -> Communicator:
        """Returns the communicator for the device of a call's tensors.

        Raises:
            ArgumentError: the tensors are on several devices, or on an unsupported kind of device.
            UnsupportedError: this process lacks the device; the error says why.
            RingcommError: the members could not connect their devices.
        """
        for tensor in tensors:
            if not tensor.is_cpu:
                return self._elsewhere(tensors, operation)
        return self.host

    def is_on_host(self, tensor: Tensor, operation: str) -> bool:
        """True if the host communicator serves the tensor; connects no device."""
        return self._device_of(tensor, operation) is None

    def _elsewhere(self, tensors: Sequence[Tensor], operation: str) -> Communicator:
        device = self._device_of(tensors[0], operation)
        for tensor in tensors[1:]:
            if self._device_of(tensor, operation) != device:
                found = sorted({str(each.device) for each in tensors})
                raise ArgumentError(
                    f"{self._checks(operation)}: expected tensors on one device, got them on "
                    f"{' and '.join(found)}; copy them to one device with .to(device)"
                )
        return self.host if device is None else self.on_device(device, operation)

    def _device_of(self, tensor: Tensor, operation: str) -> int | None:
        """Returns the index of the device that holds the tensor; None for the host."""
        if tensor.is_cpu:
            return None
        if not tensor.is_cuda:
            raise ArgumentError(
                f"{self._checks(operation)}: expected a tensor of the CPU or of a GPU, got one on "
                f"{tensor.device}: a {without_memory(tensor) or type(tensor).__name__}"
            )
        return tensor.get_device()

    def on_device(self, device: int, operation: str) -> Communicator:
        """Returns the communicator of a device of this process; builds it at the first use.

        Raises:
            UnsupportedError: this process lacks the device; the error says why.
            RingcommError: the members could not connect their devices.
        """
        communicator = self._by_device.get(device)
        if communicator is None:
            with self._guard:
                communicator = self._by_device.get(device)
                if communicator is None:
                    communicator = self._by_device[device] = self._build(device, operation)
        return communicator

    def _build(self, device: int, operation: str) -> Communicator:
        host = self.host
        if host.aborted:
            raise AbortedError(
                f"{self._checks(operation)}: the process group was aborted or shut down; "
                "make a new one"
            )
        # The name contains a count, since the device's number may differ between processes.
        return host.group_at(
            self._store,
            range(host.world_size),
            name=f"{host.name}/device{len(self._by_device)}",
            options=replace(host.options, timeout=host.timeout),
            device=torch.device("cuda", device),
        )

    def _checks(self, operation: str) -> str:
        return where(operation, self.host.rank, self.host.world_size)

    def devices(self) -> list[int]:
        """Returns the devices on which this group has been used."""
        return list(self._by_device)

    def _all(self) -> list[Communicator]:
        return [self.host, *self._by_device.values()]

    def set_timeout(self, timeout: timedelta) -> None:
        for communicator in self._all():
            communicator.timeout = timeout

    def abort(self, reason: str) -> None:
        for communicator in self._all():
            communicator.abort(reason)

    def close(self) -> None:
        with ExitStack() as stack:  # closes all in reverse order, even if one close fails
            for communicator in self._all():
                stack.callback(communicator.close)
