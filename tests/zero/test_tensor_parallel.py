# SPDX-License-Identifier: Apache-2.0
"""ZeRO on the data-parallel axis of a mesh with a tensor-parallel axis, on 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions
from tests.support.meshes import mesh_of
from tests.support.rank_pool import same
from tests.zero.tensor_parallel import (
    Model,
    Training,
    batch,
    build,
    full,
    parallelized,
    train,
    whole_params,
)

Tensor = torch.Tensor
BF16 = zero.ZeroOptions(bucket_elems=512, precision=zero.Precision(param=torch.bfloat16))


def stages_are_equal(rank, world_size):
    """All stages have the same bits, which are close to training without tensor parallelism."""
    mesh = mesh_of(2, 2)
    results = []
    for stage, overlap in ((1, None), (3, True)):
        model = parallelized(Model(), mesh["tp"])
        identities = {name: id(param) for name, param in model.named_parameters()}
        options = zero.ZeroOptions(bucket_elems=512, overlap=overlap)
        training = Training(stage, zero=options)
        optimizer = build(model, mesh, training)
        norms = train(model, optimizer, mesh, training)
        assert {name: id(param) for name, param in model.named_parameters()} == identities
        results.append((whole_params(model), norms))
        same(results[-1], results[0])
        if stage == 3:
            # Attribute access in the module would unshard the parameter.
            weight: Any = dict(model.named_parameters())["blocks.0.up.weight"]
            with pytest.raises(ArgumentError, match=r"parameter blocks\.0\.up\.weight: to_local"):
                weight.to_local()
            with pytest.raises(
                ArgumentError, match=r"parameter blocks\.0\.up\.weight: full_tensor"
            ):
                weight.full_tensor()
        zero.remove_sharding(model)
        same({name: full(param) for name, param in model.named_parameters()}, results[0][0])
        assert isinstance(model.head.weight, DTensor) and type(model.first.weight) is nn.Parameter
    reference = Model()
    optimizer = build(reference, mesh, Training(1))
    norms = train(reference, optimizer, mesh, Training(1))
    torch.testing.assert_close(results[0][1], norms)
    torch.testing.assert_close(results[0][0], whole_params(reference))


def updates_in_backward(rank, world_size):
    """Updates in backward have the bits of updates in the step, and refuse to_local() meanwhile."""
    mesh = mesh_of(2, 2)
    for stage in (2, 3):
        results = []
        for update in ("in_step", "in_backward"):
            model = parallelized(Model(), mesh["tp"])
            adamw = AdamWOptions(update=update)
            training = Training(stage, backwards=1, clip=None, zero=BF16, adamw=adamw)
            optimizer = build(model, mesh, training)
            train(model, optimizer, mesh, training)
            results.append(whole_params(model))
        same(*results)
        weight: Any = dict(model.named_parameters())["blocks.0.up.weight"]
        model(batch(0, mesh.get_local_rank("dp"))).square().mean().backward()
        said = "updated it already" if stage == 2 else "resharded|needs its values"
        with pytest.raises(ArgumentError, match=said):
            weight.to_local()
        optimizer.step()


def a_step_is_exact(rank, world_size):
    """A step on whole numbers has the bits of one process with whole parameters and batches."""
    mesh = mesh_of(2, 2)
    reference = Model().whole_numbers()
    alone = AdamW(reference.parameters(), lr=0.05, comm="alone")
    out = reference(torch.cat([batch(0, 0), batch(0, 1)]))
    (out * coefficients(4)).sum().div(2).backward()
    norm = alone.clip_grad_norm_(1.0)
    alone.step()
    for stage in (0, 2, 3):
        model = parallelized(Model().whole_numbers(), mesh["tp"])
        optimizer = build(model, mesh, Training(stage))
        out = model(batch(0, mesh.get_local_rank("dp")))
        (out * coefficients(2)).sum().backward()
        same(optimizer.clip_grad_norm_(1.0), norm)
        optimizer.step()
        same(whole_params(model), {n: p.detach() for n, p in reference.named_parameters()})


def coefficients(rows: int) -> Tensor:
    return (torch.arange(5.0) - 2).expand(rows, 4, 5)


def reads_and_writes(rank, world_size):
    """Covers unsharded() with writes, a failed shard(), and parameters on the meta device."""
    mesh = mesh_of(2, 2)
    for stage in (1, 3):
        model: Any = parallelized(Model(), mesh["tp"])
        before = {name: full(param) for name, param in model.named_parameters()}
        zero.shard(model, stage, comm=mesh["dp"])
        same(whole_params(model), before)
        with torch.no_grad(), zero.unsharded(model, write_from=1):
            model.blocks[0].up.weight.mul_(1 + mesh.get_local_rank("dp"))
        same(whole_params(model)["blocks.0.up.weight"], before["blocks.0.up.weight"] * 2)
        state = zero.full_state_dict(model)
        same(full(state["head.weight"]), before["head.weight"])
    refused = pytest.raises(ArgumentError, match=r"head\.weight was changed in place")
    with refused, torch.no_grad(), zero.unsharded(model):
        model.head.weight.add_(1.0)
    with refused, torch.no_grad(), zero.unsharded(model):
        model.head.weight.to_local().add_(1.0)
    meta = parallelized(Model("meta"), mesh["tp"])
    zero.shard(meta, 3, comm=mesh["dp"])
    params = whole_params(meta)
    assert all(param.isfinite().all() for param in params.values())
    meta(batch(0, 0)).sum().backward()


def rolled_back(rank, world_size):
    """A shard() that fails leaves each DTensor with its values, dtype and memory."""
    mesh = mesh_of(2, 2)
    model = parallelized(Model(), mesh["tp"])
    before = {name: full(param) for name, param in model.named_parameters()}
    addresses = [local.data_ptr() for local in locals_of(model)]

    def fail(*_: Any) -> None:
        raise ArgumentError("at the end")

    with pytest.MonkeyPatch.context() as patch:
        # Ranks that hold the other shards of the parameters must fail as well.
        if rank == 3:
            patch.setattr("ringcomm.zero.stages.sharding.hook_modules", fail)
        with pytest.raises(ArgumentError, match="at the end"):
            zero.shard(model, 3, comm=mesh["dp"], options=BF16)
    same({name: full(param) for name, param in model.named_parameters()}, before)
    assert [local.data_ptr() for local in locals_of(model)] == addresses
    training = Training(2, steps=(0,))
    train(model, build(model, mesh, training), mesh, training)


def locals_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def unsharded_memory_is_freed(rank, world_size):
    """At stage 3 a unit's memory is freed after its forward, and again in backward."""
    mesh = mesh_of(2, 2)
    model = parallelized(Model(), mesh["tp"])
    build(model, mesh, Training(3))
    loss = model(batch(0, 0)).square().mean()
    block = model.blocks[0]
    assert all("Resharded" in type(param).__name__ for param in block.parameters())
    loss.backward()
    assert all("Resharded" in type(param).__name__ for param in model.parameters())


