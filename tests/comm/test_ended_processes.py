# SPDX-License-Identifier: Apache-2.0
"""Peers that have ended but were not waited for, and other processes that get their ids."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import Communicator, PeerLost, _native
from tests.support import ROOT, lab
from tests.support.faults import die
from tests.support.fork_server import Namespaces
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deadlines

LONG_S = 60.0
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def forked(body: Callable[[], object]) -> int:
    """Forks a child that runs ``body`` and ends; only the test itself waits for it."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


def until_ended(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _loses_a_zombie(store: Any, rank: int, world: int) -> list[int]:
    def other() -> None:
        comm = Communicator.from_store(store, 1, 2, timeout=LONG_S)
        comm.barrier()
        die()

    pid = forked(other)
    used = []
    comm = Communicator.from_store(store, 0, 2, timeout=LONG_S)
    comm.barrier()
    used.append(ringcomm.heap_stats()["used_bytes"])
    try:
        comm.all_reduce(torch.ones(10))
    except PeerLost:
        comm.close()
    until_ended(pid)
    Communicator.from_store(store, 0, 1, name="alone").close()
    used.append(ringcomm.heap_stats()["used_bytes"])
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state == "Z"
    os.waitpid(pid, 0)
    return used


def test_a_zombie_keeps_no_memory():
    before, after = run_ranks(_loses_a_zombie, 1)[0]
    assert after < before / 100


@pytest.mark.parametrize("descriptor", [True, False])
def test_a_zombie_has_ended(descriptor):
    pid = forked(lambda: time.sleep(0.2))
    process = _native.Process(pid, with_descriptor=descriptor)
    assert not process.has_ended()
    until_ended(pid)
    assert process.has_ended()
    os.waitpid(pid, 0)
    assert process.has_ended()


def _again(pid: int) -> int:
    """Starts a process that gets the id of an earlier process; it lives until it is killed."""
    for _ in range(200):
        LAST_PID.write_text(str(pid - 1))
        found = forked(lambda: time.sleep(LONG_S))
        if found == pid:
            return found
        os.kill(found, 9)
        os.waitpid(found, 0)
    raise AssertionError("other processes took the pid")


def _tells_who_got_a_pid(with_descriptor: bool) -> None:
    # Processes are distinguished by their start times, in the system's clock ticks.
    pid = forked(lambda: time.sleep(0.2))
    process = _native.Process(pid, with_descriptor=with_descriptor)
    assert not process.has_ended()
    os.waitpid(pid, 0)
    found = _again(pid)
    assert process.has_ended()
    assert not _native.Process(found, with_descriptor=with_descriptor).has_ended()


def tell_who_got_a_pid() -> None:
    """The checks of the test below, in a process namespace of their own."""
    lab.own_proc()
    for with_descriptor in (True, False):
        _tells_who_got_a_pid(with_descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="pids can be chosen by root only")
def test_who_gets_the_pid_of_a_process_is_another():
    # In the tests' own namespace another test might send a signal to a reused id.
    program = f"from {__name__} import tell_who_got_a_pid; tell_who_got_a_pid()"
    try:
        process = lab.NodePopen(
            Namespaces(lab.PROCESS_KINDS),
            [sys.executable, "-c", program],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        pytest.skip(f"the kernel refuses: {error}")
    _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
