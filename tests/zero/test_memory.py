# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank at each stage, counted tensor by tensor, matches the closed formulas.

Bytes per parameter with Adam (Rajbhandari et al., SC'20, section 3): parameters p, gradients g,
optimizer state o; P parameters on N ranks:

    stage 0  (p + g + o) P
    stage 1  (p + g) P + o P / N
    stage 2  p P + (g + o) P / N
    stage 3  (p + g + o) P / N

At stages 2 and 3, g is the size r of the reduced gradient.

Rounding chunks up to tiles of 512 elements and buckets in flight take memory beyond these terms.
"""

from __future__ import annotations

import gc
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.extras.estimate import ModelElems, Training
from ringcomm.optim import AdamW, LossScaler
from ringcomm.zero.stages.buckets import ShardedBucket
from ringcomm.zero.stages.options import PRESETS
from tests.support import ROOT
from tests.support.covering import covering, in_test_all

Tensor = torch.Tensor
BUCKET_ELEMS = 1 << 16
LAYERS, WIDTH = 8, 256
PARAMS = LAYERS * WIDTH * WIDTH
WORLD = 4


@dataclass(frozen=True)
class Bytes:
    """Numbers of bytes per parameter."""

    params: int
    grads: int
    reduced: int
    state: int

    def closed_form(self, stage: int, world_size: int) -> float:
        shared = [self.params, self.grads if stage < 2 else self.reduced, self.state]
        for kind in range(stage):
            shared[2 - kind] /= world_size  # type: ignore[call-overload]
        return sum(shared) * PARAMS


class Deep(nn.Module):
    """Layers of one size, without biases, so that only rounding remains to be explained."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def storages_of(*things: Any) -> dict[int, int]:
    """Returns the bytes of each storage reachable from ``things``, by address."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack = list(things)
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, ShardedBucket):
            # Skip the peers' memory, which is mapped into this process.
            seen.update(id(each) for each in thing.peers)
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            base = thing._base
            if storage.nbytes() and not thing.is_meta:
                found[storage.data_ptr()] = storage.nbytes()
            stack += [
                each for each in (thing.grad if thing.is_leaf else None, base) if each is not None
            ]
        elif isinstance(thing, (dict, list, tuple, set, nn.Module)) or _is_ours(thing):
            stack += [each for each in gc.get_referents(thing) if not isinstance(each, type)]
    return found


def _is_ours(thing: Any) -> bool:
    module = type(thing).__module__
    return module.startswith(("ringcomm.zero", "ringcomm.optim")) or module == "collections"


def held_bytes(*things: Any) -> int:
    return sum(storages_of(*things).values())


FLOAT32 = (zero.Precision(), Bytes(4, 4, 4, 8))
BOOK = (zero.Precision(param=torch.bfloat16, reduce=torch.bfloat16), Bytes(2, 2, 2, 12))
PAGE = ROOT / "docs" / "precision.md"


def told_rows() -> dict[str, list[str]]:
    """Returns the cells of the docs' table of bytes, by preset."""
    table = PAGE.read_text().split("## Bytes\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows[1:]}


TOLD = told_rows()
KINDS = {"float32": FLOAT32, "bfloat16": BOOK} | {
    name: (zero.Precision.preset(name), Bytes(*map(int, cells[:4]))) for name, cells in TOLD.items()
}


def test_the_page_of_presets_has_what_the_closed_form_and_the_estimate_say():
    assert list(TOLD) == list(PRESETS)
    for name, cells in TOLD.items():
        precision, per_param = KINDS[name]
        options = zero.ZeroOptions(precision)
        each = Training(ModelElems(PARAMS), 1, options=options).each
        state = sum(each.state_tensors(1))
        assert (each.param, each.grad, each.reduced, state) == tuple(vars(per_param).values())
        for stage, cell in enumerate(cells[4:]):
            for world_size in (1, 2, 8):
                parts = [part.split("/N") for part in cell.split(" + ")]
                told = sum(int(a) / (world_size if rest else 1) for a, *rest in parts) * PARAMS
                assert told == per_param.closed_form(stage, world_size)
                training = Training(ModelElems(PARAMS), world_size, options=options)
                assert told == sum(training.state(stage))


def measure(
    comm, base: nn.Module, stage: int, precision: zero.Precision, **shared: Any
) -> tuple[int, int]:
    """Returns the bytes held after a backward, and the largest number seen during backward."""
    module = deepcopy(base)
    options = zero.ZeroOptions(bucket_elems=BUCKET_ELEMS, precision=precision, **shared)
    zero.shard(module, stage, comm=comm, options=options)
    scaler = LossScaler() if precision.scaled else None
    optimizer = AdamW(module.parameters(), lr=1e-3, loss_scaler=scaler)
    x = torch.ones(2, WIDTH)
    most = [0]

    def look(param: Tensor) -> None:
        most[0] = max(most[0], held_bytes(module, optimizer))

    module(x).backward()
    optimizer.step()
    # These hooks run after the engine's hook, which has taken the gradient away by then.
    handles = [param.register_post_accumulate_grad_hook(look) for param in module.parameters()]
    module(x).backward()
    rest = held_bytes(module, optimizer)
    for handle in handles:
        handle.remove()
    optimizer.step()
    return rest, max(most[0], rest)


# Stage 1 with a scaled loss holds sums between its two passes.
@covering(strength=1, stage=[0, 1, 2, 3], kind=[*KINDS])
def test_a_rank_holds_what_the_closed_form_says(worlds, stage, kind):
    precision, per_param = KINDS[kind]
    torch.manual_seed(0)
    base = Deep()
    wanted = per_param.closed_form(stage, WORLD)
    bucket = BUCKET_ELEMS * per_param.grads
    in_flight = 2 * bucket if stage >= 2 else 0
    if stage == 0:
        in_flight = PARAMS * per_param.reduced // WORLD  # the sums before they are gathered
    elif stage == 1 and precision.scaled:
        in_flight = PARAMS * per_param.reduced // WORLD  # the sums between the two passes
    # Each layer fills one bucket of whole tiles, so chunks need no padding. Tables take 64 KiB.
    for rest, most in worlds(WORLD).run(measure, base, stage, precision):
        assert wanted <= rest <= wanted + in_flight + (1 << 16)
        # Autograd holds one layer's gradient; stage 3 also has two unsharded layers.
        moving = bucket + (2 * BUCKET_ELEMS * per_param.params if stage == 3 else 0)
        assert most <= wanted + in_flight + moving + (1 << 16)


class Normed(Deep):
    """A norm before each layer; each norm's weight is a bucket of 512 elements that stays FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.tanh(layer(norm(x)))
        return x.float().square().mean()


@pytest.mark.parametrize("stage", [3, *in_test_all(2)])
def test_buffers_of_small_fp32_buckets_are_small(worlds, stage):
    precision = zero.Precision.preset("bf16-mixed", keep_fp32=("norms.*",))
    wanted = KINDS["bf16-mixed"][1].closed_form(stage, WORLD)
    # A chunk has at least one tile of 512 elements, so one rank holds a whole norm.
    norms = LAYERS * 512 * (4 + 4 + 4 + 8)
    in_flight = 2 * BUCKET_ELEMS * 2 + 2 * 512 * 4
    for rest, _ in worlds(WORLD).run(measure, Normed(), stage, precision):
        assert rest <= wanted + norms + in_flight + (1 << 16)


@pytest.mark.parametrize(
    ("stage", "shared", "closed_form"),
    [
        (2, {"state": "node"}, 4 + (4 + 8) / 2),
        (3, {"params": "world"}, (4 + 4 + 8) / 4),
        *in_test_all(
            (3, {}, 4 / 2 + (4 + 8) / 4),
            (3, {"state": "node"}, (4 + 4 + 8) / 2),
        ),
    ],
)
def test_a_rank_of_two_nodes_of_two_holds_its_share(stage, shared, closed_form):
    wanted, in_flight = closed_form * PARAMS, 2 * BUCKET_ELEMS * 4
    base = Deep()
    with ringcomm.local_world(4, nodes=[2, 2]) as world:
        work = partial(measure, base=base, stage=stage, precision=FLOAT32[0], **shared)
        for rest, most in world.run(work):
            assert wanted <= rest <= wanted + in_flight + (1 << 16)
            assert most <= wanted + in_flight + 3 * BUCKET_ELEMS * 4 + (1 << 16)


def test_frozen_parameters_are_split_and_freed_in_backward(worlds):
    """With LoRA, the frozen layers would fill the memory if they were not freed unit by unit."""

    def work(comm):
        module = deepcopy(base)
        for layer in module.layers[:-1]:
            layer.weight.requires_grad_(False)
        zero.shard(module, 3, comm=comm, options=zero.ZeroOptions(bucket_elems=BUCKET_ELEMS))
        AdamW([param for param in module.parameters() if param.requires_grad]).prepare()
        x = torch.ones(2, WIDTH, requires_grad=True)
        most = [0]
        for layer in module.layers:
            layer.register_forward_hook(lambda *_: most.append(held_bytes(module)))
        x_seen = x * 1.0
        x_seen.register_hook(lambda grad: most.append(held_bytes(module)))
        module(x_seen).backward()
        return max(most)

    # So many layers that all of them together exceed the limit.
    layers = 12
    base = Deep(layers)
    split = layers * WIDTH * WIDTH * 4 // WORLD
    unsharded = 3 * BUCKET_ELEMS * 4
    gradients = 3 * BUCKET_ELEMS * 4
    for most in worlds(WORLD).run(work):
        assert most <= split + unsharded + gradients + (1 << 16)
