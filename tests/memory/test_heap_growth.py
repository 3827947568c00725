# SPDX-License-Identifier: Apache-2.0
"""Device heaps that grow: chunks, limits, and processes that map later chunks."""

from __future__ import annotations

import gc
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, Communicator, HeapError, PeerLost, cuda
from ringcomm.comm.peer_memory import peer_tensors
from ringcomm.cuda import virtual_memory
from ringcomm.memory import chunk_service, device_heap, device_memory
from tests.proof.faults.device.rig import until
from tests.support.device_worlds import OPTIONS, Devices, on_host
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import COMPILER, library
from tests.support.faults import die
from tests.support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

MIB = 1 << 20
COUNT = 700_000  # float32 elements: more than a chunk of 2 MiB


@pytest.fixture
def runtime(monkeypatch) -> Iterator[EmulatedRuntime]:
    monkeypatch.delenv("RINGCOMM_CUDA_HEAP_BYTES", raising=False)
    made = EmulatedRuntime(memory_bytes=64 * MIB)
    cuda.use(made)
    yield made
    device_heap.close_heaps()
    assert made.allocated() == []
    assert library().emu_vmm_in_use() == 0
    cuda.use(None)


def take(size_bytes: int) -> torch.Tensor:
    return ringcomm.zeros(size_bytes, dtype=torch.uint8, device="cuda")


def committed() -> int:
    return ringcomm.heap_stats("cuda")["committed_bytes"]


# ---- one process ---------------------------------------------------------------------------------


