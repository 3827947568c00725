"""The program that times training steps: its systems train one model, and its rows say so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm.bench import run, training, training_deepspeed
from ringcomm.bench.report import read
from ringcomm.bench.training_systems import (
    ARITHMETIC,
    DDP,
    DDP_HERE,
    FSDP2,
    FSDP2_HERE,
    HSDP,
    HSDP_HERE,
    OPTIMIZERS,
    QUANTIZED_OVER_NODES,
    STAGE_TWINS,
    STAGES,
    UNCOMPRESSED_OVER_NODES,
    Masters,
    Shape,
    twins,
)
from tests.bench.programs import run_program
from tests.support import lab

TINY = ("--width", "32", "--depth", "2", "--heads", "2", "--context", "8", "-r", "2")


def test_the_shapes_parameters_are_counted():
    for shape in (Shape(32, 2, 2, 1, 8), Shape(64, 3, 4, 2, 16)):
        assert shape.parameters == sum(param.numel() for param in shape.model().parameters())


def trained(shape, torchs, steps=1):
    """The parameters of one rank at stage 2, and those of torch alone, after some steps."""
    of_torch, sharded = (shape.model().to(shape.dtype) for _ in range(2))
    batch = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    with ringcomm.local_world(1) as world:
        ringcomm.zero.shard(sharded, 2, comm=world[0])
        both = torchs(of_torch), OPTIMIZERS[shape.optimizer].ours(sharded)
        for module, optimizer in zip((of_torch, sharded), both, strict=True):
            for _ in range(steps):
                module(batch[:, :-1], batch[:, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()
        yield from zip(sharded.parameters(), of_torch.parameters(), strict=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_kind_of_optimizer_is_the_same_on_both_sides(kind):
    """Only the square root of AdamW's update may differ, by an ulp (docs/adamw.md)."""
    for mine, wanted in trained(Shape(32, 2, 2, 1, 8, kind), OPTIMIZERS[kind].torchs):
        torch.testing.assert_close(mine, wanted, rtol=2**-22, atol=1e-10)


def test_of_bfloat16_all_systems_step_fp32_masters():
    """Masters that differ by an ulp of FP32, as above, hardly ever round apart."""
    shape = Shape(32, 2, 2, 1, 8, dtype=torch.bfloat16)
    for mine, wanted in trained(
        shape, lambda module: Masters(module, OPTIMIZERS["adamw"].torchs), 3
    ):
        assert mine.dtype == wanted.dtype == torch.bfloat16
        assert (mine != wanted).float().mean() < 0.01


def test_torchs_wrappers_are_compared_where_sums_have_one_order():
    deepspeed = training_deepspeed.STAGES
    assert twins(2, 1).keys() == {*STAGE_TWINS, DDP_HERE, FSDP2_HERE, *deepspeed}
    assert twins(1, 1).keys() == twins(3, 1).keys() == twins(6, 2).keys() == STAGE_TWINS.keys()
    assert twins(2, 2).keys() == {*STAGE_TWINS, DDP_HERE, FSDP2_HERE, *deepspeed, HSDP_HERE}
    assert twins(4, 2).keys() == {*STAGE_TWINS, HSDP_HERE}


