"""Parameters made whole, at any stage: to read them, or to give all ranks one rank's changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.memory import normal_tensors
from ringcomm.optim.agreement import all_or_none, check_agreement
from ringcomm.optim.dtensors import local_of
from ringcomm.zero.buckets import ParamBucket, ReplicatedBucket, ShardedBucket
from ringcomm.zero.engine import ShardEngine, owner_of
from ringcomm.zero.hooks import uncompiled
from ringcomm.zero.recoding import follow_coded, recode
from ringcomm.zero.sharding import engine_of, is_sharded

Tensor = torch.Tensor


@contextmanager
def gathered(
    module: nn.Module | Tensor | Iterable[Tensor], write_from: int | None = None
) -> Iterator[None]:
    """Makes parameters whole and readable inside the context, at any stage.

    Reading needs no other rank: one rank may do it alone, while no rank steps. With
    ``params="world"`` over several nodes it is collective.

    Args:
        module: the module that ``shard()`` returned, or a part of it: a module inside, a parameter,
            or several. Of a part only the units that have its parameters are gathered.
        write_from: a rank whose changes all ranks take over at the end, which makes the context
            collective. None: changes are refused at stage 3, and at lower stages stay this rank's
            own.

    Raises:
        ArgumentError: the module is not sharded, or has no parameter; there is no such rank; or
            parameters were changed at stage 3 without ``write_from``, or others than those of a
            part, or replaced; or ``write_from`` inside ``exchanged()``.
        MismatchError: the ranks would take over different parameters, or other ranks'.
        Exception: with ``write_from``, what is raised inside, on all ranks. None takes over
            anything: changes are gone at stage 3, and at lower stages stay this rank's own.
    """
    parts = _engines_and_parts(module)
    if write_from is not None:
        with _on_all(parts):
            _check_writing(parts, write_from)
    with ExitStack() as here:
        for engine, part in parts:
            units = [
                unit
                for unit in engine.parts.units
                if part is None or any(id(param) in part for param in unit.params.values())
            ]
            here.enter_context(engine.here(units))
            if engine.gatherer is not None:
                for unit in units:
                    engine.gatherer.open(unit)
        if write_from is None:
            yield
            return
        with _on_all(parts):
            yield
        for engine, part in parts:
            _take_changes(engine, write_from, part)


_Parts = Sequence[tuple[ShardEngine, frozenset[int] | None]]


@contextmanager
def _on_all(parts: _Parts) -> Iterator[None]:
    """Has what raises inside raise on all ranks of the engines; collective."""
    with ExitStack() as ranks:
        for engine, _ in parts:
            ranks.enter_context(all_or_none(engine.comm, "gathered", engine.mesh))
        yield


def _check_writing(parts: _Parts, write_from: int) -> None:
    for engine, _ in parts:
        engine.check_values("gathered")
        world_size = engine.comm.world_size
        if type(write_from) is not int or not 0 <= write_from < world_size:
            raise ArgumentError(
                f"gathered: write_from: expected a rank, 0 to {world_size - 1}, got {write_from!r}"
            )


def _engines_and_parts(
    module: nn.Module | Tensor | Iterable[Tensor],
) -> list[tuple[ShardEngine, frozenset[int] | None]]:
    """Returns the engines of parameters, each with the ``id`` of its own; None for all that it has.

    A module that was put into a sharded one may be sharded by itself.

    Raises:
        ArgumentError: a module is not sharded, or there is no parameter of a sharded one.
    """
    if isinstance(module, nn.Module):
        module = uncompiled(module)
        params: list[Tensor] = [p for p in module.parameters() if owner_of(p) is not None]
        if is_sharded(module) or not params:
            whole = engine_of(module, "gathered")
            nested = dict.fromkeys(map(_engine_of_param, params))
            return [(each, None) for each in {whole: None, **nested}]
    else:
        params = [module] if isinstance(module, Tensor) else list(module)
    found: dict[ShardEngine, set[int]] = {}
    for param in params:
        found.setdefault(_engine_of_param(param), set()).add(id(param))
    if not found:
        raise ArgumentError("gathered: expected parameters of sharded modules, got none")
    return [(engine, frozenset(part)) for engine, part in found.items()]


def _engine_of_param(param: Tensor) -> ShardEngine:
    engine = owner_of(param) if isinstance(param, Tensor) else None
    if engine is None:
        kind = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else param
        raise ArgumentError(
            "gathered: expected a module that shard() returned, a module inside of it, or "
            f"parameters of it, got {kind}, which is none of its parameters"
        )
    return engine


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns ``module.state_dict()`` at any stage, with copies of all tensors and extra state.

    It needs no other rank: one rank may call it alone, while no rank steps. With
    ``params="world"`` over several nodes it is collective.

    Raises:
        ArgumentError: the module is not sharded.
    """
    engine = engine_of(module, "full_state_dict")
    with ExitStack() as here:
        for each, _ in _engines_and_parts(module):
            here.enter_context(each.here(each.parts.units))
        state = engine.parts.module.state_dict()
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
            for name, value in state.items()
        }


