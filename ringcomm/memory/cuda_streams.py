"""CUDA streams, events and captures, shared with torch."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ringcomm.memory.cuda_driver import CudaDriver
from ringcomm.memory.device_runtime import Event, Stream

_EVENT_DISABLE_TIMING = 2
_HIGH_PRIORITY, _USUAL_PRIORITY = -1, 0


def _torch_stream(device: int, handle: int) -> torch.cuda.Stream:
    """The stream of a handle, 0 for the default one.

    ``torch.cuda.ExternalStream`` would make a new stream of torch's pool of handle 0, which is in
    no order with the default stream (https://github.com/pytorch/pytorch/issues/182960).
    """
    return torch.cuda.get_stream_from_external(handle, device)


class CudaStream:
    """A stream that no one else uses; it returns to its pool with this object.

    torch's own pool has 32 streams per device, which the 33rd user shares with the first: two
    communicators on one stream would wait for each other where none should. And a handle must
    stay usable for good, see ``device_runtime.Stream``.
    """

    def __init__(self, device: int, handle: int, pool: deque[int]) -> None:
        self.handle = handle
        self.torch_stream = _torch_stream(device, handle)
        self._pool = pool

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
        return self._streams.query(self.handle)

    def synchronize(self) -> None:
        self._streams.await_event(self.handle)

    def __del__(self) -> None:
        self._pool.append(self.handle)


class CudaStreams:
    """The stream half of ``CudaRuntime``."""

    def __init__(self, cuda: Any, driver: CudaDriver) -> None:
        self._cuda = cuda  # cupy.cuda.runtime
        self._driver = driver
        self._lock = threading.Lock()
        self._idle_streams: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._idle_events: dict[int, deque[int]] = defaultdict(deque)
        self._service_streams: dict[int, int] = {}

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        with torch.cuda.device(device):
            # torch calls the driver only where the device changes: a thread that has made no CUDA
            # call would be left without a context, in which a driver call such as a launch fails.
            self._cuda.setDevice(device)
            yield

    @contextmanager
    def _beside_captures(self, device: int) -> Iterator[None]:
        with self.on_device(device), self._driver.outside_captures():
            yield

    def current_stream(self, device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def make_stream(self, device: int, high_priority: bool = False) -> CudaStream:
        priority = _HIGH_PRIORITY if high_priority else _USUAL_PRIORITY
        pool = self._idle_streams[device, priority]
        try:
            handle = pool.popleft()
        except IndexError:
            with self._beside_captures(device):
                handle = self._driver.make_stream(priority)
        return CudaStream(device, handle, pool)

    def on_stream(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream.torch_stream)

    def call_on_stream(self, device: int, stream: int, function: Callable[[], None]) -> None:
        with self.on_device(device), torch.cuda.stream(_torch_stream(device, stream)):
            function()

    def record_event(self, device: int, stream: int) -> CudaEvent:
        pool = self._idle_events[device]
        with self.on_device(device):
            try:
                handle = pool.popleft()
            except IndexError:
                handle = self._cuda.eventCreateWithFlags(_EVENT_DISABLE_TIMING)
            event = CudaEvent(self, handle, pool)
            self._cuda.eventRecord(handle, stream)
        return event

    def wait_event(self, device: int, stream: int, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        with self.on_device(device):
            self._cuda.streamWaitEvent(stream, event.handle)

    def query(self, event: int) -> bool:
        """Whether the event has passed; allowed while a graph is captured."""
        with self._driver.outside_captures():
            return self._driver.has_passed(event)

    def await_event(self, event: int) -> None:
        with self._driver.outside_captures():
            self._cuda.eventSynchronize(event)

    def keep_for_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        tensor.record_stream(stream.torch_stream)

    def is_capturing(self, device: int, stream: int | None = None) -> bool:
        handle = self.current_stream(device) if stream is None else stream
        with self.on_device(device):
            try:
                return bool(self._cuda.streamIsCapturing(handle))
            except RuntimeError:
                # The capture is broken, or this is the legacy default stream and another one
                # captures that it must not touch: no event can be recorded here now.
                return True

    def synchronize(self, device: int) -> None:
        with self._beside_captures(device):
            torch.cuda.synchronize(device)

    def _service_stream(self, device: int) -> int:
        """The stream of our own copies: on the default stream they would wait for kernels."""
        with self._lock:
            if device not in self._service_streams:
                self._service_streams[device] = self._driver.make_stream(_USUAL_PRIORITY)
            return self._service_streams[device]
