# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of one parameter's reduced gradient, FP32 master and optimizer state.

NOTE [Local shards]
A rank keeps the elements of a parameter that are in its chunks: its local shard, which is one
contiguous part of the flattened parameter and may be empty. Functions with ``local=True`` read and
write the local shard; :func:`ringcomm.zero.local_shards` returns its position. Other functions use
whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ringcomm.comm.agreement import all_or_none, check_agreement
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, where
from ringcomm.memory import normal_tensors
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.dtensors import (
    distributed_as,
    is_distributed,
    lies_alike,
    local_of,
    without_torch_function,
)
from ringcomm.optim.layout import Chunk, ParamSpec, Segment, within
from ringcomm.optim.placement import placement_of
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.stages.buckets import checksum
from ringcomm.zero.stages.engine import GradientHook, owner_of
from ringcomm.zero.stages.optimizer import ModulePlacement
from ringcomm.zero.stages.sharding import engine_of

Tensor = torch.Tensor


@normal_tensors()
def get_gradient(param: Tensor, *, local: bool = False) -> Tensor | None:
    """Returns a parameter's gradient, reduced over the ranks; collective, also with ``local``.

    The result is the gradient that the next step uses, before clipping by the norm of all
    parameters and after any other clipping. The gradient of a scaled loss is still scaled. The call
    reduces all gradients that were not reduced yet; at stages 0 and 1 these are all gradients.

    Args:
        param: a trainable parameter of a sharded module.
        local: return only this rank's local shard of the flattened gradient.

    Returns:
        A float32 copy; None if no rank has a gradient of the parameter.

    Raises:
        ArgumentError: ``param`` is not a trainable parameter of a sharded module, or no optimizer
            is prepared; or the call is inside ``exchanged()``, where parameters have other values.
        MismatchError: the ranks would gather different parameters.
    """
    with _on_all(param, "get_gradient"):
        access = _Access.of(param, "get_gradient")
        sharded = access.sharded
        access.placement.module.check_values("get_gradient")
        sharded.refuse_if_partly_updated("get_gradient")
    if access.gathers(local):
        access.agree({})
    sharded.reduce_now("get_gradient")
    if not bool(sharded.table.active[access.index]):
        return None
    if access.bucket is None:
        return access.shown(access.nothing(), local)
    chunk = access.bucket.layout.chunk(*sharded.setting.shard_of)
    own = within(sharded.plan.reduced(access.bucket), chunk, access.segment).float()
    if local and sharded.shard_of[1] > 1:
        return own.clone()
    return access.shown(access.gather(own), local)


@normal_tensors()
def set_gradient(param: Tensor, value: Tensor, *, local: bool = False) -> None:
    """Sets a parameter's reduced gradient for the next step; collective, also with ``local``.

    The call cancels an earlier clipping by norm. If a backward or a GradScaler changes the gradient
    later, stages 0 and 1 reduce the gradient again; at stages 2 and 3 backwards add to ``value``.

    Args:
        param: a trainable parameter of a sharded module.
        value: a tensor of the parameter's shape, equal on all ranks, or a DTensor like the
            parameter; with ``local`` this rank's local shard, flat.
        local: True if ``value`` is this rank's local shard.

    Raises:
        ArgumentError: as for :func:`get_gradient`, or ``value`` does not fit; nothing was changed.
        MismatchError: the ranks gave different values; nothing was changed.
    """
    with _on_all(param, "set_gradient"):
        access = _Access.of(param, "set_gradient")
        sharded = access.sharded
        access.placement.module.check_values("set_gradient")
        sharded.refuse_if_partly_updated("set_gradient")
        shard = access.local_shard_of(value, local)
    access.agree({"value": access.digest(value, local)})
    sharded.reduce_now("set_gradient")
    if access.bucket is not None:
        # At stage 0 each rank has the whole state, but only a shard of the reduced gradient.
        chunk = access.bucket.layout.chunk(*sharded.setting.shard_of)
        begin = max(access.segment.begin, access.bucket.chunk.begin)
        target = within(sharded.plan.reduced(access.bucket), chunk, access.segment)
        first = max(access.segment.begin, chunk.begin) - begin
        if target.numel():
            target.copy_(shard[first : first + target.numel()])
    sharded.wrote_gradient(access.index)


