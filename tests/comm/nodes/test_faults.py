# SPDX-License-Identifier: Apache-2.0
"""Faults over nodes: every rank on every node gets an error that names the failing rank and node.

The nodes are network namespaces (tests/support/lab.py). Tests that expect another error than a
timeout use TIMEOUT_S, which is longer than the lab's own timeout, and so never wait for it.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, Communicator
from ringcomm.errors import (
    AbortedError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    RendezvousError,
    RingcommError,
)
from tests.support import lab

SHAPE = (2, 2)
TIMEOUT_S, PATIENCE_S = 600.0, 60.0
LARGE_ELEMS = 1 << 20
# More bytes than the buffers of a connection hold.
HUGE_ELEMS = 16 << 20
Call = Callable[[Communicator, torch.Tensor], None]
_comms: list[Communicator] = []


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[lab.Lab]:
    lab.require()
    with lab.Lab(2) as made:
        yield made


@pytest.fixture(scope="module")
def slow_link() -> Iterator[lab.Lab]:
    """Two nodes with a link that takes 4 s per megabyte, so that data is always in transit."""
    lab.require()
    with lab.Lab(2, gbps=0.002) as made:
        yield made


def connect(timeout_s: float = TIMEOUT_S, **options: Any) -> int:
    """Builds this rank's communicator for the checks below."""
    os.environ["RINGCOMM_TRACE_DIR"] = "off"
    _comms[:] = [Communicator.from_env(options=CommOptions(timeout=timeout_s, **options))]
    return _comms[0].num_nodes


def set_timeout(timeout_s: float) -> None:
    """Shortens the timeout of calls, after late ranks had time to join."""
    _comms[0].timeout = timeout_s


