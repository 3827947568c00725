"""All stages end with the same bits, and with those of training without sharding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.optim import SGD, Adafactor, AdamW, AdamW8bit, AdamWOptions, Lion, Muon, Sharded
from tests.zero.models import MODELS, Run, assert_same_bits, new_model, train_world

Tensor = torch.Tensor
BF16 = zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16)
ROUNDED = zero.Precision(
    param=torch.bfloat16, buffer=torch.bfloat16, reduce=torch.bfloat16, output=torch.float32
)


def compare_stages(worlds, world_size: int, run: Run) -> None:
    wanted = train_world(worlds(world_size), replace(run, stage=0))
    for stage in (1, 2, 3):
        state, norms = train_world(worlds(world_size), replace(run, stage=stage))
        assert_same_bits(state, wanted[0])
        assert norms == wanted[1]


# What a model is and how many ranks there are meet in the layout of buckets alone: every model in
# an even or an odd world, and every world with one of them at least.
WORLDS = {"gpt": (1, 2, 3, 4), "mlp": (2, 3)}
EACH_IN_ITS_WORLDS = [
    (name, n) for turn, name in enumerate(MODELS) for n in WORLDS.get(name, (2 + turn % 2,))
]


@pytest.mark.parametrize(("name", "world_size"), EACH_IN_ITS_WORLDS)
def test_all_stages_end_with_the_same_bits(worlds, name, world_size):
    steps = 8 if world_size == 2 and name == "gpt" else 3
    compare_stages(worlds, world_size, Run(name, 0, steps, backwards=2, clip=0.3))


@pytest.mark.parametrize("precision", [BF16, ROUNDED], ids=["sums in FP32", "sums rounded"])
@pytest.mark.parametrize("name", ["gpt", "partial", "conv"])
def test_mixed_precision_is_the_same_at_all_stages(worlds, name, precision):
    compare_stages(worlds, 2, Run(name, 0, clip=0.5, precision=precision))
    if name == "gpt" and precision is ROUNDED:
        compare_stages(worlds, 3, Run(name, 0, precision=precision))


@pytest.mark.parametrize(
    "adamw",
    [AdamWOptions(master="remainder"), AdamWOptions(master="none", rounding="stochastic", seed=3)],
    ids=["remainder", "stochastic"],
)
def test_masters_of_all_kinds_are_the_same_at_all_stages(worlds, adamw):
    compare_stages(worlds, 3, Run("gpt", 0, precision=BF16, adamw=adamw))


@pytest.mark.parametrize(
    ("world_size", "run"),
    [
        (2, Run("gpt", 0, backwards=2, kind=torch.optim.SGD, settings={"momentum": 0.9})),
        (3, Run("partial", 0, clip=0.3, kind=torch.optim.Adagrad)),
        (3, Run("wandering", 0, precision=BF16, kind=torch.optim.NAdam)),
        (2, Run("conv", 0, precision=ROUNDED, clip=0.3, kind=torch.optim.Rprop)),
    ],
    ids=["SGD", "Adagrad", "NAdam", "Rprop"],
)
def test_any_optimizer_is_the_same_at_all_stages(worlds, run, world_size):
    compare_stages(worlds, world_size, run)


@pytest.mark.parametrize("name", ["gpt", "wandering", "partial"])
def test_reducing_each_backward_is_close_to_reducing_once(worlds, name):
    """Stage 2 adds sums of ranks, stage 1 sums of backwards: two orders of the same numbers.

    Each order rounds 2 additions of each of 2 steps, so gradients differ by 4 ulps at most; Adam's
    update is at most lr (1e-2) large and turns with the gradient's sign, so two runs are at
    most 2 steps x 2 lr apart; nearly everywhere they are much closer.
    """
    run = Run(name, 2, steps=2, backwards=3, quiet=False)
    summed, _ = train_world(worlds(2), run)
    wanted, _ = train_world(worlds(2), replace(run, stage=1))
    for key, tensor in summed.items():
        if tensor.is_floating_point():
            difference = (tensor - wanted[key]).abs()
            assert difference.max() <= 4e-2
            assert difference.median() <= 1e-5
    assert_same_bits(train_world(worlds(2), replace(run, stage=3))[0], summed)


@pytest.fixture(scope="module")
def unsharded() -> dict[str, dict[str, Tensor]]:
    """By model, where two ranks end at stage 0."""
    with ringcomm.local_world(2) as world:
        return {name: train_world(world, Run(name, 0))[0] for name in ("gpt", "wandering")}


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"overlap": None},
        {"overlap": False, "prefetch": 2, "keep_gathered": True},
        {"in_flight": 1},
        {"prefetch": 0},
        {"prefetch": 3, "in_flight": 4},
        {"keep_gathered": True},
        {"bucket_elems": 1 << 20},
    ],
    ids=str,
)
def test_choices_of_overlap_change_no_bits(worlds, unsharded, options):
    for name in ("gpt", "wandering"):
        for stage in (2, 3):
            found, _ = train_world(worlds(2), Run(name, stage, options=options))
            assert_same_bits(found, unsharded[name])


@pytest.mark.parametrize("stage", [2, 3])
def test_units_can_be_chosen(worlds, unsharded, stage):
    for units in ((nn.Linear,), lambda name, module: name.endswith("mlp"), (nn.Linear, nn.Module)):
        found, _ = train_world(worlds(2), Run("gpt", stage, units=units))
        assert_same_bits(found, unsharded["gpt"])


class Fixed(nn.Module):
    """A loss whose gradients are small integers, whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(700)), nn.Parameter(torch.ones(9))])

    def forward(self, factors: Tensor) -> Tensor:
        return sum((part * factors[: part.numel()]).sum() for part in self.parts)


