"""What a carrier cannot do is told on all ranks, at once and in the words of ringcomm."""

import threading
import time
from typing import Any

import pytest
from torch.distributed import TCPStore

from ringcomm import CommOptions, Communicator, RingcommError
from ringcomm.comm.nodes import connecting
from ringcomm.comm.nodes.connecting import gloo, told_by

NODES = (0, 0, 1)
LONG_S = 600.0


def without_a_card(store: Any, number: int, size: int, timeout: Any) -> Any:
    """A carrier that works on the first node only."""
    if number == 1:
        raise ValueError("there is no card")
    return gloo(store, number, size, timeout)


def test_a_carrier_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "CONNECT_S", 3.0)
    # Each rank with a connection of its own, which Gloo's wait holds.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    stores += [TCPStore("127.0.0.1", stores[0].port, is_master=False) for _ in NODES[1:]]
    errors = [""] * len(NODES)

    def build(rank: int) -> None:
        options = CommOptions(timeout=LONG_S, carrier=without_a_card)
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
    # Nothing waits on in Gloo, which Python could not end.
    for thread in threading.enumerate():
        if thread.name == "ringcomm-connect":
            thread.join()
    assert time.monotonic() - begin < connecting.CONNECT_S
    for rank, text in enumerate(errors):
        assert text.startswith(f"rendezvous of communicator 'world' on rank {rank} of 3: ")
        assert "rank 2 (node 1) called the function without_a_card of CommOptions(carrier=)" in text
        assert "it raised ValueError: there is no card" in text


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
def test_what_a_carrier_says(said: str, told: str) -> None:
    assert told_by(RuntimeError(said)) == told
