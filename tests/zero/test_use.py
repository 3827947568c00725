# SPDX-License-Identifier: Apache-2.0
"""Uses of a module outside the usual training loop, at every stage."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW
from ringcomm.zero.stages.resharded import Resharded
from ringcomm.zero.stages.sharding import engine_of
from tests.support.covering import in_test_all
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits, new_model

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)


state_of = zero.full_state_dict


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_nothing_clears_are_warned_of(worlds, stage):

    def work(comm):
        module: Any = zero.shard(new_model("mlp"), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)

        def train(forget):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    module(torch.ones(2, 13)).backward()
                    module(torch.ones(2, 13)).backward()
                    optimizer.step()
                    forget()
            return [str(each.message) for each in caught]

        assert train(optimizer.zero_grad) == []
        assert train(module.zero_grad) == []
        (said,) = train(lambda: None)
        assert "added to gradients that an earlier step has used" in said
        assert train(lambda: None) == []

    worlds(1).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_between_a_step_and_zero_grad_is_not_warned_of(worlds, stage):
    """A GAN's discriminator drops gradients of the generator's backward before its own."""

    def work(comm):
        module: Any = zero.shard(new_model("mlp"), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, 13)).backward()
            optimizer.step()
            module(torch.ones(2, 13)).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_steps_without_zeroing_go_on_adding(worlds, stage):
    base = new_model("mlp")

    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        x = torch.ones(2, 13) * (comm.rank + 1)
        module(x).backward()
        first = optimizer.clip_grad_norm_(1e9).item()
        module(x).backward()
        second = optimizer.clip_grad_norm_(1e9).item()
        optimizer.zero_grad(set_to_none=False)
        third = optimizer.clip_grad_norm_(1e9).item()
        optimizer.step()
        return first, second, third

    for first, second, third in worlds(2).run(work, stage):
        assert second == pytest.approx(2 * first, rel=1e-6)  # sums of equal numbers
        assert third == 0.0


# ---- what users do unexpectedly ---------------------------------------------------------------

SMALLER = zero.ZeroOptions(bucket_elems=512)


def small() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(comm, turn: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * turn + comm.rank))


def are_unsharded(module: nn.Module) -> bool:
    """True if any parameter is unsharded. Avoids attribute access, which would unshard it."""
    return not all(isinstance(param, Resharded) for param in module.parameters())


def _by_hand(module: Any, optimizer: Any, x: Tensor) -> None:
    params = list(module.parameters())
    grads = torch.autograd.grad(module(x).square().mean(), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def _usually(module: Any, optimizer: Any, x: Tensor) -> None:
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_set_by_hand(worlds, stage):
    base = small()

    def work(comm, turn):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALLER)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        for number in range(3):
            turn(module, optimizer, rows(comm, number))
        found = zero.full_state_dict(module)
        zero.remove_sharding(module)
        assert "zero_grad" not in vars(module)
        return found

    assert_same_bits(worlds(2).run(work, _by_hand)[1], worlds(2).run(work, _usually)[1])


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_gradients_under_no_sync(worlds, stage):
    base = small()

    def work(comm, quiet):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALLER)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        if quiet:
            with zero.no_sync(module):
                if comm.rank == 0:
                    module(rows(comm, 0)).square().mean().backward()
        else:
            (module(rows(comm, 0)).square().mean() * (comm.rank == 0)).backward()
        optimizer.step()
        return zero.full_state_dict(module)

    assert_same_bits(worlds(2).run(work, True)[1], worlds(2).run(work, False)[1])


def test_a_step_that_is_refused_can_be_made_later(worlds):
    def work(comm):
        module: Any = zero.shard(small(), 3, comm=comm)
        optimizer = AdamW(module.parameters())
        module(rows(comm, 0)).sum().backward()
        with zero.unsharded(module), pytest.raises(ArgumentError, match="inside unsharded"):
            optimizer.step()
        optimizer.clip_grad_norm_(1.0)
        with torch.no_grad():
            module[0].weight.zero_()
        with pytest.raises(ArgumentError, match="changed in place"):
            optimizer.step()
        optimizer.step()
        assert optimizer.steps_taken.item() == 1.0

    worlds(2).run(work)


def test_what_was_raised_in_unsharded_is_what_comes_out(worlds):
    def work(comm):
        module: Any = zero.shard(small(), 3, comm=comm)
        with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
            with zero.unsharded(module, write_from=0), torch.no_grad():
                module[0].weight.zero_()
                raise KeyboardInterrupt
        assert not are_unsharded(module)
        with pytest.raises(ArgumentError, match=r"0\.weight"):  # noqa: SIM117
            with zero.unsharded(module), torch.no_grad():
                for param in module.parameters():
                    param.zero_()
        # All changes are refused together, and all are lost.
        assert not are_unsharded(module)
        assert module(rows(comm, 0)).abs().sum() > 0

    worlds(1).run(work)


def test_a_forward_that_raised_leaves_nothing_behind(worlds):
    class Refusing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("on purpose")
            return super().forward(x)

    def work(comm):
        module = nn.Sequential(nn.Linear(8, 8), Refusing(8, 8))
        module[1].register_forward_pre_hook(_refuse)
        zero.shard(module, 3, comm=comm)
        for bad in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match="on purpose"):
                module(torch.full((1, 8), bad))
        with torch.no_grad():
            module(torch.ones(1, 8))
        assert not are_unsharded(module)

    worlds(1).run(work)


class Interrupted(nn.Linear):
    """A layer that is interrupted once by Ctrl-C while it computes."""

    comes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.comes:
            self.comes = False
            raise KeyboardInterrupt
        return super().forward(x)


def test_ctrl_c_in_a_forward_is_forgotten_at_the_next(worlds):
    """Torch calls no forward hook after an interrupt."""

    def work(comm):
        interrupted = Interrupted(8, 8)
        module = nn.Sequential(nn.Linear(8, 8), interrupted, nn.Linear(8, 8))
        zero.shard(module, 3, comm=comm)
        for _ in range(2):
            interrupted.comes = True
            with pytest.raises(KeyboardInterrupt):
                module(torch.ones(1, 8))
            with torch.no_grad():
                module(torch.ones(1, 8))
            assert not are_unsharded(module)

    worlds(1).run(work)


def test_a_module_that_calls_itself_keeps_what_it_uses(worlds):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.full((8,), 2.0))

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            if again:
                x = self(x, again=False)
            assert are_unsharded(self)
            return self.layer(x) * self.scale

    def work(comm):
        module = Twice()
        copied = deepcopy(module)
        zero.shard(module, 3, comm=comm)
        with torch.no_grad():
            assert torch.equal(module(torch.ones(1, 8)), copied(torch.ones(1, 8)))
        assert not are_unsharded(module)

    worlds(1).run(work)


@pytest.mark.parametrize("trains", [True, False])
def test_a_root_that_is_never_called_prefetches(worlds, trains):
    """Language models compute their loss in one method, and generate in another."""

    def work(comm):
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        zero.shard(module, 3, comm=comm, options=zero.ZeroOptions(overlap=True))
        unsharder = engine_of(module, "test").unsharder
        assert unsharder is not None
        coming = []
        for layer in module:
            layer.register_forward_hook(lambda *_: coming.append(len(unsharder._coming)))
        for _ in range(3):
            coming.clear()
            x = torch.ones(1, 8)
            with torch.set_grad_enabled(trains):
                for layer in module:
                    x = layer(x)
            if trains:
                x.sum().backward()
            assert len(unsharder._now) <= 2 * len(module)
        assert coming[:3] == [1, 1, 1]

    worlds(1).run(work)


def test_a_backward_that_raised_keeps_nothing_unsharded(worlds):
    def work(comm):
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        zero.shard(module, 3, comm=comm)
        module[1].register_full_backward_pre_hook(_raise)
        x = torch.ones(1, 8, requires_grad=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose"):
                module(x).sum().backward()
            module[1]._backward_pre_hooks.clear()
            with torch.no_grad():
                module(x)
            assert not are_unsharded(module)
            module(x).sum().backward()
            assert not are_unsharded(module)
            module[1].register_full_backward_pre_hook(_raise)

    worlds(1).run(work)


def _raise(*_: object) -> None:
    raise ValueError("on purpose")


def _refuse(_: nn.Module, args: tuple[Tensor, ...]) -> None:
    if args[0].isinf().any():
        raise ValueError("on purpose")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_leaves_keep_no_hooks(worlds, stage):
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(self.frozen(x)), x

    def work(comm):
        module: Any = zero.shard(Passing(), stage, comm=comm)
        x = torch.ones(1, 8, requires_grad=True)
        for _ in range(2):
            module(x)
            module(x)[0].sum().backward()
        assert not x._backward_hooks

    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_that_are_expanded(worlds, stage):
    def work(comm):
        module: Any = nn.Linear(2, 2)
        positions = torch.arange(3) + comm.rank
        module.register_buffer("positions", positions.expand(2, -1))
        zero.shard(module, stage, comm=comm)
        return module.positions

    for found in worlds(2).run(work):
        assert torch.equal(found, torch.tensor([[0, 1, 2]] * 2))


def test_state_dicts_of_modules_inside_a_unit_at_stage_3(worlds):
    def work(comm):
        module: Any = zero.shard(nn.Sequential(small()), 3, comm=comm)
        with zero.unsharded(module):
            assert not module[0][2].state_dict()["weight"].isnan().any()
        with torch.no_grad():
            module(torch.ones(2, 8))
        for part in (module[0], module[0][2]):
            state = part.state_dict()
            params = dict(part.named_parameters())
            assert {n: (v.shape, v.dtype) for n, v in state.items() if n in params} == {
                n: (p.shape, p.dtype) for n, p in params.items()
            }
            for name in params:
                for use in USES:
                    with pytest.raises(ArgumentError, match=rf"{name}: .* needs its values, and"):
                        use(state[name])
            with pytest.raises(ArgumentError, match="only inside unsharded"):
                part.load_state_dict(state)
        with pytest.raises(ArgumentError, match="only inside unsharded"):
            module.state_dict()

    worlds(1).run(work)


# Calls that read a tensor's values or memory.
USES: list[Callable[[Any], Any]] = [
    lambda t: t.clone(),
    lambda t: t + 1,
    lambda t: t.numpy(),
    lambda t: t.data,
    lambda t: t.untyped_storage(),
    lambda t: torch.zeros(t.shape).copy_(t),
    lambda t: torch.save({"t": t}, io.BytesIO()),
    lambda t: safetensors.torch.save({"t": t}),
    deepcopy,
]


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_goes_on_from_a_module_that_was_loaded_alone(worlds, stage, tmp_path):
    options = zero.ZeroOptions(precision=zero.Precision(param=torch.bfloat16))

    def work(comm):
        saved = zero.shard(small(), stage, comm=comm, options=options)
        zero.save(tmp_path, 0, saved)
        module = zero.shard(small(), stage, comm=comm, options=options)
        optimizer = AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
        optimizer.prepare()
        zero.load(tmp_path, module)
        module(rows(comm, 0)).sum().backward()
        optimizer.step()
        assert_same_bits(zero.full_state_dict(module), zero.full_state_dict(saved))

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_goes_on_from_what_torch_has_loaded_in_place(worlds, stage):
    options = zero.ZeroOptions(precision=zero.Precision(param=torch.bfloat16))

    def work(comm):
        module = zero.shard(small(), stage, comm=comm, options=options)
        optimizer = AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
        optimizer.prepare()
        state = zero.TrainState(module)
        saved = state.state_dict()
        comm.barrier()
        for name, shard in saved.items():
            if name != "facts":
                shard.local.fill_(3.0)
        state.load_state_dict(saved)
        module(rows(comm, 0)).sum().backward()
        optimizer.step()
        return zero.full_state_dict(module)

    for found in worlds(2).run(work):
        assert all((tensor == 3.0).all() for tensor in found.values())


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_was_built_too_early(worlds, stage):
    def work(comm):
        module = small()
        optimizer = AdamW(module.parameters(), comm=comm)
        zero.shard(module, stage, comm=comm)
        with pytest.raises(ArgumentError, match="sharded after it had been built"):
            optimizer.step()

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_share_memory_are_refused(worlds, stage):
    def work(comm):
        module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight.data = module[0].weight.data
        with pytest.raises(ArgumentError, match=r"0\.weight.*1\.weight.*share memory"):
            zero.shard(module, stage, comm=comm)

    worlds(1).run(work)
