# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of shards: loaded in the same world, in other worlds, or refused."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.optim import AdamW, AdamW8bit, AdamWOptions, reshard
from tests.optim.problems import (
    SMALL_BUCKETS,
    Problem,
    TorchLion,
    assert_same_state,
    go_on,
    started,
)
from tests.support.covering import covering

Tensor = torch.Tensor
PROBLEMS = {
    "fp32": Problem(groups=({"lr": 0.1}, {"weight_decay": 0.5, "betas": (0.5, 0.75)})),
    "amsgrad": Problem(groups=({}, {"amsgrad": True})),
    "bf16": Problem(torch.bfloat16),
    "fp16": Problem(torch.float16),
    "momentum": Problem(
        torch.bfloat16,
        ({}, {"nesterov": True}),
        settings={"momentum": 0.9},
        torch_class=torch.optim.SGD,
    ),
    "Lion": Problem(torch_class=TorchLion, settings={"lr": 0.01}),
    "8 bits": Problem(torch.bfloat16, torch_class=AdamW8bit),
    "Adagrad": Problem(torch_class=torch.optim.Adagrad, sharded=True),
    "NAdam": Problem(torch_class=torch.optim.NAdam, sharded=True),
}
REMAINDER = replace(SMALL_BUCKETS, master="remainder")
STEPS = 3


def saved(comm, problem, options=SMALL_BUCKETS):
    """Saves model and optimizer with torch.save, and returns how the training would end."""
    params, optimizer = started(comm, problem, options)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    kept = [param.detach().clone() for param in params]
    whole = copy.deepcopy(optimizer.full_state_dict())
    go_on(optimizer, problem, params, STEPS, STEPS)
    return file.getvalue(), kept, params, optimizer.full_state_dict(), whole


def resumed(comm, problem, shards, kept, options=SMALL_BUCKETS):
    """Trains from a checkpoint to the same end."""
    params = problem.params()
    optimizer = problem.ours(params, comm, options)
    with torch.no_grad():
        for param, value in zip(params, kept, strict=True):
            param.copy_(value)
    if "shard" in shards[0]:
        optimizer.load_state_dict(shards if len(shards) > 1 else shards[0])
    else:
        optimizer.load_torch_state_dict(shards[0])
    go_on(optimizer, problem, params, STEPS, STEPS)
    return params, optimizer.full_state_dict(), optimizer.steps_taken.item()


def read(data: bytes) -> dict:
    return torch.load(io.BytesIO(data), weights_only=True)


@covering(
    strength=1,
    ranks=[(1, 1), (2, 2), (1, 3), (3, 2), (2, 1), (4, 3)],
    name=["fp32", "amsgrad", "bf16", "momentum", "Lion", "8 bits", "Adagrad", "NAdam"],
    options={"master": SMALL_BUCKETS, "remainder": REMAINDER},
    valid=lambda case: case.get("options") != "remainder" or case.get("name") in (None, "bf16"),
)
def test_a_shard_continues_in_its_own_world_and_all_in_any_other(worlds, ranks, name, options):
    """The whole state continues in both worlds as well."""
    problem = PROBLEMS[name]
    before, after = ranks
    runs = worlds(before).run(saved, problem, options)
    shards = [read(each[0]) for each in runs]
    _, kept, expected, state, whole = runs[0]

    def work(comm):
        mine = [shards[comm.rank]] if before == after else shards[::-1]
        return [resumed(comm, problem, given, kept, options) for given in (mine, [whole])]

    for found in worlds(after).run(work):
        assert found[0][2] == 2 * STEPS
        for params, full, _ in found:
            assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
            assert_same_state(full, state)


