# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 in processes that share the GPU, compared with gloo on the CPU."""

import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ringcomm.c10d
from tests.gpu.worlds import run_ranks

STEPS = 4
LIMIT_S = 100.0


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 65), nn.GELU(), nn.Linear(65, 65), nn.GELU(), nn.Linear(65, 7)
    )


def batch(rank, step):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * rank + step))


def ddp(device):
    return DistributedDataParallel(model().to(device), bucket_cap_mb=0.01)


def fsdp(device):
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    net = model().to(device)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


WRAPPERS = {"ddp": ddp, "fsdp": fsdp}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(wrapped, rank, device):
    """Returns the losses of the steps, and the final weights in FP32 on the CPU."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = wrapped(batch(rank, step).to(device)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [whole(parameter).detach().cpu() for parameter in wrapped.parameters()]
    return torch.stack(losses).cpu(), weights


def in_group(backend, device, rank, world, folder, wrapper):
    store = dist.FileStore(str(Path(folder) / backend), world)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    try:
        return train(WRAPPERS[wrapper](device), rank, device)
    finally:
        dist.destroy_process_group()


def trains_alike(store, rank, world, folder, wrapper):
    # With TF32, products of 32-bit floats would keep only 10 bits of each factor's mantissa.
    torch.backends.cuda.matmul.allow_tf32 = False
    ringcomm.c10d.register()
    losses, weights = in_group("ringcomm", "cuda:0", rank, world, folder, wrapper)
    reference_losses, reference_weights = in_group("gloo", "cpu", rank, world, folder, wrapper)
    torch.testing.assert_close(losses, reference_losses, rtol=1e-4, atol=1e-5)
    for one, other in zip(weights, reference_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    return [weight.numpy().tobytes() for weight in weights]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_trains_as_gloo_does_on_the_cpu(wrapper):
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(trains_alike, 2, folder, wrapper, timeout_s=LIMIT_S - 10)
    # All ranks hold the same weights, bit for bit.
    assert results[0] == results[1]


def all_of_the_backend(store, rank, world):
    ringcomm.c10d.register()
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=world)
    try:
        for device in ("cpu", "cuda:0"):
            tensor = torch.full((1000,), float(rank + 1), device=device)
            dist.all_reduce(tensor)
            assert bool((tensor == 3).all()), device
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            assert bool((tensor == 6).all()), device
            parts = [torch.zeros(10, device=device) for _ in range(world)]
            dist.all_gather(parts, torch.full((10,), float(rank), device=device))
            assert [part[0].item() for part in parts] == [0.0, 1.0]
            dist.barrier()
    finally:
        dist.destroy_process_group()


def test_one_group_serves_both_devices():
    run_ranks(all_of_the_backend, 2)
