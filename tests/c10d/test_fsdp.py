# SPDX-License-Identifier: Apache-2.0
"""FSDP2 and FSDP1 train with the same results on ringcomm and on Gloo."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ringcomm.memory.host_heap import process_heap
from tests.support.rank_pool import default_group


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 33), nn.ReLU(), nn.Linear(33, 5)
    )


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * rank + step))


def whole(tensor: torch.Tensor | DTensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(sharded: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01, foreach=True)
    losses = []
    for step in range(steps):
        loss = sharded(batch(rank, step)).float().square().mean()
        loss.backward()
        total = nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        losses.append(whole(total))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(whole(p).detach().clone() for p in sharded.parameters())]


def shard(mesh, **options):
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def one_axis(rank, world_size):
    return train(shard(init_device_mesh("cpu", (world_size,))), rank)


def mixed_precision(rank, world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(shard(init_device_mesh("cpu", (world_size,)), mp_policy=policy), rank)


def replicated_and_sharded(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(mesh), rank)


def fsdp1_mixed_precision(rank, world_size):
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        model(), device_id=torch.device("cpu"), mixed_precision=precision, use_orig_params=True
    )
    return train(wrapped, rank)


def divide_factor(rank, world_size):
    """Gradients are the sum over the ranks divided by the factor; Gloo lacks this op."""
    net = model()
    expected = []
    for peer in range(world_size):
        net.zero_grad()
        net(batch(peer, 0)).sum().backward()
        expected.append([p.grad.clone() for p in net.parameters()])
    sharded = shard(init_device_mesh("cpu", (world_size,)))
    for module in sharded.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(8.0)
    sharded(batch(rank, 0)).sum().backward()
    for parameter, *grads in zip(sharded.parameters(), *expected, strict=True):
        torch.testing.assert_close(whole(parameter.grad), sum(grads) / 8.0)


def buffers_from_the_heap(rank, world_size):
    """FSDP2 takes its communication buffers from the group's allocator if this is enabled."""
    reference = train(shard(init_device_mesh("cpu", (world_size,))), rank)
    sharded = shard(init_device_mesh("cpu", (world_size,)))
    for module in sharded.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    group = default_group()
    taken = []
    allocate = group.allocate_tensor

    def recording(size, *, dtype, device):
        tensor = allocate(size, dtype=dtype, device=device)
        taken.append(process_heap().contains(tensor.data_ptr(), tensor.nbytes))
        return tensor

    group.allocate_tensor = recording
    for one, other in zip(train(sharded, rank), reference, strict=True):
        assert torch.equal(one, other)
    assert taken and all(taken)


@pytest.mark.parametrize("check", [one_axis, mixed_precision, fsdp1_mixed_precision])
def test_as_on_gloo(two_ranks, check):
    two_ranks.compare(check)


@pytest.mark.parametrize("check", [divide_factor, buffers_from_the_heap])
def test_on_ringcomm(two_ranks, check):
    two_ranks.run(check)


def test_replicated_and_sharded(four_ranks):
    four_ranks.compare(replicated_and_sharded)
