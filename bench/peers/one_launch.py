"""ringcomm with all ranks in this process on one GPU: one launch carries a collective of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import ringcomm

from ..cases import Case
from . import Buffers, PeerSetup, Prepared, Unavailable
from .torch_calls import REDUCE_OPS, Allocator, allocate_buffers

_TIMEOUT = timedelta(minutes=1)


class OneLaunch:
    """The whole world of ranks, called from one thread."""

    def __init__(self, place: PeerSetup, version: str) -> None:
        self._world = ringcomm.local_world(
            place.world,
            device=place.device.name,
            options=ringcomm.CommOptions(timeout=_TIMEOUT, kernels=place.kernels),
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