@normal_tensors()
def get_master(param: Tensor, *, local: bool = False) -> Tensor:
    """Returns a parameter's FP32 master; collective, unless ``local``.

    Args, Raises: as for :func:`get_gradient`.

    Returns:
        A float32 copy of the master, or of the parameter if the optimizer keeps no master.
    """
    with _on_all(param, "get_master", reads=True, local=local):
        access = _Access.of(param, "get_master")
        access.placement.module.check_values("get_master")
    if access.gathers(local):
        access.agree({})
    if access.bucket is None:
        return access.shown(access.nothing(), local)
    access.sharded.written.take_over()
    return access.read("master", local)


@normal_tensors()
def set_master(param: Tensor, value: Tensor, *, local: bool = False) -> None:
    """Sets a parameter's FP32 master, and the parameter; collective, also with ``local``.

    On all ranks the parameter becomes the master, rounded as a step rounds it, or to nearest if
    steps round stochastically. At stage 3 all unsharded parameters are resharded.

    Args, Raises: as for :func:`set_gradient`. Inside ``unsharded()`` ArgumentError is also raised.
    """
    with _on_all(param, "set_master"):
        access = _Access.of(param, "set_master")
        sharded = access.sharded
        sharded.refuse_if_partly_updated("set_master")
        shard = access.local_shard_of(value, local)
        access.placement.check("set_master")
        # From here on no rank reads memory that its peers are about to change.
        engine = owner_of(param)
        assert engine is not None
        engine.reshard_for_change("set_master")
        engine.count_change([param])
    access.agree({"value": access.digest(value, local)})
    if access.bucket is not None:
        sharded.written.take_over()
        with access.all_or_none() if access.may_fail(False) else nullcontext():
            write_master(access.bucket, access.own, shard)
        access.publish()


@normal_tensors()
def get_state(param: Tensor, name: str, *, local: bool = False) -> Tensor | None:
    """Returns a tensor of a parameter's optimizer state; collective, unless ``local``.

    Args:
        param: a trainable parameter of a sharded module.
        name: the name in the optimizer's ``state``: "exp_avg", "momentum_buffer" and others.
        local: return only this rank's local shard of the flattened tensor.

    Returns:
        A float32 copy; None if the parameter has no such state yet, as before its first step.

    Raises:
        ArgumentError: as for :func:`get_gradient`, but not inside ``exchanged()``; or the optimizer
            keeps no tensor of this name.
        MismatchError: the ranks would gather different tensors.
    """
    with _on_all(param, "get_state", reads=True, local=local):
        access = _Access.of(param, "get_state")
        has = access.has_state(name)
    if access.gathers(local):
        access.agree({"name": name})
    if not has:
        return None
    if name in access.kept_whole:
        return access.kept_whole[name].clone()
    if access.bucket is None:
        return access.shown(access.nothing(), local)
    return access.read(name, local)


@normal_tensors()
def set_state(param: Tensor, name: str, value: Tensor, *, local: bool = False) -> None:
    """Sets a tensor of a parameter's optimizer state; collective, unless ``local``.

    If several ranks keep the same state (stage 0, ``state="node"``, and Adafactor's rows and
    columns, which are whole also with ``local``), all of them must set the same values.

    Args, Raises: as for :func:`get_state` and :func:`set_gradient`. ArgumentError is also raised
        before the parameter's first step, when it has no state.
    """
    with _on_all(param, "set_state", local=local):
        access = _Access.of(param, "set_state")
        shard = access.state_shard_of(name, value, local)
    if not local:
        access.agree({"name": name, "value": access.digest(value, local)})
    if name in access.kept_whole:
        access.kept_whole[name].copy_(shard)
    elif access.bucket is not None:
        with access.all_or_none() if access.may_fail(local) else nullcontext():
            access.bucket.write_state(name, access.own.begin, shard)


