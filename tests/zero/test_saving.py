# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: training resumes with the same bits, also at another stage and in another world."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError, CheckpointError, MismatchError
from ringcomm.optim import AdamW, AdamW8bit, AdamWOptions, Muon
from ringcomm.zero.checkpoint.save_load import save_generators
from tests.support.covering import covering, in_test_all
from tests.support.rank_pool import group_communicator
from tests.zero.checkpoint.states import forge
from tests.zero.job import BF16, Job
from tests.zero.models import MODELS, assert_same_bits, new_model

STAGES = [0, 1, 2, 3]
MOMENTUM = frozenset({"momentum_buffer"})
MATRIX = "optim.momentum_buffer.blocks.0.mlp.expand.weight"


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": BF16},
    "remainder": {"precision": BF16, "adamw": AdamWOptions(master="remainder")},
    "amsgrad": {"amsgrad": True},
    "scaled": {"scaled": True},
    "AdamW8bit": {"precision": BF16, "kind": AdamW8bit, "scaled": True},
    "SGD": {"precision": BF16, "kind": torch.optim.SGD, "momentum": 0.9},
    "NAdam": {"kind": torch.optim.NAdam, "scaled": True},
    "stochastic": {
        "precision": BF16,
        "adamw": AdamWOptions(master="none", rounding="stochastic", seed=5),
    },
}


# The optimizers and precisions with the most state; other kinds keep a subset of it.
MOST = ("remainder", "amsgrad", "AdamW8bit", "SGD", "NAdam", "stochastic")


@covering(strength=1, stage=STAGES, kind=[*MOST, *in_test_all("float32", "bfloat16", "scaled")])
def test_n_and_m_steps_are_n_saved_loaded_and_m(worlds, tmp_path, stage, kind):
    base = new_model("narrow gpt")

    def work(comm):
        job = Job(comm, base, stage, **KINDS[kind])
        job.train("narrow gpt", 2)
        job.save(tmp_path)
        job.train("narrow gpt", 2)
        wanted = job.state()
        # Starts from another model's values, which loading replaces.
        again = Job(comm, other, stage, **KINDS[kind])
        again.train("narrow gpt", 1)
        assert again.load(tmp_path).exact
        again.train("narrow gpt", 2)
        assert_same_bits(again.state(), wanted)
        if job.scaler is not None:
            assert job.scaler.state_dict() == again.scaler.state_dict()
            assert job.optimizer.skipped_steps.item() == 1.0
            assert again.optimizer.skipped_steps.item() == 1.0
        return True

    torch.manual_seed(99)
    other = MODELS["narrow gpt"][0]()
    assert all(worlds(2).run(work))


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_that_are_not_dense_come_back(worlds, tmp_path, stage):
    """A transposed weight, one in channels_last format, and every other element of a vector."""

    def model(value: float) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 3, 2))
        module[0].weight = nn.Parameter(torch.empty(4, 4).t(), requires_grad=False)
        module[1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module[1].weight.requires_grad_(False)
        module[1].bias = nn.Parameter(torch.empty(6)[::2], requires_grad=False)
        for param in module.parameters():
            with torch.no_grad():
                param.copy_(torch.arange(param.numel()).view(param.shape) + value)
        return module

    def work(comm):
        saved, other = (zero.shard(model(value), stage=stage, comm=comm) for value in (1, 50))
        zero.save(tmp_path, 1, saved)
        zero.load(tmp_path, other)
        for module in (saved, other):
            with zero.unsharded(module):
                got = [param.detach().clone() for param in module.parameters()]
            wanted = [param.detach() for param in model(1).parameters()]
            assert all(map(torch.equal, got, wanted))
        return True

    assert all(worlds(2).run(work))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("partial", {}),
        ("conv", {}),
        ("mlp", {"kind": AdamW8bit}),
        ("narrow gpt", {"kind": Muon}),
        *in_test_all(("mlp", {"kind": torch.optim.NAdam}), ("wandering", {})),
    ],
)
def test_any_stage_and_world_takes_over(worlds, tmp_path, name, settings):
    """Saved by 3 ranks, loaded by 2 ranks at another stage and with other bucket sizes.

    The files do not depend on the stage: a model saved at one stage loads at every stage.
    """
    base = new_model(name)

    def first(comm, stage):
        job = Job(comm, base, stage, **settings)
        job.train(name, 2)
        job.save(tmp_path / str(stage))
        return job.state()

    def second(comm, stage, saved):
        job = Job(comm, base, stage, bucket_elems=1024, **settings)
        loaded = job.load(tmp_path / str(saved))
        assert not loaded.exact
        return job.state()

    for saved in (0, 3):
        wanted = worlds(3).run(first, saved)[0]
        for stage in STAGES if name == "partial" else [(saved + 2) % 4]:
            for found in worlds(2).run(second, stage, saved):
                assert_same_bits(found, wanted)


