"""A rank runs out of file descriptors at each place of a rendezvous in turn."""

from __future__ import annotations

import contextlib
import os
import resource
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.distributed import TCPStore

from ringcomm import Communicator
from ringcomm.errors import HeapError, RendezvousError, RingcommError
from ringcomm.rendezvous.handles import forming, need_descriptors, shortage_of
from tests.support.faults import meet
from tests.support.ranks import join_nodes, run_ranks

pytestmark = pytest.mark.deadlines

WORLD, POOR = 2, 1
MOST = 40
TIMEOUT_S = 60.0
MET = "met"


def _leave(spare: int) -> list[int]:
    """Leaves this process so many more descriptors; returns those that take the rest."""
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


def _store(file_store: Any, rank: int, spare: int) -> TCPStore:
    """A store of one rendezvous, which ends with rank 0."""
    port = 0 if rank == 0 else int(file_store.get(f"port/{spare}"))
    made = TCPStore("127.0.0.1", port, WORLD, rank == 0, wait_for_workers=False)
    if rank == 0:
        file_store.set(f"port/{spare}", str(made.port))
    return made


def _meets(file_store: Any, rank: int, world: int, spare: int, kind: str) -> str:
    store = _store(file_store, rank, spare)
    places = [[0], [1]] if kind == "nodes" else [[0, 1]]
    settings = {"timeout": TIMEOUT_S, "heap_bytes": 64 << 20}
    comm: Communicator | None = None
    if kind == "group":
        comm = join_nodes(store, rank, world, places, **settings)
        comm.barrier()
    taken = _leave(spare) if rank == POOR else []
    try:
        if comm is None:
            made: Any = join_nodes(store, rank, world, places, **settings)
        else:
            made = comm.new_group([0, 1])
        made.barrier()
    except RingcommError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _limit(1024)
        for descriptor in taken:
            os.close(descriptor)
        meet(file_store, f"over/{spare}", world)
    return MET


def _in_a_fork(call: Callable[[], str]) -> str:
    """Returns what ``call`` returns, or its traceback; this process stays as it was."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = call()
        except BaseException:
            told = traceback.format_exc()
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return told


def _until_they_meet(file_store: Any, rank: int, world: int, kind: str) -> list[str]:
    """Tries with one more descriptor each time; returns what came of each."""
    told: list[str] = []
    for spare in range(MOST):
        told.append(_in_a_fork(partial(_meets, file_store, rank, world, spare, kind)))
        file_store.set(f"told/{spare}/{rank}", told[-1])
        if file_store.get(f"told/{spare}/{POOR}") == MET.encode():
            break
    return told


@pytest.mark.parametrize("kind", ["world", "group", "nodes"])
def test_each_descriptor_may_be_the_last(kind: str) -> None:
    *failed, last = zip(*run_ranks(_until_they_meet, WORLD, kind, timeout_s=200.0), strict=True)
    assert last == (MET, MET)
    assert 1 <= len(failed) < MOST - 1
    for spare, (rich, poor) in enumerate(failed):
        assert poor.startswith("RendezvousError: ") and "ulimit -n" in poor, (spare, poor)
        assert f"rank {POOR} failed" in rich and "ulimit -n" in rich, (spare, rich)


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
