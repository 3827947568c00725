# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel trains with the same results on ringcomm and on Gloo."""

import os
import signal
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.support.rank_pool import RankPool, default_group


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 8))


class Branching(nn.Module):
    """Leaves one of two layers without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def batch(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def train(ddp: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in ddp.parameters()), *ddp.buffers()]


def buckets(rank, world_size):
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.001), rank)


def no_sync(rank, world_size):
    ddp = DistributedDataParallel(model())
    with ddp.no_sync():
        ddp(batch(rank, 0)).sum().backward()
    local = [p.grad.clone() for p in ddp.parameters()]
    ddp(batch(rank, 1)).sum().backward()
    return local, [p.grad for p in ddp.parameters()]


def unused_parameters(rank, world_size):
    ddp = DistributedDataParallel(Branching(), find_unused_parameters=True)
    ddp(batch(rank, 0), rank % 2).sum().backward()
    return [p.grad for p in ddp.parameters()]


def sparse_gradients(rank, world_size):
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    ddp(torch.tensor([rank, 3, 3])).sum().backward()
    return next(ddp.parameters()).grad.to_dense()


def hooked(hook, state=None):
    def run(rank):
        ddp = DistributedDataParallel(model())
        ddp.register_comm_hook(state() if state else None, hook)
        return train(ddp, rank)

    return run


def bfloat16_hook(state, bucket):
    # A wrapper with another name, since DDP refuses torch's hook by name on builds without CUDA.
    return default_hooks.bf16_compress_hook(state, bucket)


def half_precision_hooks(rank, world_size):
    return [
        hooked(hook)(rank)
        for hook in (
            default_hooks.fp16_compress_hook,
            bfloat16_hook,
            default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        )
    ]


def power_sgd_hook(rank, world_size):
    def state():
        return powerSGD_hook.PowerSGDState(
            default_group(), matrix_approximation_rank=2, start_powerSGD_iter=2
        )

    return hooked(powerSGD_hook.powerSGD_hook, state)(rank)


def builtin_all_reduce_hook(rank, world_size):
    ddp = DistributedDataParallel(model())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return train(ddp, rank)


def join_with_uneven_inputs(rank, world_size):
    ddp = DistributedDataParallel(nn.Linear(16, 8))
    with Join([ddp]):
        for step in range(2 + 2 * rank):
            ddp(batch(rank, step)).sum().backward()
    return [p.grad for p in ddp.parameters()]


def zero_redundancy_optimizer(rank, world_size):
    ddp = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True
    )
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    return [p.detach() for p in ddp.parameters()], [state[key]["exp_avg"] for key in sorted(state)]


def a_rank_dies(rank, world_size):
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    ddp(batch(rank, 0)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="PeerLost"):
        ddp(batch(rank, 1)).sum().backward()


def test_a_rank_dies_in_the_backward_pass():
    with closing(RankPool(2)) as pool, pytest.raises(AssertionError) as raised:
        pool.run(a_rank_dies)
    assert str(raised.value) == "rank 1: the process died"


@pytest.mark.parametrize(
    "check",
    [
        buckets,
        no_sync,
        unused_parameters,
        sparse_gradients,
        half_precision_hooks,
        power_sgd_hook,
        builtin_all_reduce_hook,
        join_with_uneven_inputs,
        zero_redundancy_optimizer,
    ],
)
def test_as_on_gloo(two_ranks, check):
    two_ranks.compare(check)
