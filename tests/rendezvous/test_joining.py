# SPDX-License-Identifier: Apache-2.0
"""Only announced ranks may join, and only if their memory matches their handles."""

import json
import os
import sys
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import ringcomm
from ringcomm import Communicator, RendezvousError, RingcommError, _native
from ringcomm.memory.host_heap import process_heap
from ringcomm.rendezvous.handles import HeapHandle, machine_identity
from tests.support import ROOT, fork_server
from tests.support.ranks import run_ranks

NOBODY = 65534
TIMEOUT_S = 20
PREFIX = "ringcomm/world/attempt0/1"

LAYOUT = (
    "segment_bytes=262144, slots=4, channels=1, records=256, sum_group_size=0, transport=auto, "
    "compression=none, rails=auto, kernels=native, objects=data, largest_object_bytes=4294967296"
)


def _forged(core: _native.Comm | None, rank: int, world: int, **changes: Any) -> HeapHandle:
    heap = process_heap()
    host, boot, pid_namespace = machine_identity()
    handle = HeapHandle(
        rank=rank,
        world_size=world,
        host=host,
        boot=boot,
        pid_namespace=pid_namespace,
        node_id="",
        pid=os.getpid(),
        fd=heap.fd,
        capacity_bytes=heap.capacity_bytes,
        token=heap.token,
        region_offset_bytes=core.region_offset_bytes if core else 0,
        region_bytes=core.region_bytes if core else 1,
        proof=core.proof if core else 1,
        layout=LAYOUT,
        cpus="1",
        cores=1,
        torch_threads=1,
        threads=0,
        numa_nodes="",
    )
    return replace(handle, **changes)


def _text(handle: HeapHandle) -> str:
    return json.dumps({"version": 1, **asdict(handle)})


def _error_of_rank_0(handle: HeapHandle) -> RingcommError:
    store = HashStore()
    store.set(f"{PREFIX}/heap/1", _text(handle))
    with pytest.raises(RingcommError) as raised:
        Communicator.from_store(store, 0, 2, timeout=TIMEOUT_S)
    return raised.value


def test_a_region_that_is_none():
    core = _native.Comm(process_heap(), rank=1, world=2, records=256)
    end = process_heap().capacity_bytes
    for changes, words in (
        ({"region_offset_bytes": end - 64}, "do not lie in a heap"),
        ({"region_offset_bytes": 2**63 - 64}, "do not lie in a heap"),
        ({"region_offset_bytes": core.region_offset_bytes + 64}, "the mark of protocol version"),
        ({"proof": core.proof ^ 1}, "its proof differs"),
    ):
        error = _error_of_rank_0(_forged(core, 1, 2, **changes))
        assert type(error) is RendezvousError
        assert "what rank 1 announced is no region of its own" in str(error)
        assert words in str(error)
    other = _native.Comm(process_heap(), rank=0, world=2, records=256)
    error = _error_of_rank_0(_forged(other, 1, 2))
    assert "it says it is that of rank 0 of 2" in str(error)
    core.close()
    other.close()


def _forger(store, rank, world):
    """Rank 1 is another process of this user, and announces a region that does not exist."""
    if rank == 0:
        with pytest.raises(RendezvousError) as raised:
            Communicator.from_store(store, 0, 2, timeout=TIMEOUT_S)
        return str(raised.value)
    store.set(f"{PREFIX}/heap/1", _text(_forged(None, 1, 2)))
    store.get(f"{PREFIX}/failed/0")  # until rank 0 has posted its error
    return ""


def test_a_forged_handle_is_refused():
    told, _ = run_ranks(_forger, 2, timeout_s=40)
    assert "what rank 1 announced is no region of its own" in told


def test_a_replayed_handle_is_refused():
    """A replayed handle is valid, but an earlier communicator's; the memory shows this."""
    store = HashStore()
    replayed: list[str] = []

    def build(rank: int) -> None:
        comm = Communicator.from_store(store, rank, 2, timeout=TIMEOUT_S)
        comm.barrier()
        replayed.append(store.get(f"{PREFIX}/heap/1").decode())
        ready.wait()
        comm.close()

    ready = threading.Barrier(3)
    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    while len(replayed) < 2:
        ready_or_not = [thread.is_alive() for thread in threads]
        assert any(ready_or_not)
    again = HashStore()
    again.set(f"{PREFIX}/heap/1", replayed[0])

    def confirm() -> None:
        # The forger confirms the same handles as rank 0.
        again.set(f"{PREFIX}/ready/1", again.get(f"{PREFIX}/ready/0").decode())

    forger = threading.Thread(target=confirm)
    forger.start()
    with pytest.raises(RendezvousError, match="rank 1 has other members than rank 0"):
        Communicator.from_store(again, 0, 2, timeout=TIMEOUT_S)
    ready.wait()
    for thread in (forger, *threads):
        thread.join()


