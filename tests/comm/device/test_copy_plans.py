# SPDX-License-Identifier: Apache-2.0
"""Plans of the copy engines copy directly from peers' tensors: exact results in call order."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import ringcomm
from ringcomm import (
    AbortedError,
    ArgumentError,
    Communicator,
    LocalWorld,
    MismatchError,
    PeerLost,
    UnsupportedError,
)
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.device.sharing import launch_prepared
from ringcomm.memory import device_memory
from tests.support.device_worlds import (
    OPTIONS,
    Devices,
    device_of,
    heap_of,
    on_host,
    with_options,
)
from tests.support.emulator.library import COMPILER
from tests.support.exact import pattern
from tests.support.faults import die
from tests.support.ranks import Ranks, run_ranks

LIMIT_S = 100.0
GRACE_S = 0.1
BOTH = (0, 1)
# Leaves no staging memory, so that an ordinary call by the copy engines is refused.
NO_STAGING = with_options(copy_engine_bytes=0)
# More elements than fit into the first chunk of a growing heap, which has 2 MiB.
GROWS = 700_000


class Gather:
    """A plan of the copy engines and its tensors."""

    def __init__(self, comm: Communicator, count: int, *, in_place: bool = False) -> None:
        self.comm, self.count = comm, count
        on = heap_of(comm)
        self.output = ringcomm.zeros(count * comm.world_size, device=on)
        own = self.output[comm.rank * count : (comm.rank + 1) * count]
        self.input = own if in_place else ringcomm.empty(count, device=on)
        self.plan = comm.plan_all_gather_into_tensor(
            self.output, self.input, algorithm="copy_engine"
        )

    def part(self, turn: int, rank: int) -> torch.Tensor:
        return pattern(self.count, rank + 7 * turn, torch.int32).remainder(1 << 20).float()

    def fill(self, turn: int) -> None:
        self.input.copy_(self.part(turn, self.comm.rank))

    def check(self, turn: int) -> None:
        want = [self.part(turn, rank) for rank in range(self.comm.world_size)]
        if not torch.equal(on_host(self.output), torch.cat(want)):
            self.comm.engine.raise_if_unusable("the check")
            raise AssertionError(f"turn {turn} of {self.count} elements")


def gathers(comm: Communicator) -> None:
    """Calls of several plans overlap with each other and with other calls."""
    made = [
        Gather(comm, count, in_place=in_place)
        for count in (0, 1, 4099)
        for in_place in (False, True)
    ]
    for turn in range(3):
        works = []
        for each in made:
            each.fill(turn)
            works.append(each.plan(async_op=turn == 1))
        for work in works:
            assert (work is not None) == (turn == 1)
            if work is not None:
                work.wait()
        total = torch.ones(257, device=comm.device)
        comm.all_reduce(total)
        for each in made:
            each.check(turn)
        assert torch.equal(on_host(total), torch.full((257,), float(comm.world_size)))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_threads_that_share_a_device(devices: Devices, ranks: int) -> None:
    devices.run(devices.world(ranks, options=NO_STAGING), gathers)


def test_threads_on_two_devices(two_devices: Devices) -> None:
    two_devices.run(two_devices.world(2, BOTH, NO_STAGING), gathers)


def test_no_staging_is_needed_for_plans_alone(devices: Devices) -> None:
    def body(comm: Communicator) -> None:
        output, own = (ringcomm.zeros(count, device=heap_of(comm)) for count in (8, 4))
        with pytest.raises(ArgumentError, match=r"copy_engine_bytes > 0, or a plan \(plan_all_"):
            comm.all_gather_into_tensor(output, own, algorithm="copy_engine")

    devices.run(devices.world(2, options=NO_STAGING), body)


def _connect(store: Any, rank: int, world: int) -> Communicator:
    return Communicator.from_store(store, rank, world, device="cuda:0", options=NO_STAGING)


def _process(store: Any, rank: int, world: int, kind: str) -> bool:
    """Also with growing heaps, and in a graph."""
    device_memory.GROWTH_WAIT_S = LIMIT_S  # on busy cores peers may map a chunk late
    devices = Devices(kind, devices=1) if kind == "emulated" else Devices(kind)
    with _connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        gathers(comm)
        large = [Gather(comm, GROWS << turn) for turn in range(2)]
        for turn, each in enumerate(large):
            each.fill(turn)
            each.plan()
            each.check(turn)
        if devices.emulated is not None:
            _replays(devices, comm)
        version = large[0].output._version
        large[0].plan()
        comm.barrier()
        return large[0].output._version == version + 1


def _replays(devices: Devices, comm: Communicator) -> None:
    runtime = devices.emulated
    assert runtime is not None
    made, stream = Gather(comm, 4099), runtime.make_stream(0)
    with runtime.capture(0, stream) as graph:
        with pytest.raises(UnsupportedError, match=r"is capturing a graph, .* before the capture"):
            comm.plan_all_gather_into_tensor(made.output, made.input, algorithm="copy_engine")
        made.plan()
    for turn in range(3):
        made.fill(turn)
        comm.engine.finish_host_side()
        with runtime.on_stream(stream):
            runtime.replay(graph)
            runtime.synchronize(0)
            made.check(turn)


@pytest.mark.timeout(LIMIT_S + 10)
def test_processes(kind: str) -> None:
    assert run_ranks(_process, 3, kind, timeout_s=LIMIT_S) == [True] * 3


# ---- copies are between two waits for all ranks --------------------------------------------------


class Launches:
    """Makes the launches of a rank's next gather: a waiting kernel, copies, and another kernel.

    Args:
        devices: of ``comm``.
        comm: the communicator whose calls :meth:`made` launches in this way.
        skips: the launch that is left out: 1, 2, or 0 for none.
        holds: an event that the stream waits for before the copies.
    """

    def __init__(
        self,
        devices: Devices,
        comm: Communicator,
        skips: int,
        holds: threading.Event | None = None,
    ) -> None:
        self._runtime, self._device = cast(Any, devices.runtime), device_of(comm)
        self._skips, self._holds, self._launches = skips, holds, 0
        self.native = engine_of(comm).device_core.native
        self.copied: Any = None  # an event

    def __call__(self) -> None:
        self._launches += 1
        if self._launches == 2:
            self.copied = self._runtime.record_event(self._device, self.native.stream)
        if self._launches != self._skips:
            launch_prepared([self.native], self.native.stream)
        elif self._launches == 2:
            self.native.withdraw()
        if self._launches == 1 and self._holds is not None:
            self.then(self._holds.wait)

    def made(self, plan: Callable[[], object]) -> None:
        self.native.set_submit(self)
        plan()
        self.native.set_submit(None)

    def then(self, function: Callable[[], object]) -> Any:
        """Calls a function in stream order; returns a device event after it."""
        stream = self.native.stream
        self._runtime.run_on_stream(self._device, stream, lambda: function() and None)
        return self._runtime.record_event(self._device, stream)


def engine_of(comm: Communicator) -> DeviceCallEngine:
    return cast(DeviceCallEngine, comm.engine)


def passes(event: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(event.query())


def ready(comm: Communicator) -> Gather:
    made = Gather(comm, 1000)
    made.fill(0)
    made.plan()  # with the streams of this thread
    comm.engine.finish_host_side()
    comm.barrier()
    comm.engine.finish_host_side()
    return made


def memset(made: Gather) -> Callable[[], object]:
    ptr, size_bytes = made.input.data_ptr(), made.input.nbytes
    return lambda: ctypes.memset(ptr, 0, size_bytes)


def got(made: Gather) -> str:
    """Returns the data that rank 0 got from rank 1."""
    found = on_host(made.output)[made.count :]
    if torch.equal(found, torch.zeros(made.count)):
        return "zeros"
    assert torch.equal(found, made.part(0, 1))
    return "pattern"


def after_an_overwriting(devices: Devices, world: LocalWorld, skips: int) -> str:
    """Returns the data that a late copy of rank 0 gets if rank 1 writes after its call."""
    opened = threading.Event()

    def body(comm: Communicator) -> str:
        made = ready(comm)
        launches = Launches(devices, comm, skips, opened if comm.rank == 0 else None)
        launches.made(made.plan)
        if comm.rank == 1:
            overwritten = launches.then(memset(made))
            assert passes(overwritten, LIMIT_S if skips else GRACE_S) == bool(skips)
            opened.set()
        return got(made)

    return devices.run(world, body)[0]


def after_a_late_input(devices: Devices, world: LocalWorld, skips: int) -> str:
    """Returns the data that rank 0 gets if rank 1 writes its input late."""
    opened = threading.Event()

    def body(comm: Communicator) -> str:
        made = ready(comm)
        launches = Launches(devices, comm, skips)
        if comm.rank == 1:
            launches.then(opened.wait)
            launches.then(memset(made))
        launches.made(made.plan)
        if comm.rank == 0:
            assert passes(launches.copied, LIMIT_S if skips else GRACE_S) == bool(skips)
            opened.set()
        return got(made)

    return devices.run(world, body)[0]


@pytest.mark.parametrize(
    ("case", "skips", "gets"),
    [
        (after_an_overwriting, 0, "pattern"),
        (after_an_overwriting, 2, "zeros"),
        (after_a_late_input, 0, "zeros"),
        (after_a_late_input, 1, "pattern"),
    ],
)
def test_both_waits_are_needed(
    two_devices: Devices, case: Callable[..., str], skips: int, gets: str
) -> None:
    if two_devices.emulated is None:
        pytest.skip("only an emulated stream can be held back")
    with two_devices.new_world(2, BOTH, NO_STAGING) as world:
        assert case(two_devices, world, skips) == gets


# ---- a peer that maps late -----------------------------------------------------------------------


def _maps_late(store: Any, rank: int, world: int, waits: bool) -> str:
    """Rank 1 maps rank 0's new memory after half a second, or after both have gone on."""
    devices = Devices("emulated", devices=1)
    device_memory.GROWTH_WAIT_S = 0.05
    with _connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        comm.barrier()
        comm.engine.finish_host_side()
        maps, original = threading.Event(), device_memory.PeerChunks._map

        def late(self: Any, sent: Any) -> None:
            maps.wait()
            original(self, sent)

        if rank == 1:
            device_memory.PeerChunks._map = late  # type: ignore[method-assign]
            if waits:
                threading.Timer(0.5, maps.set).start()
        if not waits:
            core: Any = engine_of(comm).device_core
            core.await_peers = lambda operation: None
        comm.barrier()
        try:
            made = Gather(comm, GROWS)
        except ArgumentError as error:
            return str(error)
        finally:
            maps.set()
        made.fill(1)
        made.plan()
        made.check(1)
        del made
        comm.barrier()
    return ""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("waits", [True, False])
