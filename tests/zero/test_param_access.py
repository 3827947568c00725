# SPDX-License-Identifier: Apache-2.0
"""Reading and setting a parameter's reduced gradient, master and state, at every stage."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError, RingcommError
from ringcomm.optim import SGD, AdamW, AdamW8bit, AdamWOptions, Lion, LossScaler, Sharded
from tests.support import ROOT
from tests.support.covering import covering, in_test_all
from tests.zero.job import BF16, whole_state
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
WORLDS = [1, 3]
# Typed Any, because these functions may return None.
get_gradient: Any = zero.get_gradient
get_state: Any = zero.get_state
KINDS: dict[str, Any] = {
    "adamw": lambda p: AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "lion": lambda p: Lion(p, lr=0.1),
    "adamw8bit": lambda p: AdamW8bit(p, lr=0.1),
    "remainder": lambda p: AdamW(p, lr=0.1, options=AdamWOptions(master="remainder")),
    "adagrad": lambda p: Sharded(torch.optim.Adagrad, p, lr=0.1),
}
KINDS_AND_WORLDS = [
    *(("adamw", 3), ("sgd", 2), ("adamw8bit", 2), ("remainder", 2), ("adagrad", 1)),
    *in_test_all(("lion", 2), ("remainder", 1), ("adamw8bit", 3)),
]


class Trained:
    """A sharded module with its optimizer, and batches that differ between ranks."""

    def __init__(self, comm, base, stage, make=KINDS["adamw"], precision=None, prepare=True):
        options = zero.ZeroOptions(
            bucket_elems=SMALL_BUCKET_ELEMS, precision=precision or zero.Precision()
        )
        self.comm = comm
        self.module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=options)
        self.optimizer = make(self.module.parameters())
        # Keep the parameters: attribute access in the module would unshard them.
        self.params = dict(self.module.named_parameters())
        if prepare:
            self.optimizer.prepare()

    def backward(self, turn: int = 0) -> None:
        generator = torch.Generator().manual_seed(10 * turn + self.comm.rank)
        self.module(torch.randn(4, 13, generator=generator)).backward()

    def step(self, turn: int = 0) -> None:
        self.backward(turn)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return whole_state(self.module, self.optimizer)


def mean_gradients(base: nn.Module, world_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the mean of the ranks' gradients, added in rank order as the reductions do."""
    total: dict[str, Tensor] = {}
    for rank in range(world_size):
        model: Any = deepcopy(base).to(dtype)
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(4, 13, generator=generator).to(dtype)).backward()
        for name, param in model.named_parameters():
            grad = param.grad.float()
            total[name] = total[name] + grad if rank else grad
    return {name: each / world_size for name, each in total.items()}


@covering(strength=1, world_size=WORLDS, stage=STAGES, precision={"fp32": None, "bf16": BF16})
def test_the_gradient_is_the_mean_over_the_ranks(worlds, world_size, stage, precision):
    base = new_model("mlp")
    wanted = mean_gradients(base, world_size, torch.bfloat16 if precision else torch.float32)

    def work(comm):
        each = Trained(comm, base, stage, precision=precision)
        each.backward()
        found = {name: get_gradient(param) for name, param in each.params.items()}
        pieces = {name: get_gradient(p, local=True) for name, p in each.params.items()}
        norm = each.optimizer.clip_grad_norm_(1e-3)
        # The gradient is the one before clipping, and reading it changes nothing.
        assert_same_bits(found, {n: get_gradient(p) for n, p in each.params.items()})
        each.optimizer.step()
        return found, pieces, norm, zero.full_state_dict(each.module)

    def without(comm):
        each = Trained(comm, base, stage, precision=precision)
        each.backward()
        norm = each.optimizer.clip_grad_norm_(1e-3)
        each.optimizer.step()
        return norm, zero.full_state_dict(each.module)

    outcomes = worlds(world_size).run(work)
    norm, state = worlds(world_size).run(without)[0]
    for found, _, its_norm, its_state in outcomes:
        assert_same_bits(found, wanted)
        assert torch.equal(its_norm, norm)
        assert_same_bits(its_state, state)
    for name, whole in wanted.items():
        pieces = [outcome[1][name] for outcome in outcomes]
        if stage == 0:
            assert all(torch.equal(piece, whole.view(-1)) for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces), whole.view(-1))


