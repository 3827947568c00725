# SPDX-License-Identifier: Apache-2.0
"""DTensor parameters of tensor parallelism, sharded over the data-parallel axis of a 2 x 2 mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ringcomm.errors import ArgumentError, CheckpointError, MismatchError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaler, Sharded
from ringcomm.optim.sharded import ShardedOptimizer
from tests.optim.problems import values
from tests.support.meshes import mesh_of
from tests.support.rank_pool import same

Tensor = torch.Tensor
ROWS, COLUMNS = Shard(0), Shard(1)
# A shape and its placement on the mesh; None means a plain tensor. 5 and 1 do not divide by 2.
KINDS: list[tuple[tuple[int, ...], Placement | None]] = [
    ((6, 40), ROWS),
    ((40, 6), COLUMNS),
    ((5, 130), ROWS),
    ((1, 30), ROWS),
    ((33,), Replicate()),
    ((17,), None),
    ((9, 5), COLUMNS),
]
SMALL = AdamWOptions(bucket_elems=1024)


def whole_leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns whole parameters, the same on each rank."""
    return [nn.Parameter(values(shape, n).to(dtype)) for n, (shape, _) in enumerate(KINDS)]


def distributed(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Returns the same parameters as DTensors on ``mesh``."""
    return [
        nn.Parameter(distribute_tensor(whole.detach(), mesh, [at])) if at else whole
        for whole, (_, at) in zip(whole_leaves(dtype), KINDS, strict=True)
    ]


def gradients(step: int, rank: int) -> list[Tensor]:
    """Returns multiples of 4, whose sums and means over 2 ranks are exact."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [4.0 * torch.randint(-9, 10, shape, generator=draw) for shape, _ in KINDS]


def give(params: list[Any], whole: list[Tensor]) -> None:
    """Sets gradients; each DTensor's gradient has another placement than its parameter, in turn."""
    for number, (param, grad) in enumerate(zip(params, whole, strict=True)):
        grad = grad.to(param.dtype)
        if not isinstance(param, DTensor):
            param.grad = grad.clone()
            continue
        mesh = param.device_mesh
        if number % 3 == 0:
            # A partial sum: rank 0 holds three quarters of the gradient, rank 1 a quarter.
            part = grad * (0.75 if mesh.get_local_rank() == 0 else 0.25)
            param.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        elif number % 3 == 1:
            param.grad = distribute_tensor(grad, mesh, [Replicate()])
        else:
            param.grad = as_param(param, grad)


def as_param(param: Any, grad: Tensor) -> Tensor:
    """Returns a gradient with its parameter's placement."""
    if not isinstance(param, DTensor):
        return grad.clone()
    return distribute_tensor(grad, param.device_mesh, param.placements)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_state(optimizer: ShardedOptimizer) -> dict[int, dict[str, Tensor]]:
    state = optimizer.full_state_dict()["state"]
    return {index: {k: full(v) for k, v in each.items()} for index, each in state.items()}


def mean(step: int) -> list[Tensor]:
    return [(a + b) / 2 for a, b in zip(gradients(step, 0), gradients(step, 1), strict=True)]


# These functions run in processes of a RankPool.


def steps_equal_one_process(rank, world_size):
    """Parameters, norms and state equal one process with whole parameters, bit for bit."""
    mesh = mesh_of(2, 2)
    for dtype in (torch.float32, torch.bfloat16):
        params, alone = distributed(mesh["tp"], dtype), whole_leaves(dtype)
        amsgrad = dtype is torch.bfloat16
        ours = AdamW(params, lr=0.1, amsgrad=amsgrad, comm=mesh["dp"], options=SMALL)
        reference = AdamW(alone, lr=0.1, amsgrad=amsgrad, comm="alone", options=SMALL)
        identities = [id(param) for param in params]
        for step, kind in enumerate((2.0, 1.0, math.inf, None)):
            give(params, gradients(step, mesh.get_local_rank("dp")))
            for param, grad in zip(alone, mean(step), strict=True):
                param.grad = grad.to(dtype)
            if kind is not None:
                norm = ours.clip_grad_norm_(3.0, kind)
                same(norm, reference.clip_grad_norm_(3.0, kind))
                for most, some in ((0.9, slice(0, None, 2)), (0.4, slice(1, 3))):
                    norm = ours.clip_grad_norm_(most, kind, params=params[some])
                    same(norm, reference.clip_grad_norm_(most, kind, params=alone[some]))
            for optimizer in (ours, reference):
                optimizer.clip_grad_value_(0.02)
            ours.step()
            reference.step()
            same([full(param) for param in params], [param.detach() for param in alone])
            for param in params:
                assert type(param.grad) is (DTensor if isinstance(param, DTensor) else Tensor)
                if isinstance(param.grad, DTensor):
                    assert param.grad.placements == param.placements
            ours.zero_grad(set_to_none=step % 2 == 0)
        assert [id(param) for param in params] == identities
        same(full_state(ours), full_state(reference))
        masters = [full(each) for each in ours.full_state_dict().get("master", {}).values()]
        same(masters, list(reference.full_state_dict().get("master", {}).values()))


def on_a_mesh_of_one(rank, world_size):
    """A mesh axis of one rank acts like plain tensors, also with stochastic rounding."""
    mesh = mesh_of(4, 1)
    options = AdamWOptions(bucket_elems=1024, master="none", rounding="stochastic", seed=5)
    results = []
    for make in (
        lambda: distributed(mesh["tp"], torch.bfloat16),
        lambda: whole_leaves(torch.bfloat16),
    ):
        params = make()
        optimizer = AdamW(params, lr=0.1, comm=mesh["dp"], options=options)
        for step in range(2):
            for param, grad in zip(params, gradients(step, rank), strict=True):
                param.grad = as_param(param, grad.to(param.dtype))
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        shard = optimizer.state_dict()["shard"]
        results.append([*map(full, params), norm, full_state(optimizer), shard["digest"]])
    same(results[0], results[1])


def backwards_add_up(rank, world_size):
    """Gradients of two backwards add up, one of them a partial sum; also in FP32 sums."""
    mesh = mesh_of(2, 2)
    tp, data_rank = mesh["tp"], mesh.get_local_rank("dp")
    x = torch.randint(-3, 4, (4, 6), generator=torch.Generator().manual_seed(data_rank)).float()
    for accumulate in (None, torch.float32):
        options = AdamWOptions(bucket_elems=1024, accumulate_dtype=accumulate)
        scale: Any = nn.Parameter(distribute_tensor(torch.arange(6.0), tp, [Replicate()]))
        up = nn.Parameter(distribute_tensor(torch.ones(10, 6), tp, [ROWS]))
        optimizer = AdamW([scale, up], lr=0.5, comm=mesh["dp"], options=options)
        for _ in range(2):
            # The batch is sharded, so the gradient of ``scale`` is a partial sum.
            scaled: Any = distribute_tensor(x, tp, [ROWS]) * scale
            scaled.sum().full_tensor().backward()
            rows: Any = nn.functional.linear(distribute_tensor(x, tp, [Replicate()]), up)
            rows.sum().full_tensor().backward()
            assert accumulate or scale.grad.placements[0].is_partial()
        norm = optimizer.clip_grad_norm_(1e9, math.inf)
        optimizer.step()
        both = [
            torch.randint(-3, 4, (4, 6), generator=torch.Generator().manual_seed(n)).float().sum(0)
            for n in range(2)
        ]
        expected = both[0] + both[1]  # two backwards; the mean of two ranks
        moments = full_state(optimizer)
        assert norm == expected.abs().max(), (norm, expected)
        for got, wanted in ((moments[0], expected), (moments[1], expected.expand(10, 6))):
            reference = nn.Parameter(torch.zeros(wanted.shape))
            reference.grad = wanted.clone()
            torch_optimizer = torch.optim.AdamW([reference], lr=0.5)
            torch_optimizer.step()
            same(got["exp_avg"], torch_optimizer.state[reference]["exp_avg"])


def poisoned(params: list[Any], rank: int) -> None:
    """Sets gradients; the last rank has an infinity in its part of the first gradient."""
    for number, (param, grad) in enumerate(zip(params, gradients(0, 0), strict=True)):
        param.grad = as_param(param, grad)
        if number == 0 and rank == 3:
            param.grad.to_local().fill_(math.inf)


def overflow_scales_the_loss_down(rank, world_size):
    """If one rank's part has an infinity, all ranks skip the step."""
    mesh = mesh_of(2, 2)
    params, scaler = distributed(mesh["tp"]), LossScaler()
    optimizer = AdamW(params, lr=0.1, comm=mesh["dp"], loss_scaler=scaler)
    before = [full(param) for param in params]
    poisoned(params, rank)
    optimizer.step()
    same([full(param) for param in params], before)
    assert scaler.current == 2.0**15
    give(params, gradients(0, 0))
    optimizer.step()
    assert not torch.equal(full(params[0]), before[0])


def overflow_under_a_grad_scaler(rank, world_size):
    """The same with a GradScaler, which then unscales plain tensors and DTensors together."""
    mesh = mesh_of(2, 2)
    params, alone = distributed(mesh["tp"]), whole_leaves()
    scaler = GradScaler("cpu", init_scale=4.0, comm=mesh["dp"])
    optimizer = AdamW(params, lr=0.1, comm=mesh["dp"])
    scaler.scale(torch.ones(()))
    poisoned(params, rank)
    scaler.step(optimizer)
    scaler.update()
    same([full(param) for param in params], [param.detach() for param in alone])
    assert scaler.get_scale() == 2.0
    give(params, gradients(0, 0))
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(1e9)
    scaler.step(optimizer)
    for param, grad in zip(alone, gradients(0, 0), strict=True):
        param.grad = grad / 2.0
    reference = AdamW(alone, comm="alone", lr=0.1)
    same(norm, reference.clip_grad_norm_(1e9))
    reference.step()
    same([full(param) for param in params], [param.detach() for param in alone])


def state_moves(rank, world_size):
    """Shards load into the same shards; whole or distributed state loads into any shards."""
    mesh = mesh_of(2, 2)
    params = distributed(mesh["tp"])
    optimizer = AdamW(params, lr=0.1, comm=mesh["dp"], options=SMALL)
    give(params, gradients(0, mesh.get_local_rank("dp")))
    optimizer.step()
    saved, state = optimizer.full_state_dict(), full_state(optimizer)
    whole = {"state": state, "param_groups": saved["param_groups"]}

    again = AdamW(distributed(mesh["tp"]), lr=0.1, comm=mesh["dp"], options=SMALL)
    again.load_state_dict(optimizer.state_dict())
    same(full_state(again), state)
    for given in (saved, whole):
        again = AdamW(distributed(mesh["tp"]), lr=0.1, comm=mesh["dp"], options=SMALL)
        again.load_torch_state_dict(given)
        same(full_state(again), state)

    other = mesh_of(1, 4)
    wider = AdamW(distributed(other["tp"]), lr=0.1, comm=other["dp"], options=SMALL)
    wider.load_torch_state_dict(whole)
    same(full_state(wider), state)
    with pytest.raises(CheckpointError, match=r"mesh and placements.*full_tensor\(\)"):
        wider.load_torch_state_dict(saved)
    with pytest.raises(CheckpointError, match="parameter 0: expected the state of"):
        wider.load_state_dict(optimizer.state_dict())
    one = AdamW(whole_leaves(), lr=0.1, comm="alone", options=SMALL)
    one.load_torch_state_dict(whole)
    same(full_state(one), state)


def refusals(rank, world_size):
    mesh = mesh_of(2, 2)
    for comm in (None, mesh["tp"]):
        optimizer = AdamW(distributed(mesh["tp"]), comm=comm)
        with pytest.raises(
            ArgumentError, match=r'comm: .*Rank 0 has the local tensors.*comm=mesh\["dp"\]'
        ):
            optimizer.prepare()
    partial = DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()], run_check=False)
    with pytest.raises(ArgumentError, match=r"parameter 0: expected a DTensor that is sharded"):
        AdamW([nn.Parameter(partial)], comm=mesh["dp"])
    # Without shape= each rank infers the whole shape from its own part.
    guessed = DTensor.from_local(torch.ones(2 + rank % 2), mesh["tp"], [ROWS], run_check=False)
    with pytest.raises(MismatchError, match=r"ranks of the mesh.*\(4,\).*rank 0.*\(6,\)"):
        AdamW([nn.Parameter(guessed)], comm=mesh["dp"]).prepare()
    padded = DTensor.from_local(
        torch.ones(3), mesh["tp"], [ROWS], shape=torch.Size([4]), stride=(1,)
    )
    with pytest.raises(ArgumentError, match=r"expected a local tensor of shape \(2,\).*got \(3,\)"):
        AdamW([nn.Parameter(padded)], comm=mesh["dp"])
    different = AdamW(distributed(mesh["tp"]), eps=1e-8 * (1 + rank % 2), comm=mesh["dp"])
    with pytest.raises(MismatchError, match=r"ranks of the mesh.*[Pp]aram group 0 is .*eps"):
        different.prepare()
    driven: Any = AdamW(distributed(mesh["tp"]), comm="alone")
    driven.found_inf = torch.zeros(())
    with pytest.raises(UnsupportedError, match=r"use ringcomm\.optim\.GradScaler"):
        driven.step()
    params = [distributed(mesh["tp"])[0], distributed(mesh["dp"])[0]]
    with pytest.raises(UnsupportedError, match="expected DTensor parameters on one DeviceMesh"):
        AdamW(params, comm="alone").prepare()
    moved = distributed(mesh["tp"])
    optimizer = AdamW(moved, comm=mesh["dp"])
    optimizer.prepare()
    moved[0]._local_tensor = moved[0]._local_tensor.clone()
    with pytest.raises(ArgumentError, match="parameter 0: its memory was replaced"):
        optimizer.step()


