# SPDX-License-Identifier: Apache-2.0
"""Ends of communicators on devices: in any order, with work under way, or without close()."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import ringcomm
from ringcomm import AbortedError, CommOptions, Communicator, MismatchError, RingcommError
from ringcomm.comm.device import launch, lifecycle, rendezvous
from ringcomm.comm.device.core import DeviceCore
from ringcomm.comm.host import engine
from ringcomm.memory.device_heap import close_heaps, device_heap
from ringcomm.rendezvous import handles
from tests.proof.faults.device.conftest import Rigs
from tests.proof.faults.device.rig import (
    DEVICE,
    HEAP_BYTES,
    LONG_S,
    Gate,
    Rig,
    error_of,
    until,
)
from tests.support import ROOT
from tests.support.emulator.library import COMPILER
from tests.support.faults import until_rank_threads_have_ended
from tests.support.ranks import run_ranks

COUNT = 3000
# The first words of the heap are always in use.
EMPTY_HEAP_BYTES = 256
GRACE_S = 0.05


def in_use(rig: Rig) -> int:
    """Returns the bytes in use once the device is idle; busy streams delay freeing of memory."""
    rig.synchronize()
    return kept_bytes(rig)


def kept_bytes(rig: Rig) -> int:
    """While something runs."""
    lifecycle.reclaim()
    return rig.used_bytes()


def sum_up(rig: Rig, comm: Any, async_op: bool = False) -> float:
    with rig.ordered():
        tensor = rig.full(COUNT, 1.0)
        work = comm.all_reduce(tensor, async_op=async_op)
        if work is not None:
            work.wait()
        return float(tensor.sum().item()) / COUNT


def test_many_communicators_leave_nothing(rig: Rig) -> None:
    """They leave no memory, threads, descriptors or streams."""

    def once() -> None:
        world = rig.world(2)
        rig.forget()
        assert world.run(lambda comm: sum_up(rig, comm, async_op=True)) == [2.0, 2.0]
        world.close()

    once()
    gc.collect()
    counts = []
    for _ in range(8):
        once()
        gc.collect()
        assert in_use(rig) == EMPTY_HEAP_BYTES
        counts.append([len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")])
    assert counts[-1][0] <= counts[0][0] + 1
    assert counts[-1][1] <= counts[0][1]
    assert all(page.host_ptr == 0 for page in rig.pages)


def test_a_region_stays_until_its_peers_have_left(rig: Rig) -> None:
    world = rig.world(3)
    regions = in_use(rig)
    world[1].close()
    world[1].close()
    assert in_use(rig) == regions
    assert isinstance(error_of(world[1].barrier), AbortedError)
    world[0].close()
    assert in_use(rig) == regions
    world[2].close()
    assert in_use(rig) == EMPTY_HEAP_BYTES


def test_a_closed_communicator_says_so(rig: Rig) -> None:
    world = rig.world(1)
    comm = world[0]
    comm.close()
    calls = [
        lambda: comm.all_reduce(rig.full(COUNT, 1.0)),
        lambda: comm.barrier(async_op=True),
        lambda: comm.engine.submit(list, "mine"),
        lambda: comm.messages.exchange_messages([], []),
    ]
    for call in calls:
        error = error_of(call)
        assert isinstance(error, AbortedError)
        assert "communicator 'local' was closed; build a new one" in str(error)
    assert comm.aborted


def test_an_abort_after_the_end_touches_nobody_elses_memory(rig: Rig) -> None:
    world = rig.world(2)
    world.close()
    later = ringcomm.zeros(HEAP_BYTES // 8, device=DEVICE)
    for comm in world:
        comm.abort("too late")
        comm.engine.owner.abort("too late")
    assert int((later != 0).sum()) == 0


def test_close_waits_for_work_under_way(emulated: Rigs) -> None:
    rig = emulated()
    world = rig.world(2)
    tensors = [rig.full(COUNT, 1.0) for _ in world]
    stream = rig.runtime.make_stream(0)
    gate = Gate(rig, stream.handle)
    with rig.runtime.on_stream(stream):
        world.all_reduce(tensors)
    closing = threading.Thread(target=world.close)
    closing.start()
    time.sleep(GRACE_S)
    assert closing.is_alive()
    gate.open()
    closing.join(LONG_S)
    assert not closing.is_alive()
    for tensor in tensors:
        assert torch.equal(tensor, rig.full(COUNT, 2.0))


def test_work_is_done_after_the_end(rig: Rig) -> None:
    """Work that ended well still says so after close(), as on the host."""
    world = rig.world(2)
    tensors = [rig.full(COUNT, 1.0) for _ in world]

    def body(comm: Any) -> Any:
        return comm.all_reduce(tensors[comm.rank], async_op=True)

    works = world.run(body)
    world.close()
    for work in works:
        assert work.wait() is True
        assert work.is_completed() and work.is_success() and work.exception() is None
    rig.synchronize()
    assert torch.equal(tensors[0], rig.full(COUNT, 2.0))


def test_what_never_ends_is_left_alone(emulated: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that never ends keeps all of its memory; if it ends after all, memory is freed."""
    rig = emulated()
    monkeypatch.setattr(launch, "EXIT_GRACE_S", 0.1)
    monkeypatch.setattr(engine, "EXIT_GRACE_S", 0.1)
    world = rig.world(1, timeout=0.1)
    stream = rig.runtime.make_stream(0)
    tensor = rig.full(COUNT, 7.0)
    gate = Gate(rig, stream.handle)
    with rig.runtime.on_stream(stream):
        work = world[0].all_reduce(tensor, async_op=True)
    world[0].close()
    assert kept_bytes(rig) > EMPTY_HEAP_BYTES
    assert isinstance(error_of(world[0].barrier), AbortedError)
    gate.open()
    until(work.is_completed)
    assert "closed with a call under way" in str(error_of(world[0].close))
    assert "closed with a call under way" in str(error_of(work.wait))
    assert in_use(rig) == EMPTY_HEAP_BYTES


