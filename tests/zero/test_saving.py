"""Checkpoints: training goes on with the same bits, at another stage and in another world."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ringcomm import Communicator, zero
from ringcomm.errors import CheckpointError
from ringcomm.optim import AdamW, AdamW8bit, AdamWOptions, Muon
from tests.support.covering import covering, in_test_all
from tests.support.ranks import run_ranks
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


@covering(strength=1, stage=STAGES, kind=[*KINDS])
def test_n_and_m_steps_are_n_saved_loaded_and_m(worlds, tmp_path, stage, kind):
    base = new_model("gpt")

    def work(comm):
        job = Job(comm, base, stage, **KINDS[kind])
        job.train("gpt", 2)
        job.save(tmp_path)
        job.train("gpt", 2)
        wanted = job.state()
        # Another model's values, which loading replaces.
        again = Job(comm, other, stage, **KINDS[kind])
        again.train("gpt", 1)
        assert again.load(tmp_path).exact
        again.train("gpt", 2)
        assert_same_bits(again.state(), wanted)
        if job.scaler is not None:
            assert job.scaler.state_dict() == again.scaler.state_dict()
            assert job.optimizer.skipped_steps.item() == 1.0
            assert again.optimizer.skipped_steps.item() == 1.0
        return True

    torch.manual_seed(99)
    other = MODELS["gpt"][0]()
    assert all(worlds(2).run(work))


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_that_are_not_dense_come_back(worlds, tmp_path, stage):
    """A transposed weight, one of channels last, and every other element of a vector."""

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
            with zero.gathered(module):
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
        ("gpt", {"kind": Muon}),
        *in_test_all(("mlp", {"kind": torch.optim.NAdam}), ("wandering", {})),
    ],
)
def test_any_stage_and_world_takes_over(worlds, tmp_path, name, settings):
    """From 3 ranks at each stage to 2 ranks at another one; bucket sizes differ, too.

    What is written tells nothing of the stage: one model is loaded at every stage from each.
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

    for saved in STAGES:
        wanted = worlds(3).run(first, saved)[0]
        for stage in STAGES if name == "partial" else [(saved + 1) % 4]:
            for found in worlds(2).run(second, stage, saved):
                assert_same_bits(found, wanted)


def test_a_parameter_has_the_moments_of_its_algorithm_whatever_its_bucket_has(worlds, tmp_path):
    """Muon's momentum and AdamW's moments, in buckets of one algorithm and of both."""
    base = new_model("gpt")

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
        small.train("gpt", 1)
        small.save(tmp_path)
        comm.barrier()
        if not comm.rank:
            forge(tmp_path / "step-00000001", lambda text: text["tensors"].pop(MATRIX))
        comm.barrier()
        before = large.state()
        with pytest.raises(CheckpointError, match=f"expected {MATRIX}, it is not there"):
            large.load(tmp_path)
        assert_same_bits(large.state(), before)
        return names[0]

    (names, _) = worlds(2).run(work)
    kinds: dict[str, set[str]] = {name: set() for name, _ in base.named_parameters()}
    for kind, name in (each.split(".", 2)[1:] for each in names if each.startswith("optim.")):
        kinds[name].add(kind)
    adamw = {"exp_avg", "exp_avg_sq"}
    assert {frozenset(each) for each in kinds.values()} == {frozenset(adamw), MOMENTUM}


def _alone(store, rank, world, root, part):
    """With random numbers in the training, which one process has to itself."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    with Communicator.from_store(store, rank, world) as comm:
        base = nn.Sequential(
            nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 1)
        )
        module: Any = zero.shard(base, 2, comm=comm)
        optimizer = AdamW(module.parameters(), lr=1e-2)

        def train(steps):
            for _ in range(steps):
                x = torch.randn(4, 6) * random.random()
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        if part == "second":
            assert zero.load(root, module, optimizer).data == ["anything", 3]
        else:
            train(2)
            zero.save(root, 2, module, optimizer, data=["anything", 3])
        train(2)
        state = {**zero.full_state_dict(module), "random": torch.tensor(random.random())}
        return {**state, "torch": torch.rand(1)}


def test_generators_and_each_ranks_buffers_come_back(tmp_path):
    wanted = run_ranks(_alone, 2, tmp_path, "first")
    found = run_ranks(_alone, 2, tmp_path, "second")
    assert not torch.equal(wanted[0]["1.running_mean"], wanted[1]["1.running_mean"])
    for mine, theirs in zip(found, wanted, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_plain_torch_loads_what_was_exported(worlds, tmp_path, stage):
    base = new_model("gpt")

    def work(comm):
        job = Job(comm, base, stage, precision=BF16)
        job.train("gpt", 1)
        job.save(tmp_path / "run")
        return zero.full_state_dict(job.module)

    wanted = worlds(3).run(work)[0]
    (file,) = zero.export_safetensors(tmp_path / "run" / "step-00000001", tmp_path / "exported")
    plain = new_model("gpt").to(torch.bfloat16)
    plain.load_state_dict(load_file(file), strict=True)
    assert_same_bits(dict(plain.state_dict()), wanted)


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


def test_moments_of_8_bits_are_taken_from_what_torch_has_loaded(worlds):
    """Its planner fills the tensors that it was given, which are copies then."""

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


def _through_torch(store, rank, world, root, stage, mine):
    """Saves with torch.distributed.checkpoint, or loads; with ringcomm's files, or torch's own."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from ringcomm.zero.checkpoint import LoadPlanner, SavePlanner, StorageReader, StorageWriter

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=world
    )
    with Communicator.from_store(store, rank, world) as comm:
        kind = {"kind": torch.optim.NAdam} if mine else {}
        job = Job(comm, new_model("conv"), stage, precision=BF16, **kind)
        if root.exists():
            state = {"train": zero.TrainState(job.module, job.optimizer)}
            if mine:
                dcp.load(state, storage_reader=StorageReader(root), planner=LoadPlanner())
            else:
                dcp.load(state, checkpoint_id=str(root))
        else:
            job.train("conv", 2)
            state = {"train": zero.TrainState(job.module, job.optimizer)}
            comm.barrier()
            if mine:
                dcp.save(state, storage_writer=StorageWriter(root), planner=SavePlanner())
            else:
                dcp.save(state, checkpoint_id=str(root))
        found = job.state()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("mine", [True, False], ids=["ringcomm's files", "torch's files"])
def test_torchs_distributed_checkpoint(tmp_path, mine):
    root = tmp_path / "saved"
    wanted = run_ranks(_through_torch, 3, root, 3, mine)[0]
    # Its import takes longer than the rest, in each process.
    for world, stage in ((2, 1), (1, 3)) if mine else ((2, 0),):
        for found in run_ranks(_through_torch, world, root, stage, mine):
            # Each rank has statistics of its own, and torch saves those of one.
            named = {name for name, _ in new_model("conv").named_buffers()}
            kept = {name: each for name, each in found.items() if name not in named}
            assert_same_bits(kept, {name: wanted[name] for name in kept})