def in_shards_alone(rank, world_size):
    """Without a data-parallel axis a rank steps its own shards; norms cover all shards."""
    mesh = mesh_of(1, 4)["tp"]
    params, alone = distributed(mesh), whole_leaves()
    ours = AdamW(params, lr=0.1, comm="alone")
    reference = AdamW(alone, lr=0.1, comm="alone")
    for param, grad in zip(alone, gradients(0, 0), strict=True):
        param.grad = grad
    for param, grad in zip(params, gradients(0, 0), strict=True):
        param.grad = as_param(param, grad)
    same(ours.clip_grad_norm_(1.0), reference.clip_grad_norm_(1.0))
    ours.step()
    reference.step()
    same([full(param) for param in params], [param.detach() for param in alone])


def on_two_dimensions(rank, world_size):
    """Norms count a parameter once if one mesh dimension shards it and another replicates it."""
    mesh = mesh_of(2, 2)
    placed: list[list[Placement]] = [
        [ROWS, Replicate()],
        [Replicate(), COLUMNS],
        [ROWS, COLUMNS],
        [ROWS, ROWS],
        [Replicate(), Replicate()],
    ]
    whole = [values((5, 9), number) for number in range(len(placed) + 1)]
    alone = [nn.Parameter(each.clone()) for each in whole]
    params: list[Any] = [
        nn.Parameter(distribute_tensor(each, mesh, at))
        for each, at in zip(whole, placed, strict=False)
    ]
    params.append(nn.Parameter(whole[-1].clone()))
    ours, reference = (AdamW(each, lr=0.1, comm="alone") for each in (params, alone))
    for number, (param, other) in enumerate(zip(params, alone, strict=True)):
        other.grad = torch.arange(45.0).view(5, 9) - 3 * number
        param.grad = as_param(param, other.grad)
    same(ours.clip_grad_norm_(1.0), reference.clip_grad_norm_(1.0))
    ours.step()
    reference.step()
    same([full(param) for param in params], [param.detach() for param in alone])


