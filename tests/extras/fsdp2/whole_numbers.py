# SPDX-License-Identifier: Apache-2.0
"""A training whose sums are exact, so that every world, order and backend gives the same bits.

Weights, inputs and targets are small integers, the learning rate and the worlds are powers of two,
and the loss is linear in the output. In two steps no gradient or weight needs more than the 24 bits
of FP32, and in one not more than the 8 of bfloat16. The reference is computed in FP64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LEARNING_RATE = 2**-6
ROWS = 4


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers whose rows are no multiple of a world of four."""
    net = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5)).to(dtype)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=numbers))
    return net


def sharded(mesh: DeviceMesh, **options: Any) -> Any:
    """The model, an FSDPModule, with its first layer in one of its own."""
    net = model()
    fully_shard(net[0], mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randint(-2, 3, (ROWS, 7), generator=numbers)
    target = torch.randint(-2, 3, (ROWS, 5), generator=numbers)
    dtype = next(net.parameters()).dtype
    return (net(x.to(dtype)) * target).sum()


def train(net: nn.Module, rank: int, steps: int = 2) -> None:
    """Steps with the gradients' mean over the ranks; leaves those of the last step in place."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def reference(world_size: int, steps: int = 2) -> list[torch.Tensor]:
    """The parameters (FP64) of one process that takes the batches of all ranks."""
    net = model(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (loss_of(net, rank, step) / world_size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def assert_trained(net: nn.Module, world_size: int, steps: int = 2) -> None:
    for parameter, expected in zip(net.parameters(), reference(world_size, steps), strict=True):
        assert torch.equal(whole(parameter).double(), expected)


def assert_gradients(net: nn.Module, alone: nn.Module) -> None:
    """Asserts that a sharded model's parameters equal those of ``alone``."""
    for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
        assert expected.grad is not None
        assert torch.equal(whole(parameter.grad).double(), expected.grad)
