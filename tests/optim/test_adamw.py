# SPDX-License-Identifier: Apache-2.0
"""Steps compared with torch's: in every world, in every dtype, in one pass and in two."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from ringcomm.optim.buckets import join_master, split_master
from ringcomm.optim.sharded import ShardedOptimizer
from tests.optim.problems import SHAPES, SMALL_BUCKETS, Problem, assert_same_state, train, values
from tests.support.covering import covering

Tensor = torch.Tensor
ADAM = torch.optim.Adam
VARIANTS = {
    "plain": Problem(),
    "no decay": Problem(settings={"weight_decay": 0.0}),
    "amsgrad": Problem(settings={"amsgrad": True}),
    "maximize": Problem(settings={"maximize": True, "lr": 0.1}),
    "low beta1": Problem(settings={"betas": (0.3, 0.9), "eps": 1e-3}),
    "no moments": Problem(settings={"betas": (0.0, 0.0)}),
    "Adam": Problem(torch_class=ADAM),
    "L2": Problem(torch_class=ADAM, settings={"weight_decay": 0.1}),
    "L2 amsgrad maximize": Problem(
        torch_class=ADAM, settings={"weight_decay": 0.1, "amsgrad": True, "maximize": True}
    ),
    "groups": Problem(
        groups=(
            {"lr": 0.1, "weight_decay": 0.0},
            {"betas": (0.5, 0.75), "eps": 1e-4, "amsgrad": True},
            {"maximize": True, "weight_decay": 0.5},
        )
    ),
}
# torch's loops use fused multiply-adds on these CPUs, and the kernels repeat them.
SAME_LOOPS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def noise(shape: tuple[int, ...], index: int, step: int, rank: int) -> Tensor:
    """Returns gradients whose sums round."""
    return values(shape, 10_000 * (rank + 1) + 100 * step + index) * 10.0 ** (index - 3)


def unit(x: Tensor) -> Tensor:
    """Returns the distance to the next larger float32."""
    return torch.nextafter(x.abs(), torch.tensor(torch.inf)) - x.abs()


def check_steps(
    optimizer: ShardedOptimizer, before: list[Tensor], results: list[list[Tensor]]
) -> None:
    """Asserts that two steps' results differ by at most the bounds of docs/optimizer.md.

    Args:
        optimizer: its groups give the decay of the parameters.
        before: the parameters before the steps, in the order of the groups.
        results: our parameters after a step, and torch's.
    """
    assert all("decoupled_weight_decay" in group for group in optimizer.param_groups), (
        "these are the bounds of AdamW and Adam; test_other_fused_rules.py compares other rules"
    )
    decays = [
        1.0 - group["lr"] * group["weight_decay"] * group["decoupled_weight_decay"]
        for group in optimizer.param_groups
        for _ in group["params"]
    ]
    for decay, old, mine, other in zip(decays, before, *results, strict=True):
        update = (other - old * decay).abs()
        one = unit(torch.maximum(mine.abs(), other.abs()))
        apart = (mine - other).abs()
        assert bool((apart <= 2.0**-21 * update + one).all())
        assert bool((apart <= one)[update < other.abs() / 8].all())


def in_groups(problem: Problem, tensors: list[Tensor]) -> list[Tensor]:
    """Returns detached tensors in the order of the problem's groups."""
    dealt = problem.dealt(tensors)
    return [tensor.detach() for group in dealt for tensor in group["params"]]


