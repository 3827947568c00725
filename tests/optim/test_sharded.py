# SPDX-License-Identifier: Apache-2.0
"""A sharded elementwise optimizer has the bits of its class in one process, in any world."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaleOptions, LossScaler, Sharded
from ringcomm.optim import any_torch as elementwise
from tests.optim.problems import SMALL_BUCKETS, Problem, assert_same_state, values
from tests.support.covering import covering, thinned

Tensor = torch.Tensor
STEPS = 5


class Lion(torch.optim.Optimizer):
    """Lion as users write it: Chen et al., "Symbolic Discovery of Optimization Algorithms"."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["steps"], state["exp_avg"] = 0, torch.zeros_like(param)
                state["steps"] += 1
                near, far = group["betas"]
                param.mul_(1.0 - group["lr"] * group["decay"])
                update = state["exp_avg"].mul(near).add_(param.grad, alpha=1.0 - near).sign_()
                param.add_(update, alpha=-group["lr"])
                # Replaces the state tensor in each step, and overwrites the gradient.
                state["exp_avg"] = state["exp_avg"] * far + param.grad.mul_(1.0 - far)


def gradient(shape: tuple[int, ...], index: int, step: int, rank: int) -> Tensor | None:
    """Returns 20-bit numbers divisible by 2 and 3; parameter 1 has no gradient at odd steps."""
    if index == 1 and step % 2:
        return None
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    return 12.0 * torch.randint(-(2**17), 2**17, tuple(shape), generator=generator) / 2**17


def problem(kind: type[torch.optim.Optimizer], *groups: dict[str, Any], **settings: Any) -> Problem:
    return Problem(
        groups=groups or ({},),
        gradient=gradient,
        settings=settings,
        torch_class=kind,
        sharded=True,
    )


MOMENTUM = {"lr": 0.1, "momentum": 0.9}
PROBLEMS = {
    "SGD": problem(torch.optim.SGD, lr=0.1),
    "SGD with momentum": problem(
        torch.optim.SGD, {"dampening": 0.3}, {"weight_decay": 0.1, "maximize": True}, **MOMENTUM
    ),
    "SGD, Nesterov, and without": problem(
        torch.optim.SGD, {"nesterov": True}, {"momentum": 0.0}, **MOMENTUM
    ),
    "Adagrad": problem(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adadelta": problem(torch.optim.Adadelta, {"rho": 0.5}, {"weight_decay": 0.1}),
    "RMSprop": problem(torch.optim.RMSprop, {"centered": True}, {"momentum": 0.9}),
    "NAdam": problem(torch.optim.NAdam, {"weight_decay": 0.1}, {"decoupled_weight_decay": True}),
    "RAdam": problem(torch.optim.RAdam, {"lr": 0.1}, {"weight_decay": 0.1}),
    "Adamax": problem(torch.optim.Adamax, {"lr": 0.1}, {"betas": (0.5, 0.75)}),
    "Rprop": problem(torch.optim.Rprop, {"etas": (0.25, 2.0)}, {"maximize": True}),
    "ASGD": problem(torch.optim.ASGD, {"t0": 2.0}, {"weight_decay": 0.1}),
    "Adam": problem(torch.optim.Adam, {"amsgrad": True}, {"weight_decay": 0.1}),
    "AdamW": problem(torch.optim.AdamW, {"lr": torch.tensor(0.1)}, {"amsgrad": True}),
    "fused": problem(torch.optim.SGD, {"weight_decay": 0.1}, {}, fused=True, **MOMENTUM),
    "foreach": problem(torch.optim.AdamW, foreach=True),
    "Lion": problem(Lion, {"decay": 0.0}, {"betas": (0.5, 0.75)}),
}


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)


def reference(problem: Problem, world: int, steps: int = STEPS) -> tuple[list[Tensor], Any]:
    """Takes torch's steps on FP32 parameters with the mean gradient; returns parameters too."""
    params = [param.detach().float().requires_grad_() for param in problem.params()]
    optimizer = problem.torch(params)
    schedule = halved(optimizer)
    for step in range(steps):
        problem.give_mean(params, step, world)
        for param in params:
            param.grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        schedule.step()
    return params, optimizer


def stepped(comm: Any, problem: Problem, options: AdamWOptions, steps: int = STEPS) -> Any:
    """Takes steps on one rank; returns the parameters and the optimizer."""
    params = problem.params()
    optimizer = problem.ours(params, comm, options)
    schedule = halved(optimizer)
    for step in range(steps):
        problem.give(params, step, comm.rank)
        optimizer.step()
        schedule.step()
    return params, optimizer


