# SPDX-License-Identifier: Apache-2.0
"""The memory of a device heap: chunks that are added when the heap is full, or one allocation.

Chunks use the CUDA driver's virtual memory: the heap reserves addresses for its largest size, and
maps memory to them from the start, chunk by chunk. So an address and its offset from the base stay
valid while the heap lives. Each peer process reserves a range of its own and maps the same chunks
at the same offsets. Drivers without virtual memory get one allocation.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.cuda.virtual_memory import ChunkedRange, MappedChunk
from ringcomm.errors import UnsupportedError
from ringcomm.memory.chunk_service import (
    ChunkService,
    Sent,
    acknowledge,
    connect,
    follow,
    offer,
    reason_of,
    receive,
    refuse,
)
from ringcomm.process import Deadline

# A heap below this size, in bytes, doubles when it grows, so that a single communicator takes
# little memory; a larger heap grows by at least this size. The size was not tuned on a GPU.
GROWTH_BYTES = 256 << 20
# Seconds for which an allocation waits until all processes have mapped the heap's new chunks.
# Mapping a chunk takes one message each way if no driver is busy. Until it is mapped, kernels copy
# the chunk's data.
GROWTH_WAIT_S = 2.0
# Seconds for which a process waits for the chunks of a running peer.
MAPPING_WAIT_S = 30.0

_SLOWER = (
    "calls copy other data through staging, which takes longer, and calls that cannot use staging "
    "raise HeapError. Free memory of the device, or set RINGCOMM_CUDA_HEAP=fixed on all ranks"
)


class FixedMemory:
    """Memory of a heap that does not grow: one allocation by the runtime.

    Args:
        runtime: runtime of the device.
        device: ordinal of the device.
        capacity_bytes: size of the allocation.
        why_fixed: the reason that the heap does not grow, for messages.
    """

    def __init__(
        self, runtime: DeviceRuntime, device: int, capacity_bytes: int, why_fixed: str
    ) -> None:
        self._runtime, self._device = runtime, device
        self.capacity_bytes = self.committed_bytes = self.reached_bytes = capacity_bytes
        self.why_fixed = why_fixed
        self.refusals: Sequence[str] = ()
        self.base_ptr = runtime.allocate(device, capacity_bytes)

    def grow(self, end_bytes: int) -> None:
        """Does nothing: all memory is allocated already."""

    def export(self) -> tuple[str, str, str]:
        """Returns the IPC handle ("" on error), "" as the service's name, and the error or ""."""
        try:
            return self._runtime.export_handle(self._device, self.base_ptr).hex(), "", ""
        except UnsupportedError as error:
            return "", "", str(error)

    def grant(self, device: int) -> None:
        """Does nothing: peer access between the devices is enough."""

    def on_reached(self, callback: Callable[[int], None]) -> None:
        """Does nothing: peers map all of the memory at once."""

    def bindable_bytes(self, unit_bytes: int) -> int:
        """Returns 0: this memory has no chunks that could be bound to a multicast object."""
        return 0

    def on_grown(self, callback: Callable[[Sequence[MappedChunk]], None]) -> None:
        """Does nothing: this memory has no chunks."""

    def await_peers(self, timeout_s: float) -> bool:
        """Returns True: peers map all of the memory at once."""
        return True

    def close(self) -> None:
        self._runtime.free(self._device, self.base_ptr)


