# SPDX-License-Identifier: Apache-2.0
"""All blocks that may have to run at once fit on the device, or the call is refused by name.

The arithmetic is checked for devices, worlds and channels of all kinds, DeviceOrder for every order
of a few launches, and the tightest cases run on emulated devices. Each check has a mutant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, _native
from ringcomm.comm.device import rendezvous
from ringcomm.comm.device.rendezvous import _DeviceInfo
from ringcomm.comm.device.sharing import Blocks, DeviceOrder
from ringcomm.cuda.runtime import DeviceRuntime
from ringcomm.cuda.units import UNITS
from ringcomm.errors import AbortedError, CollectiveTimeout, UnsupportedError
from tests.support.device_worlds import Devices
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER, figures_of, library
from tests.support.stub_driver import driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler")

MULTIPROCESSORS = (132, 16, 4, 2, 1)
RANKS = range(1, 9)


# ---- what a multiprocessor runs at once ----------------------------------------------------------

# The optimizer's kernels that do not wait for peers, and so may run in waves.
ALONE = ("rc_adamw_prepare", "rc_grad_norm", "rc_adamw_shard_")
REGISTERS, SHARED_BYTES, SYSTEM_BYTES = 65536, 228 << 10, 1 << 10


def waiting_kernels() -> Iterator[tuple[str, str, int]]:
    """Yields unit, name and handle of the kernels that wait for peers."""
    for unit, made in UNITS.items():
        for name in made.kernels:
            kernel = library().emulated_kernel(unit.encode(), name.encode())
            if kernel and not name.startswith(ALONE):
                yield unit, name, kernel


def too_large(each: int) -> list[str]:
    """Returns the kernels whose blocks take more than ``1 / each`` of a multiprocessor."""
    found = []
    for _, name, kernel in waiting_kernels():
        of = figures_of(kernel)
        rounded = -(-of.registers // 8) * 8 * of.threads
        if max(rounded / REGISTERS, (of.shared_bytes + SYSTEM_BYTES) / SHARED_BYTES) * each > 1:
            found.append(name)
    return found


def test_the_kernels_that_are_asked_stand_for_all_that_wait():
    """A multiprocessor holds ``_blocks_each`` blocks of any kernel that waits for peers."""
    heap: Any = SimpleNamespace(runtime=EmulatedRuntime(), device=0)
    each = rendezvous._blocks_each(heap)
    assert too_large(each) == []
    assert "rc_all_reduce_sum" in too_large(each + 1)
    assert {"rc_move", "rc_adamw_step_float16"} <= {name for _, name, _ in waiting_kernels()}


# ---- what communicators request ------------------------------------------------------------------


def blocks_of(multiprocessors: int, ranks: int, channels: int) -> Blocks:
    """Returns the blocks that a process requests for its ranks on a device; 0 channels: default.

    A rank that is alone on its device has a peer on another device.
    """
    infos = [_DeviceInfo(1, 1, "GPU", "emulated", multiprocessors, "", "")] * ranks
    if ranks == 1:
        infos.append(_DeviceInfo(2, 2, "GPU 1", "emulated", multiprocessors, "", ""))
    membership: Any = SimpleNamespace(options=CommOptions(channels=channels))
    taken = rendezvous._channels(membership, infos)
    message = min(taken, _native.MESSAGE_CHANNELS, rendezvous._message_channels(infos, taken))
    return Blocks(taken * ranks, 2 * message * ranks)


def asked_on(multiprocessors: int) -> list[Blocks]:
    """Returns the requests that communicators may make on a device, with any ranks and channels."""
    asked = set()
    for ranks in RANKS:
        most = multiprocessors // ranks
        for channels in {0, 1, 2, most // 2, most - 2, most - 1, most, most + 1} - {-2, -1}:
            asked.add(blocks_of(multiprocessors, ranks, channels))
    return sorted(asked, key=lambda each: (each.collective, each.messages))


class Owner:
    """A communicator on a device; records whether its calls were accepted or refused."""

    def __init__(self, order: DeviceOrder, blocks: Blocks, capacity: int) -> None:
        self.order, self.blocks = order, blocks
        self.built = self._accepted(lambda: order.join(self, blocks, capacity, "world"), capacity)
        self.capacity, self.sends = capacity, False

    def send(self) -> None:
        self.sends = self.built and self._accepted(
            lambda: self.order.sends(self, "isend"), self.capacity
        )

    @staticmethod
    def _accepted(call: Any, capacity: int) -> bool:
        try:
            call()
        except UnsupportedError as error:
            assert f"runs {capacity} of them" in str(error)
            assert "CommOptions(channels=...)" in str(error)
            return False
        return True


def resident(owners: Sequence[Owner]) -> int:
    """Returns the most blocks that may have to run at once: messages and a collective."""
    largest = max((each.blocks.collective for each in owners if each.built), default=0)
    return largest + sum(each.blocks.messages for each in owners if each.sends)


def past_capacity(kind: type[DeviceOrder]) -> Iterator[tuple[int, Blocks, Blocks]]:
    """Yields devices and pairs of communicators that were accepted although they do not fit."""
    runtime: Any = None
    for capacity in MULTIPROCESSORS:
        for one, two in product(asked_on(capacity), repeat=2):
            order = kind(runtime, 0, driver().native)
            in_turn = []
            for blocks in (one, two, one):
                in_turn.append(Owner(order, blocks, capacity))
                in_turn[-1].send()
            order = kind(runtime, 0, driver().native)
            built_first = [Owner(order, blocks, capacity) for blocks in (one, two, one)]
            for owner in built_first:
                owner.send()
            if max(resident(in_turn), resident(built_first)) > capacity:
                yield capacity, one, two


class SendsUnchecked(DeviceOrder):
    def sends(self, owner: object, operation: str) -> None:
        self._sending.add(id(owner))


class JoinsUnchecked(DeviceOrder):
    def join(self, owner: object, blocks: Blocks, capacity: int, operation: str) -> None:
        sending, self._sending = self._sending, set()
        super().join(owner, blocks, capacity, operation)
        self._sending = sending


class OthersForgotten(DeviceOrder):
    """The mutant: a collective only counts the messages of its own communicator."""

    def _kept(self) -> int:
        return 0


def test_what_is_let_onto_a_device_fits():
    assert list(past_capacity(DeviceOrder)) == []


@pytest.mark.parametrize("mutant", [SendsUnchecked, JoinsUnchecked, OthersForgotten])
def test_a_check_that_is_missing_is_seen(mutant):
    assert next(past_capacity(mutant), None)


def test_what_is_refused_by_default():
    """More ranks than multiprocessors, and messages with fewer than three of them per rank."""
    refused = {}
    for multiprocessors, ranks in product(MULTIPROCESSORS, RANKS):
        runtime: Any = None
        blocks = blocks_of(multiprocessors, ranks, 0)
        owner = Owner(DeviceOrder(runtime, 0, driver().native), blocks, multiprocessors)
        owner.send()
        refused[multiprocessors, ranks] = (not owner.built, not owner.sends)
    assert refused == {(m, n): (n > m, 3 * n > m) for m in MULTIPROCESSORS for n in RANKS}


def test_six_communicators_send_on_132_multiprocessors_by_default():
    """For a rank that is alone on a GPU, as docs/cuda.md says."""
    runtime: Any = None
    order, blocks = DeviceOrder(runtime, 0, driver().native), blocks_of(132, 1, 0)
    owners = [Owner(order, blocks, 132) for _ in range(8)]
    for owner in owners:
        owner.send()
    assert [owner.sends for owner in owners] == [True] * 6 + [False] * 2
    order.leave(owners[0])
    owners[7].send()
    assert owners[7].sends


def test_a_world_of_one_rank_takes_all_multiprocessors():
    info = _DeviceInfo(1, 1, "GPU", "emulated", 132, "", "")
    membership: Any = SimpleNamespace(options=CommOptions())
    assert rendezvous._channels(membership, [info]) == 132
    assert rendezvous._channels(membership, [info, info]) == 64


def test_a_world_of_one_rank_is_built_beside_messages_of_others():
    """Its kernels wait for no peer, so they need no room in addition to the messages' blocks."""
    devices = Devices("emulated", devices=1, physical=(0,), multiprocessors=6)
    try:

        def exchange_messages(comm: Any) -> torch.Tensor:
            received = torch.zeros(4)
            sent = comm.isend(torch.full((4,), float(comm.rank)), 1 - comm.rank)
            comm.recv(received, 1 - comm.rank)
            sent.wait()
            devices.runtime.synchronize(0)
            return received

        def sum_alone(comm: Any) -> torch.Tensor:
            total = torch.ones(100)
            comm.all_reduce(total)
            devices.runtime.synchronize(0)
            return total

        options = CommOptions(timeout=20.0)
        with devices.new_world(2, options=options) as pair:
            assert [float(each[0]) for each in devices.run(pair, exchange_messages)] == [1.0, 0.0]
            with devices.new_world(1, options=options) as lone:
                assert torch.equal(devices.run(lone, sum_alone)[0], torch.ones(100))
    finally:
        devices.close()