def on_reduced(module: nn.Module, hook: GradientHook) -> RemovableHandle:
    """Registers a hook that sees each reduced gradient before the step; collective.

    The hook is called with a parameter's name, a view of this rank's local shard of the flattened
    gradient, and the index of the shard's first element. The step uses the values that the hook
    writes there. If any rank has a gradient of a parameter, each element of the gradient goes to
    the hooks of one rank; with ``state="node"``, of one rank per node.

    The calls come in the layout's order, in the thread that steps, once all gradients are reduced:
    in the step, or before it in ``clip_grad_norm_()`` or :func:`get_gradient`, which then use the
    values that the hooks have written. If a backward follows, the hooks see the new sum: at stages
    2 and 3 it includes the values that they have written, at stages 0 and 1 it does not.

    Args:
        module: the module that ``shard()`` returned.
        hook: the function; it must not call anything that other ranks take part in.

    Returns:
        A handle, whose ``remove()`` must be called on all ranks.

    Raises:
        ArgumentError: the module is not sharded, or ``hook`` cannot be called.
        MismatchError: the ranks have different numbers of hooks.
    """
    engine = engine_of(module, "on_reduced")
    with all_or_none(engine.comm, "on_reduced", engine.mesh):
        if not callable(hook):
            raise ArgumentError(f"on_reduced: hook: expected a function, got {hook!r}")
        owner = engine.placement.owner
        if isinstance(owner, ShardedStep):
            owner.refuse_in_backward("on_reduced")
    check_agreement(engine.comm, "on_reduced", {"options": {"hooks": len(engine.watchers) + 1}})
    handle = RemovableHandle(engine.watchers)
    engine.watchers[handle.id] = hook
    return handle


# ---- where a parameter is ------------------------------------------------------------------------


@contextmanager
def _on_all(
    param: Any, operation: str, *, reads: bool = False, local: bool = False
) -> Iterator[None]:
    """Raises on all ranks that take part in an operation if one raises in the body; collective.

    If ``param`` is in no sharded module, these ranks are unknown, and only this rank raises.

    Args:
        param: the argument that was passed as a parameter.
        operation: name of the operation in errors.
        reads: True for a read, which needs the other ranks only if they have other shards.
        local: True if no other ranks are needed.
    """
    engine = owner_of(param) if isinstance(param, Tensor) else None
    if engine is None or local or (reads and engine.placement.shard_of[1] == 1):
        yield
        return
    owner = engine.placement.owner
    mesh = owner.mesh if isinstance(owner, ShardedStep) else engine.mesh
    with all_or_none(engine.comm, operation, mesh):
        yield


