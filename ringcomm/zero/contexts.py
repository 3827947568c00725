"""``gathered()``, ``no_sync()`` and ``unshard()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.zero.absent import make_present
from ringcomm.zero.buckets import ReplicatedBucket, ShardedBucket
from ringcomm.zero.engine import ShardEngine
from ringcomm.zero.profile import Trace
from ringcomm.zero.sharding import engine_of, forget_engine


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, backwards add to gradients on this rank and reduce nothing, at any stage.

    The next backward outside, or the step, reduces all. At stages 2 and 3 the full gradients stay
    in ``p.grad`` until then, which is their memory; at stages 0 and 1 the step reduces anyway.
    """
    engine = engine_of(module, "no_sync")
    return engine.no_sync() if engine.reduction is not None else nullcontext()


@contextmanager
def gathered(module: nn.Module, write_from: int | None = None) -> Iterator[None]:
    """Inside, the module's parameters are whole and readable, at any stage.

    Reading takes no other rank: one rank may do it alone, while no rank steps.

    Args:
        module: what ``shard()`` returned.
        write_from: a rank whose changes all ranks take over at the end; the context is collective
            then. None: changes are refused at stage 3, and stay this rank's own before.

    Raises:
        ArgumentError: the module is not sharded, there is no such rank, or parameters were changed
            at stage 3 without ``write_from``, or replaced.
    """
    engine = engine_of(module, "gathered")
    world_size = engine.comm.world_size
    if write_from is not None and not 0 <= write_from < world_size:
        raise ArgumentError(
            f"gathered: write_from: expected a rank, 0 to {world_size - 1}, got {write_from}"
        )
    with _all_here(engine):
        if engine.gatherer is not None:
            engine.gatherer.open()
        yield
        if write_from is not None:
            _take_changes(engine, write_from)


@contextmanager
def traced(module: nn.Module) -> Iterator[Trace]:
    """Inside, the engine records when it communicates, and when it waits for that.

    Yields:
        the trace, empty at first; :meth:`Trace.write` makes a file that Chrome and Perfetto show.

    Raises:
        ArgumentError: the module is not sharded.
    """
    trace = engine_of(module, "traced").trace
    trace.spans.clear()
    trace.on = True
    try:
        yield trace
    finally:
        trace.on = False


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """``module.state_dict()`` at any stage: copies of all parameters and buffers, and extra state.

    Takes no other rank: one rank may call it alone, while no rank steps.

    Raises:
        ArgumentError: the module is not sharded.
    """
    engine = engine_of(module, "full_state_dict")
    with _all_here(engine):
        state = engine.parts.module.state_dict()
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
            for name, value in state.items()
        }


@contextmanager
def _all_here(engine: ShardEngine) -> Iterator[None]:
    gatherer = engine.gatherer
    if gatherer is None:
        yield
        return
    with gatherer.pin():
        for unit in engine.parts.units:
            gatherer.bring(unit)
        yield


@torch.no_grad()
def _take_changes(engine: ShardEngine, rank: int) -> None:
    """Gives all ranks one rank's parameters, and their masters with them; collective."""
    comm = engine.comm
    engine.slots.check_all(comm, "gathered")
    # Chunks are about to change: all ranks have read them.
    comm.barrier()
    placed: set[int] = set()
    for bucket in (*engine.stored, *engine.parts.stored_frozen):
        assert isinstance(bucket, (ReplicatedBucket, ShardedBucket))
        comm.broadcast(bucket.flat, rank)
        bucket.wide = None
        if isinstance(bucket, ShardedBucket):
            bucket.keep_own()
            bucket.accept_changes()
        placed.update(id(each.param) for each in bucket.params)
    for param in engine.parts.module.parameters():
        if id(param) not in placed and param.numel():
            comm.broadcast(param.detach(), rank)
    engine.placement.refresh_masters()
    comm.barrier()


def unshard(module: nn.Module) -> nn.Module:
    """Ends what ``shard()`` began: hooks are gone, parameters are plain and whole; collective.

    Values and dtypes are those of the last step. An optimizer on the parameters cannot be used any
    more.

    Returns:
        ``module``.

    Raises:
        ArgumentError: the module is not sharded.
    """
    engine = engine_of(module, "unshard")
    root = engine.parts.module
    with _all_here(engine):
        copies = [(param, param.detach().clone()) for param in root.parameters()]
    # Peers may still be reading this rank's chunks.
    engine.comm.barrier()
    engine.close()
    if engine.stage > 1:
        engine.order.leave(engine.number)
    make_present([param for param, _ in copies])
    for param, copy in copies:
        param.data = copy
    forget_engine(root)
    return module
