# SPDX-License-Identifier: Apache-2.0
"""The ranks' messages in a rendezvous, and junk in their place."""

import json
import os
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

import ringcomm
from ringcomm import (
    ArgumentError,
    CommOptions,
    Communicator,
    HeapError,
    MismatchError,
    PeerLost,
    RendezvousError,
    RingcommError,
    json_reader,
)
from ringcomm.memory.host_heap import process_heap
from ringcomm.process import Deadline
from ringcomm.rendezvous.handles import HeapHandle, Rendezvous, RendezvousSpec, machine_identity
from ringcomm.rendezvous.same_node import Lookout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deadlines

LAYOUT = (
    "segment_bytes=262144, slots=4, channels=1, records=256, sum_group_size=0, transport=auto, "
    "compression=none, rails=auto, kernels=native, objects=data, largest_object_bytes=4294967296"
)


def _handle(**changes: Any) -> HeapHandle:
    heap = process_heap()
    host, boot, pid_namespace = machine_identity()
    handle = HeapHandle(
        rank=1,
        world_size=2,
        host=host,
        boot=boot,
        pid_namespace=pid_namespace,
        node_id="",
        pid=1,
        fd=heap.fd,
        capacity_bytes=heap.capacity_bytes,
        token=heap.token,
        region_offset_bytes=0,
        region_bytes=1,
        proof=0,
        layout=LAYOUT,
        cpus="1",
        cores=1,
        torch_threads=1,
        threads=0,
        numa_nodes="",
    )
    return replace(handle, **changes)


def _error_of_rank_0(text: str) -> RingcommError:
    store = HashStore()
    store.set("ringcomm/world/attempt0/1/heap/1", text)
    with pytest.raises(RingcommError) as raised:
        Communicator.from_store(store, 0, 2, timeout=5)
    return raised.value


def _json(handle: HeapHandle, **changes: Any) -> str:
    return json.dumps({"version": 1, **asdict(handle), **changes})


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("junk", RendezvousError, "not a version 1 record"),
        ("[1]", RendezvousError, "not a version 1 record"),
        ('{"version": 2}', RendezvousError, "same ringcomm"),
        ('{"version": 1, "error": "no room"}', RendezvousError, "rank 1 failed: no room"),
        ('{"version": 1, "rank": 1}', RendezvousError, "expected world_size of rank 1"),
    ],
)
def test_junk(text, kind, words):
    error = _error_of_rank_0(text)
    assert type(error) is kind
    assert words in str(error)
    assert "rendezvous of communicator 'world' on rank 0 of 2" in str(error)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"pid": -1}, RendezvousError, "expected pid of rank 1 to be an integer >= 0"),
        ({"pid": True}, RendezvousError, "expected pid"),
        ({"fd": "3"}, RendezvousError, "expected fd"),
        ({"host": 3}, RendezvousError, "expected host of rank 1 to be a string"),
        ({"rank": 0}, MismatchError, "says it is rank 0 of 2"),
        ({"world_size": 3}, MismatchError, "says it is rank 1 of 3"),
        ({"layout": "segment_bytes=64"}, MismatchError, "segment_bytes=64"),
    ],
)
def test_handles_that_do_not_fit(changes, kind, words):
    error = _error_of_rank_0(_json(_handle(), **changes))
    assert type(error) is kind
    assert words in str(error)


ESCAPES = "\x1b]0;other title\x07\x1b[31mred"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": f"{ESCAPES}\nTraceback"}, "rank 1 failed: ?]0;other title??[31mred\nTraceback"),
        ({"error": [ESCAPES]}, "rank 1 failed: ["),
        ({"host": ESCAPES}, "expected host of rank 1 to be a string of at most 4096 printable"),
        ({"boot": ESCAPES}, "expected boot of rank 1"),
        ({"pid_namespace": ESCAPES}, "expected pid_namespace of rank 1"),
        ({"layout": ESCAPES}, "expected layout of rank 1"),
        ({"pid": ESCAPES}, "expected pid of rank 1"),
        ({"version": ESCAPES}, "not a version 1 record"),
    ],
    ids=["error", "list", "host", "boot", "pid_namespace", "layout", "pid", "version"],
)
def test_a_terminal_obeys_nothing_that_a_peer_posts(changes, words):
    text = str(_error_of_rank_0(_json(_handle(), **changes)))
    assert words in text
    assert text.replace("\n", "").isprintable(), text