@dataclass(frozen=True)
class _Access:
    """Locates a parameter's gradient, master and optimizer state, for one call of this file.

    Attributes:
        operation: name of the function that was called.
        param: the parameter.
        name: its name in the module.
        placement: the module as its optimizer sees it.
        sharded: the step of its optimizer.
        index: the parameter's index in the optimizer.
        bucket: the parameter's bucket; None if the parameter is in no bucket.
        segment: the parameter's elements in the bucket.
    """

    operation: str
    param: Tensor
    name: str
    placement: ModulePlacement
    sharded: ShardedStep
    index: int
    bucket: Bucket | None
    segment: Segment

    @classmethod
    def of(cls, param: Tensor, operation: str) -> _Access:
        placement = placement_of(param) if isinstance(param, Tensor) else None
        if not isinstance(placement, ModulePlacement):
            raise ArgumentError(
                f"{operation}: param: expected a parameter that was trainable when shard() "
                "prepared its module; frozen parameters have no gradient, master or state"
            )
        owner = placement.owner
        head = where(operation, placement.comm.rank, placement.comm.world_size)
        if not isinstance(owner, ShardedStep):
            raise ArgumentError(
                f"{head}: no optimizer has prepared the parameters yet, so that there is no state; "
                "build one of ringcomm.optim on them, and call its prepare(), or take a step"
            )
        if operation in ("get_gradient", "set_gradient"):
            owner.refuse_in_backward(operation)
        owner.refuse_under_way(operation)
        name = placement.name_of(param)
        index = next((at for at, each in enumerate(owner.params) if each is param), None)
        if index is None:
            raise ArgumentError(
                f"{head}: parameter {name}: is in none of its optimizer's groups, so it has no "
                "state; add it with add_param_group()"
            )
        number, segment = owner.layout.locations.get(index, (None, Segment(0, 0, index)))
        bucket = None if number is None else owner.buckets[number]
        return cls(operation, param, name, placement, owner, index, bucket, segment)

    @property
    def spec(self) -> ParamSpec:
        return self.sharded.layout.params[self.index]

    @property
    def comm(self) -> Communicator | None:
        return self.sharded.setting.comm

    @property
    def kept_whole(self) -> Mapping[str, Tensor]:
        """The tensors of the parameter's state that all ranks have in full, by name."""
        return self.sharded.rule.kept_whole(self.index)

    def gathers(self, local: bool) -> bool:
        """True if a read gathers from several ranks, which must then all read the same tensor."""
        return not local and self.sharded.shard_of[1] > 1

    def all_or_none(self) -> Any:
        """Returns a context after which all ranks continue, or all raise; collective."""
        return all_or_none(self.comm, self.operation, self.sharded.mesh)

    def agree(self, told: dict[str, Any]) -> None:
        """Checks that all ranks made the same call for the same parameter; collective."""
        if self.comm is not None:
            said = {"parameter": self.name, **told}
            check_agreement(self.comm, self.operation, {"options": said})

    def fail(self, said: str) -> ArgumentError:
        setting = self.sharded.setting
        head = where(self.operation, setting.rank, setting.world_size)
        return ArgumentError(f"{head}: parameter {self.name}: {said}")

    # ---- reading --------------------------------------------------------------------------------

    def nothing(self) -> Tensor:
        """Returns the values of a parameter that is in no bucket, since it has no elements."""
        return torch.empty(0, dtype=torch.float32, device=self.sharded.setting.device)

    @property
    def own(self) -> Chunk:
        """The elements of the bucket that belong to the parameter and to this rank's chunk."""
        assert self.bucket is not None
        low = min(max(self.segment.begin, self.bucket.chunk.begin), self.bucket.chunk.end)
        return Chunk(low, max(low, min(self.segment.end, self.bucket.chunk.end)))

    def may_fail(self, local: bool) -> bool:
        """True if access to offloaded state may fail on one rank while other ranks wait for it."""
        is_offloaded = not self.sharded.offload.in_memory or self.placement.store is not None
        return not local and is_offloaded

    def read(self, name: str, local: bool) -> Tensor:
        """Returns a copy of a tensor of the parameter's state: the whole, or the local shard."""
        assert self.bucket is not None
        with self.all_or_none() if self.may_fail(local) else nullcontext():
            shard = self.bucket.read_state(name, *self.own)
        if local or self.sharded.shard_of[1] == 1:
            return self.shown(shard, local)
        return self.shown(self.gather(shard), local)

    def gather(self, shard: Tensor) -> Tensor:
        """Returns the whole flattened tensor from the ranks' shards; collective."""
        sharers = self.sharded.setting.sharers
        if sharers is None or self.bucket is None:
            return shard
        whole = shard.new_empty(self.spec.elems)
        sharers.all_gather(self._shards_of_all(whole, self.segment.begin), shard.contiguous())
        return whole

    def _shards_of_all(self, flat: Tensor, first: int) -> list[Tensor]:
        """Returns each rank's shard of ``flat``; ``first`` is the bucket index of ``flat[0]``."""
        sharers = self.sharded.setting.sharers
        assert sharers is not None and self.bucket is not None
        everything = Chunk(first, first + flat.numel())
        shards = []
        for chunk in self.bucket.layout.chunks(sharers):
            low, high = max(self.segment.begin, chunk.begin), min(self.segment.end, chunk.end)
            here = Segment(low, max(low, high), self.index)
            shards.append(within(flat, everything, here))
        return shards

    def shown(self, flat: Tensor, local: bool) -> Tensor:
        """Returns ``flat`` if ``local``, else with the parameter's shape and distribution."""
        if local:
            return flat
        with without_torch_function():
            return distributed_as(self.param, self.spec.view(flat))

    # ---- writing --------------------------------------------------------------------------------

    def local_shard_of(self, value: Tensor, local: bool) -> Tensor:
        """Returns this rank's part of a value that is to be set, as float32.

        Raises:
            ArgumentError: the value does not fit.
        """
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise self.fail(f"value: expected a floating-point tensor, got {got}")
        if value.device != self.sharded.setting.device:
            device = self.sharded.setting.device
            raise self.fail(f"value: expected a tensor on {device}, got one on {value.device}")
        own = value if local else self._own_of(value)
        chunk = Chunk(0, 0) if self.bucket is None else self.bucket.chunk
        low, high = max(self.segment.begin, chunk.begin), min(self.segment.end, chunk.end)
        elems = max(0, high - low)
        expected = (elems,) if local else self.spec.shape
        if tuple(own.shape) != expected:
            raise self.fail(f"value: expected shape {expected}, got {tuple(own.shape)}")
        flat = own.detach().reshape(-1).to(torch.float32)
        begin = low - self.segment.begin
        return flat if local else flat[begin : begin + elems]

    def _own_of(self, value: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor, or of a DTensor placed like the parameter."""
        sharding = self.spec.sharding
        if is_distributed(value):
            if not lies_alike(value, self.param):
                raise self.fail(
                    "value: expected a tensor that is whole, or a DTensor with the mesh and "
                    "placements of the parameter, got another DTensor; pass .full_tensor() of it"
                )
            return local_of(value)
        if sharding is not None and tuple(value.shape) == sharding.shape:
            return sharding.local_tensor_of(value, self.spec.shape)
        return value

    def digest(self, value: Tensor, local: bool) -> str:
        """Returns a checksum that must be equal on all ranks; "" if ranks have different shards."""
        if local and self.sharded.shard_of[1] > 1:
            return ""
        return f"checksum {checksum(local_of(value).detach().contiguous())}"

    def has_state(self, name: str) -> bool:
        """True if the parameter has a state tensor of this name.

        Raises:
            ArgumentError: its optimizer keeps no tensor of this name.
        """
        known = (*self.sharded.rule.names(self.sharded.groups), *self.kept_whole)
        state = self.sharded.states()[self.index]
        if state is not None and name in (*state.tensors, *self.kept_whole):
            return True
        if name not in known:
            kept = ", ".join(known) or "no tensors"
            raise self.fail(f"{self.sharded.rule.name} keeps {kept}, got {name!r}")
        return False

    def state_shard_of(self, name: str, value: Tensor, local: bool) -> Tensor:
        """Returns this rank's part of a state tensor that is to be set.

        Raises:
            ArgumentError: the parameter has no state of this name yet, or the value does not fit.
        """
        if not self.has_state(name):
            raise self.fail(f"it has no {name} yet; take its first step before setting it")
        if name not in self.kept_whole:
            return self.local_shard_of(value, local)
        mine = self.kept_whole[name]
        if not isinstance(value, Tensor) or value.shape != mine.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else value
            raise self.fail(f"value: expected a tensor of shape {tuple(mine.shape)}, got {got}")
        return value

    def publish(self) -> None:
        """Sends this rank's new shard to all ranks with a copy of the parameter; collective."""
        bucket, sharers = self.bucket, self.sharded.setting.sharers
        assert bucket is not None
        if bucket.compression is not None:
            bucket.share()
        elif bucket.has_all_params and sharers is not None and self.sharded.shard_of[1] > 1:
            own = within(bucket.own_params, bucket.chunk, self.segment).clone()
            sharers.all_gather(self._shards_of_all(bucket.params, 0), own)
        else:
            bucket.share()
        if self.comm is not None:
            self.comm.barrier()


def write_master(bucket: Bucket, own: Chunk, shard: Tensor) -> None:
    """Writes a shard of masters in this rank's chunk, and the parameters rounded from them."""
    if bucket.state.remainder is None:
        first = bucket.chunk.begin
        with bucket.params_here(write=True):
            bucket.own_params[own.begin - first : own.end - first].copy_(shard)
    bucket.write_state("master", own.begin, shard)
