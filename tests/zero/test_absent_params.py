"""NOTE [Absent parameters], NOTE [Memory that others hold], and graphs of gradients at stage 3."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
ALONE = zero.ZeroOptions(bucket_elems=512, prefetch=0)

USES: dict[str, Any] = {
    "average": lambda p: torch.ones(8, 8).lerp_(p, 0.1),
    "averages": lambda p: torch._foreach_lerp_([torch.ones(8, 8)], [p], 0.1),
    "detach": lambda p: p.detach().clone(),
    "write to data": lambda p: p.data.zero_(),
    "set data": lambda p: setattr(p, "data", torch.ones(8, 8)),
    "write": lambda p: p.add_(1.0),
    "product": lambda p: torch.ones(8, 8) @ p,
    "copy": deepcopy,
    "numpy": lambda p: p.numpy(),
}


def new(kind: str = "linear") -> Any:
    torch.manual_seed(6)
    if kind == "conv":
        return nn.Sequential(nn.Conv1d(8, 8, 1), nn.Tanh(), nn.Conv1d(8, 8, 1), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


@pytest.mark.parametrize("use", USES)
def test_what_needs_values_that_are_not_here_says_gathered(worlds, use):
    def work(comm):
        module = zero.shard(deepcopy(base), 3, comm=comm, options=ALONE)
        param = next(iter(module.parameters()))
        with pytest.raises(ArgumentError, match=r"0\.weight.*gathered") as raised, torch.no_grad():
            USES[use](param)
        if use.endswith(" data"):
            assert "0.weight: data needs its values" in str(raised.value)
        assert "0.weight, not gathered" in repr(param)
        with zero.gathered(module):
            assert torch.equal(param, base[0].weight)
        assert type(next(iter(zero.unshard(module).parameters()))) is nn.Parameter

    base = new()
    worlds(1).run(work)


@pytest.mark.parametrize("where", ["gathered", "hook"])
def test_arrays_of_numpy_keep_their_values_and_training_goes_on(worlds, where):
    base = new()

    def work(comm, stage, logs):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=ALONE)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        arrays: list[Any] = []

        def log(*_: Any) -> None:
            arrays.append(module[0].weight.detach().cpu().numpy())

        if logs and where == "hook":
            module[0].register_forward_hook(log)
        for turn in range(3):
            if logs and where == "gathered":
                with zero.gathered(module):
                    log()
            generator = torch.Generator().manual_seed(turn)
            module(torch.randn(2, 8, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if logs:
            assert torch.equal(torch.from_numpy(arrays[0]), base[0].weight)
            assert not torch.equal(torch.from_numpy(arrays[1]), base[0].weight)
        return zero.full_state_dict(module)

    wanted = worlds(2).run(work, 2, False)[0]
    for found in worlds(2).run(work, 3, True):
        assert_same_bits(found, wanted)


def test_views_taken_in_gathered_stay_valid(worlds):
    def work(comm):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=ALONE)
        for _ in range(2):
            with zero.gathered(module):
                view = module[0].weight.detach()
            assert torch.equal(view, base[0].weight)

    base = new()
    worlds(1).run(work)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_products_with_a_hessian_come_again_and_again(worlds, kind):
    base = new(kind)

    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=ALONE)
        params = list(module.parameters())
        x = torch.ones(2, 8, 8)
        found: list[Tensor] = []
        for _ in range(2):
            grads = torch.autograd.grad(module(x).square().sum(), params, create_graph=True)
            for turn in range(3):
                vectors = [torch.full(param.shape, turn + 1.0) for param in params]
                found += torch.autograd.grad(grads, params, vectors, retain_graph=turn < 2)
        for _ in range(2):
            one = torch.ones(1, 8, 8)
            hessian = torch.autograd.functional.hessian(lambda x: module(x).square().sum(), one)
            found.append(hessian)
        return {str(number): tensor.detach().clone() for number, tensor in enumerate(found)}

    wanted = worlds(1).run(work, 2)[0]
    assert_same_bits(worlds(1).run(work, 3)[0], wanted)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_backward_through_a_hidden_tensor_raises(worlds, kind):
    """It neither reads memory that is gone nor gives NaN."""
    base = new(kind)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = deepcopy(base)[0]
            self.kept: tuple[Any, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x.requires_grad_())
            self.kept = (hidden * 2.0,)
            return hidden.detach() * x

    def work(comm):
        module: Any = zero.shard(nn.Sequential(Layer()), 3, comm=comm, options=ALONE)
        module(torch.ones(1, 8, 8))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module[0].kept[0].sum().backward()

    worlds(1).run(work)
