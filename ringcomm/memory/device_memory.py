"""The memory behind a device heap: chunks that are added as it fills, or one allocation.

Chunks are the CUDA driver's virtual memory: a range of addresses is reserved, as large as the heap
may ever be, and memory is mapped to it from its start. So an address, and an offset from the base,
hold for as long as the heap lives, here and in each process that maps the same chunks at the same
offsets of a range of its own. One allocation is for drivers without virtual memory.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.cuda.virtual_memory import ChunkedRange
from ringcomm.errors import RingcommError, UnsupportedError
from ringcomm.memory.chunk_service import (
    ChunkService,
    Sent,
    acknowledge,
    connect,
    follow,
    offer,
    receive,
)

# The least that a heap gets at a time once it has as much; before that it doubles, so that a
# communicator alone takes little. A choice that no GPU has measured.
GROWTH_BYTES = 256 << 20
# How long an allocation waits until all processes map what it made the heap grow by. That is a
# message each way, unless their driver is busy; then kernels copy that memory meanwhile.
GROWTH_WAIT_S = 2.0
# How long a process waits for the chunks of a peer that is there.
MAPPING_WAIT_S = 30.0


class FixedMemory:
    """One allocation of the runtime's, which never grows.

    Args:
        runtime: of the device.
        device: its ordinal.
        capacity_bytes: all of which is taken at once.
        why_fixed: says why it does not grow.
    """

    def __init__(
        self, runtime: DeviceRuntime, device: int, capacity_bytes: int, why_fixed: str
    ) -> None:
        self._runtime, self._device = runtime, device
        self.capacity_bytes = self.committed_bytes = self.reached_bytes = capacity_bytes
        self.why_fixed = why_fixed
        self.base_ptr = runtime.allocate(device, capacity_bytes)

    def grow(self, end_bytes: int) -> None:
        """Does nothing: everything is there."""

    def export(self) -> tuple[str, str, str]:
        """Returns the IPC handle, "" as the name of a service, and why there is no handle."""
        try:
            return self._runtime.export_handle(self._device, self.base_ptr).hex(), "", ""
        except UnsupportedError as error:
            return "", "", str(error)

    def grant(self, device: int) -> None:
        """Does nothing: peer access of the devices is enough."""

    def tell(self, told: Callable[[int], None]) -> None:
        """Does nothing: peers reach all of it."""

    def await_peers(self, timeout_s: float) -> bool:
        """Returns True: peers reach all of it."""
        return True

    def close(self) -> None:
        self._runtime.free(self._device, self.base_ptr)


class GrowingMemory:
    """Chunks in a reserved range, handed out to the processes that map it.

    Args:
        runtime: of the device.
        device: its ordinal.
        capacity_bytes: that it may grow to; addresses alone are taken for it.
        token: by which other processes ask for it.

    Attributes:
        base_ptr, capacity_bytes: of the range.
        reached_bytes: so many from its start are mapped wherever this heap is.

    Raises:
        UnsupportedError: the driver refuses the range.
    """

    why_fixed = ""

    def __init__(
        self, runtime: DeviceRuntime, device: int, capacity_bytes: int, token: int
    ) -> None:
        self._runtime, self._device = runtime, device
        self._range = ChunkedRange(runtime, device, capacity_bytes)
        self._growing, self._guard = threading.Lock(), threading.Lock()
        self._service: ChunkService | None = None
        self._told: list[Callable[[int], None]] = []
        self.token = token
        self.base_ptr, self.capacity_bytes = self._range.base_ptr, self._range.size_bytes
        self.committed_bytes = self.reached_bytes = 0

    def grow(self, end_bytes: int) -> None:
        """Makes memory up to there, and waits a while for the processes that map it.

        Raises:
            MemoryError: the device has no room.
            UnsupportedError: the driver refuses.
        """
        with self._growing:
            if end_bytes <= self.committed_bytes:
                return
            needed = self._range.rounded(end_bytes - self.committed_bytes)
            wished = max(needed, self._range.rounded(min(GROWTH_BYTES, self.committed_bytes)))
            wished = min(wished, self.capacity_bytes - self.committed_bytes)
            try:
                self._range.create(wished)
            except MemoryError:
                if wished == needed:
                    raise
                self._range.create(needed)
            self.committed_bytes = self._range.mapped_bytes
            service = self._service
        if service is None:
            self.set_reached(self.committed_bytes)
        else:
            service.send_grown(self)
            service.await_readers(self, self.committed_bytes, GROWTH_WAIT_S)

    def export(self) -> tuple[str, str, str]:
        """Returns "" as the IPC handle, the name of the service that hands chunks out, and ""."""
        with self._growing:
            if self._service is None:
                self._service = offer(self)
            return "", self._service.name.hex(), ""

    def export_after(self, mapped_bytes: int) -> tuple[int, int]:
        """Returns the size of the chunk that begins there, and a new descriptor of it."""
        chunk = next(each for each in self._range.chunks if each.offset_bytes == mapped_bytes)
        return chunk.size_bytes, self._range.export(chunk)

    def grant(self, device: int) -> None:
        """Lets kernels of another device of this process use it.

        Raises:
            UnsupportedError: the driver refuses.
        """
        with self._growing:
            self._range.grant(device)

    def tell(self, told: Callable[[int], None]) -> None:
        """Calls ``told`` with ``reached_bytes``, now and whenever it has grown.

        After it has raised ReferenceError it is called no more.
        """
        with self._guard:
            self._told.append(told)
        told(self.reached_bytes)

    def set_reached(self, size_bytes: int) -> None:
        """Is told that all processes map so much of it; what they once map they keep."""
        with self._guard:
            told = list(self._told) if size_bytes > self.reached_bytes else []
        for each in told:
            try:
                each(size_bytes)
            except ReferenceError:
                with self._guard, suppress(ValueError):
                    self._told.remove(each)
        with self._guard:  # only now: who has awaited it may launch what relies on it
            self.reached_bytes = max(self.reached_bytes, size_bytes)

    def await_peers(self, timeout_s: float) -> bool:
        """Waits until peers reach all of it; False: not in that time."""
        service = self._service
        if service is None or self.reached_bytes >= self.committed_bytes:
            return True
        return service.await_readers(self, self.committed_bytes, timeout_s)

    def close(self) -> None:
        if self._service is not None:
            self._service.withdraw(self)
        # Unlike cudaFree, the driver does not wait for work that uses the memory.
        with suppress(RuntimeError):  # a kernel has failed
            self._runtime.synchronize(self._device)
        self._range.close()


class PeerAllocation:
    """Another process's :class:`FixedMemory`, mapped for a device.

    Raises:
        UnsupportedError: the driver refuses.
    """

    def __init__(self, runtime: DeviceRuntime, device: int, handle: bytes) -> None:
        self._runtime, self._device = runtime, device
        self.base_ptr = runtime.open_handle(device, handle)

    def await_bytes(self, size_bytes: int, timeout_s: float) -> bool:
        """Returns True: everything is mapped."""
        return True

    def close(self) -> None:
        self._runtime.close_handle(self._device, self.base_ptr)


class PeerChunks:
    """Another process's :class:`GrowingMemory`, mapped for a device, with all that it gets later.

    What is mapped stays readable when that process has ended.

    Args:
        runtime: of the device.
        device: its ordinal.
        service: the name of that process's service, and its pid.
        token: of the heap.
        capacity_bytes: of the heap.

    Raises:
        UnsupportedError: the driver refuses.
        OSError: that process does not answer, or gives no chunk.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        service: tuple[bytes, int],
        token: int,
        capacity_bytes: int,
    ) -> None:
        name, pid = service
        self._runtime, self._device = runtime, device
        self._lock = threading.Lock()
        self._closed = False
        self._range = ChunkedRange(runtime, device, capacity_bytes)
        self.base_ptr = self._range.base_ptr
        self._connection: socket.socket | None = None
        self._service: ChunkService | None = None
        try:
            self._connection = connect(name, pid, token, MAPPING_WAIT_S)
            there_bytes = 1
            while self._range.mapped_bytes < there_bytes:
                sent = receive(self._connection)
                if sent is None:
                    raise OSError(0, "that process has no such heap any more")
                there_bytes = sent.heap_bytes
                self._map(sent)
            self._service = follow(self._connection, self._map_next)
        except BaseException:
            self.close()
            raise

    def _map(self, sent: Sent) -> None:
        try:
            end_bytes = sent.offset_bytes + sent.size_bytes
            if (
                sent.offset_bytes != self._range.mapped_bytes
                or sent.size_bytes != self._range.rounded(sent.size_bytes)
                or not sent.offset_bytes < end_bytes <= self._range.size_bytes
            ):
                raise OSError(0, f"a chunk of {sent.size_bytes} bytes at {sent.offset_bytes}")
            self._range.adopt(sent.descriptor, sent.size_bytes)
        finally:
            os.close(sent.descriptor)
        if self._connection is not None:
            acknowledge(self._connection, self._range.mapped_bytes)

    def _map_next(self) -> bool:
        """Maps a chunk that has come; False: there will be no more."""
        with self._lock:
            if self._closed or self._connection is None:
                return False
            try:
                sent = receive(self._connection)
                if sent is not None:
                    self._map(sent)
            except BlockingIOError:
                return True
            except (OSError, RingcommError):
                # What is not acknowledged is not lent to this process, whose connection must stay:
                # its end would mean that this process maps nothing any more.
                return False
            return sent is not None

    def await_bytes(self, size_bytes: int, timeout_s: float) -> bool:
        """Waits until so much from the start is mapped; False: not in that time."""
        end = time.monotonic() + timeout_s
        while self._range.mapped_bytes < size_bytes:
            if time.monotonic() >= end:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._service is not None and self._connection is not None:
                self._service.leave(self._connection)
            elif self._connection is not None:
                self._connection.close()
            self._await_readers()
            self._range.close()

    def _await_readers(self) -> None:
        """Waits for what the current stream still does with this memory.

        The driver does not. Kernels of communicators have ended before; not all devices' work is
        awaited, since some of it may wait for this thread.
        """
        runtime, device = self._runtime, self._device
        stream = runtime.current_stream(device)
        if not runtime.is_capturing(device, stream):
            with suppress(RuntimeError):  # a kernel has failed
                runtime.record_event(device, stream).synchronize()
