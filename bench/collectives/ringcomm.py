# SPDX-License-Identifier: Apache-2.0
"""ringcomm's systems: Communicator, torch.distributed backend, and one launch for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

import ringcomm

from ..cases import Case, CaseBuffers, Prepared
from ..devices import ONE_LAUNCH
from ..loops import SERIAL, SLICED, other_loops, with_other_loops
from . import torch_groups
from .systems import COMPRESSIONS, PeerSetup, System, Unavailable

_TIMEOUT = timedelta(minutes=5)
_TIMEOUT_OF_ONE_LAUNCH = timedelta(minutes=1)
# Each rank's window for multicast calls that do not work in place. A choice, not measured.
_WINDOW_BYTES = 64 << 20


def _allocator(setup: PeerSetup) -> torch_groups.Allocate:
    """Returns a function that allocates in ringcomm's heap, or in ordinary memory if requested."""
    if not setup.heap_tensors:
        return torch_groups.plain(setup)
    return lambda count, dtype: ringcomm.empty(count, dtype=dtype, device=setup.device.name)


class Ringcomm(System):
    """ringcomm with one rank in this process."""

    def __init__(self, setup: PeerSetup) -> None:
        how = setup.mode if setup.mode == ONE_LAUNCH else setup.api
        kernels = "" if setup.kernels == "native" else f", {setup.kernels} kernels"
        self.version = f"ringcomm {ringcomm.__version__} ({how}{kernels})"
        self._setup, self._allocate = setup, _allocator(setup)
        self._loops = setup.kernels if setup.kernels in (SERIAL, SLICED) else ""
        with other_loops(self._loops) if self._loops else nullcontext():
            self._calls, self._extra, self._leave = self._open()

    def _options(self, timeout: timedelta) -> ringcomm.CommOptions:
        kernels = "native" if self._loops else self._setup.kernels
        window_bytes = _WINDOW_BYTES if self._setup.algorithm == "multicast" else 0
        return ringcomm.CommOptions(
            timeout=timeout,
            kernels=kernels,
            channels=self._setup.channels,
            multicast_bytes=window_bytes,
        )

    def _open(self) -> tuple[Any, dict[str, Any], Callable[[], object]]:
        """Returns the functions, the extra arguments of calls with an algorithm, and a close
        function.
        """
        setup = self._setup
        if setup.api == "dist":
            if setup.kernels != "native":
                raise Unavailable("torch.distributed uses only the native kernels")
            torch_groups.init_default_group(setup)
            group = dist.new_group(backend="ringcomm", timeout=_TIMEOUT)
            return torch_groups.bind_group(group), {}, lambda: None
        connect: Callable[..., ringcomm.Communicator] = ringcomm.Communicator.from_store
        communicator = connect(
            dist.PrefixStore(f"ringcomm/{setup.kernels}/{setup.algorithm}", setup.store),
            setup.rank,
            setup.world,
            options=self._options(_TIMEOUT),
            heap_bytes=setup.heap_bytes,
            **({} if setup.device.name == "cpu" else {"device": setup.device.name}),
        )
        how = "compression" if setup.algorithm in COMPRESSIONS else "algorithm"
        return communicator, {how: setup.algorithm}, communicator.close

    def prepare(self, case: Case) -> Prepared:
        if self._setup.algorithm == "copy_engine" and case.collective.name != "all_gather":
            raise Unavailable("the algorithm copy_engine only gathers")
        if self._loops:
            prepared = self._bind(case)
            return replace(prepared, call=with_other_loops(prepared.call, self._loops))
        if self._setup.algorithm not in COMPRESSIONS:
            return self._bind(case)
        if case.collective.name not in ("all_reduce", "reduce_scatter"):
            raise Unavailable("only sums are sent quantized")
        # Quantization rounds, so such calls are not checked.
        return Prepared((), self._bind(case).call)

    def close(self) -> None:
        self._leave()

    def _algorithm_of(self, case: Case) -> dict[str, Any]:
        """Returns the algorithm argument of a call; all_reduce has its own name for one_shot."""
        two_phases = case.collective.name == "all_reduce"
        names = {"one_shot": "two_shot"} if two_phases else {}
        return {what: names.get(name, name) for what, name in self._extra.items()}

    def _bind(self, case: Case) -> Prepared:
        how = self._algorithm_of(case)
        try:
            return torch_groups.prepare(self._calls, case, self._allocate, **how)
        except ringcomm.UnsupportedError as error:
            raise Unavailable(str(error)) from error


class OneLaunch(Ringcomm):
    """All ranks in this process on one GPU: one launch runs a collective of all ranks."""

    def _open(self) -> tuple[Any, dict[str, Any], Callable[[], object]]:
        setup = self._setup
        options = self._options(_TIMEOUT_OF_ONE_LAUNCH)
        world = ringcomm.local_world(
            setup.world, device=setup.device.name, options=options, heap_bytes=setup.heap_bytes
        )
        return world, {"algorithm": setup.algorithm}, world.close

    def _bind(self, case: Case) -> Prepared:
        name, world = case.collective.name, self._calls
        if name not in ("all_reduce", "reduce_scatter", "all_gather"):
            raise Unavailable(f"one launch cannot run a {name} of all ranks")
        if name == "all_reduce" and not case.in_place:
            raise Unavailable("all_reduce works only in place")
        cases = [replace(case, rank=rank) for rank in range(case.world)]
        tensors = [torch_groups.allocate_buffers(own, self._allocate) for own in cases]
        buffers = tuple(CaseBuffers(own, *each) for own, each in zip(cases, tensors, strict=True))
        inputs, outputs = map(list, zip(*tensors, strict=True))
        op = {"op": torch_groups.REDUCE_OPS[case.op]} if case.collective.reduces else {}
        how = {**self._algorithm_of(case), **op}
        if name == "all_reduce":
            return Prepared(buffers, partial(world.all_reduce, outputs, **how))
        gathers = name == "all_gather"
        call = world.all_gather_into_tensor if gathers else world.reduce_scatter_tensor
        return Prepared(buffers, partial(call, outputs, inputs, **how))


def open_system(setup: PeerSetup) -> Ringcomm:
    return OneLaunch(setup) if setup.mode == ONE_LAUNCH else Ringcomm(setup)
