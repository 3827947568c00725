# SPDX-License-Identifier: Apache-2.0
"""``p.grad`` of sharded parameters: cleared by any container, clipped by torch, else refused."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from contextlib import nullcontext
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils

from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions, LossScaler, Sharded
from ringcomm.zero import get_gradient
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits, new_model

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
SMALL = zero.ZeroOptions(bucket_elems=512)
FP32_SUMS = AdamWOptions(accumulate_dtype=torch.float32)


class Blocks(nn.Module):
    """Two blocks; a call may use only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1)) -> Tensor:
        for number in used:
            x = torch.tanh(self.blocks[number](x))
        return x.square().sum()


class Around(nn.Module):
    """A container around a module, like the wrapper of another library."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        return self.inner(*args)


def draw(comm: Any, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * turn + comm.rank)
    return torch.randn(4, 24, generator=generator)


def momentum(params: Any, **settings: Any) -> Any:
    return Sharded(torch.optim.SGD, params, lr=0.1, momentum=0.9, **settings)


def sharded(comm: Any, stage: int, base: Any, **settings: Any) -> tuple[Any, Any]:
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
    return module, momentum(module.parameters(), **settings)


def delete_each(module: Any) -> None:
    for param in module.parameters():
        del param.grad


def zero_each(module: Any) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()


def replace_each(module: Any) -> None:
    for param in module.parameters():
        param.grad = torch.zeros(param.shape)


def none_each(module: Any) -> None:
    for param in module.parameters():
        param.grad = None


def zero_list(module: Any) -> None:
    found = [param.grad for param in module.parameters() if param.grad is not None]
    torch._foreach_zero_(found or [torch.zeros(1)])


def zero_submodules(module: Any) -> None:
    for block in module.inner.blocks:
        block.zero_grad()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


CLEARED = {
    "container": lambda module: module.zero_grad(),
    "container to zero": lambda module: module.zero_grad(set_to_none=False),
    "list": lambda module: nn.ModuleList([module]).zero_grad(),
    "data parallel": lambda module: nn.DataParallel(module).zero_grad(),
    "compiled": lambda module: compiled(module.inner).zero_grad(),
    "torch's optimizer": lambda module: torch.optim.SGD(module.parameters()).zero_grad(),
    "to zero by torch's": lambda module: torch.optim.SGD(module.parameters()).zero_grad(False),
    "submodules": zero_submodules,
    "None": none_each,
    "del": delete_each,
    "zero_": zero_each,
    "zeros": replace_each,
    "foreach": zero_list,
}


def train(
    comm: Any, stage: int, base: nn.Module, clear: Any, sums: AdamWOptions | None
) -> list[Tensor]:
    """Takes steps of one and of several backwards, some under no_sync; returns the parameters."""
    module, optimizer = sharded(comm, stage, base, options=sums)
    outer = Around(module)
    for turn in (1, 3):
        for part in range(1 + turn % 2):
            with zero.no_sync(module) if turn == 3 and not part else nullcontext():
                outer(draw(comm, 4 * turn + part)).backward()
        optimizer.step()
        if clear is None:
            optimizer.zero_grad()
        else:
            clear(outer)
    # Gradients cleared between a backward and the step must not count.
    outer(draw(comm, 98)).backward()
    with zero.no_sync(module):
        outer(draw(comm, 99)).backward()
    (clear or nn.Module.zero_grad)(outer)
    outer(draw(comm, 97)).backward()
    optimizer.step()
    return list(zero.full_state_dict(module).values())


@covering(strength=1, sums={"in fp32": FP32_SUMS, "in dtype": None}, stage=STAGES)
def test_whatever_clears_gradients_clears_them(worlds, sums, stage):
    base: Any = Blocks()
    reference = [param.detach() for param in _alone(base)]

    def work(comm):
        wanted = train(comm, stage, base, None if sums is None else CLEARED["None"], sums)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="zero: this step's gradients")
            for name, clear in CLEARED.items():
                found = train(comm, stage, base, clear, sums)
                for one, other in zip(found, wanted, strict=True):
                    assert torch.equal(one, other), name
        torch.testing.assert_close(wanted, reference)

    worlds(2).run(work)


def _alone(base: Any) -> list[Tensor]:
    """Returns the expected result of :func:`train`, computed by torch in one process."""

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    module = deepcopy(base)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def backward(turn: int) -> None:
        (sum(module(draw(Rank(rank), turn)) for rank in range(2)) / 2).backward()

    for turn in (1, 3):
        for part in range(1 + turn % 2):
            backward(4 * turn + part)
        optimizer.step()
        optimizer.zero_grad()
    backward(97)
    optimizer.step()
    return list(module.parameters())


@covering(strength=1, stage=STAGES, world_size=[1, 3])
def test_a_part_is_cleared_alone(worlds, world_size, stage):
    base: Any = Blocks()

    def work(comm):
        module, optimizer = sharded(comm, stage, base)
        optimizer.prepare()
        params = dict(module.named_parameters())

        def gradients(*turns: int) -> Any:
            fresh, its = sharded(comm, stage, base)
            its.prepare()
            for turn in turns:
                fresh(draw(comm, turn)).backward()
            return {name: get_gradient(p) for name, p in fresh.named_parameters()}

        for turn in range(2):
            module(draw(comm, turn)).backward()
        module.blocks[0].zero_grad()
        params["blocks.1.bias"].grad = None
        for name, param in params.items():
            assert (param.grad is None) == (name != "blocks.1.weight")
        module(draw(comm, 2)).backward()
        both, last = gradients(0, 1, 2), gradients(2)
        found: Any = {name: get_gradient(param) for name, param in params.items()}
        assert_same_bits(found, {**last, "blocks.1.weight": both["blocks.1.weight"]})

    worlds(world_size).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_used_other_parts_clear_them_all(worlds, stage):
    """A rank that did not use a block still holds a piece of its gradient, and must clear it."""
    base: Any = Blocks()

    def work(comm):
        module, optimizer = sharded(comm, stage, base)
        outer = Around(module)
        for turn in range(3):
            outer(draw(comm, turn), (comm.rank,)).backward()
            if turn == 1:
                with pytest.raises(ArgumentError, match=r"on some ranks and None on others"):
                    utils.clip_grad_norm_(module.blocks[comm.rank].parameters(), 1.0)
            outer.zero_grad()
        outer(draw(comm, 3), (comm.rank,)).backward()
        optimizer.step()
        fresh, its = sharded(comm, stage, base)
        fresh(draw(comm, 3), (comm.rank,)).backward()
        its.step()
        assert_same_bits(zero.full_state_dict(module), zero.full_state_dict(fresh))

    worlds(2).run(work)


def clip_all(module: Any) -> list[Tensor]:
    return [utils.clip_grad_norm_(module.parameters(), 0.5)]


def clip_each(module: Any) -> list[Tensor]:
    kinds = (1.0, 2.0, 3.0, math.inf)
    return [
        utils.clip_grad_norm_(param, 0.01, kind)
        for param, kind in zip(module.parameters(), kinds, strict=True)
    ]


def clip_values(module: Any) -> list[Tensor]:
    utils.clip_grad_value_(module.parameters(), 0.01)
    return [utils.get_total_norm([param.grad for param in module.parameters()])]


def clip_apart(module: Any) -> list[Tensor]:
    norm = utils.get_total_norm([param.grad for param in module.parameters()], math.inf)
    utils.clip_grads_with_norm_(module.parameters(), 0.03, norm)
    return [norm, *torch._foreach_norm([param.grad for param in module.parameters()], 1)]


def by_hand(module: Any) -> list[Tensor]:
    found = []
    for number, param in enumerate(module.parameters()):
        param.grad *= 3
        param.grad.div_(torch.tensor(2.0))
        param.grad.data.add_(torch.full(param.shape, 0.25), alpha=-2)
        found.append(param.grad.norm())
        param.grad.clamp_(-0.3, 0.4).neg_()
        param.grad -= 0.125
        if number == 2:
            param.grad.copy_(torch.ones(param.shape))
        if number == 3:
            param.grad.fill_(0.5)
        found.append(torch.linalg.norm(param.grad))
    return found


@covering(
    strength=1,
    change=[clip_all, clip_each, clip_values, clip_apart, by_hand],
    options={"one pass": None, "two passes": AdamWOptions(check_finite=True)},
)
def test_what_torch_changes_is_what_the_step_takes(worlds, change, options):
    base: Any = Blocks()
    reference, told = deepcopy(base), []
    of_reference = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    ranks = [type("Rank", (), {"rank": rank}) for rank in range(3)]
    for turn in range(2):
        for part in (0, 1):
            (sum(reference(draw(rank, 2 * turn + part)) for rank in ranks) / 3).backward()
        told += change(reference)
        of_reference.step()
        of_reference.zero_grad()
    wanted = [param.detach() for param in reference.parameters()]

    def work(comm):
        for stage in STAGES:
            module, optimizer = sharded(comm, stage, base, options=options)
            norms = []
            for turn in range(2):
                for part in (0, 1):
                    with zero.no_sync(module) if turn and not part else nullcontext():
                        module(draw(comm, 2 * turn + part)).backward()
                norms += change(module)
                optimizer.step()
                module.zero_grad()
            torch.testing.assert_close(norms, told)
            torch.testing.assert_close(list(zero.full_state_dict(module).values()), wanted)
            yield_norms.append((stage, comm.rank, norms))

    yield_norms: list[Any] = []
    worlds(3).run(work)
    for stage in STAGES:
        of_stage = [norms for its, _, norms in yield_norms if its == stage]
        assert all(torch.equal(torch.stack(n), torch.stack(of_stage[0])) for n in of_stage)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_got_their_memory_in_shard_show_it_too(worlds, stage):
    """Meta tensors get memory by a swap for new tensors, which take over the parameter's class."""

    def work(comm):
        with torch.device("meta"):
            module: Any = Blocks()

        def init(part: nn.Module) -> None:
            for param in part.parameters(recurse=False):
                nn.init.ones_(param)

        zero.shard(module, stage, comm=comm, init=init, options=SMALL)
        _optimizer = momentum(module.parameters())
        module(draw(comm, 0)).backward()
        norm = utils.clip_grad_norm_(module.parameters(), 1e9)
        whole = [get_gradient(param) for param in module.parameters()]
        return norm, torch.linalg.vector_norm(
            torch.cat([each.flatten() for each in whole if each is not None])
        )

    (first, wanted), (second, _) = worlds(2).run(work)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_the_optimizer(worlds, stage):
    """The norm is the same even if the clip coefficient is applied only in the step."""
    base = new_model("narrow gpt")

    def work(comm):
        from tests.zero.models import text

        module: Any = zero.shard(deepcopy(base), stage, comm=comm)
        optimizer = AdamW(module.parameters())
        module(*text(comm, 0)).backward()
        norm = utils.clip_grad_norm_(module.parameters(), math.inf)
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.01), norm)
        norm = utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        torch.testing.assert_close(norm, torch.tensor(0.01), rtol=1e-4, atol=0)
        utils.clip_grad_value_(module.parameters(), 1e-3)
        for param in module.parameters():
            assert get_gradient(param).abs().max() <= 1e-3

    worlds(2).run(work)


