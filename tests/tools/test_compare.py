# SPDX-License-Identifier: Apache-2.0
"""``make compare``: tables and chart of fixed results, its runs, and the page with its tables."""

import re
from dataclasses import replace

import pytest

from ringcomm.bench import collectives, timing, training
from ringcomm.bench.report import Report, Row, write_csv
from ringcomm.bench.timing import Timing
from ringcomm.cli.phases import INTERRUPTED, Phase
from tools.compare import __main__ as command
from tools.compare import page, session, tables

FACTS = {"cpu": "a processor", "cores": "2", "date": "2026-11-29", "torch": "2.13", "load": "1 2 3"}
REASON = "no distribution for this processor"
FAILED = 3
# Microseconds by round. The median of gloo's ratios is 2 (of 2, 0.5, 3), but the medians of the
# times have the ratio 0.5; impi's median is just below 1.
TIMES = {
    "ringcomm": (1.0, 10.0, 100.0),
    "gloo": (2.0, 5.0, 300.0),
    "mpi": (3.0, 30.0, 300.0),
    "impi": (0.9996, 9.996, 99.96),
}


def rows(systems, name, size_bytes):
    """The rows of one case, as the harness makes them of the times of its rounds."""
    case = Row(
        name, size_bytes, 4, "float", "sum", -1, 2, "", "in" if name == "all_reduce" else "out"
    )
    timings = {system: Timing(TIMES[system], 1) for system in systems}
    return timing.rows_of(case, timings, "ringcomm")


def report(*systems):
    cases = [("reduce_scatter", 64 << 20), ("all_gather", 64 << 20), ("all_reduce", 64 << 20)]
    found = [row for case in cases for row in rows(("ringcomm", *systems), *case)]
    versions = {f"version of {system}": f"the  version of {system}" for system in systems}
    return Report({**FACTS, **versions}, found)


def trained():
    note = "loss 5.0 to 4.0; 300.0 MB a rank; ddp on gloo takes 1.6000; fsdp2 on gloo takes 3.0000"
    note += "; deepspeed zero-1 takes 0.7500; deepspeed zero-2 takes 5.0000"
    base = Row(
        "training_step", 8, 2, "float32", "none", -1, 2, "stage 1", "64x1", 2500.0, note=note
    )
    stages = [replace(base, system=f"stage {stage}", held_bytes=3_000_000) for stage in range(4)]
    return Report({**FACTS, "version of deepspeed": "0.19"}, stages)


def fixed_session():
    """A session in which oneCCL could not be measured."""
    reports = {"heap-mpich": report("gloo", "mpi"), "heap-intel": report("impi")}
    return session.Session({**reports, session.TRAINING_RUN: trained()}, {"oneCCL": REASON})


def row_with(text, *words):
    (found,) = [
        line for line in text.splitlines() if line.startswith("|") and all(map(line.count, words))
    ]
    return [cell.strip() for cell in found.strip("|").split("|")]


def check_tables(text):
    """What the tables of the fixed session must say."""
    head = row_with(text, "collective")
    assert head[3:] == ["ringcomm", "Gloo", "MPICH", "Intel MPI", "oneCCL", "result"]
    cells = row_with(text, "all_gather")
    assert cells[:4] == ["all_gather", "64 MiB", "heap", "10 us"]
    assert cells[4:] == ["2.00", "3.00", "0.9996", "not available", "lost to Intel MPI"]
    assert row_with(text, "stage 1")[1:] == [
        "3.0",
        "2.5 ms",
        "1.60",
        "3.00",
        "0.75",
        "lost to DeepSpeed",
    ]
    assert row_with(text, "stage 2")[-2:] == ["5.00", ""]
    assert row_with(text, "stage 3")[-2:] == ["not available", ""]
    assert f"oneCCL was not available: {REASON}" in text.splitlines()
    assert "ringcomm lost 3 of 9 comparisons" in text and "ringcomm lost 1 of 8" in text
    assert "stage 0" not in text


def test_a_lost_row_says_so_and_a_missing_library_says_why():
    check_tables(tables.block(fixed_session(), ""))