class GrowingMemory:
    """Memory of a heap that grows: chunks in a reserved range, shared with peer processes.

    Args:
        runtime: runtime of the device.
        device: ordinal of the device.
        capacity_bytes: the largest size; only addresses are reserved for it.
        token: identifies this heap in the requests of other processes.

    Attributes:
        base_ptr, capacity_bytes: first address and size of the range.
        committed_bytes: bytes from the start that have memory.
        reached_bytes: bytes from the start that all readers of this heap have mapped.

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
        self._callbacks: list[Callable[[int], None]] = []
        self._growth_callbacks: list[Callable[[Sequence[MappedChunk]], None]] = []
        self.token = token
        self.base_ptr, self.capacity_bytes = self._range.base_ptr, self._range.size_bytes
        self.committed_bytes = self.reached_bytes = 0

    def grow(self, end_bytes: int) -> None:
        """Adds chunks up to offset ``end_bytes``; waits up to GROWTH_WAIT_S until peers map them.

        Raises:
            MemoryError: the device has too little free memory.
            UnsupportedError: the driver refuses.
            Warning: with -W error, a callback of :meth:`on_grown` has warned, or this process
                cannot send the chunk. The heap has grown.
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
            service, refused = self._service, None
            # Under the lock: no thread of this process uses the chunk before it is bound.
            try:
                self._tell_grown()
            except Warning as warning:  # a chunk is not bound, and warnings are errors (-W error)
                refused = warning
        # The chunk exists in any case, so peers must map it.
        if service is None:
            self.set_reached(self.committed_bytes)
        else:
            try:
                service.send_grown(self)
            except Warning as warning:  # a chunk cannot be exported (-W error)
                refused = warning
            service.await_readers(self, self.committed_bytes, GROWTH_WAIT_S)
        if refused is not None:
            raise refused

    def export(self) -> tuple[str, str, str]:
        """Returns "" (no IPC handle), the name of the chunks' service, and "" (no error)."""
        with self._growing:
            if self._service is None:
                self._service = offer(self)
            return "", self._service.name.hex(), ""

    def export_after(self, mapped_bytes: int) -> tuple[int, int]:
        """Returns the size and a new descriptor of the chunk at offset ``mapped_bytes``."""
        chunk = next(each for each in self._range.chunks if each.offset_bytes == mapped_bytes)
        return chunk.size_bytes, self._range.export(chunk)

    def grant(self, device: int) -> None:
        """Lets kernels of another device of this process use the memory.

        Raises:
            UnsupportedError: the driver refuses.
        """
        with self._growing:
            self._range.grant(device)

    def on_reached(self, callback: Callable[[int], None]) -> None:
        """Calls ``callback`` with ``reached_bytes``, now and after each growth.

        The calls end when ``callback`` raises ReferenceError.
        """
        with self._guard:
            self._callbacks.append(callback)
        callback(self.reached_bytes)

    def bindable_bytes(self, unit_bytes: int) -> int:
        """Returns how many bytes of the range can be bound to a multicast object.

        Returns 0 if chunks are not whole units of the object.
        """
        return 0 if self._range.granularity_bytes % unit_bytes else self.capacity_bytes

    def on_grown(self, callback: Callable[[Sequence[MappedChunk]], None]) -> None:
        """Calls ``callback`` with all chunks, now and after each growth.

        The calls end when ``callback`` raises ReferenceError.
        """
        with self._growing:
            self._growth_callbacks.append(callback)
            self._tell_grown()

    def _tell_grown(self) -> None:
        for each in list(self._growth_callbacks):
            try:
                each(self._range.chunks)
            except ReferenceError:
                self._growth_callbacks.remove(each)

    def set_reached(self, size_bytes: int) -> None:
        """Records that all readers map the first ``size_bytes``; readers never unmap a chunk."""
        with self._guard:
            callbacks = list(self._callbacks) if size_bytes > self.reached_bytes else []
        for each in callbacks:
            try:
                each(size_bytes)
            except ReferenceError:
                with self._guard, suppress(ValueError):
                    self._callbacks.remove(each)
        with self._guard:  # set last, as threads that wait for it rely on the callbacks' effects
            self.reached_bytes = max(self.reached_bytes, size_bytes)

    def tell_refused(self, refusal: str) -> None:
        """Warns that a process will never map more of this memory; the chunk service calls it."""
        warnings.warn(
            f"the heap on device {self._device} has grown, but {refusal}. Peers read only its "
            f"first {self.reached_bytes} bytes in place: {_SLOWER}",
            RuntimeWarning,
            stacklevel=2,
        )

    @property
    def refusals(self) -> Sequence[str]:
        """The reasons for which peers will never map more of this memory; empty if all may."""
        return self._service.refusals(self) if self._service is not None else ()

    def await_peers(self, timeout_s: float) -> bool:
        """Waits until peers map all of the memory.

        Returns False after ``timeout_s`` seconds, and if a peer will never map it (``refusals``).
        """
        service = self._service
        if service is None or self.reached_bytes >= self.committed_bytes:
            return True
        return not self.refusals and service.await_readers(self, self.committed_bytes, timeout_s)

    def close(self) -> None:
        if self._service is not None:
            self._service.withdraw(self)
        # Unlike cudaFree, the driver's unmapping does not wait for work that uses the memory.
        with suppress(RuntimeError):  # a kernel failed
            self._runtime.synchronize(self._device)
        self._range.close()