def assert_equal(params: list[Tensor], wanted: list[Tensor]) -> None:
    for index, (mine, other) in enumerate(zip(params, wanted, strict=True)):
        assert torch.equal(mine, other), index


@covering(strength=1, name=[*PROBLEMS], world=[1, 3])
def test_steps_have_the_bits_of_the_class_in_one_process(worlds, name, world):
    problem = PROBLEMS[name]
    wanted, theirs = reference(problem, world)
    saved = theirs.state_dict()

    def work(comm):
        params, optimizer = stepped(comm, problem, SMALL_BUCKETS)
        full = optimizer.full_state_dict()
        assert_equal(params, wanted)
        assert all(each.keys() == full["state"][n].keys() for n, each in saved["state"].items())
        tensors = {n: dict(each) for n, each in full["state"].items()}
        for entry, other in zip(tensors.values(), saved["state"].values(), strict=True):
            for name, each in other.items():
                assert type(entry[name]) is type(each)
                assert torch.equal(torch.as_tensor(entry[name]), torch.as_tensor(each)), name
        assert full["param_groups"] == saved["param_groups"]
        assert optimizer.steps_taken.item() == STEPS

    worlds(world).run(work)


@covering(
    strength=1,
    name=["SGD with momentum", "NAdam", "Lion"],
    dtype=[torch.bfloat16, torch.float16],
)
def test_16_bit_parameters_are_rounded_masters(worlds, name, dtype):
    problem = replace(PROBLEMS[name], dtype=dtype)
    wanted, _ = reference(problem, 2)
    sums = replace(SMALL_BUCKETS, accumulate_dtype=torch.float32)

    def work(comm):
        for options in (SMALL_BUCKETS, sums):
            params, optimizer = stepped(comm, problem, options)
            assert_equal(params, [each.to(dtype) for each in wanted])
            masters = optimizer.full_state_dict()["master"]
            ordered = [each for group in problem.dealt(wanted) for each in group["params"]]
            assert all(torch.equal(each, ordered[index]) for index, each in masters.items())

    worlds(2).run(work)


@covering(strength=1, name=["SGD with momentum", "Lion"], world=[1, 2])
def test_a_clipped_gradient_is_scaled_once(worlds, name, world):
    problem = PROBLEMS[name]

    def work(comm):
        params, wanted = problem.params(), problem.params()
        optimizer, theirs = problem.ours(params, comm), problem.torch(wanted)
        for step in range(3):
            problem.give(params, step, comm.rank)
            before: list[Any] = [None if p.grad is None else p.grad.clone() for p in params]
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            problem.give_mean(wanted, step, world)
            coefficient = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
            for param in wanted:
                if param.grad is not None:
                    param.grad.mul_(coefficient)
            theirs.step()
            for param, grad in zip(params, before, strict=True):
                assert (param.grad is None) == (grad is None)
                if param.grad is not None:
                    assert torch.equal(param.grad, grad)
        assert_equal(params, wanted)

    worlds(world).run(work)


@covering(strength=1, name=["Lion", "NAdam"], world=[1, 2])
def test_a_scaled_step_that_overflows_changes_nothing(worlds, name, world):
    """The scale is a power of two, so it changes no bit of the other steps."""
    problem = PROBLEMS[name]
    wanted, theirs = reference(problem, world, 2)

    def work(comm):
        params = problem.params()
        scaler = LossScaler(LossScaleOptions(init_scale=1024.0))
        optimizer = problem_with(problem, loss_scaler=scaler).ours(params, comm)
        schedule = halved(optimizer)
        for step, scale in enumerate((1024.0, float("inf"), 512.0)):
            problem.give(params, step - (step > 0), comm.rank, scale)
            optimizer.step()
            if step != 1:
                schedule.step()
        assert_equal(params, wanted)
        assert optimizer.steps_taken.item() == 2 and optimizer.skipped_steps.item() == 1
        entries = optimizer.full_state_dict()["state"]
        assert entries.keys() == theirs.state_dict()["state"].keys()

    worlds(world).run(work)


def problem_with(problem: Problem, **settings: Any) -> Problem:
    return replace(problem, settings={**problem.settings, **settings})


def test_a_grad_scaler_of_all_ranks_drives_it(worlds):
    problem = PROBLEMS["Lion"]
    wanted, _ = reference(problem, 2, 1)

    def work(comm):
        params = problem.params()
        optimizer = problem.ours(params, comm)
        scaler = GradScaler(init_scale=256.0)
        for scale in (float("inf") if comm.rank else 256.0, 128.0):
            scaler.scale(torch.ones(()))
            problem.give(params, 0, comm.rank, scale)
            scaler.step(optimizer)
            scaler.update()
        assert_equal(params, wanted)

    worlds(2).run(work)


