"""``ringcomm report``: what its page holds, as data; which files it takes and which it refuses."""

import base64
import dataclasses
import gzip
import hashlib
import html.parser
import importlib.util
import json
import os
import re

import pytest
import torch

import ringcomm
from ringcomm.bench import report as bench_report
from ringcomm.cli import doctor, main
from ringcomm.cli.report import measurements, sources
from ringcomm.cli.report.time_line import Bar, time_line
from ringcomm.cli.report.waits import waits_of
from ringcomm.comm.recorder import trace_file
from ringcomm.comm.recorder.records import RankRecording, Record, Recording
from ringcomm.zero.profile import StepProfile, TimedSpan

MAX = ringcomm.ReduceOp.MAX
MS = 1_000_000
HOSTILE = '</script><script>alert("1")</script>&lt;b&gt;<b>'
LIBRARY = "/* plotly.js v9.8.7 */ var Plotly = '</script>';"


def call(number, begin_ms, end_ms, collective="all_reduce", **changes):
    usual = Record(
        track="collectives",
        number=number,
        collective=collective,
        dtype="float32",
        op="SUM",
        root=-1,
        algorithm="direct",
        kernels="native",
        match_bytes=64,
        size_bytes=64,
        state="done" if end_ms else "running",
        status="",
        peer=-1,
        begin_ns=begin_ms * MS,
        end_ns=end_ms * MS,
        site="train.py:7",
    )
    return dataclasses.replace(usual, **changes)


def recording(*ranks, waits_for=(), messages=(), on_device=False):
    made = [
        RankRecording(
            index,
            100 + index,
            dict(waits_for).get(index, -1),
            tuple(calls),
            tuple(dict(messages).get(index, ())),
            on_device=on_device,
        )
        for index, calls in enumerate(ranks)
    ]
    return Recording("world", len(ranks), 0xABC, 1000 * MS, tuple(made))


def found(recorded, expected=None):
    waits = waits_of(recorded, len(recorded.ranks) if expected is None else expected)
    return [(w.rank, w.awaited, w.number, round(w.seconds * 1e3, 6), w.is_told) for w in waits]


def test_a_call_that_ended_waited_for_the_rank_that_began_it_last():
    recorded = recording([call(1, 10, 50)], [call(1, 40, 50)], [call(1, 20, 45)])
    assert found(recorded) == [(0, 1, 1, 30.0, False), (2, 1, 1, 20.0, False)]


def test_a_rank_that_had_left_a_call_waited_for_nobody_then():
    assert found(recording([call(1, 10, 15)], [call(1, 40, 50)])) == [(0, 1, 1, 5.0, False)]


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_only_the_root_is_awaited_where_only_it_gives(name):
    calls = [[call(1, begin, 60, name, root=1)] for begin in (10, 20, 50)]
    assert found(recording(*calls)) == [(0, 1, 1, 10.0, False)]


@pytest.mark.parametrize("name", ["reduce", "gather"])
def test_only_the_root_waits_where_only_it_takes(name):
    calls = [[call(1, begin, 60, name, root=1)] for begin in (10, 20, 50)]
    assert found(recording(*calls)) == [(1, 2, 1, 30.0, False)]


def test_of_calls_that_did_not_end_the_recorder_says_who_is_awaited():
    failed = call(2, 200, 300, state="failed", status="timeout", peer=2)
    received = call(1, 400, 0, "recv", track="messages", peer=0)
    recorded = recording(
        [call(1, 10, 20), call(2, 100, 0)],
        [call(1, 10, 20), failed],
        [call(1, 10, 20)],
        waits_for={0: 2, 2: 0},
        messages={2: [received]},
    )
    assert found(recorded) == [
        (0, 2, 2, 900.0, True),
        (1, 2, 2, 100.0, True),
        (2, 0, 1, 600.0, True),
    ]


def test_what_is_not_known_is_no_wait():
    """A rank is missing, or the times are those of hosts that only enqueue."""
    calls = [call(1, 10, 50)], [call(1, 40, 50)]
    assert found(recording(*calls), expected=3) == []
    assert found(recording(*calls, on_device=True)) == []


