# SPDX-License-Identifier: Apache-2.0
"""Every rank of a failed rendezvous reports the cause, not the store that ends with rank 0."""

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from ringcomm import CommOptions, Communicator, RendezvousError, RingcommError
from ringcomm.rendezvous import handles
from ringcomm.rendezvous.launchers import LaunchedRank

pytestmark = pytest.mark.deadlines

LOOPBACK = "127.0.0.1"
LONG_S = 60.0


def errors_of(build: Callable[[int], Any], ranks: int) -> list[str]:
    """Returns each rank's error as text; ranks are threads."""
    errors = [""] * ranks

    def body(number: int) -> None:
        try:
            build(number)
        except RingcommError as error:
            errors[number] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=body, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(errors)
    return errors


class Slow:
    """A store with delayed answers, as for a rank that is later than the others."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def check(self, keys: list[str]) -> bool:
        time.sleep(0.1)
        found: bool = self._inner.check(keys)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def different_options(ranks: int) -> list[str]:
    """Rank 0 serves the store, has other options than the rest, and ends the store at its end.

    Rank 0 starts last, because it does not wait for absent ranks. Each other rank counts its
    arrival and posts its handle before.
    """
    server = TCPStore(LOOPBACK, 0, ranks, True, wait_for_workers=False)
    stores: list[TCPStore | None] = [server]
    port = server.port
    del server
    for _ in range(1, ranks):
        stores.append(TCPStore(LOOPBACK, port, ranks, False, timedelta(seconds=LONG_S)))

    def build(rank: int) -> None:
        store: Any = stores[rank] if rank < ranks - 1 else Slow(stores[rank])
        compression = "param" if rank == 0 else "none"
        while rank == 0 and store.num_keys() < 2 * (ranks - 1):
            time.sleep(0.01)
        try:
            Communicator.from_store(
                store, rank, ranks, options=CommOptions(timeout=LONG_S, compression=compression)
            )
        finally:
            if rank == 0:
                del store
                stores[0] = None

    return errors_of(build, ranks)


def test_every_rank_says_that_options_differ() -> None:
    for text in different_options(3):
        assert "the ranks were given different options" in text
        assert "compression=param" in text and "compression=none" in text
        assert text.count("rendezvous of communicator") == 1


def test_a_store_that_ends_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "LINGER_S", 0.0)
    assert any("does not answer any more" in text for text in different_options(3))


def test_rank_0_waits_for_nobody_who_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "LINGER_S", LONG_S)
    begin = time.monotonic()
    with pytest.raises(RingcommError, match=r"waited 0\.2 s, .* for rank 1, which did not come"):
        Communicator.from_store(
            TCPStore(LOOPBACK, 0, 2, True, wait_for_workers=False), 0, 2, timeout=0.2
        )
    assert time.monotonic() - begin < LONG_S


def test_a_missing_rank_is_named_by_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(port))

    def build(rank: int) -> None:
        store = LaunchedRank("torchrun", rank, 3, 3, has_master=True).store(LONG_S)
        Communicator.from_store(store, rank, 3, timeout=0.5)

    for text in errors_of(build, 2):
        assert "waited 0.5 s, until its timeout ended, for rank 2, which did not come" in text


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(RingcommError, match=r"cannot serve a store.*a second process"):
            LaunchedRank("torchrun", 0, 2, 2, has_master=True).store(LONG_S)


def test_two_processes_of_one_rank() -> None:
    store = HashStore()

    def build(number: int) -> None:
        Communicator.from_store(store, min(number, 1), 3, timeout=0.5)

    texts = errors_of(build, 3)
    assert all("rank 2, which did not come" in text or "ranks 0, 2" in text for text in texts)
    for text in texts:
        assert "Rank 1 has come 2 times, and " in text
        assert "and rank 1 only" not in text
        assert "was rank 1 given to two processes" in text


@pytest.mark.parametrize("asked", ["add", "set", "check", "get"])
def test_whatever_a_lost_store_is_asked(asked: str) -> None:
    class Lost(HashStore):
        pass

    def fail(*_: object) -> None:
        raise RuntimeError("Connection reset by peer\nstack")

    setattr(Lost, asked, fail)
    with pytest.raises(RendezvousError, match="does not answer any more: Connection reset by pee"):
        Communicator.from_store(Lost(), 0, 1, timeout=5.0)
