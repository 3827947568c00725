# SPDX-License-Identifier: Apache-2.0
"""Peers' device heaps: handles, mappings, and their order of closing."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from ringcomm import cuda
from ringcomm.errors import MismatchError, RendezvousError, UnsupportedError
from ringcomm.memory import device_heap
from ringcomm.memory import device_heap as device_peers
from ringcomm.memory.device_heap import DeviceHandle, map_device_heap
from tests.support.device_handles import MIB, await_all, exchange_handles, handle_of, text_of
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(params=["growing", "fixed"])
def runtime(monkeypatch, request) -> Iterator[EmulatedRuntime]:
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", request.param)
    made = EmulatedRuntime(devices=3, memory_bytes=64 * MIB, unreachable=frozenset({(0, 2)}))
    cuda.use(made)
    yield made
    device_heap.close_heaps()
    assert made.allocated() == made.opened() == []
    cuda.use(None)


# ---- handles -------------------------------------------------------------------------------------


def test_a_handle_travels_as_json(runtime):
    handle = handle_of(device_heap.device_heap(1), rank=3, world=5)
    assert DeviceHandle.from_json(text_of(handle).encode(), 3, "op") == handle
    assert (handle.device, handle.uuid, handle.kind) == (1, "GPU-emulated-1", "emulated")
    assert (handle.pid, handle.region_offset_bytes) == (os.getpid(), MIB)
    fixed = device_heap.device_heap(1).memory.why_fixed
    assert len(bytes.fromhex(handle.ipc_handle)) == (64 if fixed else 0)
    assert bool(handle.service) != bool(fixed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token": -1}, "token of rank 3 to be an integer >= 0, got -1"),
        ({"device": True}, "device of rank 3 to be an integer"),
        ({"uuid": 5}, "uuid of rank 3 to be a string, got 5"),
        ({"ipc_handle": "xyz"}, "ipc_handle of rank 3 to be hexadecimal digits"),
        ({"service": "xyz"}, "service of rank 3 to be hexadecimal digits"),
        ({"pid": None}, "pid of rank 3"),
        ({"version": 99}, "is not a version"),
        ({"error": "no room"}, "rank 3 failed: no room"),
    ],
)
def test_a_bad_handle_is_refused(runtime, changes, said):
    text = text_of(handle_of(device_heap.device_heap(0)), **changes)
    with pytest.raises(RendezvousError, match=said):
        DeviceHandle.from_json(text.encode(), 3, "op")


# ---- ranks of one process ------------------------------------------------------------------------


def test_a_rank_on_the_same_device_needs_no_mapping(runtime):
    heap = device_heap.device_heap(0)
    mapped = map_device_heap(handle_of(heap), heap, "op", "the reader")
    assert (mapped.base_ptr, mapped.pid, mapped.heap) == (heap.base_ptr, 0, heap)
    assert not runtime.peers


def test_a_rank_on_another_device_is_reached_by_peer_access(runtime):
    heap, other = device_heap.device_heap(0), device_heap.device_heap(1)
    mapped = map_device_heap(handle_of(other), heap, "op", "the reader")
    assert (mapped.base_ptr, mapped.pid) == (other.base_ptr, 0)
    assert runtime.peers == {(0, 1)}
    assert runtime.opened() == []


def test_devices_without_peer_access_are_both_named(runtime):
    heap, other = device_heap.device_heap(0), device_heap.device_heap(2)
    with pytest.raises(UnsupportedError) as raised:
        map_device_heap(handle_of(other, rank=4, world=5), heap, "building", "the reader")
    text = str(raised.value)
    for word in (
        "building: device 0 (Emulated GPU at 0000:10:00.0) of this rank",
        f"rank 4 (pid {os.getpid()}, device 2: Emulated GPU at 0000:12:00.0)",
        "no peer access from 0 to 2",
        "MIG",
        "IOMMU",
        "CUDA_VISIBLE_DEVICES",
        "PID namespaces",
    ):
        assert word in text, text


def test_what_cannot_be_mapped(runtime):
    heap = device_heap.device_heap(0)
    handle = replace(handle_of(heap), token=heap.token ^ 1)
    with pytest.raises(RendezvousError, match="is in this process, which has no such heap"):
        map_device_heap(handle, heap, "op", "the reader")
    with pytest.raises(MismatchError, match="kind 'cuda', this rank one of kind 'emulated'"):
        map_device_heap(replace(handle, kind="cuda"), heap, "op", "the reader")
    elsewhere = replace(handle, pid=handle.pid + 1)
    if heap.memory.why_fixed:
        # The emulator, like CUDA, refuses its own process's handle, whatever pid it names.
        with pytest.raises(UnsupportedError, match="invalid device context"):
            map_device_heap(elsewhere, heap, "op", "the reader")
    else:
        with pytest.raises(RendezvousError, match="mapped: another process answers there"):
            map_device_heap(elsewhere, heap, "op", "the reader")
    without = replace(elsewhere, service="", ipc_handle="", ipc_refusal="it said no")
    with pytest.raises(UnsupportedError, match=r"cannot reach .*: it said no\. Usual causes"):
        map_device_heap(without, heap, "op", "the reader")


def test_a_driver_without_ipc_serves_ranks_of_one_process(runtime, monkeypatch):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "fixed")

    def refuse(device: int, ptr: int) -> bytes:
        raise UnsupportedError("no IPC here")

    monkeypatch.setattr(runtime, "export_handle", refuse)
    heap = device_heap.device_heap(0)
    handle = handle_of(heap)
    assert (handle.ipc_handle, handle.ipc_refusal) == ("", "no IPC here")
    assert map_device_heap(handle, heap, "op", "the reader").base_ptr == heap.base_ptr


# ---- ranks of several processes ------------------------------------------------------------------


def _shares_mappings(store, rank, world):
    runtime = EmulatedRuntime(devices=2)
    cuda.use(runtime)
    heap, second = device_heap.device_heap(0), device_heap.device_heap(1)
    handles = exchange_handles(store, rank, world, heap)
    first = [map_device_heap(handle, heap, "op", "the reader") for handle in handles]
    assert [mapped.pid for mapped in first] == [
        0 if each == rank else handle.pid for each, handle in enumerate(handles)
    ]
    again = [map_device_heap(handle, heap, "op", "the reader") for handle in handles]
    assert len(runtime.opened()) == device_peers.opened_heaps() == world - 1
    # Another device of this process has its own mappings.
    others = [map_device_heap(handle, second, "op", "the reader") for handle in handles]
    assert device_peers.opened_heaps() == 2 * (world - 1)
    del first, others
    gc.collect()
    assert device_peers.opened_heaps() == world - 1
    await_all(store, "mapped", world)
    del again
    gc.collect()
    return len(runtime.opened())


def test_a_heap_is_opened_once_and_closed_with_its_last_user():
    assert run_ranks(_shares_mappings, 3) == [0, 0, 0]


def _maps_an_impostor(store, rank, world, kind):
    os.environ["RINGCOMM_CUDA_HEAP"] = kind
    cuda.use(EmulatedRuntime())
    heap = device_heap.device_heap(0)
    peer = exchange_handles(store, rank, world, heap)[1 - rank]
    said = []
    other = {"ipc_handle": "00" * 64} if kind == "fixed" else {"service": "00" * 6}
    for wrong in (replace(peer, token=peer.token ^ 1), replace(peer, **other)):
        try:
            map_device_heap(wrong, heap, "op", "the reader")
        except (RendezvousError, UnsupportedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    gc.collect()
    assert device_peers.opened_heaps() == 0
    await_all(store, "done", world)
    return said


def test_a_service_without_that_heap_is_refused():
    for said in run_ranks(_maps_an_impostor, 2, "growing"):
        assert "RendezvousError: op: the heap of rank" in said[0]
        assert "could not be mapped: the process does not have this heap any more" in said[0]
        assert "RendezvousError: op: the heap of rank" in said[1]
        assert "do not share a network namespace" in said[1]


def test_a_mapping_of_something_else_is_refused():
    for said in run_ranks(_maps_an_impostor, 2, "fixed"):
        assert "RendezvousError: op: the mapped memory is not the heap" in said[0]
        assert "UnsupportedError: op: device 0" in said[1]
        assert "cannot reach the memory of rank" in said[1]


def _write_down(log: Path, name: str, then: Callable[[], None] | None = None) -> None:
    with log.open("a") as file:
        file.write(f"{name}\n")
    if then is not None:
        then()


def _closes_in_order(store, rank, world, path, kind):
    os.environ["RINGCOMM_CUDA_HEAP"] = kind
    log = Path(path) / str(rank)
    cuda.use(EmulatedRuntime())
    heap = device_heap.device_heap(0)
    heap.memory.close = partial(_write_down, log, "free", heap.memory.close)  # type: ignore[method-assign]
    globals()["kept"] = [
        map_device_heap(h, heap, "op", "the reader")
        for h in exchange_handles(store, rank, world, heap)
    ]
    (opened,) = device_peers._mappings.opened.values()
    opened.memory.close = partial(_write_down, log, "close", opened.memory.close)  # type: ignore[method-assign]
    # A communicator closes before both.
    Finalize(None, _write_down, (log, "communicator"), exitpriority=100)
    child = os.fork()
    if child == 0:
        globals()["kept"].clear()
        device_peers.close_mappings()
        device_peers._inherited.clear()  # as at interpreter exit
        gc.collect()
        device_heap.close_heaps()
        os._exit(0)
    os.waitpid(child, 0)
    await_all(store, "mapped", world)


@pytest.mark.parametrize("kind", ["growing", "fixed"])
def test_at_exit_mappings_are_closed_before_the_heap_and_a_forked_child_closes_none(tmp_path, kind):
    run_ranks(_closes_in_order, 2, str(tmp_path), kind)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text().split() == ["communicator", "close", "free"]
