# SPDX-License-Identifier: Apache-2.0
"""A load checks every entry of a manifest before it changes anything."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.comm.agreement import ModelRanks, agreed_load
from ringcomm.errors import ArgumentError, CheckpointError, RingcommError
from ringcomm.json_reader import decode
from ringcomm.optim import AdamW, LossScaler, Sharded
from ringcomm.zero.checkpoint import format as manifest
from ringcomm.zero.checkpoint import state as module_state
from ringcomm.zero.checkpoint.format import MANIFEST_NAME, Piece, _crc32, check_fill, crc32_of
from ringcomm.zero.stages.sharding import engine_of


class Extra(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> Any:
        return {"history": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        pass


class Training(NamedTuple):
    """A module and its optimizer, with the state that a load may change."""

    module: nn.Module
    optimizer: Any
    scaler: LossScaler | None

    def state(self) -> list[str]:
        """Returns all state that a load changes."""
        told = zero.full_state_dict(self.module), self.optimizer.full_state_dict()
        scale = None if self.scaler is None else self.scaler.state_dict()
        random = torch.get_rng_state().tolist()
        return [*map(str, told), str((self.optimizer.steps_taken, scale, random))]

    def load(self, root: Path) -> None:
        zero.load(root, self.module, self.optimizer)


def trained(comm: Any, seed: int, other: bool = False) -> Training:
    torch.manual_seed(seed)
    module = zero.shard(Extra(8, 4), 2, comm=comm)
    params, scaler = list(module.parameters()), None if other else LossScaler()
    optimizer: Any = (
        Sharded(torch.optim.NAdam, params, lr=1e-3)
        if other
        else AdamW(params, lr=1e-3, loss_scaler=scaler)
    )
    loss = module(torch.randn(4, 8)).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Training(module, optimizer, scaler)


OPTIM = ("data", "ringcomm", "optimizer")
RANK = ("ranks", 0, "data")
GONE = object()
HEAD = {"format": "", "version": 1, "crc32": ""}
Case = tuple[tuple[Any, ...], Any]


def odd(*keys: Any, values: tuple[Any, ...]) -> list[Case]:
    """Returns one case per value: that value at this place of the manifest."""
    return [(keys, value) for value in values]


NUMBERS: tuple[Any, ...] = ("x", None, [], {}, -1, 1e400, float("nan"))
CASES: list[Case] = [
    *odd("data", "ringcomm", values=(None, [], 3, "x")),
    *odd("data", "tied", values=(None, [], 3, "x", {"a": 3})),
    *odd(*OPTIM[:2], "version", values=(2, None, [], "1")),
    *odd(*OPTIM[:2], "world_size", values=(None, "1", 2.5, [])),
    *odd(*OPTIM[:2], "params", values=(True, None, {}, [3], ["weight"])),
    *odd(*OPTIM[:2], "left_out", values=(3, {}, [[]])),
    *odd(*OPTIM, values=("x", [], {}, 0)),
    *odd(*OPTIM, "steps_taken", values=(*NUMBERS, True, 2**53, [1], GONE)),
    *odd(*OPTIM, "skipped_steps", values=(*NUMBERS, True, 2**53, [1], GONE)),
    *odd(*OPTIM, "steps", values=([], None, "x", {}, GONE)),
    *odd(*OPTIM, "steps", "weight", values=(*NUMBERS, GONE)),
    *odd(*OPTIM, "kinds", values=(1.5, None, "exp_avg", [1], ["exp_avg"], {}, GONE)),
    *odd(*OPTIM, "groups", values=(None, [], [{}, {}], {}, 3, GONE)),
    *odd(*OPTIM, "group_params", values=(None, [], [[]], [3], {}, [["x"]])),
    *odd(*OPTIM, "groups", 0, values=(3, None, [], {"$dict": [[1, 2]]})),
    *odd(*OPTIM, "groups", 0, "lr", values=(*NUMBERS, 10**400)),
    *odd(*OPTIM, "groups", 0, "weight_decay", values=NUMBERS),
    *odd(
        *(*OPTIM, "groups", 0, "betas"),
        values=([[1], 2], [0.9], 0.9, None, ["a", "b"], [0.9, 1.5], "ab"),
    ),
    *odd(*OPTIM, "groups", 0, "amsgrad", values=([], {}, "x")),
    *odd(*OPTIM, "name", values=(3, None, [], "Lion")),
    *odd(*OPTIM, "error_feedback", values=(3, [], {}, {"nodes": 1e400})),
    *odd(*OPTIM, "states", values=(3, [], {"weight": 3}, {"weight": {"numbers": 3}})),
    *odd(*OPTIM, "loss_scaler", values=(3, [], {}, None, GONE)),
    *odd(*OPTIM, "loss_scaler", "scale", values=(*NUMBERS, 0)),
    *odd(*OPTIM, "loss_scaler", "clean_steps", values=(*NUMBERS, 1e19)),
    *odd(*OPTIM, "loss_scaler", "overflows_left", values=(*NUMBERS, 1e19)),
    *odd(*OPTIM, "loss_scaler", "options", values=(3, [], {}, {"a": 1})),
    *odd(*OPTIM, "loss_scaler", "options", "hysteresis", values=("x", None, 0, [])),
    *odd(*RANK, values=(3, None, [], {}, "x")),
    *odd(*RANK, "generators", values=(3, None, [], [3, [], None], [3, "x", 1])),
    *odd(*RANK, "generators", 1, 0, values=(-1, 1.5, "x", None)),
    *odd(*RANK, "extra", values=(3, [], {}, {"x": 1}, {"": 3}, {"": {}})),
    *odd(*RANK, "extra", "", "tensors", values=(3, [3], [[[0], 3]] * 2, None)),
    *odd(*RANK, "extra", "", "value", values=(3, [], {"a": {}})),
]


def changed(sound: Any, keys: tuple[Any, ...], value: Any) -> str:
    whole = copy.deepcopy(sound)
    at = whole
    for key in keys[:-1]:
        at = at[key]
    if value is GONE:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    head = {key: whole.pop(key) for key in ("format", "version", "crc32")}
    return json.dumps({**head, "crc32": _crc32(whole), **whole})


def test_each_fact_is_checked_and_nothing_changes(tmp_path):
    with ringcomm.local_world(1) as world:
        saved = trained(world[0], 1)
        path = zero.save(tmp_path, 1, saved.module, saved.optimizer) / MANIFEST_NAME
        sound = json.loads(path.read_text())
        training = trained(world[0], 2)
        before = training.state()
        for keys, value in CASES:
            path.write_text(changed(sound, keys, value))
            with pytest.raises(CheckpointError) as raised:
                training.load(tmp_path)
            assert len(str(raised.value)) < 2000, keys
            assert training.state() == before, (keys, value)
        path.write_text(json.dumps(sound))
        training.load(tmp_path)
        assert training.state() == saved.state() != before


def test_states_of_parameters_of_torchs_classes(tmp_path):
    with ringcomm.local_world(1) as world:
        training = trained(world[0], 1, other=True)
        path = zero.save(tmp_path, 1, training.module, training.optimizer) / MANIFEST_NAME
        sound = json.loads(path.read_text())
        before = training.state()
        states = (*OPTIM, "states", "weight")
        for keys, value in (
            *odd(*states, "numbers", values=(3, [], {"x": 1.0}, None)),
            *odd(*states, "numbers", "step", values=("x", 1e400, [], 10**400)),
            *odd(*states, "tensors", values=(3, "exp_avg", ["x"], {}, [[]])),
        ):
            path.write_text(changed(sound, keys, value))
            with pytest.raises(CheckpointError):
                training.load(tmp_path)
            assert training.state() == before, (keys, value)


def test_files_have_the_tensors_that_the_manifest_says(tmp_path):
    """A file with a valid checksum but another dtype or shape is refused before any change."""
    with ringcomm.local_world(1) as world:
        saved = trained(world[0], 1)
        folder = zero.save(tmp_path, 1, saved.module, saved.optimizer)
        sound = json.loads((folder / MANIFEST_NAME).read_text())
        file = folder / "rank-00000.safetensors"
        tensors = load_file(file)
        training = trained(world[0], 2)
        before = training.state()
        key = next(name for name in tensors if name.startswith("optim.exp_avg_sq.weight"))
        for other in (tensors[key].view(torch.int32), tensors[key].view(2, -1)):
            save_file({**tensors, key: other}, file)
            told = {file.name: {"bytes": file.stat().st_size, "crc32": crc32_of(file)}}
            (folder / MANIFEST_NAME).write_text(changed(sound, ("files",), told))
            with pytest.raises(CheckpointError, match=r"exp_avg_sq\.weight@0: expected F32"):
                training.load(tmp_path)
            assert training.state() == before


def test_facts_of_a_train_state():
    with ringcomm.local_world(1) as world:
        training = trained(world[0], 1)
        state = zero.TrainState(training.module, training.optimizer)
        sound = state.state_dict()
        facts = json.loads(sound["facts"])
        before = training.state()
        for value in ("x", "[", "[]", "3", "{}", json.dumps({**facts, "optimizer": 3}), None):
            with pytest.raises(CheckpointError):
                state.load_state_dict({**sound, "facts": value})
        for keys, value in CASES:
            # JSON keys are always strings, so cases with other keys are skipped.
            if keys[: len(OPTIM)] == OPTIM and len(keys) > len(OPTIM) and "$dict" not in str(value):
                whole = json.loads(changed({"data": {"ringcomm": facts}, **HEAD}, keys, value))
                told = json.dumps(decode(whole["data"]["ringcomm"]))
                with pytest.raises(CheckpointError):
                    state.load_state_dict({**sound, "facts": told})
        with pytest.raises(CheckpointError):
            state.load_state_dict({**sound, "extra": "{"})
        assert training.state() == before


@pytest.mark.parametrize(
    ("kind", "on_others"),
    [(ArgumentError, "ArgumentError"), (OSError, "CheckpointError")],
)
def test_no_rank_waits_for_one_that_fails_in_any_way(worlds, kind, on_others):
    def load(comm: Any) -> tuple[str, bool]:
        with (
            pytest.raises((RingcommError, kind), match=r"of 2 cannot load|odd") as raised,
            agreed_load(ModelRanks(comm), "load"),
        ):
            if comm.rank:
                raise kind("odd")
        return type(raised.value).__name__, getattr(raised.value, "repeats", False)

    assert worlds(2).run(load) == [(on_others, True), (kind.__name__, False)]


def test_the_pieces_of_a_tensor_are_checked_in_time_that_grows_with_their_number(monkeypatch):
    """The check never compares pairs of boxes, even if all boxes overlap along each dimension."""
    calls = 0
    drawn = manifest._random

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return drawn(*args)

    def never(*args: Any) -> Any:
        raise AssertionError("pairs are compared")

    monkeypatch.setattr(manifest, "_random", counted)
    monkeypatch.setattr(manifest.Piece, "shared", never)
    half = 500
    # The rows of the left half, and the columns of the right half.
    boxes = [((row, 0), (1, half)) for row in range(half)]
    boxes += [((0, half + column), (half, 1)) for column in range(half)]
    pieces = [Piece(at, sizes, "file", "key") for at, sizes in boxes]
    check_fill((half, 2 * half), pieces)
    assert calls == 4 * (len(pieces) + 1)
    pieces[0] = Piece((1, 0), (1, half), "file", "key")
    with pytest.raises(ValueError, match="overlap"):
        check_fill((half, 2 * half), pieces)


def test_facts_are_those_that_are_described():
    with ringcomm.local_world(1) as world:
        training = trained(world[0], 1)
        engine = engine_of(training.module, "test")
        step = module_state.step_of(engine, training.optimizer, "test")
        told = module_state.describe(engine, step)
        facts = module_state.SavedFacts.read(told, CheckpointError)
        assert facts.optimizer is not None
        for name in ("steps", "groups", "group_params", "kinds", "loss_scaler", "steps_taken"):
            assert getattr(facts.optimizer, name) == told["optimizer"][name]
        assert (facts.params, facts.world_size, facts.converted) == (told["params"], 1, False)
