# SPDX-License-Identifier: Apache-2.0
"""Small models with features that break sharded training easily, and a loop that trains them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm import Communicator, zero
from ringcomm.examples.train_gpt import GPT, ModelConfig
from ringcomm.optim import AdamW, AdamWOptions, Muon, Sharded, muon_groups
from ringcomm.optim.sharded import ShardedOptimizer

T = TypeVar("T")
Tensor = torch.Tensor
State = dict[str, Tensor]
# So small that each model has several buckets, and some parameters cross chunk borders.
SMALL_BUCKET_ELEMS = 4096


class MLP(nn.Module):
    """An MLP with sizes that no world size divides, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 37), nn.Tanh(), nn.Linear(37, 37)
        )
        self.head = nn.Linear(37, 1)
        self.layers[4].weight = self.layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).square().mean()


class ConvNet(nn.Module):
    """A ConvNet with buffers that the forward changes, and weights in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.first.weight.data = self.first.weight.data.contiguous(
            memory_format=torch.channels_last
        )
        self.normal = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 1, 1).expand(-1, 3, 6, 6) * torch.linspace(0.5, 1.5, 36).view(6, 6).to(x)
        x = F.relu(self.normal(self.first(x)))
        return self.head(self.second(x).mean((2, 3))).square().mean()


class Partial(nn.Module):
    """A model with a frozen layer, a layer that is never used, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, 24).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(12, 3, bias=False), nn.Linear(3, 24, bias=False)
        self.unused = nn.Linear(5, 5)
        self.at_times = nn.Linear(24, 24)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor, turn: int = 0) -> Tensor:
        x = torch.tanh(self.frozen(x) + self.lora_b(self.lora_a(x)))
        if turn % 3 == 1:
            x = self.at_times(x)
        return self.head(x).square().mean()


class Wandering(nn.Module):
    """Layers that run in a different order at each step, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, turn: int = 0) -> Tensor:
        order = [(turn * 3 + k * (1 + turn % 3)) % 4 for k in range(5)]
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x.square().mean()


class Reaching(nn.Module):
    """Uses a child's weight without calling the child, like a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = F.linear(x, self.embed.weight)
        return F.cross_entropy(logits.view(-1, 20), tokens.roll(1, 1).reshape(-1))


def small_gpt(tied: bool = True) -> GPT:
    return GPT(ModelConfig(32, 3, 2, 16, tied))


def narrow_gpt() -> GPT:
    """Returns a GPT with a third of the elements, for tests that train it many times."""
    return GPT(ModelConfig(16, 3, 2, 16, tied=True))


def _rows(width: int) -> Callable[[torch.Generator, int], tuple[Any, ...]]:
    return lambda generator, turn: (torch.randn(4, width, generator=generator),)


def _turning(width: int) -> Callable[[torch.Generator, int], tuple[Any, ...]]:
    return lambda generator, turn: (torch.randn(4, width, generator=generator), turn)


def _text(generator: torch.Generator, turn: int) -> tuple[Any, ...]:
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _tokens(generator: torch.Generator, turn: int) -> tuple[Any, ...]:
    return (torch.randint(0, 20, (2, 7), generator=generator),)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator, int], Any]]] = {
    "mlp": (MLP, _rows(13)),
    "gpt": (small_gpt, _text),
    "narrow gpt": (narrow_gpt, _text),
    "conv": (ConvNet, _rows(3)),
    "partial": (Partial, _turning(12)),
    "wandering": (Wandering, _turning(16)),
    "reaching": (Reaching, _tokens),
}


@dataclass(frozen=True)
class Run:
    """The settings of a training run.

    Attributes:
        model: a key of MODELS.
        stage: 0 to 3.
        steps: number of optimizer steps; three cover each kind of turn that the models have.
        backwards: number of backwards per step.
        quiet: run all backwards of a step but the last under no_sync.
        clip: the norm to clip to, or None.
        precision: dtypes of the training.
        units: see ZeroOptions.
        options: further options of ZeroOptions.
        adamw: options of the optimizer.
        kind: class of the optimizer: ringcomm's, or torch's, to be sharded.
        settings: further arguments of the class.
    """

    model: str
    stage: int
    steps: int = 3
    backwards: int = 1
    quiet: bool = True
    clip: float | None = None
    precision: zero.Precision = field(default_factory=zero.Precision)
    units: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    adamw: AdamWOptions = field(default_factory=AdamWOptions)
    kind: type[torch.optim.Optimizer] = AdamW
    settings: dict[str, Any] = field(default_factory=dict)

    def optimizer(self, module: nn.Module) -> ShardedOptimizer:
        """Makes the optimizer of a sharded module."""
        settings = {"lr": 1e-2, "options": self.adamw, **self.settings}
        if issubclass(self.kind, ShardedOptimizer):
            make: Any = self.kind
            groups = muon_groups(module) if self.kind is Muon else groups_of(module)
            made = make(groups, **settings)
            assert isinstance(made, ShardedOptimizer)
            return made
        return Sharded(self.kind, groups_of(module), **settings)


def new_model(name: str) -> Any:
    """Returns the same model each time. No other thread may draw random numbers meanwhile."""
    torch.manual_seed(7)
    return MODELS[name][0]()


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Returns two param groups, as most training loops have them."""
    params = [param for param in module.parameters() if param.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def options_of(run: Run) -> zero.ZeroOptions:
    return zero.ZeroOptions(
        precision=run.precision,
        units=run.units,
        **{"bucket_elems": SMALL_BUCKET_ELEMS, "overlap": True, **run.options},
    )


def train(comm: Communicator, base: nn.Module, run: Run) -> tuple[State, list[float]]:
    """Trains a copy of ``base`` on one rank; returns its parameters and buffers, and the norms."""
    module: Any = deepcopy(base)
    zero.shard(module, run.stage, comm=comm, options=options_of(run))
    optimizer = run.optimizer(module)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    generator = torch.Generator().manual_seed(50 + comm.rank)
    norms = []
    for turn in range(run.steps):
        for number in range(run.backwards):
            batch = [
                each.to(comm.device) if isinstance(each, Tensor) else each
                for each in MODELS[run.model][1](generator, turn)
            ]
            quiet = run.quiet and number < run.backwards - 1
            with zero.no_sync(module) if quiet else nullcontext():
                module(*batch).backward()
        if run.clip is not None:
            norms.append(optimizer.clip_grad_norm_(run.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    state = zero.full_state_dict(module)
    zero.remove_sharding(module)
    return state, norms


def train_world(world: ringcomm.LocalWorld, run: Run) -> tuple[State, list[float]]:
    """Trains on all ranks, and asserts that they end with the same parameters."""
    base = new_model(run.model)
    params = {name for name, _ in base.named_parameters(remove_duplicate=False)}
    outcomes = world.run(train, base, run)
    (first, norms), *others = outcomes
    for state, their_norms in others:
        assert norms == their_norms
        assert all(torch.equal(state[name], first[name]) for name in params)
    return first, norms


def assert_same_bits(state: State, wanted: State) -> None:
    """Asserts that two states are equal bit for bit; names the first tensor that differs."""
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        if not torch.equal(tensor, wanted[name]):
            index = int((tensor != wanted[name]).flatten().nonzero()[0])
            raise AssertionError(
                f"{name}: element {index} is {tensor.flatten()[index]!r}, expected "
                f"{wanted[name].flatten()[index]!r}"
            )


def text(comm: Communicator, turn: int) -> tuple[Tensor, Tensor]:
    """Returns random tokens of a rank, and the tokens that follow each, for the GPT."""
    generator = torch.Generator().manual_seed(10 * turn + comm.rank)
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
