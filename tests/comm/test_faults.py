# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop or are interrupted: all others get an error in time that names the rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import (
    AbortedError,
    CollectiveTimeout,
    Communicator,
    ForkError,
    PeerLost,
    RingcommError,
)
from tests.support.fault_checks import check_deadline
from tests.support.faults import die, is_stopped, shared_memory_files, until_stopped, wait_for_all
from tests.support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.deadlines

LONG_S = 60.0
SHORT_S = 1.0

# The call in which the survivors wait when the fault happens.
WAITS: dict[str, Any] = {
    "all_reduce": lambda c: c.all_reduce(torch.ones(100_000)),
    "small all_reduce": lambda c: c.all_reduce(torch.ones(4)),
    "ring": lambda c: c.all_reduce(torch.ones(1000), algorithm="ring"),
    "reduce_scatter": lambda c: c.reduce_scatter_tensor(
        torch.ones(5000), torch.ones(5000 * c.world_size)
    ),
    "all_gather": lambda c: c.all_gather_into_tensor(
        torch.ones(5000 * c.world_size), torch.ones(5000)
    ),
    "heap": lambda c: c.all_reduce(ringcomm.zeros(100_000)),
    "async": lambda c: c.all_reduce(torch.ones(10), async_op=True).wait(),
    "barrier": lambda c: c.barrier(),
    "recv": lambda c: c.recv(torch.ones(10), c.world_size - 1),
    "large send": lambda c: c.send(torch.ones(2_000_000), c.world_size - 1),
}


def _survivors(world):
    return list(range(world - 1))


def _waits_for_the_last(store, rank, world, wait, timeout, end):
    """The last rank ends as ``end`` says; the others must not hang, and build a new world."""
    comm = Communicator.from_store(store, rank, world, timeout=LONG_S)
    comm.barrier()
    if rank == world - 1:
        store.set("pid", str(os.getpid()))
        if end == "die":
            die()
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()
    if end == "stop":
        until_stopped(int(store.get("pid")))
        # Otherwise a survivor that is late by its timeout would be taken for the stopped rank.
        wait_for_all(store, "stopped", world - 1)
    comm.timeout = timeout
    started = time.monotonic()
    try:
        WAITS[wait](comm)
    except RingcommError as error:
        first = error
    else:
        raise AssertionError("the call returned")
    waited_s = time.monotonic() - started
    try:
        comm.barrier()
    except AbortedError as error:
        assert str(first)[:60] in str(error)
    else:
        raise AssertionError("the communicator was usable")
    comm.close()
    fresh = Communicator.from_store(store, rank, world - 1, name="fresh", timeout=LONG_S)
    tensor = torch.ones(5)
    fresh.all_reduce(tensor)
    fresh.close()
    return type(first), str(first), waited_s, tensor[0].item()


@pytest.mark.parametrize(
    ("wait", "world_size"), [*((wait, 2) for wait in WAITS), ("all_reduce", 4), ("ring", 4)]
)
def test_killed_rank(wait, world_size):
    with Ranks(_waits_for_the_last, world_size, wait, LONG_S, "die") as ranks:
        outcomes = ranks.wait(LONG_S / 2, _survivors(world_size))
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        kind, text, waited_s, total = outcome.value
        assert kind is PeerLost
        assert f"rank {world_size - 1}" in text
        assert f"on rank {outcome.rank} of {world_size}" in text
        assert waited_s < LONG_S / 2
        assert total == world_size - 1
    assert not shared_memory_files()


@pytest.mark.parametrize("wait", ["all_reduce", "async", "recv", "barrier"])
def test_stopped_rank(wait):
    with Ranks(_waits_for_the_last, 3, wait, SHORT_S, "stop") as ranks:
        outcomes = ranks.wait(LONG_S / 2, _survivors(3))
        assert is_stopped(ranks.pids[2])
    kinds = set()
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        kind, text, waited_s, total = outcome.value
        kinds.add(kind)
        assert list(check_deadline(text, outcome.rank, waited_s, SHORT_S)) == []
        assert "for rank 2" in text
        assert total == 2
    assert kinds == {CollectiveTimeout}


def _killed_all(store, rank, world):
    comm = Communicator.from_store(store, rank, world, timeout=LONG_S)
    tensor = ringcomm.zeros(1 << 20)
    comm.all_reduce(tensor)
    die()


def test_nothing_is_left_when_all_are_killed():
    before = shared_memory_files()
    with Ranks(_killed_all, 3) as ranks:
        outcomes = ranks.wait(LONG_S)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 3
    assert shared_memory_files() == before


