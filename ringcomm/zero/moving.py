"""Moves a module's parameters into buckets, and the values of rank 0 to all ranks."""

from __future__ import annotations

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.optim.params import DTYPE_NAMES
from ringcomm.zero.before import Before
from ringcomm.zero.engine import Parts
from ringcomm.zero.materialize import Initialize, materialize
from ringcomm.zero.placing import Plan
from ringcomm.zero.stored import Placed, SplitBucket, Stored, WholeBucket
from ringcomm.zero.units import Unit

Tensor = torch.Tensor


def make_bucket(comm: Communicator, stage: int, plan: Plan, number: int, trains: bool) -> Stored:
    """An empty bucket of a plan; no other rank takes part, and no parameter changes.

    Raises:
        HeapError: the heap has no room.
    """
    layout = plan.layout.buckets[number]
    params = [
        Placed(plan.names[s.param], plan.params[s.param], plan.layout.params[s.param], *s[:2])
        for s in layout.segments
    ]
    kind = SplitBucket if stage == 3 else WholeBucket
    bucket = kind(layout, params, comm, trains)
    if stage == 0:
        bucket.state_chunk = layout.chunk(0, 1)
    return bucket


def move_in(parts: Parts, init: Initialize | None, before: Before) -> None:
    """Fills the buckets, a unit at a time: what was on the meta device gets memory; collective.

    Args:
        parts: with empty buckets.
        init: see ``shard()``.
        before: learns how to undo it.
    """
    units = parts.units
    # Inner units first: what they share with others belongs to a unit around them, and is
    # initialised by their modules.
    for number in sorted(range(len(units)), key=lambda n: -_depth(units[n])):
        materialize(units[number], units, parts.comm.device, init, before)
        values = _values(parts, units[number], before)
        kinds = (parts.plan, parts.stored), (parts.frozen, parts.stored_frozen)
        for plan, stored in kinds:
            for bucket, of in zip(stored, plan.unit_of, strict=True):
                if of == number:
                    bucket.connect()
                    mine = [values[id(placed.param)] for placed in bucket.params]
                    bucket.take(mine, keeps_wide=bucket.trains)


def _depth(unit: Unit) -> int:
    return unit.name.count(".") + bool(unit.name)


def _values(parts: Parts, unit: Unit, before: Before) -> dict[int, Tensor]:
    """By ``id`` of each parameter of a unit that moves: what its bucket takes."""
    comm, broadcast = parts.comm, parts.options.broadcast
    takes = broadcast and comm.rank != 0
    moves = {id(param) for param in (*parts.plan.params, *parts.frozen.params)}
    values: dict[int, Tensor] = {}
    for param in unit.params.values():
        value = param.detach()
        if id(param) in moves:
            before.keep_data(param)
            # What is kept must not be written to.
            values[id(param)] = value = value.clone() if takes else value
        elif takes:
            before.keep_values(param)
        if broadcast:
            comm.broadcast(value, 0)
    return values


def settle_rest(parts: Parts, before: Before) -> None:
    """Buffers, and parameters that have no bucket: those of rank 0, cast; collective.

    Args:
        parts: after :func:`move_in`.
        before: learns how to undo it.
    """
    comm, options = parts.comm, parts.options
    precision = options.precision
    placed = {id(param) for param in (*parts.plan.params, *parts.frozen.params)}
    for param in parts.module.parameters():
        if id(param) not in placed and precision.param and param.dtype in DTYPE_NAMES:
            before.keep_data(param)
            param.data = param.to(precision.param)
    # By id of what it was, which ``before`` keeps: several modules may have one buffer.
    settled: dict[int, Tensor] = {}
    for owner in parts.module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            before.keep_entry(owner._buffers, name)
            was = id(buffer)
            if was in settled:
                owner._buffers[name] = settled[was]
                continue
            if any(step == 0 for step in buffer.stride()):
                # An expanded tensor: its elements share memory, so nothing can be written to it.
                buffer = owner._buffers[name] = buffer.contiguous()
            if options.broadcast and buffer.numel():
                if comm.rank != 0:
                    before.keep_values(buffer)
                comm.broadcast(buffer, 0)
            if precision.buffer is not None and buffer.is_floating_point():
                buffer = owner._buffers[name] = buffer.to(precision.buffer)
            settled[was] = buffer