# The weight is that of both ends of the model, and has two names.
@pytest.mark.parametrize(("what", "wrong"), [("nothing", 0), ("a loss", 1), ("a weight", 2)])
def test_a_difference_fails_the_run(tmp_path, monkeypatch, capsys, what, wrong):
    """One rank, in this process; stage 3 is changed before its comparison with stage 0."""
    monkeypatch.setenv("RINGCOMM_BENCH_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    # Where it is installed it stays with the first group that its process has.
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    find_out = training.find_out

    def changed(run, trained, nodes):
        last = trained[STAGES[3]]
        if what == "a loss":
            last.losses[1] = last.losses[1] * (1 + 2**-23)
        if what == "a weight":
            with ringcomm.zero.unsharded(last.module, write_from=0), torch.no_grad():
                next(last.module.parameters()).view(-1)[5] += 1
        return find_out(run, trained, nodes)

    monkeypatch.setattr(training, "find_out", changed)
    status = run.main(training.BENCH, [*TINY, "-n", "1"])
    told = capsys.readouterr().out
    assert status == (wrong > 0)
    assert told.count(training_deepspeed.MISSING) == len(training_deepspeed.STAGES)
    assert told.count("WRONG: ") == told.count(f"WRONG: {wrong} ") == (wrong > 0)


def test_text_that_is_not_there_is_refused(tmp_path):
    done = run_program("ringcomm.bench", "training", *TINY, "--data", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "none: no such file or folder" in done.stderr


def timed_rows(report):
    """All rows, and those of DeepSpeed where it is installed: elsewhere they say how to get it."""
    is_there = training_deepspeed.installed_version() is not None
    assert ("version of deepspeed" in report.provenance) == is_there
    missing = [row for row in report.rows if row.time_us is None]
    assert [row.system for row in missing] == [*training_deepspeed.STAGES] * (not is_there)
    assert {row.note for row in missing} <= {training_deepspeed.MISSING}
    return [row for row in report.rows if row.time_us is not None]


def test_the_command(tmp_path):
    file = tmp_path / "report.json"
    done = run_program("ringcomm.bench", "training", *TINY, "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = read(file)
    systems = [row.system for row in report.rows]
    of_torch, deepspeed = [DDP, DDP_HERE, FSDP2, FSDP2_HERE], list(training_deepspeed.STAGES)
    assert systems == [*STAGES, ARITHMETIC, *of_torch, *deepspeed]
    timed = timed_rows(report)
    compared = {row.system for row in timed if row.wrong is not None}
    assert compared == twins(2, 1).keys() & {row.system for row in timed} and report.wrong == 0
    assert done.stdout.count(" equal ") == len(compared)
    assert all(row.ratio and row.rounds == 2 and row.ranks == 2 for row in timed)
    assert report.provenance["command"] == f"ringcomm bench training {' '.join(TINY)}"
    assert not dist.is_initialized()


def test_the_command_over_nodes(tmp_path):
    """Two nodes of one rank: sums are of two, so all of torch's wrappers have twins."""
    lab.require()
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "ringcomm.bench", "training", *TINY, "--json", str(file)]
    numbers = lab.RankNumbers.all_of((1, 1))
    pipe = subprocess.PIPE
    with lab.Lab(2) as nodes:
        started = [
            nodes.popen(each.node, command, each.environment(), stdout=pipe, stderr=pipe, text=True)
            for each in numbers
        ]
        ended = [each.communicate(timeout=100) for each in started]
    assert [each.returncode for each in started] == [0, 0], ended
    assert ended[0][0].startswith("# 2 ranks on 2 nodes; ") and not ended[1][0]
    report = read(file)
    timed = timed_rows(report)
    systems = [row.system for row in timed]
    of_torch = [DDP, DDP_HERE, FSDP2, FSDP2_HERE]
    if training_deepspeed.installed_version():
        of_torch += training_deepspeed.STAGES
    over_nodes = [*QUANTIZED_OVER_NODES, *UNCOMPRESSED_OVER_NODES, HSDP, HSDP_HERE]
    assert systems == [*STAGES, ARITHMETIC, *of_torch, *over_nodes]
    compared = {row.system for row in timed if row.wrong is not None}
    assert compared == twins(2, 2).keys() & set(systems) and report.wrong == 0
    assert all(row.ratio and row.rounds == 2 and row.nodes == row.ranks == 2 for row in timed)


@pytest.mark.parametrize("option", ["--busy", "--ranks"])
def test_what_torchrun_has_decided_is_refused(option):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_program("ringcomm.bench", "training", *TINY, option, "2", environment=rank)
    assert done.returncode == 2 and f"ringcomm bench: {option}" in done.stderr, done.stderr
