# SPDX-License-Identifier: Apache-2.0
"""``ringcomm report``: the data on its page, and the files that it takes or refuses."""

import dataclasses
import html.parser
import itertools
import json
import os

import jinja2
import pytest
import torch

import ringcomm
from ringcomm.bench import report as bench_report
from ringcomm.cli import main
from ringcomm.cli.report import KINDS, ShownRow, page, ticks, waits_of
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.records import RankRecording, Record, Recording
from ringcomm.examples.train_gpt import Options, train
from ringcomm.zero.stages.order import StepProfile, TimedSpan

MAX = ringcomm.ReduceOp.MAX
MS = 1_000_000
HOSTILE = '</script><script>alert("1")</script>&lt;b&gt;<b>'


def call(number, begin_ms, end_ms, collective="all_reduce", **changes):
    usual = Record(
        track="collectives",
        number=number,
        collective=collective,
        dtype="float32",
        op="SUM",
        root=-1,
        algorithm="two_shot",
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
    return [(w.rank, w.awaited, round(w.seconds * 1e3, 6), w.is_told) for w in waits]


def test_a_call_that_ended_waited_for_the_rank_that_began_it_last():
    recorded = recording([call(1, 10, 50)], [call(1, 40, 50)], [call(1, 20, 45)])
    assert found(recorded) == [(0, 1, 30.0, False), (2, 1, 20.0, False)]


def test_a_rank_that_had_left_a_call_waited_for_nobody_then():
    assert found(recording([call(1, 10, 15)], [call(1, 40, 50)])) == [(0, 1, 5.0, False)]


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_only_the_root_is_awaited_where_only_it_gives(name):
    calls = [[call(1, begin, 60, name, root=1)] for begin in (10, 20, 50)]
    assert found(recording(*calls)) == [(0, 1, 10.0, False)]


@pytest.mark.parametrize("name", ["reduce", "gather"])
def test_only_the_root_waits_where_only_it_takes(name):
    calls = [[call(1, begin, 60, name, root=1)] for begin in (10, 20, 50)]
    assert found(recording(*calls)) == [(1, 2, 30.0, False)]


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
        (0, 2, 900.0, True),
        (1, 2, 100.0, True),
        (2, 0, 600.0, True),
    ]


def test_what_is_not_known_is_no_wait():
    """No wait is reported if a rank is missing, or if the times are those of enqueueing hosts."""
    calls = [call(1, 10, 50)], [call(1, 40, 50)]
    assert found(recording(*calls), expected=3) == []
    assert found(recording(*calls, on_device=True)) == []


def test_calls_within_a_call_over_nodes_are_not_counted_twice():
    outer = [call(1, 10, 90), call(2, 12, 80)]
    late = [call(1, 40, 90), call(2, 42, 80)]
    assert found(recording(outer, late)) == [(0, 1, 30.0, False)]


# Tests of pages, whose text is read as by a browser.


