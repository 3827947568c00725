"""``ringcomm demo``, as a user runs it, and that it fails when a result is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from ringcomm.cli import demo_report
from ringcomm.cli.config import ModelConfig
from ringcomm.cli.demo_cases import COLLECTIVES, Place, fill, wrong_elems
from ringcomm.cli.demo_collectives import Cell
from ringcomm.cli.demo_rank import QUICK
from ringcomm.cli.demo_training import Result
from ringcomm.cli.rank import World
from tests.cli.processes import run

GOOD_CELL = Cell("all_reduce", "plain", 4096, 400.0, 8.0, 50.0, 10, 0)
GOOD_RESULT = Result(
    parameters=1000,
    model=ModelConfig(16, 1, 2, 8),
    tokens_per_step=64,
    steps=10,
    gloo_tokens_per_s=100.0,
    ringcomm_tokens_per_s=120.0,
    ratio=1.2,
    first_loss=5.5,
    last_loss=3.0,
    held_out_before=5.5,
    held_out_after=3.1,
    loss_difference=0.0,
    unequal_weights=0,
)


def changed(value, **fields):
    return type(value)(**{**vars(value), **fields})


@pytest.fixture
def no_numpy(tmp_path):
    """A folder that makes NumPy missing for a Python that finds modules there first."""
    folder = tmp_path / "no_numpy"
    folder.mkdir()
    (folder / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    return folder


def test_demo_measures_every_cell_and_finds_equal_losses_without_numpy(tmp_path, no_numpy):
    text = tmp_path / "text"
    text.write_text("".join(f"{n} green bottles\n" for n in range(2000)))
    options = ("--quick", "--data", text, "--json", tmp_path / "x.json")
    done = run("-m", "ringcomm", "demo", *options, path=no_numpy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NumPy" not in done.stderr
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["passed"]
    measured = {(cell["collective"], cell["memory"]) for cell in record["collectives"]}
    assert {(name, "plain") for name in COLLECTIVES} | {("barrier", "")} <= measured
    for cell in record["collectives"]:
        assert cell["wrong_elems"] == 0
        assert min(cell["gloo_us"], cell["ringcomm_us"], cell["ratio"], cell["rounds"]) > 0
        assert cell["collective"] in done.stdout
    (training,) = record["training"]
    assert training["equal"]
    assert training["held_out_after"] < training["held_out_before"]
    assert done.stdout.rstrip().endswith("All results agree.")
    assert f"3/{QUICK.contests[0].blocks}" in done.stderr


@pytest.mark.parametrize(
    ("cells", "results", "message"),
    [
        ([GOOD_CELL], [GOOD_RESULT], "1 of 1 collective cells exact"),
        ([changed(GOOD_CELL, wrong_elems=3)], [GOOD_RESULT], "FAILED: all_reduce plain 4 KiB: 3"),
        ([GOOD_CELL], [changed(GOOD_RESULT, loss_difference=1e-7)], "differ by up to 1e-07"),
        ([GOOD_CELL], [changed(GOOD_RESULT, unequal_weights=1)], "1 weights differ"),
    ],
)
def test_summary_says_what_failed(cells, results, message):
    good = cells == [GOOD_CELL] and results == [GOOD_RESULT]
    assert demo_report.passed(cells, results) is good
    summary = demo_report.summary(cells, results, 1.0)
    assert message in summary
    assert ("FAILED" in summary) is not good


def test_wrong_element_in_any_output_is_counted():
    place = Place(World(rank=0, size=2, threads=1), elems=8, allocate=torch.empty)
    for build in COLLECTIVES.values():
        case = build(place)
        for change in (0, 1):
            fill(case, place, salt=1)
            for part in case.parts:
                part.output.copy_(sum_of_sources(part))
            case.parts[-1].output[-1] += change
            assert wrong_elems(case, place, salt=1) == change
        fill(case, place, salt=1)
        assert wrong_elems(case, place, salt=2) == sum(part.output.numel() for part in case.parts)


def sum_of_sources(part):
    """What a part must hold, when each rank gives index modulo 11, plus twice (its rank + 1)."""
    index = torch.arange(part.begin, part.begin + part.output.numel())
    return sum(index % 11 + 2 * (rank + 1) for rank in part.ranks)


def test_demo_refuses_to_run_as_a_rank(monkeypatch):
    done = run(
        "-c",
        "import os, sys; os.environ.update(RANK='0', WORLD_SIZE='2');"
        "from ringcomm.cli import main; sys.exit(main(['demo']))",
    )
    assert done.returncode == 1
    assert "demo starts its own ranks; run it without torchrun" in done.stderr
