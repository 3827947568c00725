# SPDX-License-Identifier: Apache-2.0
"""If several ranks fail, the caller of a local world gets the error that caused the others.

Peers notice an error before the failing thread has ended, so any error may be recorded first.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import ringcomm
from ringcomm import CollectiveTimeout, Communicator, HeapError, RendezvousError, RingcommError
from ringcomm.comm.host import rendezvous
from ringcomm.rendezvous.handles import Rendezvous
from tests.support.faults import until_rank_threads_have_ended

LONG_S = 60.0


def test_a_rank_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    make_core, fail = rendezvous._make_core, Rendezvous.fail

    def makes(heap: Any, membership: Any) -> Any:
        if membership.rank == 1:
            raise MemoryError("no more")
        return make_core(heap, membership)

    def tells(exchange: Rendezvous, error: BaseException) -> None:
        fail(exchange, error)
        if isinstance(error, MemoryError):
            until_rank_threads_have_ended(0, 2)

    monkeypatch.setattr(rendezvous, "_make_core", makes)
    monkeypatch.setattr(Rendezvous, "fail", tells)
    with pytest.raises(MemoryError, match="no more"):
        ringcomm.local_world(3, timeout=LONG_S)


def test_a_fault_that_all_ranks_report() -> None:
    """All errors are of one class; only the rank where the fault began names its own call."""

    def body(comm: Any) -> None:
        if comm.rank == 2:
            until_rank_threads_have_ended(0, 1)
            return
        if comm.rank == 1:
            comm.timeout = 0.2
        try:
            comm.all_reduce(torch.ones(1000))
        finally:
            if comm.rank == 1:
                until_rank_threads_have_ended(0)

    world = ringcomm.local_world(3, timeout=LONG_S)
    with pytest.raises(CollectiveTimeout, match=r"^all_reduce on rank 1 of 3: rank 1 in"):
        world.run(body)
    world.close()


def test_an_error_of_another_process_is_better_than_none() -> None:
    """The original error is in another process, so this process raises the peer's report of it."""
    store = HashStore()
    store.set("ringcomm/world/attempt0/1/heap/1", json.dumps({"version": 1, "error": "no room"}))
    with pytest.raises(RendezvousError, match="rank 1 failed: no room") as raised:
        Communicator.from_store(store, 0, 2, timeout=LONG_S)
    assert raised.value.repeats
    assert not RingcommError().repeats and not HeapError().repeats
