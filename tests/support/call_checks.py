# SPDX-License-Identifier: Apache-2.0
"""Calls of a communicator on the host or on a device, with checks of every bit of the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm import Communicator
from ringcomm.algorithms import spelled
from tests.support.device_worlds import LL_BYTES, on_host, put, room
from tests.support.exact import equal, op_of, operand, ops_for, pattern, reduced, same

MEANS = ("SUM", "AVG", "PREMUL_SUM")
# The ops and dtypes that the emulator has kernels for; see its kernels_*.cpp. Each pair takes a
# second to compile: every dtype and every op occurs, but only the pairs that tests use.
EMULATED = {
    torch.float32: (*MEANS, "PRODUCT", "MIN", "MAX"),
    torch.float64: (*MEANS, "MAX"),
    torch.bfloat16: (*MEANS, "MAX"),
    torch.float16: MEANS,
    torch.complex64: MEANS,
    torch.int32: (*MEANS, "PRODUCT", "MIN", "MAX"),
    torch.uint32: ("SUM", "PRODUCT"),
    torch.int64: (*MEANS, "MAX", "BAND", "BOR", "BXOR"),
    torch.uint64: ("SUM", "BAND", "BOR", "BXOR"),
    torch.int16: MEANS,
    torch.uint16: ("SUM",),
    torch.int8: (*MEANS, "MIN"),
    torch.uint8: MEANS,
    torch.bool: ("SUM", "MAX"),
}
UNSIGNED_AS_SIGNED = (torch.uint16, torch.uint32, torch.uint64)


def ops_on_device(dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the names of the ops that a GPU can reduce ``dtype`` with."""
    if dtype in UNSIGNED_AS_SIGNED:
        return ("SUM", "PRODUCT", "BAND", "BOR", "BXOR")
    return MEANS if dtype.is_complex else ops_for(dtype)


@dataclass(frozen=True)
class Case:
    """A call; ``count`` is the number of elements in the smallest part that one rank handles."""

    count: int
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    memory: str = "plain"
    algorithm: str = "auto"
    in_place: bool = False
    root: int = 0
    async_op: bool = False


def _algorithm(case: Case, comm: Communicator) -> str:
    """Returns the case's algorithm, or "auto" if the data does not fit into LL messages."""
    fits = 0 < case.count * case.dtype.itemsize <= LL_BYTES and comm.world_size > 1
    return "auto" if case.algorithm == "ll" and not fits else case.algorithm


def _end(work: Any) -> None:
    if work is not None:
        work.wait()


def _operands(case: Case, count: int, world: int) -> list[torch.Tensor]:
    return [operand(count, rank, world, case.dtype, case.op) for rank in range(world)]


def _expect(comm: Communicator, case: Case, holds: bool) -> None:
    """Asserts ``holds``. Raises a fault first: a kernel that gave up leaves wrong values."""
    if not holds:
        comm.engine.raise_if_unusable("the check")
    assert holds, case


def check_all_reduce(comm: Communicator, case: Case) -> None:
    inputs = _operands(case, case.count, comm.world_size)
    tensor = put(comm, inputs[comm.rank], case.memory)
    algorithm = "auto" if case.algorithm == "copy_engine" else _algorithm(case, comm)
    _end(
        comm.all_reduce(
            tensor, op_of(case.op), case.async_op, algorithm=spelled(algorithm, "all_reduce")
        )
    )
    _expect(comm, case, equal(on_host(tensor), reduced(inputs, case.op)))


def check_reduce(comm: Communicator, case: Case) -> None:
    inputs = _operands(case, case.count, comm.world_size)
    tensor = put(comm, inputs[comm.rank], case.memory)
    _end(comm.reduce(tensor, case.root, op_of(case.op), case.async_op))
    want = reduced(inputs, case.op) if comm.rank == case.root else inputs[comm.rank]
    _expect(comm, case, equal(on_host(tensor), want))


def check_reduce_scatter(comm: Communicator, case: Case) -> None:
    world, rank = comm.world_size, comm.rank
    inputs = _operands(case, case.count * world, world)
    own = slice(rank * case.count, (rank + 1) * case.count)
    source = put(comm, inputs[rank], case.memory)
    output = source[own] if case.in_place else room(comm, case.count, case.dtype, case.memory, 1)
    algorithm = "auto" if case.algorithm == "copy_engine" else _algorithm(case, comm)
    _end(
        comm.reduce_scatter_tensor(
            output, source, op_of(case.op), case.async_op, algorithm=algorithm
        )
    )
    _expect(comm, case, equal(on_host(output), reduced(inputs, case.op)[own]))
    if not case.in_place:
        _expect(comm, case, same(on_host(source), inputs[rank]))