def writes_are_followed(rank, world_size):
    """Masters follow writes to a DTensor or to its local tensor between two steps."""
    mesh = mesh_of(2, 2)
    for write in (lambda p: p.fill_(3.0), lambda p: p.to_local().fill_(3.0)):
        params = distributed(mesh["tp"], torch.bfloat16)
        optimizer = AdamW(params, lr=0.0, comm=mesh["dp"])
        for _ in range(2):
            give(params, gradients(0, 0))
            optimizer.step()
            with torch.no_grad():
                write(params[0])
        give(params, gradients(0, 0))
        optimizer.step()
        same(full(params[0]), torch.full((6, 40), 3.0, dtype=torch.bfloat16))


def any_optimizer_equals_one_process(rank, world_size):
    """Torch's class on shards, some of them empty, equals torch on whole parameters."""
    mesh = mesh_of(2, 2)
    params, alone = distributed(mesh["tp"]), whole_leaves()
    ours = Sharded(torch.optim.NAdam, params, lr=0.1, comm=mesh["dp"], options=SMALL)
    reference = torch.optim.NAdam(alone, lr=0.1)
    for step in range(3):
        give(params, gradients(step, mesh.get_local_rank("dp")))
        for param, grad in zip(alone, mean(step), strict=True):
            param.grad = grad
        ours.step()
        reference.step()
    same([full(param) for param in params], [param.detach() for param in alone])
    state = full_state(ours)
    for index, param in enumerate(alone):
        theirs = reference.state[param]
        same([state[index][name] for name in theirs], list(theirs.values()))
    back = distributed(mesh["tp"])
    again = Sharded(torch.optim.NAdam, back, lr=0.1, comm=mesh["dp"], options=SMALL)
    again.load_torch_state_dict(reference.state_dict())
    same(full_state(again), state)


CHECKS = [
    steps_equal_one_process,
    any_optimizer_equals_one_process,
    on_a_mesh_of_one,
    backwards_add_up,
    overflow_scales_the_loss_down,
    overflow_under_a_grad_scaler,
    state_moves,
    refusals,
    in_shards_alone,
    on_two_dimensions,
    writes_are_followed,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tensor_parallel(rank_pools, check):
    rank_pools(4).run(check)
