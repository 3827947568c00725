# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: its records, their call sites, and that readers see only whole records."""

import os
import re
import struct
import threading
import time

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, ArgumentError, CommOptions, RingcommError, _native
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder import records as format
from ringcomm.comm.recorder.records import read_header, read_recorder, unstable_records
from tests.support import ROOT
from tests.support.faults import die
from tests.support.ranks import Ranks, run_ranks

T = torch.ones


def in_world(body, *, records=256, world=2, timeout=30.0):
    with ringcomm.local_world(world, options=CommOptions(timeout=timeout, records=records)) as each:
        return each.run(body)


def here(offset, function):
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def enumerators(name):
    """Returns the names in an enumeration of call.h, except its count."""
    source = (ROOT / "kernels/include/ringcomm/protocol/call.h").read_text()
    (body,) = re.findall(rf"enum class {name} : uint32_t {{(.*?)}};", source, re.DOTALL)
    values = re.findall(r"\bk\w+", body)
    assert values[-1] == "kCount"
    return values[:-1]


def test_every_code_of_a_record_has_a_name_of_its_own():
    """Readers count a record with an unknown code, or a code without a name, as torn."""
    names = _native.RECORD_NAMES
    assert len(names["collectives"]) == len(enumerators("Collective"))
    assert list(_native.ALGORITHMS.values()) == list(range(len(enumerators("Algorithm"))))
    assert _native.ALGORITHMS_OF.keys() == set(names["collectives"][1:])
    for known in (*names.values(), list(_native.ALGORITHMS)):
        assert len(set(known)) == len(known) and "unknown" not in known
    assert "none" not in (*names["collectives"][1:], *names["dtypes"], *names["ops"])


def test_what_is_recorded_of_collectives():
    def body(comm):
        before_ns = time.monotonic_ns()
        comm.all_reduce(T(4).half(), op=torch.distributed.ReduceOp.MAX, algorithm="ring")
        comm.broadcast(T(6), 1)
        comm.barrier()
        comm.all_to_all_single(T(4), T(4))
        recorded = comm.recording()
        assert (recorded.communicator, recorded.world_size) == ("local", 2)
        assert before_ns < recorded.taken_ns <= time.monotonic_ns()
        mine = recorded.ranks[comm.rank]
        assert (mine.rank, mine.pid, mine.messages, mine.torn) == (comm.rank, os.getpid(), (), 0)
        for record in mine.collectives:
            assert (record.state, record.status, record.peer) == ("done", "", -1)
            assert before_ns < record.begin_ns <= record.end_ns < recorded.taken_ns
        assert [each.begin_ns for each in mine.collectives] == sorted(
            each.begin_ns for each in mine.collectives
        )
        return [
            (each.number, each.call, each.size_bytes, each.site) for each in mine.collectives
        ], recorded.world_id

    (first, world), (second, same) = in_world(body)
    assert first == second and world == same != 0
    assert first == [
        (1, ("all_reduce", "float16", "MAX", -1, "ring", "native", 8), 8, here(2, body)),
        (2, ("broadcast", "float32", "", 1, "one_shot", "native", 24), 24, here(3, body)),
        (3, ("barrier", "", "", -1, "one_shot", "native", 0), 0, here(4, body)),
        (4, ("all_to_all", "float32", "", -1, "one_shot", "native", 0), 16, here(5, body)),
    ]


def test_only_the_last_are_kept_and_all_ranks_see_all():
    def body(comm):
        for _ in range(7):
            comm.barrier()
        comm.send(T(3), 1, tag=9) if comm.rank == 0 else comm.recv(T(3), tag=9)
        comm.barrier()
        ranks = comm.recording().ranks
        assert [[each.number for each in rank.collectives] for rank in ranks] == [[6, 7, 8]] * 2
        (sent,), (received,) = ranks[0].messages, ranks[1].messages
        assert (sent.collective, sent.peer, sent.root, sent.size_bytes) == ("send", 1, 9, 12)
        assert (received.collective, received.peer, received.root) == ("recv", 0, 9)
        assert sent.site == received.site == here(3, body)

    in_world(body, records=3)


