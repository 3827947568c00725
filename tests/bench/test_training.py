"""The program that times training steps: its systems train one model, and its rows say so."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import ringcomm
from ringcomm.bench.report import read
from ringcomm.bench.training_systems import (
    ARITHMETIC,
    DDP,
    DDP_HERE,
    FSDP2,
    FSDP2_HERE,
    TRACED_STEPS,
    Shape,
)
from tests.bench.programs import run_program

TINY = ("--width", "32", "--depth", "2", "--heads", "2", "--context", "8", "-r", "2")


def test_the_shapes_parameters_are_counted():
    for shape in (Shape(32, 2, 2, 1, 8), Shape(64, 3, 4, 2, 16)):
        assert shape.parameters == sum(param.numel() for param in shape.model().parameters())


def test_a_stage_trains_as_torch_does():
    """One rank: only the square root of the update may differ, by an ulp (docs/adamw.md)."""
    shape = Shape(32, 2, 2, 1, 8)
    plain, sharded = shape.model(), shape.model()
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, 256, (1, 9), generator=generator)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    with ringcomm.local_world(1) as world:
        ringcomm.zero.shard(sharded, 2, comm=world[0])
        optimizer = ringcomm.optim.AdamW(sharded.parameters(), lr=1e-4)
        for module, each in ((plain, reference), (sharded, optimizer)):
            module(batch[:, :-1], batch[:, 1:]).backward()
            each.step()
        for mine, wanted in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=2**-22, atol=1e-10)


def test_the_command(tmp_path):
    file = tmp_path / "report.json"
    spans = tmp_path / "profile.json"
    files = ("--json", str(file), "--profile", str(spans))
    done = run_program("ringcomm.bench.training", *TINY, *files)
    assert done.returncode == 0, done.stderr
    assert "stage 3: " in done.stdout and "% of the communication was hidden" in done.stdout
    for stage, name in ((2, "reduce_scatter"), (3, "gather")):
        for rank in range(2):
            trace = json.loads((tmp_path / f"profile-stage{stage}-rank{rank}.json").read_text())
            events = [each for each in trace["traceEvents"] if each["name"] == name]
            assert events and all(each["dur"] >= 0 and each["pid"] == rank for each in events)
            assert sum(each["name"] == "step" for each in trace["traceEvents"]) == TRACED_STEPS
    report = read(file)
    systems = [row.system for row in report.rows]
    stages = [f"stage {stage}" for stage in range(4)]
    assert systems == [*stages, ARITHMETIC, DDP, DDP_HERE, FSDP2, FSDP2_HERE]
    assert all(row.ratio and row.rounds == 2 and row.ranks == 2 for row in report.rows)
    assert report.provenance["command"] == f"python -m ringcomm.bench.training {' '.join(TINY)}"
    assert not dist.is_initialized()
