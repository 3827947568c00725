# SPDX-License-Identifier: Apache-2.0
"""Times a tensor-parallel layer, forward and backward, against torch's own plan for it.

The layer is a norm, a column-parallel and a row-parallel layer of four times the width, with
sequence parallelism, one thread per rank. It is divided by ``parallelize``, and by torch's
``parallelize_module`` on the backend "ringcomm" and on Gloo. "alone" is one rank's part of the
layer without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, parallel

from ringcomm.extras.parallel import parallelize

from .options import tuples
from .report import row_of
from .run import Bench, Run
from .timing import Call

Tensor = torch.Tensor
Size = tuple[int, int]

SIZES: tuple[Size, ...] = ((512, 256), (1024, 512), (2048, 1024))
OURS, ALONE = "ringcomm", "alone"
PLAN = {"norm": "sequence", "up": "column", "down": "row"}


class Layer(nn.Module):
    """The MLP of a transformer, with some of the hidden features."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.products(self.norm(x))

    def products(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def by_torch(width: int, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "down": parallel.RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallel.parallelize_module(Layer(width, 4 * width), mesh, plan)


def turn(forward: Callable[[Tensor], Tensor], model: nn.Module, shape: Sequence[int]) -> Call:
    """Returns a call of forward and backward, whose result is the output and the input's gradient.

    The call reads the output, since DTensor's collectives end only when their result is read.
    """
    x = torch.randn(*shape, requires_grad=True, device="cpu")
    feed = torch.randn(*shape, device="cpu")

    def call() -> tuple[Tensor, Tensor | None]:
        x.grad = None
        model.zero_grad()
        out = forward(x)
        torch.autograd.backward((out * feed).sum())
        return out.detach(), x.grad

    return call


def systems(size: Size, meshes: Mapping[str, DeviceMesh]) -> dict[str, Call]:
    """Returns the compared calls by name, on equal weights and inputs."""
    tokens, width = size
    world = dist.get_world_size()
    shape = (1, tokens // world, width)
    found: dict[str, Call] = {}
    for name, mesh in meshes.items():
        torch.manual_seed(1)
        model = by_torch(width, mesh)
        found[f"DTensor on {name}"] = turn(model, model, shape)
    torch.manual_seed(1)
    ours = parallelize(Layer(width, 4 * width), PLAN, meshes[OURS])
    found[OURS] = turn(ours, ours, shape)
    part = Layer(width, 4 * width // world)
    own, products = turn(part.norm, part.norm, shape), turn(part.products, part, (1, tokens, width))
    return {**found, ALONE: lambda: (own(), products())}


def meshes_of(group: Any) -> dict[str, DeviceMesh]:
    """Returns a mesh on Gloo, and a mesh on the default group ``group``; collective."""
    groups = {"Gloo": dist.new_group(backend="gloo"), OURS: group}
    return {name: DeviceMesh.from_group(each, "cpu") for name, each in groups.items()}


def measure(run: Run) -> None:
    run.connect()
    meshes = meshes_of(dist.group.WORLD)
    run.pacing.expect(len(run.options.sizes))
    for size in run.options.sizes:
        tokens, width = size
        row = row_of("tp_layer", f"{tokens} tokens x {width}", run.world, tokens * width)
        run.compare(row, systems(size, meshes), OURS)


BENCH = Bench("layers", __doc__, measure, [tuples("sizes", "TOKENS,WIDTH", SIZES)], rounds=15)
BENCH.run_as_main(__name__)