def test_threads_that_call_while_another_closes(rig: Rig) -> None:
    """Each call runs or is refused; no call sees a half-closed communicator."""
    for _ in range(5):
        world = rig.world(1)
        begun = threading.Event()
        told: list[str] = []

        def call(comm: Any = world[0], begun: Any = begun, told: Any = told) -> None:
            tensor = rig.full(64, 1.0)
            try:
                while True:
                    comm.all_reduce(tensor)
                    comm.barrier(async_op=True).wait()
                    begun.set()
            except RingcommError as error:
                told.append(str(error))
            rig.synchronize()

        threads = [threading.Thread(target=call) for _ in range(3)]
        threads += [threading.Thread(target=world.close) for _ in range(2)]
        for thread in threads[:3]:
            thread.start()
        assert begun.wait(LONG_S)
        for thread in threads[3:]:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        assert len(told) == 3
        assert all("was closed; build a new one" in text for text in told), told


@pytest.mark.parametrize("parent_first", [False, True])
def test_groups_and_their_parents(rig: Rig, parent_first: bool) -> None:
    world = rig.world(4)
    empty = rig.used_bytes()

    def body(comm: Any) -> list[float]:
        pair = comm.new_group([0, 1] if comm.rank < 2 else [2, 3])
        half = comm.split(comm.rank % 2)
        groups = [comm, pair, half]
        sums = [sum_up(rig, each) for each in groups]
        for k, each in enumerate(groups if parent_first else reversed(groups)):
            each.close()
            rest = groups[k + 1 :] if parent_first else groups[: 2 - k]
            sums += [sum_up(rig, other) for other in rest]
        return sums

    left = [2.0, 2.0, 2.0] if parent_first else [4.0, 2.0, 4.0]
    assert world.run(body) == [[4.0, 2.0, 2.0, *left]] * 4
    assert empty > in_use(rig) == EMPTY_HEAP_BYTES


def test_forgotten_communicators(rig: Rig) -> None:
    world = rig.world(2)
    rig.forget()
    assert world.run(lambda comm: sum_up(rig, comm)) == [2.0, 2.0]
    rig.synchronize()
    refs = [weakref.ref(comm) for comm in world]
    del world
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert in_use(rig) == EMPTY_HEAP_BYTES


def test_forgotten_communicators_end_their_calls_first(emulated: Rigs) -> None:
    rig = emulated()
    world = rig.world(2)
    rig.forget()
    stream = rig.runtime.make_stream(0)
    tensors = [rig.full(COUNT, 1.0) for _ in world]
    gate = Gate(rig, stream.handle)
    with rig.runtime.on_stream(stream):
        world.all_reduce(tensors)
    del world
    gc.collect()
    assert kept_bytes(rig) > EMPTY_HEAP_BYTES
    gate.open()
    assert in_use(rig) == EMPTY_HEAP_BYTES
    assert torch.equal(tensors[0], rig.full(COUNT, 2.0))


