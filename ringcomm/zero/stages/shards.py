# SPDX-License-Identifier: Apache-2.0
"""The shards of parameters that a rank keeps, for reading and writing without unsharding.

NOTE [What a rank keeps]
At stage 3 a rank keeps its share of each parameter. At stages 1 and 2 every rank has whole
parameters; its shard is the share whose optimizer state it keeps. So data that a program computes
from shards (an average, a second set of weights) are also divided among the ranks. At stage 0 a
shard is the whole parameter. At stages 0 to 2 the shard of a parameter that was frozen at
``shard()``, and so is in no bucket, is also the whole parameter. If parameters are on a disk,
``values`` is a new copy at each access; :func:`writing_shards` writes its copies when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ringcomm.comm.agreement import all_or_none, check_agreement
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.memory import normal_tensors
from ringcomm.optim.buckets import Bucket, following, sharers_of
from ringcomm.optim.dtensors import local_of, without_torch_function
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.stages.buckets import (
    DiskBucket,
    ParamBucket,
    ReplicatedBucket,
    ShardedBucket,
    WorldBucket,
    checksum,
)
from ringcomm.zero.stages.engine import ShardEngine, owner_of
from ringcomm.zero.stages.hooks import uncompiled
from ringcomm.zero.stages.optimizer import refresh_masters
from ringcomm.zero.stages.sharding import engine_of, is_sharded

# ---- Quantized parameters after writes outside of a step: their masters, and new quantization ----
# See NOTE [Quantized parameters] in ``optim/buckets.py``.

Tensor = torch.Tensor


def own_of(bucket: ParamBucket) -> Tensor:
    """Returns the parameters for which this rank keeps state: [state chunk elements]."""
    if isinstance(bucket, ShardedBucket):
        return bucket.own
    assert isinstance(bucket, ReplicatedBucket)
    return bucket.flat[bucket.state_chunk.begin : bucket.state_chunk.end]


def follow_quantized(engine: ShardEngine) -> None:
    """Updates masters after writes to their parameters; call it before :func:`requantize`."""
    for bucket in engine.stored:
        if bucket.compression is not None:
            assert bucket.wide is not None
            bucket.wide.copy_(following(bucket.wide, own_of(bucket), bucket.compression))


def requantize(engine: ShardEngine) -> bool:
    """Sets quantized parameters to the values of their masters, on all ranks; collective.

    No rank may read its peers' parameters during this call.

    Returns:
        True if there are quantized parameters.
    """
    quantized = [bucket for bucket in engine.stored if bucket.compression is not None]
    for bucket in quantized:
        bucket.settle()
    if quantized:
        engine.comm.barrier()
    return bool(quantized)


@dataclass(frozen=True)
class LocalShard:
    """Elements [begin, end) of a flattened parameter, which this rank keeps; may be empty.

    Attributes:
        name: name of the parameter.
        begin, end: the range of elements; for a DTensor, a range of this rank's local tensor.
    """

    name: str
    begin: int
    end: int
    _values: Callable[[], Tensor] = field(repr=False, compare=False)

    @property
    def values(self) -> Tensor:
        """The values [end - begin], in the parameter's dtype: a view of this rank's memory.

        The view stays valid as long as the module is sharded. For parameters on a disk the result
        is a copy of the values; inside :func:`writing_shards`, the copy that will be written.
        """
        return self._values()


def local_shards(module: nn.Module) -> dict[str, LocalShard]:
    """Returns this rank's shard of each parameter, by name; needs no other rank.

    A step changes the shards' values. Write to them only in :func:`writing_shards`.

    Args:
        module: the module that ``shard()`` returned.

    Raises:
        ArgumentError: the module is not sharded.
        UnsupportedError: a parameter that is in no bucket is not contiguous.
    """
    engine = engine_of(module, "local_shards")
    engine.refuse_under_way("local_shards")
    names = engine.names()
    found = {
        shard.name: shard for each in _buckets(engine) for shard in _shards_of(engine, each, names)
    }
    shards = {}
    with without_torch_function():
        for name, param in engine.named_parameters():
            shards[name] = found[name] if name in found else _whole(engine, name, param)
    return shards


@contextmanager
def writing_shards(module: nn.Module) -> Iterator[dict[str, LocalShard]]:
    """A context in which you write to this rank's shards; collective.

    At its end all ranks get the new values, and the masters of changed elements are set to them.
    The module must not run inside. If several ranks keep the same elements (stage 0, frozen
    parameters below stage 3, and ``state="node"``), all must write the same values.

    Args:
        module: the module that ``shard()`` returned.

    Yields:
        The shards, as :func:`local_shards` returns them.

    Raises:
        ArgumentError: the module is not sharded, or the context is inside ``unsharded()`` or
            :func:`exchanged`.
        MismatchError: stage 0, and the ranks wrote different values.
        Exception: an exception of the body; all ranks raise it, and nothing is changed.
    """
    engine = engine_of(module, "writing_shards")
    memory = _Memory(engine, "writing_shards")
    with memory.changing():
        yield memory.shards
    with engine.together("writing_shards"):
        memory.follow()
    requantize(engine)


@contextmanager
def exchanged(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives parameters other values inside the context, for an evaluation; collective.

    At its end the parameters have their own values again. Masters, gradients and state stay
    unchanged. Steps, checkpoints and all other operations on masters are refused inside, on all
    ranks; ``full_state_dict()`` and ``save_pretrained()`` use the other values. Writes to
    parameters inside are lost.

    Args:
        module: the module that ``shard()`` returned.
        values: by name, the values of this rank's shard: [end - begin], any floating-point dtype.
            All ranks pass the same names, even for empty shards. Other parameters stay unchanged.

    Raises:
        ArgumentError: the module is not sharded, ``values`` do not fit, or the context is inside
            ``unsharded()`` or ``exchanged()``; all ranks raise, and nothing is changed.
        MismatchError: the ranks gave values of different parameters, or, at stage 0, different
            values; nothing was changed.
    """
    engine = engine_of(module, "exchanged")
    memory = _Memory(engine, "exchanged")
    with memory.changing() as told:
        memory.check_values(values)
        # If only some ranks passed values of a parameter, it would get a mixture of values.
        told["parameters"] = sorted(values)
        for name, value in values.items():
            with normal_tensors():
                memory.shards[name].values.copy_(value)
    _mark_exchanged(engine, True)
    try:
        yield
    finally:
        _mark_exchanged(engine, False)
        try:
            engine.change("exchanged")
        finally:
            # From here on no rank reads memory that its peers are about to change.
            engine.comm.barrier()
            memory.put_back()
            publish(engine)


