# SPDX-License-Identifier: Apache-2.0
"""The program that times training steps: its systems train one model, and its rows show it."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm.bench import run, training, training_deepspeed, training_systems
from ringcomm.bench.launch import RankInfo
from ringcomm.bench.report import read
from ringcomm.bench.timing import Device, Timing
from ringcomm.bench.training import GRAPH, HOST
from ringcomm.bench.training_systems import (
    ARITHMETIC,
    DDP,
    DDP_HERE,
    DDP_NCCL,
    FSDP2,
    FSDP2_HERE,
    FSDP2_NCCL,
    HSDP,
    HSDP_HERE,
    OPTIMIZERS,
    QUANTIZED_OVER_NODES,
    STAGE_TWINS,
    STAGES,
    TORCH_ALONE,
    UNCOMPRESSED_OVER_NODES,
    Batches,
    GpuShape,
    GraphedModel,
    Masters,
    ResidentBatches,
    Shape,
    twins,
)
from ringcomm.examples.corpus import read_corpus
from tests.bench.programs import run_program
from tests.support import lab

TINY = ("--width", "32", "--depth", "2", "--heads", "2", "--context", "8", "-r", "2")


def test_the_shapes_parameters_are_counted():
    for shape in (Shape(32, 2, 2, 1, 8), Shape(64, 3, 4, 2, 16)):
        assert shape.parameters == sum(param.numel() for param in shape.model().parameters())


def trained(shape, torchs, steps=1):
    """Returns one rank's parameters at stage 2, and torch's own, after some steps."""
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
    """Only the square root in AdamW's update may differ, by 1 ulp (docs/adamw.md)."""
    for mine, wanted in trained(Shape(32, 2, 2, 1, 8, kind), OPTIMIZERS[kind].torchs):
        torch.testing.assert_close(mine, wanted, rtol=2**-22, atol=1e-10)


def test_of_bfloat16_all_systems_step_fp32_masters():
    """Masters that differ by 1 ulp of FP32 almost always round to the same bfloat16 number."""
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


# The two ends of the model share this weight, which has two names.
@pytest.mark.parametrize(("what", "wrong"), [("nothing", 0), ("a loss", 1), ("a weight", 2)])
def test_a_difference_fails_the_run(tmp_path, monkeypatch, capsys, what, wrong):
    """Changes stage 3 on the only rank, in this process, before its comparison with stage 0."""
    monkeypatch.setenv("RINGCOMM_BENCH_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    # If installed, DeepSpeed would keep using its process's first group.
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


def test_a_row_has_the_median_ratio_of_each_rival():
    """The medians of the times have the ratio 0.5."""
    times = {STAGES[1]: (1.0, 10.0, 100.0), DDP: (2.0, 5.0, 300.0), FSDP2: (4.0, 40.0, 400.0)}
    timings = {name: Timing(each, 1) for name, each in times.items()}
    findings = dict.fromkeys(times, training.TrainingOutcome(0, 5.0, 4.0, 1))
    rows = {
        row.system: row for row in training.rows_of(Shape(32, 2, 2, 1, 8), 2, timings, findings)
    }
    assert training.taken_by_rivals(rows[STAGES[1]]) == {DDP: 2.0, FSDP2: 4.0}
    assert training.taken_by_rivals(rows[DDP]) == {FSDP2: 2.0}
    assert training.taken_by_rivals(replace(rows[DDP], note="")) == {}


def test_text_that_is_not_there_is_refused(tmp_path):
    done = run_program("ringcomm.bench", "training", *TINY, "--data", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "none: no such file or folder" in done.stderr


def timed_rows(report):
    """Returns the rows with times. Rows of a missing DeepSpeed say how to install it."""
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
    """Two nodes of one rank each: with sums of two terms, all of torch's wrappers have twins."""
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


# ---- on a GPU -----------------------------------------------------------------------------------

ON_CUDA = (*TINY, "--device", "cuda", "-n", "1")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (ON_CUDA, "a process trains one --system: stage-0, stage-1"),
        ((*ON_CUDA, "--system", "ddp-on-nccl", "-n", "2"), "NCCL takes a GPU per rank"),
        ((*ON_CUDA, "--system", "fsdp2-on-nccl", "--graph"), "fsdp2-on-nccl is not captured"),
        ((*TINY, "--system", "stage-2"), "--system and --graph need --device cuda"),
        ((*TINY, "--graph"), "--system and --graph need --device cuda"),
        ((*ON_CUDA, "--system", "stage-4"), "invalid choice: 'stage-4' (choose from "),
        ((*ON_CUDA, "--system", "stage-9"), "'ddp-on-nccl'"),
    ],
)
def test_what_a_process_cannot_train_is_refused(words, why, capsys):
    with pytest.raises(SystemExit):
        training.BENCH.parse(words)
    assert why in capsys.readouterr().err


