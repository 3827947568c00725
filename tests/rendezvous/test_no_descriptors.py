# SPDX-License-Identifier: Apache-2.0
"""A rank runs out of file descriptors at each step of a rendezvous, one step per run."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from typing import Any

import pytest
from torch.distributed import TCPStore

from ringcomm import Communicator
from ringcomm.errors import HeapError, RendezvousError, RingcommError
from ringcomm.rendezvous.handles import forming, need_descriptors, shortage_of
from tests.support.faults import wait_for_all
from tests.support.ranks import Ranks, join_nodes

pytestmark = pytest.mark.deadlines

WORLD, POOR = 2, 1
MOST = 40
TIMEOUT_S = 60.0


def _tcp_store(rank: int, port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, WORLD, rank == 0, wait_for_workers=False)


def _leave(spare: int) -> list[int]:
    """Leaves this process ``spare`` free descriptors; returns those that occupy the rest."""
    _limit(64)
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
    for descriptor in taken[:spare]:
        os.close(descriptor)
    return taken[spare:]


def _limit(descriptors: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))


def _rank(file_store: Any, rank: int, world: int, port: int, spare: int, kind: str) -> str:
    store = _tcp_store(rank, port)
    nodes = [[0], [1]] if kind == "nodes" else [[0, 1]]
    settings = {"timeout": TIMEOUT_S, "heap_bytes": 64 << 20}
    comm: Communicator | None = None
    if kind == "group":
        comm = join_nodes(store, rank, world, nodes, **settings)
        comm.barrier()
    taken = _leave(spare) if rank == POOR else []
    try:
        if comm is None:
            made: Any = join_nodes(store, rank, world, nodes, **settings)
        else:
            made = comm.new_group([0, 1])
        made.barrier()
    except RingcommError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _limit(1024)
        for descriptor in taken:
            os.close(descriptor)
        wait_for_all(file_store, "over", world)  # the store ends with rank 0
    return ""


@pytest.mark.parametrize("kind", ["world", "group", "nodes"])
def test_each_descriptor_may_be_the_last(kind: str) -> None:
    failed = 0
    for spare in range(MOST):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with Ranks(_rank, WORLD, port, spare, kind) as ranks:
            outcomes = ranks.wait()
        assert all(each.ok for each in outcomes), "\n".join(each.describe() for each in outcomes)
        rich, poor = (each.value for each in outcomes)
        if not poor:
            assert not rich
            break
        failed += 1
        assert poor.startswith("RendezvousError: ") and "ulimit -n" in poor, (spare, poor)
        assert f"rank {POOR} failed" in rich and "ulimit -n" in rich, (spare, rich)
    assert 1 <= failed < MOST - 1


def test_errors_by_their_causes() -> None:
    def caused(error: Exception, cause: Exception) -> Exception:
        error.__cause__ = cause
        return error

    none_here, none_anywhere = OSError(24, "Too many open files"), OSError(23, "Too many open")
    assert "ulimit -n" in shortage_of(none_here)
    assert "fs.file-max" in shortage_of(none_anywhere)
    assert "vm.max_map_count" in shortage_of(OSError(12, "Cannot allocate memory"))
    assert "ulimit -n" in shortage_of(caused(HeapError("no heap"), none_here))
    assert "ulimit -n" in shortage_of(RuntimeError("socket: Too many open files"))
    assert shortage_of(RuntimeError("connection refused")) == ""
    assert shortage_of(ImportError("no such module")) == ""
    circular = RuntimeError("its own cause")
    assert shortage_of(caused(circular, circular)) == ""
    words = r"^forming: this process has no file descriptor"
    with pytest.raises(RendezvousError, match=words), forming("forming"):
        raise caused(HeapError("no heap"), none_here)
    with pytest.raises(HeapError, match="no heap"), forming("forming"):
        raise caused(HeapError("no heap"), OSError(12, "Cannot allocate memory"))
    need_descriptors(2, "forming", "this test")
    with pytest.raises(RendezvousError, match=r"expected 1000000 free .*ulimit -n"):
        need_descriptors(1_000_000, "forming", "this test")
