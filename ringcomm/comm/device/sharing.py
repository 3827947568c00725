# SPDX-License-Identifier: Apache-2.0
"""Sharing of one device by communicators and ranks: the order of kernels, and joint launches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from weakref import WeakValueDictionary

from ringcomm import _native
from ringcomm.comm.device.triton import TritonLaunch
from ringcomm.cuda.runtime import DeviceRuntime, Event
from ringcomm.errors import UnsupportedError
from ringcomm.process import Deadline

__all__ = [
    "Blocks",
    "DeviceOrder",
    "JointLaunch",
    "Prepared",
    "joint_launch_of",
    "launch_prepared",
    "order_of",
]

# A call of one rank, ready to be launched.
Prepared = _native.DeviceComm | TritonLaunch


def launch_prepared(prepared: Sequence[Prepared], stream: int) -> None:
    """Launches calls of one kind, made by ranks on one device, in one launch on ``stream``."""
    first = prepared[0]
    if isinstance(first, TritonLaunch):
        first.launch_with(cast(Sequence[TritonLaunch], prepared[1:]), stream)
    else:
        _native.launch(cast(list[_native.DeviceComm], prepared), stream)


# The communicators of this process on a device, and a check that their blocks fit. The native
# LaunchLedger orders their launches (kernels/cuda/launch_ledger.h, which says why). Messages
# reserve blocks of their own: a communicator that does not fit beside the reserved blocks is
# refused when it is built; messages that do not fit are refused at the first message.


@dataclass(frozen=True)
class Blocks:
    """The most blocks that a communicator's collective, and its messages, use on the device."""

    collective: int
    messages: int


class DeviceOrder:
    """Orders the launches of this process on one device."""

    def __init__(self, runtime: DeviceRuntime, device: int, driver: _native.Driver) -> None:
        self._runtime = runtime
        self._device = device
        self._guard = threading.Lock()
        self._members: dict[int, Blocks] = {}
        self._ranks: Counter[int] = Counter()  # number of ranks in this process, by member
        self._sending: set[int] = set()
        self._capacity = 0
        self.ledger = _native.LaunchLedger(driver, device)

    def _tell_ledger(self) -> None:
        self.ledger.set_members(len(self._members), self._capacity, self._kept())

    def join(self, owner: object, blocks: Blocks, capacity: int, operation: str) -> None:
        """Registers a communicator whose launches take up to ``blocks``.

        Raises:
            UnsupportedError: the blocks of one launch do not fit on the device at once, alone or
                beside the blocks reserved for messages of other communicators.
        """
        if blocks.collective > capacity:
            raise UnsupportedError(
                f"{operation}: needs {blocks.collective} co-resident blocks, but device "
                f"{self._device} runs {capacity} of them at once. Pass CommOptions(channels=...) "
                f"of at most {capacity} divided by the ranks of this process on the device"
            )
        with self._guard:
            kept = self._kept()
            if blocks.collective + kept > capacity:
                raise UnsupportedError(
                    f"{operation}: needs {blocks.collective} co-resident blocks beside the {kept} "
                    f"that messages of other communicators may take, but device {self._device} "
                    f"runs {capacity} of them at once. Pass a smaller CommOptions(channels=...)"
                )
            self._members[id(owner)] = blocks
            self._ranks[id(owner)] += 1
            self._capacity = capacity
            self._tell_ledger()

    def leave(self, owner: object) -> None:
        with self._guard:
            self._ranks[id(owner)] -= 1
            if self._ranks[id(owner)] <= 0:
                del self._ranks[id(owner)]
                self._members.pop(id(owner), None)
                self._sending.discard(id(owner))
                self._tell_ledger()

    def _kept(self) -> int:
        """Returns the number of blocks that are reserved for messages."""
        return sum(self._members[each].messages for each in self._sending)

    def sends(self, owner: object, operation: str) -> None:
        """Reserves blocks for the messages of ``owner`` from now on; called before each message.

        Raises:
            UnsupportedError: these blocks, the largest collective of any communicator, and the
                messages of other communicators do not fit on the device together.
        """
        if id(owner) in self._sending:
            return
        with self._guard:
            blocks = self._members.get(id(owner))
            if blocks is None:  # the communicator has closed
                return
            largest = max(each.collective for each in self._members.values())
            kept = self._kept()
            if largest + kept + blocks.messages > self._capacity:
                others = f" and the {kept} blocks of other communicators' messages" if kept else ""
                raise UnsupportedError(
                    f"{operation}: messages need {blocks.messages} blocks in addition to the "
                    f"{largest} blocks of a collective{others}, but device {self._device} runs "
                    f"{self._capacity} of them at once. All must fit, since a send may wait for "
                    "a receive that comes after a collective. Pass a smaller CommOptions("
                    "channels=...) to the communicators of this device, or send by fewer of them"
                )
            self._sending.add(id(owner))
            self._tell_ledger()

    def before(self, owner: object, blocks: int, stream: int) -> None:
        """Makes ``stream`` wait until enough earlier launches ended to fit ``blocks`` blocks."""
        # In a graph, the capture's streams already order the launches.
        if not self._runtime.is_capturing(self._device, stream):
            self.ledger.before(id(owner), blocks, stream)

    def after(self, owner: object, blocks: int, stream: int) -> None:
        """Notes a launch that was just made on ``stream``."""
        if not self._runtime.is_capturing(self._device, stream):
            self.ledger.after(id(owner), blocks, stream)