def forgets(store: Any, rank: int, n: int, kind: str) -> str:
    rig = Rig(kind)
    comm = rig.connect(store, rank, n)
    sum_up(rig, comm)
    rig.synchronize()
    if rank == 1:
        del comm
        gc.collect()
        rig.close()
        return ""
    text = ""
    with rig.ordered():
        tensor = rig.full(COUNT, 1.0)
        try:
            while True:
                comm.all_reduce(tensor)
                rig.synchronize()
        except RingcommError as error:
            text = str(error)
    comm.close()
    rig.close()
    return text


def test_peers_hear_of_a_forgotten_communicator(kind: str) -> None:
    assert "rank 1" in run_ranks(forgets, 2, kind)[0]


def test_a_failed_rendezvous_leaves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks disagree on options: all of them raise, and none keeps a region."""
    store = HashStore()
    results: list[int] = []
    all_have_read = threading.Barrier(2)
    check = handles.check_announced

    def checks(spec: Any, mine: Any, theirs: Any, rank: int) -> None:
        if rank == 0:
            all_have_read.wait(LONG_S)
        check(spec, mine, theirs, rank)

    monkeypatch.setattr(rendezvous, "check_announced", checks)

    def body(rank: int) -> None:
        options = CommOptions(segment_bytes=4096 if rank else 8192, channels=2)
        with pytest.raises(MismatchError):
            Communicator.from_store(
                store, rank, 2, options=options, device=DEVICE, heap_bytes=HEAP_BYTES
            )
        results.append(rank)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(results) == [0, 1]
    assert in_use(rig) == EMPTY_HEAP_BYTES


def test_a_rank_that_fails_after_all_have_met(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed rank's peers keep their regions until it says that it will not write there.

    The failed rank raises its own error, although its peers learn of the failure and raise first.
    """
    connect, fail = DeviceCore.connect, handles.Rendezvous.fail

    def fails(core: Any, *given: Any) -> None:
        if core.rank == 1:
            raise MemoryError("no more")
        connect(core, *given)

    def tells(spec: Any, error: BaseException) -> None:
        fail(spec, error)
        if isinstance(error, MemoryError):
            until_rank_threads_have_ended(0, 2)

    monkeypatch.setattr(DeviceCore, "connect", fails)
    monkeypatch.setattr(handles.Rendezvous, "fail", tells)
    with pytest.raises(MemoryError, match="no more"):
        rig.world(3)
    gc.collect()
    assert in_use(rig) == EMPTY_HEAP_BYTES


def test_regions_of_a_closed_heap_are_forgotten(emulated: Rigs) -> None:
    """Asking whether peers have left would read the closed heap's memory."""
    rig = emulated()
    allocation = device_heap(0, HEAP_BYTES).allocate(EMPTY_HEAP_BYTES, "test")
    rig.runtime.write(0, allocation.ptr, bytes(4))
    presence = lifecycle.begin_presence()
    lifecycle.retire(allocation, [allocation.ptr], [lifecycle.Peer(None, presence)])
    del allocation
    assert in_use(rig) == 2 * EMPTY_HEAP_BYTES
    close_heaps()
    assert rig.world(2).run(lambda comm: sum_up(rig, comm)) == [2.0, 2.0]


PENDING = """
import sys
sys.path[:0] = {paths!r}
from tests.proof.faults.device.rig import Rig
rig = Rig("emulated")
world = rig.world(2, timeout=600)
tensor = rig.full(10, 0.0)
work = world[0].irecv(tensor, 1)
"""
FORGOTTEN = (
    PENDING
    + """
rig.forget()
del world, work
"""
)


@pytest.mark.parametrize("script", [PENDING, FORGOTTEN], ids=["pending", "forgotten"])
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_interpreter_ends_while_a_work_is_pending(script: str) -> None:
    text = script.format(paths=[str(ROOT), *filter(None, sys.path)])
    run = [sys.executable, "-W", "ignore", "-c", text]
    done = subprocess.run(run, capture_output=True, check=False, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
