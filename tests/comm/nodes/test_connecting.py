# SPDX-License-Identifier: Apache-2.0
"""If a rank cannot connect, all ranks get an error of ringcomm at once."""

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from ringcomm import CommOptions, Communicator, RingcommError
from ringcomm.comm.host.rendezvous import NodeLayout
from ringcomm.comm.nodes import engine
from ringcomm.comm.nodes import transport as connecting
from ringcomm.comm.nodes.steps import StepsCore
from ringcomm.comm.nodes.transport import gloo, told_by
from ringcomm.errors import PeerLost, RendezvousError

NODES = (0, 0, 1)
LONG_S, PATIENCE_S = 600.0, 60.0


def without_a_card(store: Any, number: int, size: int, timeout: Any) -> Any:
    """A transport that works on the first node only."""
    if number == 1:
        raise ValueError("there is no card")
    return gloo(store, number, size, timeout)


def test_a_transport_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "CONNECT_S", 3.0)
    # Each rank has its own connection to the store, because Gloo's wait occupies it.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    stores += [TCPStore("127.0.0.1", stores[0].port, is_master=False) for _ in NODES[1:]]
    errors = [""] * len(NODES)

    def build(rank: int) -> None:
        options = CommOptions(timeout=LONG_S, transport=without_a_card)
        with pytest.raises(RingcommError) as raised:
            Communicator.from_store(
                stores[rank], rank, len(NODES), options=options, node_id=f"node{NODES[rank]}"
            )
        errors[rank] = str(raised.value)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(len(NODES))]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # No thread may still wait in Gloo, since Python could not end it.
    for thread in threading.enumerate():
        if thread.name == "ringcomm-connect":
            thread.join()
    assert time.monotonic() - begin < connecting.CONNECT_S
    for rank, text in enumerate(errors):
        assert text.startswith(f"rendezvous of communicator 'world' on rank {rank} of 3: ")
        assert (
            "rank 2 (node 1) called the function without_a_card of CommOptions(transport=)" in text
        )
        assert "it raised ValueError: there is no card" in text


@pytest.mark.parametrize("error", [PeerLost("rank 2 is lost"), ValueError("no memory")], ids=repr)
def test_a_rank_that_fails_after_another_has_built(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, built, told = HashStore(), threading.Event(), threading.Event()

    def make_core(inner: Any, layout: NodeLayout, *arguments: Any) -> StepsCore:
        if layout.rank == 1:
            assert built.wait(PATIENCE_S)
            raise error
        return StepsCore(inner, layout, *arguments)

    def fail() -> None:
        with pytest.raises(type(error)):
            Communicator.from_store(store, 1, 2, timeout=LONG_S, node_id="node1")
        told.wait(PATIENCE_S)  # its connections stay open meanwhile

    monkeypatch.setattr(engine, "StepsCore", make_core)
    other = threading.Thread(target=fail)
    other.start()
    with Communicator.from_store(store, 0, 2, timeout=LONG_S, node_id="node0") as comm:
        built.set()
        kind = type(error) if isinstance(error, RingcommError) else RendezvousError
        with pytest.raises(kind, match=f"barrier on rank 0 of 2, node 0: .*{error}"):
            comm.barrier()
    told.set()
    other.join()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "[enforce fail at /__w/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] "
            "ifa != nullptr. Unable to find address for: eth7\nframe #0",
            "ifa != nullptr. Unable to find address for: eth7",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            "[10.77.0.2]:7",
            "Connection closed by peer [10.77.0.2]:7",
        ),
        ("wait timeout after 6000ms, keys: /a\x1b[31m", "wait timeout after 6000ms, keys: /a?[31m"),
        ("", ""),
    ],
)
def test_what_a_transport_says(said: str, told: str) -> None:
    assert told_by(RuntimeError(said)) == told
