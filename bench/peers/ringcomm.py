"""ringcomm: its Communicator, its backend behind ``torch.distributed``, or one launch for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist

import ringcomm

from ..cases import Case
from ..modes import ONE_LAUNCH
from . import Buffers, PeerSetup, Prepared, System, Unavailable
from .gloo import bind_group, destroy_groups, init_default_group
from .torch_calls import REDUCE_OPS, Allocator, TorchInterface, allocate_buffers, prepare

_TIMEOUT = timedelta(minutes=5)
_TIMEOUT_OF_ONE_LAUNCH = timedelta(minutes=1)


class _Calls(ABC):
    """Buffers from ringcomm's heap or from ordinary memory, and calls on them."""

    def __init__(self, place: PeerSetup, interface: TorchInterface, extra: dict[str, Any]) -> None:
        self.version = _version(place)
        self._interface, self._extra = interface, extra
        allocator = Allocator(place.device.tensors, place.device.name)
        self._allocate = allocator.in_heap if place.heap_tensors else allocator.plain

    def prepare(self, case: Case) -> Prepared:
        try:
            return prepare(self._interface, case, self._allocate, self._extra)
        except ringcomm.UnsupportedError as error:
            raise Unavailable(str(error)) from error

    @abstractmethod
    def close(self) -> None:
        """Leaves the library; collective over the ranks."""


class ThroughCommunicator(_Calls):
    def __init__(self, place: PeerSetup) -> None:
        connect: Callable[..., ringcomm.Communicator] = ringcomm.Communicator.from_store
        self._communicator = connect(
            dist.PrefixStore(f"ringcomm/{place.kernels}/{place.algorithm}", place.store),
            place.rank,
            place.world,
            options=ringcomm.CommOptions(timeout=_TIMEOUT, kernels=place.kernels),
            heap_bytes=place.heap_bytes,
            **_where(place),
        )
        interface = cast(TorchInterface, self._communicator)
        super().__init__(place, interface, {"algorithm": place.algorithm})

    def close(self) -> None:
        self._communicator.close()


class ThroughTorch(_Calls):
    def __init__(self, place: PeerSetup) -> None:
        init_default_group(place)
        self._group = dist.new_group(backend="ringcomm", timeout=_TIMEOUT)
        super().__init__(place, bind_group(self._group), {})

    def close(self) -> None:
        destroy_groups()


class OneLaunch:
    """All ranks in this process on one GPU: one launch carries a collective of all."""

    def __init__(self, place: PeerSetup, version: str) -> None:
        self._world = ringcomm.local_world(
            place.world,
            device=place.device.name,
            options=ringcomm.CommOptions(timeout=_TIMEOUT_OF_ONE_LAUNCH, kernels=place.kernels),
            heap_bytes=place.heap_bytes,
        )
        self.version = version
        self._algorithm = place.algorithm
        allocator = Allocator(place.device.tensors, place.device.name)
        self._allocate = allocator.in_heap if place.heap_tensors else allocator.plain

    def prepare(self, case: Case) -> Prepared:
        name = case.collective.name
        if name not in ("all_reduce", "reduce_scatter", "all_gather"):
            raise Unavailable(f"no launch carries a {name} of all ranks")
        if name == "all_reduce" and not case.in_place:
            raise Unavailable("all_reduce works in place only")
        cases = [replace(case, rank=rank) for rank in range(case.world)]
        buffers = tuple(Buffers(own, *allocate_buffers(own, self._allocate)) for own in cases)
        inputs = [each.input for each in buffers]
        outputs = [each.output for each in buffers]
        op, algorithm = REDUCE_OPS[case.op], self._algorithm
        world = self._world
        call: Callable[[], object]
        if name == "all_reduce":
            call = partial(world.all_reduce, outputs, op=op, algorithm=algorithm)
        elif name == "reduce_scatter":
            call = partial(world.reduce_scatter_tensor, outputs, inputs, op=op, algorithm=algorithm)
        else:
            call = partial(world.all_gather_into_tensor, outputs, inputs, algorithm=algorithm)
        return Prepared(buffers, call)

    def close(self) -> None:
        self._world.close()


class _Copying:
    """The algorithm "copy" is one of all_gather alone."""

    def __init__(self, system: System) -> None:
        self.version, self.close, self._system = system.version, system.close, system

    def prepare(self, case: Case) -> Prepared:
        if case.collective.name != "all_gather":
            raise Unavailable("the algorithm copy gathers only")
        return self._system.prepare(case)


def open_system(place: PeerSetup) -> System:
    system: System
    if place.mode == ONE_LAUNCH:
        system = OneLaunch(place, _version(place))
    elif place.api == "dist":
        if place.kernels != "native":
            raise Unavailable("torch.distributed takes the native kernels")
        system = ThroughTorch(place)
    else:
        system = ThroughCommunicator(place)
    return _Copying(system) if place.algorithm == "copy" else system


def _where(place: PeerSetup) -> dict[str, Any]:
    return {} if place.device.name == "cpu" else {"device": place.device.name}


def _version(place: PeerSetup) -> str:
    how = place.mode if place.mode == ONE_LAUNCH else place.api
    kernels = "" if place.kernels == "native" else f", {place.kernels} kernels"
    return f"ringcomm {ringcomm.__version__} ({how}{kernels})"
