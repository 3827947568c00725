# SPDX-License-Identifier: Apache-2.0
"""Multicast on tensors of the heap, in place: when a call uses this path, and when windows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import ringcomm
from ringcomm import Communicator, LocalWorld, cuda
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.cuda import virtual_memory
from ringcomm.memory import device_heap
from tests.proof.ptx.multicast_job import (
    IN_PLACE_COUNTS,
    MULTICAST,
    WINDOW_BYTES,
    Calls,
    all_reduce,
    halves,
    in_place,
    multicast_kernels,
    values_of,
)
from tests.ptx_interpreter import PtxSchedule
from tests.support import nvrtc
from tests.support.covering import thinned
from tests.support.device_worlds import OPTIONS, Devices, heap_of, on_host, put
from tests.support.emulator.library import library

pytestmark = pytest.mark.skipif(nvrtc.library_path() is None, reason="no NVRTC")

WITH_WINDOW = replace(OPTIONS, multicast_bytes=WINDOW_BYTES)
MARK = b"\x5a" * WINDOW_BYTES
COUNT = 560
Body = Callable[..., Any]


@pytest.fixture(scope="module")
def kernels():
    return multicast_kernels(PtxSchedule(seed=3))


@pytest.fixture
def devices(kernels):
    """New devices for each test, so equal allocations have equal offsets in all ranks' heaps."""
    made = Devices("emulated", devices=4, ptx=kernels)
    yield made
    made.close()
    assert library().emu_vmm_in_use() == 0


def _window(comm: Communicator):
    core = cast(DeviceCallEngine, comm.engine).device_core
    assert core._window is not None
    return core.runtime, core.device, core._window


def uses_windows(devices: Devices, world: LocalWorld, body: Body, *args: Any) -> list[bool]:
    """Runs ``body`` on all ranks; returns per rank whether its window was written."""
    for comm in world:
        runtime, device, window = _window(comm)
        runtime.synchronize(device)
        runtime.write(device, window.own_ptr, MARK)
    devices.run(world, body, *args)
    used = []
    for comm in world:
        runtime, device, window = _window(comm)
        runtime.synchronize(device)
        used.append(runtime.read(device, window.own_ptr, len(MARK)) != MARK)
    return used


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    thinned([(2, torch.float32), (2, torch.bfloat16), (4, torch.float32), (4, torch.float16)], 2),
)
def test_results_in_place(devices, ranks, dtype):
    world = devices.world(ranks, tuple(range(ranks)), WITH_WINDOW)
    calls = Calls(ranks)
    for count in IN_PLACE_COUNTS:
        used = uses_windows(devices, world, in_place, calls, count, dtype)
        assert used == [False] * ranks, count


def _all_reduce(comm: Communicator, tensor: torch.Tensor, turn: int = 0) -> None:
    """All-reduces known values in the memory of ``tensor``, and checks the sums."""
    values = values_of(comm, turn, tensor.numel(), tensor.dtype)
    tensor.copy_(values[comm.rank])
    comm.all_reduce(tensor, algorithm=MULTICAST)
    assert torch.equal(on_host(tensor), torch.stack(values).sum(0))


def _empty(comm: Communicator, count: int) -> torch.Tensor:
    return ringcomm.empty(count, dtype=torch.float32, device=heap_of(comm))


def test_what_lies_elsewhere_on_one_rank_goes_through_the_windows_of_all(devices):
    world = devices.world(2, (0, 1), WITH_WINDOW)
    calls = Calls(2)

    def at_other_offsets(comm: Communicator) -> None:
        before = _empty(comm, 1000) if comm.rank else None
        tensor = _empty(comm, COUNT)
        assert len(set(calls.offsets(comm, tensor))) == 2
        _all_reduce(comm, tensor)
        del before

    def plain_on_one(comm: Communicator) -> None:
        _all_reduce(comm, put(comm, torch.zeros(COUNT), "mixed"))

    def misaligned(comm: Communicator) -> None:
        _all_reduce(comm, _empty(comm, COUNT + 1)[1:])

    def misaligned_on_one(comm: Communicator) -> None:
        begin = 1 if comm.rank else 4
        _all_reduce(comm, _empty(comm, COUNT + 4)[begin : begin + COUNT])

    for body in (at_other_offsets, plain_on_one, misaligned, misaligned_on_one):
        assert uses_windows(devices, world, body) == [True, True], body.__name__


def test_chunks_of_partial_vectors_go_through_the_windows(devices):
    """Applies to reduce-scatter and all-gather. All-reduce sums its partial vector in place."""
    world = devices.world(2, (0, 1), WITH_WINDOW)
    used = uses_windows(devices, world, halves, 0, 555, torch.float32, "heap")
    assert used == [True, True]
    assert uses_windows(devices, world, halves, 0, COUNT, torch.float32, "heap") == [False, False]


def test_ways_alternate(devices):
    """A call in place follows a call through windows, and the other way round."""
    world = devices.world(2, (0, 1), WITH_WINDOW)
    calls = Calls(2)

    def body(comm: Communicator) -> None:
        for turn in range(3):
            all_reduce(comm, turn, COUNT, torch.float32, "plain")
            in_place(comm, calls, COUNT, torch.float32)
            halves(comm, turn, COUNT, torch.float32, "mixed")

    devices.run(world, body)


