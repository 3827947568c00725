# SPDX-License-Identifier: Apache-2.0
"""``ringcomm demo`` as a user runs it; and it fails if one of its parts fails."""

from __future__ import annotations

import argparse
import json
import re

import pytest

from ringcomm.bench import collectives, training, training_deepspeed
from ringcomm.bench.cases import COLLECTIVES
from ringcomm.bench.launch import _STORE_FILE as STORE_FILE
from ringcomm.bench.training_systems import DDP_HERE, FSDP2_HERE, STAGES
from ringcomm.cli import bench, demo, phases, progress
from tests.cli.processes import run
from tests.support import ROOT
from tests.support.covering import EVERY_CASE


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("".join(f"{n} green bottles\n" for n in range(2000)))
    return path


def test_demo_checks_every_collective_and_finds_equal_losses(tmp_path, text):
    files = ("--json", tmp_path / "x.json", "--tables", tmp_path / "tables.txt")
    done = run("-m", "ringcomm", "demo", "--quick", "--data", text, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nAll results agree. (" in done.stdout
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["passed"]
    collectives, trained = (run["rows"] for run in record["runs"].values())
    assert {(row["collective"], row["system"]) for row in collectives} == {
        (name, system) for name in COLLECTIVES for system in ("ringcomm", "gloo")
    }
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in collectives)
    must_be_equal = {*STAGES[1:], DDP_HERE, FSDP2_HERE}
    if training_deepspeed.installed_version():
        must_be_equal |= set(training_deepspeed.STAGES)
    assert {row["system"] for row in trained if row["wrong"] == 0} == must_be_equal
    assert {row["wrong"] for row in trained} == {0, None}
    # What the first training of a process adds, about 30 MB, belongs to no stage of a small model.
    assert all(row["held_bytes"] < 10e6 for row in trained if row["system"] in STAGES)
    tables = (tmp_path / "tables.txt").read_text()
    assert str(text) in tables and "# all_to_all: 2 ranks" in tables
    assert not re.search(r"^ringcomm bench.*: \d+ cases?", tables, re.MULTILINE)  # progress
    lines = done.stdout.splitlines()
    assert lines[0] == f"2 phases, some seconds; the tables go to {tmp_path / 'tables.txt'}"
    card = lines[lines.index("") + 1 : -2]
    assert len(card) == 16 and all(len(line) <= 100 for line in card)
    assert card[-1].startswith("2 ranks, FP32, plain tensors. 2.00x: Gloo takes twice as long;")
    for name in COLLECTIVES:
        assert sum(line.startswith(f"{name} ") and line.endswith(" 0") for line in card) == 1
    for stage in STAGES[1:]:
        assert any(line.startswith(stage) and line.endswith("same weights") for line in card)


# The ranks of each run are forks of one interpreter that has imported their modules, since starting
# an interpreter takes long.
RANKS_OF_EACH_RUN = f"""
import os, sys
from importlib import import_module
import tests.support.preloaded
from ringcomm.bench import run
from ringcomm.cli import demo

assert "numpy" not in sys.modules
folder, text = sys.argv[1:]
names = [(each.bench, each.words) for each in demo.runs_of(True, text)]
modules = [(import_module("ringcomm.bench." + name), words) for name, words in names]
for number, (module, words) in enumerate(modules):
    os.environ.update(WORLD_SIZE="2", {STORE_FILE}=os.path.join(folder, str(number)))
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[rank] == 0:
            os.environ["RANK"] = str(rank)
            status = run.main(module.BENCH, list(words))
            sys.stdout.flush()
            os._exit(status)
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0], module
"""


USES_NUMPY = re.compile(r"\bimport numpy\b|\bfrom numpy\b|\.numpy\(|\bfrom_numpy\(")


def test_no_module_of_the_harness_names_numpy():
    for path in (ROOT / "bench").rglob("*.py"):
        assert not USES_NUMPY.search(path.read_text()), path
    for wrong in (
        "import numpy as np",
        "from numpy import ones",
        "x.numpy()",
        "torch.from_numpy(x)",
    ):
        assert USES_NUMPY.search(wrong)


@pytest.mark.skipif(not EVERY_CASE, reason="runs the demo once more, in real interpreters")
def test_no_run_needs_numpy(tmp_path, text):
    folder = tmp_path / "no_numpy"
    folder.mkdir()
    (folder / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    done = run("-c", RANKS_OF_EACH_RUN, tmp_path, text, path=folder)
    assert done.returncode == 0, done.stderr
    for name in COLLECTIVES:
        assert f"# {name}: 2 ranks" in done.stdout
    assert FSDP2_HERE in done.stdout


@pytest.mark.parametrize("quick", [False, True])
def test_the_harness_takes_what_each_run_says(quick):
    runs = demo.runs_of(quick, "some.txt")
    for each in runs:
        words = [*each.words, "--json", "x.json"]
        if each.bench == bench.COLLECTIVES:
            chosen = collectives.parse(words)
            # Its default is 2 ranks.
            assert (chosen.ranks, chosen.check, chosen.peers) == (None, 1, ("gloo",))
        else:
            asked = training.BENCH.build_parser().parse_args(words)
            assert (asked.ranks, asked.data) == (None, "some.txt")  # its default is 2
    names = [each.bench for each in runs]
    assert names.count(bench.COLLECTIVES) == names.count(bench.TRAINING) == 2 - quick
    assert not any("--data" in each.words for each in demo.runs_of(quick, None))


@pytest.mark.parametrize(("failing", "status"), [(None, 0), (0, 1), (-1, 1)])
def test_a_run_that_fails_fails_the_demo(monkeypatch, capsys, tmp_path, failing, status):
    runs = demo.runs_of(True, None)
    wrong = None if failing is None else runs[failing]

    def harness(name, *words, output, beat):
        output.write("the reason\n")
        output.flush()
        return int(wrong is not None and words[:-2] == wrong.words)

    monkeypatch.setattr(phases, "run_harness", harness)
    file = tmp_path / "x.json"
    asked = argparse.Namespace(quick=True, data=None, json=str(file), tables=None)
    assert demo.run(asked) == status
    told, complaint = capsys.readouterr()
    assert complaint == ("" if wrong is None else "the reason\n")
    assert ("NOT all results agree." in told) is (status == 1)
    assert json.loads(file.read_text())["passed"] is (status == 0)
    assert wrong is None or f"FAILED: {wrong.title}: exit status 1" in told


def test_the_length_of_the_demo_and_of_its_phases_is_shown(monkeypatch, capsys, tmp_path):
    def harness(name, *words, output, beat):
        beat()
        return 0

    monkeypatch.setattr(phases, "run_harness", harness)
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.0)
    tables = str(tmp_path / "x.txt")
    asked = argparse.Namespace(quick=False, data=None, json=None, tables=tables)
    assert demo.run(asked) == 0
    told, shown = capsys.readouterr()
    first = f"4 phases, about 67 s on two idle cores; the tables go to {tables}"
    assert told.splitlines()[0] == first
    runs = demo.runs_of(False, None)
    assert shown.splitlines() == [
        f"{number}/4  {each.title}: running for 0 of about {each.about_s:.0f} s"
        for number, each in enumerate(runs, 1)
    ]


def test_ctrl_c_in_a_run_ends_the_demo(monkeypatch, capsys):
    begun = []

    def harness(name, *words, output, beat):
        begun.append(name)
        return phases.INTERRUPTED

    monkeypatch.setattr(phases, "run_harness", harness)
    asked = argparse.Namespace(quick=True, data=None, json=None, tables=None)
    assert demo.run(asked) == phases.INTERRUPTED and len(begun) == 1
    told = capsys.readouterr().out
    assert "Interrupted in phase 1 of 2" in told and "agree" not in told


def test_the_card_counts_wrong_elements_and_weights():
    common = {"time_us": 1500.0, "held_bytes": 2_000_000}
    summed = [
        {"collective": "all_reduce", "size_bytes": size, "system": name, "ratio": 2.0, **common}
        | {"wrong": wrong}
        for size, wrong in ((4096, 3), (8192, 4))
        for name in ("ringcomm", "gloo")
    ]
    trained = [
        {"collective": "training_step", "system": f"stage {n}", "ratio": 0.5, **common}
        | {"wrong": [None, 0, 7][n]}
        for n in range(3)
    ]
    card = [line.split() for line in demo.card_lines([{"rows": summed}, {"rows": trained}])]
    assert card[1] == ["all_reduce", "8,192", "1.5", "ms", "2.00x", "14"]
    assert card[3][:3] == ["stage", "0", "2.0"] and card[3][-1] == "reference"
    assert card[4][-3:] == ["2.00x", "same", "weights"]
    assert card[5][-2:] == ["7", "WRONG"]


def test_demo_refuses_to_run_as_a_rank():
    done = run(
        "-c",
        "import os, sys; os.environ.update(RANK='0', WORLD_SIZE='2');"
        "from ringcomm.cli import main; sys.exit(main(['demo']))",
    )
    assert done.returncode == 2
    assert "demo starts its own ranks; run it without torchrun" in done.stderr
