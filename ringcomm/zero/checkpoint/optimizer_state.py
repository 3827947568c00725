"""An optimizer's state as a checkpoint holds it: by parameter, whatever buckets it lies in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ringcomm.optim.buckets import Bucket
from ringcomm.optim.layout import Chunk
from ringcomm.optim.residuals import Debtors, nodes_for, take, with_residuals
from ringcomm.optim.state import MASTERS
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.buckets import ParamBucket
from ringcomm.zero.checkpoint.module_state import (
    SavedOptimizer,
    StatePart,
    bucket_parts,
    named,
    names_of,
)
from ringcomm.zero.engine import ShardEngine

Tensor = torch.Tensor


def state_parts(engine: ShardEngine, step: ShardedStep, whole: bool) -> Iterator[StatePart]:
    """The optimizer's state, by kind: this rank's chunks, or with ``whole`` all that it has.

    A parameter has the kinds that it needs, whatever others its bucket has, so that buckets may be
    others where it is loaded. Moments of 8 bits are copies in FP32, and all is a copy of what lies
    in another tier than memory.
    """
    step.written.take_over()
    for stored, bucket in zip(engine.stored, step.buckets, strict=True):
        wanted = stored.state_chunk if whole else stored.chunk
        for kind, flat in bucket.state.tensors().items():
            names = _state_names(engine, step, kind, step.groups)
            yield from bucket_parts(stored, flat, stored.state_chunk, wanted, names)
    yield from whole_parts(engine, step, whole)


def parts_to_save(engine: ShardEngine, step: ShardedStep) -> Iterator[StatePart]:
    """Yields the optimizer's state of this rank's chunks, whose elements are read as they are due.

    In memory that is :func:`state_parts`. In another tier ``local`` has no memory, and the elements
    come from there piece by piece, in the order in which a file takes them.
    """
    yield from _residual_parts(engine, step)
    if step.tier is None:
        yield from state_parts(engine, step, whole=False)
        return
    step.written.take_over()
    for stored, bucket in zip(engine.stored, step.buckets, strict=True):
        for kind, dtype in bucket.state.dtypes().items():
            stand_in = torch.empty(bucket.chunk.elems, dtype=dtype, device="meta")
            names = _state_names(engine, step, kind, step.groups)
            parts = bucket_parts(stored, stand_in, stored.state_chunk, stored.chunk, names)
            for part in parts:
                yield replace(part, read=partial(_blocks, bucket, kind))
    yield from whole_parts(engine, step, whole=False)


def _residual_parts(engine: ShardEngine, step: ShardedStep) -> Iterator[StatePart]:
    """Yields what the codes of gradients have lost: a tensor of each parameter for each node."""
    comm = engine.comm
    for bucket, residual in with_residuals(step):
        runs: list[tuple[int | None, int, Tensor]] = [
            (comm.node_of(comm.rank), residual.begin, residual.partial)
        ]
        if step.setting.options.state == "node":
            runs.append((None, residual.sums_begin, residual.sums))
        for node, begin, values in runs:
            yield from _residual_run(engine, bucket.number, node, begin, values)


def _residual_run(
    engine: ShardEngine, number: int, node: int | None, begin: int, values: Tensor
) -> Iterator[StatePart]:
    """Yields a bucket's residuals of a node, or of sums, from an element on, by parameter."""
    chunk = Chunk(begin, begin + values.numel())
    names = named(engine, f"optim.residual.{'sums' if node is None else node}.")
    yield from bucket_parts(engine.stored[number], values, chunk, chunk, names)


def residuals_to_load(
    engine: ShardEngine, step: ShardedStep, saved: Debtors, names: Collection[str]
) -> Iterator[StatePart]:
    """Yields what :func:`take_residuals` reads; ``local`` has no elements yet.

    Args:
        saved: who has saved them.
        names: of the checkpoint's tensors; what is not there had no codes.
    """
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    for bucket, _ in with_residuals(step):
        for node in (*nodes_for(saved, step), None):
            for part in _residual_run(engine, bucket.number, node, 0, nothing):
                if part.name in names:
                    yield part


def take_residuals(
    engine: ShardEngine,
    step: ShardedStep,
    saved: Debtors,
    names: Collection[str],
    read: Callable[[Iterator[StatePart]], None],
) -> None:
    """Takes over what codes had lost; ``read`` fills parts from the checkpoint."""
    for bucket, residual in with_residuals(step):

        def fill(node: int | None, begin: int, out: Tensor, number: int = bucket.number) -> None:
            parts = _residual_run(engine, number, node, begin, out.zero_())
            read(part for part in parts if part.name in names)

        take(step, residual, saved, fill)


