# SPDX-License-Identifier: Apache-2.0
"""Layers of experts on meshes with replicas, tensor parallelism and pipeline stages."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringcomm
from ringcomm import ArgumentError
from ringcomm.extras import moe
from ringcomm.optim import AdamW
from tests.extras.moe.test_layer import EXPERTS, HIDDEN, expert, filled, tokens
from tests.support.covering import in_test_all

Tensor = torch.Tensor
PLAN: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
CLIP, STEPS, MICRO_BATCHES = 1.0, 3, 2
# A rounding error e of a gradient changes an update by up to lr * e / eps. With the default eps,
# 1e-8, a gradient of rounding errors only would move its parameter by lr; here by 10 e.
EPS = 1e-3


def mesh_of(**axes: Any) -> DeviceMesh:
    _clear_sharding_prop_cache()  # the cache knows equal meshes, whose groups are gone
    return ringcomm.Mesh(**axes)


def first(group: Any, tp: DeviceMesh | None = None, experts_too: bool = False) -> nn.Module:
    """Returns a network whose layers ``tp`` shards, and experts that ``tp`` may shard as well."""
    mlp = filled(nn.Sequential(nn.Linear(HIDDEN, 32), nn.Tanh(), nn.Linear(32, HIDDEN)), seed=40)
    size, rank = (1, 0) if group is None else (group.size(), group.get_local_rank())
    here = EXPERTS // size
    experts = nn.ModuleList(expert(rank * here + number) for number in range(here))
    if tp is not None:
        parallelize_module(mlp, tp, PLAN)
    if tp is not None and experts_too:
        for each in experts:
            parallelize_module(each, tp, PLAN)
    router = filled(nn.Linear(HIDDEN, EXPERTS, bias=False), 99)
    return nn.Sequential(mlp, moe.MoE(router, experts, alone() if group is None else group))


def alone() -> Any:
    return ringcomm.local_world(1)[0]


def second() -> nn.Module:
    return filled(nn.Linear(HIDDEN, 5), 51)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = tokens(100 * step + rank, 8)
    return x, x[:, :5].cumsum(1)


def of_one_process(ranks: int, *modules: nn.Module) -> list[tuple[float, float]]:
    """Returns one process's losses and norms for modules in sequence, on some ranks' data."""
    model = nn.Sequential(*modules)
    optimizer = AdamW(model.parameters(), lr=0.01, eps=EPS, comm="alone")
    found = []
    for step in range(STEPS):
        pairs = [data(step, rank) for rank in range(ranks)]
        x, target = (torch.cat(each) for each in zip(*pairs, strict=True))
        loss = loss_of(model(x), target)
        loss.backward()
        found.append((float(loss.detach()), float(optimizer.clip_grad_norm_(CLIP))))
        optimizer.step()
        optimizer.zero_grad()
    return found


def close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def trained(model: nn.Module, optimizer: moe.Optimizer, number: int, mesh: Any) -> list[Any]:
    """Trains; returns the losses, averaged over ranks with other data, and the norms."""
    found = []
    for step in range(STEPS):
        x, target = data(step, number)
        loss = loss_of(model(x), target)
        loss.backward()
        mean = loss.detach().clone()
        for axis in ("dp", "ep"):
            if axis in mesh.mesh_dim_names:
                dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh.get_group(axis))
        found.append((float(mean), float(optimizer.clip_grad_norm_(CLIP))))
        optimizer.step()
        optimizer.zero_grad()
    return found


def adamw(params: list[Tensor]) -> AdamW:
    return AdamW(params, lr=0.01, eps=EPS)


def beside_replicas(rank: int, world_size: int) -> None:
    """On a mesh of (dp, ep), experts' state is sharded over dp, all other state over both."""
    mesh = mesh_of(dp=2, ep=2)
    expected = of_one_process(4, first(None), second())
    for stage in (*in_test_all(1), 3):
        model: Any = nn.Sequential(first(mesh["ep"]), second())
        moe.shard(model, stage, mesh=mesh)
        optimizer = moe.Optimizer(model, adamw)
        close(trained(model, optimizer, rank, mesh), expected)
        owned = [each.communicator.world_size for each in optimizer.optimizers if each.communicator]
        assert owned == [4, 2]
    with pytest.raises(ArgumentError, match="an axis 'ep'"):
        moe.shard(nn.Sequential(first(mesh["ep"])), mesh=mesh["dp"])
    with pytest.raises(ArgumentError, match="comm= or mesh=, got both"):
        moe.shard(nn.Sequential(first(mesh["ep"])), mesh=mesh, comm=mesh["ep"])


def beside_tensor_parallelism(folder: Path, rank: int, world_size: int) -> None:
    """On a mesh of (ep, tp), ranks of tp have the same tokens; experts are whole or sharded."""
    mesh = mesh_of(ep=2, tp=2)
    expected = of_one_process(2, first(None), second())
    number = mesh.get_local_rank("ep")
    for experts_too in (*in_test_all(False), True):
        model: Any = nn.Sequential(first(mesh["ep"], mesh["tp"], experts_too), second())
        moe.shard(model, 2, mesh=mesh)
        optimizer = moe.Optimizer(model, adamw)
        divided = any(isinstance(each, DTensor) for each in model[0][1].experts.parameters())
        assert divided == experts_too
        close(trained(model, optimizer, number, mesh), expected)
        root = folder / str(experts_too)
        moe.save(root, 1, model, optimizer)
        told = trained(model, optimizer, number, mesh)
        moe.load(root, model, optimizer)
        assert trained(model, optimizer, number, mesh) == told
        dist.barrier()


def within_stages(rank: int, world_size: int) -> None:
    """On a mesh of (pp, ep), one stage has the experts, or both stages have some."""
    mesh = mesh_of(pp=2, ep=2)
    number, expert_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    for both in (False, True):
        last = [nn.Sequential(first(None), second()) if both else second()]
        expected = of_one_process(2, first(None), *last)
        module: Any = first(mesh["ep"])
        if number:
            module = nn.Sequential(first(mesh["ep"]), second()) if both else second()
        moe.shard(module, 2, mesh=mesh)
        optimizer = moe.Optimizer(module, adamw)
        assert (optimizer.experts is None) == (number == 1 and not both)
        device, group = torch.device("cpu"), mesh.get_group("pp")
        stage = PipelineStage(module, number, 2, device, group=group)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_of)
        found = []
        for step in range(STEPS):
            x, target = data(step, expert_rank)
            losses: list[Tensor] = []
            if number:
                schedule.step(target=target, losses=losses)
            else:
                schedule.step(x)
            mean = torch.stack(losses).detach().mean() if number else torch.zeros(())
            dist.all_reduce(mean)
            found.append((float(mean) / 2, float(optimizer.clip_grad_norm_(CLIP))))
            optimizer.step()
            optimizer.zero_grad()
        close(found, expected)


@pytest.mark.parametrize("check", [beside_replicas, within_stages])
def test_it_trains_as_one_process_does(rank_pools: Any, check: Any) -> None:
    rank_pools(4).run(check)


def test_under_tensor_parallelism(rank_pools: Any, tmp_path: Path) -> None:
    rank_pools(4).run(functools.partial(beside_tensor_parallelism, tmp_path))