def test_a_heap_takes_little_and_grows_as_it_fills(runtime, monkeypatch):
    monkeypatch.setattr(device_memory, "GROWTH_BYTES", 8 * MIB)
    heap = device_heap.device_heap(0)
    assert (committed(), heap.capacity_bytes) == (2 * MIB, 64 * MIB)
    kept, sizes = [], []
    for _ in range(8):
        kept.append(take(3 * MIB))
        sizes.append(committed() // MIB)
    # The heap doubles up to the step size, and then grows by steps.
    assert sizes == [4, 8, 16, 16, 16, 24, 24, 32]
    assert all(heap.contains(each.data_ptr(), each.numel()) for each in kept)
    for number, each in enumerate(kept):
        each.fill_(number)  # a tensor across two chunks is ordinary memory
    assert [int(each.sum()) for each in kept] == [3 * MIB * number for number in range(8)]
    assert runtime.memory_info(0) == (32 * MIB, 64 * MIB)


def test_free_space_is_used_before_the_heap_grows(runtime):
    first, second = take(10 * MIB), take(3 * MIB)
    before, address = committed(), first.data_ptr()
    del first
    gc.collect()
    assert take(9 * MIB).data_ptr() == address
    assert committed() == before
    del second


def test_a_step_that_does_not_fit_is_made_smaller(runtime):
    other = runtime.allocate(0, 44 * MIB)
    kept = take(9 * MIB)
    assert committed() == 10 * MIB
    assert take(4 * MIB).numel() == 4 * MIB  # a step of 10 MiB is wanted, and 10 MiB are left
    runtime.free(0, other)
    del kept


def test_a_heap_that_cannot_grow_says_so_and_loses_nothing(runtime):
    kept = take(20 * MIB)
    other = runtime.allocate(0, 30 * MIB)
    before = ringcomm.heap_stats("cuda")
    with pytest.raises(HeapError) as raised:
        take(30 * MIB)
    text = str(raised.value)
    for word in (
        f"ringcomm.zeros: needs {30 * MIB} bytes, and the heap on device 0 cannot grow",
        f"it has {before['committed_bytes']} bytes, of which {before['used_bytes']} are used",
        f"the device has {64 * MIB - before['committed_bytes'] - 30 * MIB} bytes free of "
        f"{64 * MIB}",
        "out of memory",
        "torch.cuda.empty_cache()",
    ):
        assert word in text, text
    assert ringcomm.heap_stats("cuda") == before
    runtime.free(0, other)
    assert take(40 * MIB).numel() == 40 * MIB
    with pytest.raises(HeapError, match=r"cannot grow: .*: its limit is 67108864 bytes\. Free"):
        take(50 * MIB)
    del kept


def test_a_warning_that_is_an_error_leaves_the_heap_as_it_grew(runtime):
    """With -W error, a chunk that cannot be bound to a multicast object raises."""
    kept = take(MIB)
    memory, before = device_heap.device_heap(0).memory, ringcomm.heap_stats("cuda")["used_bytes"]

    def warn(chunks):
        if len(chunks) > 1:
            raise RuntimeWarning("not bound")

    memory.on_grown(warn)
    with pytest.raises(RuntimeWarning, match="not bound"):
        take(6 * MIB)
    assert ringcomm.heap_stats("cuda")["used_bytes"] == before
    assert memory.reached_bytes == memory.committed_bytes >= 7 * MIB
    assert take(5 * MIB).numel() == 5 * MIB  # fits without another chunk
    del kept


def test_a_heap_that_cannot_grow_waits_for_work_that_ends(runtime):
    tensor, opened = take(40 * MIB), threading.Event()
    runtime.run_on_stream(0, runtime.current_stream(0), lambda: opened.wait() and None)
    del tensor
    gc.collect()
    threading.Timer(0.05, opened.set).start()
    assert take(50 * MIB).numel() == 50 * MIB


def test_the_capacity_is_a_limit(runtime, monkeypatch):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP_BYTES", "8M")
    with pytest.raises(HeapError) as raised:
        take(9 * MIB)
    assert (
        f"of the {8 * MIB} bytes of the heap on device 0; the device has {62 * MIB} bytes free of "
        f"{64 * MIB}. Free tensors of the heap, or raise RINGCOMM_CUDA_HEAP_BYTES"
    ) in str(raised.value)
    assert committed() == 2 * MIB


@pytest.mark.parametrize("kind", ["growing", "fixed"])
def test_a_larger_limit_is_no_remedy_if_the_device_is_full_too(runtime, monkeypatch, kind):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP_BYTES", "32M")
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", kind)
    heap = device_heap.device_heap(0)
    free_bytes = 12 * MIB
    other = runtime.allocate(0, 64 * MIB - heap.memory.committed_bytes - free_bytes)
    with pytest.raises(HeapError) as raised:
        take(48 * MIB)
    assert (
        f"; the device has {free_bytes} bytes free of {64 * MIB}. Free tensors of the heap, or end "
        "other programs on the device and raise RINGCOMM_CUDA_HEAP_BYTES (or heap_bytes=) before "
        "the heap's first use; torch.cuda.empty_cache()"
    ) in str(raised.value)
    if kind == "growing":  # the limit alone would allow it
        with pytest.raises(HeapError, match=r"bytes free of 67108864: .*\. Free tensors") as raised:
            take(20 * MIB)
        assert "RINGCOMM_CUDA_HEAP_BYTES" not in str(raised.value)
    runtime.free(0, other)


def test_a_device_without_room_for_any_heap(runtime):
    other = runtime.allocate(0, 63 * MIB)
    with pytest.raises(HeapError, match="needs 2097152 bytes, free 1048576 bytes of the 67108864"):
        device_heap.device_heap(0)
    assert library().emu_vmm_in_use() == 0
    runtime.free(0, other)


@pytest.mark.parametrize("step", ["cuMemMap", "cuMemSetAccess"])
def test_a_chunk_that_the_driver_does_not_map_is_given_back(runtime, monkeypatch, step):
    device_heap.device_heap(0)
    before, free_bytes = library().emu_vmm_in_use(), runtime.memory_info(0)[0]
    original = virtual_memory.DriverCalls.__getattr__

    def refusing(calls: Any, name: str) -> Any:
        def refuse(*arguments: object) -> None:
            raise virtual_memory.DriverRefusal(f"{name}: no", 1)

        return refuse if name == step else original(calls, name)

    monkeypatch.setattr(virtual_memory.DriverCalls, "__getattr__", refusing)
    with pytest.raises(HeapError, match=f"cannot grow: .*{step}: no"):
        take(3 * MIB)
    monkeypatch.undo()
    assert (library().emu_vmm_in_use(), runtime.memory_info(0)[0]) == (before, free_bytes)
    assert take(3 * MIB).numel() == 3 * MIB


# ---- no virtual memory ---------------------------------------------------------------------------


def why_fixed(runtime: EmulatedRuntime) -> str:
    cuda.use(runtime)
    heap = device_heap.device_heap(0)
    assert heap.capacity_bytes == heap.memory.committed_bytes == 32 * MIB
    with pytest.raises(HeapError, match="; the heap does not grow: ") as raised:
        take(33 * MIB)
    device_heap.close_heaps()
    assert runtime.allocated() == []
    reason = device_heap.why_heap_is_fixed(runtime, 0)
    assert reason in str(raised.value)
    return reason


def test_a_device_without_virtual_memory_has_one_allocation(monkeypatch):
    monkeypatch.delenv("RINGCOMM_CUDA_HEAP_BYTES", raising=False)
    reason = why_fixed(EmulatedRuntime(memory_bytes=64 * MIB, virtual_memory=False))
    assert "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0" in reason
    monkeypatch.setitem(virtual_memory.ENTRY_POINTS, "cuMemOfTheFuture", [])
    reason = why_fixed(EmulatedRuntime(memory_bytes=64 * MIB))
    assert "the driver has no cuMemOfTheFuture: it is older than CUDA 10.2" in reason
    monkeypatch.undo()
    monkeypatch.delenv("RINGCOMM_CUDA_HEAP_BYTES", raising=False)
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "fixed")
    assert why_fixed(EmulatedRuntime(memory_bytes=64 * MIB)) == "RINGCOMM_CUDA_HEAP=fixed is set"
    cuda.use(None)


