# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: killed, stopped, aborted, forked, or exited without close()."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

import ringcomm
from ringcomm import (
    AbortedError,
    CollectiveTimeout,
    Communicator,
    ForkError,
    HeapError,
    MismatchError,
    PeerLost,
)
from ringcomm.algorithms import spelled
from ringcomm.comm.agreement import any_rank
from ringcomm.comm.device import lifecycle
from tests.proof.faults.device.rig import (
    DEVICE,
    HEAP_BYTES,
    LONG_S,
    OPTIONS,
    SOON_S,
    Rig,
    error_of,
    first_error,
    until,
)
from tests.proof.faults.device.test_device_faults import MISMATCHES
from tests.support.covering import thinned
from tests.support.faults import die, is_stopped
from tests.support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.deadlines

Call = Callable[[Rig, Any], Any]

# The calls in which the survivors wait when the fault happens.
WAITS: dict[str, Call] = {
    "one_shot": lambda rig, comm: comm.all_reduce(rig.full(5000, 1.0), algorithm="two_shot"),
    "ring": lambda rig, comm: comm.all_reduce(rig.full(5000, 1.0), algorithm="ring"),
    "ll": lambda rig, comm: comm.all_reduce(rig.full(100, 1.0), algorithm="ll"),
    "gathered by ll": lambda rig, comm: comm.all_gather_into_tensor(
        rig.full(100 * comm.world_size, 0.0), rig.full(100, 1.0), algorithm="ll"
    ),
    "copy_engine": lambda rig, comm: comm.all_gather_into_tensor(
        rig.full(5000 * comm.world_size, 0.0), rig.full(5000, 1.0), algorithm="copy_engine"
    ),
    "heap": lambda rig, comm: comm.all_reduce(ringcomm.zeros(20_000, device="cuda:0")),
    "async": lambda rig, comm: comm.all_reduce(rig.full(10, 1.0), async_op=True).wait(),
    "barrier": lambda rig, comm: comm.barrier(),
    "recv": lambda rig, comm: comm.recv(rig.full(10, 1.0), comm.world_size - 1),
    "large send": lambda rig, comm: comm.send(rig.full(200_000, 1.0), comm.world_size - 1),
    "flags": lambda rig, comm: any_rank(comm, [False]),
    "flags before the hosts have met": lambda rig, comm: any_rank(comm, [False]),
}
# Long enough that a busy machine does not make another rank look stopped.
STOPPED_S = 2.5
# The first words of the heap are always in use.
EMPTY_HEAP_BYTES = 256


def fresh_total(rig: Rig, store: Any, rank: int, n: int) -> float:
    """Returns an all-reduce's result on a new communicator of ``n`` ranks of the same processes."""
    comm = rig.connect(store, rank, n, name="fresh")
    tensor = rig.full(5000, 1.0)
    comm.all_reduce(tensor)
    rig.synchronize()
    comm.close()
    return float(tensor[4999].item())


def wait_for_all(store: Any, name: str, n: int) -> None:
    """A barrier in the store: returns in ``n`` processes at about the same time."""
    store.add(f"met/{name}", 1)
    until(lambda: int(store.add(f"met/{name}", 0)) >= n, LONG_S)


def is_given_back(rig: Rig) -> bool:
    lifecycle.reclaim()
    return rig.used_bytes() == EMPTY_HEAP_BYTES


def waits_for_the_last(
    store: Any, rank: int, n: int, kind: str, end: str, names: list[str]
) -> tuple[dict[str, tuple[Any, ...]], float]:
    """Makes the last rank end as ``end`` says; each kind of wait has a communicator of its own."""
    rig = Rig(kind)
    comms = {name: rig.connect(store, rank, n, name=name.replace(" ", "-")) for name in names}
    for comm in comms.values():
        comm.barrier()
    if "flags" in comms:
        assert any_rank(comms["flags"], [rank == n - 1]) == [True]
    rig.synchronize()
    if rank == n - 1:
        if end == "die":
            die()
        os.kill(os.getpid(), signal.SIGSTOP)
    told: dict[str, tuple[Any, ...]] = {}
    for name, comm in comms.items():
        comm.timeout = LONG_S if end == "die" else STOPPED_S
        # Otherwise a rank that begins late by its timeout would be taken for the stopped rank.
        wait_for_all(store, name, n - 1)
        started = time.monotonic()
        error = first_error(rig, comm, partial(WAITS[name], rig, comm))
        told[name] = type(error), str(error), time.monotonic() - started
        assert str(error)[:60] in str(error_of(comm.barrier))
        comm.close()
    if end == "die":
        # The regions into which the dead rank could have written are freed.
        until(partial(is_given_back, rig))
    else:
        assert rig.used_bytes() > EMPTY_HEAP_BYTES
    total = fresh_total(rig, store, rank, n - 1)
    rig.close()
    return told, total