def _interrupts_the_wait(comm):
    """Sends Ctrl-C after a call has been in progress for a moment."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        mine = comm.recording().rank(comm.rank)
        if any(each.state == "running" for each in (*mine.collectives, *mine.messages)):
            break
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)


def _interrupted(store, rank, world, wait):
    comm = Communicator.from_store(store, rank, world, timeout=LONG_S)
    comm.barrier()
    if rank == 0:
        threading.Thread(target=_interrupts_the_wait, args=(comm,)).start()
        try:
            WAITS[wait](comm)
        except KeyboardInterrupt:
            store.set("interrupted", "1")
            assert comm.aborted
            try:
                comm.barrier()
            except AbortedError:
                return "interrupted"
        return "not interrupted"
    if rank == 2:
        # This rank is busy elsewhere; its next call reports the interrupt.
        store.wait(["interrupted"], timedelta(seconds=LONG_S))
    try:
        WAITS["barrier" if wait == "recv" else wait](comm)
        # Data that rank 0 had already sent may have been enough for the first call.
        comm.barrier()
    except AbortedError as error:
        return str(error)
    return "not aborted"


@pytest.mark.parametrize("wait", ["all_reduce", "async", "recv"])
def test_ctrl_c(wait):
    interrupted, *others = run_ranks(_interrupted, 3, wait)
    assert interrupted == "interrupted"
    for text in others:
        assert "rank 0" in text
        assert "nterrupt" in text


def _forks(store, rank, world):
    comm = Communicator.from_store(store, rank, world, timeout=LONG_S)
    group = comm.new_group(range(world))
    assert group is not None
    kept = ringcomm.zeros(1000)
    comm.all_reduce(kept, async_op=True).wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing"
        try:
            for call in (
                lambda: comm.all_reduce(torch.ones(4)),
                lambda: group.barrier(async_op=True),
                lambda: comm.send(torch.ones(1), 1 - rank),
            ):
                try:
                    call()
                except ForkError as error:
                    text = str(error)
                else:
                    text = "usable"
            # The child has its own heap and its own world.
            own = ringcomm.zeros(10)
            own += 1
            with ringcomm.local_world(2, timeout=LONG_S) as world_of_child:
                world_of_child.run(lambda each: each.all_reduce(ringcomm.zeros(10)))
            comm.abort("must not reach the parent")
            comm.close()
            group.close()
            ringcomm.comm.host.engine.close_all()
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    text = os.read(reader, 1000).decode()
    os.close(reader)
    os.waitpid(child, 0)
    assert torch.equal(kept, torch.zeros(1000))
    for each in (comm, group):
        tensor = torch.ones(1000)
        each.all_reduce(tensor)
        each.all_reduce(tensor, async_op=True).wait()
        assert tensor[0] == world * world
        each.close()
    return text


def test_fork():
    for text in run_ranks(_forks, 2):
        assert "was forked from the one that built the communicator" in text
        assert "of 2" in text


def _exits_with_calls_under_way(store, rank, world):
    comm = Communicator.from_store(store, rank, world, timeout=LONG_S)
    comm.barrier()
    if rank == 0:
        comm.all_reduce(torch.ones(1000), async_op=True)
        return "left"
    time.sleep(0.2)
    comm.all_reduce(torch.ones(1000))
    return "done"


def test_exit_ends_queued_calls_first():
    assert run_ranks(_exits_with_calls_under_way, 2) == ["left", "done"]


LEAVES_A_THREAD_IN_A_CALL = """
import threading, time, torch, ringcomm
world = ringcomm.local_world(2, timeout=600)
threading.Thread(target=lambda: world[0].barrier(), daemon=True).start()
time.sleep(0.2)
"""


def test_exit_does_not_wait_for_a_thread_in_a_call():
    run = [sys.executable, "-W", "ignore", "-c", LEAVES_A_THREAD_IN_A_CALL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(run, capture_output=True, check=False, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr


# The thread's call returns while the interpreter ends, during the destructor of ``late``.
LEAVES_A_THREAD_THAT_COMES_LATE = """
import threading, time
from ringcomm import _native

class Late:
    def __del__(self):
        time.sleep(0.6)

late = Late()
_native.arm_fault("delay", seconds=0.3)
threading.Thread(target=_native.pass_fault_point, args=(0, 0, 0), daemon=True).start()
time.sleep(0.1)
"""


def test_a_thread_that_returns_from_a_call_after_the_end_aborts_nothing():
    run = [sys.executable, "-W", "ignore", "-c", LEAVES_A_THREAD_THAT_COMES_LATE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(run, capture_output=True, check=False, env=environment, timeout=150)
    assert (done.returncode, done.stderr) == (0, b"")


def test_abort_from_another_thread_wakes_a_waiter():
    world = ringcomm.local_world(2, timeout=LONG_S)

    def body(comm):
        if comm.rank == 0:
            timer = threading.Timer(0.2, comm.abort, ["changed my mind"])
            timer.start()
        with pytest.raises(AbortedError, match="changed my mind"):
            if comm.rank == 0:
                comm.all_reduce(torch.ones(3))
            else:
                comm.recv(torch.ones(3), 0)

    world.run(body)
    world.close()
