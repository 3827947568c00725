"""Sharded modules with their optimizer's state on a disk: the bits and the files of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcomm import Disk, DiskError, zero
from ringcomm.offload.scratch import ScratchFile
from ringcomm.optim import AdamW, AdamW8bit, AdamWOptions, Muon, tiers
from tests.memory.disk_folder import skip_unless_disk
from tests.zero.checkpoint.states import files_below
from tests.zero.job import BF16, Job
from tests.zero.models import assert_same_bits, new_model

REMAINDER = replace(BF16, master="remainder")
# By stage: what is trained there. Each kind and precision is at one stage before and one after.
RUNS: dict[int, tuple[Any, Any]] = {
    0: (AdamW, REMAINDER),
    1: (Muon, BF16),
    2: (torch.optim.Adagrad, None),
    3: (AdamW8bit, None),
}


@pytest.fixture
def on_disk(tmp_path: Path) -> AdamWOptions:
    folder = skip_unless_disk(tmp_path)
    buffer_bytes = tiers.LEAST_BUFFERS * tiers.LARGEST_ELEM_BYTES * 512
    return AdamWOptions(tier=Disk(folder, buffer_bytes, resident_bytes=16_384))


@pytest.mark.parametrize("stage", RUNS)
def test_a_checkpoint_is_that_of_memory_and_goes_on_anywhere(worlds, on_disk, tmp_path, stage):
    """Equal files; each goes on at another stage in the other tier, and in a world of two."""
    base, (kind, precision) = new_model("gpt"), RUNS[stage]
    more = {"kind": kind, **({"initial_accumulator_value": 0.5} if stage == 2 else {})}

    def first(comm):
        for name, adamw in (("memory", AdamWOptions()), ("disk", on_disk)):
            job = Job(comm, base, stage, precision, adamw, scaled=True, **more)
            job.train("gpt", 3)
            job.save(tmp_path / name)

    def second(comm):
        jobs = []
        for name, adamw in (("memory", on_disk), ("disk", AdamWOptions())):
            job = Job(comm, base, (stage + 1) % 4, precision, adamw, scaled=True, **more)
            job.load(tmp_path / name)
            job.train("gpt", 2)
            jobs.append(job.state())
        return jobs

    worlds(3).run(first)
    memory, disk = (files_below(tmp_path / name) for name in ("memory", "disk"))
    assert memory.keys() == disk.keys() and len(memory) > 3
    for name, content in memory.items():
        assert content == disk[name], name
    for jobs in worlds(2).run(second):
        assert_same_bits(*jobs)


def test_all_ranks_learn_of_an_error_at_any_read_of_a_preparation(worlds, on_disk, monkeypatch):
    """Where masters take over the parameters as they were before they were rounded."""
    base = new_model("gpt")
    read, reads = ScratchFile.read, []

    def fails(self, block, memory):
        if "rank 1" in self.what:
            reads.append(block)
            if len(reads) - 1 == failing:
                raise DiskError(f"{self.what}: an error of the test")
        return read(self, block, memory)

    monkeypatch.setattr(ScratchFile, "read", fails)

    def work(comm):
        job = Job(comm, base, 3, BF16, on_disk)
        try:
            job.optimizer.prepare()
        except DiskError as error:
            return str(error)
        return None

    failing, world = -1, worlds(2)
    assert world.run(work) == [None, None]
    for failing in range(0, len(reads), 5):
        reads.clear()
        assert all("an error of the test" in text for text in world.run(work)), failing
    assert failing > 5


def test_access_reads_and_writes_what_is_on_the_disk(worlds, on_disk):
    """Masters, moments and shards of parameters that lie in several pieces."""
    base = new_model("gpt")

    def work(comm):
        found = []
        for adamw in (AdamWOptions(), on_disk):
            job = Job(comm, base, 3, BF16, adamw)
            job.train("gpt", 2)
            param = job.module.get_parameter("blocks.0.attention.project_in.weight")
            master = zero.get_master(param)
            zero.set_master(param, master + 0.3)
            average = zero.get_state(param, "exp_avg")
            assert average is not None
            zero.set_state(param, "exp_avg", average * 2)
            with zero.writing_shards(job.module) as shards:
                for shard in shards.values():
                    shard.values.mul_(1.5)
            job.train("gpt", 1)
            found.append(job.state())
        assert_same_bits(*found)

    worlds(2).run(work)
