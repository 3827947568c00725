# SPDX-License-Identifier: Apache-2.0
"""The goals for a GPU, evaluated from rows, and the files that ``make gpu-check`` writes."""

from dataclasses import replace
from typing import Any

import pytest

from ringcomm.bench.report import Report, Row, read
from ringcomm.bench.timing import Timing
from ringcomm.bench.training import GRAPH, HOST, gpu_rows
from ringcomm.bench.training_systems import FSDP2_NCCL, TORCH_ALONE, Shape
from tools.gpu_check.goals import evaluate
from tools.gpu_check.result_files import ResultFiles
from tools.gpu_check.runner import FAILED, OK, Result

FACTS = {"gpu": "NVIDIA H999 80GB (test)", "NCCL": "2.28.3", "commit": "abc", "date": "2031-02-03"}
COPY_GBPS = 1000.0


def row(system, size_bytes, time_us, collective="reduce_scatter", **changes):
    facts: dict[str, Any] = {
        "count": size_bytes // 4,
        "dtype": "float",
        "op": "sum",
        "root": -1,
        "ranks": 2,
        "placement": "in" if collective == "all_reduce" else "out",
        "mode": "one-launch",
        "wrong": 0,
        **changes,
    }
    return Row(collective, size_bytes, system=system, time_us=time_us, **facts)


def report_of(*rows):
    return Report({"copy GB/s": str(COPY_GBPS), "command": "ringcomm bench", "cpu": "x"}, [*rows])


def goal(number, *rows):
    return evaluate([report_of(), report_of(*rows)])[number]


def answers(reports):
    return [judged.line.split(" | ")[-1].removesuffix(" |") for judged in evaluate(reports)]


def answer_of(judged):
    return judged.line.split(" | ")[-1].removesuffix(" |")


SIZE = 64 << 20