def test_a_parameter_has_the_moments_of_its_algorithm_whatever_its_bucket_has(worlds, tmp_path):
    """Muon's momentum and AdamW's moments, in buckets of one algorithm and of both."""
    base = new_model("narrow gpt")

    def work(comm):
        small, large = (
            Job(
                comm,
                base,
                3,
                kind=Muon,
                bucket_elems=elems,
                zero_options={"units": lambda *_: False},
            )
            for elems in (512, 1 << 20)
        )
        jobs = (large, small)
        names = [set(zero.TrainState(job.module, job.optimizer).state_dict()) for job in jobs]
        assert names[0] == names[1]
        small.train("narrow gpt", 1)
        small.save(tmp_path)
        comm.barrier()
        if not comm.rank:
            forge(tmp_path / "step-00000001", lambda text: text["tensors"].pop(MATRIX))
        comm.barrier()
        before = large.state()
        with pytest.raises(CheckpointError, match=f"expected {MATRIX}, but it is not there"):
            large.load(tmp_path)
        assert_same_bits(large.state(), before)
        return names[0]

    (names, _) = worlds(2).run(work)
    kinds: dict[str, set[str]] = {name: set() for name, _ in base.named_parameters()}
    for kind, name in (each.split(".", 2)[1:] for each in names if each.startswith("optim.")):
        kinds[name].add(kind)
    adamw = {"exp_avg", "exp_avg_sq"}
    assert {frozenset(each) for each in kinds.values()} == {frozenset(adamw), MOMENTUM}


def alone(root, rank, world):
    """Checks that a load restores random generators, in a process that shares them with none."""
    torch.manual_seed(rank)
    random.seed(rank)
    with group_communicator(rank, world) as comm:

        def made():
            base = nn.Sequential(
                nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 1)
            )
            module: Any = zero.shard(base, 2, comm=comm)
            return module, AdamW(module.parameters(), lr=1e-2)

        def train(module, optimizer):
            for _ in range(2):
                x = torch.randn(4, 6) * random.random()
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = {**zero.full_state_dict(module), "random": torch.tensor(random.random())}
            return {**state, "torch": torch.rand(1)}

        saved = made()
        train(*saved)
        zero.save(root, 2, *saved, data=["anything", 3])
        wanted = train(*saved)
        means = [torch.empty(20) for _ in range(world)]
        dist.all_gather(means, wanted["1.running_mean"])
        assert not torch.equal(*means)
        loading = made()
        assert zero.load(root, *loading).data == ["anything", 3]
        assert_same_bits(train(*loading), wanted)


def test_generators_and_each_ranks_buffers_come_back(rank_pools, tmp_path):
    rank_pools(2).run(partial(alone, tmp_path), "gloo")


def test_a_module_alone(worlds, tmp_path):
    base = new_model("conv")

    def work(comm):
        module = zero.shard(deepcopy(base), 3, comm=comm)
        path = zero.save(tmp_path, 0, module)
        assert path == tmp_path / "step-00000000"
        optimizer = AdamW(module.parameters())
        with pytest.raises(CheckpointError, match="saved without an optimizer"):
            zero.load(tmp_path, module, optimizer)
        assert zero.load(tmp_path, module).data is None
        return zero.full_state_dict(module)

    assert_same_bits(worlds(2).run(work)[1], dict(base.state_dict()))


def test_8_bit_moments_are_taken_from_what_torch_has_loaded(worlds):
    """torch's planner may copy the given tensors and fill the copies; the values must arrive."""

    def work(comm):
        jobs = [Job(comm, new_model("mlp"), 3, kind=AdamW8bit) for _ in range(2)]
        jobs[0].train("mlp", 2)
        saved, mine = (zero.TrainState(job.module, job.optimizer) for job in jobs)
        given, state = saved.state_dict(), mine.state_dict()
        for name, each in state.items():
            if name == "facts":
                continue
            there = getattr(each, "local", each)
            there.copy_(getattr(given[name], "local", given[name]))
        mine.load_state_dict({**state, "facts": given["facts"]})
        assert_same_bits(jobs[1].state(), jobs[0].state())
        for job in jobs:
            job.turn = 2
            job.train("mlp", 1)
        assert_same_bits(jobs[1].state(), jobs[0].state())
        return True

    assert all(worlds(2).run(work))


def through_torch(root, wanted_file, stage, mine, rank, world):
    """Saves or loads with torch.distributed.checkpoint, in ringcomm's file format or torch's."""
    import torch.distributed.checkpoint as dcp

    from ringcomm.zero.checkpoint import LoadPlanner, SavePlanner, StorageReader, StorageWriter

    with group_communicator(rank, world) as comm:
        kind = {"kind": torch.optim.NAdam} if mine else {}
        job = Job(comm, new_model("conv"), stage, precision=BF16, **kind)
        reading: dict[str, Any] = {"checkpoint_id": str(root)}
        writing: dict[str, Any] = {"checkpoint_id": str(root)}
        if mine:
            reading = {"storage_reader": StorageReader(root), "planner": LoadPlanner()}
            writing = {"storage_writer": StorageWriter(root), "planner": SavePlanner()}
        loads = wanted_file.exists()
        comm.barrier()
        if not loads:
            job.train("conv", 2)
            state = {"train": zero.TrainState(job.module, job.optimizer)}
            dcp.save(state, **writing)
            found = job.state()
            if rank == 0:
                torch.save(found, wanted_file)
            return
        dcp.load({"train": zero.TrainState(job.module, job.optimizer)}, **reading)
        # Each rank has its own batch statistics, but torch saves only one rank's.
        named = {name for name, _ in new_model("conv").named_buffers()}
        found, wanted = job.state(), torch.load(wanted_file)
        kept = {name: each for name, each in found.items() if name not in named}
        assert_same_bits(kept, {name: wanted[name] for name in kept})


