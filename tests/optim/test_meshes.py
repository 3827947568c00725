# SPDX-License-Identifier: Apache-2.0
"""Norms and skipped steps over all axes of a mesh: 2 x 2 x 2 ranks, and 2 stages of 2 ranks."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaler
from tests.support.meshes import mesh_of, mesh_of_stages
from tests.support.rank_pool import same

Tensor = torch.Tensor
# Per stage, shapes and their placement on the axis "tp"; None means a plain tensor.
STAGES: list[list[tuple[tuple[int, ...], Placement | None]]] = [
    [((6, 40), Shard(0)), ((17,), None), ((5, 30), Shard(0)), ((33,), Replicate())],
    [((7, 9), None), ((40, 6), Shard(1))],
    [((11,), None)],
    [],
]


def gradient(stage: int, number: int, rank: int) -> Tensor:
    """Returns small even whole numbers, whose means over 2 ranks are whole."""
    draw = torch.Generator().manual_seed(100 * stage + 10 * number + rank)
    return 2.0 * torch.randint(-9, 10, STAGES[stage][number][0], generator=draw)


def stage_on(mesh: DeviceMesh, stage: int) -> list[Any]:
    """Returns a stage's parameters, with gradients of this rank's data."""
    params = []
    for number, (shape, at) in enumerate(STAGES[stage]):
        grad = gradient(stage, number, mesh.get_local_rank("dp"))
        ones = torch.ones(shape)
        if at is not None:
            ones, grad = (distribute_tensor(each, mesh["tp"], [at]) for each in (ones, grad))
        params.append(nn.Parameter(ones))
        params[-1].grad = grad
    return params


def norm_of_whole(stages: tuple[int, int], kind: float) -> Tensor:
    """Returns one process's norm over all stages, of the mean gradient of two ranks."""
    means = [
        (gradient(stage, number, 0) + gradient(stage, number, 1)) / 2
        for stage in stages
        for number in range(len(STAGES[stage]))
    ]
    params = [nn.Parameter(torch.zeros_like(mean)) for mean in means]
    for param, mean in zip(params, means, strict=True):
        param.grad = mean
    return AdamW(params, comm="alone").clip_grad_norm_(1e9, kind)


