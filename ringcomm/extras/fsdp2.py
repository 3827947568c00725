# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with its buffers in the heap and its collectives on ringcomm, on a mesh of any backend.

Modules of ``torch.distributed.fsdp.fully_shard`` accept a custom all-gather and reduce-scatter
(``FSDPModule.set_custom_all_gather``, ``set_custom_reduce_scatter``). :func:`plug` installs
ringcomm's collectives. FSDP2 still chooses order, dtypes, ops and divide factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ringcomm import memory
from ringcomm.c10d.calls import OP_TYPES, PendingWork
from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.process_group import behind
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.engine import Work as StartedWork
from ringcomm.comm.host.options import CommOptions
from ringcomm.errors import ArgumentError

__all__ = ["plug", "unplug"]


def plug(model: nn.Module, *, options: CommOptions | None = None) -> None:
    """Moves the all-gathers and reduce-scatters of all FSDP2 modules in ``model`` to ringcomm.

    All ranks of the modules' meshes must call it, between steps. FSDP2 then gathers and reduces in
    buffers of ringcomm's heap, which need no staging copy. Groups of the backend "ringcomm" already
    have communicators. For a group of another backend, a communicator of the same ranks is built
    over the group's store; it lives until :func:`unplug`, or as long as the model.

    On a mesh that also replicates, FSDP2 runs the all-reduce on its own group, without ringcomm.

    Args:
        model: a module to which ``fully_shard`` was applied, or that contains such modules.
        options: options of the communicators that this call builds, including their timeout (None
            means 30 minutes).

    Raises:
        ArgumentError: the model has no FSDP2 module that shards, or a module is plugged already, or
            ``options`` are given for a group that already has a communicator.
        UnsupportedError: ranks of a group run on several machines; the message names two. A rank
            that gets the error from another rank raises RendezvousError with the same text.
        RingcommError: see :meth:`ringcomm.Communicator.from_store`.
    """
    found = list(_param_groups(model))
    if not found:
        raise ArgumentError(
            "fsdp2.plug: expected a model with modules that fully_shard() has sharded, got a "
            f"{type(model).__name__} without any; call fully_shard(model) first"
        )
    for name, param_group in found:
        if any(isinstance(comm, _OnHeap) for comm in _comms(param_group).values()):
            raise ArgumentError(
                f"fsdp2.plug: expected modules that are not plugged, but {name or 'the root'!r} "
                "is; call unplug(model) first"
            )
    connections = _Connections(options)
    try:
        for _, param_group in found:
            for group in _process_groups(param_group):
                connections.connect(group, param_group.device)
    except BaseException:
        connections.close()
        raise
    for _, param_group in found:
        gather, scatter = _comms(param_group).values()
        param_group._all_gather_comm = _RingcommAllGather(connections, gather)
        param_group._reduce_scatter_comm = _RingcommReduceScatter(connections, scatter)


def unplug(model: nn.Module) -> None:
    """Restores FSDP2's own collectives in ``model``; closes communicators that plug() has built.

    All ranks must call it, between steps. Tensors in the heap, such as gradients, stay valid.

    Raises:
        ArgumentError: no module of the model is plugged.
    """
    plugged = [
        (param_group, name, comm)
        for _, param_group in _param_groups(model)
        for name, comm in _comms(param_group).items()
        if isinstance(comm, _OnHeap)
    ]
    if not plugged:
        raise ArgumentError(
            "fsdp2.unplug: expected a model that plug() was called with, got a "
            f"{type(model).__name__} without plugged modules"
        )
    for param_group, name, comm in plugged:
        setattr(param_group, name, comm.before)
        comm.connections.release(comm)


# FSDP2 has no public access to a module's groups and to its objects for gathering and reducing.
# These private names exist in torch 2.11 to 2.15.
_COMMS = ("_all_gather_comm", "_reduce_scatter_comm")


