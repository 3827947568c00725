# SPDX-License-Identifier: Apache-2.0
"""``ringcomm trace``: traces of faults, of running processes, and damaged files."""

import dataclasses
import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import ringcomm
from ringcomm import _native
from ringcomm.cli import main
from ringcomm.cli.trace import chrome_text, over_nodes, report
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.reader import live_recordings, running_communicators
from ringcomm.comm.recorder.records import NodeLevel, RankRecording, Record, Recording
from ringcomm.errors import _BY_KIND, RingcommError
from tests.support import ROOT
from tests.support.faults import until_stopped
from tests.support.ranks import Ranks, run_ranks

MS = 1_000_000
CALLS = ("all_reduce", "barrier", "broadcast", "all_gather")


def record(number, collective="all_reduce", **changes):
    usual = Record(
        track="collectives",
        number=number,
        collective=collective,
        dtype="float32",
        op="",
        root=-1,
        algorithm="two_shot",
        kernels="native",
        match_bytes=64,
        size_bytes=64,
        state="done",
        status="",
        peer=-1,
        begin_ns=number * 10 * MS,
        end_ns=number * 10 * MS + 5 * MS,
        site=f"/train.py:{number}",
    )
    return dataclasses.replace(usual, **changes)


def recording(*ranks, **changes):
    ranks = tuple(
        RankRecording(index, 100 + index, -1, tuple(calls), ()) for index, calls in enumerate(ranks)
    )
    usual = Recording("world", len(ranks), 0xABC, 1000 * MS, ranks)
    return dataclasses.replace(usual, **changes)


def trace(recorded=None):
    recorded = recorded or recording([record(1), record(2)], [record(1), record(2, "barrier")])
    return reader.Trace(recorded, 1, 1.5e9, "it broke")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "ringcomm-world-0000000000000abc.json"
    path.write_text(reader.text_of(trace()))
    return path


def test_a_trace_is_read_as_it_was_written(saved):
    assert reader.read(saved) == trace()


def test_the_call_at_which_ranks_part_is_found_and_marked():
    """Finds the first call that differs, by one property; equal calls are not marked."""
    same = [record(n, CALLS[n % 4]) for n in range(1, 9)]
    for change in (
        {"collective": "all_to_all"},
        {"dtype": "int32"},
        {"op": "SUM"},
        {"root": 1},
        {"match_bytes": 65},
        {"algorithm": "ring"},
        {"kernels": "triton"},
    ):
        other = [*same[:4], dataclasses.replace(same[4], **change), *same[5:7], record(8)]
        lines = report(recording(same, other), 0)
        assert "the ranks diverge at call 5:" in lines
        marked = [line.split()[1] for line in lines if line.startswith(">")]
        assert marked == ["5", "5"]
    lines = report(recording(same, same), 0)
    assert "as far as the records go, all ranks made the same collective calls" in lines
    assert not [line for line in lines if line.startswith(">")]


def at_lines(*lines):
    return [record(n, site=f"/train.py:{line}") for n, line in enumerate(lines, 1)]


def test_a_call_that_was_left_out_is_found_by_its_line():
    """The calls are equal, so only their lines show it; other differences of lines do not."""
    found = "left out call 4, which rank 0 made at /train.py:8"
    lines = report(recording(at_lines(5, 8, 5, 8, 5, 8), at_lines(5, 8, 5, 5, 8)), 0)
    assert next(line for line in lines if "left out" in line).endswith(found)
    assert "but from call 4 on, rank 1 makes them" in "\n".join(lines)
    lines = report(recording(at_lines(5, 8, 5, 5, 8), at_lines(5, 8, 5, 8, 5, 8)), 0)
    assert "left out call 4, which rank 1 made at /train.py:8" in "\n".join(lines)
    for others in ((5, 8, 5, 8, 5, 8), (5, 9, 5, 9, 5, 9), (1, 2, 3, 4, 5, 6), (5, 8, 5)):
        lines = report(recording(at_lines(5, 8, 5, 8, 5, 8), at_lines(*others)), 0)
        assert "left out" not in "\n".join(lines), others


