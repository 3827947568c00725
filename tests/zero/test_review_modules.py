"""Modules that stage 3 could break: the memory of their parameters comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm import zero
from ringcomm.errors import UnsupportedError
from ringcomm.optim import AdamW
from ringcomm.zero.stages.absent import Absent
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
# Nothing is here by luck, because it was fetched too early.
ALONE = zero.ZeroOptions(bucket_elems=512, prefetch=0)


class InPlace(nn.Module):
    """Activations change the output of a layer, which is a view, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(2, 2, 8))


class Table(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.cut = cut

    def forward(self) -> Any:
        return {"all": self.weight[:4] if self.cut else self.weight}


class Positions(nn.Module):
    def __init__(self, cut: bool = True) -> None:
        super().__init__()
        self.table = Table(cut)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.table()["all"])


class Detached(nn.Module):
    """The weight's gradient has come before the node that reads it without one has run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight.detach()).tanh(), self.weight)


class Prefixed(nn.Module):
    """A frozen layer that a trained parameter passes through, before the input does."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, 8, 5))
        self.turn = nn.Linear(5, 5)
        self.frozen = nn.Conv1d(8, 8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.frozen(self.turn(self.frozen(self.prefix)).tanh()).mean()
        return x + self.frozen(x.unsqueeze(-1)).squeeze(-1) * scale


class Nested(nn.Module):
    """Checkpoints in a checkpoint, with changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return F.relu_(self.layers[1](F.relu_(self.layers[0](x))))

        def outer(x: Tensor) -> Tensor:
            return x + checkpoint(inner, x, use_reentrant=False)

        return self.layers[2](checkpoint(outer, x.view(2, 2, 8), use_reentrant=False))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "changed in place": InPlace,
    "returns a view": Positions,
    "returns a parameter": lambda: Positions(cut=False),
    "detached weight": lambda: nn.Sequential(nn.Linear(8, 8), Detached(), nn.Linear(8, 4)),
    "frozen prefix": lambda: nn.Sequential(nn.Linear(8, 8), Prefixed(), Prefixed()),
    "nested checkpoints": Nested,
    "attention": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
    ),
    "parametrized": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)
    ),
}


def rows(comm, turn: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * turn + comm.rank))


def train(comm, base: nn.Module, stage: int, backward: Any) -> dict[str, Tensor]:
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=ALONE)
    optimizer = AdamW([param for param in module.parameters() if param.requires_grad], lr=1e-2)
    for turn in range(3):
        optimizer.zero_grad()
        backward(module, rows(comm, turn))
        optimizer.step()
        module.eval()
        with torch.no_grad():
            assert module(rows(comm, turn)).isfinite().all()
        module.train()
    return zero.full_state_dict(module)


def plainly(module: nn.Module, x: Tensor) -> None:
    module(x).square().mean().backward()


@pytest.mark.parametrize("kind", MODULES)
def test_stage_3_trains_as_stage_1_does(worlds, kind):
    torch.manual_seed(3)
    base = MODULES[kind]()
    wanted = worlds(2).run(train, base, 1, plainly)[0]
    for found in worlds(2).run(train, base, 3, plainly):
        assert_same_bits(found, wanted)


def _gradient_of_a_gradient(module: nn.Module, x: Tensor) -> None:
    x.requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    other = module(x.detach() + 1.0)
    grad.square().sum().backward()
    other.square().mean().backward()


def _looking_meanwhile(module: nn.Module, x: Tensor) -> None:
    """Reads all parameters while backward is inside of a unit."""

    def look(grad: Tensor) -> None:
        if "_ringcomm_engine" in vars(module):
            zero.full_state_dict(module)

    def watch(_: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(look)

    # Between the layers of a unit.
    handle = module[1][1].register_forward_hook(watch)  # type: ignore[index]
    plainly(module, x)
    handle.remove()


@pytest.mark.parametrize("backward", [_gradient_of_a_gradient, _looking_meanwhile])
def test_unusual_backwards_find_their_parameters(worlds, backward):
    torch.manual_seed(3)
    base = nn.Sequential(
        nn.Linear(8, 16),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
        nn.Linear(16, 4),
    )
    wanted = worlds(2).run(train, base, 2, backward)[0]
    for found in worlds(2).run(train, base, 3, backward):
        assert_same_bits(found, wanted)


def test_a_graph_of_gradients_keeps_parameters_until_the_step(worlds):
    def work(comm):
        module: Any = zero.shard(nn.Linear(8, 8), 3, comm=comm)
        optimizer = AdamW(module.parameters())
        x = torch.ones(2, 8, requires_grad=True)
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
        assert not any(isinstance(param, Absent) for param in module._parameters.values())
        optimizer.step()
        assert all(isinstance(param, Absent) for param in module.parameters())

    worlds(1).run(work)


def test_a_weight_that_was_looked_up_outlives_the_call_of_its_module(worlds):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            weight = self.embed.weight
            return F.linear(self.embed(tokens), weight)

    def work(comm):
        module = zero.shard(deepcopy(base), 3, comm=comm)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(module(torch.arange(3)), base(torch.arange(3)))
        assert all(isinstance(param, Absent) for param in module.parameters())

    base = Both()
    worlds(1).run(work)


def test_a_returned_parameter_that_cannot_be_copied(worlds):
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Holder(self.weight[:1])

    def work(comm):
        module = zero.shard(nn.Sequential(Hidden(8, 8)), 3, comm=comm)
        with pytest.raises(UnsupportedError, match=r"module '0' returned .* inside a Holder"):
            module(torch.ones(1, 8))

    worlds(1).run(work)


def test_outputs_that_refer_to_each_other(worlds):
    class Chained(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            chain: list[Any] = [super().forward(x)]
            chain.append(chain)
            return chain

    def work(comm):
        module = zero.shard(Chained(8, 8), 3, comm=comm)
        module(torch.ones(1, 8))[0].sum().backward()
        assert all(isinstance(param, Absent) for param in module.parameters())

    worlds(1).run(work)