def test_a_plan_waits_for_peers_that_map_late(waits: bool) -> None:
    texts = run_ranks(_maps_late, 2, waits, timeout_s=LIMIT_S)
    assert [("got other memory on rank" in text) for text in texts] == [not waits] * 2


# ---- what goes wrong -----------------------------------------------------------------------------


def errors(devices: Devices, body: Callable[[Communicator], Any], ranks: int = 2) -> list[Any]:
    """Returns the result of each rank's body, in a new world."""
    with devices.new_world(ranks, options=OPTIONS) as world:
        return devices.run(world, body)


def raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(ringcomm.RingcommError) as caught:
        call()
    return caught.value


def test_an_input_outside_of_the_heap_is_refused_on_all_ranks(devices: Devices) -> None:
    def body(comm: Communicator) -> str:
        output = ringcomm.zeros(15, device=heap_of(comm))
        heap = ringcomm.zeros(5, device=heap_of(comm))
        own = heap if comm.rank == 1 else torch.zeros(5, device=comm.device)
        plan = comm.plan_all_gather_into_tensor
        error = raised(lambda: plan(output, own, algorithm="copy_engine"))
        assert isinstance(error, ArgumentError)
        gathers(comm)  # the communicator still works
        return str(error)

    for rank, text in enumerate(errors(devices, body, 3)):
        assert f"plan_all_gather_into_tensor on rank {rank} of 3: input: expected memory" in text
        assert "got other memory on ranks 0, 2. Make it there with ringcomm.empty" in text


