# SPDX-License-Identifier: Apache-2.0
"""The modes in which ranks share a GPU, run with stand-ins for the GPU."""

import os
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import ringcomm
from ringcomm.bench.cases import DTYPES, OPS, wrong_elements
from ringcomm.bench.collectives import (
    BENCH,
    DEFAULT_COLLECTIVES,
    buffer_sets,
    graph_calls,
    heap_bytes,
    measure_all,
    parse,
)
from ringcomm.bench.collectives.systems import PeerSetup, Unavailable, open_system
from ringcomm.bench.collectives.torch_groups import why_not
from ringcomm.bench.collectives.torch_ops import fastest, needed_bytes, ways_to_copy, ways_to_reduce
from ringcomm.bench.devices import DEVICE_MODES, MEANINGS, ModeError, choose
from ringcomm.bench.launch import RankInfo
from ringcomm.bench.report import commit, read
from ringcomm.bench.run import Run, main
from tests.bench.stand_ins import StandInGpu, StandInWorld
from tests.bench.test_cases import OneRankBoard, make_case
from tests.support.covering import covering

SMALL = ("--device", "cuda", "-b", "4K", "-e", "16K", "-f", "4", "-r", "2", "-w", "1")


@pytest.fixture
def worlds(monkeypatch):
    """The worlds that the harness makes, and the algorithms that it requests."""
    made: list[StandInWorld] = []
    asked: list[str] = []

    def local_world(n, device, options, heap_bytes):
        made.append(StandInWorld(n, device, asked))
        return made[-1]

    def empty(*size, dtype, device):
        assert device == "cuda:0"
        return torch.empty(*size, dtype=dtype)

    monkeypatch.setattr(ringcomm, "local_world", local_world)
    monkeypatch.setattr(ringcomm, "empty", empty)
    yield made, asked
    assert all(world.closed for world in made)


def run_one_launch(path, *arguments, world=4, device=None):
    arguments = (*SMALL, "--json", str(path), "--batch", "2", *arguments)
    info = RankInfo(0, world, HashStore(), "one-launch")
    run = Run(BENCH, parse(arguments), info, arguments)
    measure_all(run, device or StandInGpu())
    return run.finish(), read(path)


@pytest.mark.parametrize("tensors", ["plain", "heap"])
def test_one_launch_is_checked_timed_and_labelled(worlds, tmp_path, tensors):
    status, report = run_one_launch(
        tmp_path / "r.json", "--tensors", tensors, "--placement", "usual"
    )
    assert status == 0
    assert {row.mode for row in report.rows} == {"one-launch"}
    assert {row.ranks for row in report.rows} == {4}
    timed = {(row.system, row.collective) for row in report.rows if row.time_us is not None}
    names = ("reduce_scatter", "all_gather", "all_reduce")
    assert timed == {(system, name) for system in ("ringcomm", "torch", "copy") for name in names}
    wrong = {row.system: row.wrong for row in report.rows if row.time_us is not None}
    assert wrong == {"ringcomm": 0, "torch": 0, "copy": None}
    (note,) = {row.note for row in report.rows if row.system == "nccl"}
    assert "no NCCL" in note or "cannot launch several ranks" in note
    assert report.provenance["gpu"] == "a stand-in" and report.provenance["mode"] == "one-launch"


def test_a_wrong_sum_of_any_rank_is_counted(worlds, tmp_path, monkeypatch):
    def spoil(self, outputs, inputs, algorithm):
        for rank, output in enumerate(outputs):
            output.copy_(torch.cat(inputs))
            output[0] += rank

    monkeypatch.setattr(StandInWorld, "all_gather_into_tensor", spoil)
    status, report = run_one_launch(tmp_path / "r.json", "all_gather", "--placement", "out")
    assert status == 1
    assert {row.wrong for row in report.rows if row.system == "ringcomm"} == {3}


