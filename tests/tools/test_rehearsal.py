"""``make gpu-check REHEARSE=1``: what it makes of each run, and a sample of it from end to end."""

import json

import pytest

from ringcomm.bench import device_steps, training
from ringcomm.bench.collectives import parse
from tests.bench.programs import run_program
from tests.gpu import rehearsed
from tests.support import ROOT
from tests.support.emulator.library import COMPILER
from tools.gpu_check import benches
from tools.gpu_check.plan import OK
from tools.gpu_check.rehearsal import Rehearsal


def test_a_rehearsal_runs_every_run_of_the_harness_at_small_sizes():
    runs = [*benches.plan((2, 30, 0)), *benches.optimizer_plan()]
    for usual, small in zip(runs, Rehearsal().plan(runs), strict=True):
        module, *words = small.arguments
        assert (small.name, module, small.module) == (usual.name, usual.module, rehearsed.__name__)
        if module.endswith("collectives"):
            options = parse(words)
            assert options.max_bytes == 16 << 10 and options.rounds == 2
            assert options.ranks == parse(usual.arguments).ranks
            assert not (options.graph_calls and "torch" in options.systems)
        elif module.endswith("device_steps"):
            asked = device_steps.parse(words)
            assert (asked.millions, asked.rounds) == (1, 1)
        else:
            assert training.parse(words).width == 32
    assert len(Rehearsal(sample=True).plan(runs)) == 1


def test_a_rehearsal_sees_no_gpu():
    environment = Rehearsal().environment({"CUDA_VISIBLE_DEVICES": "0", "A": "b"})
    assert environment == {"CUDA_VISIBLE_DEVICES": "", "A": "b"}


@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler")
def test_a_sample_is_rehearsed_from_the_probe_to_the_record(tmp_path):
    results = ROOT / "bench" / "results"
    before = sorted(results.iterdir())
    words = ("--rehearse", "sample", "--stages", "test,sanitize,bench,steps,record")
    environment = {"OUT": str(tmp_path / "out")}
    done = run_program("tools.gpu_check", *words, environment=environment, timeout_s=400)
    assert done.returncode == 0, done.stdout
    assert sorted(results.iterdir()) == before
    files = sorted((tmp_path / "out").iterdir())
    assert [file.suffix for file in files] == [".log", ".csv", ".json", ".md"]
    assert all(file.name.startswith("rehearsal-") for file in files[1:])
    document = json.loads(files[2].read_text())
    verdicts = {each["stage"]: each["verdict"] for each in document["stages"]}
    assert document["ended"] is True
    assert verdicts == dict.fromkeys(("test", "sanitize", "bench", "steps"), OK)
    # Every figure says what it is, by itself and beside the others.
    assert "no figure here is a GPU's" in document["provenance"]["rehearsal"]
    assert document["rows"] and document["provenance"]["copy GB/s"] == "none, rehearsed"
    assert all(row["system"].endswith(" (rehearsed)") for row in document["rows"])
    assert all(
        row["note"].startswith("rehearsed on an emulated device") for row in document["rows"]
    )
    assert {goal["reached"] for goal in document["goals"]} == {None}
    assert not any(goal["cells"] for goal in document["goals"])
    answers = {goal["answer"] for goal in document["goals"]}
    # The goals have found their rows.
    assert "rehearsed: 0 figures, none judged" in answers and len(answers) > 1
    assert "# none: rehearsed on an emulated device" in files[3].read_text()
