"""What surrounds a rank on a device that runs as a thread beside others."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ringcomm.comm.calls import Turn
from ringcomm.memory.device_runtime import DeviceRuntime, Stream

__all__ = ["StreamTurn"]


class StreamTurn(Turn):
    """A rank's own stream: on one stream, a rank would wait for what another is about to do."""

    def __init__(self, place: tuple[DeviceRuntime, int], stream: Stream) -> None:
        self._runtime, self._device = place
        self._stream = stream
        self._follow(stream.handle, self._runtime.current_stream(self._device))

    def _follow(self, stream: int, leader: int) -> None:
        with self._runtime.on_device(self._device):
            behind = self._runtime.record_event(self._device, leader)
            self._runtime.wait_event(self._device, stream, behind)

    def taken(self) -> AbstractContextManager[None]:
        return self._runtime.on_stream(self._stream)

    def rejoin(self) -> None:
        self._follow(self._runtime.current_stream(self._device), self._stream.handle)
