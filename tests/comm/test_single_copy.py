# SPDX-License-Identifier: Apache-2.0
"""Ranks copy plain memory out of each other's processes: NOTE [Single copy] in endpoint.h."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ringcomm import (
    CollectiveTimeout,
    CommOptions,
    Communicator,
    PeerLost,
    RingcommError,
    UnsupportedError,
    _native,
)
from tests.support.ranks import Ranks, run_ranks
from tests.support.system_calls import LIBC, NUMBERS, forbid

pytestmark = pytest.mark.deadlines

# Bytes from which a chunk is shared by single copy, and from which an all-reduce's result is.
SHARED, REDUCED = 128 << 10, 8 << 20
TIMEOUT_S = 20.0
SECRET_CALL = 447  # memfd_secret


def forbid_reading(pid: int, error: int = errno.EPERM) -> None:
    """From now on the kernel refuses this process to read the memory of ``pid``."""
    forbid("process_vm_readv", error, first_argument=pid)


def _joined(store: Any, rank: int, world: int, single_copy: bool | None = True) -> Communicator:
    options = CommOptions(timeout=TIMEOUT_S, single_copy=single_copy)
    return Communicator.from_store(store, rank, world, options=options)


def _copies_once(comm: Communicator) -> bool:
    core: Any = comm.engine.core
    return core.single_copy


def _pids(store: Any, rank: int, world: int) -> list[int]:
    store.set(f"pid {rank}", str(os.getpid()))
    return [int(store.get(f"pid {peer}")) for peer in range(world)]


def _check_shared(comm: Communicator, count: int, make=torch.empty) -> None:
    """All-gathers of every form, a broadcast and an all-reduce of ``count`` elements per rank."""
    rank, world = comm.rank, comm.world_size
    # Periodic, since 64-bit remainders for all elements would take longer than the calls.
    period = ((torch.arange(251) * 31 + 5) % 251).to(torch.float32)
    expected = period.repeat(world * count // 251 + 1)[: world * count]
    chunks = list(expected.split(count)) if count else [expected] * world
    mine, out = make(count), make(world * count)
    mine.copy_(chunks[rank])
    comm.all_gather_into_tensor(out, mine)
    assert torch.equal(out, expected)
    out.zero_()
    own = out[rank * count : (rank + 1) * count]
    own.copy_(mine)
    comm.all_gather_into_tensor(out, own)
    assert torch.equal(out, expected)
    # Uneven parts: rank r shares all except its first r elements.
    parts = [make(max(count - peer, 0)) for peer in range(world)]
    comm.all_gather(parts, mine[min(rank, count) :])
    for peer, part in enumerate(parts):
        assert torch.equal(part, chunks[peer][min(peer, count) :])
    comm.broadcast(mine, world - 1)
    assert torch.equal(mine, chunks[-1])
    out.copy_(expected)
    comm.all_reduce(out)
    assert torch.equal(out, expected * world)


SIZES = (0, 1, SHARED // 4 - 1, SHARED // 4, SHARED // 4 + 1, 300_007, REDUCED // 4)


def _every_form(store, rank, world):
    with _joined(store, rank, world) as comm:
        assert _copies_once(comm) == (world == 2)
        for count in SIZES if world == 2 else SIZES[:6]:
            _check_shared(comm, count)


@pytest.mark.parametrize("world", [2, 3])
def test_every_form_at_every_threshold(world):
    """Three ranks always stage, even if single copy is requested."""
    run_ranks(_every_form, world)


def _one_does_not_want_it(store, rank, world):
    with _joined(store, rank, world, single_copy=rank != 1) as comm:
        assert not _copies_once(comm)
        _check_shared(comm, SHARED)


def test_all_ranks_must_want_it():
    run_ranks(_one_does_not_want_it, 2)


# The forms of a gain: (with all ranks sharing data, with one rank sharing data).
GAINS = [(True, True), (True, False), (False, True), (False, False)]


needs_filter = pytest.mark.skipif(not NUMBERS, reason="the number of the call is not known here")


def _calls_that_lend(store, rank, world, gain):
    """Returns the calls that fail once rank 1 is forbidden to read rank 0, which has ``gain``."""
    pids = _pids(store, rank, world)
    plain = torch.zeros(world * REDUCED // 4)
    part = plain[: SHARED // 4]
    calls: dict[str, Any] = {
        "all_gather": lambda comm: comm.all_gather([part.clone() for _ in range(world)], part),
        "broadcast from 0": lambda comm: comm.broadcast(part, 0),
        "broadcast from 1": lambda comm: comm.broadcast(part, 1),
        "all_reduce": lambda comm: comm.all_reduce(plain),
    }
    # A failed call ends its communicator, so each call has its own.
    own_gain = gain if rank == 0 else (False, False)
    with mock.patch.object(_native, "single_copy_gain", return_value=own_gain):
        comms = {name: _joined(store, rank, world, single_copy=None) for name in calls}
    assert all(map(_copies_once, comms.values()))
    if rank == 1:
        forbid_reading(pids[0])
    failed = []
    for name, call in calls.items():
        try:
            call(comms[name])
        except UnsupportedError:
            failed.append(name)
    return failed


@needs_filter
@pytest.mark.parametrize(
    ("gain", "calls"),
    [
        ((False, False), []),
        ((False, True), ["broadcast from 0"]),
        ((True, False), ["all_gather", "all_reduce"]),
        ((True, True), ["all_gather", "broadcast from 0", "all_reduce"]),
    ],
)
def test_a_rank_lends_in_calls_in_which_it_measured_a_gain(gain, calls):
    """Only the first rank measured a gain, so the second stages its data."""
    assert run_ranks(_calls_that_lend, 2, gain) == [calls, calls]


def test_the_measurement_is_made_once():
    first = _native.single_copy_gain()
    assert all(type(each) is bool for each in first) and len(first) == 2
    assert _native.single_copy_gain() == first


def _cannot_read_itself(store, rank, world):
    forbid_reading(os.getpid())
    return _native.single_copy_gain()


@needs_filter
def test_a_process_that_cannot_read_itself_stages():
    assert run_ranks(_cannot_read_itself, 1) == [(False, False)]


def _refused_from_the_start(store, rank, world):
    pids = _pids(store, rank, world)
    if rank == 0:
        forbid_reading(pids[1])
    with _joined(store, rank, world) as comm:
        assert not _copies_once(comm)
        _check_shared(comm, SHARED)


@needs_filter
def test_it_is_left_out_where_the_kernel_refuses_one_rank():
    run_ranks(_refused_from_the_start, 2)


def _refused_of_itself(store, rank, world):
    pids = _pids(store, rank, world)
    with _joined(store, rank, world) as comm:
        # Memory that the kernel cannot read is staged, so no rank reads another process.
        forbid_reading(pids[1])
        _check_shared(comm, SHARED)


@needs_filter
def test_memory_that_the_kernel_cannot_read_is_staged():
    """Rank 1 notices that its memory cannot be read; rank 0 is forbidden to read it."""
    run_ranks(_refused_of_itself, 2)


def _secret(count: int) -> torch.Tensor:
    descriptor = LIBC.syscall(SECRET_CALL, 0)
    os.ftruncate(descriptor, max(4 * count, 1))
    memory = mmap.mmap(descriptor, max(4 * count, 1))
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.float32, count=count) if count else torch.empty(0)


def _in_secret_memory(store, rank, world):
    with _joined(store, rank, world) as comm:
        assert _copies_once(comm)
        _check_shared(comm, SHARED, torch.empty if rank == 0 else _secret)


def test_secret_memory_is_staged():
    descriptor = LIBC.syscall(SECRET_CALL, 0)
    if descriptor < 0:
        pytest.skip(f"memfd_secret: {os.strerror(ctypes.get_errno())}")
    os.close(descriptor)
    run_ranks(_in_secret_memory, 2)


def _outcome(
    comm: Communicator, count: int = SHARED, *, freed: bool = False
) -> RingcommError | None:
    mine, out = torch.full((count,), float(comm.rank)), torch.empty(comm.world_size * count)
    try:
        comm.all_gather_into_tensor(out, mine)
    except RingcommError as error:
        mine.fill_(-1)
        if freed:
            mine.untyped_storage().resize_(0)
        return error
    assert torch.equal(out.view(-1, count)[:, 0], torch.arange(float(comm.world_size)))
    return None


def _refused_later(store, rank, world):
    pids = _pids(store, rank, world)
    with _joined(store, rank, world) as comm:
        assert _outcome(comm) is None
        if rank == 0:
            forbid_reading(pids[1])
        comm.barrier()
        return _outcome(comm)


@needs_filter
def test_a_refusal_in_a_call_fails_it_on_all_ranks():
    """Also shows that single copy was used: only this path makes the refused system call."""
    for error in run_ranks(_refused_later, 2):
        assert type(error) is UnsupportedError
        assert "the operating system refuses it" in str(error)


def _until_ended(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # gone before open() or before read()
            return
        if state in "ZX":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} did not end")


def _dies_as_it_lends(store, rank, world):
    pids = _pids(store, rank, world)
    comm = _joined(store, rank, world)
    comm.barrier()
    if rank == 1:
        # It has published, and waits until rank 0 has read.
        threading.Timer(0.3, os._exit, (0,)).start()
        _outcome(comm)
        return None
    _until_ended(pids[1])
    error = _outcome(comm)
    comm.close()
    return error


def test_a_lender_that_has_ended_is_lost():
    with Ranks(_dies_as_it_lends, 2) as ranks:
        reader = ranks.wait()[0]
    assert reader.ok, reader.describe()
    assert type(reader.value) is PeerLost


def _dies_without_memory(store, rank, world):
    pids = _pids(store, rank, world)
    comm = _joined(store, rank, world)
    comm.barrier()
    if rank == 1:
        # For rank 0, this process seems to have no memory any more, but it lives a little longer.
        threading.Timer(0.3, os._exit, (0,)).start()
        _outcome(comm)
        return None
    forbid_reading(pids[1], errno.ESRCH)
    error = _outcome(comm)
    comm.close()
    return error


@needs_filter
def test_a_lender_whose_memory_has_gone_is_lost_once_it_has_ended():
    """After being killed, a process of 1 GiB has no memory but has not ended, for up to 57 ms."""
    with Ranks(_dies_without_memory, 2) as ranks:
        reader = ranks.wait()[0]
    assert reader.ok, reader.describe()
    assert type(reader.value) is PeerLost


def _gives_up(store, rank, world, freed):
    with _joined(store, rank, world) as comm:
        comm.barrier()
        if rank == 0:
            store.get("given up")
            return _outcome(comm, 64 * SHARED)
        comm.timeout = 0.3
        # Large enough to have a mapping of its own, which is unmapped when it is freed.
        error = _outcome(comm, 64 * SHARED, freed=freed)
        store.set("given up", "")
        return error


@pytest.mark.parametrize("freed", [False, True])
def test_what_a_lender_took_back_is_not_taken_for_data(freed):
    """Rank 1 has changed or freed its tensor before rank 0 reads it."""
    first, second = run_ranks(_gives_up, 2, freed)
    assert type(second) is CollectiveTimeout
    assert isinstance(first, RingcommError)
