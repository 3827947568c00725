# SPDX-License-Identifier: Apache-2.0
"""Calls that a peer never makes: the error says which call the peer made last."""

import re
import threading
import time
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError

pytestmark = pytest.mark.deadlines

T = torch.ones


def test_a_call_that_the_other_never_makes():
    """The peer may just be late, so the call times out; the error says what the peer did last."""
    done = threading.Event()
    told = []

    def body(comm):
        comm.all_reduce(T(16))
        if comm.rank == 1:
            assert done.wait(60)
            return
        comm.timeout = 0.5
        with pytest.raises(ringcomm.CollectiveTimeout) as raised:
            comm.barrier()
        told.append(str(raised.value))
        done.set()

    world = ringcomm.local_world(2, timeout=60)
    world.run(body)
    world.close()
    line = body.__code__.co_firstlineno
    assert f"barrier(call 2 of this communicator) at {__file__}:{line + 7} waited" in told[0]
    expected = (
        "Rank 1 has not made this call. Rank 1's last call: all_reduce(float32, SUM, 64 bytes"
    )
    assert expected in told[0], told[0]
    assert f"(call 1) at {__file__}:{line + 1}, done" in told[0], told[0]


def test_a_rank_that_refused_its_arguments_has_made_no_call():
    done = threading.Event()
    told = []

    def body(comm):
        if comm.rank == 1:
            with pytest.raises(ArgumentError):
                comm.all_reduce(T(4), algorithm="none")
            assert done.wait(60)
            return
        with pytest.raises(ringcomm.CollectiveTimeout) as raised:
            comm.all_reduce(T(4))
        told.append(str(raised.value))
        done.set()

    world = ringcomm.local_world(2, timeout=0.5)
    world.run(body)
    world.close()
    assert "Rank 1 has made no call yet. " in told[0], told[0]


def test_calls_on_different_communicators():
    """Two communicators of the same ranks: each rank waits in a call that the other never makes."""
    groups: dict[int, list[Any]] = {}

    def first(c):
        groups[0][0].barrier()

    def second(c):
        groups[1][1].barrier()

    world = ringcomm.local_world(2, timeout=60)
    told = ["", ""]
    both_waited = threading.Barrier(2)  # A rank that returns counts as lost for its peer

    def body(comm):
        groups[comm.rank] = [comm.new_group([0, 1], name=name) for name in ("a", "b")]
        groups[comm.rank][comm.rank].timeout = 0.5
        with pytest.raises(ringcomm.CollectiveTimeout) as raised:
            (first, second)[comm.rank](comm)
        told[comm.rank] = str(raised.value)
        both_waited.wait(60)

    world.run(body)
    world.close()
    for rank, call in enumerate((first, second)):
        assert f"{__file__}:{call.__code__.co_firstlineno + 1} waited" in told[rank], told[rank]
        assert f"Rank {1 - rank} has made no call yet" in told[rank], told[rank]


def until(comm, rank, done):
    """Waits until ``done`` is true for this rank's recording."""
    deadline = time.monotonic() + 30
    while not done(comm.recording().rank(rank)):
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.001)


def until_it_waits(comm, rank):
    """Waits until this rank has recorded for which rank it waits in a message."""
    until(comm, rank, lambda recorded: recorded.waits_for >= 0)


def test_a_receive_that_nobody_sends():
    calls = (lambda c: c.recv(T(4), 1)), (lambda c: c.recv(T(4), 0, tag=3))
    told = ["", ""]

    def body(comm):
        if comm.rank == 0:
            until_it_waits(comm, 1)
            comm.timeout = 0.5
        with pytest.raises(ringcomm.RingcommError) as raised:
            calls[comm.rank](comm)
        told[comm.rank] = str(raised.value)

    world = ringcomm.local_world(2, timeout=60)
    world.run(body)
    world.close()
    for text in told:
        named = calls[0] if "tag 0) at" in text else calls[1]
        assert f" at {__file__}:{named.__code__.co_firstlineno} waited" in text, text
        assert re.search(r"Rank [01]'s last call: recv\(.*under way for", text), text


@pytest.mark.parametrize("hasty", [0, 1])
def test_a_receive_against_a_collective(hasty):
    """Neither ends the other: the first to time out reports in which call the other waits."""
    calls = (lambda c: c.barrier()), (lambda c: c.recv(T(4), 0, tag=3))
    told = ["", ""]

    def body(comm):
        comm.all_reduce(T(4))
        if comm.rank == hasty:
            until(comm, 1 - hasty, lambda recorded: recorded.collective(2) or recorded.messages)
        comm.timeout = 0.5 if comm.rank == hasty else 30
        with pytest.raises(ringcomm.CollectiveTimeout) as raised:
            calls[comm.rank](comm)
        told[comm.rank] = str(raised.value)

    world = ringcomm.local_world(2, timeout=30)
    world.run(body)
    world.close()
    sites = [f"{__file__}:{call.__code__.co_firstlineno}" for call in calls]
    receive = (
        rf"recv\(float32, 16 bytes, tag 3, from rank 0\) at {sites[1]}, under way for \d+\.\d s"
    )
    expected = [
        rf"Rank 1 has not made this call\. .*all_reduce.* Its last message: {receive}",
        rf"Rank 0's last call: barrier\(\) \(call 2\) at {sites[0]}, under way for \d+\.\d s",
    ]
    for text in told:
        assert re.search(expected[hasty], text), text


def test_a_send_that_nobody_receives():
    """The message does not fit into the slots, so the sender waits."""
    done = threading.Event()
    told = []

    def body(comm):
        comm.barrier()
        if comm.rank == 1:
            assert done.wait(60)
            return
        comm.timeout = 0.5
        with pytest.raises(ringcomm.CollectiveTimeout) as raised:
            comm.send(T(1_000_000), 1)
        told.append(str(raised.value))
        done.set()

    world = ringcomm.local_world(2, timeout=60)
    world.run(body)
    world.close()
    line = body.__code__.co_firstlineno
    # All slots are full.
    assert f" for rank 1 (item {ringcomm.CommOptions().slots}, epoch" in told[0], told
    assert f"send(float32, 4000000 bytes, tag 0) at {__file__}:{line + 7} waited" in told[0], told
    assert f"Rank 1's last call: barrier() (call 1) at {__file__}:{line + 1}, done" in told[0], told


@pytest.mark.parametrize(
    "call", [lambda c: c.recv(T(4), 1), lambda c: c.barrier()], ids=["recv", "barrier"]
)
def test_the_rank_that_others_wait_for_is_named_through_messages(call):
    """Rank 0 waits for rank 1, which waits for a message of rank 2."""
    done = threading.Event()
    told = []

    def body(comm):
        if comm.rank == 2:
            assert done.wait(60)
            return
        if comm.rank == 0:
            until_it_waits(comm, 1)
        comm.timeout = 0.5 if comm.rank == 0 else 30
        with pytest.raises(ringcomm.CollectiveTimeout) as raised:
            if comm.rank == 0:
                call(comm)
            else:
                comm.recv(T(4), 2)
        told.append(str(raised.value))
        if len(told) == 2:
            done.set()

    world = ringcomm.local_world(3, timeout=30)
    world.run(body)
    world.close()
    for text in told:
        assert "for rank 2" in text, text