def test_what_a_terminal_obeys_is_noticed(monkeypatch):
    monkeypatch.setattr(json_reader, "printable", lambda text: text)
    text = str(_error_of_rank_0(json.dumps({"version": 1, "error": ESCAPES})))
    assert ESCAPES in text and not text.isprintable()


def test_a_peer_that_is_gone_or_another():
    heap = process_heap()
    gone = _error_of_rank_0(_json(_handle(token=1, pid=2**22 - 1)))
    assert type(gone) is PeerLost
    assert "expected rank 1 to take part, but its process has ended" in str(gone)
    assert "cannot map the heap of rank 1" in str(gone.__cause__ or gone.__context__)
    other = _error_of_rank_0(_json(_handle(token=heap.token ^ 1, pid=os.getpid())))
    assert type(other) is RendezvousError
    assert "rank 1" in str(other)


def test_different_options_are_named_on_both_ranks():
    store = HashStore()
    errors: list[RingcommError] = []

    def build(rank):
        options = CommOptions(timeout=5, segment_bytes=(1024, 2048)[rank])
        with pytest.raises(RingcommError) as raised:
            Communicator.from_store(store, rank, 2, options=options)
        errors.append(raised.value)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert any(isinstance(error, MismatchError) for error in errors)
    assert all("segment_bytes=1024" in str(e) and "segment_bytes=2048" in str(e) for e in errors)


def _without_room(store, rank, world):
    with pytest.raises(RingcommError) as raised:
        Communicator.from_store(store, rank, world, timeout=30, heap_bytes=(2 << 20) << 9 * rank)
    return type(raised.value), str(raised.value)


def test_a_rank_without_room_fails_its_peers_at_once():
    (first_kind, first), (second_kind, second) = run_ranks(_without_room, 2, timeout_s=20)
    assert first_kind is HeapError
    assert "communicator 'world' on rank 0 of 2" in first
    assert "RINGCOMM_HEAP_BYTES" in first
    assert second_kind is RendezvousError
    assert "rank 0 failed: HeapError" in second


def test_one_store_and_name_serve_many_times(tmp_path):
    for store in (HashStore(), FileStore(str(tmp_path / "store"), 2)):

        def build_and_use(rank, store=store):
            for _ in range(5):
                with Communicator.from_store(store, rank, 2, timeout=30) as comm:
                    tensor = torch.ones(4)
                    comm.all_reduce(tensor)
                    assert tensor[0] == 2

        threads = [threading.Thread(target=build_and_use, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_bad_arguments():
    store = HashStore()
    not_an_integer: Any = "2"
    for rank, world_size in ((-1, 2), (2, 2), (0, 0), (0, not_an_integer)):
        with pytest.raises(ArgumentError, match="expected"):
            Communicator.from_store(store, rank, world_size)
    for name in ("", "a b", "a\n"):
        with pytest.raises(ArgumentError, match="name: expected"):
            Communicator.from_store(store, 0, 1, name=name)
    with pytest.raises(ArgumentError, match="timeout"):
        Communicator.from_store(store, 0, 1, timeout=-1)
    ringcomm.empty(1)  # makes the heap
    with pytest.raises(HeapError, match="exists already"):
        ringcomm.local_world(1, heap_bytes=1 << 50)


def test_store_that_went_away():
    class Gone:
        def add(self, key, amount):
            return amount

        def set(self, key, value):
            pass

        def get(self, key):
            raise AssertionError("check() fails first")

        def check(self, keys):
            raise RuntimeError("Failed to recv, got 0 bytes\nframes")

    spec = RendezvousSpec(Gone(), "lost", 1, 2, Deadline(5.0), Lookout((0, 1), {}))
    with pytest.raises(RendezvousError, match=r"rank 1 of 2: the store does not answer.*0 bytes"):
        Rendezvous(spec).confirm()
