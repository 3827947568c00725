"""ringcomm: its Communicator, its backend behind ``torch.distributed``, or one launch for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

import ringcomm

from ..cases import Buffers, Case, Prepared
from ..devices import ONE_LAUNCH
from . import torch_groups
from .systems import COMPRESSIONS, PeerSetup, System, Unavailable

_TIMEOUT = timedelta(minutes=5)
_TIMEOUT_OF_ONE_LAUNCH = timedelta(minutes=1)


def _allocator(place: PeerSetup) -> torch_groups.Allocate:
    """Allocates memory of ringcomm's heap, or ordinary memory, as is asked for."""
    if not place.heap_tensors:
        return torch_groups.plain(place)
    return lambda count, dtype: ringcomm.empty(count, dtype=dtype, device=place.device.name)


class Ringcomm(System):
    """A rank of its own process."""

    def __init__(self, place: PeerSetup) -> None:
        how = place.mode if place.mode == ONE_LAUNCH else place.api
        kernels = "" if place.kernels == "native" else f", {place.kernels} kernels"
        self.version = f"ringcomm {ringcomm.__version__} ({how}{kernels})"
        self._place, self._allocate = place, _allocator(place)
        self._calls, self._extra, self._leave = self._open()

    def _open(self) -> tuple[Any, dict[str, Any], Callable[[], object]]:
        """Returns an interface, what calls with an algorithm take, and what leaves the library."""
        place = self._place
        if place.api == "dist":
            if place.kernels != "native":
                raise Unavailable("torch.distributed takes the native kernels")
            torch_groups.init_default_group(place)
            group = dist.new_group(backend="ringcomm", timeout=_TIMEOUT)
            return torch_groups.bind_group(group), {}, lambda: None
        connect: Callable[..., ringcomm.Communicator] = ringcomm.Communicator.from_store
        communicator = connect(
            dist.PrefixStore(f"ringcomm/{place.kernels}/{place.algorithm}", place.store),
            place.rank,
            place.world,
            options=ringcomm.CommOptions(timeout=_TIMEOUT, kernels=place.kernels),
            heap_bytes=place.heap_bytes,
            **({} if place.device.name == "cpu" else {"device": place.device.name}),
        )
        how = "compression" if place.algorithm in COMPRESSIONS else "algorithm"
        return communicator, {how: place.algorithm}, communicator.close

    def prepare(self, case: Case) -> Prepared:
        if self._place.algorithm == "copy_engine" and case.collective.name != "all_gather":
            raise Unavailable("the algorithm copy_engine gathers only")
        if self._place.algorithm not in COMPRESSIONS:
            return self._bind(case)
        if case.collective.name not in ("all_reduce", "reduce_scatter"):
            raise Unavailable("sums are what travels in codes")
        # Codes round: such a call is never checked.
        return Prepared((), self._bind(case).call)

    def close(self) -> None:
        self._leave()

    def _bind(self, case: Case) -> Prepared:
        try:
            return torch_groups.prepare(self._calls, case, self._allocate, **self._extra)
        except ringcomm.UnsupportedError as error:
            raise Unavailable(str(error)) from error


class OneLaunch(Ringcomm):
    """All ranks in this process on one GPU: one launch carries a collective of all."""

    def _open(self) -> tuple[Any, dict[str, Any], Callable[[], object]]:
        place = self._place
        options = ringcomm.CommOptions(timeout=_TIMEOUT_OF_ONE_LAUNCH, kernels=place.kernels)
        world = ringcomm.local_world(
            place.world, device=place.device.name, options=options, heap_bytes=place.heap_bytes
        )
        return world, {"algorithm": place.algorithm}, world.close

    def _bind(self, case: Case) -> Prepared:
        name, world = case.collective.name, self._calls
        if name not in ("all_reduce", "reduce_scatter", "all_gather"):
            raise Unavailable(f"no launch carries a {name} of all ranks")
        if name == "all_reduce" and not case.in_place:
            raise Unavailable("all_reduce works in place only")
        cases = [replace(case, rank=rank) for rank in range(case.world)]
        tensors = [torch_groups.allocate_buffers(own, self._allocate) for own in cases]
        buffers = tuple(Buffers(own, *each) for own, each in zip(cases, tensors, strict=True))
        inputs, outputs = map(list, zip(*tensors, strict=True))
        op = {"op": torch_groups.REDUCE_OPS[case.op]} if case.collective.reduces else {}
        how = {**self._extra, **op}
        if name == "all_reduce":
            return Prepared(buffers, partial(world.all_reduce, outputs, **how))
        gathers = name == "all_gather"
        call = world.all_gather_into_tensor if gathers else world.reduce_scatter_tensor
        return Prepared(buffers, partial(call, outputs, inputs, **how))


def open_system(place: PeerSetup) -> Ringcomm:
    return OneLaunch(place) if place.mode == ONE_LAUNCH else Ringcomm(place)
