# SPDX-License-Identifier: Apache-2.0
"""Random calls of every kind, from a seed, with inputs and exactly known results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringcomm import Communicator
from ringcomm.algorithms import spelled
from tests.support.exact import op_of, operand, pattern, raw_bytes, reduced
from tests.support.memories import put, room

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
OPS = ("SUM", "AVG", "MAX")
MEMORIES = ("plain", "heap")


@dataclass(frozen=True)
class Case:
    """One call: ``count`` elements per rank; ``root`` for calls with a root."""

    kind: str
    count: int
    dtype: torch.dtype
    op: str
    root: int
    algorithm: str
    memory: str
    async_op: bool


def random_case(rng: random.Random, world: int) -> Case:
    """Returns the next call; ranks with equal generators draw equal cases."""
    # Mostly small calls, so that there are many; sometimes hundreds of segments, or no element.
    exponent = rng.choices([(0, 13), (13, 18), (-1, -1)], [20, 2, 1])[0]
    count = int(2 ** rng.uniform(*exponent))
    return Case(
        rng.choice(tuple(CALLS)),
        count,
        rng.choice(DTYPES),
        rng.choice(OPS),
        # Every world draws the same number of bits, so that groups of unequal size stay in step.
        rng.getrandbits(16) % world,
        rng.choice(("auto", "one_shot", "ring")),
        rng.choice(MEMORIES),
        rng.random() < 0.25,
    )


def _inputs(case: Case, world: int, count: int) -> list[Tensor]:
    return [operand(count, rank, world, case.dtype, case.op) for rank in range(world)]


def _done(work: object) -> None:
    if work is not None:
        work.wait()  # type: ignore[attr-defined]


def _all_reduce(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    inputs = _inputs(case, comm.world_size, case.count)
    mine = put(inputs[comm.rank], case.memory, comm.rank)
    _done(
        comm.all_reduce(
            mine, op_of(case.op), case.async_op, algorithm=spelled(case.algorithm, "all_reduce")
        )
    )
    return mine, reduced(inputs, case.op)


def _reduce(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    inputs = _inputs(case, comm.world_size, case.count)
    mine = put(inputs[comm.rank], case.memory, comm.rank)
    _done(comm.reduce(mine, case.root, op_of(case.op), case.async_op))
    return mine, reduced(inputs, case.op) if comm.rank == case.root else inputs[comm.rank]


def _reduce_scatter(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    world, rank, count = comm.world_size, comm.rank, case.count
    inputs = _inputs(case, world, count * world)
    out = room(count, case.dtype, case.memory, rank)
    mine = put(inputs[rank], case.memory, rank)
    _done(
        comm.reduce_scatter_tensor(
            out, mine, op_of(case.op), case.async_op, algorithm=case.algorithm
        )
    )
    return out, reduced(inputs, case.op)[rank * count : (rank + 1) * count]


def _all_gather(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    world, rank = comm.world_size, comm.rank
    parts = [pattern(case.count, each, case.dtype) for each in range(world)]
    out = room(case.count * world, case.dtype, case.memory, rank)
    mine = put(parts[rank], case.memory, rank)
    _done(comm.all_gather_into_tensor(out, mine, case.async_op, algorithm=case.algorithm))
    return out, torch.cat(parts)


def _broadcast(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    mine = put(pattern(case.count, comm.rank, case.dtype), case.memory, comm.rank)
    _done(comm.broadcast(mine, case.root, case.async_op))
    return mine, pattern(case.count, case.root, case.dtype)


def _gather(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    world, rank = comm.world_size, comm.rank
    parts = [room(case.count, case.dtype, case.memory, rank) for _ in range(world)]
    mine = put(pattern(case.count, rank, case.dtype), case.memory, rank)
    at_root = rank == case.root
    _done(comm.gather(mine, parts if at_root else None, case.root, case.async_op))
    if not at_root:
        return mine, pattern(case.count, rank, case.dtype)
    return torch.cat(parts), torch.cat([pattern(case.count, r, case.dtype) for r in range(world)])


def _scatter(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    world, rank = comm.world_size, comm.rank
    parts = [put(pattern(case.count, each, case.dtype), case.memory, rank) for each in range(world)]
    out = room(case.count, case.dtype, case.memory, rank)
    _done(comm.scatter(out, parts if rank == case.root else None, case.root, case.async_op))
    return out, pattern(case.count, rank, case.dtype)


def _all_to_all(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    world, rank, count = comm.world_size, comm.rank, case.count
    sent = [pattern(count * world, each, case.dtype) for each in range(world)]
    out = room(count * world, case.dtype, case.memory, rank)
    mine = put(sent[rank], case.memory, rank)
    _done(comm.all_to_all_single(out, mine, async_op=case.async_op))
    return out, torch.cat([each[rank * count : (rank + 1) * count] for each in sent])


def _barrier(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    _done(comm.barrier(case.async_op))
    return torch.zeros(0), torch.zeros(0)


def _messages(comm: Communicator, case: Case) -> tuple[Tensor, Tensor]:
    world, rank = comm.world_size, comm.rank
    if world == 1:
        return _barrier(comm, case)
    got = room(case.count, case.dtype, case.memory, rank)
    mine = put(pattern(case.count, rank, case.dtype), case.memory, rank)
    received = comm.irecv(got, (rank - 1) % world, tag=case.root)
    sent = comm.isend(mine, (rank + 1) % world, tag=case.root)
    _done(received)
    _done(sent)
    return got, pattern(case.count, (rank - 1) % world, case.dtype)


CALLS: dict[str, Callable[[Communicator, Case], tuple[Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "messages": _messages,
}


def run_case(comm: Communicator, case: Case) -> int:
    """Makes the call; returns how many elements were checked.

    Raises:
        AssertionError: an element is wrong; the first differing byte is named.
    """
    got, want = CALLS[case.kind](comm, case)
    mine, right = raw_bytes(got), raw_bytes(want)
    assert got.dtype == want.dtype, f"{case}: {got.dtype}"
    if not torch.equal(mine, right):
        at = int((mine != right).nonzero()[0])
        raise AssertionError(
            f"{case}: rank {comm.rank}, byte {at}: {int(mine[at])}, not {int(right[at])}"
        )
    return got.numel()
