# SPDX-License-Identifier: Apache-2.0
"""With damaged recorders and odd texts the fault is still explained, and the trace readable."""

import struct
import tempfile
import tracemalloc
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcomm
from ringcomm import AbortedError, CommOptions, MismatchError, RingcommError
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.reader import KEPT_RECORDS
from ringcomm.comm.recorder.records import (
    HEADER_BYTES,
    RECORD_BYTES,
    TOTALS_BYTES,
    NodeLevel,
    RankRecording,
    Recording,
    read_header,
    read_recorder,
)
from tests.support.forgery import Region

T = torch.ones


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(reader.VARIABLE, str(tmp_path))
    return tmp_path


def left_and_read(recording: Recording, error: str) -> reader.Trace:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(reader.VARIABLE, folder)
        told = reader.leave(recording, 0, error)
        (path,) = Path(folder).iterdir()
        assert told == f". What each rank did last: ringcomm trace {path}"
        return reader.read(path)


@pytest.fixture(scope="module")
def memory():
    """Returns the recorder of rank 0 of 2 after seven collectives and a message."""

    def body(comm):
        for number in range(7):
            comm.all_reduce(T(number + 1))
        comm.send(T(2), 1, tag=3) if comm.rank == 0 else comm.recv(T(2), 0, tag=3)
        return comm.engine.core.recorded(0)

    with ringcomm.local_world(2, options=CommOptions(records=8)) as world:
        return world.run(body)[0]


ODD_TEXTS = st.one_of(
    st.text(),
    st.text(st.sampled_from("a\r\n\t\x1b\u202e\ud800\0"), max_size=20),
    st.just("x" * 70000),
)


@settings(max_examples=40)
@given(name=ODD_TEXTS, error=ODD_TEXTS)
def test_what_is_left_is_read_whatever_the_texts(name, error):
    trace = left_and_read(Recording(name, 1, 1, 1, ()), error)
    for got, given_text in ((trace.recording.communicator, name), (trace.error, error)):
        assert len(got) == min(len(given_text), 1 << 16)
        assert "\x1b" not in got and "\r" not in got
        if given_text.isprintable():
            assert given_text.startswith(got)


ODD_WORDS = (0, 1, 2, 3, 1 << 31, (1 << 32) - 1, (1 << 32) - 2)


