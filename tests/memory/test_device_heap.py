# SPDX-License-Identifier: Apache-2.0
"""The heap of a device: allocations, reuse, limits, exit and fork; on emulated devices."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch.distributed import FileStore

import ringcomm
from ringcomm import ArgumentError, HeapError, UnsupportedError, cuda
from ringcomm.memory import device_heap
from ringcomm.memory.device_heap import PAGE_BYTES
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER
from tests.support.exact import MOVABLE
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

MIB = 1 << 20


def use(**options: int) -> EmulatedRuntime:
    runtime = EmulatedRuntime(**options)  # type: ignore[arg-type]
    cuda.use(runtime)
    return runtime


@pytest.fixture(params=["growing", "fixed"])
def runtime(monkeypatch, request) -> Iterator[EmulatedRuntime]:
    """Two devices with heaps of at most 8 MiB, growing or fixed."""
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP_BYTES", "8M")
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", request.param)
    runtime = use(devices=2, memory_bytes=64 * MIB)
    yield runtime
    while Gate.closed:
        Gate.closed[0].open()
    device_heap.close_heaps()
    assert runtime.allocated() == []
    cuda.use(None)


class Gate:
    """Work on a stream that lasts until :meth:`open` is called, or the test ends."""

    closed: ClassVar[list[Gate]] = []

    def __init__(self, runtime: EmulatedRuntime, stream: int, device: int = 0) -> None:
        self._opened = threading.Event()
        runtime.run_on_stream(device, stream, self._wait)
        self.closed.append(self)

    def _wait(self) -> None:
        self._opened.wait()

    def open(self) -> None:
        self.closed.remove(self)
        self._opened.set()


def used(device: int = 0) -> int:
    gc.collect()
    return ringcomm.heap_stats(f"cuda:{device}")["used_bytes"]


@pytest.mark.parametrize("dtype", MOVABLE)
def test_every_dtype(runtime, dtype):
    for shape in ((7,), (2, 3), (), (0, 4), (70_000,)):
        made = ringcomm.zeros(shape, dtype=dtype, device="cuda")
        assert (made.dtype, made.shape) == (dtype, torch.Size(shape))
        assert made.is_contiguous()
        if made.numel():
            assert not made.view(-1).view(torch.uint8).any()
            heap = device_heap.device_heap(0)
            assert heap.contains(made.data_ptr(), made.numel() * dtype.itemsize)
            assert (made.data_ptr() - heap.base_ptr) % 256 == 0
            assert runtime.device_of(made) == 0


def test_each_device_has_a_heap_of_its_own(runtime):
    one, two = (
        ringcomm.empty(100, device="cuda:0"),
        ringcomm.empty(100, device=torch.device("cuda:1")),
    )
    assert (runtime.device_of(one), runtime.device_of(two)) == (0, 1)
    assert len(runtime.allocated()) == 2
    with runtime.on_device(1):
        assert runtime.device_of(ringcomm.empty(1, device="cuda")) == 1
    host = ringcomm.empty(100, device="cpu")
    assert ringcomm.memory.host_heap.process_heap().contains(host.data_ptr(), 400)


def test_a_view_keeps_its_memory_and_the_last_one_gives_it_back(runtime):
    before = used()
    tensor = ringcomm.zeros(2, 1000, 256, device="cuda")
    view = tensor[1].t()
    address = tensor.data_ptr()
    del tensor
    assert used() == before + 2_048_000
    del view
    assert used() == before
    assert ringcomm.empty(2, 1000, 256, device="cuda").data_ptr() == address


def test_statistics_add_up(runtime):
    kept = ringcomm.empty(1000, device="cuda")
    stats = ringcomm.heap_stats(device="cuda")
    fixed = device_heap.device_heap(0).memory.why_fixed
    assert stats["capacity_bytes"] == 8 * MIB
    assert stats["committed_bytes"] == (8 * MIB if fixed else 2 * MIB)
    assert stats["used_bytes"] + stats["free_bytes"] == 8 * MIB
    assert stats["used_bytes"] >= kept.numel() * 4
    assert 0 < stats["largest_free_bytes"] <= stats["free_bytes"]


def test_full_heap_says_what_is_needed(runtime):
    kept = ringcomm.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(HeapError) as raised:
        ringcomm.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    free = ringcomm.heap_stats("cuda")["free_bytes"]
    text = str(raised.value)
    for word in (
        "ringcomm.empty: needs 5242880 bytes, ",
        f"free {free} bytes",
        "of the 8388608 bytes",
        "RINGCOMM_CUDA_HEAP_BYTES",
    ):
        assert word in text, text
    del kept
    assert ringcomm.zeros(5 * MIB, dtype=torch.uint8, device="cuda").numel() == 5 * MIB


def test_a_device_without_room_for_the_heap(monkeypatch):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "fixed")
    runtime = use(memory_bytes=6 * MIB)
    other = runtime.allocate(0, 3 * MIB)
    with pytest.raises(HeapError) as raised:
        device_heap.device_heap(0, 4 * MIB)
    text = str(raised.value)
    assert "needs 4194304 bytes, free 3145728 bytes of the 6291456 bytes of device 0" in text
    assert "out of memory" in text
    assert runtime.allocated() == [other]
    assert device_heap.device_heap(0, 2 * MIB).capacity_bytes == 2 * MIB
    device_heap.close_heaps()


def test_sizes(monkeypatch):
    monkeypatch.delenv("RINGCOMM_CUDA_HEAP_BYTES", raising=False)
    for memory_bytes in (1 << 33, 64 * MIB):
        use(memory_bytes=memory_bytes)
        assert device_heap.device_heap(0).capacity_bytes == memory_bytes
        device_heap.close_heaps()
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "fixed")
    for memory_bytes, default in ((1 << 33, 1 << 30), (64 * MIB, 32 * MIB), (3 * MIB, PAGE_BYTES)):
        use(memory_bytes=memory_bytes)
        assert device_heap.device_heap(0).capacity_bytes == default
        device_heap.close_heaps()
    use()
    with pytest.raises(ArgumentError, match="heap_bytes: expected at least 2097152"):
        device_heap.device_heap(0, 1000)
    assert device_heap.device_heap(0, 4 * MIB + 1).capacity_bytes == 6 * MIB
    with pytest.raises(HeapError, match="exists already with 6291456 bytes"):
        device_heap.device_heap(0, 7 * MIB)
    assert device_heap.device_heap(0, 5 * MIB) is device_heap.device_heap(0)
    device_heap.close_heaps()
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP_BYTES", "12 lots")
    with pytest.raises(ArgumentError, match="RINGCOMM_CUDA_HEAP_BYTES: expected a number of bytes"):
        device_heap.device_heap(0)


# ---- work that is under way ----------------------------------------------------------------------


def test_memory_is_not_reused_while_the_stream_has_work(runtime):
    tensor = ringcomm.empty(1000, device="cuda")
    before, address = used(), tensor.data_ptr()
    gate = Gate(runtime, runtime.current_stream(0))
    del tensor
    assert used() == before
    assert ringcomm.empty(1000, device="cuda").data_ptr() != address
    gate.open()
    runtime.synchronize(0)
    assert ringcomm.empty(1000, device="cuda").data_ptr() == address


def test_the_stream_of_the_allocation_counts_wherever_the_tensor_dies(runtime):
    stream = runtime.make_stream(0)
    with runtime.on_stream(stream):
        tensor = ringcomm.empty(1000, device="cuda")
    gate, before = Gate(runtime, stream.handle), used()
    thread = threading.Thread(target=lambda held: held.clear(), args=([tensor],))
    del tensor
    thread.start()
    thread.join()
    del thread
    assert used() == before
    gate.open()
    runtime.synchronize(0)
    assert used() < before


def test_a_further_stream_counts_once_it_is_named(runtime):
    stream = runtime.make_stream(0)
    tensors = [ringcomm.empty(1000, device="cuda") for _ in range(2)]
    gate = Gate(runtime, stream.handle)
    device_heap.keep_for_stream(0, tensors[0][10:], stream)
    both, one_bytes = used(), 4096
    tensors.clear()
    assert used() == both - one_bytes
    gate.open()
    runtime.synchronize(0)
    assert used() == both - 2 * one_bytes


def test_other_tensors_are_left_to_torch(runtime):
    stream, tensor = runtime.make_stream(0), torch.zeros(10)
    gate = Gate(runtime, stream.handle)
    device_heap.keep_for_stream(0, tensor, stream)
    assert [kept.data_ptr() for _, kept in runtime._kept] == [tensor.data_ptr()]
    gate.open()


def test_a_full_heap_waits_for_work_that_ends(runtime):
    tensor = ringcomm.empty(6 * MIB, dtype=torch.uint8, device="cuda")
    gate = Gate(runtime, runtime.current_stream(0))
    del tensor
    threading.Timer(0.05, gate.open).start()
    assert ringcomm.empty(7 * MIB, dtype=torch.uint8, device="cuda").numel() == 7 * MIB


def test_nothing_is_handed_out_in_a_capture(runtime):
    with (
        runtime.capture(),
        pytest.raises(UnsupportedError, match=r"ringcomm\.empty: .* is capturing a graph"),
    ):
        ringcomm.empty(1000, device="cuda")


def test_what_dies_in_a_capture_is_free_after_it(runtime):
    before, tensor = used(), ringcomm.empty(1000, device="cuda")
    with runtime.capture():
        del tensor  # no event can be recorded at this point
        assert used() > before
    assert used() == before


# ---- lifetime ------------------------------------------------------------------------------------


def test_a_closed_heap_takes_no_allocations_back(runtime):
    tensor = ringcomm.empty(1000, device="cuda")
    heap = device_heap.device_heap(0)
    assert device_heap.heap_of_token(heap.token) is heap
    device_heap.close_heaps()
    del tensor
    assert runtime.allocated() == []
    assert device_heap.existing_heap(0) is None
    again = device_heap.device_heap(0)
    assert again.token != heap.token
    assert runtime.read(0, again.base_ptr, 8) == again.token.to_bytes(8, "little")


def test_another_runtime_has_another_heap(runtime):
    heap, tensor = device_heap.device_heap(0), ringcomm.empty(10, device="cuda")
    other = use()
    assert other.device_of(ringcomm.empty(10, device="cuda")) == 0
    assert runtime.allocated() == []
    assert device_heap.device_heap(0) is not heap
    del tensor
    device_heap.close_heaps()
    assert other.allocated() == []


def _ends(store, rank, world):
    """Keeps a tensor until the interpreter exits."""
    runtime = use()
    globals()["kept"] = ringcomm.empty(1000, device="cuda")
    memory = device_heap.device_heap(0).memory
    close = memory.close

    def told() -> None:
        store.set("freed", "0")
        close()

    memory.close = told  # type: ignore[method-assign]
    return len(runtime.allocated())


def _ends_with_store(store, rank, world, path, kind):
    os.environ["RINGCOMM_CUDA_HEAP"] = kind
    return _ends(FileStore(path, 1), rank, world)


@pytest.mark.parametrize("kind", ["growing", "fixed"])
def test_the_heap_is_given_back_at_exit(tmp_path, kind):
    path = str(tmp_path / "store")
    assert run_ranks(_ends_with_store, 1, path, kind) == [1]
    assert FileStore(path, 1).get("freed") == b"0"


class OfOneProcess(EmulatedRuntime):
    """Exits a forked child that calls the runtime."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pid = os.getpid()

    def current_stream(self, device: int) -> int:
        if self.pid != os.getpid():
            os._exit(3)
        return super().current_stream(device)


def _forks(store, rank, world):
    runtime = OfOneProcess()
    cuda.use(runtime)
    kept = [ringcomm.empty(100_000, device="cuda") for _ in range(4)]
    before = used()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kept.clear()
            gc.collect()
            device_heap.close_heaps()
            try:
                ringcomm.empty(3, device="cuda")
            except ringcomm.ForkError:
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert used() == before
    assert len(runtime.allocated()) == 1
    kept.clear()
    return used() < before


def test_fork():
    assert run_ranks(_forks, 1) == [True]