_guard = threading.Lock()
_orders: dict[tuple[int, int], DeviceOrder] = {}


def order_of(runtime: DeviceRuntime, device: int, driver: _native.Driver) -> DeviceOrder:
    """Returns the object that orders the launches on ``device``; one per device."""
    with _guard:
        key = (id(runtime), device)
        if key not in _orders:
            _orders[key] = DeviceOrder(runtime, device, driver)
        return _orders[key]


# Kernels that wait for each other must run at the same time. Two launches on one device may run one
# after the other: on one stream (usually the legacy default stream), in one hardware queue, or
# because both together do not fit. The blocks of one launch run together if they fit on the device.
# So the ranks of a process on one device share one launch per call, which the last rank to arrive
# makes. Streams wait on events, and the host waits only for the other threads to arrive.

# The interval at which a waiting rank checks whether the missing ranks can still arrive.
LOOK_S = 0.05


# Called with the missing ranks and the seconds waited so far; raises to give up.
Look = Callable[[Sequence[int], float], None]


class _Arrival(NamedTuple):
    """A rank's prepared call, its stream, and an event at the call's position in the stream."""

    prepared: Prepared
    stream: int
    ready: Event


@dataclass(eq=False)
class _SharingRound:
    """One joint launch: the ranks that have arrived, and its outcome."""

    arrived: dict[int, _Arrival] = field(default_factory=dict)
    ended: bool = False
    error: BaseException | None = None