class Page(html.parser.HTMLParser):
    """A page's elements, words, and attributes that name something to fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.fetched, self.policy = [], [], [], ""
        self.lines, self.points, self.cells, self.shares = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        if values.get("http-equiv"):
            self.policy = values["content"]
        if tag == "path" and values["class"] != "frame":
            is_of_points = values["class"].endswith(" points")
            (self.points if is_of_points else self.lines).append(values["d"])
        if tag == "tr":
            self.cells.append([])
        if tag == "td":
            self.cells[-1].append("")
            self.shares.append(values.get("style", ""))
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] != "style":
            self.words.append(data.strip())
            if self.tags[-1] == "td":
                self.cells[-1][-1] += data

    @property
    def rows(self):
        """Returns the cells of all tables, by row."""
        return [[cell.strip() for cell in row] for row in self.cells if row]

    @property
    def text(self):
        return "\n".join(self.words)


@pytest.fixture
def paged(tmp_path):
    def write(*words):
        out = tmp_path / "out.html"
        assert main(["report", *map(str, words), "-o", str(out)]) == 0
        return Page(out.read_text())

    return write


def written(path, document):
    path.write_text(json.dumps(document))
    return path


def saved(path, recorded, error="it broke", of_node=None, at_s=1.5e9):
    trace = reader.Trace(recorded, recorded.ranks[0].rank, at_s, error, of_node)
    path.write_text(reader.text_of(trace))
    return path


HANG = recording(
    [call(1, 10, 50), call(2, 100, 0, site=f"{HOSTILE}.py:3")], [call(1, 40, 50)], waits_for={0: 1}
)


def test_a_trace_has_its_verdict_and_waits(tmp_path, paged):
    page = paged(saved(tmp_path / "t.json", HANG, f"it broke {HOSTILE}"))
    assert f"it broke {HOSTILE}" in page.text
    assert "call 2 was begun by rank 0, but not yet by rank 1" in page.text
    told = (
        "rank 0 (pid 100) is in all_reduce(float32, SUM, 64 bytes, two_shot), call 2 for 900.0 ms"
    )
    assert f"{told}, waits for rank 1, at {HOSTILE}.py:3" in page.text
    assert page.rows == [
        ["rank 1", "930 ms", "900 ms", "2"],
        ["rank 0", "0 us", "0 us", "0"],
        ["rank 0", "rank 1", "930 ms", "900 ms", "2"],
    ]
    assert [share for share in page.shares if share] == [
        "--share:1.000",
        "--share:0.000",
        "--share:1.000",
    ]


def test_text_of_files_is_no_markup_and_nothing_is_run_or_fetched(tmp_path, paged):
    trace = saved(tmp_path / "t.json", HANG, HOSTILE)
    rows = [bench_row(size, HOSTILE, time_us=1.0, note=HOSTILE) for size in (64, 128)]
    bench = benchmark(tmp_path / "bench.json", *rows)
    page = paged(trace, bench, "--title", HOSTILE)
    assert page.policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert page.text.count(HOSTILE) > 8
    assert page.fetched == []
    assert set(page.tags) == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "a"),
        *("section", "b", "pre", "details", "summary", "div", "span"),
        *("table", "thead", "tr", "th", "td", "svg", "path", "text"),
    }


def test_what_is_not_escaped_would_be_seen(tmp_path, monkeypatch):
    """Negative control: without escaping, a page has the elements that the test above seeks."""

    def careless(**given):
        return environment(**{**given, "autoescape": False})

    environment = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", careless)
    assert {"script", "b"} <= set(Page(page(HOSTILE, [], [HOSTILE])).tags)


def test_files_of_all_nodes_are_one_section(tmp_path, paged):
    nodes, paths = ((0, 1), (2, 3)), []
    for node, ranks in enumerate(nodes):
        made = [
            RankRecording(rank, rank, -1 if rank == 3 else 3, (call(1, 100, 0),), ())
            for rank in ranks
        ]
        recorded = Recording("world", 4, 0xA0 + node, 1000 * MS * (node + 1), tuple(made))
        of_node = reader.OfNode(0xABC, node, nodes)
        path = tmp_path / f"node{node}.json"
        paths.append(saved(path, recorded, of_node=of_node, at_s=1.5e9 + 2 * node))
    page = paged(*paths)
    assert page.tags.count("section") == 1
    assert "waited in the end for rank 3 (node 1), which waited for nobody" in page.text
    assert {(row[0], row[1]) for row in page.rows if len(row) == 5} == {
        (f"rank {rank}", "rank 3") for rank in range(3)
    }


def test_processes_that_run(paged):
    """Makes a call that no other test makes, since their worlds may still live in this process."""
    with ringcomm.local_world(2, timeout=60) as world:
        world.run(lambda comm: comm.all_reduce(torch.ones(997, dtype=torch.int16), op=MAX))
        page = paged("--pid", os.getpid())
    assert "as far as the records go, all ranks made the same collective calls" in page.text
    assert page.text.count("all_reduce(int16, MAX, 1994 bytes") >= 2


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
    # From a quarter of the height to all of it, and half of these for gloo.
    assert page.lines == ["M0.0 150.0h0L600.0 0.0h0", "M0.0 175.0h0L600.0 100.0h0"]
    assert page.points == [each.replace("L", "M") for each in page.lines]
    assert {"1 KiB", "4 KiB", "0", "2", "8", "GB/s", "ringcomm", "gloo"} <= set(page.words)
    assert "size" in page.words
    assert {"size (bytes)", "time (us)", "bus bandwidth (GB/s)"} <= set(page.words)
    assert not any("_us" in word or "_gbps" in word for word in page.words)
    assert len(page.rows) == 5
    assert f"a cpu {HOSTILE}" in page.words and "abc123" in page.words
    assert "no MPI here" in page.words and "FAIL" not in page.text


def test_the_size_of_a_page_is_told_in_kb(tmp_path, capsys):
    path, out = benchmark(tmp_path / "bench.json", bench_row(64, "gloo")), tmp_path / "out.html"
    assert main(["report", str(path), "-o", str(out)]) == 0
    told = f"wrote {out} ({out.stat().st_size / 1e3:.1f} KB): open it in a browser\n"
    assert capsys.readouterr().err == told


def test_wrong_results_stand_above_the_figures(tmp_path, paged):
    row = bench_row(64, "ringcomm", time_us=1.0, busbw_gbps=1.0, wrong=3)
    page = paged(benchmark(tmp_path / "bench.json", row))
    assert "FAIL: results are wrong in 1 rows: all_reduce of ringcomm" in page.words


def test_step_times_and_memory_by_system(tmp_path, paged):
    steps = [
        dataclasses.replace(
            bench_row(8, system, time_us=time_us, best_us=1e3, p95_us=9e3, held_bytes=held),
            collective="training_step",
        )
        for system, time_us, held in (("stage 3", 2e3, 5_000_000), ("ddp on gloo", 4e3, -100))
    ]
    page = paged(benchmark(tmp_path / "bench.json", *steps))
    assert page.lines == []
    assert [share for share in page.shares if share] == ["--share:0.500", "--share:1.000"]
    assert [{row[0], "2,000", "4,000", "5,000,000", "-100"} & set(row) for row in page.rows] == [
        {"stage 3", "2,000", "5,000,000"},
        {"ddp on gloo", "4,000", "-100"},
    ]


def test_a_demo_is_its_benchmarks(tmp_path, paged):
    path = benchmark(tmp_path / "bench.json", bench_row(64, "gloo", time_us=1.0, busbw_gbps=1.0))
    runs = {f"A run {HOSTILE}": json.loads(path.read_text())}
    page = paged(written(tmp_path / "demo.json", {"passed": True, "runs": runs}))
    assert f"A run {HOSTILE}" in page.words and len(page.rows) == 1


def record_of(**outcome):
    usual = {"first_step": 1, "losses": [5.0, float("nan"), 2.5], "steps_s": [0.25, 0.125]}
    usual |= {"held_out_before": 5.5, "held_out_after": 2.5, "tokens_per_s": 1234.5}
    usual |= {"memory": [{"before_bytes": 1_000_000, "steps_bytes": [3_000_000, 2_000_000]}]}
    return {
        "options": {"stage": 3, "offload_state": None, "width": 64},
        "ranks": 2,
        "software": {"torch": torch.__version__},
        "outcome": {**usual, "skipped_steps": 0, "loss_scale": None, **outcome},
    }


def test_a_training_run_has_losses_times_and_memory(tmp_path, paged):
    page = paged(written(tmp_path / "train.json", record_of()))
    assert page.lines == [
        "M0.0 0.0h0M600.0 100.0h0",
        "M0.0 0.0h0L600.0 100.0h0",
        "M0.0 0.0h0L600.0 100.0h0",
    ]
    assert {"5", "250", "2", "rank 0, at most 2.0", "64", torch.__version__} <= set(page.words)
    assert "1,234 tokens/s" in page.words


def test_of_a_long_run_points_are_left_out(tmp_path, paged):
    page = paged(written(tmp_path / "train.json", record_of(losses=[1.0] * 2500)))
    assert page.lines[0].count("L") == 2500 // 3
    assert len(page.points) == 2 and "step" in page.words


def test_a_run_without_steps_is_read(tmp_path, paged):
    nothing = record_of(losses=[], steps_s=[], memory=[])
    assert paged(written(tmp_path / "train.json", nothing)).lines == []


@pytest.mark.parametrize(
    ("low", "high", "least", "expected"),
    [
        (0.0, 7.712, 0.0, [0, 2, 4, 6]),
        (-1.0, 1.0, 0.0, [-1, -0.5, 0, 0.5, 1]),
        (0.0, 3.0, 1.0, [0, 1, 2, 3]),
        (3.0, 2499.0, 1.0, [500, 1000, 1500, 2000]),
        (4.0, 4.0, 1.0, [4]),
        (0.0, 5e-324, 0.0, [0]),
        (0.0, 1e18, 0.0, [0, 2e17, 4e17, 6e17, 8e17, 1e18]),
    ],
)
def test_axes_have_round_ticks(low, high, least, expected):
    assert ticks(low, high, least) == pytest.approx(expected)


def test_a_report_reads_what_the_training_command_writes(tmp_path, paged):
    record = tmp_path / "record.json"
    options = Options(width=16, depth=1, heads=1, context=16, batch=2, steps=2, json=str(record))
    with ringcomm.local_world(1) as world:
        world.run(lambda comm: train(options, comm))
    page = paged(record)
    assert len(page.lines) == 3 and "learning_rate" in page.text


def write_profile(path, rank, begin_us=0.0):
    profile = StepProfile()
    profile.spans = [
        TimedSpan("forward", "compute", begin_us + 1e6, begin_us + 3e6, thread=7),
        TimedSpan("wait for reduce_scatter", "wait", begin_us + 3e6, begin_us + 4e6, thread=7),
        TimedSpan("reduce_scatter", "communication", begin_us + 2e6, begin_us + 4e6, thread=8),
    ]
    profile.write(path, rank)


def test_profiles_of_the_ranks_of_a_run_are_one_section(tmp_path, paged):
    """Two stages are profiled, each on two ranks."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for stage, rank in itertools.product((2, 3), (0, 1)):
        write_profile(folder / f"stage{stage}-rank{rank}.json", rank)
    page = paged(folder)
    one = [
        ["rank 0", "2 s", "1 s", "2 s"],
        ["rank 1", "2 s", "1 s", "2 s"],
        ["rank 0", "wait for reduce_scatter", "1 s", "1", "1 s"],
        ["rank 1", "wait for reduce_scatter", "1 s", "1", "1 s"],
    ]
    assert page.rows == one * 2
    assert "Profile of steps, stage3-rank0.json, stage3-rank1.json" in page.words