@covering(strength=1, world_size=WORLDS, stage=STAGES, precision={"fp32": None, "bf16": BF16})
def test_a_gradient_that_is_set_is_what_the_step_takes(worlds, world_size, stage, precision):
    """The set gradient is used in FP32, even if gradients of backwards have 16 bits."""
    base = new_model("mlp")
    dtype = torch.bfloat16 if precision else torch.float32
    means = mean_gradients(base, world_size, dtype)
    wanted = {name: each * 2 + 2**-12 for name, each in means.items()}
    alone: Any = deepcopy(base)
    for name, param in alone.named_parameters():
        param.grad = wanted[name].clone()
    optimizer = AdamW(alone.parameters(), lr=0.1, comm="alone")
    norm = optimizer.clip_grad_norm_(0.25)
    optimizer.step()

    def work(comm):
        each = Trained(comm, base, stage, make=lambda p: AdamW(p, lr=0.1), precision=precision)
        each.backward()
        each.optimizer.clip_grad_norm_(1e-3)
        for number, (name, param) in enumerate(each.params.items()):
            grad = get_gradient(param, local=number % 2 == 0)
            zero.set_gradient(param, grad * 2 + 2**-12, local=number % 2 == 0)
            assert torch.equal(get_gradient(param), wanted[name])
        assert torch.equal(each.optimizer.clip_grad_norm_(0.25), norm)
        each.optimizer.step()
        for name, param in each.params.items():
            assert torch.equal(zero.get_master(param), alone.get_parameter(name)), name

    worlds(world_size).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_gradient_has_none_until_it_is_set(worlds, stage):
    base = new_model("partial")

    def work(comm):
        each = Trained(comm, base, stage)
        each.module(torch.ones(4, 12), 0).backward()
        unused, frozen = each.params["unused.bias"], each.params["frozen.bias"]
        assert get_gradient(unused) is None and get_gradient(unused, local=True) is None
        before = zero.get_master(unused)
        zero.set_gradient(unused, torch.ones(5))
        each.optimizer.step()
        assert (zero.get_master(unused) < before).all()
        for read in (zero.get_gradient, zero.get_master):
            with pytest.raises(ArgumentError, match=r"trainable when shard\(\) prepared"):
                read(frozen)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_after_a_gradient_was_set(worlds, stage):
    """At stages 2 and 3 backward adds to the set gradient; at 0 and 1 it reduces p.grad again."""
    base = new_model("mlp")
    means = mean_gradients(base, 2, torch.float32)

    def work(comm):
        each = Trained(comm, base, stage)
        each.backward()
        for name, param in each.params.items():
            zero.set_gradient(param, torch.zeros_like(means[name]))
        each.backward()
        factor = 1 if stage > 1 else 2
        for name, param in each.params.items():
            torch.testing.assert_close(get_gradient(param), means[name] * factor)
        each.optimizer.zero_grad()
        assert all(get_gradient(param) is None for param in each.params.values())

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_set_is_scaled_back_with_the_loss(worlds, stage):
    """A set gradient that is not finite skips the step."""
    base = new_model("mlp")

    def work(comm):
        scaler = LossScaler()
        each = Trained(comm, base, stage, lambda p: AdamW(p, lr=0.1, loss_scaler=scaler))
        scaler.scale(each.module(torch.ones(4, 13))).backward()
        param = each.params["head.bias"]
        before = zero.get_master(param)
        zero.set_gradient(param, torch.full((1,), torch.inf))
        each.optimizer.step()
        each.optimizer.zero_grad()
        assert each.optimizer.skipped_steps == 1 and torch.equal(zero.get_master(param), before)
        scale = scaler.current.item()
        scaler.scale(each.module(torch.ones(4, 13))).backward()
        zero.set_gradient(param, torch.full((1,), 2 * scale))
        each.optimizer.step()
        assert get_state(param, "exp_avg").item() == pytest.approx(0.2)

    worlds(2).run(work)


@covering(strength=1, stage=range(4), made=KINDS_AND_WORLDS)
def test_masters_and_states_are_those_of_the_full_state(worlds, stage, made):
    kind, world_size = made
    base = new_model("mlp")

    def work(comm):
        each = Trained(comm, base, stage, KINDS[kind], BF16)
        each.step()
        full = each.optimizer.full_state_dict()
        pieces = {}
        for index, (name, param) in enumerate(each.params.items()):
            assert torch.equal(zero.get_master(param), full["master"][index])
            pieces[name, "master"] = zero.get_master(param, local=True)
            for key, value in full["state"][index].items():
                if isinstance(value, Tensor) and value.dim():
                    assert torch.equal(get_state(param, key), value)
                    pieces[name, key] = get_state(param, key, local=True)
        wholes = {
            (name, key): zero.get_master(param) if key == "master" else get_state(param, key)
            for (name, key) in pieces
            for param in [each.params[name]]
        }
        return pieces, wholes

    outcomes = worlds(world_size).run(work)
    assert len(outcomes[0][0]) > len(list(base.parameters()))
    for key, whole in outcomes[0][1].items():
        pieces = [outcome[0][key] for outcome in outcomes]
        joined = pieces[0] if stage == 0 else torch.cat(pieces)
        assert torch.equal(joined, whole.view(-1))