def survivors(n: int, *args: Any) -> list[Any]:
    with Ranks(waits_for_the_last, n, *args) as ranks:
        outcomes = ranks.wait(2 * LONG_S, list(range(n - 1)))
        if args[1] == "stop":
            assert is_stopped(ranks.pids[n - 1])
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    return [outcome.value for outcome in outcomes]


def test_a_killed_process_is_reported(kind: str) -> None:
    n = 3
    for told, total in survivors(n, kind, "die", list(WAITS)):
        for name, (error, text, seconds) in told.items():
            assert error is PeerLost, (name, text)
            assert f"rank {n - 1}" in text, (name, text)
            assert "process has ended" in text, (name, text)
            assert seconds < SOON_S
        assert total == n - 1


def test_a_stopped_process_is_a_timeout(kind: str) -> None:
    names = ["one_shot", "ring", "ll", "recv"]
    for told, total in survivors(3, kind, "stop", names):
        for name, (error, text, _) in told.items():
            assert error is CollectiveTimeout, (name, text)
            assert "rank 2" in text and "waited" in text and "item" in text, (name, text)
        assert total == 2


# One mismatch for each algorithm, and two for calls with different algorithms;
# test_device_faults.py tests all mismatches in threads.
CROSSED = thinned(MISMATCHES, 4)


def crosses_calls(store: Any, rank: int, n: int, kind: str) -> dict[str, tuple[Any, str]]:
    rig = Rig(kind)
    told: dict[str, tuple[Any, str]] = {}
    for number, name in enumerate(CROSSED):
        *calls, _, _ = MISMATCHES[name]
        comm = rig.connect(store, rank, n, name=f"number-{number}")
        error = first_error(rig, comm, partial(calls[rank], rig, comm))
        told[name] = type(error), str(error)
        assert isinstance(error_of(comm.barrier), AbortedError)
        comm.close()
    total = fresh_total(rig, store, rank, n)
    assert total == n
    rig.close()
    return told


def test_processes_that_call_differently_are_named(kind: str) -> None:
    results = run_ranks(crosses_calls, 2, kind)
    for name in CROSSED:
        *_, first, second = MISMATCHES[name]
        for told in results:
            error, text = told[name]
            assert error is MismatchError, (name, text)
            calls = {rank: text.split(f"ank {rank} called ")[1].split(")")[0] for rank in (0, 1)}
            assert first in calls[0] and second in calls[1], text


def aborts(store: Any, rank: int, n: int, kind: str) -> list[str]:
    """Rank 0 aborts at different moments."""
    rig = Rig(kind)
    told = []
    waiting = rig.connect(store, rank, n, name="its-own-kernel-waits")
    if rank == 0:
        timer = threading.Timer(0.2, waiting.abort, ["from another thread"])
        timer.start()
        told.append(str(first_error(rig, waiting, lambda: waiting.all_reduce(rig.full(10, 1.0)))))
        timer.join()
    else:
        until(lambda: waiting.engine.owner.any_aborted())
        told.append(str(first_error(rig, waiting, waiting.barrier)))
    idle = rig.connect(store, rank, n, name="its-peers-kernel-waits")
    if rank == 0:
        time.sleep(0.2)
        idle.abort("while nothing ran")
        told.append(str(error_of(idle.barrier)))
    else:
        told.append(str(first_error(rig, idle, lambda: idle.all_reduce(rig.full(5000, 1.0)))))
    for comm in (waiting, idle):
        comm.close()
    assert fresh_total(rig, store, rank, n) == n
    rig.close()
    return told


def test_an_abort_reaches_other_processes(kind: str) -> None:
    for told in run_ranks(aborts, 3, kind):
        assert "from another thread" in told[0]
        assert "while nothing ran" in told[1]


def test_an_abort_is_told_by_rank(kind: str) -> None:
    for told in run_ranks(aborts, 2, kind)[1:]:
        assert "rank 0 aborted the communicator: from another thread" in told[0]
        assert "rank 0 aborted the communicator: while nothing ran" in told[1]


def leaves(store: Any, rank: int, n: int, kind: str) -> tuple[Any, str]:
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    comm.barrier()
    rig.synchronize()
    if rank == 1:
        return None, "left"  # without close()
    error = first_error(rig, comm, lambda: comm.all_reduce(rig.full(5000, 1.0)))
    comm.close()
    rig.close()
    return type(error), str(error)


def test_a_process_that_leaves_is_lost(kind: str) -> None:
    error, text = run_ranks(leaves, 2, kind)[0]
    assert error is PeerLost
    assert "rank 1" in text


def leaves_work_behind(store: Any, rank: int, n: int, kind: str) -> float:
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    tensor = rig.full(5000, 1.0)
    if rank == 0:
        comm.all_reduce(tensor, async_op=True)
        return 2.0  # the process ends while its kernel waits
    time.sleep(0.3)
    comm.all_reduce(tensor)
    rig.synchronize()
    comm.close()
    return float(tensor[0].item())


def test_exit_ends_the_calls_under_way_first(kind: str) -> None:
    assert run_ranks(leaves_work_behind, 2, kind) == [2.0, 2.0]