@normal_tensors()
def _take_changes(engine: ShardEngine, rank: int, part: frozenset[int] | None) -> None:
    """Gives all ranks one rank's parameters, and their masters with them; collective.

    Args:
        engine: the engine of the parameters.
        rank: the rank that has changed them.
        part: ``id`` of the parameters; None for all.
    """
    comm = engine.comm
    engine.check_all("gathered")
    named = dict(engine.named_parameters())
    names = [name for name, param in named.items() if part is None or id(param) in part]
    told = {"parameters": names, "write_from": rank}
    check_agreement(comm, "gathered", {"options": told})
    # Chunks are about to change, so all ranks must have finished reading them.
    comm.barrier()
    engine.count_change([named[name] for name in names])
    with engine.together("gathered"):
        _broadcast(engine, named, rank, part)
        engine.placement.refresh_masters(part)
        follow_coded(engine)
    comm.barrier()
    if recode(engine):
        _gather_again(engine)
        comm.barrier()


def _gather_again(engine: ShardEngine) -> None:
    """Gathers what is gathered once more, since its chunks have changed; perhaps collective."""
    for bucket in engine.stored:
        if isinstance(bucket, ShardedBucket) and bucket.is_here:
            bucket.fill()
            bucket.accept_changes()


def _broadcast(
    engine: ShardEngine, named: Mapping[str, Tensor], rank: int, part: frozenset[int] | None
) -> None:
    """Gives all ranks one rank's gathered parameters, of which each keeps its own; collective."""
    comm = engine.comm
    placed: set[int] = set()
    for bucket in (*engine.stored, *engine.parts.stored_frozen):
        assert isinstance(bucket, (ReplicatedBucket, ShardedBucket))
        for begin, end in _changed_in(bucket, part):
            comm.broadcast(bucket.flat[begin:end], rank)
            if isinstance(bucket, ShardedBucket):
                bucket.keep_own(begin, end)
        if isinstance(bucket, ShardedBucket):
            bucket.accept_changes(part)
        if part is None and bucket.wire is None:
            bucket.wide = None
        placed.update(id(each.param) for each in bucket.params)
    for param in named.values():
        if id(param) not in placed and param.numel() and (part is None or id(param) in part):
            comm.broadcast(local_of(param).detach(), rank)


def _changed_in(bucket: ParamBucket, part: frozenset[int] | None) -> list[tuple[int, int]]:
    """Returns the runs of a bucket's elements that parameters of a part fill; None for all."""
    chosen = [each for each in bucket.params if part is None or id(each.param) in part]
    if len(chosen) == len(bucket.params):
        return [(0, bucket.layout.elems)]
    return [(each.begin, each.end) for each in chosen]
