# SPDX-License-Identifier: Apache-2.0
"""The check that the links between the ranks' devices work."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ringcomm import cuda
from ringcomm.comm.device.rendezvous import LINE_BYTES, Links, prove_links
from ringcomm.errors import RendezvousError
from ringcomm.memory import device_heap
from ringcomm.memory.device_heap import DeviceHandle, DeviceHeap, map_device_heap
from ringcomm.process import Deadline
from tests.support.device_handles import (
    MIB,
    REGION,
    await_all,
    exchange_handles,
    handle_of,
    read_handles,
    text_of,
)
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SCRATCH = 256
# For words that must arrive; if all is well they arrive much earlier.
DEADLINE_S = 20.0


@pytest.fixture
def heaps() -> Iterator[list[DeviceHeap]]:
    """The heaps of two devices."""
    cuda.use(EmulatedRuntime(devices=2, memory_bytes=64 * MIB))
    yield [device_heap.device_heap(device) for device in range(2)]
    device_heap.close_heaps()
    cuda.use(None)


def links_of(heap: DeviceHeap, rank: int, handles: list[DeviceHandle]) -> Links:
    mapped = [map_device_heap(handle, heap, "op", "the reader") for handle in handles]
    return Links(heap, rank, handles, mapped, SCRATCH)


def prove(links: Links, timeout_s: float = DEADLINE_S) -> None:
    prove_links(links, "proving", Deadline(timeout_s))


def _proves(store, rank, world):
    cuda.use(EmulatedRuntime())
    heap = device_heap.device_heap(0)
    for turn in range(2):  # the lines still hold the words of the first turn
        store.set(f"handle/{rank}", text_of(handle_of(heap, rank, world)))
        await_all(store, f"posted{turn}", world)
        links = links_of(heap, rank, read_handles(store, world))
        prove(links)
        await_all(store, f"proved{turn}", world)
    base_ptr = heap.base_ptr + REGION[0] + SCRATCH
    lines = heap.runtime.read(0, base_ptr, world * LINE_BYTES)
    beyond = heap.runtime.read(0, base_ptr + world * LINE_BYTES, LINE_BYTES)
    assert beyond == bytes(LINE_BYTES)
    return len({lines[i * LINE_BYTES :][:8] for i in range(world)})


@pytest.mark.parametrize("world", [1, 2, 5])
def test_links_that_work(world):
    assert run_ranks(_proves, world) == [world] * world


class Copies(EmulatedRuntime):
    """A driver that maps a copy: the first read is right, but writes never arrive."""

    def open_handle(self, device: int, handle: bytes) -> int:
        mapped = super().open_handle(device, handle)
        copy = self.allocate(device, 4 * MIB)
        self.write(device, copy, self.read(device, mapped, 4 * MIB))
        super().close_handle(device, mapped)
        return copy

    def close_handle(self, device: int, ptr: int) -> None:
        self.free(device, ptr)


def _proves_with_liars(store, rank, world, liar):
    os.environ["RINGCOMM_CUDA_HEAP"] = "fixed"
    cuda.use((Copies if rank == liar else EmulatedRuntime)())
    heap = device_heap.device_heap(0, 4 * MIB)
    links = links_of(heap, rank, exchange_handles(store, rank, world, heap))
    await_all(store, "mapped", world)
    said = ""
    try:
        prove(links, timeout_s=0.5)
    except RendezvousError as error:
        said = str(error)
    await_all(store, "done", world)
    return said


def test_a_driver_that_lies_is_found_out_by_both_sides():
    of_peer, of_liar = run_ranks(_proves_with_liars, 2, 1)
    assert "writes into the memory of rank 0 (pid " in of_peer
    assert "waited 0.5 s, until its timeout ended, for what rank 1" in of_peer
    assert "which does not arrive" in of_peer
    assert "to see in the memory of rank 0 (pid " in of_liar
    for said in (of_peer, of_liar):
        assert "device 0: Emulated GPU at 0000:10:00.0" in said
        assert "IOMMU" in said


def test_a_rank_that_does_not_come_is_named(heaps):
    handles = [handle_of(heap, rank, 2) for rank, heap in enumerate(heaps)]
    with pytest.raises(RendezvousError, match=r"what rank 1 .* did not get this far in time"):
        prove(links_of(heaps[0], 0, handles), timeout_s=0.05)
    prove(links_of(heaps[1], 1, handles))
    prove(links_of(heaps[0], 0, handles))


def test_words_of_an_earlier_communicator_prove_nothing(heaps):
    def handles() -> list[DeviceHandle]:
        return [handle_of(heap, rank, 2) for rank, heap in enumerate(heaps)]

    first = handles()
    with pytest.raises(RendezvousError):
        prove(links_of(heaps[0], 0, first), timeout_s=0.0)
    prove(links_of(heaps[1], 1, first))
    prove(links_of(heaps[0], 0, first))
    with pytest.raises(RendezvousError):
        prove(links_of(heaps[0], 0, handles()), timeout_s=0.05)