@pytest.fixture
def on_cpu(tmp_path):
    """Runs one rank's part of a GPU measurement on the CPU; returns the rows."""

    def run_it(*words):
        words = (*ON_CUDA, "--batches", "1,8", "2,4", *words)
        asked = training.BENCH.parse(words)
        part = run.Run(training.BENCH, asked, RankInfo(0, 1, dist.HashStore()), words)
        with ringcomm.local_world(1) as world:
            for shape in training.shapes_of(asked):
                training.measure_on_gpu(part, shape, world[0], Device())
        return part.rows

    return run_it


def test_a_step_its_host_and_its_graph_have_rows_of_their_own(on_cpu, monkeypatch):
    """A graph captures a sharded module only if no other lives: two would have to agree."""
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    seen = []

    class Eager(training_systems.TrainedModel):
        def __init__(self, build, batches):
            super().__init__(build, batches)
            alive.add(self.module)

    class Graphed:
        loss = 2.5

        def __init__(self, build, batches, device):
            seen.append(len(alive))

        def __call__(self):
            """The time does not matter here."""

        end = __call__

    monkeypatch.setattr(training, "TrainedModel", Eager)
    monkeypatch.setattr(training, "GraphedModel", Graphed)
    rows = on_cpu("--system", "stage-3", "--graph")
    names = [TORCH_ALONE, STAGES[3]]
    kinds = [name + kind for kind in ("", HOST, GRAPH) for name in names]
    assert [row.system for row in rows] == kinds * 2
    assert [row.placement for row in rows[::6]] == [
        "32x2, 1x8 bytes a rank",
        "32x2, 2x4 bytes a rank",
    ]
    assert all(row.time_us and row.rounds == 2 and row.ranks == 1 for row in rows)
    assert [row.ratio for row in rows[::2]] == [1.0] * 6
    assert seen == [0] * 4
    eager, graph = rows[1].note, rows[5].note
    assert eager.startswith("loss ") and " MB a rank" in eager and graph == "loss 2.500"


def test_torchs_wrappers_are_trained_beside_torch_alone(on_cpu, tmp_path, monkeypatch):
    """On Gloo here; with one rank the wrappers have torch's own losses."""
    monkeypatch.setattr(training_systems, "NCCL_BACKEND", "gloo")
    store = dist.FileStore(str(tmp_path / "torchs"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for system in (DDP_NCCL, FSDP2_NCCL):
            alone, ours = on_cpu("--system", system.replace(" ", "-"))[:2]
            assert (alone.system, ours.system) == (TORCH_ALONE, system)
            assert ours.note.partition(";")[0] == alone.note.partition(";")[0]
    finally:
        dist.destroy_process_group()


def test_a_graphed_model_takes_the_steps_of_an_eager_one():
    """With a device that replays by calling, each step reads and writes the same tensors."""
    shape = GpuShape(32, 2, 2, 1, 8)
    batches = ResidentBatches(Batches(shape, read_corpus(None, 8), 0, 1, torch.device("cpu")))

    def build():
        model = shape.model()
        return model, OPTIMIZERS["adamw"].torchs(model)

    graphed = GraphedModel(build, batches, Device())
    for _ in range(3):
        graphed()
    eager, optimizer = build()
    for turn in range(7):  # three steps before the capture, and one after it
        tokens, targets = batches.of(turn)
        loss = eager(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert graphed.loss == loss.item()


@pytest.mark.parametrize("option", ["--busy", "--ranks"])
def test_what_torchrun_has_decided_is_refused(option):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_program("ringcomm.bench", "training", *TINY, option, "2", environment=rank)
    assert done.returncode == 2 and f"ringcomm bench: {option}" in done.stderr, done.stderr