REFUSED = {
    "clone": lambda grad: grad.clone(),
    "sum": lambda grad: grad.sum(),
    "abs": lambda grad: torch.abs(grad),
    "mul": lambda grad: 2 * grad,
    "is finite": lambda grad: torch.isfinite(grad).all(),
    "numpy": lambda grad: grad.numpy(),
    "float": lambda grad: float(grad),
    "tolist": lambda grad: grad.tolist(),
    "index": lambda grad: grad[0],
    "vector": lambda grad: utils.parameters_to_vector([grad]),
    "stack": lambda grad: torch.stack([grad, grad]),
    "view": lambda grad: grad.view(-1),
    "copy": lambda grad: torch.empty(24, 24).copy_(grad),
    "out": lambda grad: torch.add(torch.ones(24, 24), 1, out=grad),
    "norm of rows": lambda grad: grad.norm(dim=0),
    "nuclear norm": lambda grad: torch.linalg.norm(grad, "nuc"),
    "other factors": lambda grad: grad.mul_(torch.ones(24, 24)),
    "other operator": lambda grad: grad.sqrt_(),
    "pickle": lambda grad: pickle.dumps(grad),
    "torch.save": lambda grad: torch.save(grad, io.BytesIO()),
    "deepcopy": lambda grad: deepcopy(grad),
    "shallow copy": lambda grad: copy(grad),
    "aten": lambda grad: torch.ops.aten.sin(grad),
    "histogram": lambda grad: torch.histc(grad, 4),
}


