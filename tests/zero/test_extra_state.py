# SPDX-License-Identifier: Apache-2.0
"""Extra state of modules is saved in checkpoints, unless it would need pickle."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.zero.checkpoint import Checkpoints
from ringcomm.zero.checkpoint.save_load import ExtraState, read_extra_state, save_extra_state

Tensor = torch.Tensor


class Counting(nn.Linear):
    """A layer whose extra state is the object that it was given."""

    def __init__(self, state: Any = None) -> None:
        super().__init__(3, 3)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if state == "refuse":
            raise ValueError("on purpose")
        self.state = state


def states(rank: int) -> list[Any]:
    """Returns the extra state of two modules."""
    big = torch.linspace(0, rank, 12, dtype=torch.bfloat16).view(3, 4)
    nested = {
        "scale": 2.0**rank,
        "$odd": [None, big, ("text", True, {3: torch.tensor(rank), "none": [None]})],
        (1, "tuple"): float("inf"),
        "empty": [torch.empty(0, 2), [], {}],
    }
    return [nested, torch.arange(rank + 1)]


def model(first: Any, second: Any) -> nn.Module:
    return nn.Sequential(Counting(first), nn.ReLU(), Counting(second), nn.Linear(3, 1))


def equal(a: Any, b: Any) -> bool:
    """True if value and type are equal, at every level."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(equal, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def found_in(module: Any) -> list[Any]:
    return [module[0].state, module[2].state]


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_gets_its_own_back_and_another_world_that_of_rank_0(worlds, tmp_path, stage):
    def save(comm):
        module = zero.shard(model(*states(comm.rank)), stage, comm=comm)
        zero.save(tmp_path, 1, module)

    def load(comm):
        module = zero.shard(model(None, 0), stage, comm=comm)
        zero.load(tmp_path, module)
        return found_in(module)

    worlds(3).run(save)
    for rank, found in enumerate(worlds(3).run(load)):
        assert equal(found, states(rank))
        assert not equal(found, states(rank + 1))
    for found in worlds(2).run(load):
        assert equal(found, states(0))


WOULD_NEED_PICKLE: list[tuple[Any, str]] = [
    ({"a": [object()]}, r"\['a'\]\[0\]: expected None, a bool.*got builtins\.object"),
    (OrderedDict(a=1), r"got collections\.OrderedDict"),
    ({torch.ones(2): 1}, r"got torch\.Tensor"),
    (torch.ones(2, dtype=torch.complex128), r"expected a dtype of .*got torch\.complex128"),
    ([torch.eye(2).to_sparse()], "expected tensors that are dense"),
    ([torch.ones(1, device="meta")], "expected tensors that are dense and have values"),
]


def test_what_would_need_pickle_is_refused_on_all_ranks(worlds, tmp_path):
    def work(comm):
        module: Any = zero.shard(model(1, 2), 1, comm=comm)
        for state, what in WOULD_NEED_PICKLE:
            module[0].state = state if comm.rank == 1 else 1
            match = rf"save on rank 1 of 2: extra state of module '0' \(Counting\).*{what}"
            with pytest.raises(UnsupportedError, match=match):
                zero.save(tmp_path, 1, module)

    worlds(2).run(work)
    assert Checkpoints(tmp_path).latest() is None


def test_parameters_that_are_extra_state_are_copied(worlds, tmp_path):
    class Own(Counting):
        def get_extra_state(self) -> Any:
            return {"weight": self.weight}

    def work(comm):
        module: Any = zero.shard(nn.Sequential(Own(), nn.Linear(3, 1)), 3, comm=comm)
        zero.save(tmp_path, 1, module)
        weight = zero.full_state_dict(module)["0.weight"]
        zero.load(tmp_path, module)
        assert torch.equal(module[0].state["weight"], weight)

    worlds(2).run(work)


def test_modules_without_it_do_not_take_it_nor_the_reverse(worlds, tmp_path):
    def work(comm):
        have = zero.shard(model(1, 2), 2, comm=comm)
        lack = zero.shard(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Counting(), nn.Linear(3, 1)))
        zero.save(tmp_path / "have", 1, have)
        zero.save(tmp_path / "lack", 1, lack)
        before = zero.full_state_dict(lack)
        with pytest.raises(CheckpointError, match=r"modules \['2'\], got .* of \['0', '2'\]"):
            zero.load(tmp_path / "have", lack)
        assert torch.equal(zero.full_state_dict(lack)["0.weight"], before["0.weight"])
        with pytest.raises(CheckpointError, match=r"modules \['0', '2'\], got .* of \['2'\]"):
            zero.load(tmp_path / "lack", have)

    worlds(1).run(work)


def test_a_module_that_does_not_take_it(worlds, tmp_path):
    def work(comm):
        module = zero.shard(model(1, "refuse" if comm.rank == 1 else 2), 1, comm=comm)
        zero.save(tmp_path, 1, module)
        own = r"module '2' \(Counting\) does not take its extra state: ValueError\('on purpose'\)"
        with pytest.raises(CheckpointError, match=own) as raised:
            zero.load(tmp_path, module)
        assert raised.value.repeats == (comm.rank == 0)

    worlds(2).run(work)


@pytest.mark.parametrize("has", [True, False])
def test_through_torchs_distributed_checkpoint(worlds, has):
    def make(*given):
        return model(*given) if has else nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

    def work(comm):
        mine, other = make(*states(2)), make(*states(0))
        saved = zero.TrainState(zero.shard(mine, 1, comm=comm)).state_dict()
        assert ("extra" in saved) == has
        zero.TrainState(zero.shard(other, 1, comm=comm)).load_state_dict(saved)
        assert not has or equal(found_in(other), states(2))
        if has:
            with pytest.raises(CheckpointError, match="extra state that is damaged"):
                zero.TrainState(other).load_state_dict({**saved, "extra": "{"})

    worlds(1).run(work)


def test_damage_is_an_error():
    root = model(*states(1))
    saved = save_extra_state(root, "test")

    def read(changed: Any, tensors: Any = saved.tensors) -> dict[str, Any]:
        state = ExtraState({**saved.data, **changed}, tensors)
        return read_extra_state(root, state, torch.device("cpu"), CheckpointError)

    assert equal(list(read({}).values()), states(1))
    own = saved.data["2"]
    damages: list[Any] = [None, [], {"value": None}, {**own, "tensors": [[[0], "cpu"]]}]
    for damaged in damages:
        with pytest.raises(CheckpointError, match="extra state of module '2': is damaged"):
            read({"2": damaged})
    with pytest.raises(CheckpointError, match="is damaged"):
        read({}, {})
    none: Any = None
    with pytest.raises(CheckpointError, match="extra state is damaged"):
        read_extra_state(root, ExtraState(none, {}), torch.device("cpu"), CheckpointError)