# ---- the order of launches -----------------------------------------------------------------------

CAPACITY, KEPT = 6, 1


class NeverCapturing:
    """A runtime whose streams never capture."""

    def is_capturing(self, device: int, stream: int) -> bool:
        return False


@dataclass(frozen=True)
class Launch:
    owner: int
    stream: int
    blocks: int


def most_at_once(launches: Sequence[Launch], kind: type[DeviceOrder]) -> int:
    """Returns the most blocks of launches that may run at the same time."""
    stub, runtime = driver(), cast(DeviceRuntime, NeverCapturing())
    stub.reset()
    stub.hold_events()
    order = kind(runtime, 0, stub.native)
    events: list[int] = []  # recorded after each launch
    owners = [object() for _ in range(3)]
    for owner in owners:
        order.join(owner, Blocks(CAPACITY - KEPT, KEPT), CAPACITY, "world")
    order.sends(owners[0], "isend")
    before: list[set[int]] = []  # of each launch
    for number, each in enumerate(launches):
        order.before(owners[each.owner], each.blocks, each.stream)
        direct = [events.index(event) for _, event in stub.waits()]
        for earlier, other in enumerate(launches[:number]):
            if other.owner == each.owner or other.stream == each.stream:
                direct.append(earlier)
        before.append(set(direct).union(*(before[earlier] for earlier in direct)))
        order.after(owners[each.owner], each.blocks, each.stream)
        events += stub.records()
    most = 0
    for size in range(1, len(launches) + 1):
        for some in combinations(range(len(launches)), size):
            if not any(one in before[two] for one, two in combinations(some, 2)):
                most = max(most, sum(launches[number].blocks for number in some))
    return most