def test_algorithms_run_side_by_side(worlds, tmp_path):
    made, asked = worlds
    how = ("--subject", "ringcomm:one_shot", "--peers", "ringcomm:ring,ringcomm:copy_engine")
    status, report = run_one_launch(tmp_path / "r.json", "all_gather", "reduce_scatter", *how)
    assert status == 0 and len(made) == 3
    assert set(asked) == {"one_shot", "ring", "copy_engine"}
    notes = {(row.system, row.collective) for row in report.rows if row.note}
    assert notes == {("ringcomm:copy_engine", "reduce_scatter")}


@pytest.mark.parametrize("loops", ["serial", "sliced"])
def test_other_loops_run_beside_the_usual_ones(worlds, tmp_path, monkeypatch, loops):
    """The variable is set when a world is made and when it is called: both look up kernels."""
    asked: list[tuple[str, str | None, int]] = []
    make: Any = ringcomm.local_world

    def local_world(n, device, options, heap_bytes):
        asked.append(("made", os.environ.get("RINGCOMM_KERNELS"), options.channels))
        return make(n, device, options, heap_bytes)

    def gather(self, outputs, inputs, algorithm):
        asked.append((algorithm, os.environ.get("RINGCOMM_KERNELS"), 0))
        for output in outputs:
            output.copy_(torch.cat(inputs))

    monkeypatch.delenv("RINGCOMM_KERNELS", raising=False)
    monkeypatch.setattr(ringcomm, "local_world", local_world)
    monkeypatch.setattr(StandInWorld, "all_gather_into_tensor", gather)
    how = ("--peers", f"{loops}:one_shot", "--channels", "7", "--placement", "out")
    status, report = run_one_launch(tmp_path / "r.json", "all_gather", *how)
    assert status == 0
    assert {(row.system, row.wrong) for row in report.rows} == {
        ("ringcomm", 0),
        (f"{loops}:one_shot", 0),
    }
    assert {row.note for row in report.rows} == {"7 blocks of a rank"}
    calls = {("auto", None, 0), ("one_shot", loops, 0)}
    assert set(asked) == {("made", None, 7), ("made", loops, 7), *calls}
    assert "RINGCOMM_KERNELS" not in os.environ


def test_graphs_and_buffer_sets_are_recorded(worlds, tmp_path):
    device = StandInGpu(cache_bytes=1 << 20)
    how = ("--graph", "--graph-calls", "8", "--peers", "torch", "--placement", "in")
    _, report = run_one_launch(tmp_path / "r.json", "all_reduce", *how, device=device)
    assert set(device.captured) == {8} and len(device.captured) == len(report.rows) == 4
    assert {(row.graph_calls, row.buffer_sets, row.batch) for row in report.rows} == {(8, 8, 8)}
    # Per turn, four ranks' inputs in eight sets; three rounds, two sizes, two systems.
    assert device.refreshed == 4 * 8 * 3 * 2 * 2


def test_one_launch_is_timed_in_graphs_unless_it_is_told_otherwise(worlds, tmp_path):
    """A graph hides the host's cost of a launch, which grows with the number of its ranks."""
    for words, of_a_graph in (((), {20}), (("--no-graph",), {0})):
        device, how = StandInGpu(), ("--peers", "torch,copy", *words)
        _, report = run_one_launch(tmp_path / "r.json", "all_gather", *how, device=device)
        assert {row.graph_calls for row in report.rows if row.rounds} == of_a_graph
        assert set(device.captured) == of_a_graph - {0}


@pytest.mark.parametrize(
    ("requested_bytes", "world", "calls"), [(1 << 20, 2, 20), (64 << 20, 8, 7), (256 << 20, 8, 2)]
)
def test_a_graph_of_large_tensors_has_fewer_calls(requested_bytes, world, calls):
    case = make_case("reduce_scatter", world=world, requested_bytes=requested_bytes)
    assert graph_calls(case, parse(["--device", "cuda", "--graph"])) == calls
    assert graph_calls(case, parse(["--device", "cuda"])) == 0