def _blocks(bucket: Bucket, kind: str, begin: int, end: int) -> Iterator[Tensor]:
    """Yields elements [begin, end) of a chunk's tensor of the state, as the parts have them."""
    first = bucket.chunk.begin
    for part in bucket.parts(first + begin, first + end, write=False):
        here, _ = part.within(first + begin, first + end)
        yield part.state.tensors()[kind][here]


def parts_to_load(
    engine: ShardEngine, step: ShardedStep, taken: Sequence[Mapping[str, Any]]
) -> Iterator[StatePart]:
    """Yields all of the state that this rank has; each is written before the next is asked for.

    Args:
        engine: of the module.
        step: of the optimizer.
        taken: the groups that the load takes over.
    """
    step.written.take_over()
    for stored, whole in zip(engine.stored, step.buckets, strict=True):
        for bucket in whole.parts():
            tensors = bucket.state.tensors()
            for kind, flat in tensors.items():
                names = _state_names(engine, step, kind, taken)
                yield from bucket_parts(stored, flat, bucket.chunk, bucket.chunk, names)
            bucket.state.take({name: tensors[name] for name in bucket.state.narrow})
    yield from whole_parts(engine, step, True)


def whole_parts(engine: ShardEngine, step: ShardedStep, whole: bool) -> Iterator[StatePart]:
    """Yields the tensors of state that all ranks have whole; on rank 0 alone without ``whole``."""
    for index, name in enumerate(names_of(engine, step)):
        for kind, tensor in step.rule.kept_whole(index).items():
            flat = tensor.view(-1)
            local = flat if whole or engine.ranks.rank == 0 else flat[:0]
            called, shape = f"optim.{kind}.{name}", tuple(tensor.shape)
            yield StatePart(called, flat.numel(), 0, local, shape)


def _state_names(
    engine: ShardEngine, step: ShardedStep, kind: str, groups: Sequence[Mapping[str, Any]]
) -> dict[int, str]:
    """Names of the tensors of a kind, without those of parameters whose group needs no such."""
    without: set[int] = set()
    if kind in step.rule.names(groups):
        for group in groups:
            if kind not in step.rule.names_of(group, groups):
                without.update(map(id, group["params"]))
    names = named(engine, f"optim.{kind}.")
    return {key: name for key, name in names.items() if key not in without}


@dataclass(frozen=True)
class SavedState:
    """The part of an optimizer's state in buckets that a load reads.

    Attributes:
        kinds: by bucket, the moments that it must have memory for.
        parts: by name, what is read; ``local`` is not the memory. The rest had not begun.
    """

    kinds: list[list[str]]
    parts: dict[str, StatePart]


def saved_state(
    engine: ShardEngine,
    step: ShardedStep,
    given: SavedOptimizer,
    groups: Sequence[dict[str, Any]],
    saved: Collection[str],
) -> SavedState:
    """Finds out which state a load reads, and changes nothing.

    A moment that was not saved of a parameter had not begun, unless the parameter took a step.

    Args:
        given: what the checkpoint says of the optimizer.
        groups: the groups as they will be after the load.
        saved: names of the checkpoint's tensors.
    """
    found = SavedState([], {})
    known = step.rule.names(groups)
    kinds = [kind for kind in given.kinds if kind not in MASTERS]
    names = {kind: _state_names(engine, step, kind, groups) for kind in (*kinds, *MASTERS)}
    pairs = zip(step.params, names_of(engine, step), strict=True)
    begun = {id(param) for param, name in pairs if given.steps[name]}
    for stored, bucket in zip(engine.stored, step.buckets, strict=True):
        needed = step.rule.names_in(bucket.layout, step.layout, groups)
        here = []
        for kind in kinds:
            # What the groups do not keep is of earlier hyper-parameters, and goes on with them.
            wanted = kind in needed or kind not in known
            called = {
                key: name
                for key, name in names[kind].items()
                if wanted and (name in saved or (key in begun and kind in known))
            }
            if any(id(placed.param) in called for placed in stored.params):
                here.append(kind)
                found.parts.update(_unread(stored, torch.float32, called))
        for kind, flat in bucket.state.masters().items():
            found.parts.update(_unread(stored, flat.dtype, names[kind]))
        found.kinds.append(here)
    return found


def _unread(
    stored: ParamBucket, dtype: torch.dtype, names: Mapping[int, str]
) -> dict[str, StatePart]:
    """Returns by name the parts of a bucket, whose tensors have no elements yet."""
    nothing, chunk = torch.empty(0, dtype=dtype, device="cpu"), stored.state_chunk
    return {part.name: part for part in bucket_parts(stored, nothing, chunk, chunk, names)}