def patterns(length: int, kinds: int) -> Iterator[tuple[int, ...]]:
    """Yields sequences of up to ``kinds`` values, without renamed copies of other sequences."""
    for sequence in product(range(kinds), repeat=length):
        firsts = [value for at, value in enumerate(sequence) if value not in sequence[:at]]
        if firsts == sorted(firsts) == list(range(len(firsts))):
            yield sequence


def orders_past_capacity(kind: type[DeviceOrder]) -> Iterator[list[Launch]]:
    for owners, streams in product(patterns(4, 3), repeat=2):
        for sizes in product((2, 3), repeat=4):
            launches = [Launch(*each) for each in zip(owners, streams, sizes, strict=True)]
            if most_at_once(launches, kind) > CAPACITY - KEPT:
                yield launches


class NeverWaits(DeviceOrder):
    def before(self, owner: object, blocks: int, stream: int) -> None:
        pass


def test_launches_that_may_run_at_once_fit_beside_the_messages():
    assert list(orders_past_capacity(DeviceOrder)) == []


@pytest.mark.parametrize("mutant", [NeverWaits, OthersForgotten])
def test_an_order_that_lets_too_many_run_is_seen(mutant):
    assert next(orders_past_capacity(mutant), None)


# ---- the tightest cases, run ---------------------------------------------------------------------

