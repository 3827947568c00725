"""All ranks are stopped for longer than their timeout, as when a laptop is suspended.

Nobody is blamed: each goes on where it was. A rank that is stopped alone is blamed as ever
(tests/comm/test_faults.py).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from ringcomm import Communicator
from ringcomm.deadlines import LONGEST_LOOK_S, Deadline
from tests.support.faults import until_stopped
from tests.support.ranks import Ranks, join_nodes

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


def _rank(store: Any, rank: int, world: int, wait: str, nodes: bool) -> None:
    places = [[0], [1]] if nodes else [[0, 1]]
    comm: Communicator = join_nodes(store, rank, world, places, timeout=TIMEOUT_S)
    comm.barrier()
    store.set(f"there{rank}", str(os.getpid()))
    if rank == 1:
        store.wait(["go"])
    WAITS[wait][rank](comm)
    store.set(f"over{rank}", "")
    store.wait(["over0", "over1"])


@pytest.mark.parametrize("nodes", [False, True], ids=["one node", "two nodes"])
@pytest.mark.parametrize("wait", WAITS)
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
