"""``ringcomm demo``, as a user runs it, and that it fails when a result is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from ringcomm.cli.demo import QUICK, Findings, record, stages_head, stages_line, summary
from ringcomm.cli.demo_collectives import COLLECTIVES, Cell, Place, fill, wrong_elems
from ringcomm.cli.demo_training import Result, Standing
from ringcomm.examples.gpt.config import STAGES, ModelConfig, TrainConfig
from ringcomm.launch import World
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
GOOD_STANDING = Standing(
    name="zero, stage 3",
    parameters=1000,
    is_stage=True,
    steps=10,
    first_loss=5.5,
    last_loss=3.0,
    unequal_losses=0,
    unequal_weights=0,
    loss_difference=0.0,
    state_bytes=8_000_000,
    buffer_bytes=1_000_000,
    held_bytes=9_100_000,
    step_s=0.02,
    ddp_ratio=1.2,
    fsdp2_ratio=1.9,
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
    assert_stages_are_there(record["stages"], done.stdout)
    assert done.stdout.rstrip().endswith("All results agree.")
    assert f"3/{QUICK.contests[0].blocks}" in done.stderr
    assert (
        f"stages |########################| {QUICK.tour.rounds}/{QUICK.tour.rounds}" in done.stderr
    )


def assert_stages_are_there(standings, printed):
    names = [f"zero, stage {stage}" for stage in STAGES]
    assert [each["name"] for each in standings] == [*names, "DDP, Gloo", "FSDP2, Gloo"]
    for each in standings:
        assert each["is_stage"] == each["name"].startswith("zero")
        assert each["equal"] or not each["is_stage"]
        assert each["loss_difference"] <= 1e-5
        assert each["steps"] == QUICK.tour.config.steps
        assert each["last_loss"] < each["first_loss"]
        assert min(each["step_s"], each["ddp_ratio"], each["fsdp2_ratio"], each["held_bytes"]) > 0
        assert f"\n{each['name']} " in printed
    states = [each["state_bytes"] for each in standings]
    assert states[:4] == sorted(states[:4], reverse=True)
    assert states[4:] == [states[0], states[3]]


@pytest.mark.parametrize(
    ("cells", "results", "standings", "message"),
    [
        ([GOOD_CELL], [GOOD_RESULT], [GOOD_STANDING], "1 of 1 collective cells exact"),
        (
            [changed(GOOD_CELL, wrong_elems=3)],
            [GOOD_RESULT],
            [GOOD_STANDING],
            "FAILED: all_reduce plain 4 KiB: 3",
        ),
        (
            [GOOD_CELL],
            [changed(GOOD_RESULT, loss_difference=1e-7)],
            [GOOD_STANDING],
            "differ by up to 1e-07",
        ),
        (
            [GOOD_CELL],
            [changed(GOOD_RESULT, unequal_weights=1)],
            [GOOD_STANDING],
            "1 weights differ",
        ),
        (
            [GOOD_CELL],
            [GOOD_RESULT],
            [GOOD_STANDING, changed(GOOD_STANDING, unequal_losses=2, loss_difference=1e-7)],
            "FAILED: zero, stage 3: 2 losses (by up to 1e-07) and 0 weights differ from stage 0's",
        ),
        (
            [GOOD_CELL],
            [GOOD_RESULT],
            [changed(GOOD_STANDING, unequal_weights=4)],
            "FAILED: zero, stage 3: 0 losses (by up to 0) and 4 weights differ from stage 0's",
        ),
    ],
)
def test_summary_says_what_failed(cells, results, standings, message):
    findings = Findings(cells, results, standings)
    good = (cells, results, standings) == ([GOOD_CELL], [GOOD_RESULT], [GOOD_STANDING])
    assert findings.passed is good
    assert record(findings, 1.0)["passed"] is good
    told = summary(findings, 1.0)
    assert message in told
    assert ("FAILED" in told) is not good


def test_another_optimizer_need_not_have_the_losses_of_stage_0():
    ddp = changed(
        GOOD_STANDING, name="DDP, Gloo", is_stage=False, unequal_losses=4, loss_difference=2e-7
    )
    assert Findings([GOOD_CELL], [GOOD_RESULT], [GOOD_STANDING, ddp]).passed
    assert " to 2e-07 " in stages_line(ddp)
    assert " NO " in stages_line(changed(GOOD_STANDING, unequal_losses=1))


def test_lines_of_the_stages_table_stand_under_their_heads():
    config = TrainConfig(ModelConfig(16, 1, 2, 8), batch=8, steps=10, learning_rate=0.1, seed=0)
    *_, first, second = stages_head(config, [GOOD_STANDING]).splitlines()
    line = stages_line(GOOD_STANDING)
    assert len(first) == len(second) == len(line)
    for word, value in (("closed", "8.0"), ("with", "9.0"), ("measured", "9.1"), ("DDP", "1.2")):
        end = first.index(word) + len(word)
        assert line[:end].endswith(value)


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
    """Returns the part to expect where a rank gives index modulo 11, plus twice (its rank + 1)."""
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
