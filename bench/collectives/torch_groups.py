# SPDX-License-Identifier: Apache-2.0
"""Gloo, NCCL, and calls for all libraries that have the interface of ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..cases import Case, CaseBuffers, Prepared
from ..devices import ONE_LAUNCH, PROCESSES_ON_ONE_GPU, nccl_version
from .systems import Call, PeerSetup, System, Unavailable, find_call

Tensor = torch.Tensor
Allocate = Callable[[int, torch.dtype], Tensor]
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
_CALLS = ("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all_single")
# torch 2.13 renamed these functions; each call by the old name warns, which costs microseconds.
_RENAMED = {
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_gather_into_tensor": "all_gather_single",
}
# The first NCCL version that lets ranks share a GPU, and the variable that enables it.
_SHARING_VERSION = (2, 30)
_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def bind_group(group: dist.ProcessGroup | None) -> Any:
    """Returns the functions of ``torch.distributed`` on ``group``; None means the default group."""
    how = {} if group is None else {"group": group}
    names = {**{name: name for name in (*_CALLS, "isend", "recv")}, **_RENAMED}
    return SimpleNamespace(
        **{
            name: partial(getattr(dist, new, None) or getattr(dist, name), **how)
            for name, new in names.items()
        }
    )


def init_default_group(setup: PeerSetup) -> None:
    """Creates Gloo's default group when the first system needs it; the runner destroys it."""
    if dist.is_initialized():
        return
    if not setup.on_nodes:
        # Without this variable Gloo looks up the host name, which may fail.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", setup.store),
        rank=setup.rank,
        world_size=setup.world,
        timeout=timedelta(minutes=5),
    )


def plain(setup: PeerSetup) -> Allocate:
    """Allocates ordinary memory and touches every page."""
    return lambda count, dtype: torch.zeros(count, dtype=dtype, device=setup.device.tensors)


def allocate_buffers(case: Case, allocate: Allocate) -> tuple[Tensor, Tensor]:
    """Returns input and output of ``case``; in place they overlap as the operation requires."""
    if not case.in_place:
        sizes = (case.input_elems, case.output_elems)
        source, target = (allocate(elems, case.dtype).zero_() for elems in sizes)
        return source, target
    whole = allocate(case.total_elems, case.dtype).zero_()
    own_chunk = whole.narrow(0, case.rank * case.chunk_elems, case.chunk_elems)
    kind = case.collective
    return own_chunk if kind.input_is_chunk else whole, own_chunk if kind.output_is_chunk else whole


def prepare(interface: Any, case: Case, allocate: Allocate, **extra: Any) -> Prepared:
    """Prepares a call; ``extra`` is passed to the calls that accept an algorithm."""
    name, root, world, at_root = case.collective.name, case.root, case.world, case.rank == case.root
    if name in ("all_reduce", "reduce") and not case.in_place:
        raise Unavailable(f"{name} of torch.distributed works only in place")
    source, target = allocate_buffers(case, allocate)
    pieces = (each.chunk(world) if at_root else () for each in (source, target))
    sent, received = (list(each) or None for each in pieces)
    op = [REDUCE_OPS[case.op]]

    def send_recv() -> None:
        work = interface.isend(source, (case.rank + 1) % world)
        interface.recv(target, (case.rank - 1) % world)
        work.wait()

    calls: dict[str, Call] = {
        "all_reduce": (interface.all_reduce, [target, *op]),
        "reduce_scatter": (interface.reduce_scatter_tensor, [target, source, *op]),
        "all_gather": (interface.all_gather_into_tensor, [target, source]),
        "broadcast": (interface.broadcast, [target, root]),
        "reduce": (interface.reduce, [target, root, *op]),
        "gather": (interface.gather, [source, received, root]),
        "scatter": (interface.scatter, [target, sent, root]),
        "all_to_all": (interface.all_to_all_single, [target, source]),
        "send_recv": (send_recv, []),
    }
    function, arguments = find_call(calls, name, "torch.distributed")
    how = extra if name in ("all_reduce", "reduce_scatter", "all_gather") else {}
    return Prepared((CaseBuffers(case, source, target),), partial(function, *arguments, **how))


class Gloo(System):
    """The default process group of this rank."""

    def __init__(self, setup: PeerSetup) -> None:
        self.version = f"Gloo of torch {torch.__version__}"
        init_default_group(setup)
        self._calls, self._allocate = bind_group(None), plain(setup)

    def prepare(self, case: Case) -> Prepared:
        return prepare(self._calls, case, self._allocate)


class Nccl(Gloo):
    """NCCL on a second group; if NCCL does not start, every cell of the table says why."""

    def __init__(self, setup: PeerSetup) -> None:
        self.version = f"NCCL {_dotted(nccl_version()) or 'none'} of torch {torch.__version__}"
        self._allocate = plain(setup)
        self._refusal = why_not(setup.mode, nccl_version())
        if self._refusal is not None:
            return
        if setup.mode == PROCESSES_ON_ONE_GPU:
            os.environ[_SHARING_VARIABLE] = "1"
            self.version += f", {_SHARING_VARIABLE}=1"
        init_default_group(setup)
        try:
            group = dist.new_group(backend="nccl", timeout=timedelta(minutes=2))
            self._calls = bind_group(group)
            # The first call creates the communicator.
            self._calls.all_reduce(torch.zeros(1, device=setup.device.tensors))
            setup.device.synchronize()
        except RuntimeError as error:
            # NCCL fails on all ranks together, so the other systems can still be measured.
            self._refusal = f"NCCL would not start: {str(error).splitlines()[0]}"

    def prepare(self, case: Case) -> Prepared:
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        return super().prepare(case)


def why_not(mode: str, version: tuple[int, ...]) -> str | None:
    """Returns why this version of NCCL cannot be timed in ``mode``; None if it can."""
    if not version:
        return "this torch has no NCCL"
    if mode == ONE_LAUNCH:
        return f"NCCL cannot launch several ranks together: see --mode {PROCESSES_ON_ONE_GPU}"
    if mode == PROCESSES_ON_ONE_GPU and version < _SHARING_VERSION:
        allowed = f"{_dotted(_SHARING_VERSION)} and later allow it"
        return f"NCCL {_dotted(version)} refuses several ranks on one GPU; {allowed}"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