def test_heaps_grow_between_calls(devices):
    """Tensors are in new chunks, also across two chunks, which the communicator then binds."""
    world = devices.world(2, (0, 1), WITH_WINDOW)
    elems = (3 << 20) // 4

    def body(comm: Communicator) -> None:
        kept = []
        for turn in range(3):
            heap = cast(DeviceCallEngine, comm.engine).device_core.heap
            border = heap.memory.committed_bytes
            tensor = _empty(comm, elems)
            kept.append(tensor)
            assert heap.memory.committed_bytes > border
            first = (heap.base_ptr + border - tensor.data_ptr()) // 4
            _all_reduce(comm, tensor[first - 100 : first + 460], turn)
            _all_reduce(comm, tensor[-COUNT:], turn)

    used = uses_windows(devices, world, body)
    assert used == [False, False]
    for comm in world:
        _, _, window = _window(comm)
        heap = cast(DeviceCallEngine, comm.engine).device_core.heap
        assert window.bound_heap_bytes == heap.memory.committed_bytes > 9 << 20


def test_graphs_replay_it(devices):
    def body(comm: Communicator) -> None:
        tensor = put(comm, torch.ones(COUNT), "heap")
        with devices.emulated.capture(comm.rank) as graph:
            comm.all_reduce(tensor, algorithm=MULTICAST)
        for _ in range(3):
            devices.emulated.replay(graph, comm.rank)
        assert torch.equal(on_host(tensor), torch.full((COUNT,), 8.0))

    world = devices.world(2, (0, 1), WITH_WINDOW)
    assert uses_windows(devices, world, body) == [False, False]


# ---- refusals by the driver ----------------------------------------------------------------------


@pytest.fixture
def refusing(monkeypatch):
    """Makes a driver entry point refuse calls whose arguments ``where`` selects."""
    original = virtual_memory.DriverCalls.__getattr__

    def refuse(name: str, where: Callable[..., bool]) -> None:
        def wrapped(calls: Any, asked: str) -> Any:
            call = original(calls, asked)

            def checked(*arguments: Any) -> None:
                if where(*arguments):
                    raise virtual_memory.DriverRefusal(f"{name}: CUDA error 2: no", 2)
                call(*arguments)

            return checked if asked == name else call

        monkeypatch.setattr(virtual_memory.DriverCalls, "__getattr__", wrapped)

    return refuse


def _grown_all_reduce(comm: Communicator) -> None:
    _all_reduce(comm, _empty(comm, COUNT))
    _all_reduce(comm, _empty(comm, (3 << 20) // 4)[-COUNT:])


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        (
            "cuMulticastCreate",
            lambda made, prop: prop._obj.size_bytes > 4 << 20,
            "rank 0 of 2: only the first 0 bytes of the heap on device 0 are bound",
        ),
        (
            "cuMemMap",
            lambda ptr, size, *rest: size >= 256 << 20,
            "rank 1 of 2: only the first 0 bytes of the heap on device 1 are bound",
        ),
        (
            "cuMulticastBindMem",
            lambda target, at, memory, begin, size, flags: at > 2 << 20,
            "rank 1 of 2: only the first 2097152 bytes of the heap on device 1 are bound",
        ),
    ],
)
def test_a_driver_that_binds_no_heap(kernels, refusing, name, where, said):
    """A warning names the rank and the reason, and all ranks' calls go through the windows."""
    devices = Devices("emulated", ptx=kernels)
    refusing(name, where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with devices.new_world(2, (0, 1), WITH_WINDOW) as world:
            assert uses_windows(devices, world, _grown_all_reduce) == [True, True]
    told = [str(each.message) for each in caught if "multicast" in str(each.message)]
    assert any(said in each and f"{name}: CUDA error 2: no" in each for each in told), told
    devices.close()
    assert library().emu_vmm_in_use() == 0


def test_heaps_that_do_not_grow_are_not_bound(kernels, monkeypatch):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "fixed")
    devices = Devices("emulated", ptx=kernels)
    with (
        pytest.warns(RuntimeWarning, match="the heap of rank 0 does not grow"),
        devices.new_world(2, (0, 1), WITH_WINDOW) as world,
    ):
        assert all(_window(comm)[2].heaps_ptr == 0 for comm in world)
        body = lambda comm: _all_reduce(comm, _empty(comm, COUNT))  # noqa: E731
        assert uses_windows(devices, world, body) == [True, True]
    devices.close()


def test_a_communicator_that_closes_unbinds_and_others_go_on(devices):
    """Each communicator has its own multicast object, to which it binds the heaps' chunks."""
    world = devices.world(2, (0, 1), WITH_WINDOW)
    calls = Calls(2)
    before = library().emu_vmm_in_use()
    with devices.new_world(2, (0, 1), WITH_WINDOW) as other:
        assert uses_windows(devices, other, in_place, calls, COUNT, torch.float32) == [False] * 2
    assert cuda.current() is devices.emulated
    assert library().emu_vmm_in_use() == before
    assert uses_windows(devices, world, in_place, calls, COUNT, torch.float32) == [False] * 2
    assert device_heap.existing_heap(0) is not None