def norms(rank: int, world_size: int) -> None:
    """Over "pp" every stage counts, even without parameters; over "tp" a replica counts once."""
    mesh = mesh_of_stages(2, 2, 2)
    number = mesh.get_local_rank("pp")
    # DTensors on all stages, on only one, and a stage without parameters.
    for stages in ((0, 1), (2, 0), (1, 3)):
        optimizer = AdamW(stage_on(mesh, stages[number]), mesh=mesh)
        for kind in (2.0, 1.0, math.inf):
            same(optimizer.clip_grad_norm_(1e9, kind), norm_of_whole(stages, kind))
        optimizer.step()
        assert optimizer.steps_taken == 1
    for shape, names in (((2, 4), ("pp", "dp")), ((8,), ("dp",))):
        flat = init_device_mesh("cpu", shape, mesh_dim_names=names)
        param = nn.Parameter(torch.ones(3))
        param.grad = torch.full((3,), 4.0)
        norm = AdamW([param], mesh=flat).clip_grad_norm_(1e9, 1.0)
        same(norm, torch.tensor(12.0 * (flat.size() // flat.size(len(shape) - 1))))


def an_overflow_of_one_rank_skips_all_stages(rank: int, world_size: int) -> None:
    mesh = mesh_of_stages(2, 2, 2)
    number = mesh.get_local_rank("pp")

    def poisoned(stages: tuple[int, int]) -> list[Any]:
        params = stage_on(mesh, stages[number])
        if rank == 3:
            params[0].grad.to_local().fill_(math.inf)
        return params

    for stages in ((0, 2), (0, 3)):
        checked = AdamW(poisoned(stages), mesh=mesh, options=AdamWOptions(check_finite=True))
        checked.step()
        scaler = LossScaler()
        scaled = AdamW(poisoned(stages), mesh=mesh, loss_scaler=scaler)
        scaled.step()
        assert scaler.current == 2.0**15
        driver = GradScaler("cpu", init_scale=4.0, comm=mesh["dp"])
        driven = AdamW(poisoned(stages), mesh=mesh)
        if number == 1:  # only the last stage has a loss
            driver.scale(torch.ones(()))
        if rank % 2:  # reading gradients on some ranks only is allowed
            driver.unscale_(driven)
        driver.step(driven)
        driver.update()
        assert driver.get_scale() == 2.0
        for optimizer in (checked, scaled, driven):
            assert optimizer.steps_taken == 0
            assert all(bool((p == 1).all()) for p in optimizer.param_groups[0]["params"])


def refusals(rank: int, world_size: int) -> None:
    mesh = mesh_of_stages(2, 2, 2)
    number = mesh.get_local_rank("pp")
    with pytest.raises(ArgumentError, match="expected comm= or mesh=, got both"):
        AdamW(stage_on(mesh, number), comm=mesh["dp"], mesh=mesh)
    with pytest.raises(ArgumentError, match=r"an axis 'dp'.*with the axes \('pp', 'tp'\)"):
        AdamW(stage_on(mesh, number), mesh=mesh["pp", "tp"])
    with pytest.raises(ArgumentError, match="mesh: expected a DeviceMesh, got 3"):
        AdamW(stage_on(mesh, number), mesh=3)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        GradScaler("cpu", comm=mesh["dp"]).unscale_(AdamW(stage_on(mesh, 2), comm=mesh["dp"]))
    unknown = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "dp", "tp"))
    with pytest.raises(ArgumentError, match="got 'pipe', along which it is unknown"):
        AdamW(stage_on(mesh, 2), mesh=unknown).prepare()
    with pytest.raises(ArgumentError, match=r"DTensors on ranks .*parallelize on mesh\['tp'\]"):
        AdamW(stage_on(mesh_of(4, 2), 0), mesh=mesh_of_stages(4, 2, 1)).prepare()
    options = AdamWOptions(check_finite=number == 1)
    with pytest.raises(MismatchError, match="is false on rank 0 of 8 and true on rank 4 of 8"):
        AdamW(stage_on(mesh, number), mesh=mesh, options=options).prepare()


def ranks_of_a_stage_are_compared(rank: int, world_size: int) -> None:
    """Ranks of "tp" are compared even without DTensors; ranks of other stages do not hang."""
    mesh = mesh_of_stages(2, 2, 2)
    number, part = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
    other = [nn.Parameter(torch.zeros(12))] if part else stage_on(mesh, 2)
    with pytest.raises(MismatchError, match=r"Parameter 0 is \(float32 of shape \(11,\)"):
        AdamW(other if number else stage_on(mesh, 0), mesh=mesh).prepare()
    divided = stage_on(mesh, 1)
    undivided = [nn.Parameter(torch.ones(param.shape)) for param in divided]
    with pytest.raises(MismatchError, match=r"\(40, 6\) in group 0, a local tensor\) on rank"):
        AdamW(undivided if number and part else divided, mesh=mesh).prepare()


def an_axis_that_divides_nothing_is_told_of(rank: int, world_size: int) -> None:
    mesh = mesh_of_stages(2, 2, 2)
    number = mesh.get_local_rank("pp")
    for stages, told in (((2, 3), rank == 0), ((2, 0), False)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            AdamW(stage_on(mesh, stages[number]), mesh=mesh).prepare()
        texts = [str(each.message) for each in found]
        assert [text for text in texts if "the 2 ranks of the axis 'tp' count" in text] == texts
        assert bool(texts) == told


CHECKS = [
    norms,
    an_overflow_of_one_rank_skips_all_stages,
    refusals,
    ranks_of_a_stage_are_compared,
    an_axis_that_divides_nothing_is_told_of,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_mesh(rank_pools: Any, check: Any) -> None:
    rank_pools(8).run(check)
