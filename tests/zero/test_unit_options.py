# SPDX-License-Identifier: Apache-2.0
"""Options of single units, and parameters that the user keeps (``ignored``)."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.optim import AdamW
from ringcomm.zero import Precision, UnitOptions, ZeroOptions
from ringcomm.zero.stages.sharding import engine_of
from tests.support import ROOT
from tests.support.covering import in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [0, 3, *in_test_all(1, 2)]
PAGE = ROOT / "docs/zero.md"


class Model(nn.Module):
    """Three blocks, and a head after them that records the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 2)
        self.shift = nn.Parameter(torch.zeros(16))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        return self.head(x + self.shift.to(x.dtype))


BASE = Model()


def units(name: str, module: nn.Module) -> bool:
    return (name.startswith("blocks.") and name.count(".") == 1) or name == "head"


def step(model: Any, optimizer: Any, turn: int = 0) -> None:
    x = torch.linspace(-1, 1, 48).view(3, 16) + turn
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


BF16 = UnitOptions(param=torch.bfloat16)
PER_UNIT = {"blocks.*": BF16, "blocks.1": UnitOptions(param=torch.float16)}


def test_precisions_of_units_are_the_same_at_all_stages(worlds):
    """A unit computes in its own precision among FP32 units, with masters; the last match wins."""
    options = ZeroOptions(units=units, precision=Precision(param=torch.float32), per_unit=PER_UNIT)

    def work(comm, stage):
        model: Any = zero.shard(deepcopy(BASE), stage, comm=comm, options=options)
        optimizer = AdamW(model.parameters(), lr=0.1)
        for turn in range(3):
            step(model, optimizer, turn)
        assert set(model.seen) == {torch.float32}
        state = zero.full_state_dict(model)
        masters = [zero.get_master(param) for _, param in model.blocks[1].named_parameters()]
        assert not torch.equal(masters[0], masters[0].half().float())
        return state

    first = worlds(2).run(work, 0)[0]
    kinds = {name: tensor.dtype for name, tensor in first.items()}
    assert kinds["blocks.0.0.weight"] is kinds["blocks.2.0.bias"] is torch.bfloat16
    assert kinds["blocks.1.0.weight"] is torch.float16
    assert kinds["head.weight"] is kinds["shift"] is torch.float32
    for stage in STAGES[1:]:
        for state in worlds(2).run(work, stage):
            assert_same_bits(state, first)


def test_units_have_the_bits_of_a_model_that_casts_by_itself(worlds):
    class Casting(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block.bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x.bfloat16()).float()

    reference: Any = deepcopy(BASE)
    for number in range(3):
        reference.blocks[number] = Casting(reference.blocks[number])
    alone = AdamW(reference.parameters(), lr=0.1, comm="alone")
    precision = Precision(param=torch.float32, master="fp32")
    options = ZeroOptions(units=units, precision=precision, per_unit={"blocks.*": BF16})
    rounded = deepcopy(BASE)
    with torch.no_grad():
        for param in rounded.blocks.parameters():
            param.copy_(param.bfloat16())

    def work(comm):
        model: Any = zero.shard(rounded, 2, comm=comm, options=options)
        optimizer = AdamW(model.parameters(), lr=0.1)
        for turn in range(2):
            step(reference, alone, turn)
            step(model, optimizer, turn)
        return zero.full_state_dict(model)

    (found,) = worlds(1).run(work)
    assert_same_bits(
        found, {n.replace(".block.", "."): t for n, t in reference.state_dict().items()}
    )


@pytest.mark.parametrize("kept", [False, True])
def test_units_that_stay_from_forward_to_backward(worlds, kept):
    """One unit resharded after forward, or kept, against the module's default."""
    chosen = {"blocks.1": UnitOptions(reshard_after_forward=kept)}
    options = ZeroOptions(units=units, reshard_after_forward=not kept, per_unit=chosen)

    def work(comm):
        model: Any = zero.shard(deepcopy(BASE), 3, comm=comm, options=options)
        loss = model(torch.ones(2, 16)).sum()
        engine: Any = engine_of(model, "test")
        here = {
            u.name: [b.is_unsharded for b in engine.unsharder.buckets_of(u)]
            for u in engine.setup.units
        }
        loss.backward()
        return {name: all(each) for name, each in here.items()}

    for here in worlds(2).run(work):
        wanted = {"blocks.0": kept, "blocks.1": not kept, "blocks.2": kept, "head": kept}
        assert {name: here[name] for name in wanted} == wanted