def test_what_one_launch_does_not_carry_is_said(worlds, tmp_path):
    _, report = run_one_launch(tmp_path / "r.json", "broadcast", "--peers", "torch,copy")
    notes = {row.system: row.note for row in report.rows}
    assert "one launch cannot run a broadcast" in notes["ringcomm"]
    assert "not in torch" in notes["torch"] and "not counted" in notes["copy"]


def test_without_a_gpu_the_harness_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(BENCH, ["--device", "cuda", "--mode", "one-launch"]) == 2
    assert "torch sees no usable CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "launcher", "mode"),
    [
        ("auto", 2, 2, None, "gpu-per-rank"),
        ("auto", 8, 8, "torchrun", "gpu-per-rank"),
        ("auto", 2, 1, None, "one-launch"),
        ("auto", 2, 1, "torchrun", "processes-on-one-gpu"),
        ("one-launch", 2, 8, None, "one-launch"),
        ("processes-on-one-gpu", 2, 8, "harness", "processes-on-one-gpu"),
    ],
)
def test_the_mode_of_a_run(asked, ranks, gpus, launcher, mode):
    assert choose(asked, ranks, gpus, launcher) == mode


@pytest.mark.parametrize(
    ("asked", "gpus", "launcher", "words"),
    [
        ("auto", 0, None, "no usable CUDA device"),
        ("gpu-per-rank", 3, None, "4 ranks and 3 visible GPUs"),
        ("one-launch", 1, "torchrun", "torchrun started several"),
    ],
)
def test_a_mode_that_cannot_be_had(asked, gpus, launcher, words):
    with pytest.raises(ModeError, match=words):
        choose(asked, 4, gpus, launcher)


def test_each_mode_has_a_meaning():
    assert set(DEVICE_MODES) < set(MEANINGS)


@pytest.mark.parametrize(
    ("mode", "version", "words"),
    [
        ("gpu-per-rank", (), "no NCCL"),
        ("one-launch", (2, 30, 1), "cannot launch several"),
        ("processes-on-one-gpu", (2, 29, 7), "NCCL 2.29.7 refuses several ranks on one GPU; 2.30"),
        ("gpu-per-rank", (2, 20, 0), None),
        ("processes-on-one-gpu", (2, 30), None),
    ],
)
def test_where_nccl_is_not_measured_it_is_said_why(mode, version, words):
    said = why_not(mode, version)
    assert said is None if words is None else words in (said or "")


def setup(mode="one-launch", rank=0, world=2):
    return PeerSetup(
        rank,
        world,
        HashStore(),
        mode,
        heap_tensors=True,
        api="communicator",
        algorithm="auto",
        heap_bytes=None,
        device=StandInGpu(),
    )


@covering(name=DEFAULT_COLLECTIVES, world=[2, 3, 8], dtype_name=[*DTYPES])
def test_torch_does_the_same_sums_and_copies(name, world, dtype_name):
    placement = "in" if name == "all_reduce" else "out"
    for op in OPS:
        if op == "avg" and not DTYPES[dtype_name].is_floating_point:
            continue
        case = make_case(name, world=world, op=op, dtype_name=dtype_name, placement=placement)
        prepared = open_system("torch", setup(world=world)).prepare(case)
        assert len(prepared.buffers) == world
        counted = wrong_elements(OneRankBoard(), StandInGpu(), {"torch": [prepared]})
        assert counted == {"torch": 0}, op