def test_a_call_that_some_ranks_have_not_made_is_marked():
    lines = report(recording([record(1), record(2)], [record(1)], [record(1)]), 0)
    assert "call 2 was begun by rank 0, but not yet by ranks 1, 2" in lines
    assert [line.split()[1] for line in lines if line.startswith(">")] == ["2"]


def test_what_each_rank_does_now_is_told():
    running = record(3, state="running", end_ns=0)
    failed = record(3, state="failed", status="timeout", peer=0)
    recorded = recording([record(1), running], [failed], [])
    first = dataclasses.replace(recorded.ranks[0], waits_for=2, torn=2)
    recorded = dataclasses.replace(recorded, ranks=(first, *recorded.ranks[1:]), world_size=4)
    text = "\n".join(report(recorded, 0))
    what = "all_reduce(float32, 64 bytes, two_shot), call 3"
    assert f"rank 0 (pid 100) is in {what} for 970.0 ms, waits for rank 2, at /train.py:3" in text
    assert f"last: {what}, failed (timeout), waiting for rank 0, 965.0 ms ago, at /tr" in text
    assert "rank 2 (pid 102) has made no call" in text
    assert "no recorder of rank 3 could be read" in text and "2 torn records left out" in text


def test_last_shortens_the_tables(saved, capsys):
    assert main(["trace", str(saved), "--last", "1"]) == 0
    shown = capsys.readouterr().out
    assert "written by rank 1\nit broke\n" in shown
    assert "/train.py:2" in shown and "\n     1 " not in shown.partition("rank 0, pid 100:")[2]
    assert main(["trace", str(saved), "--last", "0"]) == 0
    assert capsys.readouterr().out.count("/train.py:1") == 2


def test_every_way_in_which_a_call_can_end_has_a_name():
    text = (ROOT / "kernels/include/ringcomm/core/team.h").read_text()
    body = text.partition("enum class Status : int32_t {")[2].partition("};")[0]
    codes = [int(code) for code in re.findall(r"^  k\w+ = (\d+),", body, re.MULTILINE)]
    assert codes == list(range(len(codes))) and len(codes) >= 9
    assert sorted(_native.STATUSES.values()) == codes[1:]  # 0 means success
    # The rank's place tells a thread that has left from a process that has ended.
    assert {*_native.STATUSES, "peer_left"} == set(_BY_KIND)


def test_a_mismatch_names_the_backward_of_each_rank():
    """Covers a rank that has left the backward, and calls without a backward."""

    def reduction(number, backward):
        return record(number, "reduce_scatter_norm", root=_native.grad_tag(0, backward, 1))

    mine = [reduction(1, 7), reduction(2, 8)]
    lines = report(recording(mine, [reduction(1, 7), record(2, "barrier", match_bytes=0)]), 0)
    assert any("rank 0: reduce_scatter_norm(" in line and "backward 8" in line for line in lines)
    last = "its last reduction: bucket 1 of module 0 in backward 7"
    assert f"  rank 1: barrier(), at /train.py:2; {last}" in lines
    lines = report(recording([record(1)], [record(1, "barrier", match_bytes=0)]), 0)
    assert "backward" not in "\n".join(lines)


def test_what_runs_is_listed_and_the_newest_trace_shown(saved, tmp_path, monkeypatch, capsys):
    """Traces of the current folder come first; the output says which trace it shows."""
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv(reader.VARIABLE, str(saved.parent))
    monkeypatch.setattr("ringcomm.cli.trace.running_communicators", list)
    assert main(["trace"]) == 0
    assert f"the newest trace of {saved.parent}, written " in capsys.readouterr().out
    here = folder / saved.name
    here.write_text(saved.read_text())
    os.utime(here, (1, 1))
    monkeypatch.setattr("ringcomm.cli.trace.running_communicators", lambda: [recording([], [])])
    assert main(["trace"]) == 0
    shown = capsys.readouterr().out
    assert "--pid PID shows the calls:\n  world, 2 ranks (0: pid 100, 1: pid 101)\n" in shown
    assert re.search(
        r"the newest trace of this folder, written \d+ s ago by rank 1 \(pid 101\):", shown
    )
    here.unlink()
    saved.unlink()
    assert main(["trace"]) == 0
    assert "newest" not in capsys.readouterr().out
    monkeypatch.setattr("ringcomm.cli.trace.running_communicators", list)
    assert main(["trace"]) == 1
    assert "expected a trace in this folder or in" in capsys.readouterr().err


