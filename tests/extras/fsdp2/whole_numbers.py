# SPDX-License-Identifier: Apache-2.0
"""A training with exact sums, so that every world, order and backend gives the same bits.

Weights, inputs and targets are small integers, the learning rate and the world sizes are powers of
two, and the loss is linear in the output. In two steps gradients and weights fit the 24 bits of
FP32, and in one step the 8 bits of bfloat16. The reference is computed in FP64.
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
    """Two layers with numbers of rows that four ranks do not divide."""
    net = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5)).to(dtype)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=numbers))
    return net


def sharded(mesh: DeviceMesh, **options: Any) -> Any:
    """Returns the model as an FSDPModule, whose first layer is a separate FSDPModule."""
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
    """Steps with the mean gradient over the ranks; keeps the gradients of the last step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def reference(world_size: int, steps: int = 2) -> list[torch.Tensor]:
    """Returns the FP64 parameters of one process that trains on the batches of all ranks."""
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
    """Asserts that a sharded model's gradients equal those of ``alone``."""
    for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
        assert expected.grad is not None
        assert torch.equal(whole(parameter.grad).double(), expected.grad)
