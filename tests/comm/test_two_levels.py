# SPDX-License-Identifier: Apache-2.0
"""Sums in groups, computed in two levels: their bits, and when two levels are used."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import (
    CommOptions,
    Communicator,
    MismatchError,
    PeerLost,
    RingcommError,
    _native,
)
from ringcomm.comm.host.rendezvous import are_apart
from ringcomm.memory.host_heap import process_heap
from tests.comm.test_sum_groups import FLOATS, OPS, in_groups, inputs, operator
from tests.memory.test_numa import ELSEWHERE, join_on, own_cpus
from tests.support.exact import REDUCIBLE, equal, op_of, operand, ops_for, reduced, same
from tests.support.memories import put, room
from tests.support.numa_machine import write_machine
from tests.support.ranks import Ranks, run_ranks

GROUPS = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)]


@pytest.fixture
def in_levels() -> Iterator[None]:
    _native.always_sum_in_levels(True)
    yield
    _native.always_sum_in_levels(False)
    _native.wake_workers(False)


def check_bits(comm: Communicator, tensors: list[torch.Tensor], op: str, want, memory) -> None:
    """Checks all_reduce out of place and in place, and both forms of reduce_scatter."""
    rank, world, how = comm.rank, comm.world_size, operator(op)
    whole = put(tensors[rank], memory, rank)
    comm.all_reduce(whole, how)
    assert same(whole, want), (op, memory, "all_reduce")
    share = want.numel() // world
    whole = put(tensors[rank][: share * world], memory, rank)
    out = room(share, want.dtype, memory, rank)
    comm.reduce_scatter_tensor(out, whole, how)
    assert same(out, want[: share * world].split(share)[rank]), (op, memory, "reduce_scatter")
    own = whole.split(share)[rank]
    comm.reduce_scatter_tensor(own, whole, how)
    assert same(own, want[: share * world].split(share)[rank]), (op, memory, "in place")
    counts = [want.numel() - 7 * (world - 1), *[7] * (world - 1)]
    whole = put(tensors[rank], memory, rank)
    out = room(counts[rank], want.dtype, memory, rank)
    comm.reduce_scatter(out, list(whole.split(counts)), how)
    assert same(out, want.split(counts)[rank]), (op, memory, "list")


def run_cases(world_size: int, options: CommOptions, sizes: dict[str, int]) -> None:
    """Checks every op and float type; ``sizes`` has the number of elements by memory."""
    group = options.sum_group_size
    cases = []
    for dtype in FLOATS:
        for memory, elems in sizes.items():
            tensors = inputs(dtype, elems, world_size)
            cases += [(tensors, op, in_groups(tensors, group, op), memory) for op in OPS]

    def body(comm):
        for case in cases:
            check_bits(comm, *case)

    with ringcomm.local_world(world_size, options=options) as world:
        world.run(body)


@pytest.mark.parametrize(("world_size", "group"), GROUPS)
def test_bits_are_those_of_sums_in_groups(in_levels, world_size, group):
    """Results of many pieces, of one piece, and of less than a cache line per rank."""
    options = CommOptions(timeout=60, segment_bytes=2048, sum_group_size=group)
    run_cases(world_size, options, {"plain": 61, "mixed": 12_005, "heap": 90_003})


@pytest.mark.parametrize(("world_size", "group"), [(4, 2), (6, 3)])
def test_pieces_are_read_where_they_lie(in_levels, world_size, group):
    """Pieces of 16 KiB and more in the heap, which ranks read without a copy."""
    options = CommOptions(timeout=60, segment_bytes=32768, sum_group_size=group)
    run_cases(world_size, options, {"heap": 90_003})


def test_several_channels(in_levels):
    _native.wake_workers(True)
    options = CommOptions(timeout=60, sum_group_size=2, channels=3, threads=3)
    run_cases(4, options, {"plain": 800_003})


def test_a_buffer_is_its_users_once_the_call_has_returned(in_levels):
    """No rank reads the buffer any more: a new value that the user writes must not enter a sum."""

    def body(comm):
        data = ringcomm.empty(200_000)
        out = torch.empty(50_000)
        for call in range(40):
            data.fill_(float(call))
            comm.reduce_scatter_tensor(out, data)
            data.fill_(-1e6)
            assert out.unique().tolist() == [4.0 * call]

    with ringcomm.local_world(4, options=CommOptions(timeout=60, sum_group_size=2)) as world:
        world.run(body)


def test_every_dtype_and_op(in_levels):
    def body(comm):
        for dtype in REDUCIBLE:
            for op in ops_for(dtype):
                tensors = [operand(1667, each, 4, dtype, op) for each in range(4)]
                mine = tensors[comm.rank].clone()
                comm.all_reduce(mine, op_of(op))
                assert equal(mine, reduced(tensors, op)), (dtype, op)

    options = CommOptions(timeout=60, segment_bytes=512, slots=2, sum_group_size=2)
    with ringcomm.local_world(4, options=options) as world:
        world.run(body)


def items_sent(comm: Communicator) -> list[int]:
    """By peer: the items that this rank sent only to this peer, on channel 0 (layout.h)."""
    core: Any = comm.engine.core
    heap, world = process_heap(), comm.world_size
    links = 3 * core.channels * world
    first = heap.base_ptr + core.region_offset_bytes + 4096 + 2 * links * 64
    return [ctypes.c_uint32.from_address(first + 64 * peer).value for peer in range(world)]


def talks_with(comm: Communicator, call: Callable[[], object]) -> set[int]:
    before = items_sent(comm)
    call()
    comm.barrier()  # sends one item to each peer
    after = items_sent(comm)
    return {peer for peer in range(comm.world_size) if after[peer] - before[peer] > 1}


def group_and_rail(rank: int, world_size: int, group: int) -> set[int]:
    """Returns the other ranks of a rank's group, and the ranks at its position in other groups."""
    ranks = set(range(world_size))
    return {r for r in ranks if r // group == rank // group or r % group == rank % group} - {rank}


@pytest.mark.parametrize("threads", [1, 3])
def test_only_partial_sums_leave_a_group(in_levels, threads):
    """With one channel and with several channels whose threads all take part."""

    def body(comm):
        comm.engine.core.sum_in_levels()
        tensor = torch.ones(1 << 20)
        return talks_with(comm, lambda: comm.all_reduce(tensor)), tensor.unique().tolist()

    options = CommOptions(timeout=60, sum_group_size=3, channels=threads, threads=threads)
    with ringcomm.local_world(6, options=options) as world:
        found = world.run(body)
    assert found == [(group_and_rail(rank, 6, 3), [6.0]) for rank in range(6)]


def test_when_two_levels_pay():
    """Only groups on different nodes. FP32 sums of 16-bit floats are too wide for groups of 3."""
    few, many = (8 << 20) // 12 * 12, (16 << 20) // 12 * 12 + 12

    def uses_levels(comm, dtype, size_bytes, **how):
        tensor = torch.ones(size_bytes // dtype.itemsize, dtype=dtype)
        others = talks_with(comm, lambda: comm.all_reduce(tensor, **how))
        assert others in (group_and_rail(comm.rank, 6, 3), {*range(6)} - {comm.rank})
        return others == group_and_rail(comm.rank, 6, 3)

    def body(comm):
        assert not comm.engine.core.sums_in_levels
        assert not uses_levels(comm, torch.float32, many)
        comm.barrier()
        comm.engine.core.sum_in_levels()
        comm.barrier()
        assert uses_levels(comm, torch.float32, many)
        assert uses_levels(comm, torch.int32, many)
        assert not uses_levels(comm, torch.float32, few)
        assert not uses_levels(comm, torch.bfloat16, many)

    with ringcomm.local_world(6, options=CommOptions(timeout=60, sum_group_size=3)) as world:
        world.run(body)


@pytest.mark.parametrize(
    ("nodes", "group", "apart"),
    [
        ("0 0 1 1", 2, True),
        ("0 0 0 1 1 1", 3, True),
        ("0 0 1 1 2 2", 2, True),
        ("0,1 0,1 2,3 2,3", 2, True),
        ("0 0 1 1", 0, False),
        ("0 0 1 1", 1, False),
        ("0 0 1 1", 4, False),
        ("0 1 0 1", 2, False),  # not consecutive
        ("0 0 0 1", 2, False),
        ("0 0 1", 2, False),  # uneven
        ("0 0 0 0", 2, False),  # one node
        ("0 0 0 0 1 1 1 1", 2, False),  # two groups on each node
        ("- - - -", 2, False),  # heaps that are bound to no node
        ("0 0 - -", 2, False),
    ],
)
def test_groups_that_lie_apart(nodes, group, apart):
    assert are_apart([each.replace("-", "") for each in nodes.split()], group) == apart


def _finds_levels(store, rank, world, folders, group):
    options = CommOptions(timeout=60, sum_group_size=group)
    with join_on(store, rank, world, folders[rank], options) as comm:
        core: Any = comm.engine.core
        tensor = torch.full((1 << 20,), rank + 1, dtype=torch.int32)
        comm.all_reduce(tensor)
        assert tensor.unique().tolist() == [10]
        return core.sums_in_levels


@pytest.mark.parametrize(("group", "found"), [(2, True), (0, False)])
def test_ranks_of_two_sockets_find_that_they_are_apart(tmp_path, group, found):
    folders = []
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
        cpus = {node: own_cpus(), 1 - node: ELSEWHERE}
        folders += 2 * [str(write_machine(tmp_path / str(node), cpus))]
    assert run_ranks(_finds_levels, 4, folders, group) == [found] * 4


def test_calls_that_differ_are_told(in_levels):
    def body(comm):
        tensor = torch.ones(30_000 if comm.rank else 30_001)
        with pytest.raises(MismatchError, match=r"all_reduce"):
            comm.all_reduce(tensor)

    with ringcomm.local_world(4, options=CommOptions(timeout=60, sum_group_size=2)) as world:
        world.run(body)


def test_a_rank_that_stays_away_is_named(in_levels):
    def body(comm):
        if comm.rank == 3:
            return ""
        with pytest.raises(RingcommError) as told:
            comm.all_reduce(torch.ones(30_000))
        return str(told.value)

    with ringcomm.local_world(4, options=CommOptions(timeout=1, sum_group_size=2)) as world:
        said = world.run(body)
    assert all("rank 3" in text for text in said[:3])


def _loses_rank_2(store, rank, world, eighth):
    _native.always_sum_in_levels(True)
    options = CommOptions(timeout=60, segment_bytes=4096, sum_group_size=2)
    with Communicator.from_store(store, rank, world, options=options) as comm:
        _native.arm_fault("none")  # only counts the steps
        comm.all_reduce(torch.ones(12_000))
        steps = sum(_native.fault_passages().values())
        if rank == 2:
            _native.arm_fault("kill", passage=1 + steps * eighth // 8)
        with pytest.raises(RingcommError) as told:
            comm.all_reduce(torch.ones(12_000))
            comm.barrier()
        return type(told.value), str(told.value)


@pytest.mark.parametrize("eighth", [0, 3, 6])
def test_a_rank_that_dies_in_a_call_is_named_by_all_others(eighth):
    """Rank 1 exchanges nothing with rank 2, and learns of the loss from the other ranks."""
    with Ranks(_loses_rank_2, 4, eighth) as ranks:
        outcomes = ranks.wait(60.0)
    assert outcomes[2].exitcode == -signal.SIGKILL
    for rank in (0, 1, 3):
        kind, text = outcomes[rank].value
        assert issubclass(kind, PeerLost), text
        assert "rank 2" in text
