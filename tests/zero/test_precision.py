# SPDX-License-Identifier: Apache-2.0
"""Presets of mixed precision, the optimizer state that they keep, and modules that stay FP32."""

from __future__ import annotations

import re
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    AdamWOptions,
    GradScaler,
    Lion,
    LossScaler,
    Muon,
    Sharded,
)
from ringcomm.zero.stages.options import PRESETS
from tests.support import ROOT
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
Precision = zero.Precision
STAGES = [0, 3, *in_test_all(1, 2)]
PAGE = ROOT / "docs" / "precision.md"
WIDTH = 24
KEPT = ("blocks.*.norm", "blocks.*.router", "last")


class Block(nn.Module):
    """Two experts whose outputs a router mixes per token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.router.register_buffer("load", torch.tensor([0.25, -0.25]))
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = (self.router(y) + self.router.load.to(y)).softmax(-1)
        return x + weights[:, :1] * torch.tanh(self.left(y)) + weights[:, 1:] * self.right(y)


class Mixture(nn.Module):
    """FP32 and 16-bit parameters in the root and in each unit, trained and frozen."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8, bias=False))
        self.blocks[1].norm.requires_grad_(False)
        self.blocks[1].left.requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x)).float().square().mean()


@pytest.fixture
def base() -> Mixture:
    torch.manual_seed(3)
    return Mixture()


def options_of(precision: Precision) -> zero.ZeroOptions:
    return zero.ZeroOptions(precision=precision, bucket_elems=512, overlap=True)


def build(comm, base: nn.Module, stage: int, precision: Precision, **settings: Any) -> Any:
    module = zero.shard(deepcopy(base), stage, comm=comm, options=options_of(precision))
    params = [param for param in module.parameters() if param.requires_grad]
    return module, AdamW(params, lr=1e-2, **settings)


def take_steps(comm, module: Any, optimizer: AdamW, turns: range) -> list[float]:
    """Takes steps of two backwards that reduce once; returns the norms."""
    norms = []
    for turn in turns:
        generator = torch.Generator().manual_seed(10 * turn + comm.rank)
        with zero.no_sync(module):
            module(torch.randn(4, 13, generator=generator)).backward()
        module(torch.randn(4, 13, generator=generator)).backward()
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def kinds_of_state(optimizer: AdamW) -> set[tuple[str, torch.dtype]]:
    buckets = optimizer.state_dict()["state"]["buckets"]
    return {(name, tensor.dtype) for bucket in buckets for name, tensor in bucket.items()}