def test_plans_that_differ_are_refused_on_all_ranks(devices: Devices) -> None:
    def body(comm: Communicator) -> str:
        count = 4 + comm.rank
        output, own = (ringcomm.zeros(n, device=heap_of(comm)) for n in (2 * count, count))
        plan = comm.plan_all_gather_into_tensor
        error = raised(lambda: plan(output, own, algorithm="copy_engine"))
        assert isinstance(error, MismatchError)
        gathers(comm)
        return str(error)

    for text in errors(devices, body):
        assert "rank 0 gives 16 bytes of float32, rank 1 20 bytes of float32. Give all" in text


def test_a_tensor_with_other_memory_is_refused(devices: Devices) -> None:
    """The memory for which the plan was made must live as long as the plan."""

    def body(comm: Communicator) -> None:
        made = Gather(comm, 1000)
        made.fill(0)
        made.plan()
        made.check(0)
        before = made.input.data_ptr()
        made.input.data = ringcomm.zeros(1000, device=heap_of(comm))
        comm.engine.finish_host_side()
        gc.collect()
        other = ringcomm.zeros(1000, device=heap_of(comm))
        assert other.data_ptr() != before
        error = raised(made.plan)
        assert isinstance(error, ArgumentError)
        assert f"at {before:#x}, got 4000 bytes of torch.float32 at" in str(error)
        assert "make a new plan on all ranks" in str(error)
        made.output = made.output.clone()  # the old output still belongs to the plan
        again = comm.plan_all_gather_into_tensor(made.output, made.input, algorithm="copy_engine")
        made.fill(1)
        again()
        made.check(1)

    errors(devices, body)


