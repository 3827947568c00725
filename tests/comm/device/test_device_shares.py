# SPDX-License-Identifier: Apache-2.0
"""A launch larger than this process's share of a device gets fewer blocks, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, cuda
from ringcomm.errors import RingcommError, UnsupportedError
from ringcomm.memory import device_heap
from tests.support.device_worlds import Devices
from tests.support.emulator import EmulatedRuntime
from tests.support.stub_driver import COMPILER, StubRuntime

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs a C++ compiler")

DEVICE_HAS, SHARE = 16, 4


def sum_of(channels: int = 0) -> int:
    """Sums on two ranks of a process that may use a part of a device; returns their channels."""
    devices = Devices("emulated", devices=1, multiprocessors=DEVICE_HAS, usable=SHARE)
    options = CommOptions(timeout=20.0, segment_bytes=1024, channels=channels)

    def body(comm: Any) -> int:
        tensor = torch.ones(4096)
        comm.all_reduce(tensor)
        comm.engine.finish_host_side()
        assert torch.equal(tensor, torch.full((4096,), 2.0))
        return int(comm.engine.device_core.native.channels)

    try:
        world = ringcomm.local_world(2, device="cuda:0", options=options)
        try:
            return devices.run(world, body)[0]
        finally:
            for comm in world:
                comm.abort("the test is over")
            world.close()
    finally:
        devices.close()


def test_channels_fit_the_share_of_the_device():
    assert 2 * sum_of() <= SHARE


def test_more_channels_than_the_share_holds_are_refused():
    with pytest.raises(UnsupportedError, match=r"needs 32 co-resident blocks, but .* runs"):
        sum_of(channels=DEVICE_HAS)


def test_counted_by_the_whole_device_a_launch_does_not_fit(monkeypatch):
    """The negative control. The emulator refuses a launch that would wait for ever on a GPU."""

    def whole(runtime: EmulatedRuntime, device: int) -> int:
        return runtime.multiprocessors

    made = EmulatedRuntime.__post_init__

    def small(runtime: EmulatedRuntime) -> None:
        made(runtime)
        monkeypatch.setattr(EmulatedRuntime, "usable_multiprocessors", whole)

    monkeypatch.setattr(EmulatedRuntime, "__post_init__", small)
    with pytest.raises(RingcommError, match="too many blocks"):
        sum_of()


@pytest.fixture
def stub() -> Iterator[StubRuntime]:
    made = StubRuntime()
    before = cuda.use(made)
    yield made
    made.driver.reset()
    device_heap.close_heaps()
    cuda.use(before)


def call_of(comm: Any, tensor: torch.Tensor, kind: str) -> Callable[[], object]:
    if kind == "plan":
        plan: Callable[[], object] = comm.plan_all_reduce(tensor)
        return plan
    return lambda: comm.all_reduce(tensor)


@pytest.mark.parametrize("kind", ["fast", "checked", "plan"])
def test_a_stream_of_a_small_green_context_is_refused(stub: StubRuntime, kind: str) -> None:
    tensor = torch.ones(64) if kind == "fast" else torch.ones(128)[::2]
    with ringcomm.local_world(1, device="cuda:0") as (comm,):
        call = call_of(comm, tensor, kind)
        call()
        engine: Any = comm.engine
        channels = engine.device_core.native.channels
        # Set here, since a world of one rank waits for no peer and needs no multiprocessors.
        engine.device_core.calls.set_needed_multiprocessors(channels)
        small, large = stub.make_stream(0), stub.make_stream(0)
        stub.driver.set_green(small.handle, channels - 1)
        stub.driver.set_green(large.handle, channels)
        with stub.on_stream(large):
            call()
        words = rf"{channels} multiprocessors, .* green context of {channels - 1}"
        for _ in range(2):
            with stub.on_stream(small), pytest.raises(RingcommError, match=words):
                call()
        call()  # on the default stream, unaffected by the refusals
        engine.device_core.calls.set_needed_multiprocessors(0)  # the mutant: accept any context
        with stub.on_stream(small):
            call()


def test_one_launch_of_all_ranks_is_refused_by_the_blocks_of_all(stub: StubRuntime) -> None:
    with ringcomm.local_world(2, device="cuda:0") as world:
        tensors = [torch.ones(64) for _ in world]
        world.all_reduce(tensors)
        engine: Any = world[0].engine
        needed = 2 * engine.device_core.native.channels
        small, large = stub.make_stream(0), stub.make_stream(0)
        stub.driver.set_green(small.handle, needed - 1)
        stub.driver.set_green(large.handle, needed)
        with stub.on_stream(large):
            world.all_reduce(tensors)
        with stub.on_stream(small), pytest.raises(RingcommError, match=f"{needed} multiproc"):
            world.all_reduce(tensors)
        world.all_reduce(tensors)
        for comm in world:  # the mutant: each rank counts only its own blocks
            mine: Any = comm.engine
            mine.device_core.calls.set_needed_multiprocessors(needed // 2)
        with stub.on_stream(small):
            world.all_reduce(tensors)


def test_a_green_context_that_is_current_is_that_of_the_default_stream(stub: StubRuntime) -> None:
    with ringcomm.local_world(1, device="cuda:0") as (comm,):
        stub.driver.set_green(0, 1)
        engine: Any = comm.engine  # a single rank waits for no peer, so the need is set here
        engine.device_core.calls.set_needed_multiprocessors(2)
        with pytest.raises(RingcommError, match="green context of 1,"):
            comm.all_reduce(torch.ones(64))