@covering(strength=1, stage=range(4), made=KINDS_AND_WORLDS)
def test_training_goes_on_from_what_is_set(worlds, stage, made):
    """A run that takes over another run's masters and states continues with the same bits."""
    kind, world_size = made
    base = new_model("mlp")

    def work(comm):
        one = Trained(comm, base, stage, KINDS[kind], BF16)
        other = Trained(comm, base, stage, KINDS[kind], BF16)
        one.step(0)
        other.step(1)
        for number, (name, param) in enumerate(one.params.items()):
            mine, local = other.params[name], number % 2 == 0
            zero.set_master(mine, zero.get_master(param, local=local), local=local)
            for key in one.optimizer.full_state_dict()["state"][number]:
                if key != "step":
                    value = get_state(param, key, local=local)
                    zero.set_state(mine, key, value, local=local)
        before = one.state(), other.state()
        one.step(2)
        other.step(2)
        return *before, one.state(), other.state()

    for one, other, later, other_later in worlds(world_size).run(work):
        assert_same_bits(other, one)
        assert_same_bits(other_later, later)


@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(worlds, stage):
    base: Any = new_model("mlp")
    base.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)

    def work(comm):
        each = Trained(comm, base, stage, prepare=False)
        bias, weight = each.params["head.bias"], each.params["head.weight"]
        with pytest.raises(ArgumentError, match=r"no optimizer has prepared .* prepare\(\)"):
            zero.get_master(bias)
        each.optimizer.prepare()
        with pytest.raises(
            ArgumentError, match=r"head.bias: it has no exp_avg yet; take its first"
        ):
            zero.set_state(bias, "exp_avg", torch.zeros(1))
        assert get_state(bias, "exp_avg") is None
        each.step()
        before = each.state()
        mine = comm.rank == 1
        with pytest.raises(ArgumentError, match=r"AdamW keeps exp_avg, .*, got 'momentum'"):
            get_state(bias, "momentum")
        if stage > 0:
            with pytest.raises(ArgumentError, match=r"AdamW keeps exp_avg, .*, got 'momentum'"):
                get_state(bias, "momentum" if mine else "exp_avg")
            with pytest.raises(MismatchError, match=r"Option name is .*exp_avg"):
                get_state(bias, "exp_avg_sq" if mine else "exp_avg")
            for read in (get_gradient, zero.get_master):
                with pytest.raises(MismatchError, match=r"Option parameter is .*head"):
                    read(weight if mine else bias)
        for call in (zero.set_gradient, zero.set_master, partial_state):
            with pytest.raises(
                ArgumentError, match=r"head.bias: value: expected shape \(1,\), got \(2"
            ):
                call(bias, torch.zeros(2 if mine else 1))
            with pytest.raises(ArgumentError, match="expected a floating-point tensor"):
                call(bias, torch.zeros(1, dtype=torch.int64 if mine else torch.float32))
            with pytest.raises(MismatchError, match=r"Option value is .*checksum"):
                call(bias, torch.zeros(1) + comm.rank)
            with pytest.raises(MismatchError, match=r"Option parameter is .*head"):
                call(weight if mine else bias, torch.zeros((1, 37) if mine else (1,)))
        for operation, access in ACCESSES.items():
            reads = operation in ("get_master", "get_state")
            if stage > 0 or not reads or mine:
                with pytest.raises(ArgumentError, match=f"{operation}: param: expected a param"):
                    access(each.params["frozen"] if mine else bias)
        if stage == 3:
            with (
                pytest.raises(ArgumentError, match=r"^set_master .* inside unsharded\(\)"),
                zero.unsharded(each.module),
            ):
                zero.set_master(bias, torch.zeros(1))
        assert_same_bits(each.state(), before)

    worlds(2).run(work)


def partial_state(param: Tensor, value: Tensor) -> None:
    zero.set_state(param, "exp_avg", value)


ACCESSES: dict[str, Any] = {
    "get_gradient": get_gradient,
    "get_master": zero.get_master,
    "get_state": lambda param: get_state(param, "exp_avg"),
    "set_gradient": lambda param: zero.set_gradient(param, torch.zeros(1)),
    "set_master": lambda param: zero.set_master(param, torch.zeros(1)),
    "set_state": lambda param: partial_state(param, torch.zeros(1)),
}