def _other_plan(comm: Communicator, made: list[Gather]) -> None:
    made[comm.rank].plan()


def _no_plan(comm: Communicator, made: list[Gather]) -> None:
    """With a size that fits into staging, so that both calls have the same launches."""
    first = made[0]
    if comm.rank == 0:
        first.plan()
    else:
        comm.all_gather_into_tensor(first.output, first.input, algorithm="copy_engine")


@pytest.mark.parametrize("call", [_other_plan, _no_plan])
def test_a_rank_that_calls_another_plan(devices: Devices, call: Callable[..., None]) -> None:
    def body(comm: Communicator) -> str:
        made = [Gather(comm, 100) for _ in range(2)]

        def both() -> None:
            call(comm, made)
            comm.engine.finish_host_side()

        error = raised(both)
        assert isinstance(error, (MismatchError, AbortedError))
        return str(error)

    text = " ".join(errors(devices, body))
    assert "all_gather(float32, plan 1, 800 bytes, copy_engine" in text
    if call is _other_plan:
        assert "all_gather(float32, plan 2, 800 bytes, copy_engine" in text


def test_a_rank_that_gathers_other_data_of_the_size(devices: Devices) -> None:
    aborted = threading.Event()

    def body(comm: Communicator) -> BaseException | None:
        if comm.rank == 0:
            error = raised(lambda: Gather(comm, 4))
            aborted.set()
            return error
        own = torch.zeros(5, dtype=torch.int64, device=comm.device)
        comm.all_gather_into_tensor(torch.zeros(10, dtype=torch.int64, device=comm.device), own)
        assert aborted.wait(LIMIT_S)

        def later() -> None:
            comm.barrier()
            comm.engine.finish_host_side()

        return raised(later)

    first, second = errors(devices, body)
    assert isinstance(first, MismatchError)
    assert "expected rank 1 to make a plan of the copy engines, too" in str(first)
    assert isinstance(second, AbortedError) and "make a plan of the copy engines" in str(second)


def test_a_peer_that_has_closed(devices: Devices) -> None:
    left = threading.Event()

    def body(comm: Communicator) -> BaseException | None:
        made = Gather(comm, 100)
        made.plan()
        comm.engine.finish_host_side()
        if comm.rank == 1:
            comm.close()
            left.set()
            return raised(made.plan)
        left.wait(LIMIT_S)

        def call() -> None:
            made.plan()
            comm.engine.finish_host_side()

        return raised(call)

    survivor, closed = errors(devices, body)
    assert isinstance(survivor, PeerLost)
    assert isinstance(closed, AbortedError)


def _loses_a_peer(store: Any, rank: int, world: int) -> None:
    """The copies read the dead peer's memory, which stays mapped."""
    devices = Devices("emulated", devices=1)
    comm = _connect(store, rank, world)
    with devices.as_on_gpu(comm):
        made = Gather(comm, GROWS)
        made.fill(0)
        made.plan()
        made.check(0)
        comm.barrier()
        comm.engine.finish_host_side()
        if rank == 1:
            die()

        with pytest.raises(PeerLost):
            made.plan()
            comm.engine.finish_host_side()
        del made
    comm.close()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.timeout(LIMIT_S + 10)
def test_a_peer_that_has_died() -> None:
    with Ranks(_loses_a_peer, 2) as ranks:
        outcomes = ranks.wait(LIMIT_S)
    assert [each.ok for each in outcomes] == [True, False], outcomes[0].describe()


def test_a_record_names_the_plan(devices: Devices) -> None:
    def body(comm: Communicator) -> str:
        made = [Gather(comm, 100) for _ in range(2)]
        made[1].plan()
        comm.engine.finish_host_side()
        return str(comm.recording().ranks[comm.rank].collectives[-1])

    text = "all_gather(float32, plan 2, 800 bytes, copy_engine)"
    assert errors(devices, body) == [text] * 2
