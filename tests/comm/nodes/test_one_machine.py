# SPDX-License-Identifier: Apache-2.0
"""If the ranks of one machine form several nodes, one warning says so, at the program's line."""

import threading
import warnings

import pytest
from torch.distributed import HashStore

from ringcomm import Communicator
from ringcomm.comm.host import rendezvous
from ringcomm.rendezvous.handles import machine_identity


def test_the_warning_names_the_programs_line(monkeypatch: pytest.MonkeyPatch) -> None:
    host, boot, namespace = machine_identity()

    def in_a_container() -> tuple[str, str, str]:
        return host, boot, f"{namespace} of {threading.current_thread().name}"

    monkeypatch.setattr(rendezvous, "machine_identity", in_a_container)
    monkeypatch.setattr(rendezvous, "_warned", set())
    (told,) = _told_at_the_rendezvous(None)
    assert "different PID namespaces" in str(told.message)
    assert told.filename == __file__


def test_an_id_of_some_ranks_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_warned", set())
    (told,) = _told_at_the_rendezvous("first")
    assert "of the two only rank 0 has RINGCOMM_NODE_ID" in str(told.message)


def _told_at_the_rendezvous(id_of_first: str | None) -> list[warnings.WarningMessage]:
    store = HashStore()

    def build(rank: int) -> None:
        node_id = id_of_first if rank == 0 else None
        Communicator.from_store(store, rank, 2, timeout=60, node_id=node_id).close()

    threads = [threading.Thread(target=build, args=(rank,), name=f"rank {rank}") for rank in (0, 1)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [each for each in seen if "run on one machine" in str(each.message)]