class _Overwriting:
    """A store in which another process overwrites rank 1's handle right after it is posted."""

    def __init__(self, inner: HashStore, forged: str) -> None:
        self._inner, self._forged = inner, forged

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, self._forged if key == f"{PREFIX}/heap/1" else value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_rank_that_is_taken_is_named():
    core = _native.Comm(process_heap(), rank=1, world=2, records=256)
    store: Any = _Overwriting(HashStore(), _text(_forged(core, 1, 2)))
    store.add("ringcomm/world/attempt0/arrivals/0", 0)
    with pytest.raises(RendezvousError, match="another process posts as rank 1, too"):
        # The forged handle of rank 0 is enough: rank 1 fails before it reads it.
        store.set(f"{PREFIX}/heap/0", _text(_forged(core, 0, 2)))
        Communicator.from_store(store, 1, 2, timeout=TIMEOUT_S)
    core.close()


def test_ranks_that_read_different_handles_name_the_rank():
    """Rank 0 reads a stranger's handle of rank 1; rank 2 reads the real one."""
    inner = HashStore()
    core = _native.Comm(process_heap(), rank=1, world=3, records=256)
    forged = _text(_forged(core, 1, 3, layout=""))

    class Misled:
        def get(self, key: str) -> bytes:
            text = bytes(inner.get(key))
            if key != f"{PREFIX}/heap/1":
                return text
            mine = json.loads(forged)
            return json.dumps({**mine, "layout": json.loads(text)["layout"]}).encode()

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    errors: dict[int, RingcommError] = {}

    def build(rank: int) -> None:
        store: Any = Misled() if rank == 0 else inner
        try:
            Communicator.from_store(store, rank, 3, timeout=TIMEOUT_S)
        except RingcommError as error:
            errors[rank] = error

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(errors) == {0, 1, 2}
    assert any("more than one process posts as rank 1" in str(e) for e in errors.values())
    core.close()


def _stranger_joins(port: int) -> str:
    """Plays rank 1 with its own heap, as another user who can reach the store."""
    program = f"""
import ctypes, os
from datetime import timedelta
from torch.distributed import TCPStore
from ringcomm import Communicator
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a process of that user like any other: dumpable
store = TCPStore("127.0.0.1", {port}, is_master=False, timeout=timedelta(seconds=30))
store.set("stranger", "is here")
try:
    Communicator.from_store(store, 1, 2, timeout={TIMEOUT_S})
    print("joined")
except Exception as error:
    print(type(error).__name__, error)
"""
    environment = {**os.environ, "HOME": "/tmp", "PYTHONPATH": str(ROOT)}
    done = fork_server.run([sys.executable, "-c", program], 60, env=environment)
    return done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_does_not_join():
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told: list[str] = []
    stranger = threading.Thread(target=lambda: told.append(_stranger_joins(server.port)))
    stranger.start()
    server.wait(["stranger"], timedelta(seconds=60))  # importing torch takes time
    with pytest.raises(RingcommError) as raised:
        Communicator.from_store(server, 0, 2, timeout=TIMEOUT_S)
    stranger.join()
    # The kernel refuses the stranger. A rank of root may open all memory, so it checks its owner.
    assert told[0].startswith(("UnsupportedError", "RendezvousError")), told[0]
    assert "rank 1" in str(raised.value)
    assert f"belongs to user {NOBODY}" in str(raised.value) or "UnsupportedError" in told[0]


def test_a_world_of_good_ranks_still_forms():
    with ringcomm.local_world(3, timeout=TIMEOUT_S) as world:
        tensors = [torch.ones(3) for _ in range(3)]

        def body(comm):
            comm.all_reduce(tensors[comm.rank])

        world.run(body)
        assert all(tensor.eq(3).all() for tensor in tensors)
