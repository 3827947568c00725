# SPDX-License-Identifier: Apache-2.0
"""Training loops may use these optimizers as they use torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ringcomm.errors import ArgumentError
from ringcomm.optim import Adam, AdamW, AdamWOptions
from tests.optim.problems import SMALL_BUCKETS, Problem, loss_of, model, values
from tests.support.covering import covering, in_test_all

Tensor = torch.Tensor
FP32_SUMS = AdamWOptions(bucket_elems=1024, accumulate_dtype=torch.float32)


def follows(net: torch.nn.Module, other: torch.nn.Module) -> None:
    """Asserts that two models' parameters differ by rounding only."""
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@covering(
    strength=1,
    world=[1, 2, 4],
    options={"grads": SMALL_BUCKETS, "fp32 sums": FP32_SUMS},
    zeroed=["to none", "to zero", "by the model"],
)
def test_a_training_loop_goes_as_with_torch(worlds, world, options, zeroed):
    """Covers FP32 sums, which only the step resets: the model's zero_grad() does not know them."""
    theirs = model()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(8):
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()

    def work(comm):
        net = model()
        optimizer = AdamW(net.parameters(), lr=1e-2, comm=comm, options=options)
        for step in range(8):
            if zeroed == "by the model":
                net.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=zeroed == "to none")
            loss_of(net, step).backward()
            optimizer.step()
        return net

    for net in worlds(world).run(work):
        follows(net, theirs)


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
}


@covering(strength=1, name=[*SCHEDULERS], tensor_lr=[False, True])
def test_schedulers_change_lr_and_betas(worlds, name, tensor_lr):
    def work(comm):
        net, steps = model(), []
        lr = torch.tensor(0.03125) if tensor_lr else 0.03125
        optimizer = AdamW(net.parameters(), lr=lr, comm=comm)
        scheduler = SCHEDULERS[name](optimizer)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
            scheduler.step()
            steps.append(float(optimizer.param_groups[0]["lr"]))
        return net, steps

    theirs = model()
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.03125)
    scheduler = SCHEDULERS[name](reference)
    expected = []
    for step in range(8):
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
        scheduler.step()
        expected.append(reference.param_groups[0]["lr"])
    for net, steps in worlds(2).run(work):
        assert steps == pytest.approx(expected, rel=1e-6)
        follows(net, theirs)


def test_a_tensor_lr_steps_as_the_number_and_is_read_anew():
    problem, finals = Problem(), []
    for lr in (0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)):
        params = problem.params()
        optimizer = AdamW(params, lr=lr)
        for step in range(3):
            problem.give(params, step, 0)
            optimizer.step()
            if isinstance(lr, Tensor):
                lr.mul_(0.5)
            else:
                optimizer.param_groups[0]["lr"] *= 0.5
        finals.append(params)
    for params in finals[1:]:
        assert all(torch.equal(a, b) for a, b in zip(params, finals[0], strict=True))


@pytest.mark.parametrize("world", [2, *in_test_all(1)])
def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned(worlds, world):
    def work(comm):
        net = model()
        optimizer = AdamW(net.parameters(), comm=comm)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(net, 0)
            loss.backward()
            return loss

        with torch.no_grad():
            losses = [float(optimizer.step(closure)) for _ in range(3)]
        return losses

    for losses in worlds(world).run(work):
        assert losses[0] > losses[1] > losses[2]


def test_hooks_are_called():
    net, calls = model(), []
    optimizer = AdamW(net.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["mine"]))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "save", 1, "loaded"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_without_gradient_takes_no_step(worlds, world):
    """Used on the last rank only, it steps with that rank's gradient; used nowhere, it does not."""

    def gradient(shape, index, step, rank):
        if index == 1 or (index == 4 and step == 1):
            return None
        if index == 5 and rank != world - 1:
            return None
        return torch.full(shape, 2.0 * (rank + 1))

    problem = Problem(gradient=gradient)

    def work(comm):
        params = problem.params()
        optimizer = problem.ours(params, comm)
        for step in range(3):
            problem.give(params, step, comm.rank)
            optimizer.step()
        return params, optimizer.full_state_dict()["state"]

    expected = problem.params()
    reference = problem.ours(expected, None)
    for step in range(3):
        problem.give_mean(expected, step, world)
        if world == 2:  # the mean also counts the rank without a gradient
            expected[5].grad = torch.full((64,), 2.0)
        reference.step()
    for params, state in worlds(world).run(work):
        assert torch.equal(params[1], values((700,), 1))
        assert 1 not in state
        assert [state[index]["step"].item() for index in (0, 4, 5)] == [3, 2, 3]
        assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@pytest.mark.parametrize("world", [2, *in_test_all(1)])