def forks(store: Any, rank: int, n: int) -> str:
    rig = Rig("emulated")
    comm = rig.connect(store, rank, n)
    work = comm.all_reduce(rig.full(10, 1.0), async_op=True)
    rig.synchronize()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing"
        try:
            calls: list[Callable[[], Any]] = [
                lambda: comm.all_reduce(torch.ones(4)),
                lambda: comm.barrier(async_op=True),
                lambda: comm.send(torch.ones(1), 1 - rank),
                lambda: comm.engine.submit(list, "mine"),
                lambda: comm.new_group([0, 1]),
                lambda: ringcomm.zeros(10, device="cuda:0"),
            ]
            for call in calls:
                text = "usable"
                try:
                    call()
                except ForkError as error:
                    text = str(error)
                else:
                    break
            comm.abort("must not reach the parent")
            comm.close()
            lifecycle.reclaim()
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    text = os.read(reader, 1000).decode()
    os.close(reader)
    os.waitpid(child, 0)
    work.wait()
    tensor = rig.full(5000, 1.0)
    comm.all_reduce(tensor)
    rig.synchronize()
    assert float(tensor[0].item()) == n
    comm.close()
    rig.close()
    return text


def test_a_forked_child_touches_nothing() -> None:
    for text in run_ranks(forks, 2):
        assert "was forked from one that uses its devices" in text


def in_threads(n: int, body: Callable[[int], Any]) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda k=k: results.__setitem__(k, body(k))) for k in range(n)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[k] for k in range(n)]


def two_ranks_each(store: Any, process: int, processes: int, kind: str, path: str) -> list[Any]:
    """Ranks of one process share a launch, which waits for the other process's launch."""
    rig = Rig(kind)
    n = 2 * processes
    placed = threading.Barrier(2)

    def body(local: int) -> Any:
        rank = 2 * process + local
        comm = rig.connect(FileStore(path, n), rank, n)
        with rig.runtime.on_stream(rig.runtime.make_stream(0)), rig.ordered():
            totals = []
            for algorithm, count in (("ll", 100), ("one_shot", 5000), ("ring", 5000)):
                tensor = rig.full(count, float(rank))
                comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))
                totals.append((float(tensor.min().item()), float(tensor.max().item())))
            placed.wait()
            if process == 1:
                die()
            error = first_error(rig, comm, lambda: comm.all_reduce(rig.full(5000, 1.0)))
        comm.close()
        return totals, type(error), str(error)

    results = in_threads(2, body)
    rig.close()
    return results


def test_processes_of_several_ranks(kind: str, tmp_path: Any) -> None:
    with Ranks(two_ranks_each, 2, kind, str(tmp_path / "threads")) as ranks:
        (outcome,) = ranks.wait(LONG_S, [0])
    assert outcome.ok, outcome.describe()
    for totals, error, text in outcome.value:
        assert totals == [(6.0, 6.0)] * 3
        assert error is PeerLost, text
        assert "rank 2" in text or "rank 3" in text


def loses_a_zombie(store: FileStore, rank: int, n: int, kind: str) -> tuple[type, int]:
    pid = os.fork()
    rig = Rig(kind)
    comm = rig.connect(store, int(pid == 0), 2)
    comm.barrier()
    rig.synchronize()
    if pid == 0:
        die()
    error: Any = first_error(rig, comm, comm.barrier)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    kind_of_error = type(error)
    comm.close()
    until(partial(is_given_back, rig))
    used = rig.used_bytes()
    os.waitpid(pid, 0)
    return kind_of_error, used


def test_a_zombie_keeps_no_memory(kind: str) -> None:
    with Ranks(loses_a_zombie, 1, kind) as ranks:
        outcome = ranks.wait(LONG_S)[0]
    assert outcome.ok, outcome.describe()
    assert outcome.value == (PeerLost, EMPTY_HEAP_BYTES)


def one_has_no_room(store: Any, rank: int, n: int, kind: str) -> tuple[Any, str]:
    """Rank 1 fails before it receives any rank's region, and exits; rank 0 goes on."""
    rig = Rig(kind)
    options = replace(OPTIONS, segment_bytes=HEAP_BYTES) if rank else OPTIONS
    error = error_of(
        lambda: Communicator.from_store(
            store, rank, n, timeout=LONG_S, options=options, device=DEVICE, heap_bytes=HEAP_BYTES
        )
    )
    kind_and_text = type(error), str(error)
    # The error's traceback keeps the memory of the rendezvous alive.
    del error
    if rank == 0:
        until(partial(is_given_back, rig))
    else:
        assert is_given_back(rig)
    rig.close()
    return kind_and_text


def test_a_region_returns_when_the_process_that_failed_has_ended(kind: str) -> None:
    (_, told), (error, text) = run_ranks(one_has_no_room, 2, kind)
    assert error is HeapError
    assert "needs" in text and "rank 1 failed: HeapError" in told