def test_zero_records_nothing_and_takes_no_memory():
    used = {}
    for records in (0, 1000):
        options = CommOptions(records=records)
        before = ringcomm.heap_stats()["used_bytes"]
        with ringcomm.local_world(1, options=options) as world:
            world.run(lambda comm: comm.barrier())
            (count,) = world.run(lambda comm: len(comm.recording().ranks))
            assert count == min(records, 1)
            used[records] = ringcomm.heap_stats()["used_bytes"] - before
    assert used[1000] - used[0] >= 2 * 1000 * 192


def test_the_number_of_records_is_checked_and_equal_on_all_ranks():
    for wrong in (-1, (1 << 16) + 1):
        with pytest.raises(ArgumentError, match="records: expected 0 to 65536"):
            CommOptions(records=wrong)
    store = torch.distributed.HashStore()
    errors = []

    def rank(index):
        try:
            ringcomm.Communicator.from_store(
                store, index, 2, options=CommOptions(timeout=20, records=8 * (index + 1))
            )
        except RingcommError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert any("records=8" in str(error) and "records=16" in str(error) for error in errors)


def test_an_asynchronous_call_was_made_where_it_was_queued():
    def body(comm):
        started = threading.Event()
        first = comm.engine.submit(lambda: (started.wait(30) and []) or [], "wait")
        second = comm.all_reduce(T(4), async_op=True)
        third = comm.isend(T(2), 1) if comm.rank == 0 else comm.irecv(T(2), 0)
        started.set()
        [each.wait() for each in (first, second, third)]
        mine = comm.recording().ranks[comm.rank]
        return mine.last.site, mine.messages[0].site

    assert in_world(body) == [(here(3, body), here(4, body))] * 2


def test_the_place_is_the_innermost_of_the_users():
    """Not the place where a user's helper was called, and no line of the library."""

    def helper(comm):
        comm.all_gather_into_tensor(T(8), T(4))

    def body(comm):
        helper(comm)
        comm.split(0).close()
        return [each.site for each in comm.recording().ranks[comm.rank].collectives]

    sites = [here(1, helper), here(2, body)]
    assert in_world(body) == [sites, sites]


def test_a_long_path_keeps_its_end():
    code = compile("comm.barrier()", "/" + "x" * 300 + "/é" * 30 + "/train.py", "exec")

    def body(comm):
        exec(code, {"comm": comm})
        return comm.recording().ranks[comm.rank].last.site

    for site in in_world(body):
        assert site.startswith("...") and site.endswith("/é/train.py:1") and "\ufffd" not in site
        assert 100 < len(site.encode()) < 112


def test_what_runs_is_seen_running_and_for_whom_it_waits():
    seen = []

    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.all_reduce(T(5))
            return
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            other = comm.recording().ranks[0]
            if other.last.number == 2 and other.waits_for == 1:
                seen.append(other.last)
                break
            time.sleep(0.001)
        comm.all_reduce(T(5))

    in_world(body)
    (record,) = seen
    assert (record.state, record.end_ns, record.collective) == ("running", 0, "all_reduce")
    assert record.site == here(3, body)


def _dies(store, rank, world):
    os.environ[reader.VARIABLE] = "off"
    comm = ringcomm.Communicator.from_store(store, rank, world, timeout=30)
    comm.all_reduce(T(8))
    if rank == 1:
        comm.isend(T(4), 0)
        die()
    with pytest.raises(ringcomm.PeerLost) as raised:
        comm.all_reduce(T(8))
    (lost,) = [each for each in comm.recording().ranks if each.rank == 1]
    calls = (lost.last.number, lost.last.state, lost.messages[0].collective)
    comm.close()
    with pytest.raises(AbortedError):
        comm.recording()
    return calls, str(raised.value)