@covering(strength=1, name=[*VARIANTS], gradients=["noise", "integers"])
def test_a_step_is_torchs(name, gradients):
    problem = VARIANTS[name]
    if gradients == "noise":
        problem = replace(problem, gradient=noise)
    params = problem.params()
    optimizer = problem.ours(params, None)
    for step in range(12):
        before = [param.detach().clone() for param in params]
        theirs = [param.clone().requires_grad_() for param in before]
        reference = problem.torch(theirs)
        reference.load_state_dict(copy.deepcopy(optimizer.full_state_dict()))
        problem.give(params, step, 0)
        problem.give(theirs, step, 0)
        optimizer.step()
        reference.step()
        ours, torchs = optimizer.full_state_dict()["state"], reference.state_dict()["state"]
        assert ours.keys() == torchs.keys()
        for index, entry in ours.items():
            assert entry.keys() == torchs[index].keys()
            assert torch.equal(entry["step"], torchs[index]["step"])
            for moment in entry.keys() - {"step"}:
                mine, other = entry[moment], torchs[index][moment]
                if SAME_LOOPS:
                    assert torch.equal(mine, other), moment
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=0.0)
        results = [in_groups(problem, params), in_groups(problem, theirs)]
        check_steps(optimizer, in_groups(problem, before), results)


@covering(
    strength=1,
    name=["plain", "groups", "L2 amsgrad maximize"],
    world=[1, 2, 3, 8],
    algorithm=["one_shot", "ring"],
)
def test_every_world_takes_the_same_steps(worlds, name, world, algorithm):
    problem = VARIANTS[name]
    options = replace(SMALL_BUCKETS, algorithm=algorithm)
    alone = problem.params()
    optimizer = problem.ours(alone, None)
    for step in range(4):
        problem.give_mean(alone, step, world)
        optimizer.step()
    expected = optimizer.full_state_dict()
    for params, full in worlds(world).run(train, problem, 4, options):
        for mine, other in zip(params, alone, strict=True):
            assert torch.equal(mine, other)
        assert_same_state(full, expected)


@covering(strength=1, dtype=[torch.bfloat16, torch.float16], world=[3, 1])
def test_16_bit_parameters_are_their_masters_rounded(worlds, dtype, world):
    problem = Problem(dtype)
    wide = Problem()
    params = [param.detach().float().requires_grad_() for param in problem.params()]
    optimizer = wide.ours(params, None)
    for step in range(5):
        wide.give_mean(params, step, world)
        optimizer.step()
    for narrow, full in worlds(world).run(train, problem, 5):
        assert set(full["master"]) == {i for i, shape in enumerate(SHAPES) if 0 not in shape}
        for index, master in full["master"].items():
            assert torch.equal(master, params[index])
            assert torch.equal(narrow[index], master.to(dtype))


@pytest.mark.parametrize("world", [1, 3])
def test_a_remainder_keeps_the_master_exactly(worlds, world):
    problem = Problem(torch.bfloat16, gradient=noise)
    options = replace(SMALL_BUCKETS, master="remainder")
    for (_, kept), (params, joined) in zip(
        worlds(world).run(train, problem, 5),
        worlds(world).run(train, problem, 5, options),
        strict=True,
    ):
        assert_same_state(kept, joined)
        for index, master in joined["master"].items():
            assert torch.equal(params[index].view(-1), split_master(master.view(-1))[0])


