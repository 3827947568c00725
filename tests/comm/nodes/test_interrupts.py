# SPDX-License-Identifier: Apache-2.0
"""A Ctrl-C ends the waits of all ranks over nodes, and no remaining thread aborts the process."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store

import ringcomm
from ringcomm import AbortedError, CommOptions
from ringcomm.comm.host import engine
from ringcomm.comm.nodes.transport import gloo
from tests.support.ranks import Ranks, join_nodes


def wait_in(what: str, comm: Any) -> None:
    if comm.rank == 3:
        time.sleep(600)
    if what == "recv":
        comm.recv(torch.ones(3), None if comm.rank == 2 else (comm.rank + 2) % 4)
    comm.all_reduce(torch.ones(100_000))


def interrupted(
    store: Store, rank: int, world_size: int, what: str, folder: Path
) -> tuple[str, list[str]]:
    """Waits for a Ctrl-C; returns how the wait ended, and the daemon threads left at exit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = join_nodes(store, rank, world_size, ((0, 1), (2, 3)), timeout=600)
    comm.barrier()
    threads = set(threading.enumerate()) - {threading.main_thread()}
    assert threads  # at least those that watch for faults
    ended = "KeyboardInterrupt"
    try:
        try:
            (folder / str(rank)).touch()
            wait_in(what, comm)
        except AbortedError as error:  # another rank's Ctrl-C came first
            ended = f"AbortedError: {error}"
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A rank that waited has aborted the communicator; rank 3 makes no call and may not have.
    assert comm.aborted or rank == 3
    store.add("ended", 1)
    deadline = time.monotonic() + 30
    while store.add("ended", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.close_all()  # as at exit
    return ended, [each.name for each in threading.enumerate() if each.daemon]


@pytest.mark.parametrize("what", ["recv", "all_reduce"])
def test_every_rank_ends(tmp_path, what):
    memory = set(os.listdir("/dev/shm"))
    with Ranks(interrupted, 4, what, tmp_path) as ranks:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        for rank in range(4):
            ranks.signal(rank, signal.SIGINT)
        outcomes = ranks.wait()
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        ended, threads = outcome.value
        assert ended == "KeyboardInterrupt" or "Ctrl-C" in ended
        assert threads == []
    assert set(os.listdir("/dev/shm")) <= memory


class Lingering:
    """A Gloo group or work whose long waits return some time after the message."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recv(self, *arguments: Any) -> Any:
        return Lingering(self._inner.recv(*arguments))

    def wait(self, timeout: timedelta) -> Any:
        try:
            return self._inner.wait(timeout)
        finally:
            time.sleep(0.2 if timeout > timedelta(minutes=1) else 0)


def lingering(*arguments: Any) -> Lingering:
    return Lingering(gloo(*arguments))


def test_close_waits_for_threads_that_wait_for_messages():
    def body(comm):
        work = comm.irecv(torch.ones(1), 1 - comm.rank)
        assert not work.is_completed()
        comm.barrier()
        comm.close()
        mine = f"ringcomm-messages-{1 - comm.rank}"
        return [each.name for each in threading.enumerate() if each.name.startswith(mine)]

    options = CommOptions(timeout=60, transport=lingering)
    with ringcomm.local_world(2, nodes=[1, 1], options=options) as world:
        assert world.run(body) == [[], []]
