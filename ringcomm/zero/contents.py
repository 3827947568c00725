"""What of a sharded module and its optimizer a checkpoint holds, under which names.

    model.<name>            a parameter, or a persistent buffer of rank 0
    optim.<kind>.<name>     exp_avg, exp_avg_sq, max_exp_avg_sq, master or remainder of a parameter

Both are flat, and each rank has the elements of its chunks, whatever the stage is: so a checkpoint
of one stage is one of all of them. Buffers differ between ranks, and are each rank's own tensors,
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.optim.layout import Chunk
from ringcomm.optim.sharded import ShardedStep
from ringcomm.optim.sharded_adam import ShardedAdam
from ringcomm.zero.engine import Engine
from ringcomm.zero.stored import Placed, Stored, WholeBucket

Tensor = torch.Tensor


@dataclass(frozen=True)
class Part:
    """Elements [begin, begin + local.numel()) of a flat tensor of ``elems`` that a rank holds."""

    name: str
    elems: int
    begin: int
    local: Tensor
    shape: tuple[int, ...]


def overlap(placed: Placed, chunk: Chunk) -> tuple[int, int]:
    """Elements [low, high) of the bucket that are the parameter's and the chunk's; maybe none."""
    low, high = max(placed.begin, chunk.begin), min(placed.end, chunk.end)
    return low, max(low, high)


def bucket_parts(
    stored: Stored, flat: Tensor, held: Chunk, wanted: Chunk, prefix: str
) -> Iterator[Part]:
    """The parameters of a bucket, as a checkpoint names them.

    Args:
        stored: the bucket.
        flat: [held elements], one number per element of the bucket.
        held: what ``flat`` has of the bucket.
        wanted: of which part of the bucket, inside of ``held``.
        prefix: of the names.
    """
    for placed in stored.params:
        low, high = overlap(placed, wanted)
        local = flat[low - held.begin : high - held.begin] if low < high else flat[:0]
        begin = low - placed.begin if low < high else 0
        yield Part(prefix + placed.name, placed.end - placed.begin, begin, local, placed.spec.shape)


def param_parts(engine: Engine, whole: bool) -> Iterator[Part]:
    """Parameters that lie in buckets: this rank's chunks, or with ``whole`` all that it has."""
    for stored in (*engine.stored, *engine.parts.stored_frozen):
        if isinstance(stored, WholeBucket):
            held = Chunk(0, stored.layout.elems)
            wanted = held if whole else stored.chunk
            yield from bucket_parts(stored, stored.flat, held, wanted, "model.")
        else:
            yield from bucket_parts(stored, stored.own, stored.chunk, stored.chunk, "model.")


def state_parts(engine: Engine, step: ShardedStep, whole: bool) -> Iterator[Part]:
    """The optimizer's state, by kind: this rank's chunks, or with ``whole`` all that it has."""
    step.written.take_over()
    for stored, bucket in zip(engine.stored, step.buckets, strict=True):
        wanted = stored.state_chunk if whole else stored.chunk
        for kind, flat in bucket.state.tensors().items():
            prefix = f"optim.{kind}."
            yield from bucket_parts(stored, flat, stored.state_chunk, wanted, prefix)


def loose_parts(engine: Engine, whole: bool) -> Iterator[Part]:
    """Parameters without a bucket: all ranks have them, and each saves its share."""
    placed = {
        id(each.param)
        for stored in (*engine.stored, *engine.parts.stored_frozen)
        for each in stored.params
    }
    comm = engine.comm
    for name, param in engine.parts.module.named_parameters():
        if id(param) in placed:
            continue
        flat, shape = param.detach().reshape(-1), tuple(param.shape)
        elems = flat.numel()
        low = 0 if whole else comm.rank * elems // comm.world_size
        high = elems if whole else (comm.rank + 1) * elems // comm.world_size
        yield Part(f"model.{name}", elems, low, flat[low:high], shape)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers by name, each once."""
    found: dict[str, Tensor] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def step_of(engine: Engine, optimizer: ShardedAdam | None, operation: str) -> ShardedStep | None:
    """The step of an optimizer on the engine's module; collective before its first step.

    Raises:
        ArgumentError: it is one of other parameters.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, ShardedAdam) or optimizer._placement is not engine.placement:
        raise ArgumentError(
            f"{operation}: optimizer: expected one of ringcomm.optim that was built on the "
            f"sharded module's parameters, got {optimizer!r}"
        )
    return optimizer._prepared()


def names_of(engine: Engine, step: ShardedStep) -> list[str]:
    """The module's name of each parameter of an optimizer, in its order."""
    found = {id(param): name for name, param in engine.parts.module.named_parameters()}
    return [found.get(id(param), "") for param in step.params]


def group_names(names: Sequence[str], groups: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The names by param group."""
    found, first = [], 0
    for group in groups:
        found.append(list(names[first : first + len(group["params"])]))
        first += len(group["params"])
    return found