@pytest.mark.parametrize(("name", "ahead"), [("blocks.0", 2), ("blocks.1", 1)])
def test_units_that_are_unsharded_ahead(worlds, name, ahead):
    """A unit's prefetch sets how many units are unsharded ahead of it, else the module's does."""
    chosen = {"blocks.0": UnitOptions(prefetch=2)}
    options = ZeroOptions(units=units, overlap=True, prefetch=1, per_unit=chosen)

    def work(comm):
        model: Any = zero.shard(deepcopy(BASE), 3, comm=comm, options=options)
        with torch.no_grad():
            model(torch.ones(2, 16))
        unsharder: Any = engine_of(model, "test").unsharder
        found = []

        def look(*_: Any) -> None:
            found.append(len(unsharder._coming))

        model.get_submodule(name).register_forward_pre_hook(look)
        with torch.no_grad():
            model(torch.ones(2, 16))
        return found

    assert worlds(1).run(work) == [[ahead]]


@pytest.mark.parametrize("stage", STAGES)
def test_ignored_parameters_are_the_users_own(worlds, stage, tmp_path):
    """They are not cast, broadcast, reduced, saved or moved; a torch optimizer may step them."""
    precision = Precision(param=torch.bfloat16)
    options = ZeroOptions(units=units, precision=precision, ignored=("shift", "blocks.1.0"))

    def work(comm):
        model: Any = deepcopy(BASE)
        own = [model.shift, *model.blocks[1].parameters()]
        model.blocks[1].bfloat16()
        with torch.no_grad():
            model.shift.fill_(comm.rank)
        addresses = [param.data_ptr() for param in own]
        zero.shard(model, stage, comm=comm, options=options)
        others = [param for param in model.parameters() if all(param is not each for each in own)]
        optimizer, alone = AdamW(others, lr=0.1), torch.optim.SGD(own, lr=0.1)
        x = torch.ones(2, 16) * (1 + comm.rank)
        model(x).float().sum().backward()
        assert model.shift.grad is not None and model.shift.dtype is torch.float32
        assert model.shift.tolist() == [comm.rank] * 16
        optimizer.step()
        alone.step()
        assert [param.data_ptr() for param in own] == addresses
        zero.save(tmp_path / str(stage), 1, model, optimizer)
        kept = model.shift.clone()
        zero.load(tmp_path / str(stage), model, optimizer)
        assert torch.equal(model.shift, kept)
        state = zero.full_state_dict(model)
        assert torch.equal(state["shift"], kept)
        with pytest.raises(ArgumentError, match="is not a parameter of the sharded module"):
            AdamW(model.parameters()).prepare()
        zero.remove_sharding(model)
        assert torch.equal(model.shift, kept)
        return state["blocks.0.0.weight"], state["blocks.1.0.weight"]

    (shared, mine), (theirs, other) = worlds(2).run(work)
    assert torch.equal(shared, theirs) and not torch.equal(mine, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"per_unit": {"blocks.9": UnitOptions()}},
            r"'blocks\.9' matches none.*'blocks\.0'.*units=",
        ),
        ({"per_unit": {"blocks.0.0": UnitOptions()}}, r"expected names of units"),
        ({"ignored": ("tail",)}, r"ignored: .* 'tail' matches none.*'shift'"),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_names_of_nothing(worlds, stage, given, message):
    def work(comm):
        model = deepcopy(BASE)
        with pytest.raises(ArgumentError, match=message):
            zero.shard(model, stage, comm=comm, options=ZeroOptions(**given))

    worlds(2).run(work)


def test_what_the_page_shows_runs(worlds):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (shown,) = [block for block in blocks if "per_unit={" in block]
    found: dict[str, Any] = {}
    exec(compile(shown, PAGE.name, "exec"), found)
    model = deepcopy(BASE)
    for block in model.blocks:
        block.counts = nn.Parameter(torch.zeros(2))
    module: Any = zero.shard(model, 3, comm=worlds(1)[0], options=found["options"])
    assert module.head.weight.dtype is torch.float32
    assert module.blocks[0][0].weight.dtype is torch.bfloat16
    assert module.blocks[0].counts.dtype is torch.float32


def test_ranks_that_choose_differently(worlds):
    def work(comm):
        chosen = {"blocks.0": UnitOptions(prefetch=comm.rank)}
        with pytest.raises(MismatchError, match="per_unit"):
            zero.shard(deepcopy(BASE), 3, comm=comm, options=ZeroOptions(per_unit=chosen))

    worlds(2).run(work)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnitOptions(param=torch.int8), "param: expected float32"),
        (lambda: UnitOptions(reshard_after_forward=1), "reshard_after_forward: expected True"),  # type: ignore[arg-type]
        (lambda: UnitOptions(prefetch=-1), "prefetch: expected an integer"),
        (lambda: ZeroOptions(per_unit={"a": 1}), "expected UnitOptions by names"),  # type: ignore[dict-item]
        (lambda: ZeroOptions(per_unit={"a": BF16}), r"expected also Precision\(param=\)"),
        (lambda: ZeroOptions(ignored="shift"), "ignored: expected a tuple"),  # type: ignore[arg-type]
    ],
)
def test_choices_that_cannot_be(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