def test_resharding_1_3_2_1_gives_back_every_bit(worlds):
    ((data, *_),) = worlds(1).run(saved, PROBLEMS["amsgrad"])
    first = read(data)
    again: Any = first
    for world in (3, 2, 1):
        shards = reshard([again] if isinstance(again, dict) else again, world)
        assert [each["shard"]["rank"] for each in shards] == list(range(world))
        again = shards if world > 1 else shards[0]
    assert again["shard"] == first["shard"]
    assert again["param_groups"] == first["param_groups"]
    for mine, other in zip(again["state"]["buckets"], first["state"]["buckets"], strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    for name in ("step", "steps_taken", "skipped_steps"):
        assert torch.equal(again["state"][name], first["state"][name])


def test_what_reshard_cuts_is_what_the_ranks_save(worlds):
    problem = PROBLEMS["bf16"]
    one = [each[0] for each in worlds(1).run(saved, problem)]
    three = [read(each[0]) for each in worlds(3).run(saved, problem)]
    for cut, own in zip(reshard([read(one[0])], 3), three, strict=True):
        assert cut["shard"] == own["shard"]
        for mine, other in zip(cut["state"]["buckets"], own["state"]["buckets"], strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine | other)


def test_buckets_of_another_size_take_the_state_over(worlds):
    problem, others = PROBLEMS["fp32"], AdamWOptions(bucket_elems=512)
    runs = worlds(2).run(saved, problem)
    shards = [read(each[0]) for each in runs]

    def work(comm):
        return resumed(comm, problem, shards, runs[0][1], others)

    for params, full, _ in worlds(2).run(work):
        assert all(torch.equal(a, b) for a, b in zip(params, runs[0][2], strict=True))
        assert_same_state(full, runs[0][3])


def test_the_description_is_json(worlds):
    for rank, run in enumerate(worlds(2).run(saved, PROBLEMS["fp32"])):
        shard = read(run[0])["shard"]
        assert json.loads(json.dumps(shard)) == shard
        assert (shard["rank"], shard["world_size"], shard["version"]) == (rank, 2, 1)


DAMAGES = {
    "not a dict": (lambda s: [1], "expected the state of a shard"),
    "torch's": (lambda s: {"state": {}, "param_groups": []}, "call load_torch_state_dict"),
    "no shards": (lambda s: [], "expected at least one shard"),
    "no state": (lambda s: s.pop("state"), "cannot be read"),
    "version": (lambda s: s["shard"].update(version=9), "expected version 1, got 9"),
    "digest": (lambda s: s["shard"].update(digest="00"), "the file is damaged"),
    "layout": (lambda s: s["shard"]["layout"].pop("params"), "layout"),
    "bucket": (lambda s: s["state"]["buckets"].pop(), "expected 6 buckets, got 5"),
    "tensor": (
        lambda s: s["state"]["buckets"][1].pop("exp_avg"),
        r"bucket 1: exp_avg: expected torch.float32 \[1024\], got none",
    ),
    "shape": (
        lambda s: s["state"]["buckets"][1].update(exp_avg_sq=torch.zeros(5)),
        r"bucket 1: exp_avg_sq: expected torch.float32 \[1024\], got torch.float32 \(5,\)",
    ),
    "dtype": (
        lambda s: s["state"]["buckets"][0].update(exp_avg=torch.zeros(512).half()),
        "got torch.float16",
    ),
    "unknown": (lambda s: s["state"]["buckets"][0].update(odd=torch.zeros(512)), "odd"),
    "step": (lambda s: s["state"].update(step=torch.zeros(1)), "step: expected float64"),
    "groups": (lambda s: s["param_groups"].pop(), "expected 2 param groups"),
    "group size": (lambda s: s["param_groups"][0]["params"].pop(), "expected 4 parameters, got 3"),
    "lr": (lambda s: s["param_groups"][1].update(lr=float("nan")), "param group 1: lr"),
    "world": (lambda s: s["shard"].update(world_size=3), r"shard of rank 0 of 3: bucket"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_and_changes_nothing(damage):
    problem = PROBLEMS["fp32"]
    problem = replace(problem, shapes=((600,), (600,), (600,), (600,), (3,), (4,), (5,)))
    params, optimizer = started(None, problem, AdamWOptions(bucket_elems=512))
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(optimizer.full_state_dict())
    change, message = DAMAGES[damage]
    instead = change(state)
    given = instead if damage in ("not a dict", "torch's", "no shards") else state
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(given)
    assert_same_state(optimizer.full_state_dict(), before)
    assert optimizer.full_state_dict()["param_groups"] == before["param_groups"]
    assert params[0].isfinite().all()


def test_shards_that_do_not_belong_together_are_refused(worlds):
    problem = PROBLEMS["fp32"]
    shards = [read(each[0]) for each in worlds(3).run(saved, problem)]
    _, optimizer = started(None, problem)
    with pytest.raises(CheckpointError, match=r"pass the shards of all 3 ranks; missing .* \[1\]"):
        optimizer.load_state_dict([shards[0], shards[2]])
    with pytest.raises(CheckpointError, match="two shards of one rank"):
        optimizer.load_state_dict([shards[0], shards[0], shards[1], shards[2]])
    later = copy.deepcopy(shards[1])
    later["state"]["step"] += 1
    with pytest.raises(CheckpointError, match="ranks 0 and 1 have different steps"):
        optimizer.load_state_dict([shards[0], later, shards[2]])
    with pytest.raises(CheckpointError, match=r"missing .* \[1, 2\]"):
        optimizer.load_state_dict(shards[0])
    with pytest.raises(ArgumentError, match="world_size: expected an integer from 1"):
        reshard(shards, 0)


def test_a_rank_needs_its_own_shard_or_all(worlds):
    problem = PROBLEMS["fp32"]
    shards = [read(each[0]) for each in worlds(2).run(saved, problem)]

    def work(comm):
        _, optimizer = started(comm, problem)
        with pytest.raises(CheckpointError, match="expected the shard of this rank, or of all"):
            optimizer.load_state_dict(shards[1 - comm.rank])

    worlds(2).run(work)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(PROBLEMS["fp32"], shapes=((3, 5),)), "of 7 parameters, got that of 1"),
        (replace(PROBLEMS["fp32"], shapes=((5, 3), *PROBLEMS["fp32"].shapes[1:])), "parameter 0"),
        (replace(PROBLEMS["fp32"], dtype=torch.float16), "parameter 0"),
    ],
)
def test_the_state_of_another_model_is_refused(other, message):
    other = replace(other, groups=({},) if len(other.shapes) == 1 else other.groups)
    _, theirs = started(None, other)
    _, optimizer = started(None, PROBLEMS["fp32"])
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(theirs.state_dict())