def test_on_a_gpu_a_heap_that_does_not_grow_warns(monkeypatch):
    runtime = EmulatedRuntime(memory_bytes=64 * MIB, virtual_memory=False)
    runtime.kind = "cuda"
    cuda.use(runtime)
    with pytest.warns(RuntimeWarning, match="does not grow: the device has no virtual memory"):
        device_heap.device_heap(0)
    device_heap.close_heaps()
    cuda.use(None)


def test_an_unknown_kind_of_heap_is_refused(runtime, monkeypatch):
    monkeypatch.setenv("RINGCOMM_CUDA_HEAP", "elastic")
    with pytest.raises(ArgumentError, match='RINGCOMM_CUDA_HEAP: expected "growing" or "fixed"'):
        device_heap.device_heap(0)


# ---- several processes ---------------------------------------------------------------------------


def connect(store: Any, rank: int, world: int, name: str = "world") -> Communicator:
    return Communicator.from_store(store, rank, world, name=name, device="cuda:0", options=OPTIONS)


def sum_of(comm: Communicator, count: int, kept: list[torch.Tensor], **how: Any) -> None:
    """All-reduces a new tensor of the heap, and keeps it."""
    tensor = ringcomm.empty(count, device="cuda:0").fill_(comm.rank + 1.0)
    comm.all_reduce(tensor, **how)
    total = comm.world_size * (comm.world_size + 1) / 2
    assert torch.equal(on_host(tensor), torch.full((count,), total))
    kept.append(tensor)


def lent(comm: Communicator) -> tuple[int, int]:
    """Returns the bytes that this rank's kernels lend to peers, and the bytes that its heap has."""
    core = comm.engine.device_core  # type: ignore[attr-defined]
    return core._lent_bytes, core.heap.memory.committed_bytes


def no_leak(devices: Devices, store: Any, world: int) -> int:
    """Closes everything; returns how much device memory is still in use."""
    gc.collect()
    device_heap.close_mappings()
    store.add("unmapped", 1)
    until(lambda: store.add("unmapped", 0) >= world)
    devices.close()
    until(lambda: all(each.name != "ringcomm-heap" for each in threading.enumerate()))
    return int(library().emu_vmm_in_use())


def _grows(store, rank, world):
    """Every step needs more than the heap has, and the ranks grow at different times."""
    devices = Devices("emulated", devices=1)
    sizes: set[int] = set()
    kept: list[torch.Tensor] = []
    with connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        for step in range(6):
            if rank == step % world:
                kept.append(ringcomm.empty(COUNT, device="cuda:0"))
            how = {"algorithm": ("two_shot", "ring")[step % 2]}
            sum_of(comm, COUNT, kept, **how)
            sizes.add(lent(comm)[1])
            assert lent(comm)[0] == lent(comm)[1]
        with connect(store, rank, world, "second") as second:  # heaps have many chunks by now
            sum_of(second, COUNT, kept)
            sum_of(comm, COUNT, kept)
            assert lent(second) == lent(comm)
        assert [len(devices.emulated.opened()), device_heap.opened_heaps()] == [world - 1] * 2
        assert len(sizes) >= 3
        kept.clear()
        comm.barrier()
    return no_leak(devices, store, world)


def test_heaps_grow_between_the_calls_of_several_processes():
    assert run_ranks(_grows, 3, timeout_s=100) == [0, 0, 0]