@pytest.mark.parametrize("stage", STAGES)
def test_other_reads_name_the_way_out(worlds, stage):
    base: Any = Blocks()

    def work(comm):
        module, optimizer = sharded(comm, stage, base)
        params = list(module.parameters())
        assert all(param.grad is None for param in params)
        module(draw(comm, 0), (1,)).backward()
        assert [param.grad is None for param in params] == [True, True, False, False]
        grad = params[2].grad
        assert grad.shape == (24, 24) and grad.dtype is torch.float32 and not grad.requires_grad
        assert "blocks.1.weight" in repr(grad) and isinstance(grad, Tensor)
        assert params[2].grad is grad
        for name, read in REFUSED.items():
            with pytest.raises(ArgumentError, match=r"blocks\.1\.weight.*get_gradient") as raised:
                read(grad)
            assert "optimizer.clip_grad_norm_" in str(raised.value), name
        with pytest.raises(ArgumentError, match="another parameter"):
            params[3].grad = grad
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(UnsupportedError, match=r"use ringcomm\.optim\.GradScaler"):
            scaler.unscale_(torch.optim.SGD(params))
        optimizer.step()

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_scaled_loss_and_no_optimizer_are_refused(worlds, stage):
    base: Any = Blocks()

    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=SMALL)
        module(draw(comm, 0)).backward()
        with pytest.raises(ArgumentError, match="no optimizer was built"):
            utils.clip_grad_norm_(module.parameters(), 1.0)
        module.zero_grad()
        scaler = LossScaler()
        optimizer = AdamW(module.parameters(), loss_scaler=scaler)
        scaler.scale(module(draw(comm, 0))).backward()
        for clip in (utils.clip_grad_norm_, utils.clip_grad_value_):
            with pytest.raises(ArgumentError, match=r"scaled loss.*optimizer\.clip_grad_norm_"):
                clip(module.parameters(), 1.0)
        optimizer.step()

    worlds(2).run(work)