@pytest.mark.parametrize("mine", [True, False], ids=["ringcomm's files", "torch's files"])
def test_torchs_distributed_checkpoint(rank_pools, tmp_path, mine):
    paths = tmp_path / "saved", tmp_path / "wanted"
    for world, stage in ((3, 3), (2, 1 if mine else 0)):
        rank_pools(world).run(partial(through_torch, *paths, stage, mine), "gloo")


# ---- checkpoints that are damaged, of another model, or incomplete -------------------------------


def test_checkpoints_of_other_models_change_nothing(worlds, tmp_path):
    def work(comm):
        module: Any = zero.shard(nn.Linear(4, 3), 3, comm=comm)
        optimizer = AdamW(module.parameters())
        zero.save(tmp_path, 1, module, optimizer)
        cases = [
            (nn.Linear(4, 3, bias=False), "parameter 1 is 'bias', and the module's is missing"),
            (nn.Linear(4, 5), r"model\.weight: expected .*\(5, 4\).*got .*\(3, 4\)"),
            (nn.Linear(4, 3).bfloat16(), r"model\.weight: expected torch\.bfloat16.*float32"),
            (nn.Sequential(nn.Linear(4, 3)), r"parameter 0 is 'weight', and the module's is '0\."),
        ]
        for other, text in cases:
            before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
            sharded = zero.shard(other, 1, comm=comm)
            with pytest.raises(CheckpointError, match=text):
                zero.load(tmp_path, sharded, AdamW(sharded.parameters()))
            if comm.rank == 0:
                assert_same_bits(zero.full_state_dict(sharded), before)
            comm.barrier()
        grouped = AdamW([{"params": [module.weight]}, {"params": [module.bias]}])
        del optimizer
        with pytest.raises(CheckpointError, match="expected the param groups"):
            zero.load(tmp_path, module, grouped)

    worlds(2).run(work)


def test_checkpoints_of_other_optimizers_change_nothing(worlds, tmp_path):
    kinds = {"AdamW": None, "torch.optim.nadam.NAdam": torch.optim.NAdam}
    base = new_model("mlp")

    def work(comm):
        for saved, kind in kinds.items():
            job = Job(comm, base, 2, kind=kind)
            job.train("mlp", 1)
            job.save(tmp_path / saved)
        for saved, (name, kind) in zip(reversed(kinds), kinds.items(), strict=True):
            job = Job(comm, base, 1, kind=kind)
            job.train("mlp", 1)
            before = job.state()
            with pytest.raises(CheckpointError, match=f"state of {name}, got that of {saved}"):
                job.load(tmp_path / saved)
            assert_same_bits(job.state(), before)

    worlds(2).run(work)


def test_what_cannot_be_saved(worlds, tmp_path):
    def work(comm):
        module = zero.shard(nn.Linear(4, 3), 3, comm=comm)
        other = zero.shard(nn.Linear(4, 3), 3, comm=comm)
        with pytest.raises(ArgumentError, match="built on the sharded module's parameters"):
            zero.save(tmp_path, 1, module, AdamW(other.parameters()))
        with pytest.raises(ArgumentError, match="was not sharded"):
            zero.save(tmp_path, 1, nn.Linear(2, 2))
        with pytest.raises(MismatchError, match="Step is 5 on rank 0 and 6 on rank 1"):
            zero.save(tmp_path, 5 + comm.rank, module)
        with pytest.raises(CheckpointError, match="found none"):
            zero.load(tmp_path, module)
        zero.save(tmp_path, 7, module)
        with pytest.raises(ArgumentError, match="after 7"):
            zero.save(tmp_path, 7, module)

    worlds(2).run(work)


def test_generators_that_cannot_be_restored_stop_all_ranks_before_anything_changes(
    worlds, tmp_path, monkeypatch
):
    base = new_model("mlp")

    def damaged(device):
        tensors, python = save_generators(device)
        return {**tensors, "rng.cpu": tensors["rng.cpu"][:7]}, python

    def work(comm):
        job = Job(comm, base, 3)
        job.train("mlp", 1)
        job.save(tmp_path)
        job.train("mlp", 1)
        before = job.state()
        with pytest.raises(CheckpointError, match="random generators: cannot be restored"):
            job.load(tmp_path)
        assert_same_bits(job.state(), before)

    monkeypatch.setattr("ringcomm.zero.checkpoint.save_load.save_generators", damaged)
    worlds(2).run(work)
