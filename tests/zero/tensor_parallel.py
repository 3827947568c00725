# SPDX-License-Identifier: Apache-2.0
"""A model under sequence and tensor parallelism, and a loop that trains it on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ringcomm import zero
from ringcomm.optim import AdamW, AdamWOptions

Tensor = torch.Tensor


class Scale(nn.Module):
    """A replicated weight whose gradient must still be summed over the tensor-parallel ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.scale(x))))


class Model(nn.Module):
    """A layer, two blocks, a frozen bias, and a head that is not evenly divisible among ranks."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6, device=device)
        with torch.device(device):
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(6, 5)
        self.blocks[1].down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def whole_numbers(self) -> Model:
        """Returns the model with values for which all sums of a step are exact."""
        draw = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, tuple(param.shape), generator=draw))
        return self


def parallelized(model: Model, tp: DeviceMesh) -> Model:
    plan: dict[str, Any] = {
        "blocks.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(2):
        plan[f"blocks.{number}.scale"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, tp, plan)
    return model


def batch(step: int, data_rank: int) -> Tensor:
    """Returns inputs of whole numbers, the same on each rank of the tensor-parallel axis."""
    draw = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randint(-3, 4, (2, 4, 6), generator=draw).float()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_params(model: nn.Module) -> dict[str, Tensor]:
    """Returns the whole parameters of a sharded model; collective on its mesh."""
    with zero.unsharded(model):
        return {name: full(param) for name, param in model.named_parameters()}


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        stage: stage of ``zero.shard``.
        steps: the numbers of the steps to take.
        backwards: backwards per step; all but the last run under ``no_sync``.
        clip: the norm to clip to, or None.
        zero: options of the module.
        adamw: options of the optimizer.
    """

    stage: int
    steps: Sequence[int] = (0, 1)
    backwards: int = 2
    clip: float | None = 0.5
    zero: zero.ZeroOptions = field(default_factory=lambda: zero.ZeroOptions(bucket_elems=512))
    adamw: AdamWOptions = field(default_factory=AdamWOptions)


def build(model: Model, mesh: DeviceMesh, training: Training) -> AdamW:
    """Shards a model on the data-parallel axis, and makes its optimizer."""
    zero.shard(model, training.stage, comm=mesh["dp"], options=training.zero)
    return AdamW(model.parameters(), lr=0.05, options=training.adamw)


def train(model: Model, optimizer: AdamW, mesh: DeviceMesh, training: Training) -> list[Tensor]:
    """Trains the model and returns the gradient norms."""
    norms = []
    data_rank = mesh.get_local_rank("dp")
    for step in training.steps:
        for number in range(training.backwards):
            x = batch(100 * number + step, data_rank)
            if number + 1 < training.backwards:
                with zero.no_sync(model):
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        if training.clip is not None:
            norms.append(optimizer.clip_grad_norm_(training.clip).clone())
        optimizer.step()
        optimizer.zero_grad()
    return norms