class JointLaunch:
    """Makes one launch for the calls of a communicator's ranks in this process on one device."""

    def __init__(
        self, runtime: DeviceRuntime, device: int, ranks: Sequence[int], order: DeviceOrder
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._ranks = tuple(ranks)
        self._order = order
        # A separate stream, so that calls run in order even if ranks use different streams.
        self._stream = runtime.make_stream(device)
        self._changed = threading.Condition()
        self._round = _SharingRound()
        self._waited_s: dict[int, float] = {}
        self._left: set[int] = set()

    def launch(self, rank: int, prepared: Prepared, stream: int, look: Look) -> None:
        """Launches the prepared call of ``rank`` together with the calls of all other ranks.

        Args:
            rank: the caller's rank.
            prepared: the caller's call.
            stream: the call runs after the work queued on it now, and before its later work.
            look: called about 20 times a second while ranks are missing.

        Raises:
            BaseException: the error of ``look``, whereupon this rank's call is withdrawn; or the
                error of the launch, which all ranks raise.
        """
        with self._changed:
            mine = self._round
            ready = self._runtime.record_event(self._device, stream)
            mine.arrived[rank] = _Arrival(prepared, stream, ready)
            if len(mine.arrived) == len(self._ranks):
                self._launch_all(mine)
            else:
                self._await_others(rank, mine, look)
            if mine.error is not None:
                raise mine.error

    def set_left(self, rank: int, left: bool) -> None:
        """Notes whether the thread of a rank has left; then the thread makes no more calls."""
        if left:
            self._left.add(rank)
        else:
            self._left.discard(rank)

    def has_left(self, rank: int) -> bool:
        """True when the thread of a rank makes no more calls."""
        return rank in self._left

    def waited_s(self, rank: int) -> float:
        """Returns for how many seconds the call of ``rank`` has waited for other ranks' calls."""
        return self._waited_s.get(rank, 0.0)

    def _await_others(self, rank: int, mine: _SharingRound, look: Look) -> None:
        limit = Deadline(0.0)
        try:
            while not mine.ended:
                self._changed.wait(LOOK_S)
                self._waited_s[rank] = limit.waited_s()
                if not mine.ended:
                    missing = [each for each in self._ranks if each not in mine.arrived]
                    look(missing, self._waited_s[rank])
        except BaseException:
            # Withdraw the call. The caller may reuse its tensors, so nobody may launch it any more.
            mine.arrived.pop(rank, None)
            raise
        finally:
            self._waited_s.pop(rank, None)

    def _launch_all(self, mine: _SharingRound) -> None:
        self._round = _SharingRound()
        try:
            self._launch_kinds([mine.arrived[rank] for rank in self._ranks])
        except BaseException as error:
            mine.error = error
        finally:
            mine.ended = True
            self._changed.notify_all()

    def _launch_kinds(self, arrivals: list[_Arrival]) -> None:
        kinds: dict[tuple[int, int], list[_Arrival]] = {}
        for arrival in arrivals:
            kinds.setdefault(arrival.prepared.prepared_kind, []).append(arrival)
        streams = [self._stream]
        while len(streams) < len(kinds):
            # Calls of different kinds are a mismatch. Their kernels, which run at the same time,
            # detect the mismatch and name both calls.
            streams.append(self._runtime.make_stream(self._device))
        for ((_, channels), each), stream in zip(kinds.items(), streams, strict=True):
            for arrival in each:
                self._runtime.wait_event(self._device, stream.handle, arrival.ready)
            blocks = channels * len(each)
            self._order.before(self, blocks, stream.handle)
            launch_prepared([arrival.prepared for arrival in each], stream.handle)
            self._order.after(self, blocks, stream.handle)
            done = self._runtime.record_event(self._device, stream.handle)
            for arrival in each:
                self._runtime.wait_event(self._device, arrival.stream, done)

    def launch_together(self, prepared: Sequence[Prepared], stream: int) -> None:
        """Launches the calls of all ranks, which one thread has prepared, on ``stream``."""
        runtime, device, own = self._runtime, self._device, self._stream.handle
        with self._changed:
            # A capture and work outside it cannot wait for each other: see docs/cuda.md.
            captures = runtime.is_capturing(device, stream)
            if not captures:
                runtime.wait_event(device, stream, runtime.record_event(device, own))
            blocks = prepared[0].prepared_kind[1] * len(prepared)
            self._order.before(self, blocks, stream)
            launch_prepared(prepared, stream)
            self._order.after(self, blocks, stream)
            if not captures:
                runtime.wait_event(device, own, runtime.record_event(device, stream))


_joint_launches_guard = threading.Lock()
_joint_launches: WeakValueDictionary[tuple[int, ...], JointLaunch] = WeakValueDictionary()


def joint_launch_of(
    runtime: DeviceRuntime,
    device: int,
    ranks: Sequence[int],
    proofs: Sequence[int],
    order: DeviceOrder,
) -> JointLaunch:
    """Returns the joint launch of these ranks; each of them gets the same object.

    Args:
        runtime: the runtime of this process.
        device: the shared device.
        ranks: the communicator's ranks in this process and on the device.
        proofs: the random numbers in these ranks' handles; they identify the communicator.
        order: the device's order of launches.
    """
    key = (device, *proofs)
    with _joint_launches_guard:
        joint = _joint_launches.get(key)
        if joint is None:
            joint = _joint_launches[key] = JointLaunch(runtime, device, ranks, order)
        return joint