MOMENTS = {("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)}
MASTER_OF = {
    "fp32": set(),
    "bf16-mixed": {("master", torch.float32)},
    "bf16-remainder": {("remainder", torch.int16)},
    "bf16-pure-sr": set(),
    "fp16-scaled": {("master", torch.float32)},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_needs_nothing_else_but_a_scaler(worlds, base, name):
    precision = Precision.preset(name)

    def work(comm):
        scaler = LossScaler() if precision.scaled else None
        module, optimizer = build(comm, base, 2, precision, loss_scaler=scaler)
        loss = module(torch.ones(4, 13))
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()
        return {p.dtype for p in module.parameters()}, loss.dtype, kinds_of_state(optimizer)

    for params, loss, state in worlds(2).run(work):
        assert params == {precision.param}
        assert loss is torch.float32
        assert state == MOMENTS | MASTER_OF[name]


def test_without_masters_parameters_are_rounded_stochastically(worlds, base):
    """A small step of a constant gradient changes some elements, but neither all nor none."""

    def work(comm):
        precision = Precision.preset("bf16-pure-sr")
        module: Any = nn.Linear(64, 64, bias=False)
        zero.shard(module, 1, comm=comm, options=options_of(precision))
        with torch.no_grad():
            module.weight.fill_(1.0)
        optimizer = AdamW(module.parameters(), lr=2.0**-10, weight_decay=0.0)
        module(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return (module.weight != 1.0).float().mean().item()

    # The spacing of BF16 below 1 is 2^-8, so a step of 2^-10 changes a quarter of the elements.
    assert 0.2 < worlds(1).run(work)[0] < 0.3


@pytest.mark.parametrize(
    ("name", "chosen", "decided"),
    [
        ("bf16-mixed", {"master": "remainder"}, "fp32"),
        ("bf16-remainder", {"master": "none", "rounding": "stochastic"}, "remainder"),
        ("fp16-scaled", {"master": "remainder"}, "fp32"),
    ],
)
def test_options_of_the_optimizer_that_contradict_are_refused(worlds, base, name, chosen, decided):
    def work(comm):
        _, optimizer = build(comm, base, 1, Precision.preset(name), options=AdamWOptions(**chosen))
        with pytest.raises(ArgumentError, match=rf"master=.*here to '{decided}'.*in its Precision"):
            optimizer.prepare()

    worlds(2).run(work)


@pytest.mark.parametrize("stage", [0, 2])
def test_unscaled_steps_are_refused_where_the_loss_must_be_scaled(worlds, base, stage):
    precision = Precision.preset("fp16-scaled")

    def work(comm):
        module, optimizer = build(comm, base, stage, precision)
        module(torch.ones(4, 13)).backward()
        before = zero.full_state_dict(module)
        with pytest.raises(ArgumentError, match=r"loss_scaler=ringcomm\.optim\.LossScaler\(\)"):
            optimizer.step()
        assert_same_bits(zero.full_state_dict(module), before)
        scaler = GradScaler("cpu", init_scale=64.0)
        optimizer.zero_grad()
        scaler.scale(module(torch.ones(4, 13))).backward()
        scaler.step(optimizer)
        assert optimizer.steps_taken == 1

    worlds(2).run(work)


# ---- modules that stay FP32 ---------------------------------------------------------------------


@covering(strength=1, stage=STAGES, init_dtype=[torch.float32, torch.bfloat16])
def test_kept_modules_have_fp32_and_compute_in_it(worlds, base, stage, init_dtype):
    precision = replace(Precision.preset("bf16-mixed", keep_fp32=KEPT), buffer=torch.bfloat16)

    def work(comm):
        module, _ = build(comm, base.to(init_dtype), stage, precision)
        seen: dict[str, Any] = {}

        def look(name: str, each: nn.Module) -> None:
            each.register_forward_pre_hook(lambda _, x: seen.update({f"{name} in": x[0].dtype}))
            each.register_forward_hook(lambda _, x, y: seen.update({f"{name} out": y.dtype}))

        block = module.blocks[0]
        for name in ("norm", "router", "left"):
            look(name, getattr(block, name))
        look("inside", module.last[0])
        module(torch.ones(4, 13))
        dtypes = {name: param.dtype for name, param in module.named_parameters()}
        return seen, dtypes, block.router.load.dtype

    narrow, wide = torch.bfloat16, torch.float32
    for seen, dtypes, of_buffer in worlds(2).run(work):
        assert [seen[f"{name} in"] for name in ("norm", "router", "left")] == [wide, wide, narrow]
        assert [seen[f"{name} out"] for name in ("norm", "router", "left")] == [narrow] * 3
        # A module that stays FP32 casts neither inputs nor outputs of its children.
        assert seen["inside in"] is seen["inside out"] is wide
        assert of_buffer is wide
        for name, dtype in dtypes.items():
            kept = "norm" in name or "router" in name or name.startswith("last")
            assert dtype is (wide if kept else narrow), name


def test_a_kept_module_is_what_torch_computes_in_fp32(worlds):
    """The norm's weight trains as in one process, with FP32 gradients and no master."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.rest = nn.Linear(64, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.norm(x)).float().sum()

    torch.manual_seed(1)
    base, x = Scaled(), torch.randn(8, 64).bfloat16()
    reference = deepcopy(base)
    reference.rest.to(torch.bfloat16)
    reference.rest(reference.norm(x.float()).bfloat16()).float().sum().backward()

    def work(comm):
        module, _ = build(comm, base, 0, Precision(param=torch.bfloat16, keep_fp32=("norm",)))
        module(x).backward()
        return module.norm.weight.grad

    grad = worlds(1).run(work)[0]
    wanted = reference.norm.weight.grad
    assert wanted is not None and torch.equal(grad, wanted)
    assert not torch.equal(grad, grad.bfloat16().float())


def test_checkpoints_hold_what_stays_fp32(worlds, base, tmp_path):
    precision = Precision.preset("bf16-pure-sr", keep_fp32=KEPT)

    def save(comm):
        module, optimizer = build(comm, base, 3, precision)
        take_steps(comm, module, optimizer, range(2))
        zero.save(tmp_path, 2, module, optimizer)
        take_steps(comm, module, optimizer, range(2, 3))
        return zero.full_state_dict(module)

    def load(comm):
        module, optimizer = build(comm, base, 0, precision)
        zero.load(tmp_path, module, optimizer)
        take_steps(comm, module, optimizer, range(2, 3))
        return zero.full_state_dict(module)

    wanted = worlds(2).run(save)[0]
    assert_same_bits(worlds(2).run(load)[0], wanted)


def test_a_name_that_no_module_has_is_refused_on_all_ranks(worlds, base):
    precision = Precision(param=torch.bfloat16, keep_fp32=("blocks.*.norm", "*.gate"))

    def work(comm):
        module = deepcopy(base)
        with pytest.raises(ArgumentError, match=r"none matches '\*\.gate'.*'first', 'blocks'"):
            zero.shard(module, 1, comm=comm, options=options_of(precision))
        assert_same_bits(module.state_dict(), base.state_dict())

    worlds(2).run(work)


def test_a_parameter_of_which_one_module_stays_fp32_is_refused(worlds, base):
    base.blocks[2].norm = base.blocks[0].norm
    base.blocks[0].router.weight = base.blocks[1].router.weight
    both = Precision(param=torch.bfloat16, keep_fp32=("blocks.*.router", "blocks.0.norm"))

    def work(comm, precision):
        return zero.shard(deepcopy(base), 1, comm=comm, options=options_of(precision))

    # A module with two names is one module, and stays FP32 under both names.
    module = worlds(1).run(work, both)[0]
    assert module.blocks[2].norm.weight.dtype is torch.float32
    one = replace(both, keep_fp32=("blocks.1.router",))
    with pytest.raises(
        ArgumentError, match=r"blocks\.1\.router\.weight is also blocks\.0\.router\.weight"
    ):
        worlds(1).run(work, one)


def train_alone(called: Any, module: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    for turn in range(2):
        called(torch.full((4, 13), turn + 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(module)


@pytest.mark.parametrize("stage", [0, 3, *in_test_all(1, 2)])
def test_compiled_units_share_their_code(worlds, stage):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(3)
    depth = 5
    base, precision = (
        Mixture(depth).requires_grad_(True),
        Precision.preset("bf16-mixed", keep_fp32=KEPT),
    )
    module, optimizer = build(worlds(1)[0], base, stage, precision)
    wanted = train_alone(module, module, optimizer)
    module, optimizer = build(worlds(1)[0], base, stage, precision)
    called = torch.compile(module, backend=backend, fullgraph=stage < 3)
    assert_same_bits(train_alone(called, module, optimizer), wanted)
    # At stage 3 the graph breaks at each unit's end.
    assert len(graphs) == 1 if stage < 3 else 1 < len(graphs) < depth
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"keep_fp32": ("a",)}, "expected also param="),
        ({"param": torch.bfloat16, "keep_fp32": "norm"}, "expected a tuple of names"),
        ({"param": torch.bfloat16, "keep_fp32": (1,)}, "expected a tuple of names"),
        ({"master": "none"}, 'pass rounding="stochastic" too'),
        ({"master": "half"}, "master: expected one of fp32, remainder, none"),
        ({"param": torch.float16, "master": "remainder"}, "lower half of FP32"),
        ({"scaled": 1}, "scaled: expected True or False"),
    ],
)
def test_choices_that_make_no_sense_are_refused(choices, message):
    with pytest.raises(ArgumentError, match=message):
        Precision(**choices)


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ArgumentError, match=r"expected one of 'fp32', 'bf16-mixed'.*got 'bf16'"):
        Precision.preset("bf16")


def test_ranks_that_keep_other_modules_are_told_apart(worlds, base):
    def work(comm):
        kept = KEPT[: 2 + comm.rank]
        with pytest.raises(ringcomm.MismatchError):
            build(comm, base, 1, Precision.preset("bf16-mixed", keep_fp32=kept))

    worlds(2).run(work)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": AdamW,
    "Adam": Adam,
    "AdamW8bit": AdamW8bit,
    "SGD": SGD,
    "Lion": Lion,
    "Muon": lambda params: Muon(params, lr=0.1),
    "Adafactor": Adafactor,
    "Sharded": lambda params: Sharded(torch.optim.NAdam, params),
}


def test_presets_serve_the_optimizers_that_the_page_tells(worlds):
    table = PAGE.read_text().split("## Presets\n\n")[1].split("\n\n")[0]
    names = re.findall(r"[^| ]+", table.splitlines()[0])
    (told,) = re.findall(r"^\| optimizers \|(.+)\|$", table, re.MULTILINE)
    served = {
        name: list(OPTIMIZERS) if cell.strip() == "all" else cell.strip().split(", ")
        for name, cell in zip(names, told.split("|"), strict=True)
    }

    def work(comm):
        for name, kinds in served.items():
            options = zero.ZeroOptions(precision=Precision.preset(name))
            for kind, make in OPTIMIZERS.items():
                module = zero.shard(nn.Linear(4, 4, bias=False), 2, comm=comm, options=options)
                refused = pytest.raises(UnsupportedError, match=kind)
                with nullcontext() if kind in kinds else refused:
                    make(module.parameters()).prepare()

    assert list(served) == list(PRESETS)
    worlds(1).run(work)


def test_what_the_page_shows_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, PAGE.name, "exec"), {})


# ---- modules that call themselves ---------------------------------------------------------------


class Recursive(nn.Module):
    """A module that calls itself, and records the input dtype of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        self.seen.append(x.dtype)
        x = self.levels[depth](x)
        if depth:
            x = self(x, depth - 1)
            self.seen.append(x.dtype)
        return x


@pytest.mark.parametrize(("stage", "compiled"), [(0, False), (3, False), (0, True)])
def test_inner_calls_are_not_cast(worlds, stage, compiled):
    """Inner calls cast nothing, in a whole module or in one of another dtype than its parent."""

    def check(module: nn.Module, recursive: Any, expected: torch.dtype) -> None:
        called = torch.compile(module, backend="aot_eager") if compiled else module
        for _ in range(2):
            recursive.seen.clear()
            out = called(torch.ones(2, WIDTH))
            assert out.dtype is torch.float32
            assert recursive.seen == [expected] * 5
            out.sum().backward()
        if not compiled:
            handle = recursive.levels[0].register_forward_hook(lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                called(torch.ones(2, WIDTH))
            handle.remove()
            assert called(torch.ones(2, WIDTH)).dtype is torch.float32

    with ringcomm.local_world(1) as world:
        whole = Precision(param=torch.bfloat16, output=torch.float32)
        kept = replace(whole, keep_fp32=("1",))
        root = Recursive()
        zero.shard(root, stage, comm=world[0], options=zero.ZeroOptions(precision=whole))
        check(root, root, torch.bfloat16)
        inner = Recursive()
        around = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH))
        zero.shard(around, stage, comm=world[0], options=zero.ZeroOptions(precision=kept))
        check(around, inner, torch.float32)