def test_the_recorder_of_a_killed_rank_is_still_there():
    with Ranks(_dies, 2) as ranks:
        calls, text = ranks.wait(ranks=[0])[0].value
    assert calls == (1, "done", "send")
    line = _dies.__code__.co_firstlineno
    assert f"at {__file__}:{line + 8} expected rank 1" in text, text
    assert "Rank 1 has not made this call. Rank 1's last call: all_reduce(" in text, text
    assert f"(call 1) at {__file__}:{line + 3}, done" in text, text


def test_ranks_of_processes_share_one_time_line():
    """All processes use one clock: no rank leaves a barrier before all have entered it."""
    for records in run_ranks(_barriers, 2):
        first, second = records
        for one, other in zip(first, second, strict=True):
            assert max(one[0], other[0]) <= min(one[1], other[1])


def _barriers(store, rank, world):
    with ringcomm.Communicator.from_store(store, rank, world, timeout=30) as comm:
        for _ in range(20):
            comm.barrier()
        ranks = comm.recording().ranks
        comm.barrier()
        return [[(each.begin_ns, each.end_ns) for each in rank.collectives[:19]] for rank in ranks]


# ---- torn records -----------------------------------------------------------------------------


def recorder_of(calls):
    """Returns the bytes of a recorder after this many barriers."""
    copies = []

    def body(comm):
        for _ in range(calls):
            comm.barrier()
        copies.append(comm.engine.core.recorded(0))

    in_world(body, records=4, world=1)
    return copies[0]


def test_a_torn_record_is_not_shown_as_whole():
    """Records with an odd version, or with fields that no owner writes, are hidden but counted."""
    memory = bytearray(recorder_of(3))
    whole = read_recorder(memory)
    assert [each.number for each in whole.collectives] == [1, 2, 3] and whole.torn == 0
    at = format.HEADER_BYTES + 2 * format.RECORD_BYTES
    (version,) = struct.unpack_from("<I", memory, at)
    assert version and version % 2 == 0
    struct.pack_into("<I", memory, at, version | 1)
    torn = read_recorder(memory)
    assert [each.number for each in torn.collectives] == [1, 3] and torn.torn == 1
    struct.pack_into("<II", memory, at, version, 77)
    assert read_recorder(memory).torn == 1
    struct.pack_into("<I", memory, at, version)


def test_a_record_that_changed_between_two_looks_is_not_shown():
    first, second = recorder_of(2), bytearray(recorder_of(2))
    second[: format.HEADER_BYTES] = first[: format.HEADER_BYTES]
    changed = unstable_records(first, first[:-1] + b"\1")
    assert changed == [len(first[format.HEADER_BYTES :]) // format.RECORD_BYTES - 1]
    assert unstable_records(first, first) == []
    # The times of both records differ, the other fields do not.
    assert unstable_records(first, bytes(second)) == [1, 2]
    assert read_recorder(first, [1, 2]).torn == 2 and not read_recorder(first, [1, 2]).collectives


def test_records_are_whole_while_their_owner_writes():
    """A reader on another thread sees only calls whose fields fit together, at any speed."""
    wrong, looks = [], []

    def body(comm):
        stop = threading.Event()

        def look():
            while not stop.is_set():
                for each in read_recorder(comm.engine.core.recorded(0)).collectives:
                    looks.append(each.number)
                    if each.size_bytes != 4 * (1 + each.number % 50):
                        wrong.append(each)

        reader = threading.Thread(target=look)
        reader.start()
        number = 0
        while number < 3000 or not looks:  # on a busy machine the reader starts late
            number += 1
            comm.all_reduce(T(1 + number % 50))
        stop.set()
        reader.join()

    in_world(body, records=2, world=1)
    assert not wrong and looks


def test_something_else_is_no_recorder():
    memory = bytearray(recorder_of(1))
    for offset, value in ((0, 1), (8, 9), (12, 64), (16, 0), (16, 1 << 30), (20, 5)):
        broken = bytearray(memory)
        struct.pack_into("<I", broken, offset, value)
        with pytest.raises(RingcommError, match="flight recorder: expected a recorder of v"):
            read_header(broken)
    for short in (memory[:10], memory[:-1]):
        with pytest.raises(RingcommError, match="flight recorder"):
            read_recorder(bytes(short))
