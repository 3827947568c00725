"""All ranks are stopped for longer than their timeout, as when a laptop is suspended.

Nobody is blamed: each goes on where it was. A rank that is stopped alone is blamed as ever
(tests/comm/test_faults.py).
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

import ringcomm
from ringcomm import Communicator
from ringcomm.deadlines import LONGEST_LOOK_S, Deadline
from ringcomm.errors import CollectiveTimeout, RendezvousError
from tests.support.faults import until_stopped
from tests.support.ranks import Outcome, Ranks, join_nodes

pytestmark = pytest.mark.deadlines

WORLD = 2
TIMEOUT_S, STOPPED_S = 2.0, 3.0

# What rank 0 waits in for rank 1, and what rank 1 then does.
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


def _rank(store: Any, rank: int, world: int, wait: str, nodes: bool, corrects: bool = True) -> None:
    if not corrects:
        Deadline.__init__.__defaults__ = (math.inf,)
    places = [[0], [1]] if nodes else [[0, 1]]
    comm: Communicator = join_nodes(store, rank, world, places, timeout=TIMEOUT_S)
    comm.barrier()
    store.set(f"there{rank}", str(os.getpid()))
    if rank == 1:
        store.wait(["go"])
    WAITS[wait][rank](comm)
    store.set(f"over{rank}", "")
    store.wait(["over0", "over1"])


def _suspended(*arguments: Any) -> list[Outcome]:
    """Suspends both ranks while rank 0 waits for rank 1; returns how they ended."""
    with Ranks(_rank, WORLD, *arguments) as ranks:
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
        return ranks.wait(ranks=[0])


@pytest.mark.parametrize("nodes", [False, True], ids=["one node", "two nodes"])
@pytest.mark.parametrize("wait", WAITS)
def test_nobody_is_blamed(wait: str, nodes: bool) -> None:
    (outcome,) = _suspended(wait, nodes)
    assert outcome.ok, outcome.describe()


@pytest.mark.parametrize(("wait", "nodes"), [("new_group", False), ("all_reduce", True)])
def test_a_clock_that_counts_the_suspension_blames_a_peer(wait: str, nodes: bool) -> None:
    """The negative control: these waits have Python's deadlines, and not those of signal.h."""
    (outcome,) = _suspended(wait, nodes, False)
    assert isinstance(outcome.error, CollectiveTimeout | RendezvousError), outcome.describe()


# What else reads the clock, by file below ringcomm/.
CLOCKS = {
    "comm/device/core.py": "grace for a reason that is about to be written",
    "comm/device/lifecycle.py": "grace for kernels while the process ends",
    "comm/nodes/watch.py": "how often the store is asked; grace for a claim about to be made",
    "comm/recorder/reader.py": "how long an error waits for its trace",
    "cuda/kernel_cache.py": "how long a compiled kernel is awaited before it is compiled here",
    "deadlines.py": "the deadlines themselves",
    "launch.py": "grace for ranks that are told to end",
    "output.py": "how often a progress bar is drawn",
    "rendezvous/handles.py": "grace of rank 0 for peers that read why it ends",
    "rendezvous/lookout.py": "how often processes are looked at; grace for one about to end",
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
