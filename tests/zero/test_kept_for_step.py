# SPDX-License-Identifier: Apache-2.0
"""Stage 2 reduces its last buckets in the step: the calls it makes, and that the bits are equal."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.optim import AdamW, GradScaler
from ringcomm.zero.stages import reduce
from tests.support.covering import covering
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
LAYERS, WIDTH = 5, 64
BUCKET_ELEMS = WIDTH * WIDTH  # the elements of a layer
TURNS = 3


def _deep() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


# At import, where no other thread draws random numbers.
torch.manual_seed(3)
DEEP = _deep()


class Loop:
    """Trains a model on one rank."""

    def __init__(self, comm, stage: int, **options) -> None:
        chosen = zero.ZeroOptions(bucket_elems=BUCKET_ELEMS, **options)
        self.module: Any = zero.shard(deepcopy(DEEP), stage, comm=comm, options=chosen)
        first, *others = self.module.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 3e-2}, {"params": others}]
        self.optimizer = AdamW(groups, lr=1e-2)
        self.scaler = GradScaler("cpu", init_scale=8.0)
        self.generator = torch.Generator().manual_seed(comm.rank)
        self.norms: list[float] = []

    def loss(self) -> Tensor:
        return self.module(torch.randn(4, WIDTH, generator=self.generator)).square().mean()

    def backward(self) -> None:
        self.loss().backward()

    def quietly(self) -> None:
        with zero.no_sync(self.module):
            self.backward()

    def step(self) -> None:
        self.optimizer.step()

    def clip(self) -> None:
        self.norms.append(self.optimizer.clip_grad_norm_(1e-3).item())

    def scaled(self, clips: bool = False) -> None:
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.optimizer)
        if clips:
            self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scaled_clip(self) -> None:
        self.scaled(clips=True)

    def failing(self) -> None:
        """Runs a backward that raises halfway, on all ranks."""
        layer = self.module[2 * (LAYERS // 2) - 1]

        def fail(grad: Tensor) -> None:
            raise InterruptedError

        watch = layer.register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
        with pytest.raises(InterruptedError):
            self.backward()
        watch.remove()

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def to_zeros(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def run(self, turns: int, what: str) -> None:
        for _ in range(turns):
            for name in what.split():
                getattr(self, name)()

    def found(self) -> tuple[dict[str, Tensor], list[float]]:
        """Removes the sharding, and returns the parameters and norms."""
        params = zero.full_state_dict(self.module)
        zero.remove_sharding(self.module)
        return params, self.norms


LOOPS = [
    "backward step zero",
    "backward step step zero",
    "backward backward step zero",
    "backward step backward step zero",
    "backward to_zeros step zero",
    "backward step to_zeros",
    "backward zero backward step zero",
    "backward quietly step zero",
    "quietly backward step zero",
    "backward clip step zero",
    "backward clip clip step zero",
    "backward step clip step zero",
    "backward clip step zero backward step zero",
    "scaled zero",
    "scaled_clip zero",
    "failing backward step zero",
    "backward failing zero backward step zero",
]
# Settings that decide how a bucket kept for the step is reduced.
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "inline": {"overlap": False},
    "rings": {"algorithm": "ring"},
    "one buffer": {"reduce": "sum", "in_flight": 1},
    "16 bits": {"precision": zero.Precision(param=torch.bfloat16), "in_flight": LAYERS + 1},
}


@covering(strength=1, what=LOOPS, world_size=(2, 3, 1), way=WAYS)
def test_every_loop_ends_with_the_bits_of_stage_3_which_keeps_nothing(
    worlds, what, world_size, way
):
    def body(comm):
        found = []
        for stage in (2, 3):
            loop = Loop(comm, stage, **way)
            loop.run(TURNS, what)
            found.append(loop.found())
        return found

    for (kept, norms), (wanted, their_norms) in worlds(world_size).run(body):
        assert_same_bits(kept, wanted)
        assert norms == their_norms


def _calls(comm, loop: Loop, what: str) -> Counter[str]:
    """Counts the collectives of one turn, once they repeat from turn to turn."""
    loop.run(2, what)
    before = comm.recording().ranks[comm.rank].collectives[-1].number
    loop.run(1, what)
    found = comm.recording().ranks[comm.rank].collectives
    return Counter(each.collective for each in found if each.number > before)


@covering(
    strength=1,
    in_flight=[1, 2, 4, LAYERS + 1],
    what=["backward step zero", "backward step to_zeros"],
)
def test_as_many_buckets_as_there_are_buffers_take_one_pass(worlds, in_flight, what):
    def body(comm):
        loop = Loop(comm, 2, in_flight=in_flight)
        calls = _calls(comm, loop, what)
        zero.remove_sharding(loop.module)
        return calls

    kept = min(in_flight, LAYERS)
    for calls in worlds(2).run(body):
        assert calls["reduce_scatter_adamw_all_gather"] == kept
        assert calls["reduce_scatter_norm"] == calls["adamw_all_gather"] == LAYERS - kept


ROUNDED = zero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("backward clip step zero", {}),
        ("scaled zero", {}),
        ("backward step zero", {"precision": ROUNDED}),
    ],
    ids=["clipped", "scaled", "rounded"],
)
def test_what_must_be_known_before_the_step_takes_two(worlds, what, options):
    def body(comm):
        loop = Loop(comm, 2, **options)
        calls = _calls(comm, loop, what)
        zero.remove_sharding(loop.module)
        return calls

    for calls in worlds(2).run(body):
        assert calls["reduce_scatter_adamw_all_gather"] == 0
        if "precision" not in options:
            assert calls["reduce_scatter_norm"] == calls["adamw_all_gather"] == LAYERS


@pytest.mark.parametrize("zero_grad", ["zero", "to_zeros"])
def test_who_clips_pays_for_norms_where_gradients_are_reduced_and_nobody_else_does(
    worlds, zero_grad
):
    def body(comm):
        loop = Loop(comm, 2, in_flight=1)
        reduction = vars(loop.module)["_ringcomm_engine"].reduction
        summed = []
        for what in ("step", "clip step", "clip step", "step", "step"):
            loop.run(1, f"backward {what} {zero_grad}")
            # ``summed`` is true if the step before the latest one clipped.
            summed.append([bucket.summed for bucket in reduction.buckets[1:]])
        zero.remove_sharding(loop.module)
        return summed

    for summed in worlds(2).run(body):
        expected = [False, False, True, True, False]
        assert summed == [[each] * (LAYERS - 1) for each in expected]


@covering(
    strength=1,
    what=[
        "backward zero",
        "backward step zero",
        "backward clip step to_zeros",
        "failing zero backward",
    ],
    in_flight=[1, 2],
)
def test_buffers_of_what_was_kept_are_used_again(worlds, what, in_flight, monkeypatch):
    made = []

    def counted(*args, **kwargs):
        made.append(1)
        return ringcomm.empty(*args, **kwargs)

    def body(comm):
        loop = Loop(comm, 2, in_flight=in_flight)
        loop.run(2 * TURNS, what)
        zero.remove_sharding(loop.module)

    monkeypatch.setattr(reduce, "empty", counted)
    worlds(2).run(body)
    assert len(made) == 2 * in_flight
