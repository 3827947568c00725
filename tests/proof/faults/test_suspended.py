# SPDX-License-Identifier: Apache-2.0
"""All ranks are stopped for longer than their timeout, as when a laptop is suspended.

No rank is blamed, and each continues its call. A rank that alone is stopped is still blamed
(tests/comm/test_faults.py).
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

import ringcomm
from ringcomm import Communicator
from ringcomm.c10d.process_group import MonitoredBarrier
from ringcomm.comm.host import engine
from ringcomm.comm.host.engine import Work
from ringcomm.errors import CollectiveTimeout, PeerLost, RendezvousError
from ringcomm.process import LONGEST_LOOK_S, Deadline
from ringcomm.rendezvous import same_node
from ringcomm.rendezvous.same_node import Lookout
from tests.support.covering import covering
from tests.support.faults import until_stopped
from tests.support.ranks import Ranks, join_nodes

pytestmark = pytest.mark.deadlines

WORLD = 2
TIMEOUT_S, STOPPED_S = 2.0, 3.0
# For the clock that the test advances.
STEP_S, SUSPENDED_AT, HOUR_S = 0.02, 20, 3600.0

# The call in which rank 0 waits for rank 1, and rank 1's later call.
WAITS: dict[str, Any] = {
    "all_reduce": (lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(4))),
    "async": (
        lambda c: c.all_reduce(torch.ones(4), async_op=True).wait(),
        lambda c: c.all_reduce(torch.ones(4)),
    ),
    "recv": (lambda c: c.recv(torch.ones(4), 1), lambda c: c.send(torch.ones(4), 0)),
    "send": (
        lambda c: c.send(torch.ones(2_000_000), 1),
        lambda c: c.recv(torch.ones(2_000_000), 0),
    ),
    "new_group": (lambda c: c.new_group([0, 1]), lambda c: c.new_group([0, 1])),
}


def _rank(store: Any, rank: int, world: int, wait: str, nodes: bool) -> None:
    divided = [[0], [1]] if nodes else [[0, 1]]
    comm: Communicator = join_nodes(store, rank, world, divided, timeout=TIMEOUT_S)
    comm.barrier()
    store.set(f"there{rank}", str(os.getpid()))
    if rank == 1:
        store.wait(["go"])
    WAITS[wait][rank](comm)
    store.set(f"over{rank}", "")
    store.wait(["over0", "over1"])


@covering(strength=1, wait=tuple(WAITS), nodes={"one node": False, "two nodes": True})
def test_nobody_is_blamed(wait: str, nodes: bool) -> None:
    with Ranks(_rank, WORLD, wait, nodes) as ranks:
        store = FileStore(ranks.store_path, WORLD)
        store.wait(["there0", "there1"])
        time.sleep(0.2)  # rank 0 waits
        for rank in range(WORLD):
            ranks.signal(rank, signal.SIGSTOP)
        for pid in ranks.pids:
            until_stopped(pid)
        time.sleep(STOPPED_S)
        for rank in range(WORLD):
            ranks.signal(rank, signal.SIGCONT)
        store.set("go", "")
        outcomes = ranks.wait()
    assert all(each.ok for each in outcomes), "\n".join(each.describe() for each in outcomes)


class SteppedClock:
    """A clock that advances at each reading by this thread, and once by an hour.

    Attributes:
        looks: readings by this thread.
    """

    def __init__(self) -> None:
        self.looks = 0
        self._now_s = 100.0
        self._thread = threading.get_ident()

    def __call__(self) -> float:
        if threading.get_ident() == self._thread:
            self.looks += 1
            self._now_s += HOUR_S if self.looks == SUSPENDED_AT else STEP_S
        return self._now_s


def _rendezvous() -> None:
    Communicator.from_store(HashStore(), 0, WORLD, timeout=TIMEOUT_S)


def _monitored_barrier(rank: int) -> None:
    barrier = MonitoredBarrier(HashStore(), rank, WORLD, Lookout((0, 1), {}))
    barrier(timedelta(seconds=TIMEOUT_S), False)


def _work() -> None:
    Work("call", lambda: None, lambda: False).wait(TIMEOUT_S)


def _port_of_rank_0() -> None:
    sockets = same_node.LaunchSockets.of(f"suspended {os.getpid()}", 0, "rendezvous")
    same_node.ask_port(sockets, Deadline(TIMEOUT_S))


WAITS_ALONE: dict[str, Callable[[], None]] = {
    "rendezvous": _rendezvous,
    "monitored_barrier on rank 0": partial(_monitored_barrier, 0),
    "monitored_barrier on rank 1": partial(_monitored_barrier, 1),
    "work": _work,
    "port of rank 0": _port_of_rank_0,
}


@pytest.mark.parametrize("corrects", [True, False], ids=["corrected", "counted"])
@pytest.mark.parametrize("wait", WAITS_ALONE)
def test_a_suspension_does_not_count(
    wait: str, corrects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits until the timeout. "counted" is the negative control: the suspension ends its wait."""
    if not corrects:
        monkeypatch.setattr(Deadline.__init__, "__defaults__", (math.inf,))
    clock = SteppedClock()
    monkeypatch.setattr(engine, "LOOK_S", 0.001)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(time, "monotonic", clock)
    with pytest.raises((CollectiveTimeout, RendezvousError, PeerLost)):
        WAITS_ALONE[wait]()
    monkeypatch.undo()
    # A few readings are not part of the wait.
    whole = TIMEOUT_S / STEP_S
    assert clock.looks > whole if corrects else clock.looks < whole / 2


# Other readers of the clock, by file below ringcomm/, and their purposes.
CLOCKS = {
    "comm/device/core.py": "grace for a reason that is about to be written",
    "comm/device/lifecycle.py": "grace for kernels while the process ends",
    "comm/nodes/watch.py": "how often the store is asked; grace for a cause about to be posted",
    "comm/recorder/reader.py": "how long an error waits for its trace",
    "cuda/build.py": "how long a compiled kernel is awaited before it is compiled here",
    "launch.py": "grace for ranks that are told to end",
    "process.py": "the deadlines themselves",
    "rendezvous/handles.py": "grace of rank 0 for peers that read why it ends",
    "rendezvous/same_node.py": "how often processes are looked at; grace for one about to end",
}


def test_all_waits_for_peers_have_such_deadlines() -> None:
    package = Path(ringcomm.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\btime\.monotonic\(|\bmonotonic_ns\(", path.read_text())
    }
    assert found == CLOCKS.keys()


def test_a_deadline_moves_on_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    deadline = Deadline(10.0)
    for _ in range(90):
        now_s += 0.1
        assert not deadline.is_over()
    now_s += 3600.0  # suspended
    assert deadline.waited_s() == pytest.approx(9.0)
    for _ in range(9):
        now_s += 0.1
        assert not deadline.is_over()
    now_s += LONGEST_LOOK_S
    assert deadline.is_over() and deadline.left_s() == 0.0