def test_calls_within_a_call_over_nodes_are_not_counted_twice():
    outer = [call(1, 10, 90), call(2, 12, 80)]
    late = [call(1, 40, 90), call(2, 42, 80)]
    assert found(recording(outer, late)) == [(0, 1, 1, 30.0, False)]


def test_bars_that_overlap_have_lanes_of_their_own():
    spans = [("a", 0, 4), ("a", 1, 2), ("a", 2, 3), ("a", 4, 5), ("b", 0, 1)]
    figure = time_line([Bar(row, "x", begin, end) for row, begin, end in spans], "then")
    (trace,) = figure.data
    assert trace["y"] == [0, 1, 1, 0, 2]
    assert trace["base"] == [0, 1, 2, 4, 0]
    assert trace["x"] == [4, 1, 1, 1, 1]
    axis = figure.layout["yaxis"]
    assert (axis["tickvals"], axis["ticktext"]) == ([0.5, 2], ["a", "b"])


def test_what_took_longest_lies_on_top_and_is_named_first():
    """Bars of one pixel would otherwise hide each other as their names come."""
    spans = [("short", 0, 1), ("long", 1, 4), ("short", 4, 5), ("medium", 5, 7.5)]
    figure = time_line([Bar("a", name, begin, end) for name, begin, end in spans], "then")
    assert [trace["name"] for trace in figure.data] == ["short", "medium", "long"]
    assert figure.layout["legend"] == {"traceorder": "reversed"}


def test_of_too_many_bars_the_newest_of_each_row_are_shown():
    bars = [Bar("a", "x", at, at + 1) for at in range(100)] + [Bar("b", "x", 5, 6)]
    figure = time_line(bars, "then", most=11)
    (trace,) = figure.data
    assert trace["base"] == [*range(90, 100), 5]
    assert any("11 of 101 are shown" in note and "90 older" in note for note in figure.notes)
    assert not any("left out" in note for note in time_line(bars, "then").notes)


def test_a_look_at_what_came_before_a_wait():
    bars = [Bar("a", "x", at, at + 1) for at in range(100)]
    assert [label for label, _ in time_line(bars, "then").buttons][:2] == ["all", "closer"]
    figure = time_line([*bars, Bar("a", "x", 100, 5000, mark="open")], "then")
    label, change = figure.buttons[1]
    assert label == "the last calls before it stopped"
    begin, end = change["xaxis.range"]
    assert 91 < begin < 92 and 100 < end < 110
    assert [trace["marker"]["pattern"]["shape"][-1] for trace in figure.data] == ["/"]


# Pages of files, whose text is read as a browser would.


class Page(html.parser.HTMLParser):
    """A page: its scripts, its words, and the attributes that name something to fetch."""

    def __init__(self, path):
        super().__init__()
        self.scripts, self.words, self.fetched, self.policy = [], [], [], ""
        self._inside = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        values = dict(attrs)
        if tag == "script":
            self.scripts.append((values.get("id", ""), ""))
        if values.get("http-equiv"):
            self.policy = values["content"]
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            name, text = self.scripts[-1]
            self.scripts[-1] = name, text + data
        elif self._inside != "style":
            self.words.append(data)

    def script(self, name):
        (text,) = (text for each, text in self.scripts if each == name)
        return text

    @property
    def figures(self):
        return json.loads(self.script("figures"))

    @property
    def text(self):
        return "\n".join(self.words)


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "plotly.js"
    path.write_text(LIBRARY)
    return path


@pytest.fixture
def paged(tmp_path, library):
    def write(*words):
        out = tmp_path / "out.html"
        assert main(["report", *map(str, words), "--plotly", str(library), "-o", str(out)]) == 0
        return Page(out)

    return write


def written(path, plain):
    path.write_text(json.dumps(plain))
    return path


def saved(path, recorded, error="it broke", of_node=None, at_s=1.5e9):
    trace = trace_file.Trace(recorded, recorded.ranks[0].rank, at_s, error, of_node)
    path.write_text(trace_file.text_of(trace))
    return path