def test_another_kind_of_master_is_refused():
    problem = PROBLEMS["bf16"]
    _, first = started(None, problem)
    _, second = started(None, problem, REMAINDER)
    with pytest.raises(CheckpointError, match="convert with full_state_dict"):
        second.load_state_dict(first.state_dict())


def test_schedulers_see_the_loaded_lr():
    problem = PROBLEMS["fp32"]
    _, optimizer = started(None, problem)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.7
    groups = optimizer.param_groups
    optimizer.load_state_dict(state)
    assert optimizer.param_groups is groups and groups[0]["lr"] == 0.1
    assert isinstance(optimizer, AdamW)


def test_no_rank_loads_unless_all_can():
    def body(comm):
        param = torch.nn.Parameter(torch.ones(600))
        optimizer = AdamW([param], comm=comm)
        saved = []
        for _ in range(2):
            param.grad = torch.ones(600)
            optimizer.step()
            saved.append(copy.deepcopy(optimizer.state_dict()))
        broken = copy.deepcopy(saved[0])
        if comm.rank == 1:
            del broken["state"]["step"]
        with pytest.raises(CheckpointError, match=r"rank 1 cannot load|cannot be read"):
            optimizer.load_state_dict(broken)
        with pytest.raises(CheckpointError, match="different steps"):
            optimizer.load_state_dict(saved[comm.rank])
        broken = copy.deepcopy(saved[0])
        broken["state"]["step"].fill_(-1.0)
        with pytest.raises(CheckpointError, match="step numbers from 0 on"):
            optimizer.load_state_dict(broken)
        assert optimizer.steps_taken == 2
        optimizer.load_state_dict(saved[0])
        assert optimizer.steps_taken == 1

    with ringcomm.local_world(2, timeout=20) as world:
        world.run(body)
