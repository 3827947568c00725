# SPDX-License-Identifier: Apache-2.0
"""Memory of torch, the heap and the device is freed, in whatever order objects are closed."""

import pytest
import torch

import ringcomm
from ringcomm import HeapError
from tests.gpu.device import DEVICE, PLAIN, REAL, plain_bytes, settled_bytes, synchronize
from tests.gpu.worlds import connect, one_launch_world, run_ranks

COUNT = 1 << (20 if REAL else 14)
# The driver may keep this much for itself from one round to the next.
SLACK_BYTES = 8 << 20


def use(world):
    tensors = [ringcomm.zeros(COUNT, device=DEVICE) for _ in range(len(world))]
    world.all_reduce(tensors)
    world.run(lambda comm: comm.all_reduce(torch.ones(COUNT, device=PLAIN)))


def test_worlds_leave_no_memory_behind():
    with one_launch_world(4) as world:
        use(world)  # the first use allocates memory that is kept
    del world
    before = settled_bytes()
    allocated = plain_bytes()
    used = ringcomm.heap_stats(DEVICE)["used_bytes"]
    for _ in range(5 if REAL else 2):
        with one_launch_world(4) as world:
            use(world)
        del world
    assert settled_bytes() >= before - SLACK_BYTES
    assert plain_bytes() == allocated
    assert ringcomm.heap_stats(DEVICE)["used_bytes"] == used


def test_heap_tensors_come_back_with_their_last_view():
    before = ringcomm.heap_stats(DEVICE)["used_bytes"]
    tensor = ringcomm.empty(1 << 20, device=DEVICE)
    view = tensor[1000:].view(torch.int32)
    del tensor
    assert ringcomm.heap_stats(DEVICE)["used_bytes"] > before
    del view
    synchronize()
    again = ringcomm.empty(1 << 20, device=DEVICE)
    del again
    synchronize()
    assert ringcomm.heap_stats(DEVICE)["used_bytes"] == before


def test_a_tensor_outlives_its_world():
    with one_launch_world(2) as world:
        tensors = [ringcomm.zeros(1000, device=DEVICE) + 1 for _ in range(2)]
        world.all_reduce(tensors)
    del world
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def test_a_heap_that_is_too_small_says_what_it_needs():
    stats = ringcomm.heap_stats(DEVICE)
    before = settled_bytes()
    with pytest.raises(HeapError, match=r"free") as raised:
        ringcomm.empty(stats["capacity_bytes"] * 2, dtype=torch.uint8, device=DEVICE)
    assert str(stats["capacity_bytes"] * 2) in str(raised.value)
    assert settled_bytes() >= before - SLACK_BYTES
    assert ringcomm.heap_stats(DEVICE)["used_bytes"] == stats["used_bytes"]


def wait_for_all(store, name, rank, world):
    store.set(f"{name}/{rank}", "1")
    store.wait([f"{name}/{peer}" for peer in range(world)])


def opened_and_closed(store, rank, world):
    """IPC mappings are closed before their memory is freed; else many rounds run out of memory."""
    free_bytes = []
    for turn in range(6):
        with connect(store, rank, world, name=f"turn-{turn}") as comm:
            tensor = torch.full((100_000,), float(rank), device=PLAIN)
            comm.all_reduce(tensor)
            assert bool((tensor == sum(range(world))).all())
            comm.barrier()
        del tensor
        wait_for_all(store, f"closed/{turn}", rank, world)
        free_bytes.append(settled_bytes())
        wait_for_all(store, f"settled/{turn}", rank, world)
    return free_bytes[-1] - free_bytes[1]


def test_processes_leave_no_memory_behind():
    # The processes share the device, so each sees the memory that both hold.
    assert all(change >= -4 * SLACK_BYTES for change in run_ranks(opened_and_closed, 2))


def closes_in_another_order(store, rank, world):
    first, second = (connect(store, rank, world, name=name) for name in ("first", "second"))
    tensor = torch.ones(1000, device=PLAIN)
    for comm in (first, second):
        comm.all_reduce(tensor)
    synchronize()
    ordered = (first, second) if rank == 0 else (second, first)
    for comm in ordered:
        comm.close()
    return tensor[0].item()


def test_ranks_may_close_in_different_orders():
    assert run_ranks(closes_in_another_order, 2) == [4.0, 4.0]


def grows(store, rank, world):
    """Reduces tensors in memory that the heap got after the ranks had met."""
    kept = []
    with connect(store, rank, world) as comm:
        stats = ringcomm.heap_stats(DEVICE)
        before = stats["committed_bytes"]
        beyond = (before - stats["used_bytes"]) // 4
        for count in (COUNT, COUNT + beyond, COUNT):
            tensor = ringcomm.empty(count, device=DEVICE).fill_(rank + 1.0)
            comm.all_reduce(tensor)
            synchronize()
            assert bool((tensor == 3.0).all())
            kept.append(tensor)
        after = ringcomm.heap_stats(DEVICE)["committed_bytes"]
        core = comm.engine.device_core
        # Peers map new heap memory, and read it in place.
        assert core.heap.memory.await_peers(10.0)
        assert core._lent_bytes == after
        del tensor
        kept.clear()
        comm.barrier()
    return core.heap.memory.why_fixed, before, after


def test_heaps_of_processes_grow():
    for why_fixed, before, after in run_ranks(grows, 2):
        assert why_fixed == ""
        assert after > before