COUNT = (256 << 10) // 4  # more than the staging of a message holds


def exchange(multiprocessors: int, ranks: int, channels: int, timeout: float = 20.0) -> None:
    """All ranks send before they receive; a collective comes between their sends and receives."""
    devices = Devices("emulated", devices=1, physical=(0,), multiprocessors=multiprocessors)
    assert devices.emulated is not None
    options = CommOptions(timeout=timeout, segment_bytes=1024, channels=channels)
    all_wait = threading.Barrier(ranks)

    def body(comm: Any) -> None:
        try:
            messages_around_a_collective(comm)
        except BaseException:
            all_wait.abort()  # otherwise the others would wait for a rank that has ended
            raise

    def messages_around_a_collective(comm: Any) -> None:
        out = torch.full((COUNT,), comm.rank + 1.0)
        into, total = torch.zeros(COUNT), torch.ones(COUNT)
        sent = comm.isend(out, (comm.rank + 1) % ranks)
        late, last = ranks - 2, torch.zeros(COUNT)
        if late and comm.rank == 0:
            comm.irecv(last, late)
        waiting = ranks + (late > 0)  # otherwise the collective might come first
        while devices.emulated.resident_blocks(0) < waiting and not comm.aborted:
            time.sleep(0.001)
        all_wait.wait()
        comm.all_reduce(total)
        comm.recv(into, (comm.rank - 1) % ranks)
        sent.wait()
        if late and comm.rank == late:
            comm.send(out, 0)
        devices.runtime.synchronize(0)
        comm.barrier()  # raises errors of kernels
        assert torch.equal(into, torch.full((COUNT,), (comm.rank - 1) % ranks + 1.0))
        assert torch.equal(total, torch.full((COUNT,), float(ranks)))

    try:
        world = ringcomm.local_world(ranks, device="cuda:0", options=options)
        try:
            devices.run(world, body)
        finally:
            for comm in world:
                comm.abort("the test is over")
            world.close()
    finally:
        devices.close()


@pytest.mark.parametrize(
    ("multiprocessors", "ranks", "channels", "blocks"),
    [
        (16, 4, 0, Blocks(8, 8)),
        (16, 2, 6, Blocks(12, 4)),
        (16, 5, 1, Blocks(5, 10)),
        (24, 8, 0, Blocks(8, 16)),
    ],
)
def test_messages_and_a_collective_that_just_fit_run(multiprocessors, ranks, channels, blocks):
    assert blocks_of(multiprocessors, ranks, channels) == blocks
    exchange(multiprocessors, ranks, channels)


@pytest.mark.parametrize(("multiprocessors", "ranks", "channels"), [(16, 4, 3), (4, 2, 0)])
def test_one_channel_more_is_refused(multiprocessors, ranks, channels):
    with pytest.raises(UnsupportedError, match=r"messages need .* of them at once"):
        exchange(multiprocessors, ranks, channels)


def test_one_channel_more_would_stall_until_the_deadline(monkeypatch):
    monkeypatch.setattr(DeviceOrder, "sends", SendsUnchecked.sends)
    with pytest.raises((CollectiveTimeout, AbortedError), match="until its timeout ended"):
        exchange(16, 4, 3, timeout=1.5)


def test_a_kernel_that_takes_more_than_its_share_would_stall_until_the_deadline(monkeypatch):
    """The share is computed as if blocks needed half of their registers."""
    honest = rendezvous._blocks_each
    monkeypatch.setattr(rendezvous, "_blocks_each", lambda heap: 2 * honest(heap))
    with pytest.raises((CollectiveTimeout, AbortedError), match="until its timeout ended"):
        exchange(16, 4, 3, timeout=1.5)