@pytest.mark.parametrize("name", thinned(PROBLEMS, 2))
def test_torchs_state_goes_both_ways(worlds, name):
    """Torch continues from the gathered state, and ringcomm from torch's next state."""
    problem = PROBLEMS[name]

    def work(comm):
        params, optimizer = stepped(comm, problem, SMALL_BUCKETS, 2)
        theirs = [param.detach().clone().requires_grad_() for param in params]
        other = problem.torch(theirs)
        other.load_state_dict(copy.deepcopy(optimizer.full_state_dict()))
        problem.give_mean(theirs, 2, comm.world_size)
        other.step()
        problem.give(params, 2, comm.rank)
        optimizer.step()
        assert_equal(params, theirs)
        back = [param.detach().clone().requires_grad_() for param in theirs]
        last = problem.ours(back, comm)
        last.load_torch_state_dict(copy.deepcopy(other.state_dict()))
        problem.give(back, 3, comm.rank)
        last.step()
        problem.give_mean(theirs, 3, comm.world_size)
        other.step()
        assert_equal(back, theirs)

    worlds(2).run(work)


def test_hyper_parameters_of_a_new_kind_are_tried_and_bring_state(worlds, monkeypatch):
    """Momentum appears and disappears; a schedule that only changes numbers needs no trial."""
    tried: list[float] = []
    real = elementwise.try_class

    def counted(made, hyper, device):
        tried.append(hyper["momentum"])
        return real(made, hyper, device)

    monkeypatch.setattr(elementwise, "try_class", counted)
    sgd = problem(torch.optim.SGD, lr=0.1)

    def work(comm):
        params, theirs = sgd.params(), sgd.params()
        optimizer, other = sgd.ours(params, comm), sgd.torch(theirs)
        for step, momentum in enumerate((0.0, 0.0, 0.9, 0.8, 0.0, 0.7)):
            for each in (optimizer, other):
                each.param_groups[0].update(momentum=momentum, lr=0.1 / (step + 1))
            if step == 5:  # follows the steps without momentum, which keep no state
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = sgd.ours(params, comm)
                optimizer.load_state_dict(saved)
                optimizer.param_groups[0].update(momentum=momentum, lr=0.1 / (step + 1))
            sgd.give(params, step, comm.rank)
            sgd.give_mean(theirs, step, 2)
            optimizer.step()
            other.step()
            assert_equal(params, theirs)

    worlds(2).run(work)
    assert sorted(tried) == [*[0.0] * 4, *[0.7] * 2, *[0.9] * 2]


class Normalized(torch.optim.SGD):
    """Divides by the norm of the whole gradient, as LAMB does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            norm = sum(param.grad.square().sum() for param in group["params"]).sqrt()
            for param in group["params"]:
                param.grad.div_(norm + 1.0)
        super().step(closure)


class Counting(torch.optim.SGD):
    """Counts its steps outside the parameters' state."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        super().step(closure)


