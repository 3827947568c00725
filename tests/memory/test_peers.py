# SPDX-License-Identifier: Apache-2.0
"""A peer's heap is mapped once for all communicators, and unmapped after the last one closes."""

import gc
import os

import ringcomm
from ringcomm import Communicator
from ringcomm.memory import host_heap
from tests.support.faults import die
from tests.support.ranks import Ranks, run_ranks


def _mapped_heaps() -> int:
    gc.collect()
    return len(host_heap._mapped)


def _shares_mappings(store, rank, world):
    first = Communicator.from_store(store, rank, world, timeout=60)
    assert _mapped_heaps() == world - 1
    group = first.new_group(range(world))
    pair = first.new_group([0, 1])
    assert _mapped_heaps() == world - 1
    first.barrier()
    first.close()
    del first
    assert group is not None
    group.barrier()
    assert _mapped_heaps() == world - 1
    if pair is not None:
        pair.barrier()
        pair.close()
    group.close()
    del group, pair
    return _mapped_heaps()


def test_mappings_are_shared_and_let_go():
    assert run_ranks(_shares_mappings, 3) == [0, 0, 0]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _builds_again_and_again(store, rank, world):
    before = (0, 0)
    for turn in range(12):
        with Communicator.from_store(store, rank, world, name=f"n{turn}", timeout=60) as comm:
            comm.all_reduce(ringcomm.zeros(100))
            comm.barrier()
        del comm
        gc.collect()
        if turn == 2:
            before = _descriptors(), ringcomm.heap_stats()["used_bytes"]
    return before, (_descriptors(), ringcomm.heap_stats()["used_bytes"])


def test_nothing_accumulates():
    for before, after in run_ranks(_builds_again_and_again, 2):
        # One closed communicator may still wait for its peer to detach.
        assert after[0] == before[0]
        assert after[1] <= before[1] + (16 << 20)


def _outlives(store, rank, world):
    comm = Communicator.from_store(store, rank, world, timeout=60)
    tensor = ringcomm.zeros(1000)
    comm.all_reduce(tensor)
    if rank == 0:
        die()
    gone = False
    try:
        comm.barrier()
    except ringcomm.PeerLost:
        gone = True
    # The dead peer's pages are still mapped, so accesses to them do not fault.
    comm.close()
    return gone and ringcomm.zeros(10).sum().item() == 0


def test_a_mapping_outlives_its_process():
    with Ranks(_outlives, 2) as ranks:
        outcomes = ranks.wait()
    assert outcomes[1].value is True, outcomes[1].describe()