def test_a_table_without_a_lost_row_has_no_column_for_results():
    won = [tables.Line(("all_gather",), 1.0, {"Gloo": 2.0, "MPICH": None})]
    assert tables.markdown(("collective",), won) == [
        "| collective | ringcomm | Gloo | MPICH |",
        "| --- | --- | --- | --- |",
        "| all_gather | 1 us | 2.00 | not available |",
    ]


def test_a_trial_is_marked_and_its_chart_names_its_size():
    trial = fixed_session()
    assert "A trial" not in tables.block(trial, "chart.svg")
    assert "collectives of 64 MiB over" in tables.block(trial, "chart.svg")
    for each in trial.reports.values():
        each.rows[:] = [replace(row, size_bytes=128 << 10) for row in each.rows]
    text = tables.block(trial, "chart.svg")
    assert text.startswith("A trial at small sizes: these figures say nothing about speed.\n")
    assert "collectives of 128 KiB over" in text


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("MPICH Version:      5.0.2", "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "Intel MPI 2021.18.1"),
        ("Gloo of torch 2.13.0+cpu", "Gloo of torch 2.13.0+cpu"),
    ],
)
def test_versions_are_short(told, shown):
    assert tables._short_version(told) == shown


def never_lost(monkeypatch):
    monkeypatch.setattr(tables.Line, "lost_to", property(lambda line: []))


def lost_if_slower(monkeypatch):
    slower = property(
        lambda line: [name for name, ratio in line.ratios.items() if (ratio or 0) > 1]
    )
    monkeypatch.setattr(tables.Line, "lost_to", slower)


def lost_after_rounding(monkeypatch):
    rounded = property(
        lambda line: [name for name, ratio in line.ratios.items() if round(ratio or 1, 2) < 1]
    )
    monkeypatch.setattr(tables.Line, "lost_to", rounded)


def ratio_of_medians(monkeypatch):
    monkeypatch.setattr(timing, "ratios", lambda one, own: [one.median_us / own.median_us])


def no_reasons(monkeypatch):
    monkeypatch.setattr(tables, "NOT_AVAILABLE", "-")