def _runs(store, rank, world):
    with ringcomm.Communicator.from_store(store, rank, world, name="listed") as comm:
        comm.barrier()
        return [
            each for each in running_communicators() if each.communicator == "listed"
        ], os.getpid()


def test_running_communicators_are_found():
    found = run_ranks(_runs, 2)
    pids = [pid for _, pid in found]
    # The other rank may have ended already, but its peer's heap still shows it.
    recordings = [each for listed, _ in found for each in listed]
    assert recordings
    for each in recordings:
        assert each.world_size == 2 and {rank.pid for rank in each.ranks} <= set(pids)


def test_the_newest_trace_is_taken_when_none_is_named(saved, monkeypatch, capsys):
    monkeypatch.setattr("ringcomm.cli.trace.running_communicators", list)
    monkeypatch.setenv(reader.VARIABLE, str(saved.parent))
    newer = saved.with_name("ringcomm-other-0000000000000001.json")
    newer.write_text(reader.text_of(trace(recording([record(1)], communicator="other"))))
    os.utime(saved, (1, 1))
    (saved.parent / "unrelated.json").write_text("{}")
    assert main(["trace"]) == 0
    assert "communicator other, 1 rank" in capsys.readouterr().out
    for folder in (saved.parent / "empty", "off"):
        monkeypatch.setenv(reader.VARIABLE, str(folder))
        assert main(["trace"]) == 1
        assert "got none" in capsys.readouterr().err