def reduce(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.all_reduce(tensor)


def message(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)


def message_back(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.recv(tensor, 1)
    else:
        comm.send(tensor, 0)


def message_of_any(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.recv(tensor)
    else:
        comm.send(tensor, 0)


def fault(calls: int, call: Call = reduce, elems: int = LARGE_ELEMS) -> tuple[str, str, float]:
    """Makes calls until one fails; returns the error's type and text, and the seconds it took."""
    (comm,) = _comms
    tensor = torch.ones(elems)
    begin = time.monotonic()
    try:
        for _ in range(calls):
            begin = time.monotonic()
            call(comm, tensor)
    except RingcommError as error:
        found = type(error).__name__, str(error), time.monotonic() - begin
        with pytest.raises(AbortedError, match="unusable"):
            comm.barrier()
        comm.close()
        return found
    raise AssertionError("no call failed")


def abort() -> tuple[str, str, float]:
    (comm,) = _comms
    if comm.rank == 3:
        comm.abort("on purpose")
    return fault(1)


def other_call() -> tuple[str, str, float]:
    (comm,) = _comms
    try:
        if comm.rank < 2:
            comm.broadcast(torch.ones(100), 1)
        else:
            comm.all_reduce(torch.ones(100))
    except RingcommError as error:
        comm.close()
        return type(error).__name__, str(error), 0.0
    raise AssertionError("it was not noticed")


def again(world_size: int) -> float:
    """Builds a new communicator of the ranks that are alive now."""
    comm = Communicator.from_env(timeout=TIMEOUT_S)
    tensor = torch.ones(LARGE_ELEMS)
    comm.all_reduce(tensor)
    comm.close()
    assert comm.world_size == world_size
    return float(tensor[-1])


def _survivors(outcomes: list[Any]) -> list[tuple[str, str, float]]:
    return [outcome.value for outcome in outcomes if outcome.ok]


def test_a_killed_rank_is_named_everywhere(two_nodes: lab.Lab) -> None:
    ranks = two_nodes.ranks(SHAPE)
    assert ranks.run(connect, timeout_s=PATIENCE_S) == [2] * 4
    ranks.start(fault, 1 << 20)
    time.sleep(0.3)
    two_nodes.kill(1, 1)
    found = _survivors(ranks.outcomes(PATIENCE_S))
    assert len(found) == 3
    for kind, text, _ in found:
        assert kind == PeerLost.__name__, text
        assert "rank 3 (node 1)" in text
        assert f" at {__file__}:" in text and "_partial" not in text
    assert two_nodes.run(again, 3, ranks_per_node=(2, 1)) == [3.0] * 3


def test_a_killed_node_is_named(two_nodes: lab.Lab) -> None:
    ranks = two_nodes.ranks(SHAPE)
    ranks.run(connect, timeout_s=PATIENCE_S)
    ranks.start(fault, 1 << 20)
    time.sleep(0.3)
    two_nodes.kill(1)
    found = _survivors(ranks.outcomes(PATIENCE_S))
    assert len(found) == 2
    for kind, text, _ in found:
        assert kind == PeerLost.__name__, text
        assert "(node 1)" in text


def test_a_cut_link_ends_calls_at_their_timeout(two_nodes: lab.Lab) -> None:
    ranks = two_nodes.ranks(SHAPE)
    ranks.run(connect, timeout_s=PATIENCE_S)
    ranks.run(set_timeout, 1.0, timeout_s=PATIENCE_S)
    ranks.start(fault, 1 << 20)
    time.sleep(0.3)
    two_nodes.cut(1)
    outcomes = ranks.outcomes(PATIENCE_S)
    two_nodes.mend(1)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        kind, text, _ = outcome.value
        assert kind in (CollectiveTimeout.__name__, AbortedError.__name__), text
        assert re.search(r"rank \d \(node \d\)", text)
    # A rank may wait for its local peer, whose slice is still on the link.
    for node in range(2):
        texts = [outcome.value[1] for outcome in outcomes[2 * node : 2 * node + 2]]
        assert any(f"(node {1 - node})" in text for text in texts), texts


CALLS = (reduce, message, message_back, message_of_any)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_data_on_their_way_hold_nobody_at_a_timeout(slow_link: lab.Lab, call: Call) -> None:
    """Gloo cannot end a wait for a half-moved message: see NOTE [Ending a wait of Gloo's]."""
    ranks = slow_link.ranks((1, 1))
    ranks.run(connect, timeout_s=PATIENCE_S)
    ranks.run(set_timeout, 1.0, timeout_s=PATIENCE_S)
    for kind, text, _ in ranks.run(fault, 1, call, HUGE_ELEMS, timeout_s=PATIENCE_S):
        assert kind in (CollectiveTimeout.__name__, AbortedError.__name__), text


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_peer_that_dies_while_data_are_on_their_way_is_named(
    slow_link: lab.Lab, call: Call
) -> None:
    """There is one survivor: only its own connection shows that the peer has ended."""
    ranks = slow_link.ranks((1, 1))
    ranks.run(connect, timeout_s=PATIENCE_S)
    ranks.start(fault, 1, call, HUGE_ELEMS)
    time.sleep(1.0)
    slow_link.kill(1)
    ((kind, text, _),) = _survivors(ranks.outcomes(PATIENCE_S))
    assert kind == PeerLost.__name__, text
    assert "rank 1 (node 1)" in text


@pytest.mark.parametrize(
    ("check", "kind", "words"),
    [
        (abort, AbortedError, ("rank 3", "on purpose")),
        (other_call, MismatchError, ("broadcast", "all_reduce", "node 0", "node 1")),
    ],
    ids=["abort", "mismatch"],
)
def test_everyone_hears(two_nodes: lab.Lab, check: Any, kind: Any, words: tuple[str, ...]) -> None:
    ranks = two_nodes.ranks(SHAPE)
    ranks.run(connect, timeout_s=PATIENCE_S)
    for name, text, _ in ranks.run(check, timeout_s=PATIENCE_S):
        assert name == kind.__name__, text
        assert all(word in text for word in words), text


def refused(interface: str, ranks: tuple[int, ...]) -> str:
    if int(os.environ["RANK"]) in ranks:
        os.environ["RINGCOMM_SOCKET_IFNAME"] = interface
    try:
        with pytest.raises(RendezvousError) as raised:
            connect()
        return str(raised.value)
    finally:
        os.environ.pop("RINGCOMM_SOCKET_IFNAME", None)


@pytest.mark.parametrize(
    ("interface", "ranks", "words"),
    [
        ("lo", (0, 1), "to rank {peer} (node {peer}) at interface lo (127.0.0.1, "),
        (
            "none0",
            (1,),
            "rank 1 (node 1) expected to connect from interface none0 (no IPv4 ",
        ),
    ],
)
def test_a_peer_that_cannot_be_reached_is_named(
    two_nodes: lab.Lab, interface: str, ranks: tuple[int, ...], words: str
) -> None:
    """All ranks learn of it from the first that does, long before they give up connecting."""
    told = two_nodes.run(refused, interface, ranks, ranks_per_node=(1, 1), timeout_s=PATIENCE_S / 2)
    for text in told:
        assert any(words.format(peer=peer) in text for peer in range(2)), text
        assert "RINGCOMM_SOCKET_IFNAME) of node" in text
        assert ".cc:" not in text


def options_differ() -> str:
    with pytest.raises(RingcommError, match="options") as raised:
        connect(compression="param" if os.environ["RANK"] == "1" else "none")
    return str(raised.value)


def test_options_that_differ_are_named(two_nodes: lab.Lab) -> None:
    for text in two_nodes.run(options_differ, ranks_per_node=(1, 1), timeout_s=PATIENCE_S):
        assert "compression=param" in text and "compression=none" in text


def calls_of(name: str, buffer_bytes: int) -> None:
    (comm,) = _comms
    full = ringcomm.empty(buffer_bytes // 4).fill_(comm.rank)
    part = ringcomm.empty(buffer_bytes // 4 // comm.world_size).fill_(comm.rank)
    if name == "all_reduce":
        comm.all_reduce(full)
    elif name == "reduce_scatter":
        comm.reduce_scatter_tensor(part, full)
    else:
        comm.all_gather_into_tensor(full, part)


# Headers of Ethernet, IP and TCP take 66 of 1514 bytes, or of more if the network device cuts the
# segments. Acknowledgements add at most as many bytes for every second packet.
LARGEST_SHARE = 1.0 + 2 * 66 / 1448 + 0.01


def test_what_leaves_a_node(two_nodes: lab.Lab) -> None:
    ranks, size = two_nodes.ranks(SHAPE), 8 << 20
    ranks.run(connect, timeout_s=PATIENCE_S)
    for name, share in (("all_reduce", 1.0), ("reduce_scatter", 0.5), ("all_gather", 0.5)):
        two_nodes.mark()
        ranks.run(calls_of, name, size, timeout_s=PATIENCE_S)
        for sent in two_nodes.wire_bytes():
            assert share * size <= sent <= share * size * LARGEST_SHARE, name
