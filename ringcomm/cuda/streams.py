"""CUDA streams, events and captures, shared with torch."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ringcomm.cuda.driver import CudaDriver
from ringcomm.cuda.runtime import CONNECTIONS_VARIABLE, DEFAULT_CONNECTIONS, Event, Stream
from ringcomm.errors import RingcommError

_EVENT_DISABLE_TIMING = 2
_HIGH_PRIORITY, _USUAL_PRIORITY = -1, 0
# Of our own small copies: the greatest of an H100, which torch gives no stream. So these copies
# have a hardware queue that no other stream shares, and nobody's waiting work holds them back. A
# driver with fewer priorities takes it for its greatest.
_SERVICE_PRIORITY = -5


def _torch_stream(device: int, handle: int) -> torch.cuda.Stream:
    """The stream of a handle, 0 for the default one.

    ``torch.cuda.ExternalStream`` would make a new stream of torch's pool of handle 0, which is in
    no order with the default stream (https://github.com/pytorch/pytorch/issues/182960).
    """
    return torch.cuda.get_stream_from_external(handle, device)


# What torch names a stream by: its id, the device's index and type.
StreamKey = tuple[int, int, int]


def _key_of(stream: torch.cuda.Stream) -> StreamKey:
    return stream.stream_id, stream.device_index, stream.device_type


class CudaStream:
    """A stream that no one else uses; it returns to its pool with this object.

    torch's own pool has 32 streams per device, which the 33rd user shares with the first: two
    communicators on one stream would wait for each other where none should. And a handle must
    stay usable for good, see ``runtime.Stream``.
    """

    def __init__(self, device: int, handle: int, pool: deque[int]) -> None:
        # First what __del__ reads, which also runs when the rest of this raises.
        self.handle = handle
        self._pool = pool
        self.device = device
        self.torch_stream = _torch_stream(device, handle)
        self.key = _key_of(self.torch_stream)

    def __del__(self) -> None:
        self._pool.append(self.handle)


class CudaEvent:
    """An event without timing; it returns to its pool, so that its end calls no driver."""

    __slots__ = ("_pool", "_streams", "handle")

    def __init__(self, streams: CudaStreams, handle: int, pool: deque[int]) -> None:
        self.handle = handle
        self._streams = streams
        self._pool = pool

    def query(self) -> bool:
        try:
            return self._streams.has_passed(self.handle)
        except RuntimeError as error:
            raise RingcommError(str(error)) from error

    def synchronize(self) -> None:
        self._streams.await_event(self.handle)

    def __del__(self) -> None:
        self._pool.append(self.handle)


class _Here(threading.local):
    """The device that is surely current in this thread, since ringcomm has entered it."""

    device: int | None = None


class _Inside:
    """Has a device, and a stream of it if one is given, be current in this thread.

    ``torch.cuda.device`` and ``torch.cuda.stream`` do the same, and take longer than the rest of a
    call (docs/performance.md). Inside a device there is nothing left to enter.
    """

    __slots__ = (
        "_cuda",
        "_device",
        "_device_before",
        "_here",
        "_outer",
        "_stream",
        "_stream_before",
    )

    def __init__(self, cuda: Any, here: _Here, device: int, stream: StreamKey | None) -> None:
        self._cuda, self._here = cuda, here
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        here, device = self._here, self._device
        self._outer = here.device
        if self._outer != device:
            self._device_before = torch._C._cuda_exchangeDevice(device)
            try:
                # torch calls the driver only where the device changes: a thread that has made no
                # CUDA call would be left without a context, in which a launch fails.
                self._cuda.setDevice(device)
            except BaseException:
                torch._C._cuda_maybeExchangeDevice(self._device_before)
                raise
            # On the stream of a rank's thread runs the user's code, which may change the device.
            here.device = device if self._stream is None else None
        if self._stream is not None:
            self._stream_before = torch._C._cuda_getCurrentStream(device)
            torch._C._cuda_setStream(*self._stream)

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            torch._C._cuda_setStream(*self._stream_before)
        if self._outer != self._device:
            self._here.device = self._outer
            torch._C._cuda_maybeExchangeDevice(self._device_before)


class CudaStreams:
    """The stream half of ``CudaRuntime``.

    What follows acts on the current device, as CuPy's functions do. Each method enters its device
    unless its caller has: a call of a communicator makes up to eight of these, and enters once.
    """

    def __init__(self, cuda: Any, driver: CudaDriver) -> None:
        self._streams_made: Counter[int] = Counter()
        self._cuda = cuda  # cupy.cuda.runtime
        self._driver = driver
        self._here = _Here()
        # True if an event has passed; allowed while a graph is captured.
        self.has_passed = driver.has_passed
        self._lock = threading.Lock()
        self._idle_streams: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._idle_events: dict[int, deque[int]] = defaultdict(deque)
        self._service_streams: dict[int, int] = {}

    def on_device(self, device: int) -> AbstractContextManager[None]:
        return _Inside(self._cuda, self._here, device, None)

    @contextmanager
    def _beside_captures(self, device: int) -> Iterator[None]:
        with self.on_device(device), self._driver.outside_captures():
            yield

    def beside_captures(self, device: int) -> AbstractContextManager[None]:
        return self._beside_captures(device)

    def current_stream(self, device: int) -> int:
        # Not torch.cuda.current_stream(), which makes an object and takes 50 times as long.
        return torch._C._cuda_getCurrentRawStream(device)

    def make_stream(self, device: int, high_priority: bool = False) -> CudaStream:
        priority = _HIGH_PRIORITY if high_priority else _USUAL_PRIORITY
        pool = self._idle_streams[device, priority]
        try:
            handle = pool.popleft()
        except IndexError:
            with self._beside_captures(device):
                handle = self._driver.make_stream(priority)
            self._streams_made[device] += not high_priority
        return CudaStream(device, handle, pool)

    def stream_queues(self, device: int) -> tuple[int, int]:
        setting = os.environ.get(CONNECTIONS_VARIABLE, "")
        queues = int(setting) if setting.isdecimal() else DEFAULT_CONNECTIONS
        return queues, self._streams_made[device] + 1  # the default stream

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, CudaStream)
        return _Inside(self._cuda, self._here, stream.device, stream.key)

    def call_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        key = _key_of(_torch_stream(device, stream))
        with _Inside(self._cuda, self._here, device, key):
            function()

    def record_event(self, device: int, stream: int) -> CudaEvent:
        if self._here.device != device:
            with self.on_device(device):
                return self.record_event(device, stream)
        pool = self._idle_events[device]
        try:
            handle = pool.popleft()
        except IndexError:
            handle = self._cuda.eventCreateWithFlags(_EVENT_DISABLE_TIMING)
        event = CudaEvent(self, handle, pool)
        self._cuda.eventRecord(handle, stream)
        return event

    def wait_event(self, device: int, stream: int, event: Event) -> None:
        if self._here.device != device:
            with self.on_device(device):
                return self.wait_event(device, stream, event)
        assert isinstance(event, CudaEvent)
        self._cuda.streamWaitEvent(stream, event.handle)

    def await_event(self, event: int) -> None:
        with self._driver.outside_captures():
            self._cuda.eventSynchronize(event)

    def keep_for_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        tensor.record_stream(stream.torch_stream)

    def is_capturing(self, device: int, stream: int | None = None) -> bool:
        if self._here.device != device:
            with self.on_device(device):
                return self.is_capturing(device, stream)
        handle = self.current_stream(device) if stream is None else stream
        try:
            return bool(self._cuda.streamIsCapturing(handle))
        except RuntimeError:
            # The capture is broken, or this is the legacy default stream and another one captures
            # that it must not touch: no event can be recorded here now.
            return True

    def synchronize(self, device: int) -> None:
        with self._beside_captures(device):
            torch.cuda.synchronize(device)

    def _service_stream(self, device: int) -> int:
        """The stream of our own copies: on the default stream they would wait for kernels."""
        with self._lock:
            if device not in self._service_streams:
                self._service_streams[device] = self._driver.make_stream(_SERVICE_PRIORITY)
            return self._service_streams[device]
