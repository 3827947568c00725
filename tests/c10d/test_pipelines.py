# SPDX-License-Identifier: Apache-2.0
"""torch's pipeline schedules, and attention across ranks, compared with Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.support.rank_pool import default_group

LOOPED = (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble)
# DualPipeV needs at least as many micro-batches as stages: two stages for each of 4 ranks.
MICRO_BATCHES = 8


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


def schedule_of(kind: Any, rank: int, world_size: int) -> list[Any]:
    """Returns the losses and gradients of a schedule with two stages per rank."""
    count = 2 * world_size
    second = rank + world_size if kind in LOOPED else count - 1 - rank
    modules = layers(count)
    stages = [PipelineStage(modules[n], n, count, torch.device("cpu")) for n in (rank, second)]
    runner = kind(stages, n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    x = torch.arange(8 * 6, dtype=torch.float32).view(8, 6) / 48
    losses: list[torch.Tensor] = []
    for _ in range(2):
        last = {"target": torch.ones(8, 6), "losses": losses} if count - 1 in (rank, second) else {}
        runner.step(*([x] if rank == 0 else []), **last)
    grads = [p.grad for n in (rank, second) for p in modules[n].parameters()]
    assert all(grad is not None for grad in grads)
    return [losses, grads]


def schedules(rank: int, world_size: int) -> list[Any]:
    kinds = (*LOOPED, ScheduleZBVZeroBubble, ScheduleDualPipeV)
    return [schedule_of(kind, rank, world_size) for kind in kinds]


def ulysses(rank: int, world_size: int) -> list[Any]:
    """Ulysses attention: an all-to-all divides heads instead of tokens, another one undoes it."""
    group = default_group()
    draw = torch.Generator().manual_seed(rank)
    qkv = torch.randn(3, 4, 5, 6, generator=draw).requires_grad_()  # [3, heads, tokens, dim]

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        return functional.all_to_all_single_autograd(x.contiguous(), None, None, group)

    heads = qkv.shape[1] // world_size
    by_rank = exchanged(qkv.transpose(0, 1)).unflatten(0, (world_size, heads))
    query, key, value = by_rank.movedim(0, 2).flatten(2, 3).unbind(1)
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    by_tokens = mixed.unflatten(1, (world_size, -1)).transpose(0, 1).flatten(0, 1)
    back = exchanged(by_tokens).unflatten(0, (world_size, heads)).flatten(0, 1)
    (back.square().sum() * (rank + 1)).backward()
    return [back.detach(), qkv.grad]


@pytest.mark.parametrize("check", [schedules, ulysses], ids=lambda check: check.__name__)
def test_two_ranks(two_ranks, check):
    two_ranks.compare(check)