def test_what_is_not_of_a_sharded_module_is_refused():
    with pytest.raises(ArgumentError, match="expected a parameter that was trainable"):
        get_gradient(nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("stage", STAGES)
def test_names_of_deepspeed_stand_beside_ours(worlds, stage):
    """Each row of the docs' table of DeepSpeed names: both calls run, and have the same effect."""
    table = (ROOT / "docs" / "migrating.md").read_text()
    rows = dict(re.findall(r"^\| `(safe_\w+)\([^`]*\)` \| `([^`]+)` \|$", table, re.MULTILINE))
    assert len(rows) == 12

    def work(comm):
        each = Trained(comm, base, stage)
        each.step()
        each.backward()
        param = each.params["head.weight"]
        for theirs, ours in rows.items():
            local = "local" in theirs
            kind = theirs.removeprefix("safe_").split("_", 2)[2]
            reads: dict[str, Any] = {
                "grad": zero.get_gradient,
                "fp32_param": zero.get_master,
                "optimizer_state": lambda p, local: get_state(p, "exp_avg", local=local),
            }
            read = reads[kind]
            value = torch.ones_like(read(param, local=local))
            known = {"zero": zero, "param": param, "value": value}
            result = eval(ours, known)
            found = read(param, local=local)
            assert torch.equal(found, value if "safe_set" in theirs else result), theirs

    base = new_model("mlp")
    worlds(2).run(work)


@covering(strength=1, world_size=WORLDS, stage=STAGES, precision={"fp32": None, "bf16": BF16})
def test_hooks_see_each_reduced_gradient_once_and_change_it(worlds, world_size, stage, precision):
    base = new_model("mlp")
    dtype = torch.bfloat16 if precision else torch.float32
    means = mean_gradients(base, world_size, dtype)
    alone: Any = deepcopy(base)
    for name, param in alone.named_parameters():
        param.grad = means[name] * 2
    reference = AdamW(alone.parameters(), lr=0.1, comm="alone")
    norm = reference.clip_grad_norm_(0.25)
    reference.step()

    def work(comm, clips):
        each = Trained(comm, base, stage, lambda p: AdamW(p, lr=0.1), precision)
        seen: dict[str, Tensor] = {}

        def double(name: str, piece: Tensor, begin: int) -> None:
            assert name not in seen
            seen[name] = torch.zeros(means[name].numel())
            seen[name][begin : begin + piece.numel()] = piece
            piece.mul_(2)

        handle = zero.on_reduced(each.module, double)
        each.backward()
        if clips:
            assert torch.equal(each.optimizer.clip_grad_norm_(1e9), norm)
            assert torch.equal(each.optimizer.clip_grad_norm_(0.25), norm)
            each.optimizer.step()
            for name, param in each.params.items():
                assert torch.equal(zero.get_master(param), alone.get_parameter(name)), name
        else:
            each.optimizer.step()
            moment = get_state(each.params["head.weight"], "exp_avg")
            torch.testing.assert_close(moment, means["head.weight"] * 0.2)
        each.optimizer.zero_grad()
        handle.remove()
        each.step()
        return seen

    for clips in (True, False):
        outcomes = worlds(world_size).run(work, clips)
        for name, mean in means.items():
            none = torch.zeros(mean.numel())
            assert torch.equal(sum(seen.get(name, none) for seen in outcomes), mean.view(-1))


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_that_fail_or_differ_fail_on_all_ranks(worlds, stage):
    base = new_model("mlp")

    def work(comm):
        def fail(name: str, piece: Tensor, begin: int) -> None:
            assert 1 / comm.rank == 1

        each = Trained(comm, base, stage)
        with pytest.raises(ArgumentError, match="hook: expected a function, got 5"):
            zero.on_reduced(each.module, 5 if comm.rank else fail)  # type: ignore[arg-type]
        handle = zero.on_reduced(each.module, fail)
        each.backward()
        before = zero.full_state_dict(each.module)
        told = ZeroDivisionError if comm.rank == 0 else RingcommError
        for operation in ("clip_grad_norm_", "clip_grad_value_", "step"):
            said = "by zero" if comm.rank == 0 else f"^optimizer.{operation} on rank 1 .* by zero"
            with pytest.raises(told, match=said):
                getattr(each.optimizer, operation)(*([] if operation == "step" else [1.0]))
        assert_same_bits(zero.full_state_dict(each.module), before)
        if comm.rank == 1:
            handle.remove()
        with pytest.raises(MismatchError, match="Option hooks is 2 on rank 0 and 1 on rank 1"):
            zero.on_reduced(each.module, fail)

    worlds(2).run(work)