@pytest.mark.parametrize("slower", [0.999, 1.001])
@pytest.mark.parametrize(
    ("number", "collective", "ranks", "moved_sizes", "share"),
    [
        # reduce_scatter of W ranks: W inputs, and one output in all.
        (0, "reduce_scatter", 2, 3, 0.90),
        (0, "all_gather", 2, 4, 0.90),
        (1, "reduce_scatter", 8, 9, 0.85),
        (1, "all_gather", 8, 16, 0.85),
    ],
)
def test_shares_of_the_copy(number, collective, ranks, moved_sizes, share, slower):
    size, system = 4 * SIZE, "ringcomm:one_shot"
    just_us = moved_sizes * size / (share * COPY_GBPS * 1e9) * 1e6
    how = {"ranks": ranks, "graph_calls": 5}
    cells = (
        row(system, size, just_us * slower, collective, **how),
        row(system, 4 * size, just_us, collective, **how),  # far beyond
        row(system, size // 4, just_us * 100, collective, **how),  # too small to count
        row(system, size, just_us * 9, collective, **how, mode="processes-on-one-gpu"),
        row(system, size, just_us * 9, collective, **how, note="16 blocks of a rank"),
        row(system, size, just_us * 9, collective, ranks=ranks),  # with the host's part
        row(system, size, just_us * 99, collective, ranks=4, graph_calls=5),
        row("ringcomm", size, just_us * 9, collective, **how),
    )
    found = goal(number, *cells)
    assert answer_of(found) == ("yes" if slower < 1 else "no") and len(found.figures) == 2
    label, measured = found.worst
    assert label == f"{collective}, {ranks} ranks, 256 MiB"
    assert measured == pytest.approx(share / slower)


@pytest.mark.parametrize(("ratio", "answer"), [(1.01, "yes"), (1.0, "no"), (0.9, "no")])
def test_ahead_of_torch_means_at_every_large_size(ratio, answer):
    cells = (
        row("torch", 16 << 20, 5.0, ratio=ratio, graph_calls=20),
        row("torch", 64 << 20, 9.0, "all_gather", ratio=1.5, graph_calls=20),
        row("torch", 8 << 20, 5.0, ratio=0.1, graph_calls=20),
        row("torch", 16 << 20, 5.0, ratio=0.1),
        row("copy", 16 << 20, 5.0, ratio=0.1),
        row("torch", 16 << 20, 5.0, ratio=0.1, mode="processes-on-one-gpu"),
    )
    found = goal(2, *cells)
    assert (answer_of(found), len(found.figures)) == (answer, 2)


@pytest.mark.parametrize(("time_us", "answer"), [(4.4, "yes"), (4.6, "no")])
def test_small_all_reduces_in_a_graph(time_us, answer):
    cells = (
        row("ringcomm", 32 << 10, time_us, "all_reduce", graph_calls=20),
        row("ringcomm", 4 << 10, 3.0, "all_reduce", graph_calls=20),
        row("ringcomm", 4 << 10, 30.0, "all_reduce"),
        row("ringcomm", 64 << 10, 30.0, "all_reduce", graph_calls=20),
        row("ringcomm", 4 << 10, 30.0, "all_reduce", graph_calls=20, ranks=4),
        row("ringcomm:one_shot", 4 << 10, 30.0, "all_reduce", graph_calls=20),
    )
    found = goal(3, *cells)
    assert (answer_of(found), len(found.figures)) == (answer, 2)


def test_nccl_is_compared_where_it_ran_and_otherwise_the_reason_is_given():
    where = {"mode": "processes-on-one-gpu"}
    assert answer_of(goal(4, row("nccl", 4096, 9.0, ratio=2.0, **where))) == "yes"
    assert answer_of(goal(4, row("nccl", 4096, 9.0, ratio=0.5, **where))) == "no"
    refused = goal(4, row("nccl", 4096, None, note="NCCL 2.28 refuses", **where))
    assert answer_of(refused) == "not measured: NCCL 2.28 refuses"


@pytest.mark.parametrize(("ratio", "answer"), [(1.09, "yes"), (1.11, "no")])
def test_triton_is_held_against_the_cuda_kernels(ratio, answer):
    cells = (
        row("triton:one_shot", 16 << 20, 9.0, ratio=ratio, graph_calls=20),
        row("triton:one_shot", 64 << 20, 9.0, "all_gather", ratio=0.9, graph_calls=7),
        row("triton:one_shot", 4 << 20, 9.0, ratio=3.0, graph_calls=20),
        row("ringcomm:ring", 64 << 20, 9.0, ratio=3.0),
    )
    found = goal(5, *cells)
    assert (answer_of(found), len(found.figures)) == (answer, 2)


SHARD_BYTES = 512 << 20  # 256 Mi bfloat16 parameters


def optimizer_row(system, ratio, collective="adamw_shard", ranks=1, **changes):
    changes = {"count": 256 << 20, "dtype": "bfloat16", "algbw_gbps": 900.0, **changes}
    return row(
        system, SHARD_BYTES, 9.0, collective, ranks=ranks, ratio=ratio, placement="in", **changes
    )


@pytest.mark.parametrize(
    ("number", "system", "ratio", "answer"),
    [
        (6, "copy", 0.921, "yes"),
        (6, "copy", 0.919, "no"),
        (7, "torch fused", 1.01, "yes"),
        (7, "torch fused", 1.0, "no"),
    ],
)
def test_the_update_of_a_shard(number, system, ratio, answer):
    cells = (
        optimizer_row("ringcomm", 1.0, algbw_gbps=950.0),
        optimizer_row(system, ratio, note="3 turns"),
        optimizer_row(system, 0.1, count=64 << 20),  # too few parameters
        optimizer_row(system, 0.1, dtype="float32"),
        optimizer_row(system, 0.1, "adamw_step", 2),
        optimizer_row("two passes", 0.1),
    )
    found = goal(number, *cells)
    assert (answer_of(found), len(found.figures)) == (answer, 1)
    assert found.worst == ("adamw_shard, 1 ranks, 256 Mi parameters", ratio)


@pytest.mark.parametrize("slower", [0.99, 1.0])
@pytest.mark.parametrize(
    ("number", "system", "least"),
    [(9, "separate kernels", 1.0), (10, "torch fused", 1.5), (16, "serial loops", 1.0)],
)
def test_one_pass_is_ahead_in_every_world(number, system, least, slower):
    cells = [
        optimizer_row(system, least * factor, "adamw_step", ranks)
        for ranks, factor in ((2, 2.0), (4, slower), (8, 1.1))
    ]
    cells += [optimizer_row("two passes", 0.1, "adamw_step", 2), optimizer_row(system, 0.1)]
    found = goal(number, *cells)
    assert answer_of(found) == ("yes" if slower == 1.0 else "no") and len(found.figures) == 3
    assert found.worst[0] == "adamw_step, 4 ranks, 256 Mi parameters"


@pytest.mark.parametrize(("time_us", "answer"), [(9761, "yes"), (9762, "no")])
def test_a_step_is_held_against_a_copy_of_its_bytes(time_us, answer):
    """256 Mi elements: 24 bytes of state, and two ranks' 2-byte gradients and parameters."""
    cells = [optimizer_row(name, 1.0, "adamw_step", 2) for name in ("ringcomm", "separate kernels")]
    found = goal(8, *(replace(each, time_us=float(time_us)) for each in cells))
    assert (answer_of(found), len(found.figures)) == (answer, 1)
    assert found.worst[1] == pytest.approx((256 << 20) * 32 / 1e6 / time_us)


@pytest.mark.parametrize(("ratio", "answer"), [(1.0, "yes"), (0.99, "no")])
def test_the_batched_loops_are_ahead_of_the_serial_ones(ratio, answer):
    cells = (
        row("serial:one_shot", 64 << 20, 9.0, ratio=ratio, graph_calls=7),
        row("serial:one_shot", 64 << 20, 9.0, ratio=0.1, graph_calls=7, note="4 blocks of a rank"),
        row("serial", 64 << 20, 9.0, ratio=0.1, graph_calls=7),
        row("serial:one_shot", 16 << 20, 9.0, ratio=0.1, graph_calls=7),
    )
    found = goal(15, *cells)
    assert (answer_of(found), len(found.figures)) == (answer, 1)


SHAPE = Shape(64, 2, 4, 1, 16)


def training_rows(kind, **times):
    """Returns the rows of one process per system, each measured beside torch alone."""
    found = []
    for name, time in times.items():
        pair = {TORCH_ALONE: 1.0, name.replace("_", " "): time}
        timings = {each: Timing((1000.0 * took,) * 3, 1) for each, took in pair.items()}
        found += gpu_rows(SHAPE, 1, timings, kind, {})
    return found


@pytest.mark.parametrize("slower", [1.05, 1.051])
def test_a_step_in_a_graph_costs_little_over_torchs(slower):
    cells = training_rows(GRAPH, stage_0=2.0, stage_1=1.0, stage_2=slower, stage_3=0.9)
    cells += training_rows("", stage_1=9.0)  # includes torch's host cost
    found = goal(11, *cells)
    assert answer_of(found) == ("yes" if slower == 1.05 else "no") and len(found.figures) == 3
    assert found.worst == ("stage 2, graph, 1 ranks, 64x2, 1x16 bytes a rank", slower)


@pytest.mark.parametrize(("fsdp2", "answer"), [(2.0, "yes"), (1.9, "no")])
def test_the_hosts_part_of_a_step_is_held_against_fsdp2s(fsdp2, answer):
    """Stage 3 and FSDP2 have separate reports, each beside torch alone."""
    theirs = report_of(*training_rows(HOST, **{FSDP2_NCCL.replace(" ", "_"): fsdp2}))
    ours = report_of(*training_rows(HOST, stage_3=1.5, stage_2=0.99, stage_0=4.0))
    found = evaluate([ours, theirs])[12]
    assert (answer_of(found), len(found.figures)) == (answer, 2)
    assert found.worst[1] == pytest.approx(0.5 / (fsdp2 - 1))
    assert answer_of(evaluate([ours])[12]) == "not measured"


@pytest.mark.parametrize(
    ("number", "how", "ratio", "answer"),
    [
        (13, "sync", 1.29, "yes"),
        (13, "sync", 1.31, "no"),
        (14, "async + wait", 2.29, "yes"),
        (14, "async + wait", 2.31, "no"),
    ],
)
def test_the_hosts_part_of_a_call(number, how, ratio, answer):
    cells = (
        row("host", 1024, 9.0, "all_reduce", placement=how, ranks=1, ratio=ratio),
        row("host", 1024, 9.0, "all_reduce", placement="one launch", ranks=2, ratio=9.0),
        row("host", 1024, 9.0, "barrier", placement=how, ranks=1, ratio=9.0),
        row("torch add_", 1024, 7.0, "add_", placement="sync", ranks=1),
    )
    found = goal(number, *cells)
    assert (answer_of(found), len(found.figures)) == (answer, 1)
    assert found.worst[0] == f"all_reduce, 1 ranks, {how}"


def test_goals_of_collectives_are_none_of_the_optimizers():
    found = answers([report_of(optimizer_row("torch fused", 0.1), optimizer_row("copy", 0.1))])
    assert found == ["not measured"] * 6 + ["no"] * 2 + ["not measured"] * 9


def test_a_run_without_figures_reaches_nothing():
    assert answers([]) == ["not measured"] * 17


@pytest.fixture
def result_files(tmp_path):
    reports = [
        report_of(
            row("ringcomm:one_shot", 4 * SIZE, 1000.0, graph_calls=5),
            row("torch", SIZE, 400.0, ratio=1.6, graph_calls=5),
        ),
        report_of(row("ringcomm", 4096, 3.0, "all_reduce", graph_calls=20)),
    ]
    results = [
        Result("build", OK, "14 kernel units by nvcc", seconds=71.0),
        Result("test", FAILED, "1 | 2; failed: a::b", noted={"figure us": "4.5"}),
        Result("bench", OK, "2 runs", reports=reports),
    ]
    log = tmp_path / "gpu-check.log"
    log.write_text("all of it")
    return ResultFiles(FACTS, tmp_path / "results", tmp_path / "out", log, results)


def test_what_is_written(result_files, tmp_path):
    files = result_files.write(ended=True)
    base = "gpu-nvidia-h999-80gb-test-2031-02-03"
    assert [file.name for file in files] == [f"{base}{end}" for end in (".json", ".csv", ".md")]
    copies = {file.name for file in (tmp_path / "out").iterdir()}
    assert copies == {*(file.name for file in files), "gpu-check.log"}
    for file in files[:2]:
        report = read(file)
        assert [each.system for each in report.rows] == ["ringcomm:one_shot", "torch", "ringcomm"]
        facts = report.provenance
        assert (facts["gpu"], facts["commit"], facts["ended"]) == (FACTS["gpu"], "abc", "yes")
        assert facts["stage build"] == "ok, 71 s: 14 kernel units by nvcc"
        assert facts["stage test"].startswith("failed") and facts["figure us"] == "4.5"


def test_the_report_for_readers(result_files):
    text = result_files.write()[2].read_text()
    assert f"# {FACTS['gpu']}, 2031-02-03" in text
    # 3 x 256 MiB in 1000 us are 805 GB/s, of 1000 GB/s for the copy.
    assert "| one-shot, 256 MiB, 2 ranks | >= 0.9 of a copy of its bytes |" in text
    assert "| reduce_scatter, 2 ranks, 256 MiB | 0.805 | no |" in text
    assert "| 256 MiB | ringcomm:one_shot | 1000.00 | - | 0.81 |" in text
    assert "| stage test | failed, 0 s: 1 / 2; failed: a::b |" in text
    assert (
        "| all_reduce, 2 ranks, one-launch, graphs of 20 calls, in | 4 KiB | ringcomm | 3.00 |"
        in text
    )
    assert "| ended | no: it was stopped" in text
