"""A machine whose ranks are several nodes is warned of once, at the program's line."""

import threading
import warnings

import pytest
from torch.distributed import HashStore

from ringcomm import Communicator
from ringcomm.comm import meeting
from ringcomm.rendezvous.handles import machine_identity


def test_the_warning_names_the_programs_line(monkeypatch: pytest.MonkeyPatch) -> None:
    host, boot, namespace = machine_identity()

    def in_a_container() -> tuple[str, str, str]:
        return host, boot, f"{namespace} of {threading.current_thread().name}"

    monkeypatch.setattr(meeting, "machine_identity", in_a_container)
    monkeypatch.setattr(meeting, "_warned", set())
    store = HashStore()

    def build(rank: int) -> None:
        Communicator.from_store(store, rank, 2, timeout=60).close()

    threads = [threading.Thread(target=build, args=(rank,), name=f"rank {rank}") for rank in (0, 1)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (told,) = [each for each in seen if "different PID namespaces" in str(each.message)]
    assert told.filename == __file__