HANG = recording(
    [call(1, 10, 50), call(2, 100, 0, site=f"{HOSTILE}.py:3")], [call(1, 40, 50)], waits_for={0: 1}
)


def test_a_trace_has_its_verdict_time_line_and_waits(tmp_path, paged):
    page = paged(saved(tmp_path / "t.json", HANG, f"it broke {HOSTILE}"))
    assert f"it broke {HOSTILE}" in page.text
    assert "call 2 was begun by rank 0, but not yet by rank 1" in page.text
    told = "rank 0 (pid 100) is in all_reduce(float32, SUM, 64 bytes, direct), call 2 for 900.0 ms"
    assert f"{told}, waits for rank 1, at {HOSTILE}.py:3" in page.text
    line, ranking = page.figures
    (calls,) = line["data"]
    assert calls["name"] == "all_reduce"
    assert calls["base"] == [-0.99, -0.9, -0.96] and calls["x"] == [0.04, 0.9, 0.01]
    assert calls["y"] == [0, 0, 1] and line["layout"]["yaxis"]["ticktext"] == ["rank 0", "rank 1"]
    assert calls["marker"]["pattern"]["shape"] == ["", "/", ""]
    assert "waited for: rank 1, 900 ms" in calls["hovertext"][1]
    assert ranking["data"][0]["y"] == ["rank 1", "rank 0"]
    assert [trace["x"] for trace in ranking["data"]] == [[0.03, 0.0], [0.9, 0.0]]
    assert "930 ms" in page.words  # the matrix, and the ranking's table


def test_text_of_files_is_no_markup_and_no_program(tmp_path, paged):
    page = paged(saved(tmp_path / "t.json", HANG, HOSTILE), "--title", HOSTILE)
    assert [name for name, _ in page.scripts] == ["figures", "plotly", ""]
    (hover,) = (each for each in page.figures[0]["data"][0]["hovertext"] if "alert" in each)
    assert "<script" not in hover and "&lt;/script&gt;&lt;script&gt;" in hover
    assert set(re.findall(r"<[^>]*>", hover)) == {"<b>", "</b>", "<br>"}
    assert page.fetched == []


def test_the_policy_names_the_two_programs_and_nothing_else(tmp_path, paged):
    page = paged(saved(tmp_path / "t.json", HANG))
    assert gzip.decompress(base64.b64decode(page.script("plotly"))).decode() == LIBRARY
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (page.script(""), LIBRARY)
    ]
    assert page.policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'; "
        "style-src 'unsafe-inline'"
    )
    assert "plotly.js 9.8.7" in page.text


def test_files_of_all_nodes_are_one_section(tmp_path, paged):
    nodes, paths = ((0, 1), (2, 3)), []
    for node, ranks in enumerate(nodes):
        made = [
            RankRecording(rank, rank, -1 if rank == 3 else 3, (call(1, 100, 0),), ())
            for rank in ranks
        ]
        recorded = Recording("world", 4, 0xA0 + node, 1000 * MS * (node + 1), tuple(made))
        of_node = trace_file.OfNode(0xABC, node, nodes)
        path = tmp_path / f"node{node}.json"
        paths.append(saved(path, recorded, of_node=of_node, at_s=1.5e9 + 2 * node))
    page = paged(*paths)
    assert page.text.count("Trace of world") == 4  # title, its heading, menu and section
    assert "waited in the end for rank 3 (node 1), which waited for nobody" in page.text
    assert page.figures[0]["layout"]["yaxis"]["ticktext"] == [f"rank {n}" for n in range(4)]
    # The clocks of the machines differ; the wall clock says how the traces lie.
    assert page.figures[0]["data"][0]["base"] == [-0.9, -0.9, 0.1, 0.1]


def test_processes_that_run(paged):
    """The call is one that no other test makes: their worlds may live in this process still."""
    with ringcomm.local_world(2, timeout=60) as world:
        world.run(lambda comm: comm.all_reduce(torch.ones(997, dtype=torch.int16), op=MAX))
        page = paged("--pid", os.getpid())
    assert "as far as the records go, all ranks made the same collective calls" in page.text
    traces = [trace for figure in page.figures for trace in figure["data"]]
    (hovers,) = (trace["hovertext"] for trace in traces if "int16" in str(trace.get("hovertext")))
    assert [text.count("all_reduce(int16, MAX, 1994 bytes") for text in hovers] == [1, 1]


