# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism, meshes and compiled collectives, compared with Gloo.

``tests/examples/test_parallelism.py`` tests tensor parallelism with FSDP2 and with stages.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.rank_pool import default_group, same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_parallel_block(mesh):
    return parallelize_module(
        Block(),
        mesh,
        {
            "norm": SequenceParallel(),
            "up": PrepareModuleInputColwise(),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )


def PrepareModuleInputColwise():
    return ColwiseParallel(input_layouts=Shard(1))


def sequence_parallel(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    block = tensor_parallel_block(mesh)
    x = torch.arange(2 * 4 * 8, dtype=torch.float32).view(2, 4, 8) / 64
    local = x.chunk(world_size, dim=1)[rank].clone().requires_grad_()
    out = block(local)
    out.square().mean().backward()
    return out.detach(), local.grad, [whole(p.grad) for p in block.parameters()]


def redistribution(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.arange(7 * 9, dtype=torch.float32).view(7, 9)
    sharded = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    swapped = sharded.redistribute(mesh, [Shard(1), Shard(0)])
    replicated = swapped.redistribute(mesh, [Replicate(), Replicate()])
    assert torch.equal(replicated.to_local(), x)
    product = whole(sharded @ sharded.t())
    return swapped.to_local(), replicated.to_local(), product


def functional_collectives(rank, world_size):
    group = default_group()
    x = torch.arange(8, dtype=torch.float32) + rank
    splits = [1, 7] if rank == 0 else [3, 5]
    received = [1, 3] if rank == 0 else [7, 5]
    return [
        functional.all_reduce(x, "sum", group) + 0,
        functional.all_reduce(x, "max", group) + 0,
        functional.all_gather_tensor(x.view(2, 4), 0, group) + 0,
        functional.all_gather_tensor(x.view(2, 4), 1, group) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 0,
        functional.all_to_all_single(x, received, splits, group) + 0,
        functional.broadcast(x, 1, group) + 0,
        [y + 0 for y in functional.all_reduce_coalesced([x, x[:3]], "sum", group)],
        [y + 0 for y in functional.all_gather_into_tensor_coalesced([x, x[:2]], group)],
        [
            y + 0
            for y in functional.reduce_scatter_tensor_coalesced([x, x[:2]], "sum", [0, 0], group)
        ],
    ]


def differentiable_collectives(rank, world_size):
    group = default_group()
    x = (torch.arange(8, dtype=torch.float32) + rank).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(x, 0, group)
    reduced = functional.reduce_scatter_tensor_autograd(x * 2, "sum", 0, group)
    exchanged = functional.all_to_all_single_autograd(x * 3, None, None, group)
    (gathered.square().sum() + reduced.square().sum() + exchanged.square().sum()).backward()
    return x.grad


def differentiable_calls(rank, world_size):
    """torch.distributed.nn.functional, which some models use in their forward pass."""
    x = (torch.arange(8, dtype=torch.float32) + rank).requires_grad_()
    parts = list((x * 3).chunk(world_size))
    outputs = [
        differentiable.all_reduce(x * 2),
        *differentiable.all_gather(x),
        differentiable.reduce_scatter(torch.empty(4), parts),
        differentiable.broadcast(x * 1, 1),
        *differentiable.all_to_all([torch.empty(4) for _ in parts], parts),
        differentiable.all_to_all_single(torch.empty(8), x * 5),
        differentiable.scatter([p * 1 for p in parts], 0),
        *differentiable.gather(x * 1, 1),
    ]
    # Gloo leaves partial sums on the ranks that are not the root.
    reduced = differentiable.reduce(x * 7, 0) * (rank == 0)
    sum(out.square().sum() for out in [*outputs, reduced]).backward()
    return x.grad, reduced.detach(), [out.detach() for out in outputs[:-world_size]]


def compiled(rank, world_size):
    """dist.* calls and functional collectives inside a full graph."""

    def step(x):
        y = x * 2
        dist.all_reduce(y)
        gathered = functional.all_gather_tensor(y + 1, 0, default_group())
        out = torch.empty(gathered.shape[0] // 2)
        dist.reduce_scatter_tensor(out, gathered * 3)
        return out, functional.all_reduce(out, "sum", default_group()) + 1

    x = torch.arange(4, dtype=torch.float32) + rank
    same(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))


def graph_breaks(rank, world_size):
    """Dynamo does not trace these calls: it runs them between two graphs, and compiles no part."""

    def broadcast(y):
        dist.broadcast(y, 1)

    def reduce(y):
        dist.reduce(y, 0)
        y *= rank == 0

    def all_reduce(y):
        dist.all_reduce(y, async_op=True).wait()

    def gather(y):
        outs = [torch.empty(4) for _ in range(world_size)] if rank == 0 else None
        dist.gather(y, outs, 0)
        y += sum(outs or [])

    def scatter(y):
        dist.scatter(y, [y * 2, y * 3] if rank == 0 else None, 0)

    def exchange(y):
        sent, peer = y * 5, 1 - rank
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, y, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def step(x):
        found = []
        for call in (broadcast, reduce, all_reduce, gather, scatter, exchange):
            y = x * 2
            call(y)
            found.append(y + 1)
        return found

    x = torch.arange(4, dtype=torch.float32) + rank
    same(torch.compile(step, backend="eager")(x), step(x))


def inductor(rank, world_size):
    """Inductor generates its own calls of the collectives, also with output buffers that it reuses.

    With products only, because these need no C++ compiler, which would take most of the time.
    """

    def step(x):
        y = functional.all_reduce(x @ x, "sum", default_group())
        z = functional.all_gather_tensor(y @ x, 0, default_group())
        return functional.reduce_scatter_tensor(z @ x, "sum", 0, default_group()) @ x

    x = torch.arange(16, dtype=torch.float32).view(4, 4) % 3 + rank
    same(torch.compile(step, fullgraph=True)(x), step(x))


def compiled_ddp(rank, world_size):
    def gradients(compiles):
        torch.manual_seed(1)
        ddp: Any = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        call = torch.compile(ddp, backend="aot_eager") if compiles else ddp
        call(torch.ones(2, 4) * rank).sum().backward()
        return [p.grad for p in ddp.parameters()]

    same(gradients(True), gradients(False))


@pytest.mark.parametrize(
    "check",
    [
        sequence_parallel,
        functional_collectives,
        differentiable_collectives,
        differentiable_calls,
    ],
)
def test_as_on_gloo(two_ranks, check):
    two_ranks.compare(check)


@pytest.mark.parametrize("check", [compiled, inductor, graph_breaks, compiled_ddp])
def test_compiled_as_eager(compiling_ranks, check):
    compiling_ranks.run(check)


def test_redistribution(four_ranks):
    four_ranks.compare(redistribution)