def check_reduce_scatter_list(comm: Communicator, case: Case) -> None:
    """Checks a list of chunks with different counts, the first of them zero."""
    world, rank = comm.world_size, comm.rank
    counts = [case.count * each // 2 for each in range(world)]

    def operand_of(of: int, to: int) -> torch.Tensor:
        return operand(counts[to], of + 2 * to, world, case.dtype, case.op)

    sources = [put(comm, operand_of(rank, to), case.memory, to) for to in range(world)]
    output = sources[rank] if case.in_place else room(comm, counts[rank], case.dtype, case.memory)
    _end(comm.reduce_scatter(output, sources, op_of(case.op), case.async_op))
    want = reduced([operand_of(of, rank) for of in range(world)], case.op)
    _expect(comm, case, equal(on_host(output), want))


def check_all_gather(comm: Communicator, case: Case) -> None:
    world, count = comm.world_size, case.count
    parts = [pattern(count, rank, case.dtype) for rank in range(world)]
    output = room(comm, count * world, case.dtype, case.memory, 1)
    source = put(comm, parts[comm.rank], case.memory)
    if case.in_place:
        own = output[comm.rank * count : (comm.rank + 1) * count]
        if count:
            own.view(torch.uint8).copy_(source.view(torch.uint8))
        source = own
    algorithm = _algorithm(case, comm)
    _end(comm.all_gather_into_tensor(output, source, case.async_op, algorithm=algorithm))
    want = torch.cat([part.view(torch.uint8) for part in parts]).view(case.dtype)
    _expect(comm, case, same(on_host(output), want))


def check_all_gather_list(comm: Communicator, case: Case) -> None:
    """Checks a list of chunks with different counts, one of them zero."""
    counts = [case.count * (rank % 3) // 2 for rank in range(comm.world_size)]
    parts = [pattern(n, rank, case.dtype) for rank, n in enumerate(counts)]
    outputs = [room(comm, n, case.dtype, case.memory, turn) for turn, n in enumerate(counts)]
    _end(comm.all_gather(outputs, put(comm, parts[comm.rank], case.memory), case.async_op))
    for output, part in zip(outputs, parts, strict=True):
        _expect(comm, case, same(on_host(output), part))


def check_broadcast(comm: Communicator, case: Case) -> None:
    tensor = put(comm, pattern(case.count, comm.rank, case.dtype), case.memory)
    _end(comm.broadcast(tensor, case.root, case.async_op))
    _expect(comm, case, same(on_host(tensor), pattern(case.count, case.root, case.dtype)))


def check_gather_and_scatter(comm: Communicator, case: Case) -> None:
    mine = put(comm, pattern(case.count, comm.rank, case.dtype), case.memory)
    parts = None
    if comm.rank == case.root:
        ranks = range(comm.world_size)
        parts = [room(comm, case.count, case.dtype, case.memory, turn) for turn in ranks]
    _end(comm.gather(mine, parts, case.root, case.async_op))
    for rank, part in enumerate(parts or []):
        _expect(comm, case, same(on_host(part), pattern(case.count, rank, case.dtype)))
    back = room(comm, case.count, case.dtype, case.memory, 1)
    _end(comm.scatter(back, parts, case.root, case.async_op))
    _expect(comm, case, same(on_host(back), pattern(case.count, comm.rank, case.dtype)))


def _rows(sender: int, receiver: int) -> int:
    return (sender * 5 + receiver * 3) % 4


def check_all_to_all(comm: Communicator, case: Case) -> None:
    """Checks lists whose counts differ between pairs of ranks, some of them zero."""
    me, ranks = comm.rank, range(comm.world_size)

    def piece(sender: int, receiver: int) -> torch.Tensor:
        return pattern(case.count * _rows(sender, receiver), sender * 9 + receiver, case.dtype)

    inputs = [put(comm, piece(me, peer), case.memory, peer) for peer in ranks]
    outputs = [
        room(comm, case.count * _rows(peer, me), case.dtype, case.memory, peer) for peer in ranks
    ]
    _end(comm.all_to_all(outputs, inputs, case.async_op))
    for peer, output in enumerate(outputs):
        _expect(comm, case, same(on_host(output), piece(peer, me)))


def check_all_to_all_single(comm: Communicator, case: Case) -> None:
    """Equal pieces; "in place" (which this call does not have): pieces of several rows."""
    me, world, dtype = comm.rank, comm.world_size, case.dtype
    sent = [_rows(me, peer) if case.in_place else 1 for peer in range(world)]
    received = [_rows(peer, me) if case.in_place else 1 for peer in range(world)]

    def pieces(pairs: list[tuple[int, int]], rows: list[int]) -> torch.Tensor:
        rows_of = zip(pairs, rows, strict=True)
        made = [pattern(case.count * n, a * 9 + b, dtype) for (a, b), n in rows_of]
        return torch.cat([each.view(torch.uint8) for each in made]).view(dtype)

    given = pieces([(me, peer) for peer in range(world)], sent)
    want = pieces([(peer, me) for peer in range(world)], received)
    source = put(comm, given, case.memory).view(sum(sent), case.count)
    output = room(comm, want.numel(), dtype, case.memory, 1)
    splits = (received, sent) if case.in_place else (None, None)
    target = output.view(sum(received), case.count)
    out_rows, in_rows = splits
    _end(comm.all_to_all_single(target, source, out_rows, in_rows, async_op=case.async_op))
    _expect(comm, case, same(on_host(output), want))


def check_messages(comm: Communicator, case: Case) -> None:
    """Checks messages that all ranks send around a ring at the same time."""
    if comm.world_size == 1:
        return
    ahead, behind = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    mine = put(comm, pattern(case.count, comm.rank, case.dtype), case.memory)
    got = room(comm, case.count, case.dtype, case.memory, 1)
    works = [comm.isend(mine, ahead, case.root), comm.irecv(got, behind, case.root)]
    for work in works if case.async_op else reversed(works):
        work.wait()
    _expect(comm, case, same(on_host(got), pattern(case.count, behind, case.dtype)))


REDUCTIONS: dict[str, Callable[[Communicator, Case], None]] = {
    "all_reduce": check_all_reduce,
    "reduce": check_reduce,
    "reduce_scatter_tensor": check_reduce_scatter,
    "reduce_scatter": check_reduce_scatter_list,
}
MOVEMENTS: dict[str, Callable[[Communicator, Case], None]] = {
    "all_gather_into_tensor": check_all_gather,
    "all_gather": check_all_gather_list,
    "broadcast": check_broadcast,
    "gather and scatter": check_gather_and_scatter,
    "all_to_all": check_all_to_all,
    "all_to_all_single": check_all_to_all_single,
    "messages": check_messages,
}
CHECKS = {**REDUCTIONS, **MOVEMENTS}
