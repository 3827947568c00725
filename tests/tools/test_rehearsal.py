# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check REHEARSE=1``: how it shortens each run, and a sample run from end to end."""

from dataclasses import replace

import pytest

from ringcomm.bench import device_calls, device_steps, training
from ringcomm.bench.collectives import parse
from ringcomm.bench.report import Report, read
from tests.bench.programs import run_program
from tests.gpu import rehearsed
from tests.support import ROOT, stub_driver
from tests.support.emulator.library import COMPILER, library
from tools.gpu_check import benches
from tools.gpu_check.goals import evaluate


def test_a_rehearsal_runs_every_run_of_the_harness_at_small_sizes():
    runs = [*benches.plan((2, 30, 0)), *benches.optimizer_plan(), *benches.grid_plan()]
    runs += [*benches.calls_plan(), *benches.training_plan()]
    for usual in runs:
        small = benches.rehearsed(usual)
        module, *words = small.words.split()
        assert small.command[:3] == ["-m", rehearsed.__name__, module]
        if module == "collectives":
            options = parse(words)
            assert options.maxbytes == 16 << 10 and options.rounds == 2
            assert options.ranks == parse(usual.words.split()[1:]).ranks
            assert not (options.graph and {"torch", "copy"} & {*options.systems})
        elif module == "device_steps":
            asked = device_steps.BENCH.parse(words)
            assert (asked.millions, asked.rounds) == (1, 1)
        elif module == "device_calls":
            asked = device_calls.BENCH.parse(words)
            assert (asked.calls, asked.rounds) == (2, 1)
        else:
            asked = training.BENCH.parse(words)
            assert (asked.width, asked.batches) == (32, [(1, 16)])


def enlarged(row):
    """Returns the row as a GPU's: without its mark, at the sizes that the goals use."""
    larger = replace(row, system=row.system.removesuffix(" (rehearsed)"))
    if larger.system == "ringcomm" and row.collective == "all_reduce":
        return larger
    return replace(larger, size_bytes=row.size_bytes << 14, count=row.count << 8)


@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler")
def test_a_sample_is_rehearsed_from_the_probe_to_the_files(tmp_path):
    # Compile first, so that no stage's time includes it.
    library()
    stub_driver.driver()
    results = ROOT / "bench" / "results"
    before = sorted(results.iterdir())
    stages = ("calls", "profile", "grid", "steps", "bench", "training", "test", "sanitize")
    words = ("--rehearse", "sample", "--stages", ",".join(stages))
    environment = {"OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": "0"}
    done = run_program("tools.gpu_check", *words, environment=environment, timeout_s=400)
    assert done.returncode == 0, done.stdout
    assert sorted(results.iterdir()) == before
    files = sorted((tmp_path / "out").iterdir())
    assert [file.suffix for file in files] == [".log", ".csv", ".json", ".md"]
    assert all(file.name.startswith("rehearsal-") for file in files[1:])
    report = read(files[2])
    facts = report.provenance
    for stage in stages:
        assert facts[f"stage {stage}"].startswith("ok, ")
    assert facts["ended"] == "yes"
    # Every figure is marked as rehearsed, in its row and for the whole report.
    assert "no figure here is a GPU's" in facts["rehearsal"]
    assert report.rows and facts["copy GB/s"] == "none, rehearsed"
    assert all(row.system.endswith(" (rehearsed)") for row in report.rows)
    assert all(row.note.startswith("rehearsed on an emulated device") for row in report.rows)
    assert not any(judged.figures for judged in evaluate([report]))
    assert "# none: rehearsed on an emulated device" in files[3].read_text()
    # Graphs of a stage and of torch alone take the same steps.
    notes = [row.note for row in report.rows if row.system.endswith(", graph (rehearsed)")]
    assert len(notes) == 2 and len({*notes}) == 1 and "loss " in notes[0]
    # With GPU sizes, the goals find their rows.
    whole = Report({**facts, "copy GB/s": "1.0"}, [enlarged(row) for row in report.rows])
    assert sum(bool(judged.figures) for judged in evaluate([whole])) > 2
