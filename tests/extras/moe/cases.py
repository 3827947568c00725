# SPDX-License-Identifier: Apache-2.0
"""Tokens and routes of several ranks, and reference results of dispatch and combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

import ringcomm
from ringcomm import Communicator
from ringcomm.extras import moe

Tensor = torch.Tensor


class Case(NamedTuple):
    """One rank's tokens and routes."""

    x: Tensor
    idx: Tensor
    weights: Tensor | None


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def case(
    rank: int,
    k: int,
    tokens: int = 13,
    hidden: int = 40,
    experts: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Returns tokens of a rank with random distinct experts; some slots have no expert (-1)."""
    seed = seeded(100 * rank + k)
    x = torch.randn(tokens, hidden, generator=seed).to(dtype)
    order = [torch.randperm(experts, generator=seed)[:k] for _ in range(tokens)]
    idx = torch.stack(order) if order else torch.empty(0, k, dtype=torch.int64)
    idx = torch.where(torch.rand(tokens, k, generator=seed) < 0.1, -1, idx)
    return Case(x, idx, torch.rand(tokens, k, generator=seed) + 0.5)


def listed(cases: Sequence[Case], experts: int) -> list[list[tuple[int, int, int]]]:
    """Returns for each expert the (rank, token, j) of its rows, in order."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(experts)]
    for rank, each in enumerate(cases):
        for token, chosen in enumerate(each.idx.tolist()):
            for j, expert in enumerate(chosen):
                if expert >= 0:
                    found[expert].append((rank, token, j))
    return found


def dispatched(cases: Sequence[Case], experts: int) -> list[Tensor]:
    """Returns the rows of each expert."""
    return [
        torch.stack([cases[rank].x[token] for rank, token, _ in rows])
        if rows
        else cases[0].x.new_empty(0, cases[0].x.size(1))
        for rows in listed(cases, experts)
    ]


def combined(cases: Sequence[Case], ys: Sequence[Tensor], rank: int) -> Tensor:
    """Returns the weighted sums of the experts' outputs for a rank's tokens."""
    mine = cases[rank]
    at: dict[tuple[int, int], Tensor] = {}
    for expert, rows in enumerate(listed(cases, len(ys))):
        for row, (source, token, j) in enumerate(rows):
            if source == rank:
                at[token, j] = ys[expert][row]
    sums = []
    for token in range(len(mine.x)):
        total = None
        for j in range(mine.idx.size(1)):
            if (token, j) not in at:
                continue
            term = at[token, j].float()
            if mine.weights is not None:
                term = mine.weights[token, j].float() * term
            total = term if total is None else total + term
        sums.append(ys[0].new_zeros(ys[0].size(1)).float() if total is None else total)
    stacked = torch.stack(sums) if sums else torch.empty(0, ys[0].size(1))
    return stacked.to(ys[0].dtype)


def joined(cases: Sequence[Case]) -> Case:
    """Returns all ranks' tokens as those of one rank, in rank order."""
    weights = [each.weights for each in cases if each.weights is not None]
    return Case(
        torch.cat([each.x for each in cases]),
        torch.cat([each.idx for each in cases]),
        torch.cat(weights) if weights else None,
    )


class Learned(NamedTuple):
    """A layer's output for tokens, and the gradients of its inputs and weights."""

    out: Tensor
    of_x: Tensor
    of_weights: Tensor  # [0] without weights
    of_experts: Tensor


def learn(
    comm: Communicator,
    given: Case,
    experts: Tensor,
    target: Tensor,
) -> Learned:
    """Runs forward and backward of a layer with expert matrices [experts, hidden, hidden]."""
    x = given.x.clone().requires_grad_()
    weights = None if given.weights is None else given.weights.clone().requires_grad_()
    here = len(experts) // comm.world_size
    mine = experts[comm.rank * here : (comm.rank + 1) * here].clone().requires_grad_()
    rows, counts, handle = moe.dispatch(x, given.idx, weights, len(experts), comm)
    parts = rows.split(counts.tolist())
    y = torch.cat([torch.tanh(part @ each) for part, each in zip(parts, mine, strict=True)])
    out = moe.combine(y, handle)
    out.backward(target)
    assert x.grad is not None and mine.grad is not None
    of_weights = None if weights is None else weights.grad
    return Learned(
        out.detach(), x.grad, x.new_empty(0) if of_weights is None else of_weights, mine.grad
    )


def dense(given: Case, experts: Tensor, target: Tensor) -> Learned:
    """Runs the layer on one rank."""
    with ringcomm.local_world(1) as alone:
        return learn(alone[0], given, experts, target)