def test_every_way_of_torch_gives_the_same():
    rows = torch.arange(24.0).reshape(2, 12)
    for op, expected in (("sum", rows[0] + rows[1]), ("min", rows[0]), ("prod", rows.prod(0))):
        out = torch.empty(12)
        ways = ways_to_reduce(op, rows, out)
        assert len(ways) == 2
        for way in ways:
            out.fill_(-1)
            way()
            assert torch.equal(out, expected)
    assert len(ways_to_reduce("sum", torch.ones(3, 4), torch.empty(4))) == 1
    for way in ways_to_copy(rows, torch.arange(12.0) * 3):
        rows.zero_()
        way()
        assert torch.equal(rows, (torch.arange(12.0) * 3).repeat(2, 1))


def test_the_quickest_way_is_taken():
    class Clock(StandInGpu):
        def elapsed_us(self, calls):
            return sum(float(call()) for call in calls)

    first_is_slow = iter([1000.0])
    ways = [lambda: 3.0, lambda: next(first_is_slow, 2.0), lambda: 5.0]
    assert fastest(Clock(), ways) is ways[1]


def test_other_processes_leave_the_work_to_rank_0():
    for name in ("torch", "copy"):
        system = open_system(name, setup("processes-on-one-gpu", rank=1))
        prepared = system.prepare(make_case("all_gather", rank=1))
        assert prepared.buffers == () and prepared.call() is None
        with pytest.raises(Unavailable, match="share a GPU"):
            open_system(name, setup("gpu-per-rank")).prepare(make_case("all_gather"))


def test_the_copy_moves_the_needed_bytes():
    case = make_case("reduce_scatter", world=4, requested_bytes=4096)
    copied = open_system("copy", setup(world=4)).prepare(case).call()
    assert isinstance(copied, torch.Tensor)
    assert 2 * copied.nbytes == needed_bytes("reduce_scatter", 4096, 4) == 5 * 4096


def test_bytes_counted_by_hand():
    # Two ranks with S = 2 chunks. reduce_scatter: each rank reads 2 chunks and writes 1.
    assert needed_bytes("reduce_scatter", 2, 2) == 2 * 3
    # all_gather: each rank reads 2 chunks and writes 2.
    assert needed_bytes("all_gather", 2, 2) == 8
    # all_reduce: 2 chunks read and 1 written, then 1 read and 1 written.
    assert needed_bytes("all_reduce", 2, 2) == 10
    with pytest.raises(Unavailable, match="bytes of broadcast are not counted"):
        needed_bytes("broadcast", 2, 2)


@pytest.mark.parametrize(
    ("mode", "cache_bytes", "sets"),
    [
        # Two ranks, each with 64 KiB of input and 32 KiB of output: 192 KiB per set.
        ("one-launch", 0, 1),
        ("one-launch", 96 << 10, 1),
        ("one-launch", 97 << 10, 2),
        ("processes-on-one-gpu", 97 << 10, 2),
        ("gpu-per-rank", 97 << 10, 3),
        ("one-launch", 60 << 20, 64),
    ],
)
def test_buffers_go_past_the_cache(mode, cache_bytes, sets):
    assert buffer_sets(make_case("reduce_scatter"), mode, cache_bytes) == sets


def test_the_heap_holds_a_case_of_every_ringcomm():
    one = parse([*SMALL, "-e", "1M", "--tensors", "heap"])
    two = parse([*SMALL, "-e", "1M", "--tensors", "heap", "--peers", "ringcomm:ring,torch"])
    assert heap_bytes(parse(list(SMALL)), 2, 0) is None
    of_one, of_two = heap_bytes(one, 2, 1 << 20), heap_bytes(two, 2, 1 << 20)
    assert of_one is not None and of_two is not None
    assert of_two > of_one >= 2 * 2 * (1 << 20) + 2 * (1 << 20)


@pytest.mark.parametrize("has_history", [False, True])
def test_a_tree_that_git_cannot_read_is_told_its_commit(monkeypatch, has_history):
    monkeypatch.setattr("ringcomm.bench.report.Path.exists", lambda path: has_history)
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"
    monkeypatch.setenv("RINGCOMM_COMMIT", "v1-2-gabc")
    assert commit() == "v1-2-gabc"