def _param_groups(model: nn.Module) -> Iterator[tuple[str, FSDPParamGroup]]:
    """Yields FSDP2's groups of parameters, each with the name of its module."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        # In torch 2.11 a module has one group or none.
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            # Several modules share a group after fully_shard([a, b]). replicate() makes groups that
            # neither gather nor scatter.
            if group is None or id(group) in seen or not isinstance(group.mesh_info, FSDPMeshInfo):
                continue
            seen.add(id(group))
            yield name, group


def _comms(param_group: FSDPParamGroup) -> dict[str, Comm]:
    return {name: getattr(param_group, name) for name in _COMMS}


def _process_groups(param_group: Any) -> list[ProcessGroup]:
    """Returns the process groups of a parameter group, in the same order on all ranks."""
    groups = [param_group.mesh_info.shard_process_group, param_group._reduce_scatter_process_group]
    # If reshard_after_forward is a number, the backward gathers among fewer ranks.
    if param_group.post_forward_mesh_info is not None:
        groups.append(param_group.post_forward_mesh_info.shard_process_group)
    return groups


class _Connections:
    """The communicators of one plugged model, by process group.

    Args:
        options: options of the communicators that are built.
    """

    def __init__(self, options: CommOptions | None) -> None:
        self._options = options
        self._built: dict[ProcessGroup, Communicators] = {}
        self._users: WeakSet[_OnHeap] = WeakSet()

    def connect(self, group: ProcessGroup, device: torch.device) -> None:
        """Makes a group's communicator ready for tensors on ``device``; all members call it."""
        if group.size() == 1:  # FSDP2 then copies and calls no collective
            return
        if ours := behind(group):
            if self._options is not None:
                raise ArgumentError(
                    f"fsdp2.plug on rank {group.rank()} of {group.size()}: options: expected None "
                    'for a group of the backend "ringcomm", which already has a communicator; pass '
                    "the options to init_process_group(pg_options=...)"
                )
            ours.communicator_on(device)
        else:
            self._of_foreign(group).of((torch.empty(0, device=device),), "fsdp2.plug")

    def of(self, group: ProcessGroup, tensor: Tensor, operation: str) -> Communicator:
        """Returns the communicator of a group, for tensors on the device of ``tensor``."""
        if ours := behind(group):
            return ours.communicator_on(tensor.device)
        return self._of_foreign(group).of((tensor,), operation)

    def _of_foreign(self, group: ProcessGroup) -> Communicators:
        built = self._built.get(group)
        if built is None:
            # Build the communicator now: set_separate_reduce_scatter_group() may have made the
            # group after plug().
            options = self._options or CommOptions()
            built = self._built[group] = Communicators.over(group, "fsdp2", options)
        return built

    def add(self, user: _OnHeap) -> None:
        self._users.add(user)

    def release(self, user: _OnHeap) -> None:
        """Removes a custom collective; with the last one, closes the communicators built here."""
        self._users.discard(user)
        if not self._users:
            self.close()

    def close(self) -> None:
        with ExitStack() as stack:  # a failing close does not stop the others
            while self._built:
                stack.callback(self._built.popitem()[1].close)


class _OnHeap(Comm):
    """The base class of both custom collectives; it allocates their buffers in the heap.

    Args:
        connections: the communicators of the plugged model.
        before: FSDP2's own object, which unplug() restores.
    """

    def __init__(self, connections: _Connections, before: Comm) -> None:
        self.before = before
        self.connections = connections
        connections.add(self)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return memory.empty(size, dtype=dtype, device=device)


class _RingcommAllGather(_OnHeap, AllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        communicator = self.connections.of(group, output_tensor, "fsdp2 all-gather")
        return _as_torch_work(
            communicator.all_gather_into_tensor(output_tensor, input_tensor, async_op),
            output_tensor,
            OP_TYPES["all_gather_into_tensor"],
        )


class _RingcommReduceScatter(_OnHeap, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        communicator = self.connections.of(group, output_tensor, "fsdp2 reduce-scatter")
        return _as_torch_work(
            communicator.reduce_scatter_tensor(output_tensor, input_tensor, op, async_op),
            output_tensor,
            OP_TYPES["reduce_scatter_tensor"],
        )


def _as_torch_work(started: StartedWork | None, output: Tensor, op_type: int) -> Work | None:
    # FSDP2 waits only for instances of torch's Work, and assumes that other objects are done.
    return None if started is None else PendingWork(started, [output], op_type)