class PeerAllocation:
    """Another process's :class:`FixedMemory`, mapped for a device.

    Raises:
        UnsupportedError: the driver refuses.
    """

    refusal = ""

    def __init__(self, runtime: DeviceRuntime, device: int, handle: bytes) -> None:
        self._runtime, self._device = runtime, device
        self.base_ptr = runtime.open_handle(device, handle)

    def await_bytes(self, size_bytes: int, timeout_s: float) -> bool:
        """Returns True: everything is mapped."""
        return True

    def close(self) -> None:
        self._runtime.close_handle(self._device, self.base_ptr)


class OfferedChunks(NamedTuple):
    """A peer's :class:`GrowingMemory`, as the peer's handle describes it.

    Attributes:
        service, pid: the name of the chunk service of the peer's process, and the process's pid.
        token, capacity_bytes: token and largest size of the heap.
        owner, reader: the peer and this rank, for messages.
    """

    service: bytes
    pid: int
    token: int
    capacity_bytes: int
    owner: str
    reader: str


class PeerChunks:
    """Another process's :class:`GrowingMemory`, mapped for a device, including its later chunks.

    Mapped chunks stay readable after the other process has ended.

    Args:
        runtime: runtime of the device.
        device: ordinal of the device.
        offered: the memory.

    Attributes:
        base_ptr: address of the memory in this process.
        refusal: the reason for which no later chunk will be mapped; "" if later chunks may be.

    Raises:
        UnsupportedError: the driver refuses.
        OSError: the other process does not answer, or sends no chunk.
    """

    def __init__(self, runtime: DeviceRuntime, device: int, offered: OfferedChunks) -> None:
        self._runtime, self._device, self._offered = runtime, device, offered
        self._lock = threading.Lock()
        self._closed = False
        self.refusal = ""
        self._range = ChunkedRange(runtime, device, offered.capacity_bytes)
        self.base_ptr = self._range.base_ptr
        self._connection: socket.socket | None = None
        self._service: ChunkService | None = None
        try:
            self._connection = connect(offered.service, offered.pid, offered.token, MAPPING_WAIT_S)
            there_bytes = 1
            while self._range.mapped_bytes < there_bytes:
                sent = receive(self._connection)
                if sent is None:
                    raise OSError(0, "the process does not have this heap any more")
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
                raise OSError(
                    0, f"a chunk of {sent.size_bytes} bytes at {sent.offset_bytes} does not fit"
                )
            self._range.adopt(sent.descriptor, sent.size_bytes)
        finally:
            os.close(sent.descriptor)
        if self._connection is not None:
            acknowledge(self._connection, self._range.mapped_bytes)

    def _map_next(self) -> bool:
        """Maps a received chunk; returns False if no more chunks can follow.

        Raises:
            Warning: with -W error, the chunk cannot be mapped.
        """
        with self._lock:
            if self._closed or self._connection is None or self.refusal:
                return False
            try:
                sent = receive(self._connection)
                if sent is not None:
                    self._map(sent)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False  # the other process has ended
            except (OSError, RuntimeError) as error:
                # Without an acknowledgement, the heap's owner treats this chunk as not mapped here.
                # Keep the connection open: its end would mean that no chunk is mapped here.
                mapped_bytes, self.refusal = self._range.mapped_bytes, reason_of(error)
                reader = self._offered.reader
                refuse(
                    self._connection,
                    mapped_bytes,
                    f"{reader} cannot map a chunk of it: {self.refusal}",
                )
            else:
                return sent is not None
        # Without the lock: a filter of warnings may run any code.
        warnings.warn(
            f"{self._offered.reader}: the heap of {self._offered.owner} has grown, but a new chunk "
            f"of it cannot be mapped: {self.refusal}. This process reads only its first "
            f"{mapped_bytes} bytes in place: {_SLOWER}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False

    def await_bytes(self, size_bytes: int, timeout_s: float) -> bool:
        """Waits until the first ``size_bytes`` are mapped.

        Returns False after ``timeout_s``, and if they never will be (``refusal``).
        """
        deadline = Deadline(timeout_s)
        while self._range.mapped_bytes < size_bytes:
            if self.refusal or deadline.is_over():
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
        """Waits until the current stream no longer uses this memory, since unmapping does not wait.

        Communicators' kernels have ended already. This method does not wait for other streams,
        since their work may wait for this thread.
        """
        runtime, device = self._runtime, self._device
        stream = runtime.current_stream(device)
        if not runtime.is_capturing(device, stream):
            with suppress(RuntimeError):  # a kernel failed
                runtime.record_event(device, stream).synchronize()
