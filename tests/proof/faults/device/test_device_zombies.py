"""A peer of another process that has ended, and that nobody has asked how."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from torch.distributed import FileStore

from ringcomm import PeerLost
from tests.proof.faults.device.places import LONG_S, Place, first_error, until
from tests.proof.faults.device.test_device_processes import EMPTY_HEAP_BYTES, is_given_back
from tests.support.faults import die
from tests.support.ranks import Ranks

pytestmark = pytest.mark.deadlines


def loses_a_zombie(store: FileStore, rank: int, n: int, kind: str) -> tuple[type, int]:
    pid = os.fork()
    place = Place(kind)
    comm = place.connect(store, int(pid == 0), 2)
    comm.barrier()
    place.synchronize()
    if pid == 0:
        die()
    error: Any = first_error(place, comm, comm.barrier)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    kind_of_error = type(error)
    comm.close()
    until(partial(is_given_back, place))
    used = place.used_bytes()
    os.waitpid(pid, 0)
    return kind_of_error, used


def test_a_zombie_keeps_no_memory(kind: str) -> None:
    with Ranks(loses_a_zombie, 1, kind) as ranks:
        outcome = ranks.wait(LONG_S)[0]
    assert outcome.ok, outcome.describe()
    assert outcome.value == (PeerLost, EMPTY_HEAP_BYTES)
