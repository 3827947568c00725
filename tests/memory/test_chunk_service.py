# SPDX-License-Identifier: Apache-2.0
"""Chunks of heaps sent to other processes: who receives them, and which count as mapped."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from ringcomm import UnsupportedError, cuda
from ringcomm.memory import chunk_service
from ringcomm.memory.chunk_service import (
    ChunkService,
    acknowledge,
    connect,
    offer,
    receive,
    refuse,
)
from ringcomm.memory.device_memory import OfferedChunks, PeerChunks
from tests.proof.faults.device.rig import until
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER, library

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

MIB = 1 << 20


class Offered:
    """A heap of chunks of these sizes, which reports ``told`` bytes."""

    def __init__(self, *sizes: int, told: int | None = None) -> None:
        self.token = 77
        self.sizes = list(sizes)
        self.told = told
        self.reached = -1
        self.refused: list[str] = []

    @property
    def committed_bytes(self) -> int:
        return sum(self.sizes)

    def export_after(self, mapped_bytes: int) -> tuple[int, int]:
        index = next(i for i in range(len(self.sizes)) if sum(self.sizes[:i]) == mapped_bytes)
        descriptor = os.memfd_create("chunk", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, self.sizes[index])
        return self.told or self.sizes[index], descriptor

    def set_reached(self, size_bytes: int) -> None:
        self.reached = size_bytes

    def tell_refused(self, refusal: str) -> None:
        self.refused.append(refusal)


@pytest.fixture
def heap() -> Iterator[Offered]:
    made = Offered(2 * MIB, 4 * MIB)
    service = offer(made)
    yield made
    service.withdraw(made)
    assert chunk_service._service is None


def service_of() -> ChunkService:
    service = chunk_service._service
    assert service is not None
    return service


def ask(token: int = 77, pid: int | None = None) -> socket.socket:
    return connect(service_of().name, os.getpid() if pid is None else pid, token, 10.0)


def next_chunk(connection: socket.socket) -> tuple[int, int, int]:
    sent = receive(connection)
    assert sent is not None
    assert os.fstat(sent.descriptor).st_size == sent.size_bytes
    os.close(sent.descriptor)
    return sent[:3]


def test_chunks_come_one_by_one_and_count_when_they_are_acknowledged(heap):
    service = service_of()
    with ask() as connection:
        assert next_chunk(connection) == (0, 2 * MIB, 6 * MIB)
        assert not service.await_readers(heap, 1, 0.05)
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            receive(connection)
        connection.settimeout(10.0)
        # An acknowledgement of more than was sent is ignored.
        acknowledge(connection, 6 * MIB)
        assert not service.await_readers(heap, 1, 0.05)
        acknowledge(connection, 2 * MIB)
        assert next_chunk(connection) == (2 * MIB, 4 * MIB, 6 * MIB)
        assert service.await_readers(heap, 2 * MIB, 10.0)
        until(lambda: heap.reached == 2 * MIB)
        acknowledge(connection, 6 * MIB)
        until(lambda: heap.reached == 6 * MIB)
        heap.sizes.append(8 * MIB)
        service.send_grown(heap)
        assert heap.reached == 6 * MIB
        assert next_chunk(connection) == (6 * MIB, 8 * MIB, 14 * MIB)
    until(lambda: heap.reached == 14 * MIB)  # a reader that has left is not waited for


def test_a_reader_that_refuses_is_not_awaited_and_told_once(heap):
    service = service_of()
    with ask() as connection, ask() as other:
        for each in (connection, other):
            assert next_chunk(each) == (0, 2 * MIB, 6 * MIB)
            acknowledge(each, 2 * MIB)
            assert next_chunk(each) == (2 * MIB, 4 * MIB, 6 * MIB)
        assert not service.await_readers(heap, 6 * MIB, 0.05)
        assert not service.refusals(heap)
        acknowledge(other, 6 * MIB)
        refuse(connection, 2 * MIB, "it is full\x1b[2J" + "!" * 5000)
        assert not service.await_readers(heap, 6 * MIB, 1000.0)
        until(lambda: heap.refused != [])
        # Texts of other processes are short, and have no control characters.
        assert heap.refused == service.refusals(heap)
        assert heap.refused[0].startswith("it is full?[2J!!!")
        assert len(heap.refused[0]) == 1000
        heap.sizes.append(8 * MIB)
        service.send_grown(heap)
        assert next_chunk(other) == (6 * MIB, 8 * MIB, 14 * MIB)
        acknowledge(other, 14 * MIB)
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            receive(connection)
        assert not service.await_readers(heap, 14 * MIB, 1000.0)
        assert heap.reached == 2 * MIB
        assert len(heap.refused) == 1
        connection.close()
        until(lambda: heap.reached == 14 * MIB)
        assert service.await_readers(heap, 14 * MIB, 1000.0)
        assert not service.refusals(heap)


def test_a_chunk_that_cannot_be_sent_tells_both_processes_why(heap):
    service = service_of()

    def refuses(mapped_bytes: int) -> tuple[int, int]:
        raise UnsupportedError("the driver said no")

    with ask() as connection:
        assert next_chunk(connection) == (0, 2 * MIB, 6 * MIB)
        heap.export_after = refuses
        acknowledge(connection, 2 * MIB)
        with pytest.raises(OSError, match="its process cannot send a chunk: the driver said no"):
            receive(connection)
        assert not service.await_readers(heap, 6 * MIB, 1000.0)
        until(lambda: heap.refused != [])
        service.send_grown(heap)
        said = "this process cannot send a chunk of it to a peer: the driver said no"
        assert heap.refused == [said]
        assert heap.reached == 2 * MIB


def test_a_warning_that_is_an_error_leaves_the_thread_alive(heap, monkeypatch):
    """With -W error the report of a refusal raises in the service's thread."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))

    def warn(refusal: str) -> None:
        raise RuntimeWarning(refusal)

    heap.tell_refused = warn
    with ask() as connection, ask() as other:
        assert next_chunk(connection) == (0, 2 * MIB, 6 * MIB)
        refuse(connection, 0, "it is full")
        assert next_chunk(other) == (0, 2 * MIB, 6 * MIB)
        acknowledge(other, 2 * MIB)
        assert next_chunk(other) == (2 * MIB, 4 * MIB, 6 * MIB)
    assert [str(each) for each in seen] == ["it is full"]