def _integers(rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(-3, 4, (700,), generator=generator).float()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_is_that_of_one_process_with_torch(worlds, world_size, stage):
    """Gradients are exact, so only the update rounds: one ulp a step (docs/adamw.md).

    What an ulp of one step becomes in the next ones: the update does not read the parameter but for
    its decay, which is below 1. So after n steps, n ulps of the largest magnitude passed through.
    """
    steps = 20

    def work(comm):
        module: Any = zero.shard(Fixed(), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        for turn in range(steps):
            module(_integers(comm.rank, turn)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered(module):
            found = [param.detach().clone() for param in module.parameters()]
        zero.unshard(module)
        return found

    reference = Fixed()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=False)
    for turn in range(steps):
        mean = sum(_integers(rank, turn) for rank in range(world_size)) / world_size
        reference(mean).backward()
        optimizer.step()
        optimizer.zero_grad()
    ulp = 2.0**-23 * 2  # parameters stay below 2
    for found in worlds(world_size).run(work):
        for mine, wanted in zip(found, reference.parameters(), strict=True):
            assert wanted.abs().max() < 2
            assert (mine - wanted).abs().max() <= steps * ulp


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RAdam])
def test_any_optimizer_ends_with_torchs_bits(worlds, kind, stage):
    """Gradients are small integers, so their mean over two ranks is exact."""

    def work(comm):
        module: Any = zero.shard(Fixed(), stage, comm=comm)
        optimizer = Sharded(kind, module.parameters(), lr=1e-2)
        for turn in range(8):
            module(_integers(comm.rank, turn)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = zero.full_state_dict(module)
        zero.unshard(module)
        return found

    reference = Fixed()
    optimizer = kind(reference.parameters(), lr=1e-2)
    for turn in range(8):
        reference((_integers(0, turn) + _integers(1, turn)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in worlds(2).run(work):
        assert_same_bits(found, reference.state_dict())


def test_the_models_are_what_they_claim():
    mlp = new_model("mlp")
    assert mlp.layers[4].weight is mlp.layers[2].weight
    assert not new_model("partial").frozen.weight.requires_grad
    assert new_model("conv").first.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [SGD, Lion, AdamW8bit])
def test_other_fused_rules_are_the_same_at_all_stages(worlds, kind):
    settings = {"momentum": 0.9, "nesterov": True} if kind is SGD else {}
    compare_stages(worlds, 2, Run("gpt", 0, backwards=2, clip=0.3, kind=kind, settings=settings))
    compare_stages(worlds, 3, Run("partial", 0, precision=BF16, kind=kind, settings=settings))


@pytest.mark.parametrize(
    "run",
    [
        Run("gpt", 0, backwards=2, clip=0.3, kind=Muon),
        Run("partial", 0, precision=BF16, kind=Muon),
        Run("conv", 0, precision=ROUNDED, kind=Muon),
        Run("gpt", 0, backwards=2, clip=0.3, kind=Adafactor),
        Run("partial", 0, precision=BF16, kind=Adafactor),
        Run("conv", 0, precision=ROUNDED, kind=Adafactor),
    ],
    ids=lambda run: f"{run.kind.__name__} {run.model}",
)
def test_owners_of_parameters_end_alike_at_all_stages(worlds, run):
    compare_stages(worlds, 2 if run.model == "partial" else 3, run)