class Remembering(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.last = self.param_groups[0]["params"][0].sum().item()
        super().step(closure)


class Replacing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.data = param.data - param.grad


class Half(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["half"] = param.grad.to(torch.bfloat16)


class Spread(torch.optim.SGD):
    """Decays only matrices, which it tells from vectors by their shape."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.5 if param.dim() > 1 else 1.0)


NOT_ELEMENTWISE: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "missing 1 required positional argument: 'closure'",
    torch.optim.SparseAdam: "does not support dense gradients",
    torch.optim.Adafactor: r"'row_var' .* \(8, 12\) has the shape \(8, 1\)",
    torch.optim.Muon: "only supports 2D parameters",
    Normalized: "in parts gets other values",
    Spread: "in parts gets other values",
    Counting: "changes the entry 'count' of its param group",
    Remembering: "changes its attribute 'last'",
    Replacing: "replaces a parameter.s memory",
    Half: r"'half' is torch\.bfloat16",
}


@pytest.mark.parametrize("kind", NOT_ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_what_is_not_elementwise_is_refused_with_what_was_seen(kind):
    params = Problem().params()
    with pytest.raises(UnsupportedError, match=NOT_ELEMENTWISE[kind]) as raised:
        Sharded(kind, params)
    assert f"{kind.__qualname__} cannot step shards" in str(raised.value)
    assert_equal(params, Problem().params())


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "an instance": (torch.optim.SGD(values((1,), 0).split(1)), {}, ArgumentError, "a class of"),
    "no optimizer": (torch.nn.Linear, {}, ArgumentError, "a class of optimizers"),
    "AdamW of ringcomm": (AdamW, {}, ArgumentError, "AdamW is sharded by itself"),
    "bad argument": (torch.optim.SGD, {"lr": -1.0}, ArgumentError, "Invalid learning rate"),
    "foreign argument": (torch.optim.SGD, {"rho": 1.0}, ArgumentError, "argument 'rho'"),
    "not a number": (torch.optim.SGD, {"momentum": float("nan")}, ArgumentError, "momentum: .*nan"),
    "differentiable": (torch.optim.SGD, {"differentiable": True}, UnsupportedError, "autograd"),
    "remainder": (
        torch.optim.SGD,
        {"options": AdamWOptions(master="remainder")},
        UnsupportedError,
        "master='remainder' .* expected 'fp32'",
    ),
    "stochastic": (
        torch.optim.SGD,
        {"options": AdamWOptions(rounding="stochastic")},
        UnsupportedError,
        "rounding='stochastic'",
    ),
    "triton": (
        torch.optim.SGD,
        {"options": AdamWOptions(kernels="triton")},
        UnsupportedError,
        "kernels='triton'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words(name):
    kind, settings, error, text = BAD[name]
    with pytest.raises(error, match=text):
        Sharded(kind, Problem().params(), **settings)


def test_a_bad_group_is_refused_when_it_is_added_and_when_it_is_changed():
    problem = PROBLEMS["SGD with momentum"]
    params = problem.params()
    with pytest.raises(ArgumentError, match="Invalid momentum value"):
        Sharded(torch.optim.SGD, [{"params": params, "momentum": -1.0}])
    optimizer = problem.ours(params, None)
    before = [param.detach().clone() for param in params]
    for change in ({"lr": float("nan")}, {"momentum": 0.0, "nesterov": True}):
        kept = {name: optimizer.param_groups[0][name] for name in change}
        optimizer.param_groups[0].update(change)
        problem.give(params, 0, 0)
        with pytest.raises(ArgumentError, match=r"expected a number|Nesterov momentum requires"):
            optimizer.step()
        optimizer.param_groups[0].update(kept)
    assert_equal(params, before)
    optimizer.step()


def test_state_of_another_class_is_refused():
    def shard_of(name: str) -> dict[str, Any]:
        optimizer = PROBLEMS[name].ours(PROBLEMS[name].params(), None)
        return optimizer.state_dict()

    optimizer = PROBLEMS["NAdam"].ours(PROBLEMS["NAdam"].params(), None)
    with pytest.raises(CheckpointError, match=r"NAdam, got that of torch\.optim\.radam\.RAdam"):
        optimizer.load_state_dict(shard_of("RAdam"))
    foreach = shard_of("foreach")
    adamw = AdamW(Problem().params(), options=SMALL_BUCKETS)
    with pytest.raises(CheckpointError, match=r"the state of AdamW, got that of torch\.optim"):
        adamw.load_state_dict(foreach)


DAMAGES = {
    "states": (lambda s: s["shard"]["states"].pop(), "expected the states of 7"),
    "number": (
        lambda s: s["shard"]["states"][0]["numbers"].update(mu=1.0),
        r"NAdam keeps no 'mu'",
    ),
    "tensor": (lambda s: s["state"]["buckets"][0].pop("exp_avg"), "expected exp_avg, it is not"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_state_is_refused(name):
    nadam = problem(torch.optim.NAdam)
    params = nadam.params()
    optimizer = nadam.ours(params, None)
    nadam.give(params, 0, 0)
    optimizer.step()
    damage, text = DAMAGES[name]
    shard = copy.deepcopy(optimizer.state_dict())
    damage(shard)
    before = copy.deepcopy(optimizer.full_state_dict())
    with pytest.raises(CheckpointError, match=text):
        optimizer.load_state_dict(shard)
    assert_same_state(optimizer.full_state_dict(), before)


def test_incomplete_state_of_torchs_is_refused():
    nadam = problem(torch.optim.NAdam)
    params, theirs = reference(nadam, 1, 1)
    saved = copy.deepcopy(theirs.state_dict())
    del saved["state"][0]["mu_product"]
    with pytest.raises(CheckpointError, match=r"parameter 0: expected .* got no mu_product"):
        nadam.ours(params, None).load_torch_state_dict(saved)