def test_splitting_a_master_is_exact_and_rounds_ties_away_from_zero():
    bits = torch.tensor([0, 0x3F800000, 0x3F808000, 0x3F807FFF, 0x3F818000, 0x7F7F7FFF, 0x00000001])
    master = torch.cat([bits, bits + (1 << 31) - (1 << 32)]).to(torch.int32).view(torch.float32)
    param, remainder = split_master(master)
    assert torch.equal(join_master(param, remainder).view(torch.int32), master.view(torch.int32))
    rounded = param[:7].view(torch.int16).tolist()
    assert rounded == [0, 0x3F80, 0x3F81, 0x3F80, 0x3F82, 0x7F7F, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_the_same_in_every_world_and_differs_by_seed(worlds, dtype):
    problem = Problem(dtype, settings={"lr": 1e-4})
    options = replace(SMALL_BUCKETS, master="none", rounding="stochastic", seed=7, reduce="sum")
    # If only one rank has gradients, the sum is the same in all worlds.
    problem = replace(problem, gradient=first_rank_only)
    runs = [worlds(world).run(train, problem, 3, options) for world in (1, 2, 4)]
    expected = runs[0][0][0]
    for params, full in runs[1] + runs[2]:
        assert "master" not in full
        for mine, other in zip(params, expected, strict=True):
            assert torch.equal(mine, other)
    other_seed = train(None, problem, 3, replace(options, seed=8))[0]
    assert not torch.equal(other_seed[4], expected[4])


def first_rank_only(shape: tuple[int, ...], index: int, step: int, rank: int) -> Tensor:
    whole = noise(shape, index, step, 0)
    return whole if rank == 0 else torch.zeros_like(whole)


def test_stochastic_rounding_beside_a_master_takes_one_of_its_neighbours():
    options = replace(SMALL_BUCKETS, rounding="stochastic")
    params, full = train(None, Problem(torch.bfloat16, gradient=noise), 4, options)
    for index, master in full["master"].items():
        # One bfloat16 ulp is 2^16 float32 ulps.
        assert bool(((params[index].float() - master).abs() < 2**16 * unit(master)).all())
    assert any(
        not torch.equal(params[index], master.to(torch.bfloat16))
        for index, master in full["master"].items()
    )


@pytest.mark.parametrize("world", [1, 3])
def test_parameters_of_several_dtypes_step_side_by_side(worlds, world):
    problem = Problem()

    def work(comm):
        params = problem.params()
        params[1] = params[1].detach().bfloat16().requires_grad_()
        params[4] = params[4].detach().half().requires_grad_()
        optimizer = problem.ours(params, comm)
        problem.give(params, 0, comm.rank)
        optimizer.step()
        return [param.detach() for param in params]

    expected = problem.params()
    optimizer = problem.ours(expected, None)
    with torch.no_grad():
        expected[1].copy_(expected[1].bfloat16())
        expected[4].copy_(expected[4].half())
    problem.give_mean(expected, 0, world)
    optimizer.step()
    for params in worlds(world).run(work):
        for mine, other in zip(params, expected, strict=True):
            assert torch.equal(mine, other.to(mine.dtype))


@covering(strength=1, step=[1, 10**6], world=[2, 1])
def test_early_and_late_steps(worlds, step, world):
    """Bias correction at step 1, and at 10^6, where beta^step is 0 for one moment only."""
    problem = Problem()

    def work(comm):
        params = problem.params()
        optimizer = problem.ours(params, comm)
        full = optimizer.full_state_dict()
        full["state"] = {
            index: {
                "step": torch.tensor(float(step - 1)),
                "exp_avg": values(shape, 50 + index),
                "exp_avg_sq": values(shape, 70 + index).square(),
            }
            for index, shape in enumerate(SHAPES)
        }
        optimizer.load_torch_state_dict(full)
        problem.give(params, 0, comm.rank)
        before = [param.detach().clone() for param in params]
        theirs = [param.clone().requires_grad_() for param in before]
        reference = problem.torch(theirs)
        reference.load_state_dict(copy.deepcopy(full))
        optimizer.step()
        problem.give_mean(theirs, 0, comm.world_size)
        reference.step()
        results = [in_groups(problem, params), in_groups(problem, theirs)]
        check_steps(optimizer, before, results)
        return optimizer.full_state_dict()["state"][0]["step"].item()

    assert worlds(world).run(work) == [step] * world


@covering(strength=1, value=[0.0, 1e-45, 3e38, torch.inf, torch.nan], world=[1, 2])
def test_extreme_gradients_give_what_torch_gives(worlds, value, world):
    problem = Problem(gradient=lambda shape, index, step, rank: torch.full(shape, value))

    def work(comm):
        return train(comm, problem, 2)

    theirs = problem.params()
    reference = problem.torch(theirs)
    for step in range(2):
        # The sum of two ranks' 3e38 is infinite, although their mean would be finite.
        problem.give_mean(theirs, step, world)
        reference.step()
    for params, _ in worlds(world).run(work):
        for mine, other in zip(params, theirs, strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-6, atol=1e-9, equal_nan=True)
