"""Muon: torch's bits in every world, with AdamW for what is no hidden matrix; who owns a matrix."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm.errors import ArgumentError, CheckpointError, MismatchError, UnsupportedError
from ringcomm.optim import AdamW, Muon, muon_groups, reshard
from ringcomm.optim.muon import cost_of
from ringcomm.optim.owners import owners_of
from tests.optim.problems import SMALL_BUCKETS, assert_same_state, values
from tests.optim.test_adamw import SAME_LOOPS, noise

Tensor = torch.Tensor
STEPS = 3
# Tall, wide and square ones, some over several buckets' chunks, and what AdamW steps.
MATRICES = ((40, 33), (7, 64), (16, 16), (96, 20))
OTHERS = ((33,), (), (5, 3, 2), (12, 4))
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (*MATRICES, *OTHERS)
    return [values(s, i).to(dtype).requires_grad_() for i, s in enumerate(shapes)]


def groups_of(params: list[Tensor], **more: Any) -> list[dict[str, Any]]:
    count = len(MATRICES)
    return [
        {"params": params[: count - 1], **MUON, **more},
        {"params": params[count - 1 : count], **MUON, "nesterov": False, **more},
        {"params": params[count:], "algorithm": "adamw", **ADAMW},
    ]


def give(params: list[Tensor], step: int, ranks: range) -> None:
    """The mean of noise of ranks; the second matrix has no gradient in the first step."""
    for index, param in enumerate(params):
        total = sum(noise(tuple(param.shape), index % 4, step, rank) for rank in ranks)
        param.grad = (total / len(ranks)).to(param.dtype)
    if step == 0:
        params[1].grad = None


def in_torch(params: list[Tensor], **more: Any) -> list[torch.optim.Optimizer]:
    muon, no_nesterov, adamw = groups_of(params, **more)
    rest = {key: value for key, value in adamw.items() if key != "algorithm"}
    return [
        torch.optim.Muon([muon, no_nesterov], lr=1.0),
        torch.optim.AdamW([rest], foreach=False, fused=False),
    ]


def train(comm: Any, options: Any = SMALL_BUCKETS, **more: Any) -> tuple[list[Tensor], Any]:
    params = parameters()
    optimizer = Muon(groups_of(params, **more), comm=comm, options=options)
    for step in range(STEPS):
        give(params, step, range(comm.rank, comm.rank + 1))
        optimizer.step()
    return [param.detach().clone() for param in params], optimizer.full_state_dict()


@pytest.mark.skipif(not SAME_LOOPS, reason="torch's loops have other multiply-adds here")
@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_matrices_have_the_bits_of_torch(worlds, world, adjust_lr_fn):
    theirs = parameters()
    references = in_torch(theirs, adjust_lr_fn=adjust_lr_fn)
    for step in range(STEPS):
        give(theirs, step, range(world))
        for each in references:
            each.step()
    for params, full in worlds(world).run(lambda comm: train(comm, adjust_lr_fn=adjust_lr_fn)):
        for index, (mine, other) in enumerate(zip(params, theirs, strict=True)):
            if index < len(MATRICES):
                assert torch.equal(mine, other), index
            # AdamW's own promise is in test_adamw.py.
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        for index, state in references[0].state_dict()["state"].items():
            assert torch.equal(full["state"][index]["momentum_buffer"], state["momentum_buffer"])


def test_two_passes_and_clipping_give_the_bits_of_one(worlds):
    def clipped(comm):
        params = parameters()
        optimizer = Muon(groups_of(params), comm=comm, options=SMALL_BUCKETS)
        for step in range(STEPS):
            give(params, step, range(comm.rank, comm.rank + 1))
            optimizer.clip_grad_norm_(1e30)
            optimizer.step()
        return [param.detach().clone() for param in params], optimizer.full_state_dict()

    for (a, one), (b, two) in zip(worlds(3).run(train), worlds(3).run(clipped), strict=True):
        assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))
        assert_same_state(one, two)


def test_a_step_that_overflows_changes_nothing(worlds):
    def work(comm):
        params = parameters()
        options = replace(SMALL_BUCKETS, check_finite=True)
        optimizer = Muon(groups_of(params), comm=comm, options=options)
        give(params, 1, range(1))
        optimizer.step()
        before = [param.detach().clone() for param in params]
        state = copy.deepcopy(optimizer.full_state_dict())
        give(params, 2, range(1))
        if comm.rank == 1:
            grad = params[2].grad
            assert grad is not None
            grad[3, 3] = torch.inf
        optimizer.step()
        assert optimizer.skipped_steps == 1 and optimizer.steps_taken == 1
        assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
        assert_same_state(optimizer.full_state_dict(), state)

    worlds(2).run(work)


def test_bfloat16_parameters_are_the_rounded_masters(worlds):
    def work(comm):
        params = parameters(torch.bfloat16)
        optimizer = Muon(groups_of(params), comm=comm, options=SMALL_BUCKETS)
        wide = [param.detach().float().requires_grad_() for param in params]
        references = in_torch(wide)
        for step in range(STEPS):
            give(params, step, range(1))
            optimizer.step()
            for mine, other in zip(params, wide, strict=True):
                other.grad = None if mine.grad is None else mine.grad.float()
            for each in references:
                each.step()
        masters = optimizer.full_state_dict()["master"]
        for index, param in enumerate(params):
            assert torch.equal(param, masters[index].bfloat16())
            if SAME_LOOPS and index < len(MATRICES):
                assert torch.equal(masters[index], wide[index])

    worlds(2).run(work)


def test_states_go_on_in_another_world_and_in_torchs_format(worlds):
    def save(comm):
        params = parameters()
        optimizer = Muon(groups_of(params), comm=comm, options=SMALL_BUCKETS)
        for step in range(2):
            give(params, step, range(1))
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        full = copy.deepcopy(optimizer.full_state_dict())
        then = [param.detach().clone() for param in params]
        give(params, 2, range(1))
        optimizer.step()
        return saved, full, then, [param.detach().clone() for param in params]

    results = worlds(3).run(save)
    shards = [each[0] for each in results]
    _, full, then, wanted = results[0]

    def load(comm):
        cut = reshard(shards, 2)[comm.rank]
        for given in (cut, shards, None):
            params = [value.clone().requires_grad_() for value in then]
            optimizer = Muon(groups_of(params), comm=comm, options=SMALL_BUCKETS)
            if given is None:
                optimizer.load_torch_state_dict(full)
            else:
                optimizer.load_state_dict(given)
            give(params, 2, range(1))
            optimizer.step()
            assert all(torch.equal(*pair) for pair in zip(params, wanted, strict=True))
        copies = groups_of([value.clone().requires_grad_() for value in then])
        plain = [{"params": group["params"]} for group in copies]
        other = AdamW(plain, comm=comm, options=SMALL_BUCKETS)
        with pytest.raises(CheckpointError, match="expected the state of AdamW, got that of Muon"):
            other.load_state_dict(shards)

    worlds(2).run(load)


def test_state_is_kept_where_it_is_used():
    params = parameters()
    optimizer = Muon(groups_of(params), options=replace(SMALL_BUCKETS, bucket_elems=512))
    give(params, 1, range(1))
    optimizer.step()
    for bucket in optimizer.sharded_step().buckets:
        matrices = [each.param < len(MATRICES) for each in bucket.layout.segments]
        wanted = {"momentum_buffer"} if any(matrices) else set()
        wanted |= set() if all(matrices) else {"exp_avg", "exp_avg_sq"}
        assert bucket.state.tensors().keys() == wanted


def test_owners_are_balanced_by_cost():
    shapes = [(64, 64)] * 4 + [(256, 64)] * 2 + [(1, 5)]
    costs = [cost_of(shape) for shape in shapes]
    assert costs[0] == 64 * 64 * 3 * 64 and cost_of((64, 256)) == costs[4]
    owners = owners_of(costs, 2)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(2)]
    assert abs(loads[0] - loads[1]) == costs[-1]
    assert owners_of(costs, 2) == owners
    assert owners_of([], 3) == []


def test_groups_of_a_module():
    module = nn.ModuleDict(
        {"embed": nn.Embedding(5, 4), "block": nn.Linear(4, 4), "head": nn.Linear(4, 5)}
    )
    muon, adamw = muon_groups(module, ("embed.weight", "head.*"), lr=3e-4)
    assert [id(each) for each in muon["params"]] == [id(module["block"].weight)]
    assert muon["algorithm"] == "muon" and adamw["algorithm"] == "adamw" and adamw["lr"] == 3e-4
    assert len(adamw["params"]) == 4
    Muon([muon, adamw]).prepare()
    with pytest.raises(ArgumentError, match="'heads' names no matrix"):
        muon_groups(module, ("heads",))
    module["embed"].requires_grad_(False)
    (_, without) = muon_groups(module, ("embed.weight", "head.*"))
    assert len(without["params"]) == 3


@pytest.mark.parametrize("sizes", [(512, 1 << 20), (1 << 20, 512)])
def test_a_state_fits_other_buckets(sizes):
    """Small buckets have parameters of one algorithm alone, and large ones those of both."""

    def made(elems: int) -> Muon:
        params = [torch.ones(shape, requires_grad=True) for shape in ((600,), (40, 33), (700,))]
        groups = [
            {"params": params[::2], "algorithm": "adamw"},
            {"params": params[1:2], "algorithm": "muon"},
        ]
        optimizer = Muon(groups, lr=0.1, options=replace(SMALL_BUCKETS, bucket_elems=elems))
        optimizer.prepare()
        for number, param in enumerate(params):
            param.grad = noise(tuple(param.shape), number, 0, 0)
        return optimizer

    trained, other = map(made, sizes)
    trained.step()
    wanted = trained.full_state_dict()
    other.load_state_dict(trained.state_dict())
    assert_same_state(other.full_state_dict(), wanted)


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "vector": (((3,),), {}, ArgumentError, "expected a matrix, got shape"),
    "algorithm": (((3, 3),), {"algorithm": "adam"}, ArgumentError, "algorithm: expected one of"),
    "momentum": (((3, 3),), {"momentum": -1.0}, ArgumentError, "momentum: expected a number"),
    "coefficients": (((3, 3),), {"ns_coefficients": (1, 2)}, ArgumentError, "three numbers"),
    "iterations": (((3, 3),), {"ns_steps": 100}, ArgumentError, "an integer from 1 to 99"),
    "adjustment": (((3, 3),), {"adjust_lr_fn": "mine"}, ArgumentError, "adjust_lr_fn"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    shapes, settings, kind, text = BAD[name]
    params = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    with pytest.raises(kind, match=f"param group 0.*{text}"):
        Muon([{"params": params, **settings}])


@pytest.mark.parametrize(
    "change", [{"master": "remainder"}, {"master": "none", "rounding": "stochastic"}]
)
def test_options_that_it_has_not_are_refused(change):
    optimizer = Muon(
        [torch.zeros(3, 3, requires_grad=True)], options=replace(SMALL_BUCKETS, **change)
    )
    with pytest.raises(UnsupportedError, match="Muon: expected"):
        optimizer.prepare()


def test_ranks_with_other_settings_are_told_so(worlds):
    def work(comm):
        params = [torch.ones(4, 4, requires_grad=True)]
        optimizer = Muon(params, ns_steps=4 + comm.rank, comm=comm)
        with pytest.raises(MismatchError, match="ns_steps"):
            optimizer.prepare()

    worlds(2).run(work)