def _two_threads(store, process, processes):
    """Two of four ranks share a process, whose heap grows for both ranks."""
    devices, errors = Devices("emulated", devices=1), []

    def run(rank: int) -> None:
        stream = devices.runtime.make_stream(0)
        kept: list[torch.Tensor] = []
        try:
            with (
                connect(store, rank, 2 * processes) as comm,
                devices.runtime.on_stream(stream),
                devices.as_on_gpu(comm),
            ):
                for _ in range(3):
                    sum_of(comm, COUNT, kept)
                assert lent(comm)[0] == lent(comm)[1]
                kept.clear()
                comm.barrier()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(2 * process + each,)) for each in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return no_leak(devices, store, processes)


def test_ranks_that_are_threads_share_what_grows():
    assert run_ranks(_two_threads, 2, timeout_s=100) == [0, 0]


def test_ranks_of_one_process_need_no_service(monkeypatch):
    monkeypatch.setattr(chunk_service, "ChunkService", None)
    devices = Devices("emulated", devices=2)
    world = devices.new_world(2, (0, 1))

    def body(comm: Communicator) -> None:
        tensor = ringcomm.empty(COUNT, device=f"cuda:{comm.rank}").fill_(1.0)
        comm.all_reduce(tensor)
        assert torch.equal(on_host(tensor), torch.full((COUNT,), 2.0))
        assert lent(comm)[0] == lent(comm)[1]

    devices.run(world, body)
    world.close()
    devices.close()


def _replays(store, rank, world):
    """Replays a graph while both heaps grow."""
    devices = Devices("emulated", devices=1)
    runtime = devices.emulated
    kept: list[torch.Tensor] = []
    with connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        tensor = ringcomm.empty(COUNT, device="cuda:0")
        stream = runtime.make_stream(0)
        with runtime.capture(0, stream) as graph:
            comm.all_reduce(tensor)
        for turn in range(3):
            tensor.fill_(rank + 1.0)
            with runtime.on_stream(stream):
                runtime.replay(graph)
                growing = threading.Thread(
                    target=lambda count: kept.append(ringcomm.empty(count, device="cuda:0")),
                    args=(COUNT << turn,),
                )
                growing.start()
                growing.join()
                runtime.synchronize(0)
                assert torch.equal(tensor, torch.full((COUNT,), 3.0))
                sum_of(comm, COUNT, kept)
        assert lent(comm)[0] == lent(comm)[1] > 8 * MIB
        kept.clear()
        del tensor
        comm.barrier()
    return no_leak(devices, store, world)


def test_heaps_grow_beside_a_graph():
    assert run_ranks(_replays, 2, timeout_s=100) == [0, 0]


def _is_slow(store, rank, world, mutant):
    """Rank 1 delays mapping rank 0's new chunks; until it has mapped them, kernels copy."""
    devices = Devices("emulated", devices=1)
    kept: list[torch.Tensor] = []
    device_memory.GROWTH_WAIT_S = 0.05
    with connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        sum_of(comm, 5000, kept)
        maps, original = threading.Event(), device_memory.PeerChunks._map

        def late(self: Any, sent: Any) -> None:
            maps.wait()
            original(self, sent)

        if rank == 1:
            device_memory.PeerChunks._map = late  # type: ignore[method-assign]
        comm.barrier()
        if rank == 0 and mutant:
            memory = comm.engine.device_core.heap.memory  # type: ignore[attr-defined]
            service = memory._service
            service._reached = lambda heap: heap.committed_bytes  # whatever peers have mapped
        for _ in range(3):
            sum_of(comm, COUNT, kept)
        if rank == 0:
            assert lent(comm)[0] < lent(comm)[1]
            comm.timeout = 0.2
            with pytest.raises(HeapError, match=r"has grown to .* other processes have mapped"):
                peer_tensors(comm, kept[-1], "the test")
            comm.timeout = 20.0
        comm.barrier()
        devices.runtime.synchronize(0)
        maps.set()
        until(lambda: lent(comm)[0] == lent(comm)[1])
        views = peer_tensors(comm, kept[-1], "the test")
        assert float(views[1 - rank][COUNT - 1]) == 3.0
        sum_of(comm, COUNT, kept)
        kept.clear()
        del views
        comm.barrier()
    return no_leak(devices, store, world)


def test_memory_that_a_peer_has_not_mapped_yet_is_copied():
    assert run_ranks(_is_slow, 2, False, timeout_s=100) == [0, 0]


