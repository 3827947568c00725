# SPDX-License-Identifier: Apache-2.0
"""Every function with every op that has a gradient, and a reference for each.

A reference takes the inputs of all ranks and builds the outputs of all ranks from them with tensor
operations, so that one process's autograd gives the expected gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import ringcomm
from ringcomm import Communicator, ReduceOp
from ringcomm import functional as F

Tensor = torch.Tensor
Inputs = list[Tensor]

COLUMNS = 2


@dataclass(frozen=True)
class Case:
    """``call`` runs on one rank; ``reference`` maps the inputs of all ranks to all outputs."""

    name: str
    call: Callable[[Communicator, Tensor], Tensor]
    reference: Callable[[Inputs], list[Tensor]]
    rows: Callable[[int, int], int]  # rows of a rank's input, from rank and world size

    def __str__(self) -> str:
        return self.name


def factor(rank: int) -> float:
    """Returns a rank's factor of PREMUL_SUM."""
    return rank + 2.0


def premul(comm: Communicator) -> object:
    return ringcomm.premul_sum(factor(comm.rank))


def total(inputs: Inputs) -> Tensor:
    result = inputs[0].clone()
    for each in inputs[1:]:
        result = result + each
    return result


def weighted(inputs: Inputs) -> Tensor:
    return total([each * factor(rank) for rank, each in enumerate(inputs)])


def mean(inputs: Inputs) -> Tensor:
    return total(inputs) / len(inputs)


def shares(combine: Callable[[Inputs], Tensor]) -> Callable[[Inputs], list[Tensor]]:
    return lambda inputs: list(combine(inputs).chunk(len(inputs)))


def alike(combine: Callable[[Inputs], Tensor]) -> Callable[[Inputs], list[Tensor]]:
    return lambda inputs: [combine(inputs)] * len(inputs)


def piece(sender: int, receiver: int) -> int:
    """Returns the rows that ranks send in an uneven exchange; some pieces are empty."""
    return (sender + 2 * receiver + 1) % 3


def uneven(comm: Communicator, tensor: Tensor) -> Tensor:
    ranks = range(comm.world_size)
    arrives = [piece(other, comm.rank) for other in ranks]
    leaves = [piece(comm.rank, other) for other in ranks]
    return F.all_to_all(tensor, arrives, leaves, comm)


def exchanged(inputs: Inputs) -> list[Tensor]:
    cut = [each.chunk(len(inputs)) for each in inputs]
    return [torch.cat([row[rank] for row in cut]) for rank in range(len(inputs))]


def exchanged_unevenly(inputs: Inputs) -> list[Tensor]:
    ranks = range(len(inputs))
    cut = [inputs[rank].split([piece(rank, other) for other in ranks]) for rank in ranks]
    return [torch.cat([row[rank] for row in cut]) for rank in ranks]


def from_last(comm: Communicator, tensor: Tensor) -> Tensor:
    return F.broadcast(tensor, comm.ranks[-1], comm)


def same_rows(rank: int, world_size: int) -> int:
    return 3


def two_per_rank(rank: int, world_size: int) -> int:
    return 2 * world_size


def uneven_rows(rank: int, world_size: int) -> int:
    return sum(piece(rank, other) for other in range(world_size))


CASES = (
    Case("all_gather", lambda c, x: F.all_gather(x, c), alike(torch.cat), same_rows),
    Case(
        "reduce_scatter",
        lambda c, x: F.reduce_scatter(x, group=c),
        shares(total),
        two_per_rank,
    ),
    Case(
        "reduce_scatter AVG",
        lambda c, x: F.reduce_scatter(x, ReduceOp.AVG, c),
        shares(mean),
        two_per_rank,
    ),
    Case(
        "reduce_scatter PREMUL_SUM",
        lambda c, x: F.reduce_scatter(x, premul(c), c),
        shares(weighted),
        two_per_rank,
    ),
    Case("all_reduce", lambda c, x: F.all_reduce(x, group=c), alike(total), same_rows),
    Case(
        "all_reduce AVG",
        lambda c, x: F.all_reduce(x, ReduceOp.AVG, c),
        alike(mean),
        same_rows,
    ),
    Case(
        "all_reduce PREMUL_SUM",
        lambda c, x: F.all_reduce(x, premul(c), c),
        alike(weighted),
        same_rows,
    ),
    Case("all_to_all", lambda c, x: F.all_to_all(x, group=c), exchanged, two_per_rank),
    Case("all_to_all uneven", uneven, exchanged_unevenly, uneven_rows),
    Case("broadcast", from_last, alike(lambda inputs: inputs[-1].clone()), same_rows),
)


def whole(shape: tuple[int, ...], seed: int, world_size: int, dtype: torch.dtype) -> Tensor:
    """Returns small multiples of the world size: sums fit bfloat16, and means are whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (2, *shape), generator=generator) * world_size
    if dtype.is_complex:
        return torch.complex(*values.double()).to(dtype)
    return values[0].to(dtype)


def inputs_of(case: Case, world_size: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Returns the inputs of all ranks."""
    return [
        whole((case.rows(rank, world_size), COLUMNS), 7 * rank + 1, world_size, dtype)
        for rank in range(world_size)
    ]


def gradient(tensor: Tensor) -> Tensor:
    """Returns the gradient that ``backward`` has set."""
    assert tensor.grad is not None
    return tensor.grad


def expected(
    reference: Callable[[Inputs], list[Tensor]], inputs: Inputs
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns all ranks' outputs, the gradients to feed to them, and the inputs' gradients."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs = reference(leaves)
    world_size, dtype = len(inputs), inputs[0].dtype
    fed = [
        whole(tuple(each.shape), 100 + rank, world_size, dtype) for rank, each in enumerate(outputs)
    ]
    gradients = torch.autograd.grad(outputs, leaves, fed, materialize_grads=True)
    return [each.detach() for each in outputs], fed, list(gradients)