@pytest.mark.parametrize(
    "mutate", [never_lost, lost_if_slower, lost_after_rounding, ratio_of_medians, no_reasons]
)
def test_wrong_tables_are_found(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_tables(tables.block(fixed_session(), ""))


def test_the_circumstances_have_the_versions_and_the_load():
    told = tables.block(fixed_session(), "").splitlines()[0]
    assert "a processor with 2 cores on 2026-11-29" in told and "end of each run: 1, 1, 1." in told
    assert "the version of gloo; the version of mpi; the version of impi; DeepSpeed 0.19." in told


def test_a_session_without_results_has_reasons_only():
    empty = session.Session({}, {"MPICH": REASON})
    assert tables.block(empty, "") == f"MPICH was not available: {REASON}\n"
    assert command.chart(empty) == ""


def test_numbers_have_about_three_digits():
    ratios = [0.0123, 0.8449, 0.99999, 1.0, 9.994, 40.449, 1385.7, None]
    told = ["0.012", "0.84", "1.0000", "1.00", "9.99", "40.4", "1386", "not available"]
    assert [tables.ratio_text(ratio) for ratio in ratios] == told
    assert [tables.time_text(us) for us in (3.456, 2710.0)] == ["3.46 us", "2.71 ms"]


def test_the_chart_shows_a_lost_collective_and_only_what_was_measured():
    drawn = command.chart(fixed_session())
    assert drawn.count(">1.00, lost<") == 3 and drawn.count(">2.0<") == 3
    assert "all_reduce: Intel MPI" in drawn and "oneCCL" not in drawn
    assert "prefers-color-scheme:dark" in drawn and "in one session" in drawn


def test_results_are_read_as_they_were_written(tmp_path):
    written = fixed_session()
    for run, each in written.reports.items():
        write_csv(each, session.results_of(tmp_path)[run])
    session.write_reasons(tmp_path, written.reasons)
    found = session.read_session(tmp_path)
    assert tables.block(found, "x.svg") == tables.block(written, "x.svg")
    session.copy(tmp_path, tmp_path / "copy")
    (tmp_path / "copy" / "mine.csv").touch()
    session.remove(tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["mine.csv"]


# ---- the page ----------------------------


def test_tables_are_replaced_between_the_markers():
    text = f"before\n{page.BEGIN}\n\nold\n\n{page.END}\nafter\n"
    once = page.replaced(text, "new\n")
    assert once == f"before\n{page.BEGIN}\n\nnew\n\n{page.END}\nafter\n"
    assert page.replaced(once, "new") == once
    for wrong in ("", page.BEGIN, page.END, f"{page.END}{page.BEGIN}", text + text):
        with pytest.raises(ValueError, match="each once"):
            page.replaced(wrong, "new")


def test_the_pages_have_the_tables_of_the_recorded_session():
    """If not: make compare OPTIONS="--render --record" with the results in build/compare."""
    recorded = session.read_session(command.RECORDED)
    for path, expected in (
        (page.PAGE, command.recorded_tables(recorded)),
        (page.README, tables.readme_table(recorded)),
    ):
        assert page.parts(path.read_text())[1] == expected.strip()
    assert (page.PICTURES / command.CHART).read_text() == command.chart(recorded)


def test_the_highlight_of_the_readme_is_of_the_recorded_session():
    recorded = session.read_session(command.RECORDED)
    lines = [line for line in tables.largest_lines(recorded) if line.cells[1] == "heap"]
    highlight = re.sub(r"\s+", " ", page.README.read_text())
    for name, verb in (("Gloo", " takes"), ("MPICH", "")):
        ratios = [ratio for line in lines for ratio in [line.ratios[name]] if ratio is not None]
        between = f"{min(ratios):.2g} to {max(ratios):.2g}"
        assert len(ratios) == len(lines) and f"{name}{verb} {between} times" in highlight


# ---- the session ----------------------------


@pytest.mark.parametrize("pace", [session.FULL, session.QUICK])
def test_the_harness_takes_the_words_of_each_run(pace):
    runs = session.runs(pace, list(session.COLLECTIVE_PEERS))
    assert list(runs) == ["heap-mpich", "heap-intel", "plain-mpich", "plain-intel", "training"]
    for name, phase in runs.items():
        if name == session.TRAINING_RUN:
            training.BENCH.build_parser().parse_args(phase.words)
            continue
        asked = collectives.parse(phase.words)
        assert (asked.subject, asked.check, asked.ranks) == ("ringcomm", 1, None)
        assert (asked.tensors, asked.peers) == (
            name.partition("-")[0],
            session.LAUNCHES[name.partition("-")[2]],
        )
    assert {"mpi", "impi", "oneccl"} == set(session.probes())
    for system, phase in session.probes().items():
        assert collectives.parse(phase.words).peers == (system,)


def test_a_run_has_the_systems_that_are_available():
    runs = session.runs(session.QUICK, ["gloo", "impi"])
    assert [phase.words[-1] for phase in runs.values()][:4] == ["gloo", "impi"] * 2
    assert "oneCCL" not in runs["heap-intel"].title
    assert "heap-intel" not in session.runs(session.QUICK, ["gloo", "mpi"])


@pytest.mark.parametrize(
    ("status", "output", "why"),
    [
        (0, "a warning\n", ""),
        (2, "x\nringcomm bench: no mpiexec: install it\n", "no mpiexec: install it"),
        (1, "Traceback\nRuntimeError: no\nranks were ended\n", "RuntimeError: no"),
        (9, "killed\n", "its trial call failed with status 9"),
    ],
)
def test_a_system_that_cannot_run_has_a_reason(monkeypatch, tmp_path, status, output, why):
    def harness(*words, output):
        output.write(told)
        output.flush()
        return status

    told = output
    monkeypatch.setattr(session, "run_harness", harness)
    with (tmp_path / "log").open("w+") as log:
        log.write("RuntimeError: of another command\n")
        assert session.reason(Phase("a trial", "collectives", ()), log) == why


class Harness:
    """Takes the place of the phases: writes a report for each, or fails the run ``failing``."""

    def __init__(self, failing="", status=FAILED):
        self.failing, self.status = failing, status

    def run_phase(self, phase, place, log, files):
        name = files[-1].rpartition("/")[2].removesuffix(".csv")
        if name == self.failing:
            write_csv(report(), files[-1])  # the rows before it failed
            return self.status
        made = (
            trained() if name == session.TRAINING_RUN else report(*session.LAUNCHES[name[-5:]][:1])
        )
        write_csv(made, files[-1])
        return 0


def page_of(folder):
    return folder / "docs" / "page.md"


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Folders of a session in which only MPICH is missing, and two pages for its tables."""
    pictures = tmp_path / "docs" / "pictures"
    pictures.mkdir(parents=True)
    readme = tmp_path / "README.md"
    for path in (page_of(tmp_path), readme):
        path.write_text(f"{page.BEGIN}\n\nold\n\n{page.END}\n")
    monkeypatch.setattr(command, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(command, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(command, "PAGE", page_of(tmp_path))
    monkeypatch.setattr(command, "README", readme)
    monkeypatch.setattr(command, "PICTURES", pictures)
    monkeypatch.setattr(session, "deepspeed_reason", lambda: "")
    monkeypatch.setattr(session, "reason", lambda phase, log: REASON * ("mpi" in phase.words))
    return tmp_path


def run(monkeypatch, harness, *words):
    monkeypatch.setattr(command, "run_phase", harness.run_phase)
    return command.main(["--results", str(command.FOLDER), *words])


def test_a_session_announces_its_runs_and_writes_its_files(monkeypatch, folders, capsys):
    assert run(monkeypatch, Harness()) == 0
    told = capsys.readouterr().out
    assert told.index(f"MPICH: not available: {REASON}") < told.index(
        "5 runs on 2 ranks, about 4 min"
    )
    assert "Gloo, about 45 s" in told and "| all_gather | 64 MiB | plain |" in told
    assert {path.name for path in (folders / "build").iterdir()} == {
        *("heap-mpich.csv", "heap-intel.csv", "plain-mpich.csv", "plain-intel.csv", "training.csv"),
        *("not-available.json", "session.txt", "tables.md", "compare.svg"),
    }
    assert not (folders / "recorded").exists() and "old" in page_of(folders).read_text()
    assert f"MPICH was not available: {REASON}" in (folders / "build" / "tables.md").read_text()


def test_a_recorded_session_is_on_the_page(monkeypatch, folders):
    assert run(monkeypatch, Harness(), "--record") == 0
    _, found, _ = page.parts(page_of(folders).read_text())
    recorded = session.read_session(folders / "recorded")
    assert found == command.recorded_tables(recorded).strip() and "pictures/compare.svg" in found
    _, in_readme, _ = page.parts((folders / "README.md").read_text())
    assert in_readme == tables.readme_table(recorded).strip()
    assert "| all_gather | plain |" in in_readme and "not available" in in_readme
    assert (folders / "docs" / "pictures" / "compare.svg").read_text() == command.chart(recorded)
    # Recorded results can be put there again, and stay.
    kept = set((folders / "recorded").iterdir())
    assert command.main(["--results", str(folders / "recorded"), "--render", "--record"]) == 0
    assert kept and kept <= set((folders / "recorded").iterdir())
    # What exists already is put there without a run.
    page_of(folders).write_text(f"{page.BEGIN}{page.END}")
    assert command.main(["--results", str(folders / "build"), "--render", "--record"]) == 0
    assert page.parts(page_of(folders).read_text())[1] == found


def test_a_run_that_fails_is_named_and_nothing_is_recorded(monkeypatch, folders, capsys):
    assert run(monkeypatch, Harness("heap-intel"), "--record") == 1
    told = capsys.readouterr().out
    why = "the run 'heap-intel' failed with status 3"
    assert (
        f"Intel MPI was not available: {why}" in told and f"oneCCL was not available: {why}" in told
    )
    assert f"MPICH was not available: {REASON}" in told and "nothing was recorded" in told
    assert "old" in page_of(folders).read_text() and not (folders / "recorded").exists()
    assert not (folders / "build" / "heap-intel.csv").exists()


def test_ctrl_c_ends_the_session_without_tables(monkeypatch, folders, capsys):
    assert run(monkeypatch, Harness("plain-mpich", INTERRUPTED)) == INTERRUPTED
    assert "Interrupted: no tables were written." in capsys.readouterr().out
    assert not (folders / "build" / "tables.md").exists()


def test_quick_figures_are_not_for_the_page(capsys):
    with pytest.raises(SystemExit):
        command.main(["--quick", "--record"])
    assert "not for the page" in capsys.readouterr().err