PROVENANCE = {"cpu": f"a cpu {HOSTILE}", "commit": "abc123", "command": "ringcomm bench"}


def bench_row(size_bytes, system, **facts):
    usual = {"count": 1, "dtype": "float32", "op": "SUM", "root": -1, "ranks": 2}
    usual |= {"placement": "out_of_place", "system": system}
    return bench_report.Row("all_reduce", size_bytes, **{**usual, **facts})


def benchmark(path, *rows):
    bench_report.write_json(bench_report.Report(PROVENANCE, list(rows)), path)
    return path


def test_bandwidths_over_size_by_system(tmp_path, paged):
    rows = [
        bench_row(size, system, time_us=2.0, busbw_gbps=size / 1e3 * factor, wrong=0)
        for size in (4096, 1024)
        for system, factor in (("ringcomm", 2), ("gloo", 1))
    ]
    rows.append(bench_row(4096, "mpi", note="no MPI here"))
    page = paged(benchmark(tmp_path / "bench.json", *rows))
    (figure,) = page.figures
    assert "as a table (5 rows)" in page.words
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}
    assert lines == {
        "ringcomm": ([1024, 4096], [2.048, 8.192]),
        "gloo": ([1024, 4096], [1.024, 4.096]),
    }
    axis = figure["layout"]["xaxis"]
    assert (axis["type"], axis["ticktext"]) == ("log", ["1 KiB", "4 KiB"])
    assert f"a cpu {HOSTILE}" in page.words and "abc123" in page.words
    assert "no MPI here" in page.words and "FAIL" not in page.words


def test_wrong_results_stand_above_the_figures(tmp_path, paged):
    row = bench_row(64, "ringcomm", time_us=1.0, busbw_gbps=1.0, wrong=3)
    page = paged(benchmark(tmp_path / "bench.json", row))
    assert "FAIL" in page.words and "wrong in 1 rows: all_reduce of ringcomm" in page.words


def test_step_times_and_memory_by_system(tmp_path, paged):
    steps = [
        dataclasses.replace(
            bench_row(8, system, time_us=time_us, best_us=1e3, p95_us=9e3, held_bytes=held),
            collective="training_step",
        )
        for system, time_us, held in (("stage 3", 2e3, 5_000_000), ("ddp on gloo", 4e3, -100))
    ]
    times, memory = paged(benchmark(tmp_path / "bench.json", *steps)).figures
    (bars,) = times["data"]
    assert (bars["y"], bars["x"]) == (["stage 3", "ddp on gloo"], [2.0, 4.0])
    assert (bars["error_x"]["array"], bars["error_x"]["arrayminus"]) == ([7.0, 5.0], [1.0, 3.0])
    assert memory["data"][0]["x"] == [5.0, -0.0001]


def test_of_one_size_and_of_models_the_bars_stand_beside_each_other(tmp_path, paged):
    alone = [bench_row(64, name, time_us=3.0, busbw_gbps=1.0) for name in ("ringcomm", "gloo")]
    models = [
        dataclasses.replace(
            bench_row(size, "ddp", time_us=4e3), collective="training_step", placement=f"{size}x8"
        )
        for size in (8, 16, 32)
    ]
    calls, steps = paged(benchmark(tmp_path / "bench.json", *alone, *models)).figures
    assert [(t["y"], t["x"]) for t in calls["data"]] == [(["ringcomm", "gloo"], [3.0, 3.0])]
    assert calls["layout"]["xaxis"]["title"]["text"] == "time (us)"
    assert [(t["name"], t["x"]) for t in steps["data"]] == [
        (f"{size}x8, 2 ranks", [4.0]) for size in (8, 16, 32)
    ]