def _mark_exchanged(engine: ShardEngine, exchanged: bool) -> None:
    engine.exchanged = exchanged
    for bucket in engine.stored:
        if isinstance(bucket, WorldBucket):
            bucket.has_other_values = exchanged


# ---- the memory of shards -----------------------------------------------------------------------


def _buckets(engine: ShardEngine) -> list[ParamBucket]:
    return [*engine.stored, *engine.setup.stored_frozen]


def _shards_of(
    engine: ShardEngine, bucket: ParamBucket, names: Mapping[int, str]
) -> Iterator[LocalShard]:
    chunk = bucket.state_chunk
    for entry in bucket.params:
        low, high = max(entry.begin, chunk.begin), min(entry.end, chunk.end)
        name = names[id(entry.param)]
        begin, end = (low - entry.begin, high - entry.begin) if low < high else (0, 0)
        here = slice(low - chunk.begin, high - chunk.begin) if low < high else slice(0)
        values: Callable[[], Tensor]
        if isinstance(bucket, DiskBucket):
            values = partial(_read, engine, bucket, name, here)
        else:
            values = partial(_same, own_of(bucket)[here])
        yield LocalShard(name, begin, end, values)


def _same(values: Tensor) -> Tensor:
    return values


def _read(engine: ShardEngine, bucket: DiskBucket, name: str, here: slice) -> Tensor:
    """Returns a new copy of a shard that is on the disk, or the copy that the user writes to."""
    if engine.shard_copies is not None:
        return engine.shard_copies[name]
    with bucket.here():
        values: Tensor = bucket.own[here].clone()
    return values


def _whole(engine: ShardEngine, name: str, param: Tensor) -> LocalShard:
    here = local_of(param).detach()
    if not here.is_contiguous():
        head = where("local_shards", engine.comm.rank, engine.comm.world_size)
        raise UnsupportedError(
            f"{head}: parameter {name}: expected contiguous elements, since it was frozen at "
            "shard(); make it contiguous() before shard()"
        )
    return LocalShard(name, 0, here.numel(), partial(_same, here.view(-1)))