def refusals(rank, world_size):
    mesh = mesh_of(2, 2)
    for comm in (None, mesh["tp"]):
        model = parallelized(Model(), mesh["tp"])
        with pytest.raises(ArgumentError, match=r'shard.*comm: .*comm=mesh\["dp"\]'):
            zero.shard(model, 2, comm=comm)
    model = parallelized(Model(), mesh["tp"])
    with pytest.raises(MismatchError, match=r"ranks of the mesh.*[Oo]ption stage is 1 on rank 0"):
        zero.shard(model, 1 + rank % 2, comm=mesh["dp"])
    crossed = nn.Module()
    crossed.a = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    crossed.b = nn.Parameter(distribute_tensor(torch.ones(4), mesh["dp"], [Replicate()]))
    with pytest.raises(UnsupportedError, match="on one DeviceMesh"):
        zero.shard(crossed, 2, comm="alone")
    turned = nn.Module()
    whole = distribute_tensor(torch.ones(4, 6), mesh["tp"], [Shard(0)])
    turned.weight = nn.Parameter(whole.t())
    with pytest.raises(UnsupportedError, match="expected a DTensor that is contiguous"):
        zero.shard(turned, 2, comm=mesh["dp"])


def one_parameter_at_a_time(rank, world_size):
    """Gradients, masters and states are DTensors like the parameters, and are set as DTensors."""
    mesh = mesh_of(2, 2)
    for stage in (1, 3):
        model = parallelized(Model(), mesh["tp"])
        training = Training(stage, zero=BF16, backwards=1)
        optimizer = build(model, mesh, training)
        train(model, optimizer, mesh, training)
        params = dict(model.named_parameters())
        index = [id(param) for param in model.parameters()].index(id(params["head.weight"]))
        state = optimizer.full_state_dict()
        for name, number in (("head.weight", index), ("head.bias", index + 1)):
            param: Any = params[name]
            found: dict[str, Any] = {
                "master": zero.get_master(param),
                "exp_avg": zero.get_state(param, "exp_avg"),
            }
            wanted = {"master": state["master"][number], **state["state"][number]}
            for key, tensor in found.items():
                assert isinstance(tensor, DTensor) and tensor.placements == param.placements
                same(full(tensor), full(wanted[key]))
            zero.set_master(param, found["master"] * 2)
            zero.set_state(param, "exp_avg", full(found["exp_avg"]) * 2)
            zero.set_gradient(param, found["master"] * 3)
            same(full(zero.get_master(param)), full(found["master"]) * 2)
            moment, gradient = zero.get_state(param, "exp_avg"), zero.get_gradient(param)
            assert moment is not None and gradient is not None
            same(full(moment), full(found["exp_avg"]) * 2)
            same(full(gradient), full(found["master"]) * 3)
            same(whole_params(model)[name], (full(found["master"]) * 2).bfloat16())
            with pytest.raises(ArgumentError, match=rf"{name}: value: .* got another DTensor"):
                other = distribute_tensor(full(found["master"]), mesh["dp"], [Replicate()])
                zero.set_master(param, other)


CHECKS = [
    one_parameter_at_a_time,
    stages_are_equal,
    updates_in_backward,
    a_step_is_exact,
    reads_and_writes,
    rolled_back,
    unsharded_memory_is_freed,
    refusals,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tensor_parallel(rank_pools, check):
    rank_pools(4).run(check)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_module_of_dtensors_compiles_to_one_graph(stage):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = mesh_of(1, 1)["tp"]
        results = []
        for backend in (None, "aot_eager"):
            torch.manual_seed(1)
            module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
            parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            zero.shard(module, stage, comm="alone")
            optimizer = AdamW(module.parameters(), lr=0.1)
            forward: Any = module
            if backend is not None:
                forward = torch.compile(module, backend=backend, fullgraph=True)
            for _ in range(2):
                forward(torch.ones(3, 4)).square().mean().backward()
                optimizer.step()
                # Gradients that zero_grad() keeps are traced as well.
                optimizer.zero_grad(set_to_none=False)
            results.append({name: full(param) for name, param in module.named_parameters()})
        same(results[1], results[0])
    finally:
        torch.distributed.destroy_process_group()