def test_memory_is_not_lent_before_all_have_mapped_it():
    with pytest.raises(Exception):  # noqa: B017 - the reader dies of a bad address
        run_ranks(_is_slow, 2, True, timeout_s=30)


def _refused(store, rank, world):
    """A rank whose device is full raises, and the next call works on all ranks."""
    devices = Devices("emulated", devices=1, memory_bytes=32 * MIB)
    kept: list[torch.Tensor] = []
    with connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        sum_of(comm, COUNT, kept)
        if rank == 0:
            with pytest.raises(HeapError, match=r"cannot grow: it has"):
                ringcomm.empty(40 * MIB, device="cuda:0")
        sum_of(comm, COUNT, kept)
        kept.clear()
        comm.barrier()
    return no_leak(devices, store, world)


READER = r"rank 1 \(pid \d+, device 0: Emulated GPU at \S+\)"
REASON = r"cuMem: CUDA error 2: out of memory"


def _is_refused_later(store, rank, world, side):
    """From its second chunk on, rank 1 cannot map rank 0's heap, or rank 0 cannot export it."""
    devices = Devices("emulated", devices=1)
    kept: list[torch.Tensor] = []
    device_memory.GROWTH_WAIT_S = 1000.0  # no growth waits for a refusing peer
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with connect(store, rank, world) as comm, devices.as_on_gpu(comm):
            sum_of(comm, 5000, kept)
            comm.barrier()

            def refuse(*arguments: Any) -> None:
                raise virtual_memory.DriverRefusal("cuMem: CUDA error 2: out of memory", 2)

            if rank == ("owner", "reader").index(side):
                method = "adopt" if side == "reader" else "export"
                setattr(virtual_memory.ChunkedRange, method, refuse)
            comm.barrier()
            if rank == 0:
                kept.append(ringcomm.empty(COUNT, device="cuda:0").fill_(1.0))
            for turn in range(2):
                tensor = kept[-1] if rank == 0 else torch.ones(COUNT)
                comm.all_reduce(tensor)
                assert torch.equal(on_host(tensor), torch.full((COUNT,), 2.0))
                if rank == 0:
                    kept.append(ringcomm.empty(COUNT << turn, device="cuda:0")[:COUNT].fill_(1.0))
            said = "no error"
            if rank == 0:
                assert lent(comm)[0] < lent(comm)[1]
                comm.timeout = 1000.0
                with pytest.raises(HeapError) as raised:
                    comm.engine.device_core.await_peers("step")  # type: ignore[attr-defined]
                said = str(raised.value)
            else:  # nor does a rendezvous wait for a refused chunk
                (opened,) = device_heap._mappings.opened.values()
                assert not opened.memory.await_bytes(64 * MIB, 1000.0)
                assert re.search(REASON, opened.memory.refusal)
                del opened
            comm.barrier()
            devices.runtime.synchronize(0)
            kept.clear()
            del tensor
    texts = [str(each.message) for each in warned if issubclass(each.category, RuntimeWarning)]
    return texts, said, no_leak(devices, store, world)


@pytest.mark.parametrize(
    ("side", "owner_says", "reader_says"),
    [
        (
            "reader",
            f"but {READER} cannot map a chunk of it: {REASON}",
            f"{READER}: the heap of rank 0 .* has grown, but a new chunk of it cannot be mapped: ",
        ),
        (
            "owner",
            f"but this process cannot send a chunk of it to a peer: {REASON}",
            f"{READER}: the heap of rank 0 .*: its process cannot send a chunk: ",
        ),
    ],
    ids=["reader", "owner"],
)
def test_a_chunk_that_no_peer_can_map_is_no_secret(side, owner_says, reader_says):
    (texts, said, left), reader = run_ranks(_is_refused_later, 2, side, timeout_s=100)
    assert [left, reader[1:]] == [0, ("no error", 0)]
    (warned,), (warned_there,) = texts, reader[0]
    assert re.search(f"the heap on device 0 has grown, {owner_says}", warned), warned
    assert re.search(reader_says + REASON, warned_there), warned_there
    assert re.match(f"step on rank 0 of 2: the heap on device 0 has grown, {owner_says}", said)
    assert re.search(r"\. Only \d+ of its \d+ bytes are mapped by all processes\. Free", said), said


def test_a_refused_growth_leaves_all_ranks_usable():
    assert run_ranks(_refused, 2, timeout_s=100) == [0, 0]


