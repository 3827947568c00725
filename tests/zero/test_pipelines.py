# SPDX-License-Identifier: Apache-2.0
"""ZeRO within pipeline stages: torch's schedules, and norms and failures across all stages."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.optim import SGD, AdamW, AdamWOptions
from tests.support.meshes import mesh_of_stages
from tests.support.rank_pool import same
from tests.zero.tensor_parallel import Model, batch, parallelized, whole_params

Tensor = torch.Tensor
OPTIONS = zero.ZeroOptions(bucket_elems=512)


def second_stage() -> nn.Module:
    """Returns the second stage, with small whole numbers like the first stage's."""
    stage = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    with torch.no_grad():
        for param in stage.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) % 5 - 2)
    return stage


def coefficients(rows: int) -> Tensor:
    return (torch.arange(5.0) - 2).expand(rows, 4, 5)


def norm_of_one_process(stages: list[nn.Module], max_norm: float) -> tuple[Tensor, list[Any]]:
    """Takes a step in one process on two ranks' batches; returns the norm over all stages."""
    params = [param for stage in stages for param in stage.parameters()]
    alone = AdamW(params, lr=0.05, comm="alone")
    for stage in stages:
        out = stage(torch.cat([batch(0, 0), batch(0, 1)]))
        (out * coefficients(4)).sum().div(2).backward()
    norm = alone.clip_grad_norm_(max_norm)
    alone.step()
    return norm, [{name: p.detach() for name, p in stage.named_parameters()} for stage in stages]


def norms_are_of_all_stages(rank: int, world_size: int) -> None:
    """A clipped step equals, bit for bit, one process with all stages, at three stages of ZeRO."""
    mesh = mesh_of_stages(2, 2, 2)
    number = mesh.get_local_rank("pp")
    norm, stepped = norm_of_one_process([Model().whole_numbers(), second_stage()], 1.0)
    for stage in (1, 2, 3):
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
    for stage in (0, 3):
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
        zero.remove_sharding(module)


def all_stages_fail_together(rank: int, world_size: int) -> None:
    mesh = mesh_of_stages(2, 2, 2)
    with pytest.raises(ArgumentError, match="expected comm= or mesh=, got both"):
        zero.shard(second_stage(), comm=mesh["dp"], mesh=mesh)
    with pytest.raises(ArgumentError, match=r"an axis 'dp'.*with the axes \('pp', 'tp'\)"):
        zero.shard(second_stage(), mesh=mesh["pp", "tp"])
    module = first_or_second(mesh)
    # The first pipeline stage cannot see the second stage's mistake.
    second = mesh.get_local_rank("pp") == 1
    with pytest.raises(ArgumentError, match="has no shape yet" if second else "4 of 8 failed, so"):
        zero.shard(nn.LazyLinear(3) if second else module, mesh=mesh)
    # Ranks that share a stage compare the shapes of parameters that are not DTensors.
    odd = nn.Linear(6, 7 + mesh.get_local_rank("tp"))
    with pytest.raises(MismatchError, match=r"'weight' \(float32 of shape \(7, 6\)"):
        zero.shard(odd if second else module, mesh=mesh)
    zero.shard(module, mesh=mesh)
    other = mesh_of_stages(1, 4, 2)
    with pytest.raises(ArgumentError, match="sharded over another mesh"):
        AdamW(module.parameters(), mesh=other)


# ---- schedules, on 2 x 2 ranks ---------------------------------------------------------------

MICRO_BATCHES = 4
SINGLE = (ScheduleGPipe, Schedule1F1B)
# These schedules place stages like the arms of a V: rank 0 has the first and the last one.
IN_A_V = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
SPLIT = (ScheduleInterleavedZeroBubble, *IN_A_V)
# Other schedules train at stage 3 of ZeRO.
STAGES = {Schedule1F1B: (1, 3), ScheduleInterleavedZeroBubble: (2,)}


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


def numbers(kind: Any, mesh: DeviceMesh) -> list[int]:
    """Returns the numbers of this rank's layers; each layer is a pipeline stage."""
    rank = mesh.get_local_rank("pp")
    return [rank] if kind in SINGLE else [rank, 3 - rank if kind in IN_A_V else rank + 2]


def schedule(kind: Any, modules: nn.ModuleList, mesh: DeviceMesh, loss: Any) -> Any:
    own = numbers(kind, mesh)
    count = mesh.size(0) * len(own)
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"), group=group)
        for module, number in zip(modules, own, strict=True)
    ]
    chosen = stages[0] if kind in SINGLE else stages
    return kind(chosen, n_microbatches=MICRO_BATCHES, loss_fn=loss)