def test_a_heap_that_is_not_there(heap):
    with ask(token=78) as connection:
        assert receive(connection) is None
    with pytest.raises(OSError, match="another process answers there"):
        ask(pid=os.getpid() + 1)


def test_other_users_get_nothing(heap):
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    name, pid = service_of().name, os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            other.settimeout(10.0)
            other.connect(name)
            try:
                other.send(chunk_service._HELLO.pack(77))
                code = 0 if other.recv(100) == b"" else 2
            except (BrokenPipeError, ConnectionResetError):
                code = 0
            try:
                connect(name, pid, 77, 10.0)
                code = 3  # the service belongs to another user
            except OSError:
                pass
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    ("heap", "said"),
    [
        (Offered(2 * MIB, told=3 * MIB), f"a chunk of {3 * MIB} bytes at 0"),  # not whole units
        (Offered(2 * MIB, told=10 * MIB), f"a chunk of {10 * MIB} bytes at 0"),  # beyond the end
        (Offered(2 * MIB, told=4 * MIB), "cuMemMap"),  # more than the memory holds
    ],
)
def test_a_chunk_that_cannot_be_is_refused(heap, said):
    before, runtime = library().emu_vmm_in_use(), EmulatedRuntime()
    previous = cuda.use(runtime)
    service = offer(heap)
    with pytest.raises((OSError, RuntimeError), match=said):
        offered = OfferedChunks(service.name, os.getpid(), heap.token, 8 * MIB, "one", "other")
        PeerChunks(runtime, 0, offered)
    service.withdraw(heap)
    cuda.use(previous)
    assert library().emu_vmm_in_use() == before