def test_a_chrome_trace_of_calls_is_for_perfetto(tmp_path, capsys):
    trace, chrome = saved(tmp_path / "t.json", HANG), tmp_path / "chrome.json"
    assert main(["trace", str(trace), "--chrome", str(chrome)]) == 0
    assert main(["report", str(chrome)]) == 2
    assert "expected compute, wait, communication, got " in (said := capsys.readouterr().err)
    assert "; ui.perfetto.dev opens other Chrome traces" in said


# Tests of the files that a report takes.

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
        '{"schema": 1, "findings": []}',
        '{"passed": true, "runs": {"a": {}}}',
        '{"options": {}, "outcome": {}}',
        '{"traceEvents": [{"ph": "X", "name": "a"}]}',
        '{"traceEvents": [{"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 1e300, "dur": 1}]}',
        '{"traceEvents": [{"cat": "x", "name": "a", "pid": 0, "ts": 1.0, "dur": 1.0}]}',
        '{"format": "ringcomm-trace", "version": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_none_of_a_run_is_refused_by_its_name(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    out = tmp_path / "out.html"
    assert main(["report", str(path), "-o", str(out)]) == (1 if "ringcomm-trace" in text else 2)
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
def test_a_folder_without_a_run_is_refused(tmp_path, capsys, names):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        written(folder / name, {"lr": 1})
    assert main(["report", str(folder)]) == 2
    assert f"{folder}: expected a folder with files of a run" in capsys.readouterr().err


def test_a_report_asks_for_fields_that_are_written():
    """The layers separate reader and writer; a field without a writer would always be missing."""
    names = {field.name for field in dataclasses.fields(bench_report.Row)}
    assert {field.name for field in dataclasses.fields(ShownRow)} <= names


def test_every_kind_is_told_from_the_others():
    names = [entries for entries, _ in KINDS]
    assert not any(a <= b for i, a in enumerate(names) for j, b in enumerate(names) if i != j)
