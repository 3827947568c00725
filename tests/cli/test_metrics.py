# SPDX-License-Identifier: Apache-2.0
"""``ringcomm metrics``: its format, which Prometheus can read, and counters that only grow."""

import dataclasses
import itertools
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch

import ringcomm
from ringcomm.cli import main, metrics
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.records import NodeLevel, RankRecording, Recording
from ringcomm.errors import RingcommError
from tests.cli.test_trace import MS, record, recording
from tests.support.ranks import Ranks

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
ESCAPED = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}


def parsed(text):
    """Returns samples by name and labels, and the types; raises if the text breaks the format."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    types: dict[str, str] = {}
    helps: set[str] = set()
    assert text.endswith("\n") or not text
    for line in text.split("\n")[:-1]:
        if found := re.fullmatch(rf"# HELP ({NAME}) (?:[^\\\n]|\\[\\n])*", line):
            assert found[1] not in helps and found[1] not in types, line
            helps.add(found[1])
        elif found := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge)", line):
            assert found[1] not in types and not any(name == found[1] for name, _ in samples), line
            types[found[1]] = found[2]
        else:
            found = re.fullmatch(rf"({NAME})\{{(.*)\}} (\S+)", line)
            assert found and found[1] in types and found[1] in helps, line
            assert found[1] == list(types)[-1], f"{line} does not follow its type"
            key = found[1], frozenset(labels_of(found[2]).items())
            assert key not in samples, f"{line} occurs twice"
            samples[key] = float(found[3])
    assert all(value >= 0 for (name, _), value in samples.items() if types[name] == "counter")
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types.items())
    return samples, types


def labels_of(text):
    labels, position = {}, 0
    while position < len(text):
        found = LABEL.match(text, position)
        assert found and found[1] not in labels, text
        labels[found[1]] = re.sub(r"\\.", lambda each: ESCAPED[each[0]], found[2])
        position = found.end()
    return labels


def value(samples, name, **labels):
    """Returns the value of the only sample with these labels."""
    (found,) = [
        number
        for (each, pairs), number in samples.items()
        if each == name and set(labels.items()) <= pairs
    ]
    return found


def own():
    return parsed(metrics.of_processes([os.getpid()]))


def named(name, rank):
    return {"communicator": name, "rank": str(rank)}


def test_calls_and_bytes_are_counted_by_collective():
    """Counts calls whose records are overwritten as well: there are fewer records than calls."""

    def body(comm):
        for _ in range(30):
            comm.all_reduce(torch.ones(8))
        comm.all_gather_into_tensor(torch.empty(8), torch.ones(4))
        comm.send(torch.ones(3), 1) if comm.rank == 0 else comm.recv(torch.ones(3), 0)
        comm.barrier()

    options = ringcomm.CommOptions(records=4)
    with ringcomm.local_world(2, options=options) as world:
        world.run(body)
        (only,) = world.run(lambda comm: f"{comm.recording().world_id:016x}")[:1]
        samples, types = own()
    mine = {"world_id": only, "rank": "0"}
    assert value(samples, "ringcomm_calls_total", collective="all_reduce", **mine) == 30
    assert value(samples, "ringcomm_call_bytes_total", collective="all_reduce", **mine) == 30 * 32
    gathered = {"collective": "all_gather", **mine}
    assert value(samples, "ringcomm_call_bytes_total", **gathered) == 32
    assert value(samples, "ringcomm_calls_total", collective="send", **mine) == 1
    assert value(samples, "ringcomm_call_failures_total", collective="barrier", **mine) == 0
    assert 0 < value(samples, "ringcomm_call_seconds_total", collective="all_reduce", **mine) < 30
    assert value(samples, "ringcomm_last_call_number", track="collectives", **mine) == 32
    assert value(samples, "ringcomm_window_calls", **mine) == 5
    assert value(samples, "ringcomm_rank_state", state="idle", **mine) == 1
    assert types["ringcomm_calls_total"] == "counter"


def test_times_are_those_of_the_calls():
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.3)
        comm.barrier()
        recorded = comm.recording()
        (call,) = recorded.ranks[comm.rank].collectives
        return f"{recorded.world_id:016x}", (call.end_ns - call.begin_ns) / 1e9

    with ringcomm.local_world(2) as world:
        (world_id, took_s), _ = world.run(body)
        samples, _ = own()
    waited = {"world_id": world_id, "rank": "0"}
    seconds = value(samples, "ringcomm_call_seconds_total", collective="barrier", **waited)
    assert seconds == pytest.approx(took_s, rel=0.01, abs=1e-4)
    if took_s > 0.2:  # otherwise this rank began late and did not wait
        assert 0 < value(samples, "ringcomm_window_wait_seconds", peer="1", **waited) <= took_s


def test_counters_never_decrease_while_calls_run():
    stop = threading.Event()
    seen = []

    def body(comm):
        flag = torch.zeros(1)
        while not flag.item():
            flag.fill_(stop.is_set())
            comm.broadcast(flag, 0)
            comm.all_reduce(torch.ones(64))

    def scrape():
        try:
            for _ in range(40):
                seen.append(own())
        finally:
            stop.set()

    with ringcomm.local_world(2) as world:
        scraper = threading.Thread(target=scrape)
        scraper.start()
        world.run(body)
        scraper.join()
    assert len(seen) == 40
    for (before, types), (after, _) in itertools.pairwise(seen):
        for key, number in before.items():
            if types[key[0]] == "counter":
                assert after[key] >= number, key
    (first, _), (last, _) = seen[0], seen[-1]
    grown = [key for key in last if last[key] > first.get(key, 0)]
    assert any(name == "ringcomm_calls_total" for name, _ in grown)


def test_a_fault_is_counted_and_named():
    def body(comm):
        with pytest.raises(ringcomm.MismatchError):
            comm.broadcast(torch.ones(2), 0) if comm.rank else comm.all_reduce(torch.ones(2))
        return f"{comm.recording().world_id:016x}"

    with ringcomm.local_world(2) as world:
        ids = world.run(body)
        samples, _ = own()
    mine = {"world_id": ids[0], "rank": "0"}
    assert value(samples, "ringcomm_call_failures_total", collective="all_reduce", **mine) == 1
    assert value(samples, "ringcomm_rank_state", state="failed", **mine) == 1
    kinds = {dict(key[1])["kind"] for key in samples if key[0] == "ringcomm_window_failures"}
    assert "mismatch" in kinds


# ---- other readings ------------------------------------------------------------------------------


def test_hostile_names_are_escaped():
    name = 'a "quoted"\\ name\nringcomm_calls_total{rank="0"} 7'
    text = metrics.exposition([metrics.Reading(recording([record(1)], communicator=name), None)])
    samples, _ = parsed(text)
    assert value(samples, "ringcomm_rank_state", state="idle", **named(name, 0)) == 1
    assert not any(key[0] == "ringcomm_calls_total" for key in samples)


def test_a_peer_without_a_record_is_told():
    whole = recording([record(1)], [record(1)])
    part = dataclasses.replace(whole, ranks=whole.ranks[:1])
    samples, _ = parsed(metrics.exposition([metrics.Reading(part, None)]))
    assert value(samples, "ringcomm_rank_readable", **named("world", 0)) == 1
    assert value(samples, "ringcomm_rank_readable", **named("world", 1)) == 0
    ranks = {dict(key[1])["rank"] for key in samples if key[0] == "ringcomm_rank_state"}
    assert ranks == {"0"}


def test_an_awaited_peer_and_an_open_call_are_told():
    open_call = record(3, state="running", end_ns=0)
    ranks = (RankRecording(0, 1, 1, (record(2), open_call), ()), RankRecording(1, 2, -1, (), ()))
    reading = metrics.Reading(Recording("world", 2, 5, 1000 * MS, ranks), None)
    samples, _ = parsed(metrics.exposition([reading]))
    assert value(samples, "ringcomm_awaited", peer="1", **named("world", 0)) == 1
    open_for = value(samples, "ringcomm_open_call_seconds", **named("world", 0))
    assert open_for == pytest.approx(0.97)
    assert value(samples, "ringcomm_rank_state", state="in_call", **named("world", 0)) == 1
    assert value(samples, "ringcomm_rank_state", state="idle", **named("world", 1)) == 1


def test_nodes_are_told_apart():
    def reading(node):
        ranks = (RankRecording(node, 1, -1, (), ()),)
        of_node = dataclasses.replace(recording([record(1)]), ranks=ranks)
        return metrics.Reading(of_node, NodeLevel("world", node, (node,)))

    samples, _ = parsed(metrics.exposition([reading(0), reading(1)]))
    for node in (0, 1):
        labels = {**named("world", node), "node": str(node)}
        assert value(samples, "ringcomm_rank_readable", **labels) == 1


def test_a_trace_file_is_read(tmp_path, capsys):
    failed = record(2, state="failed", status="timeout", peer=1)
    path = tmp_path / "trace.json"
    path.write_text(reader.text_of(reader.Trace(recording([failed], [record(2)]), 0, 1.5e9, "it")))
    assert main(["metrics", str(path)]) == 0
    samples, types = parsed(capsys.readouterr().out)
    assert "counter" not in types.values()
    told = {"kind": "timeout", "peer": "1", **named("world", 0)}
    assert value(samples, "ringcomm_window_failures", **told) == 1


def test_wrong_usage_is_refused(tmp_path, capsys):
    assert main(["metrics", "a.json", "--pid", "1"]) == 2
    assert "expected FILEs or --pid, got both" in capsys.readouterr().err
    assert main(["metrics", "a.json", "--serve", "0"]) == 2
    assert main(["metrics", "--serve", "65536"]) == 2
    assert "--serve: expected a port from 0 to 65535, got 65536" in capsys.readouterr().err
    with metrics.make_server(0, []) as server:
        assert main(["metrics", "--serve", str(server.server_port)]) == 2
    assert "in use" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["metrics", "--pid", "one"])
    assert main(["metrics", str(tmp_path / "none.json")]) == 2
    capsys.readouterr()
    assert main(["metrics", "--pid", "1"]) == 1
    assert not re.match(r"ringcomm metrics: \w+: ", capsys.readouterr().err)
    (tmp_path / "other.json").write_text("{}")
    assert main(["metrics", str(tmp_path / "other.json")]) == 1
    assert "expected a trace of version" in capsys.readouterr().err


# ---- the server ----------------------------------------------------------------------------------


def server_url(port, path="/metrics"):
    return f"http://127.0.0.1:{port}{path}"


def get(port, path="/metrics"):
    with urllib.request.urlopen(server_url(port, path), timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def sleeps(store, rank, world):
    comm = ringcomm.Communicator.from_store(store, rank, world, name="served")
    comm.barrier()
    time.sleep(120)


def until_readable(pid):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if "ringcomm_calls_total" in (text := metrics.of_processes([pid])):
                return text
        except RingcommError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"process {pid} has no communicator")


def test_processes_are_served_and_may_end_between_scrapes():
    with Ranks(sleeps, 2) as ranks:
        first, second = ranks.pids
        until_readable(first)
        with metrics.make_server(0, [first, second]) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                kind, text = get(server.server_port)
                assert kind == "text/plain; version=0.0.4; charset=utf-8"
                samples, _ = parsed(text)
                assert value(samples, "ringcomm_process_up", pid=str(second)) == 1
                head = urllib.request.Request(server_url(server.server_port), method="HEAD")
                with urllib.request.urlopen(head, timeout=30) as answer:
                    assert answer.status == 200 and int(answer.headers["Content-Length"]) > 0
                    assert answer.read() == b""
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    get(server.server_port, "/")
                os.kill(second, signal.SIGKILL)
                ranks.processes[1].join()
                samples, _ = parsed(get(server.server_port)[1])
                assert value(samples, "ringcomm_process_up", pid=str(first)) == 1
                assert value(samples, "ringcomm_process_up", pid=str(second)) == 0
                # The other rank's heap still shows the last calls of the rank that has ended.
                ended = value(samples, "ringcomm_rank_state", state="ended", **named("served", 1))
                assert ended == 1
                os.kill(first, signal.SIGKILL)
                ranks.processes[0].join()
                samples, _ = parsed(get(server.server_port)[1])
                assert {name for name, _ in samples} == {"ringcomm_process_up"}
            finally:
                server.shutdown()
                thread.join()
