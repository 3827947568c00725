# SPDX-License-Identifier: Apache-2.0
"""The calls of a fault schedule, with inputs whose results are known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import ringcomm
from ringcomm import Communicator
from tests.support.fault_schedules import Call

Tensor = torch.Tensor
ROOT = 0  # of calls that have one; any rank, this one included, can fail


def value(count: int, rank: int, turn: int) -> Tensor:
    """Returns the input of ``rank`` in call ``turn``: whole numbers with sums exact in FP32."""
    return ((torch.arange(count) * 3 + rank * 7 + turn * 5) % 11 - 5).float()


@dataclass(frozen=True)
class Turn:
    """One call as one rank makes it."""

    comm: Communicator
    call: Call
    number: int

    def filled(self, count: int, rank: int) -> Tensor:
        tensor = self.empty(count)
        return tensor.copy_(value(count, rank, self.number))

    def empty(self, count: int) -> Tensor:
        make = ringcomm.empty if self.call.heap else torch.empty
        return make(count).fill_(99)

    def mine(self, count: int) -> Tensor:
        return self.filled(count, self.comm.rank)

    def total(self, count: int) -> Tensor:
        given = [value(count, rank, self.number) for rank in range(self.comm.world_size)]
        return torch.stack(given).sum(0)

    def all_values(self, count: int) -> list[Tensor]:
        return [value(count, rank, self.number) for rank in range(self.comm.world_size)]

    @property
    def forms(self) -> dict[str, str]:
        return {"algorithm": self.call.algorithm, "kernels": self.call.kernels}


# A call's results when it returns: pairs of actual and expected tensor.
Pairs = list[tuple[Tensor, Tensor]]
Wait = Callable[[object], None]


def _all_reduce(turn: Turn, wait: Wait) -> Pairs:
    tensor = turn.mine(turn.call.elems)
    wait(turn.comm.all_reduce(tensor, async_op=turn.call.async_op, **turn.forms))
    return [(tensor, turn.total(turn.call.elems))]


def _reduce_scatter(turn: Turn, wait: Wait) -> Pairs:
    comm, count = turn.comm, turn.call.elems
    given, got = turn.mine(count * comm.world_size), turn.empty(count)
    wait(comm.reduce_scatter_tensor(got, given, async_op=turn.call.async_op, **turn.forms))
    return [(got, turn.total(count * comm.world_size).chunk(comm.world_size)[comm.rank])]


def _all_gather(turn: Turn, wait: Wait) -> Pairs:
    comm, count = turn.comm, turn.call.elems
    given, got = turn.mine(count), turn.empty(count * comm.world_size)
    wait(comm.all_gather_into_tensor(got, given, async_op=turn.call.async_op, **turn.forms))
    return [(got, torch.cat(turn.all_values(count)))]


def _reduce(turn: Turn, wait: Wait) -> Pairs:
    tensor = turn.mine(turn.call.elems)
    wait(turn.comm.reduce(tensor, ROOT, async_op=turn.call.async_op))
    return [(tensor, turn.total(turn.call.elems))] if turn.comm.rank == ROOT else []


def _broadcast(turn: Turn, wait: Wait) -> Pairs:
    tensor = turn.mine(turn.call.elems)
    wait(turn.comm.broadcast(tensor, ROOT, async_op=turn.call.async_op))
    return [(tensor, value(turn.call.elems, ROOT, turn.number))]


def _gather(turn: Turn, wait: Wait) -> Pairs:
    comm, count = turn.comm, turn.call.elems
    given = turn.mine(count)
    got = [turn.empty(count) for _ in range(comm.world_size)] if comm.rank == ROOT else None
    wait(comm.gather(given, got, ROOT, async_op=turn.call.async_op))
    return list(zip(got or [], turn.all_values(count), strict=False))


def _scatter(turn: Turn, wait: Wait) -> Pairs:
    comm, count = turn.comm, turn.call.elems
    given = [turn.filled(count, rank) for rank in range(comm.world_size)]
    got = turn.empty(count)
    wait(comm.scatter(got, given if comm.rank == ROOT else None, ROOT, turn.call.async_op))
    return [(got, value(count, comm.rank, turn.number))]


def _all_to_all(turn: Turn, wait: Wait) -> Pairs:
    comm, count = turn.comm, turn.call.elems * turn.comm.world_size
    given, got = turn.mine(count), turn.empty(count)
    wait(comm.all_to_all_single(got, given, async_op=turn.call.async_op))
    parts = [each.chunk(comm.world_size)[comm.rank] for each in turn.all_values(count)]
    return [(got, torch.cat(parts))]


def _barrier(turn: Turn, wait: Wait) -> Pairs:
    wait(turn.comm.barrier(async_op=turn.call.async_op))
    return []


def _messages(turn: Turn, wait: Wait) -> Pairs:
    """Sends to the right neighbour, and receives from the left neighbour."""
    comm, count = turn.comm, turn.call.elems
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    given, got = turn.mine(count), turn.empty(count)
    sent = comm.isend(given, right)
    if turn.call.async_op:
        wait(comm.irecv(got, left))
    else:
        comm.recv(got, left)
    wait(sent)
    return [(got, value(count, left, turn.number))]


BODIES: dict[str, Callable[[Turn, Wait], Pairs]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather_into_tensor": _all_gather,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all,
    "barrier": _barrier,
    "messages": _messages,
}


def _wait(work: object) -> None:
    if work is not None:
        work.wait()  # type: ignore[attr-defined]


def make(comm: Communicator, call: Call, number: int) -> str:
    """Makes a call with inputs that depend on ``number``; returns "" or the first wrong element.

    Raises:
        RingcommError: a fault.
    """
    for got, expected in BODIES[call.kind](Turn(comm, call, number), _wait):
        if not torch.equal(got, expected):
            index = int((got != expected).nonzero()[0])
            return f"element {index} is {got[index].item()}, expected {expected[index].item()}"
    return ""