class _Memory:
    """The memory of all shards of a module while they are written to."""

    def __init__(self, engine: ShardEngine, operation: str) -> None:
        self._engine = engine
        self._operation = operation
        self.shards: dict[str, LocalShard] = {}
        self._kept: dict[str, Tensor] = {}

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """Lets all ranks write to their shards in the body, and undoes it on errors; collective.

        Yields:
            A dict for values that must be equal on all ranks, as JSON types.
        """
        engine = self._engine
        with self._all_or_none():
            engine.check(self._operation)
            # From here on no rank reads memory that its peers are about to change.
            engine.change(self._operation)
            self._take_shards()
            if isinstance(engine.placement.owner, ShardedStep):
                engine.placement.owner.written.take_over()
        self._kept = {name: shard.values.clone() for name, shard in self.shards.items()}
        told: dict[str, Any] = {}
        try:
            if engine.setup.store is not None:
                engine.shard_copies = {n: shard.values for n, shard in self.shards.items()}
            try:
                with self._all_or_none():
                    yield told
            finally:
                engine.shard_copies = None
            if engine.stage == 0:
                for number, bucket in enumerate(engine.stored):
                    told[f"parameters {number}"] = checksum(own_of(bucket))
            if told:
                check_agreement(engine.comm, self._operation, {"options": told})
            self._write_chunks({name: shard.values for name, shard in self.shards.items()})
        except BaseException as error:
            self.put_back()
            # All ranks raise here, so all reach this barrier: no rank may read a peer's shards
            # before the peer has restored them.
            if isinstance(error, Exception) and not engine.comm.aborted:
                engine.comm.barrier()
            raise
        publish(engine)

    def _take_shards(self) -> None:
        self.shards = local_shards(self._engine.setup.module)
        if self._engine.setup.store is not None:
            # Make ``values`` return one copy of a shard, not a new copy at each access.
            self.shards = {
                name: replace(shard, _values=partial(_same, shard.values))
                for name, shard in self.shards.items()
            }

    def _all_or_none(self) -> AbstractContextManager[None]:
        return all_or_none(self._engine.comm, self._operation, self._engine.mesh)

    def check_values(self, values: Mapping[str, Tensor]) -> None:
        """Raises ArgumentError if values do not fit the shards."""
        head = where(self._operation, self._engine.comm.rank, self._engine.comm.world_size)
        for name, value in values.items():
            shard = self.shards.get(name)
            if shard is None:
                raise ArgumentError(f"{head}: values: the module has no parameter {name!r}")
            expected = tuple(shard.values.shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != expected:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(
                    f"{head}: values: {name}: expected this rank's shard, a tensor of shape "
                    f"{expected}, got {got}"
                )

    @normal_tensors()
    def put_back(self) -> None:
        """Restores the earlier values of the shards."""
        for name, values in self._kept.items():
            self.shards[name].values.copy_(values)
        self._write_chunks(self._kept)

    @normal_tensors()
    def _write_chunks(self, values: Mapping[str, Tensor]) -> None:
        """Writes values, by name, to the chunks on this rank's disk; disk faults raise later."""
        engine = self._engine
        if engine.setup.store is None:
            return
        names = engine.names()
        with engine.setup.store.keeping_faults():
            for bucket in _buckets(engine):
                with bucket.here(write=True):
                    own, chunk = own_of(bucket), bucket.state_chunk
                    for entry in bucket.params:
                        low, high = max(entry.begin, chunk.begin), min(entry.end, chunk.end)
                        if low < high:
                            here = own[low - chunk.begin : high - chunk.begin]
                            here.copy_(values[names[id(entry.param)]])

    @normal_tensors()
    def follow(self) -> None:
        """Sets the masters of all elements that have changed inside the context."""
        engine = self._engine
        owner, names = engine.placement.owner, engine.names()
        for number, bucket in enumerate(engine.stored):
            shards = _shards_of(engine, bucket, names)
            for entry, shard in zip(bucket.params, shards, strict=True):
                if shard.begin == shard.end:
                    continue
                begin = entry.begin + shard.begin
                end = begin + shard.end - shard.begin
                same = shard.values == self._kept[shard.name]
                if bucket.compression is not None:
                    # ``wide`` holds the masters, whether or not there is an optimizer yet.
                    assert bucket.wide is not None
                    first = bucket.state_chunk.begin
                    _follow(bucket.wide[begin - first : end - first], shard.values, same)
                elif owner is not None:
                    _follow_in(owner.buckets[number], (begin, end), shard.values, same)


def _follow(master: Tensor, values: Tensor, same: Tensor) -> None:
    """Sets masters to the new values, except at elements that have not changed (``same``)."""
    master.copy_(torch.where(same, master, values.to(master.dtype)))


def _follow_in(owned: Bucket, span: tuple[int, int], values: Tensor, same: Tensor) -> None:
    """Sets an optimizer's masters of elements [begin, end) of a bucket; see ``_follow``."""
    for piece in owned.pieces(*span) if owned.state.masters() else ():
        here, there = piece.within(*span)
        state = piece.state
        if state.master is not None:
            _follow(state.master[here], values[there], same[there])
        if state.remainder is not None:
            state.remainder[here].mul_(same[there])


def publish(engine: ShardEngine) -> None:
    """Sends the values that ranks have written to all ranks with copies of them; collective."""
    sharers = sharers_of(engine.comm, engine.options.state)
    assert sharers is not None
    for bucket in _buckets(engine):
        if isinstance(bucket, ShardedBucket):
            bucket.share()
        elif isinstance(bucket, ReplicatedBucket) and engine.stage > 0:
            chunks = bucket.layout.chunks(sharers)
            gathered = [bucket.flat[chunk.begin : chunk.end] for chunk in chunks]
            sharers.all_gather(gathered, own_of(bucket).clone())
    engine.comm.barrier()


# ---- Whole parameters, at any stage: to read them, or to give all ranks one rank's changes -------


@contextmanager
def unsharded(
    module: nn.Module | Tensor | Iterable[Tensor], write_from: int | None = None
) -> Iterator[None]:
    """Makes parameters whole and readable inside the context, at any stage.

    Reading needs no other rank: one rank may do it alone, while no rank takes a step. With
    ``params="world"`` over several nodes it is collective.

    Args:
        module: the module that ``shard()`` returned, or a part of it: a module inside, a parameter,
            or several. For a part, only the units that have its parameters are unsharded.
        write_from: the rank whose changes all ranks take over at the end, which makes the context
            collective. None: changes are refused at stage 3, and at lower stages remain on this
            rank alone.

    Raises:
        ArgumentError: the module is not sharded, or has no parameter; there is no such rank; at
            stage 3, parameters were changed without ``write_from``, outside of the given part, or
            were replaced; or ``write_from`` is used inside ``exchanged()``.
        MismatchError: the ranks would take over different parameters, or different ranks' changes.
        Exception: with ``write_from``, an exception of the body; all ranks raise it. No rank takes
            over changes: at stage 3 they are lost, at lower stages they remain on this rank alone.
    """
    engines = _engines_and_params(module)
    if write_from is not None:
        with _on_all(engines):
            _check_writing(engines, write_from)
    with ExitStack() as here:
        for engine, only in engines:
            units = [
                unit
                for unit in engine.setup.units
                if only is None or any(id(param) in only for param in unit.params.values())
            ]
            here.enter_context(engine.unsharded(units))
            if engine.unsharder is not None:
                for unit in units:
                    engine.unsharder.open(unit)
        if write_from is None:
            yield
            return
        with _on_all(engines):
            yield
        for engine, only in engines:
            _take_changes(engine, write_from, only)


_Engines = Sequence[tuple[ShardEngine, frozenset[int] | None]]


@contextmanager
def _on_all(engines: _Engines) -> Iterator[None]:
    """Raises on all ranks of the engines if the body raises on one of them; collective."""
    with ExitStack() as ranks:
        for engine, _ in engines:
            ranks.enter_context(all_or_none(engine.comm, "unsharded", engine.mesh))
        yield


def _check_writing(engines: _Engines, write_from: int) -> None:
    for engine, _ in engines:
        engine.check_values("unsharded")
        world_size = engine.comm.world_size
        if type(write_from) is not int or not 0 <= write_from < world_size:
            raise ArgumentError(
                f"unsharded: write_from: expected a rank, 0 to {world_size - 1}, got {write_from!r}"
            )


def _engines_and_params(
    module: nn.Module | Tensor | Iterable[Tensor],
) -> list[tuple[ShardEngine, frozenset[int] | None]]:
    """Returns the engines, each with the ``id`` of its chosen parameters; None for all parameters.

    A module that was added to a sharded module may be sharded by itself.

    Raises:
        ArgumentError: the module is not sharded, or no parameter belongs to a sharded module.
    """
    if isinstance(module, nn.Module):
        module = uncompiled(module)
        params: list[Tensor] = [p for p in module.parameters() if owner_of(p) is not None]
        if is_sharded(module) or not params:
            whole = engine_of(module, "unsharded")
            nested = dict.fromkeys(map(_engine_of_param, params))
            return [(each, None) for each in {whole: None, **nested}]
    else:
        params = [module] if isinstance(module, Tensor) else list(module)
    found: dict[ShardEngine, set[int]] = {}
    for param in params:
        found.setdefault(_engine_of_param(param), set()).add(id(param))
    if not found:
        raise ArgumentError("unsharded: expected parameters of sharded modules, got none")
    return [(engine, frozenset(own)) for engine, own in found.items()]


def _engine_of_param(param: Tensor) -> ShardEngine:
    engine = owner_of(param) if isinstance(param, Tensor) else None
    if engine is None:
        kind = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else param
        raise ArgumentError(
            "unsharded: expected a module that shard() returned, a module inside of it, or "
            f"parameters of it, got {kind}, which is not a parameter of a sharded module"
        )
    return engine


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns ``module.state_dict()`` at any stage, with copies of all tensors and extra state.

    It needs no other rank: one rank may call it alone, while no rank takes a step. With
    ``params="world"`` over several nodes it is collective.

    Raises:
        ArgumentError: the module is not sharded.
    """
    engine = engine_of(module, "full_state_dict")
    with ExitStack() as here:
        for each, _ in _engines_and_params(module):
            here.enter_context(each.unsharded(each.setup.units))
        state = engine.setup.module.state_dict()
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
            for name, value in state.items()
        }


@normal_tensors()
def _take_changes(engine: ShardEngine, rank: int, only: frozenset[int] | None) -> None:
    """Copies one rank's parameters, and their masters, to all ranks; collective.

    Args:
        engine: the engine of the parameters.
        rank: the rank that has changed them.
        only: ``id`` of the parameters; None for all.
    """
    comm = engine.comm
    engine.check_all("unsharded")
    named = dict(engine.named_parameters())
    names = [name for name, param in named.items() if only is None or id(param) in only]
    told = {"parameters": names, "write_from": rank}
    check_agreement(comm, "unsharded", {"options": told})
    # Chunks are about to change, so all ranks must have finished reading them.
    comm.barrier()
    engine.count_change([named[name] for name in names])
    with engine.together("unsharded"):
        _broadcast(engine, named, rank, only)
        refresh_masters(engine, only)
        follow_quantized(engine)
    comm.barrier()
    if requantize(engine):
        _unshard_again(engine)
        comm.barrier()


def _unshard_again(engine: ShardEngine) -> None:
    """Updates unsharded buckets, whose chunks have changed; may be collective."""
    for bucket in engine.stored:
        if isinstance(bucket, ShardedBucket) and bucket.is_unsharded:
            bucket.fill()
            bucket.accept_changes()


def _broadcast(
    engine: ShardEngine, named: Mapping[str, Tensor], rank: int, only: frozenset[int] | None
) -> None:
    """Copies one rank's unsharded parameters to all ranks, which keep their parts; collective."""
    comm = engine.comm
    bucketed: set[int] = set()
    for bucket in (*engine.stored, *engine.setup.stored_frozen):
        assert isinstance(bucket, (ReplicatedBucket, ShardedBucket))
        for begin, end in _changed_in(bucket, only):
            comm.broadcast(bucket.flat[begin:end], rank)
            if isinstance(bucket, ShardedBucket):
                bucket.keep_own(begin, end)
        if isinstance(bucket, ShardedBucket):
            bucket.accept_changes(only)
        if only is None and bucket.compression is None:
            bucket.wide = None
        bucketed.update(id(each.param) for each in bucket.params)
    for param in named.values():
        if id(param) not in bucketed and param.numel() and (only is None or id(param) in only):
            comm.broadcast(local_of(param).detach(), rank)


def _changed_in(bucket: ParamBucket, only: frozenset[int] | None) -> list[tuple[int, int]]:
    """Returns the ranges of a bucket that parameters in ``only`` (by ``id``) fill; None: all."""
    chosen = [each for each in bucket.params if only is None or id(each.param) in only]
    if len(chosen) == len(bucket.params):
        return [(0, bucket.layout.elems)]
    return [(each.begin, each.end) for each in chosen]
