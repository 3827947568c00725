"""Checkpoints that are damaged, of another model, or half-written."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import Communicator, zero
from ringcomm.errors import ArgumentError, CheckpointError, MismatchError
from ringcomm.optim import AdamW
from ringcomm.zero.checkpoint.save_load import save_generators
from tests.support.ranks import Ranks, run_ranks
from tests.zero.job import Job
from tests.zero.models import assert_same_bits, new_model


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
        with pytest.raises(MismatchError, match="rank 0 saves step 5, rank 1 step 6"):
            zero.save(tmp_path, 5 + comm.rank, module)
        with pytest.raises(CheckpointError, match="found none"):
            zero.load(tmp_path, module)
        zero.save(tmp_path, 7, module)
        with pytest.raises((ArgumentError, CheckpointError), match="after 7"):
            zero.save(tmp_path, 7, module)

    worlds(2).run(work)


@pytest.mark.parametrize("damage", ["bits", "length", "gone", "manifest"])
def test_a_damaged_checkpoint_is_refused_on_all_ranks(worlds, tmp_path, damage):
    base = new_model("mlp")

    def work(comm):
        job = Job(comm, base, 3)
        job.train("mlp", 1)
        job.save(tmp_path)
        job.train("mlp", 1)
        before = job.state()
        comm.barrier()
        if comm.rank == 0:
            _damage(tmp_path / "step-00000001", damage)
        comm.barrier()
        with pytest.raises(CheckpointError):
            job.load(tmp_path)
        assert_same_bits(job.state(), before)
        job.train("mlp", 1)  # nothing is lost
        job.save(tmp_path)
        assert job.load(tmp_path).step == 3

    worlds(2).run(work)


def _damage(folder, kind):
    file = folder / ("checkpoint.json" if kind == "manifest" else "rank-00001.safetensors")
    data = bytearray(file.read_bytes())
    if kind == "gone":
        file.unlink()
        return
    if kind == "length":
        del data[-100:]
    else:
        data[-50] ^= 4
    file.write_bytes(data)


def _save_for_ever(store, rank, world, root):
    torch.set_num_threads(1)
    with Communicator.from_store(store, rank, world) as comm:
        job = Job(comm, new_model("mlp"), 3)
        while True:
            job.train("mlp", 1)
            job.save(root)


def _load_after(store, rank, world, root):
    torch.set_num_threads(1)
    with Communicator.from_store(store, rank, world) as comm:
        job = Job(comm, new_model("mlp"), 1)
        step = job.load(root).step
        reference = Job(comm, new_model("mlp"), 1)
        reference.train("mlp", step)
        assert_same_bits(job.state(), reference.state())
        return step


def test_killed_while_it_saves_the_last_checkpoint_loads(tmp_path):
    rng = random.Random(3)
    last = 0
    for attempt in range(2):
        root = tmp_path / str(attempt)
        with Ranks(_save_for_ever, 2, root) as ranks:
            deadline = time.monotonic() + 60
            while len(list(root.glob("step-*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.random() * 0.1)
            for rank in range(2):
                ranks.signal(rank, signal.SIGKILL)
        last = run_ranks(_load_after, 2, root)[0]
        assert last >= 1


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