def test_a_demo_is_its_benchmarks(tmp_path, paged):
    path = benchmark(tmp_path / "bench.json", bench_row(64, "gloo", time_us=1.0, busbw_gbps=1.0))
    parts = {f"A part {HOSTILE}": json.loads(path.read_text())}
    page = paged(written(tmp_path / "demo.json", {"passed": True, "parts": parts}))
    assert f"A part {HOSTILE} " in page.words and len(page.figures) == 1


def test_a_training_run_has_losses_times_and_memory(tmp_path, paged):
    outcome = {
        "first_step": 1,
        "losses": [5.0, float("nan"), 3.0],
        "held_out_before": 5.5,
        "held_out_after": 2.5,
        "tokens_per_s": 1234.5,
        "memory": [{"before_bytes": 1_000_000, "steps_bytes": [3_000_000, 2_000_000]}],
        "skipped_steps": 0,
        "loss_scale": None,
        "steps_s": [0.25, 0.125],
    }
    record = {
        "options": {"stage": 3, "state_on": None, "width": 64},
        "ranks": 2,
        "software": {"torch": torch.__version__},
        "outcome": outcome,
    }
    page = paged(written(tmp_path / "train.json", record))
    loss, times, memory = page.figures
    assert loss["data"][0]["y"] == [5.0, None, 3.0]
    assert (times["data"][0]["x"], times["data"][0]["y"]) == ([1, 2], [250.0, 125.0])
    assert memory["data"][0]["y"] == [2.0, 1.0]
    for word in ("stage", "width", "64", torch.__version__, "1,234 tokens/s"):
        assert word in page.words


def test_a_record_without_step_times_is_read(tmp_path, paged):
    """Those of earlier versions."""
    outcome = {"first_step": 0, "losses": [1.0], "held_out_before": 1.0, "held_out_after": 1.0}
    outcome |= {"tokens_per_s": 1.0, "memory": [{"before_bytes": 1, "steps_bytes": [2]}]}
    record = {"options": {}, "ranks": 1, "outcome": outcome}
    assert len(paged(written(tmp_path / "train.json", record)).figures) == 2