def run(runner: Any, mesh: DeviceMesh, x: Tensor, target: Tensor) -> list[Tensor]:
    """Runs a schedule once; returns the losses on the rank of the last stage."""
    losses: list[Tensor] = []
    first = mesh.get_local_rank("pp") == 0
    last = {"target": target, "losses": losses} if first == isinstance(runner, IN_A_V) else {}
    runner.step(*([x] if first else []), **last)
    return [loss.detach() for loss in losses]


def data(mesh: DeviceMesh, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
    return torch.randn(8, 6, generator=draw)


def by_data_parallelism(count: int, mesh: DeviceMesh) -> tuple[list[Any], dict[str, Tensor]]:
    """Returns norms, losses and parameters of the same micro-batches without a pipeline."""
    model = nn.Sequential(*layers(count))
    zero.shard(model, 2, comm=mesh["dp"], options=OPTIONS)
    optimizer = AdamW(model.parameters(), lr=0.05)
    told: list[Any] = []
    for step in range(2):
        losses = []
        with zero.no_sync(model):
            for x in data(mesh, step).chunk(MICRO_BATCHES):
                losses.append(nn.functional.mse_loss(model(x), torch.ones(2, 6)))
                losses[-1].backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(MICRO_BATCHES)
        told.append((optimizer.clip_grad_norm_(0.5), [loss.detach() for loss in losses]))
        optimizer.step()
        optimizer.zero_grad()
    return told, whole_params(model)


def schedules_equal_data_parallelism(rank: int, world_size: int) -> None:
    """Every schedule has the bits of data parallelism, and reduces gradients once per step."""
    mesh = mesh_of_stages(2, 2, 1)
    references = {count: by_data_parallelism(count, mesh) for count in (2, 4)}
    for kind in (*SINGLE, ScheduleInterleaved1F1B, *SPLIT):
        own = numbers(kind, mesh)
        told, params = references[2 * len(own)]
        for stage in STAGES.get(kind, (3,)):
            modules = nn.ModuleList([layers(2 * len(own))[number] for number in own])
            zero.shard(modules, stage, mesh=mesh, options=OPTIONS)
            optimizer = AdamW(modules.parameters(), lr=0.05)
            runner = schedule(kind, modules, mesh, nn.functional.mse_loss)
            # A schedule that splits backwards needs parameters between the halves, and keeps them
            # until the step, except for its first stage, whose backward is not split.
            split = [number for number in own if number and kind in SPLIT]
            for step, (norm, losses) in enumerate(told):
                with zero.profiled(modules) as profile:
                    lost = run(runner, mesh, data(mesh, step), torch.ones(8, 6))
                    assert not [each for each in profile.spans if "reduce" in each.name]
                    same(lost, losses if 2 * len(own) - 1 in own else [])
                with zero.profiled(modules) as profile:
                    same(optimizer.clip_grad_norm_(0.5), norm)
                    reductions = [each for each in profile.spans if each.name == "reduce_scatter"]
                    assert len(reductions) == (len(own) if stage > 1 else 0)
                found = [n for n, each in zip(own, modules, strict=True) if here(each)]
                assert stage < 3 or found == split
                optimizer.step()
                assert stage < 3 or not any(map(here, modules))
                optimizer.zero_grad()
            for position, number in enumerate(own):
                for name in ("0.weight", "0.bias"):
                    same(whole_params(modules)[f"{position}.{name}"], params[f"{number}.{name}"])


def sums_to_come_are_added_once(rank: int, world_size: int) -> None:
    """Norm layers on a rank's own tokens, whose gradients are summed over tp, with DualPipeV."""
    mesh = mesh_of_stages(2, 1, 2)
    own, part = numbers(ScheduleDualPipeV, mesh), mesh.get_local_rank("tp")
    x = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(3))
    target, loss_of = torch.ones(8, 2, 6), nn.functional.mse_loss
    alone = nn.Sequential(*norms(4))
    for rows in x.chunk(MICRO_BATCHES):
        for tokens in rows.chunk(2, dim=1):
            (loss_of(alone(tokens), torch.ones_like(tokens)) / MICRO_BATCHES).backward()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    for stage in (0, 2, 3):
        modules = nn.ModuleList([norms(4)[number] for number in own])
        for module in modules:
            parallelize_module(module, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
        zero.shard(modules, stage, mesh=mesh, options=OPTIONS)
        optimizer = SGD(modules.parameters(), lr=0.5)
        runner = schedule(ScheduleDualPipeV, modules, mesh, loss_of)
        run(runner, mesh, x.chunk(2, dim=1)[part].contiguous(), target)
        optimizer.step()
        for position, number in enumerate(own):
            for name, want in alone[number].named_parameters():
                found = whole_params(modules)[f"{position}.{name}"]
                found = found.full_tensor() if isinstance(found, DTensor) else found
                torch.testing.assert_close(found, want.detach(), rtol=1e-5, atol=1e-6)


def norms(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    made: list[nn.Module] = [nn.Sequential(nn.LayerNorm(6), nn.Tanh()) for _ in range(count)]
    for module in made:
        for param in module.parameters():
            nn.init.normal_(param)
    return made


def here(module: nn.Module) -> bool:
    """True if a module's parameters are unsharded, at stage 3 of ZeRO."""
    return not any(", resharded" in repr(param) for param in module.parameters())


class Unhooked(nn.Module):
    """Runs a module without its hooks, as a compiled graph of the module does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module.forward(x)
        return out


def weighted(out: Tensor, target: Tensor) -> Tensor:
    return (out * target).sum()


def a_step_is_exact(rank: int, world_size: int) -> None:
    """A step on whole numbers has the bits of one process; then the modules train unpipelined."""
    mesh = mesh_of_stages(2, 2, 1)
    draw = torch.Generator().manual_seed(2)
    x = torch.randint(-3, 4, (2, 8, 6), generator=draw).float()
    target = (torch.arange(6.0) - 2).expand(8, 6)
    whole = nn.Sequential(linear(0), linear(1))
    alone = AdamW(whole.parameters(), lr=0.05, comm="alone")
    weighted(whole(x.flatten(0, 1)), target.repeat(2, 1)).div(2 * MICRO_BATCHES).backward()
    norm = alone.clip_grad_norm_(1.0)
    alone.step()
    mine: Any = whole[mesh.get_local_rank("pp")]
    stepped = {name: param.detach() for name, param in mine.named_parameters()}
    for wrap, stage in ((Unhooked, 2), (nn.Sequential, 2), (nn.Sequential, 3)):
        module = linear(mesh.get_local_rank("pp"))
        zero.shard(module, stage, mesh=mesh, options=OPTIONS)
        optimizer = AdamW(module.parameters(), lr=0.05)
        runner = schedule(ScheduleGPipe, nn.ModuleList([wrap(module)]), mesh, weighted)
        run(runner, mesh, x[mesh.get_local_rank("dp")], target)
        same(optimizer.clip_grad_norm_(1.0), norm)
        optimizer.step()
        same(whole_params(module), stepped)
        optimizer.zero_grad()
    # If autograd has its own thread, only the forward shows that a pipeline stage calls.
    stage_calls = {"__name__": PipelineStage.__module__, "module": module, "x": x[0]}
    out = eval("module(x)", stage_calls)
    with zero.profiled(module) as profile:
        out.sum().backward()
        assert not [each.name for each in profile.spans if each.name == "reduce_scatter"]
    # Outside of a schedule, a backward reduces gradients again.
    with zero.profiled(module) as profile:
        module(x[0]).sum().backward()
        assert [each.name for each in profile.spans if each.name == "reduce_scatter"]


def a_dropped_module_may_live_on_some_ranks(rank: int, world_size: int) -> None:
    """A dropped module makes no collective call, if one rank has collected it and another not."""
    mesh = mesh_of_stages(2, 2, 1)
    dropped = [zero.shard(linear(0), 2, mesh=mesh, options=OPTIONS)]
    module = zero.shard(linear(mesh.get_local_rank("pp")), 2, mesh=mesh, options=OPTIONS)
    if mesh.get_local_rank("dp"):
        dropped.clear()
        gc.collect()
    runner = schedule(ScheduleGPipe, nn.ModuleList([nn.Sequential(module)]), mesh, weighted)
    run(runner, mesh, torch.ones(8, 6), torch.ones(8, 6))
    same(AdamW(module.parameters()).clip_grad_norm_(1.0) > 0, torch.tensor(True))


def each_stage_has_its_checkpoints(folder: str, rank: int, world_size: int) -> None:
    mesh = mesh_of_stages(2, 2, 1)
    number = mesh.get_local_rank("pp")
    trained, loaded = linear(number), linear(1 - number)
    for module, stage in ((trained, 2), (loaded, 3)):
        zero.shard(module, stage, mesh=mesh, options=OPTIONS)
    optimizer, other = (AdamW(module.parameters(), lr=0.05) for module in (trained, loaded))
    for param in trained.parameters():
        param.grad = torch.ones_like(param)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    zero.save(f"{folder}/stage{number}", 1, trained, optimizer)
    zero.load(f"{folder}/stage{number}", loaded, other)
    same(whole_params(loaded), whole_params(trained))
    assert other.steps_taken == 1


def a_stage_without_parameters_has_checkpoints(folder: str, rank: int, world_size: int) -> None:
    """It saves its buffers, step numbers and the user's data, and loads like other stages."""
    mesh = mesh_of_stages(2, 2, 1)
    number = mesh.get_local_rank("pp")
    root = f"{folder}/without{number}"

    def made(stage: int, lr: float) -> tuple[nn.Module, AdamW]:
        module: nn.Module = linear(0) if number else nn.Tanh()
        module.register_buffer("seen", torch.zeros(2))
        zero.shard(module, stage, mesh=mesh, options=OPTIONS)
        return module, AdamW(module.parameters(), lr=lr, mesh=mesh)

    trained, optimizer = made(2, 0.05)
    for param in trained.parameters():
        param.grad = torch.ones_like(param)
    trained.seen.fill_(3)  # type: ignore[operator]
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    zero.save(root, 1, trained, optimizer, data={"epoch": 4})
    loaded, other = made(3, 0.1)
    found = zero.load(root, loaded, other)
    same([found.step, found.data, found.exact], [1, {"epoch": 4}, True])
    same([loaded.seen, whole_params(loaded)], [trained.seen, whole_params(trained)])
    assert other.steps_taken == 1
    assert other.param_groups[0]["lr"] == 0.05
    if number == 0:
        zero.load(root, loaded)
        strange = AdamW([nn.Parameter(torch.ones(2))], comm=mesh["dp"])
        with pytest.raises(ArgumentError, match="expected one of ringcomm"):
            zero.save(root, 2, loaded, strange)


def linear(number: int) -> nn.Linear:
    made = nn.Linear(6, 6)
    with torch.no_grad():
        for param in made.parameters():
            values = torch.arange(number, number + param.numel())
            param.copy_(values.view(param.shape) % 5 - 2)
    return made


def sums_in_fp32_are_divided(rank: int, world_size: int) -> None:
    """FP32 accumulation of a schedule's gradients ends with the same values as p.grad."""
    mesh = mesh_of_stages(2, 2, 1)
    fp32_sums = AdamWOptions(accumulate_dtype=torch.float32)
    for kind in (ScheduleGPipe, ScheduleInterleavedZeroBubble):
        for scales, stage in ((True, 1), (False, 3)):
            stepped = []
            for options in (AdamWOptions(), fp32_sums):
                own = numbers(kind, mesh)
                modules = nn.ModuleList([layers(2 * len(own))[number] for number in own])
                zero.shard(modules, stage, mesh=mesh, options=OPTIONS)
                optimizer = AdamW(modules.parameters(), lr=0.05, options=options)
                runner = schedule(kind, modules, mesh, nn.functional.mse_loss)
                runner.scale_grads = scales
                norms = []
                for step in range(2):
                    run(runner, mesh, data(mesh, step), torch.ones(8, 6))
                    norms.append(optimizer.clip_grad_norm_(0.5))
                    optimizer.step()
                    optimizer.zero_grad()
                stepped.append([norms, whole_params(modules)])
            same(stepped[1], stepped[0])


CHECKS = [norms_are_of_all_stages, a_stage_without_parameters, all_stages_fail_together]
CHECKPOINTS = [each_stage_has_its_checkpoints, a_stage_without_parameters_has_checkpoints]
SCHEDULES = [
    schedules_equal_data_parallelism,
    a_step_is_exact,
    a_dropped_module_may_live_on_some_ranks,
    sums_in_fp32_are_divided,
    sums_to_come_are_added_once,
]


@pytest.mark.parametrize("check", SCHEDULES, ids=lambda check: check.__name__)
def test_schedules(rank_pools: Any, check: Any) -> None:
    rank_pools(4).run(check)


@pytest.mark.parametrize("check", CHECKPOINTS, ids=lambda check: check.__name__)
def test_checkpoints(rank_pools: Any, tmp_path: Any, check: Any) -> None:
    rank_pools(4).run(functools.partial(check, str(tmp_path)))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stages(rank_pools: Any, check: Any) -> None:
    rank_pools(8).run(check)