def test_a_chrome_trace_has_every_call_on_one_time_line(saved, tmp_path):
    out = tmp_path / "chrome.json"
    assert main(["trace", str(saved), "--chrome", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    calls = [each for each in events if each["ph"] == "X"]
    assert [(each["pid"], each["name"], each["ts"], each["dur"]) for each in calls] == [
        (0, "all_reduce", 10_000.0, 5000.0),
        (0, "all_reduce", 20_000.0, 5000.0),
        (1, "all_reduce", 10_000.0, 5000.0),
        (1, "barrier", 20_000.0, 5000.0),
    ]
    named = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert named == {0: "world rank 0 (pid 100)", 1: "world rank 1 (pid 101)"}


def test_a_chrome_trace_marks_calls_that_have_not_ended():
    running = record(1, state="running", end_ns=0)
    events = json.loads(chrome_text([recording([running]), recording([running])]))["traceEvents"]
    calls = [each for each in events if each["ph"] == "X"]
    assert [each["pid"] for each in calls] == [0, 1]
    assert {each["name"] for each in calls} == {"all_reduce (running)"}
    assert {each["dur"] for each in calls} == {990_000.0}


# ---- hostile files ----------------------------------------------------------------------------


def sealed(body):
    """Returns a file with a valid checksum, as if edited on purpose."""
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    head = {"format": "ringcomm-trace", "version": 1, "sha256": digest, "body": body}
    return json.dumps(head)


def refused(path, capsys):
    assert main(["trace", str(path)]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"ringcomm trace: {path}: "), told
    assert "Traceback" not in told.err and len(told.err) < 1000
    return told.err


def test_a_file_that_was_changed_is_refused(saved, capsys):
    whole = saved.read_text()
    saved.write_text(whole.replace("barrier", "barriEr"))
    assert "sha256 differs" in refused(saved, capsys)
    saved.write_text(whole[:-40])
    assert "no JSON" in refused(saved, capsys)
    saved.write_text(whole.replace('"version": 1', '"version": 2'))
    assert "version 2" in refused(saved, capsys)
    saved.write_text(whole.replace('"version": 1', f'"version": "{"x" * 200_000}"'))
    assert "version 'xxx" in refused(saved, capsys)
    for text in ("", "[]", "{}", "[" * 100_000, '{"format": "ringcomm-trace", "version": 1}', "\0"):
        saved.write_text(text)
        refused(saved, capsys)
    saved.write_bytes(b"\xff\xfe\x80")
    refused(saved, capsys)
    saved.write_text(whole)
    assert main(["trace", str(saved)]) == 0


CHANGES = {
    "a field too many": (
        lambda b: b.update(more=1),
        "body.more: expected only entries of a Trace",
    ),
    "a field too few": (
        lambda b: b["recording"].pop("world_id"),
        "body.recording.world_id: expected a number",
    ),
    "a text for a number": (lambda b: b["recording"].update(world_size="2"), "world_size"),
    "a bool for a number": (lambda b: b["recording"].update(world_size=True), "world_size"),
    "a huge number": (lambda b: b["recording"].update(taken_ns=1 << 70), "a number from -1 to"),
    "a time that is infinite": (lambda b: b.update(written_s=float("inf")), "out of range"),
    "a time that is no number": (lambda b: b.update(written_s=float("nan")), "out of range"),
    "a time beyond all dates": (lambda b: b.update(written_s=1e300), "out of range"),
    "a time before all dates": (lambda b: b.update(written_s=-1), "out of range"),
    "a long name": (lambda b: b.update({"x" * 200_000: 1}), "expected only entries of a"),
    "a long text for a number": (lambda b: b.update(written_by="x" * 200_000), "written_by"),
    "ranks that are no list": (lambda b: b["recording"].update(ranks={}), "ranks: expected a list"),
    "a rank twice": (lambda b: b["recording"]["ranks"][1].update(rank=0), "twice"),
    "a rank out of range": (lambda b: b["recording"]["ranks"][1].update(rank=2), "out of range"),
    "records out of order": (
        lambda b: b["recording"]["ranks"][0]["collectives"].reverse(),
        "not in order",
    ),
    "escapes for a terminal": (
        lambda b: b["recording"]["ranks"][0]["collectives"][0].update(site="\x1b[2J"),
        "printable characters",
    ),
    "a state that is none": (
        lambda b: b["recording"]["ranks"][0]["collectives"][0].update(state="odd"),
        "state 'odd'",
    ),
    "a long state": (
        lambda b: b["recording"]["ranks"][0]["collectives"][0].update(state="x" * 60_000),
        "state 'xxx",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_field_is_checked(change, saved, capsys):
    edit, why = CHANGES[change]
    body = json.loads(saved.read_text())["body"]
    saved.write_text(sealed(body))
    assert main(["trace", str(saved)]) == 0
    capsys.readouterr()
    edit(body)
    saved.write_text(sealed(body))
    assert why in refused(saved, capsys)


def test_options_that_do_not_fit(saved, capsys):
    assert main(["trace", str(saved), "--pid", "1"]) == 2
    assert "expected FILEs or --pid" in capsys.readouterr().err
    assert main(["trace", str(saved), "--last", "-1"]) == 2
    assert main(["trace", str(saved.parent / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["trace", str(saved), "--chrome", str(saved.parent)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"--chrome {saved.parent}: cannot be written: Is a directory" in err


# ---- live processes ---------------------------------------------------------------------------


def hangs(store, rank, world):
    """Rank 0 waits for rank 1, which sleeps; rank 2 is stopped, and killed later."""
    comm = ringcomm.Communicator.from_store(store, rank, world, timeout=120)
    pair = comm.new_group([0, 1], name="pair")
    comm.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        pair.all_reduce(torch.ones(8))
    time.sleep(120)


def until(look):
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_that_hang_are_read_without_their_help(capsys):
    """Reads all ranks from one process, while a peer is stopped and after it was killed."""
    with Ranks(hangs, 3) as ranks:

        def waits():
            try:
                recorded = live_recordings(ranks.pids[:1])
            except RingcommError:
                return False  # it has not begun yet
            world, *pairs = recorded
            if not pairs or len(pairs[0].ranks) < 2 or pairs[0].ranks[0].waits_for != 1:
                return False
            # All ranks have ended the barrier, and have recorded it.
            last = [each.last for each in world.ranks]
            return all(each is not None and each.state != "running" for each in last)

        until(waits)
        until_stopped(ranks.pids[2])
        ranks.signal(0, signal.SIGSTOP)
        until_stopped(ranks.pids[0])
        world, pair = live_recordings(ranks.pids[:1])
        assert (world.communicator, len(world.ranks)) == ("world", 3)
        assert [each.last.collective for each in world.ranks] == ["barrier"] * 3
        assert pair.ranks[0].last.state == "running" and pair.ranks[1].last is None
        assert [each.pid for each in world.ranks] == ranks.pids
        ranks.processes[2].kill()
        ranks.processes[2].join()
        assert main(["trace", "--pid", *map(str, ranks.pids[:2])]) == 0
        shown = capsys.readouterr().out
        ended = [line for line in shown.splitlines() if "whose process has ended" in line]
        assert [line.split(",")[0] for line in ended] == [f"  rank 2 (pid {ranks.pids[2]})"], shown
        assert "was in no call; last: barrier(), call 1, done" in ended[0]
        line = hangs.__code__.co_firstlineno + 8
        assert "communicator world, 3 ranks" in shown and f"rank 2 (pid {ranks.pids[2]})" in shown
        assert f"waits for rank 1, at {__file__}:{line}" in shown, shown
        assert main(["trace", "--pid", str(ranks.pids[2])]) == 1
        assert "expected a running process" in capsys.readouterr().err


def test_a_process_without_a_communicator_has_nothing_to_show(capsys):
    assert main(["trace", "--pid", str(os.getppid())]) == 1
    assert "ringcomm trace: expected process" in capsys.readouterr().err


def test_nodes_are_shown_with_the_calls_below():
    def body(comm):
        comm.all_reduce(torch.ones(10_000))
        comm.barrier()

    with ringcomm.local_world(4, nodes=[1, 3], timeout=60) as world:
        world.run(body)
        shown = ["\n".join(report(each, 0)) for each in live_recordings([os.getpid()])]
    (text,) = [each for each in shown if "over nodes, node 1: ranks 1, 2, 3" in each]
    for rank in (1, 2, 3):
        table = text.partition(f"rank {rank}, pid {os.getpid()}:\n")[2].splitlines()[1:]
        calls = [line.split("done ")[1].partition("(")[0] for line in table[:5]]
        outer = [name.strip() for name in calls if not name.startswith("    ")]
        assert outer == ["all_reduce", "barrier"][: len(outer)]
        assert not calls[0].startswith("    ") and calls[1].startswith("    ")


@pytest.mark.parametrize(
    ("name", "size", "level"),
    [
        ("world/node0:0-1", 2, NodeLevel("world", 0, (0, 1))),
        ("a/node1:b/node12:0.2-3.7", 4, NodeLevel("a/node1:b", 12, (0, 2, 3, 7))),
        ("world/node0:0-1", 3, None),
        ("world/node0:0-999999999", 2, None),
        ("world/node0:-1.", 2, None),
        ("world/node0", 2, None),
        ("world", 2, None),
    ],
)
def test_the_names_of_communicators_within_nodes(name, size, level):
    found = NodeLevel.of(recording(*[[record(1)]] * size, communicator=name))
    assert found == level
    assert level is None or str(level) == name


def of_nodes(*waits, nodes=((0, 1), (2, 3)), taken_ns=1000 * MS):
    """Returns traces of all nodes; ``waits`` has the peer that a rank waits for, or -1 if done."""
    traces = []
    for node, ranks in enumerate(nodes):
        made = [
            RankRecording(
                rank,
                100 + rank,
                waits[rank],
                (record(1, state="running", end_ns=0) if waits[rank] >= 0 else record(1),),
                (),
            )
            for rank in ranks
        ]
        recorded = Recording("world", len(waits), 0xA0 + node, taken_ns * (node + 1), tuple(made))
        of_node = reader.OfNode(0xABC, node, nodes)
        traces.append(reader.Trace(recorded, ranks[0], 1.5e9 + node, "it broke", of_node))
    return traces


CALL = "all_reduce(float32, 64 bytes, two_shot), call 1"


def test_whom_ranks_of_all_nodes_waited_for():
    traces = of_nodes(2, 3, -1, 2)
    assert over_nodes(traces) == [
        "communicator world over 2 nodes, 4 ranks",
        f"  rank 0 (node 0) was in {CALL}, and waited for rank 2 (node 1), at /train.py:1",
        f"  rank 1 (node 0) was in {CALL}, and waited for rank 3 (node 1), at /train.py:1",
        f"  rank 2 (node 1) was in no collective call; last: {CALL}, at /train.py:1",
        f"  rank 3 (node 1) was in {CALL}, and waited for rank 2 (node 1), at /train.py:1",
        "",
        "ranks 0, 1, 3 waited in the end for rank 2 (node 1), which waited for nobody",
    ]
    lines = over_nodes(traces[:1])
    assert "  of node 1 (ranks 2, 3) no trace was given" in lines
    assert "rank 0 waited in the end for rank 2 (node 1), whose trace is not here" in lines
    assert "rank 1 waited in the end for rank 3 (node 1), whose trace is not here" in lines


def test_ranks_that_waited_for_each_other():
    (line,) = over_nodes(of_nodes(2, 0, 0, 2))[-1:]
    told = "rank 0 (node 0) and rank 2 (node 1) waited for each other, and ranks 1, 3 for them"
    assert line.startswith(told)
    assert over_nodes(of_nodes(-1, -1, -1, -1))[-1] == "no rank waited for another one"


def test_files_of_nodes_are_read_together(tmp_path, capsys):
    """The machines' clocks have different origins; the timeline uses the first machine's clock."""
    paths = [str(tmp_path / f"{node}.json") for node in range(2)]
    for path, each in zip(paths, of_nodes(2, 3, -1, 2), strict=True):
        Path(path).write_text(reader.text_of(each))
    chrome = tmp_path / "chrome.json"
    assert main(["trace", *paths, "--chrome", str(chrome)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("communicator world over 2 nodes, 4 ranks\n")
    assert shown.count("communicator world over 2 nodes") == 1
    for node, ranks in enumerate(("0, 1", "2, 3")):
        assert f"communicator world over nodes, node {node}: ranks {ranks}\n" in shown
    events = [each for each in json.loads(chrome.read_text())["traceEvents"] if each["ph"] == "X"]
    # Node 1 wrote its trace a second later, when its clock read a second more than node 0's.
    assert [each["ts"] for each in events] == [10_000.0] * 4


@pytest.mark.parametrize(
    "of_node",
    [
        reader.OfNode(1, 2, ((0,), (1,))),
        reader.OfNode(1, -1, ((0,), (1,))),
        reader.OfNode(1, 0, ((0,), (0,))),
        reader.OfNode(1, 0, ((0, 1), (2,))),
        reader.OfNode(1, 0, ((0,), (1,))),
    ],
)
def test_nodes_that_cannot_be_are_refused(tmp_path, of_node):
    """The trace holds ranks 0 and 1, so the last case has a rank of another node."""
    path = tmp_path / "trace.json"
    path.write_text(reader.text_of(dataclasses.replace(trace(), of_node=of_node)))
    with pytest.raises(RingcommError, match="damaged"):
        reader.read(path)
