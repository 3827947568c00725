"""Keeps the communicators of one process on one device from blocking each other.

Kernels of a collective wait for peers, so all blocks that wait at a time must fit on the device
together. Of the launches under way each stream counts the largest, since those of one stream follow
each other. A launch that does not fit beside them is put behind the oldest whose end makes room, by
events, on the device. Messages are in no such order, since a send may wait for a receive that comes
after a collective: from a communicator's first message on, room for those of all its ranks here is
kept beside the collectives. Ranks that launch the collectives of several communicators in different
orders then get as much concurrency as the device has, and past that the deadline (docs/cuda.md).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ringcomm.errors import UnsupportedError
from ringcomm.memory.device_runtime import DeviceRuntime, Event


@dataclass(frozen=True)
class Blocks:
    """What a communicator may have on the device at once: its ranks' collective, and messages."""

    collective: int
    messages: int


@dataclass(frozen=True)
class _UnderWay:
    owner: object
    blocks: int
    stream: int
    done: Event


def _gains(launches: Iterable[_UnderWay]) -> list[tuple[_UnderWay, int]]:
    """Of ``launches``, oldest first, those whose end frees blocks, and how many.

    The end of one that a launch as large follows on its stream frees none.
    """
    taken: dict[int, int] = {}
    gains = []
    for each in reversed(list(launches)):
        later = taken.get(each.stream, 0)
        if each.blocks > later:
            gains.append((each, each.blocks - later))
            taken[each.stream] = each.blocks
    return gains[::-1]


class DeviceOrder:
    """The launches of one device of this process."""

    def __init__(self, runtime: DeviceRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._guard = threading.Lock()
        self._members: dict[int, Blocks] = {}
        self._sending: set[int] = set()
        self._capacity = 0
        self._under_way: deque[_UnderWay] = deque()

    def join(self, owner: object, blocks: Blocks, capacity: int, operation: str) -> None:
        """Registers a communicator whose launches take up to ``blocks``.

        Raises:
            UnsupportedError: one launch alone could not be co-resident.
        """
        if blocks.collective > capacity:
            raise UnsupportedError(
                f"{operation}: needs {blocks.collective} co-resident blocks, but device "
                f"{self._device} runs {capacity} of them at once. Pass CommOptions(channels=...) "
                f"of at most {capacity} divided by the ranks of this process on the device"
            )
        with self._guard:
            self._members[id(owner)] = blocks
            self._capacity = capacity

    def leave(self, owner: object) -> None:
        with self._guard:
            self._members.pop(id(owner), None)
            self._sending.discard(id(owner))

    def sends(self, owner: object, operation: str) -> None:
        """Keeps room for the messages of ``owner`` from here on; called before each of them.

        Raises:
            UnsupportedError: they would not fit beside a collective of its own.
        """
        if id(owner) in self._sending:
            return
        with self._guard:
            blocks = self._members.get(id(owner))
            if blocks is None:  # another rank of it has closed
                return
            if blocks.collective + blocks.messages > self._capacity:
                raise UnsupportedError(
                    f"{operation}: messages need {blocks.messages} blocks beside the "
                    f"{blocks.collective} of a collective, but device {self._device} runs "
                    f"{self._capacity} of them at once, and a send may wait for a receive that "
                    "comes after a collective. Pass a smaller CommOptions(channels=...), or none"
                )
            self._sending.add(id(owner))

    def before(self, owner: object, blocks: int, stream: int) -> None:
        """Puts ``stream`` behind what must end before ``blocks`` more blocks fit."""
        if len(self._members) < 2 or self._runtime.is_capturing(self._device, stream):
            # Alone, or part of a graph, whose launches follow each other on its streams.
            return
        with self._guard:
            self._under_way = deque(each for each in self._under_way if not each.done.query())
            gains = _gains(
                each
                for each in self._under_way
                if each.owner is not owner and each.stream != stream
            )
            kept = sum(self._members[each].messages for each in self._sending)
            free = self._capacity - kept - sum(gain for _, gain in gains)
            for each, gain in gains:
                if free >= blocks:
                    break
                self._runtime.wait_event(self._device, stream, each.done)
                free += gain

    def after(self, owner: object, blocks: int, stream: int) -> None:
        """Notes a launch that ``stream`` has just got."""
        if len(self._members) < 2 or self._runtime.is_capturing(self._device, stream):
            return
        done = self._runtime.record_event(self._device, stream)
        with self._guard:
            self._under_way.append(_UnderWay(owner, blocks, stream, done))


_guard = threading.Lock()
_orders: dict[tuple[int, int], DeviceOrder] = {}


def order_of(runtime: DeviceRuntime, device: int) -> DeviceOrder:
    """The one of ``device``."""
    with _guard:
        key = (id(runtime), device)
        if key not in _orders:
            _orders[key] = DeviceOrder(runtime, device)
        return _orders[key]