def _loses_a_peer(store, rank, world):
    devices = Devices("emulated", devices=1)
    kept: list[torch.Tensor] = []
    comm = connect(store, rank, world)
    with devices.as_on_gpu(comm):
        sum_of(comm, COUNT, kept)
        views = peer_tensors(comm, kept[-1], "the test")
        comm.barrier()
        if rank == world - 1:
            die()
        with pytest.raises(PeerLost):
            while True:
                comm.barrier()
                devices.runtime.synchronize(0)
        # The dead rank's memory is still mapped, and the heap does not wait for that rank.
        assert float(views[world - 1][COUNT - 1]) == world * (world + 1) / 2
        kept.append(ringcomm.empty(4 * COUNT, device="cuda:0"))
        assert comm.engine.device_core.heap.memory.await_peers(10.0)  # type: ignore[attr-defined]
        assert lent(comm)[0] == lent(comm)[1]
        del views
        kept.clear()
    comm.close()


def test_a_peer_that_died_while_mapped_leaves_its_memory():
    with Ranks(_loses_a_peer, 3) as ranks:
        outcomes = ranks.wait(100.0)
    assert [each.ok for each in outcomes] == [True, True, False]


def _forks(store, rank, world):
    """A forked child that lives on does not keep the parent's connections open."""
    devices = Devices("emulated", devices=1)
    kept: list[torch.Tensor] = []
    with connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        sum_of(comm, COUNT, kept)
        service = comm.engine.device_core.heap.memory._service  # type: ignore[attr-defined]
        numbers = [each.fileno() for each in (service._listener, *service._readers)]
        numbers += [each.fileno() for each in service._followed]
        child = os.fork()
        if child == 0:
            for number in numbers:
                with suppress(OSError):
                    os.fstat(number)
                    os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert len(numbers) == 2 * world - 1
        sum_of(comm, COUNT, kept)
        assert lent(comm)[0] == lent(comm)[1]
        kept.clear()
        comm.barrier()
    return no_leak(devices, store, world)


def test_a_fork_closes_the_sockets_of_the_child_alone():
    assert run_ranks(_forks, 2, timeout_s=100) == [0, 0]


# ---- training ------------------------------------------------------------------------------------


def _trains(store, rank, world, stage, kind):
    """Trains a model whose state exceeds the heap's first size, without any option set."""
    os.environ["RINGCOMM_CUDA_HEAP"] = kind
    os.environ.pop("RINGCOMM_CUDA_HEAP_BYTES", None)
    devices = Devices("emulated", devices=1)
    resize = torch.UntypedStorage.resize_

    def in_order(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        devices.runtime.synchronize(0)  # a GPU's allocator does not reuse memory in use
        return resize(storage, size_bytes)

    torch.UntypedStorage.resize_ = in_order  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    with connect(store, rank, world) as comm, devices.as_on_gpu(comm):
        before = lent(comm)[1]
        module: Any = torch.nn.Sequential(torch.nn.Linear(300, 2000), torch.nn.Linear(2000, 300))
        state_bytes = sum(each.nbytes for each in module.parameters())
        module = ringcomm.zero.shard(module, stage, comm=comm)
        optimizer = ringcomm.optim.AdamW(module.parameters(), lr=1e-2)
        for turn in range(2):
            batch = torch.randn(4, 300, generator=torch.Generator().manual_seed(2 * turn + rank))
            module(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: on_host(each) for name, each in zero_state(module).items()}
        after, lends = lent(comm)[1], lent(comm)[0]
        ringcomm.zero.remove_sharding(module)
        del module, optimizer
        comm.barrier()
    return before, after, lends, state_bytes, state


def zero_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return ringcomm.zero.full_state_dict(module)


@pytest.fixture(scope="module")
def of_a_fixed_heap() -> dict[str, torch.Tensor]:
    """Returns the parameters after training with a fixed heap; they are the same at any stage."""
    state: dict[str, torch.Tensor] = run_ranks(_trains, 2, 1, "fixed", timeout_s=100)[0][-1]
    return state


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_whose_state_exceeds_the_first_heap_is_trained(of_a_fixed_heap, stage):
    for before, after, lends, state_bytes, state in run_ranks(
        _trains, 2, stage, "growing", timeout_s=100
    ):
        assert before < state_bytes < after == lends
        assert all(torch.equal(each, of_a_fixed_heap[name]) for name, each in state.items())
