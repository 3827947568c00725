"""Parameters on a disk at stage 3: the bits of memory, constant buffers, and a disk that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcomm import Disk, zero
from ringcomm.optim import Adafactor, AdamW, AdamW8bit, AdamWOptions, Muon, tiers
from tests.memory.disk_folder import skip_unless_disk
from tests.zero.checkpoint.states import files_below
from tests.zero.job import BF16, Job
from tests.zero.models import assert_same_bits, new_model

REMAINDER = replace(BF16, master="remainder")
NO_MASTER = replace(BF16, master="none", rounding="stochastic")
# Kinds of optimizers and precisions; in turn with their state in memory and on a disk.
RUNS: dict[str, tuple[Any, Any, bool]] = {
    "AdamW": (AdamW, None, False),
    "AdamW, all on a disk": (AdamW, None, True),
    "AdamW, masters": (AdamW, BF16, False),
    "AdamW, masters, all on a disk": (AdamW, BF16, True),
    "AdamW, remainders, all on a disk": (AdamW, REMAINDER, True),
    "AdamW, without masters": (AdamW, NO_MASTER, False),
    "AdamW8bit": (AdamW8bit, BF16, False),
    "Muon": (Muon, None, False),
    "Muon, masters, all on a disk": (Muon, BF16, True),
    "Adafactor": (Adafactor, None, False),
    "Adafactor, masters, all on a disk": (Adafactor, BF16, True),
    "Adagrad, all on a disk": (torch.optim.Adagrad, None, True),
    "Adagrad, masters": (torch.optim.Adagrad, BF16, False),
}


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """Buffers of a few chunks of the tests' buckets."""
    return Disk(skip_unless_disk(tmp_path), buffer_bytes=24 << 10, resident_bytes=12 << 10)


def job_of(comm: Any, base: Any, run: tuple[Any, Any, bool], tier: Disk | None) -> Job:
    kind, precision, state_too = run
    small = tiers.LEAST_BUFFERS * tiers.LARGEST_ELEM_BYTES * 512
    state = None if tier is None or not state_too else Disk(tier.path, small)
    options = {"tier": tier}
    return Job(
        comm,
        base,
        3,
        precision,
        AdamWOptions(tier=state),
        scaled=True,
        kind=kind,
        zero_options=options,
    )


@pytest.mark.parametrize("name", RUNS)
def test_bits_and_files_are_those_of_memory(worlds, disk, tmp_path, name):
    """With clipping and a skipped step; each checkpoint goes on in the other place."""
    base, run = new_model("gpt"), RUNS[name]
    world = 1 + list(RUNS).index(name) % 3
    places = {"memory": None, "disk": disk}

    def first(comm):
        states = []
        for place, tier in places.items():
            job = job_of(comm, base, run, tier)
            job.train("gpt", 3)
            job.save(tmp_path / f"to {place}")
            states.append(job.state())
        return states

    def second(comm):
        states = []
        for place, tier in (("memory", disk), ("disk", None)):
            job = job_of(comm, base, run, tier)
            job.load(tmp_path / f"to {place}")
            job.train("gpt", 2)
            states.append(job.state())
        return states

    for states in worlds(world).run(first):
        assert_same_bits(*states)
    memory, on_disk = (files_below(tmp_path / f"to {place}") for place in places)
    assert memory.keys() == on_disk.keys() and len(memory) > world
    for file, content in memory.items():
        assert content == on_disk[file], file
    for states in worlds(world % 3 + 1).run(second):
        assert_same_bits(*states)