def test_findings_of_doctor(tmp_path, paged, monkeypatch, capsys):
    findings = [
        doctor.Finding("python", doctor.OK, "3.x"),
        doctor.Finding("heap", doctor.FAIL, f"none {HOSTILE}", "mend it"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert main(["doctor", "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert not plain["works"] and plain["findings"][-1]["value"] == "not tried"
    page = paged(written(tmp_path / "doctor.json", plain))
    assert "collectives cannot work here: heap, self-test" in page.words
    assert {"FAIL", "heap", f"none {HOSTILE}", "mend it"} <= set(page.words)
    assert page.figures == []


def test_a_profile_of_steps(tmp_path, paged):
    profile = StepProfile()
    profile.spans = [
        TimedSpan("forward", "compute", 1e6, 3e6, thread=7),
        TimedSpan("wait for reduce_scatter", "wait", 3e6, 4e6, thread=7),
        TimedSpan("reduce_scatter", "communication", 2e6, 4e6, thread=8, size_bytes=64),
    ]
    profile.write(tmp_path / "profile.json", rank=1)
    page = paged(tmp_path / "profile.json")
    line, shares = page.figures
    assert {t["name"]: (t["base"], t["x"]) for t in line["data"]} == {
        "compute": ([0.0], [2.0]),
        "wait": ([2.0], [1.0]),
        "communication": ([1.0], [2.0]),
    }
    ticks = line["layout"]["yaxis"]["ticktext"]
    assert ticks == ["rank 1, thread 0", "rank 1, thread 1"]
    assert {t["name"]: t["x"] for t in shares["data"]} == {
        "compute": [2.0],
        "wait": [1.0],
        "communication": [2.0],
    }
    assert "wait for reduce_scatter" in page.words


def test_profiles_of_ranks_are_one_time_line_of_a_run(tmp_path, paged):
    """Two stages were profiled on two ranks each."""
    paths = [tmp_path / f"stage{stage}-rank{rank}.json" for stage in (2, 3) for rank in (0, 1)]
    for index, path in enumerate(paths):
        profile = StepProfile()
        profile.spans = [TimedSpan("forward", "compute", index * 1e6, index * 1e6 + 5e5, thread=1)]
        profile.write(path, rank=index % 2)
    page = paged(*paths)
    lines = page.figures[::2]
    assert [line["layout"]["yaxis"]["ticktext"] for line in lines] == [["rank 0", "rank 1"]] * 2
    assert [line["data"][0]["base"] for line in lines] == [[0.0, 1.0]] * 2
    assert "Profile of steps, stage3-rank0.json, stage3-rank1.json" in page.words


def test_a_chrome_trace_of_calls(tmp_path, paged):
    trace = saved(tmp_path / "t.json", HANG)
    assert main(["trace", str(trace), "--chrome", str(tmp_path / "chrome.json")]) == 0
    (line,) = paged(tmp_path / "chrome.json").figures
    assert [t["name"] for t in line["data"]] == ["all_reduce", "all_reduce (running)"]
    assert line["layout"]["yaxis"]["ticktext"] == [
        "world rank 0 (pid 100)",
        "world rank 1 (pid 101)",
    ]


# Which files are taken.

ROW = (
    '{"schema": 1, "provenance": {}, "rows": [{"collective": "a", "size_bytes": 1, "ranks": 1, '
    '"dtype": "", "system": "", "placement": "", "time_us": %s}]}'
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "[1]",
        "{}",
        '{"provenance": {}, "rows": []}',
        '{"schema": 1, "provenance": {}, "rows": [{"system": 3}]}',
        '{"schema": 1, "provenance": {"cpu": []}, "rows": []}',
        ROW % "NaN",
        ROW % "1e400",
        '{"schema": 1, "findings": [7]}',
        '{"schema": 2, "findings": []}',
        '{"passed": true, "parts": {"a": {}}}',
        '{"options": {}, "outcome": {}}',
        '{"traceEvents": [{"ph": "X", "name": "a"}]}',
        '{"traceEvents": [{"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 1e300, "dur": 1}]}',
        '{"format": "ringcomm-trace", "version": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_none_of_a_run_is_refused_by_its_name(tmp_path, library, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    out = tmp_path / "out.html"
    assert main(["report", str(path), "--plotly", str(library), "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert str(path) in said and "expected" in said and "Traceback" not in said
    assert not out.exists()


def test_a_folder_gives_what_is_of_a_run(tmp_path, paged, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    saved(folder / "t.json", HANG)
    written(folder / "settings.json", {"lr": 1})
    page = paged(folder)
    assert "Trace of world" in page.text
    assert f"left out: {folder}/settings.json: expected" in capsys.readouterr().err
    assert f"Left out: {folder}/settings.json" in page.text


@pytest.mark.parametrize("names", [(), ("settings.json",)])
def test_a_folder_without_a_run_is_refused(tmp_path, library, capsys, names):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        written(folder / name, {"lr": 1})
    assert main(["report", str(folder), "--plotly", str(library)]) == 1
    assert f"{folder}: expected a folder with files of a run" in capsys.readouterr().err


def test_a_missing_package_is_told_with_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(saved(tmp_path / "t.json", HANG))]) == 1
    assert "pip install 'ringcomm[report]'" in capsys.readouterr().err


def test_a_file_that_is_no_plotly_is_refused(tmp_path, capsys):
    path = saved(tmp_path / "t.json", HANG)
    assert main(["report", str(path), "--plotly", str(path)]) == 1
    assert f"--plotly {path}: expected plotly.js" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        (measurements.ShownRow, bench_report.Row),
    ],
)
def test_a_report_asks_for_fields_that_are_written(shown, written):
    """The layers keep reader and writer apart, and a field without a writer is never there."""
    names = {field.name for field in dataclasses.fields(written)}
    assert {field.name for field in dataclasses.fields(shown)} <= names


def test_every_kind_is_told_from_the_others():
    names = [sources.CHROME, *(entries for entries, _ in sources.KINDS)]
    assert not any(a <= b for i, a in enumerate(names) for j, b in enumerate(names) if i != j)