def damaged(memory: bytes, chance: Random) -> bytes:
    """Writes odd words into all fields but the three that readers know: layout, rank, world."""
    raw = bytearray(memory)
    for _ in range(chance.randint(1, 12)):
        at = 4 * chance.randrange(len(raw) // 4)
        if at >= 28:
            word = chance.choice((*ODD_WORDS, chance.randrange(1 << 32)))
            struct.pack_into("<I", raw, at, word)
    return bytes(raw)


@given(seed=st.integers(0, 1 << 32))
def test_what_is_left_is_read_whatever_the_recorders_say(memory, seed):
    chance = Random(seed)
    raw = damaged(memory, chance)
    ranks = (read_recorder(raw),)
    recording = Recording("world", 2, read_header(raw).world_id, 1, ranks)
    assert left_and_read(recording, "").recording == recording


AT_NUMBER, AT_ROOT, AT_BEGIN, AT_END, AT_PEER = 8, 36, 56, 64, 76


@pytest.mark.parametrize(
    ("at", "raw"),
    [
        (AT_NUMBER, struct.pack("<Q", 1 << 63)),
        (AT_NUMBER, struct.pack("<Q", 6)),  # another record's number
        (AT_NUMBER + 8, struct.pack("<Q", 1 << 63)),
        (AT_ROOT, struct.pack("<i", -2)),
        (AT_BEGIN, struct.pack("<Q", 1)),
        (AT_BEGIN, struct.pack("<Q", (1 << 64) - 1)),
        (AT_END, struct.pack("<Q", 1)),
        (AT_END, struct.pack("<Q", (1 << 64) - 1)),
        (AT_PEER, struct.pack("<i", -2)),
    ],
)
def test_what_no_owner_writes_is_unreadable(memory, at, raw):
    whole = read_recorder(memory)
    assert [each.number for each in whole.collectives] == list(range(1, 8)) and whole.torn == 0
    changed = bytearray(memory)
    begin = HEADER_BYTES + 5 * RECORD_BYTES + at
    assert changed[begin : begin + len(raw)] != raw
    changed[begin : begin + len(raw)] = raw
    found = read_recorder(bytes(changed))
    assert len(found.collectives) == 6 and found.torn == 1


def test_a_peers_damaged_recorder_hides_nobody_elses(folder):
    """The whole recorder, with its header, is junk; the error still says where each rank is."""
    records = 16
    told = []

    def body(comm):
        comm.barrier()
        if comm.rank == 1:
            size_bytes = HEADER_BYTES + 2 * records * RECORD_BYTES + TOTALS_BYTES
            at = comm.engine.core.region_bytes - size_bytes
            assert Region.of(comm).read(at, 8) == b"RINGREC1"
            Region.of(comm).write(at, b"\xa5" * size_bytes)
        comm.barrier()
        with pytest.raises(MismatchError) as raised:
            comm.all_reduce(T(8 + comm.rank))
        told.append(str(raised.value))
        assert [each.rank for each in comm.recording().ranks] == [0, 1]

    with ringcomm.local_world(2, options=CommOptions(timeout=30, records=records)) as world:
        world.run(body)
    (path,) = folder.iterdir()
    line = body.__code__.co_firstlineno + 9
    for text in told:
        assert f"at {__file__}:{line}" in text and f"ringcomm trace {path}" in text, text
    first, second = reader.read(path).recording.ranks
    assert [each.number for each in first.collectives] == [1, 2, 3] and second.torn


def test_of_many_records_a_trace_holds_the_last(folder):
    calls, records = 1200, 1000

    def body(comm):
        for _ in range(calls):
            comm.barrier()
        assert len(comm.recording().ranks[comm.rank].collectives) == records
        with pytest.raises(MismatchError):
            comm.all_reduce(T(8 + comm.rank))

    with ringcomm.local_world(2, options=CommOptions(timeout=60, records=records)) as world:
        world.run(body)
    (path,) = folder.iterdir()
    for rank in reader.read(path).recording.ranks:
        numbers = [each.number for each in rank.collectives]
        # The other rank may not have begun the last call.
        assert len(numbers) == KEPT_RECORDS and numbers[-1] in (calls, calls + 1)
        assert numbers == list(range(numbers[-1] - KEPT_RECORDS + 1, numbers[-1] + 1))


def test_a_reason_writes_nothing_to_a_peers_terminal():
    def body(comm):
        if comm.rank == 1:
            comm.abort("ended\x1b[2J\r\u202e by hand")
        with pytest.raises(AbortedError) as raised:
            comm.barrier()
        return str(raised.value)

    with ringcomm.local_world(2, timeout=30) as world:
        text = world.run(body)[0]
    assert "ended?[2J?? by hand" in text and text.isprintable()


@pytest.mark.parametrize("world_size", [0, -1, (1 << 16) + 1, 1 << 29, 1 << 63])
@pytest.mark.parametrize("name", ["world", "world/node0:" + ".".join(["0-999999999"] * 33)])
def test_a_world_is_no_larger_than_any_is(tmp_path, world_size, name):
    """A file of two kilobytes that claims more ranks takes no memory for them."""
    path = tmp_path / "trace.json"
    trace = reader.Trace(Recording(name, world_size, 1, 1, ()), 0, 1.0, "")
    path.write_text(reader.text_of(trace))
    tracemalloc.start()
    try:
        with pytest.raises(RingcommError, match=r"world_size|ranks, expected at most"):
            reader.read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        sound = Recording(name, 1 << 16, 1, 1, ())
        assert NodeLevel.of(sound) is None
        path.write_text(reader.text_of(reader.Trace(sound, 0, 1.0, "")))
        assert reader.read(path).recording == sound
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_ranks_are_there_once_and_of_the_node(tmp_path):
    path = tmp_path / "trace.json"
    nodes = reader.OfNode(1, 1, ((0, 2), (1, 3)))

    def read(*ranks: tuple[int, int], of_node: reader.OfNode | None = None) -> None:
        records = tuple(RankRecording(rank, 1, waits, (), ()) for rank, waits in ranks)
        recording = Recording("world", 4, 1, 1, records)
        path.write_text(reader.text_of(reader.Trace(recording, 0, 1.0, "", of_node)))
        reader.read(path)

    read((0, -1), (3, 0))
    read((3, 0), (1, 2), of_node=nodes)
    for ranks in ([(0, 1), (0, 1)], [(4, 1)], [(0, 4)], [(0, 1), (1, 0), (0, -1)]):
        with pytest.raises(RingcommError, match="out of range or occurs twice"):
            read(*ranks)
    with pytest.raises(RingcommError, match="out of range"):
        read((0, 1), of_node=nodes)
