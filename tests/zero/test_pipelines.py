"""ZeRO within the stages of a pipeline: norms and failures of all stages, on 2 x 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW
from tests.support.meshes import mesh_of_stages
from tests.support.rank_pool import same
from tests.zero.tensor_parallel import Model, batch, parallelized, whole_params

Tensor = torch.Tensor
OPTIONS = zero.ZeroOptions(bucket_elems=512)


def second_stage() -> nn.Module:
    """Small whole numbers, as those of the first stage."""
    stage = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    with torch.no_grad():
        for param in stage.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) % 5 - 2)
    return stage


def coefficients(rows: int) -> Tensor:
    return (torch.arange(5.0) - 2).expand(rows, 4, 5)


def norm_of_one_process(stages: list[nn.Module], max_norm: float) -> tuple[Tensor, list[Any]]:
    """The norm of all stages' gradients for two ranks' batches; steps them."""
    params = [param for stage in stages for param in stage.parameters()]
    alone = AdamW(params, lr=0.05, comm="alone")
    for stage in stages:
        out = stage(torch.cat([batch(0, 0), batch(0, 1)]))
        (out * coefficients(4)).sum().div(2).backward()
    norm = alone.clip_grad_norm_(max_norm)
    alone.step()
    return norm, [{name: p.detach() for name, p in stage.named_parameters()} for stage in stages]


def norms_are_of_all_stages(rank: int, world_size: int) -> None:
    """A clipped step has the bits of one process with all stages, at each stage of ZeRO."""
    mesh = mesh_of_stages(2, 2, 2)
    number = mesh.get_local_rank("pp")
    norm, stepped = norm_of_one_process([Model().whole_numbers(), second_stage()], 1.0)
    for stage in (0, 1, 2, 3):
        module = first_or_second(mesh)
        zero.shard(module, stage, mesh=mesh, options=OPTIONS)
        optimizer = AdamW(module.parameters(), lr=0.05)
        (module(batch(0, mesh.get_local_rank("dp"))) * coefficients(2)).sum().backward()
        same(optimizer.clip_grad_norm_(1.0), norm)
        optimizer.step()
        same(whole_params(module), stepped[number])


def first_or_second(mesh: DeviceMesh) -> nn.Module:
    if mesh.get_local_rank("pp") == 0:
        return parallelized(Model().whole_numbers(), mesh["tp"])
    return second_stage()


def a_stage_without_parameters(rank: int, world_size: int) -> None:
    mesh = mesh_of_stages(2, 2, 2)
    norm, stepped = norm_of_one_process([second_stage()], 1.0)
    for stage in (0, 1, 2, 3):
        module = second_stage() if mesh.get_local_rank("pp") else nn.Tanh()
        zero.shard(module, stage, mesh=mesh, options=OPTIONS)
        optimizer = AdamW(module.parameters(), lr=0.05, mesh=mesh)
        x = batch(0, mesh.get_local_rank("dp"))
        if mesh.get_local_rank("pp"):
            (module(x) * coefficients(2)).sum().backward()
        else:
            module(x.requires_grad_()).sum().backward()
        same(optimizer.clip_grad_norm_(1.0), norm)
        optimizer.step()
        same(whole_params(module), stepped[0] if mesh.get_local_rank("pp") else {})
        zero.unshard(module)


def all_stages_fail_together(rank: int, world_size: int) -> None:
    mesh = mesh_of_stages(2, 2, 2)
    with pytest.raises(ArgumentError, match="expected comm= or mesh=, got both"):
        zero.shard(second_stage(), comm=mesh["dp"], mesh=mesh)
    with pytest.raises(ArgumentError, match=r"an axis 'dp'.*with the axes \('pp', 'tp'\)"):
        zero.shard(second_stage(), mesh=mesh["pp", "tp"])
    module = first_or_second(mesh)
    # What is wrong with the second stage the first one cannot see.
    second = mesh.get_local_rank("pp") == 1
    with pytest.raises(ArgumentError, match="has no shape yet" if second else "rank 4 failed, so"):
        zero.shard(nn.LazyLinear(3) if second else module, mesh=mesh)
    zero.shard(module, mesh=mesh)
    other = mesh_of_stages(1, 4, 2)
    with pytest.raises(ArgumentError, match="sharded over another mesh"):
        AdamW(module.parameters(), mesh=other)


CHECKS = [norms_are_of_all_stages, a_stage_without_parameters, all_stages_fail_together]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stages(rank_pools: Any, check: Any) -> None:
    rank_pools(8).run(check)