@covering(strength=1, stage=STAGES, world_size=[1, 2])
def test_a_hook_in_backward_sees_this_ranks_gradient_with_a_warning(worlds, world_size, stage):
    base: Any = Blocks()

    def work(comm):
        module: Any = deepcopy(base)
        seen: list[Tensor] = []

        def look(param):
            seen.append(param.grad.clone())

        module.blocks[0].bias.register_post_accumulate_grad_hook(look)
        zero.shard(module, stage, comm=comm, options=SMALL)
        for _ in range(2):
            module(draw(comm, 0)).backward()
            module.zero_grad()
        reference: Any = deepcopy(base)
        reference(draw(comm, 0)).backward()
        assert (
            all(torch.equal(each, reference.blocks[0].bias.grad) for each in seen)
            and len(seen) == 2
        )

    # Warnings belong to the process, so this counts those of all ranks.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worlds(world_size).run(work)
    said = sum("zero.on_reduced()" in str(each.message) for each in caught)
    assert said == (world_size if world_size > 1 else 0)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_hook_that_comes_too_late_is_told(worlds, stage):
    base: Any = Blocks()

    def work(comm):
        module, optimizer = sharded(comm, stage, base)
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(lambda p: p.grad.clone() and None)
        with pytest.raises(ArgumentError, match=r"before shard\(\).*on_reduced"):
            module(draw(comm, 0)).backward()
        optimizer.zero_grad()  # ends the backward

    worlds(1).run(work)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_have_updated_parameters_cannot_be_cleared(worlds, stage):
    base: Any = Blocks()
    options = AdamWOptions(update="in_backward")

    def work(comm):
        module, optimizer = sharded(comm, stage, base, options=options)
        outer = Around(module)
        with zero.no_sync(module):
            outer(draw(comm, 7)).backward()
        outer.zero_grad()
        assert all(param.grad is None for param in module.parameters())
        outer(draw(comm, 0), (1,)).backward()
        assert [param.grad is None for param in module.parameters()] == [True, True, False, False]
        weight = list(module.parameters())[2]
        for change in (
            outer.zero_grad,
            lambda: outer.zero_grad(set_to_none=False),
            lambda: weight.grad.mul_(2),
            lambda: weight.grad.norm(),
            lambda: setattr(weight, "grad", torch.ones(24, 24)),
        ):
            with pytest.raises(ArgumentError, match="in_backward"):
                change()
        optimizer.step()
        assert all(param.grad is None for param in module.parameters())
        outer.zero_grad()
        fresh, its = sharded(comm, stage, base)
        fresh(draw(comm, 0), (1,)).backward()
        its.step()
        assert_same_bits(zero.full_state_dict(module), zero.full_state_dict(fresh))

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_ordinary_where_they_leave(worlds, stage):
    """Copies, and parameters that are no longer sharded, are ordinary torch parameters."""
    base: Any = Blocks()

    def work(comm):
        module, optimizer = sharded(comm, stage, base)
        module(draw(comm, 0)).backward()
        weight = module.blocks[0].weight
        assert isinstance(weight, nn.Parameter) and type(weight).__name__ == "Parameter"
        with zero.unsharded(module):
            copied = deepcopy(weight)
            file = io.BytesIO()
            torch.save({"weight": weight}, file)
            shared = nn.Parameter(weight)
            assert type(weight.detach()) is type(module.state_dict()["blocks.0.weight"]) is Tensor
        for each in (copied, shared):
            assert isinstance(each, nn.Parameter) and each.is_leaf and each.requires_grad
            each.grad = torch.ones(24, 24)
            assert torch.equal(each.grad, torch.ones(24, 24))
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["weight"]
        assert type(loaded) is nn.Parameter and loaded.grad is None
        optimizer.zero_grad()
        zero.remove_sharding(module)
        assert all(type(param) is nn.Parameter for param in module.parameters())
        module(draw(comm, 0)).backward()
        assert type(module.blocks[0].weight.grad) is Tensor

    worlds(2).run(work)


def test_a_world_of_one_has_ordinary_gradients_below_stage_2(worlds):
    base: Any = Blocks()

    def work(comm):
        for stage in (0, 1):
            module, _ = sharded(comm, stage, base)
            module(draw(comm, 0)).backward()
            reference: Any = deepcopy(base)
            reference(draw(comm, 0)).backward()
            for param, its in zip(module.parameters(), reference.parameters(), strict=True):
                assert torch.equal(param.grad, its.grad)

    worlds(1).run(work)
