# SPDX-License-Identifier: Apache-2.0
"""The exception tree: the classes by which a caller can catch an error."""

import pytest

import ringcomm
from ringcomm.errors import from_fault

ALSO = {
    "ArgumentError": ValueError,
    "CollectiveTimeout": TimeoutError,
    "HeapError": MemoryError,
    "UnsupportedError": NotImplementedError,
    "AbortedError": RuntimeError,
    "CorruptedError": RuntimeError,
    "ForkError": RuntimeError,
    "MismatchError": RuntimeError,
    "PeerLost": RuntimeError,
    "RendezvousError": RuntimeError,
}


@pytest.mark.parametrize("name", ALSO)
def test_tree(name):
    kind = getattr(ringcomm, name)
    assert issubclass(kind, ringcomm.RingcommError)
    assert issubclass(kind, ALSO[name])


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (
            "timeout",
            "CollectiveTimeout",
            ("waited 0.07 s, until its timeout ended, for rank 2", "raise timeout="),
        ),
        ("peer_lost", "PeerLost", ("expected rank 2", "has ended")),
        ("mismatch", "MismatchError", ("Rank 1 called mine", "rank 2 called theirs")),
        (
            "corrupt",
            "CorruptedError",
            ("rank 2 published for rank 1 is damaged", "mine", "theirs"),
        ),
        (
            "overlap",
            "ArgumentError",
            ("rank 1 began mine while another call", "a replay of a graph"),
        ),
        ("aborted", "AbortedError", ("rank 1 aborted", "because")),
        ("interrupted", "AbortedError", ("rank 1 was interrupted", "at item 3, where it waited")),
    ],
)
def test_messages(kind, error, words):
    fault = {
        "kind": kind,
        "op": "all_reduce",
        "rank": 1,
        "peer": 2,
        "item": 3,
        "wanted": 4,
        "seen": 5,
        "waited_ms": 70,
        "mine": "mine",
        "theirs": "theirs",
        "reason": "because",
    }
    made = from_fault("all_reduce on rank 0 of 3", fault)
    assert type(made) is getattr(ringcomm, error)
    assert str(made).startswith("all_reduce on rank 0 of 3: ")
    for word in (*words, "build a new one"):
        assert word in str(made)