def test_unused_zero_decays_and_steps_without_gradient(worlds, world):
    options = AdamWOptions(unused="zero")

    def gradient(shape, index, step, rank):
        return None if index == 1 else torch.ones(shape)

    problem = Problem(gradient=gradient)

    def work(comm):
        params = problem.params()
        optimizer = problem.ours(params, comm, options)
        problem.give(params, 0, comm.rank)
        optimizer.step()
        return params, optimizer.full_state_dict()["state"]

    for params, state in worlds(world).run(work):
        decay = torch.tensor(1 - 1e-3 * 1e-2, dtype=torch.float32)
        assert torch.equal(params[1], values((700,), 1) * decay)
        assert state[1]["step"].item() == 1


def test_the_default_group_is_the_communicator(worlds):
    def work(comm):
        return AdamW([torch.ones(3).requires_grad_()]).communicator is comm

    assert worlds(2).run(work) == [True, True]
    assert AdamW([torch.ones(3).requires_grad_()]).communicator is None


def test_groups_may_be_generators():
    net = model()
    optimizer = AdamW({"params": layer.parameters()} for layer in net.children())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0, 2]
    assert len(AdamW(net.parameters()).param_groups[0]["params"]) == 4


def test_groups_can_be_added_at_any_time():
    first, second = (torch.ones(3).requires_grad_() for _ in range(2))
    optimizer = AdamW([("first", first)], lr=0.5)
    optimizer.add_param_group({"params": [("second", second)], "lr": 0.25})
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert first[0].item() == pytest.approx(1 - 0.5 - 0.005)
    assert second[0].item() == pytest.approx(1 - 0.25 - 0.0025)
    third = torch.ones(2).requires_grad_()
    with pytest.raises(ArgumentError, match="lr"):
        optimizer.add_param_group({"params": [("third", third)], "lr": -1.0})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [("third", third)], "lr": 0.125})
    third.grad = torch.ones(2)
    optimizer.step()
    assert third[0].item() == pytest.approx(1 - 0.125 - 0.00125)
    assert [each["step"].item() for each in optimizer.full_state_dict()["state"].values()] == [
        2,
        2,
        1,
    ]


def test_torchs_arguments_are_taken():
    params = [torch.ones(2).requires_grad_()]
    for kind, theirs in ((AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)):
        settings: dict[str, Any] = {
            "foreach": None,
            "capturable": True,
            "fused": True,
            "maximize": True,
        }
        mine = kind(params, 0.1, (0.8, 0.9), 1e-7, 0.2, True, **settings)
        other = theirs(params, 0.1, (0.8, 0.9), 1e-7, 0.2, True, **settings)
        a, b = mine.param_groups[0], other.param_groups[0]
        assert {k: v for k, v in a.items() if k != "params"} == {
            k: v for k, v in b.items() if k != "params"
        }
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    assert AdamW(params, betas=betas).param_groups[0]["betas"] == (0.5, 0.75)


def test_a_skipped_step_and_the_models_zero_grad_end_a_clip():
    """The loop skips steps whose norm is not finite; their clip must not affect later steps."""
    mine, torchs = model(), model()
    optimizer = AdamW(mine.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(torchs.parameters(), lr=1e-2)
    for turn in range(5):
        factor = float("inf") if turn == 1 else 1.0
        for net in (mine, torchs):
            net.zero_grad()
            (loss_of(net, turn) * factor).backward()
        norm = optimizer.clip_grad_norm_(1.0)
        wanted = torch.nn.utils.clip_grad_norm_(torchs.parameters(), 1.0)
        assert torch.isfinite(norm) == torch.isfinite(wanted) == torch.tensor(turn != 1)
        if turn != 1:
            torch.testing.assert_close(norm, wanted)
            optimizer.step()
            reference.step()
    follows(mine, torchs)


def test_gradients_that_change_after_a_clip_forget_it():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([param], lr=0.1, weight_decay=0.0)
    param.grad = torch.ones(4)
    optimizer.clip_grad_norm_(1e9)
    param.grad = -torch.ones(4)
    optimizer.step()
    assert torch.all(param > 1)
    before = param.detach().clone()
    param.grad = torch.ones(4)
    optimizer.clip_grad_norm_(1e9)
    param.grad = None
    optimizer.step()
    assert torch.equal(param, before)


def test_lr_goes_from_a_tensor_to_nothing():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([param], lr=torch.tensor(0.1))
    param.grad = torch.ones(4)
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(param, before)


def test_torchs_checkpoint_changes_nothing():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net = model()
    optimizer = AdamW(net.parameters())
    loss_of(net, 0).backward()
    optimizer.step()
    before = [each.detach().clone() for each in net.parameters()]
    # Torch takes the first key of our state for a parameter, and looks for that parameter.
    with pytest.raises(KeyError) as raised:
        get_optimizer_state_dict(net, optimizer)
    assert raised.value.args == (next(iter(optimizer.state_dict()["state"])),) == ("step",)
    assert optimizer.steps_taken == 1
    assert all(map(torch.equal, net.parameters(), before))
    # Negative control: an optimizer of torch raises no error.
    reference = torch.optim.AdamW(net.parameters())
    reference.step()
    assert (
        get_optimizer_state_dict(net, reference)["state"].keys()
        == dict(net.named_parameters()).keys()
    )
