# SPDX-License-Identifier: Apache-2.0
"""Every collective is exact with every algorithm, dtype, op, size, memory and world size."""

import itertools

import pytest
import torch

import ringcomm
from ringcomm.algorithms import spelled
from tests.support.call_checks import (
    CHECKS,
    EMULATED,
    MOVEMENTS,
    REDUCTIONS,
    Case,
    check_all_reduce,
    check_reduce_scatter,
    ops_on_device,
)
from tests.support.covering import covering
from tests.support.device_worlds import MANY, MEMORIES, on_host, put, room, with_options
from tests.support.emulator.library import library
from tests.support.exact import MOVABLE, operand, pattern, reduced, same

ALGORITHMS = ("auto", "one_shot", "ring", "ll", "copy_engine")


# Schedules of all world sizes are proved at compile time (tests/proof/races/schedule_test.cpp).
@covering(strength=1, name=[*CHECKS], world_size=(2, 3, 1, 4, 7, 8))
def test_every_world_size_and_memory(devices, name, world_size):
    """Counts: none, one element, fewer than ranks, a tail, several segments per channel."""
    counts = (0, 1, max(world_size - 1, 1), 257, 4099)
    algorithms = itertools.cycle(ALGORITHMS)
    cases = [
        Case(
            count,
            memory=memory,
            algorithm=next(algorithms),
            in_place=(turn + number) % 2 == 0,
            root=(turn + number) % world_size,
            async_op=(turn + number) % 3 == 0,
        )
        for turn, count in enumerate(counts)
        for number, memory in enumerate(MEMORIES)
    ]
    if devices.emulated:
        # Up to hundreds of threads wait for each other on a few cores, so each world runs only a
        # part of the cases. This part has all counts or all memories.
        step = 2 if world_size <= 2 else 5
        cases = cases[world_size % step :: step]

    def body(comm):
        for case in cases:
            CHECKS[name](comm, case)

    devices.run(devices.world(world_size), body)


@covering(strength=1, dtype=[*EMULATED], algorithm=["one_shot", "ring", "ll"])
def test_every_dtype_and_op(devices, dtype, algorithm):
    ops = EMULATED[dtype] if devices.emulated else ops_on_device(dtype)
    cases = [
        Case(67, dtype, op, "unaligned", algorithm, in_place=turn % 2 == 0)
        for turn, op in enumerate(ops)
    ]

    def body(comm):
        for case in cases:
            check_all_reduce(comm, case)
            check_reduce_scatter(comm, case)

    devices.run(devices.world(3), body)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_op_through_all_slots(devices, name):
    def body(comm):
        for op in EMULATED[torch.int32]:
            REDUCTIONS[name](comm, Case(5003, torch.int32, op, "mixed", root=1))

    devices.run(devices.world(3), body)


@pytest.mark.parametrize("name", MOVEMENTS)
def test_every_dtype_is_moved(devices, name):
    """At least two of the calls test each dtype: a device moves only bytes."""
    dtypes = [*enumerate(MOVABLE)][[*MOVEMENTS].index(name) % 3 :: 3]

    def body(comm):
        for turn, dtype in dtypes:
            MOVEMENTS[name](comm, Case(67, dtype, memory=MEMORIES[turn % 4], root=1))

    devices.run(devices.world(3), body)


@covering(strength=1, name=[*CHECKS], memory=MEMORIES)
def test_more_than_staging_holds(devices, name, memory):
    def body(comm):
        for turn, algorithm in enumerate(("one_shot", "ring", "copy_engine")):
            CHECKS[name](comm, Case(MANY, memory=memory, algorithm=algorithm, in_place=turn == 1))

    devices.run(devices.world(2), body)


@pytest.mark.parametrize("algorithm", ["one_shot", "ring", "ll"])
def test_each_rank_has_a_premul_factor_of_its_own(devices, algorithm):
    world, count = 3, 200
    inputs = [operand(count, rank, world, torch.float32, "SUM") for rank in range(world)]
    total = sum((values * (rank + 2) for rank, values in enumerate(inputs)), torch.zeros(()))
    gathered = [operand(count * world, rank, world, torch.float32, "SUM") for rank in range(world)]
    totals = sum((values * (rank + 2) for rank, values in enumerate(gathered)), torch.zeros(()))

    def body(comm):
        op = ringcomm.premul_sum(comm.rank + 2.0)
        tensor = put(comm, inputs[comm.rank], "heap")
        comm.all_reduce(tensor, op, algorithm=spelled(algorithm, "all_reduce"))
        assert torch.equal(on_host(tensor), total)
        output = room(comm, count, torch.float32, "plain")
        comm.reduce_scatter_tensor(
            output, put(comm, gathered[comm.rank], "plain"), op, algorithm=algorithm
        )
        assert torch.equal(on_host(output), totals.chunk(world)[comm.rank])
        comm.reduce(tensor.copy_(inputs[comm.rank]), 1, op)
        if comm.rank == 1:
            assert torch.equal(on_host(tensor), total)

    devices.run(devices.world(world), body)


def test_strided_tensors(devices):
    def body(comm):
        rank, other = comm.rank, 1 - comm.rank
        grid = put(comm, torch.arange(24.0) * (rank + 1), "plain").view(6, 4)
        base = torch.arange(24.0).view(6, 4)
        comm.all_reduce(grid[:, 1])
        assert torch.equal(on_host(grid[:, 1]), base[:, 1] * 3)
        assert torch.equal(on_host(grid[:, 0]), base[:, 0] * (rank + 1))
        work = comm.broadcast(grid[:, 2], 1, async_op=True)
        work.wait()
        assert torch.equal(on_host(grid[:, 2]), base[:, 2] * 2)
        comm.reduce(grid[:, 3], 0)
        assert torch.equal(on_host(grid[:, 3]), base[:, 3] * (2 if rank else 3))
        parts = put(comm, torch.zeros(12), "heap").view(6, 2)
        comm.all_gather([parts[:, 0], parts[:, 1]], grid[:, 2])
        assert torch.equal(on_host(parts), base[:, 2:3].expand(6, 2) * 2)
        comm.reduce_scatter(parts[:, 0], [grid[:, 0], grid[:, 1]])
        assert torch.equal(on_host(parts[:, 0]), base[:, rank] * (6 if rank else 3))
        comm.all_to_all([parts[:, 0], parts[:, 1]], [grid[:, 0], grid[:, 1]])
        want = base[:, :1] * torch.tensor([[1.0, 2.0]]) if rank == 0 else base[:, 1:2].expand(6, 2)
        assert torch.equal(on_host(parts), want * (3 if rank else 1))
        works = [comm.isend(grid[:, 2], other), comm.irecv(parts[:, 1], other)]
        assert all(work.wait() for work in works)
        assert torch.equal(on_host(parts[:, 1]), base[:, 2] * 2)

    devices.run(devices.world(2), body)


def test_coalesced_forms(devices):
    def body(comm):
        rank, world = comm.rank, comm.world_size
        tensors = [
            put(comm, operand(67, rank, world, torch.float32, "SUM"), "plain"),
            put(comm, operand(5, rank, world, torch.int32, "SUM"), "heap"),
        ]
        comm.all_reduce_coalesced(tensors)
        for tensor in tensors:
            parts = [operand(tensor.numel(), r, world, tensor.dtype, "SUM") for r in range(world)]
            assert same(on_host(tensor), reduced(parts, "SUM"))
        outputs = [room(comm, n * world, torch.float32, "plain") for n in (3, 2000)]
        inputs = [put(comm, pattern(n, rank, torch.float32), "heap") for n in (3, 2000)]
        comm.all_gather_coalesced(outputs, inputs, async_op=True).wait()
        for n, output in zip((3, 2000), outputs, strict=True):
            parts = [pattern(n, peer, torch.float32) for peer in range(world)]
            assert same(on_host(output), torch.cat(parts))
        lists = [[room(comm, n, torch.float32, "plain") for n in (3, 2000)] for _ in range(world)]
        comm.all_gather_lists_coalesced(lists, inputs)
        for peer, made in enumerate(lists):
            for n, output in zip((3, 2000), made, strict=True):
                assert same(on_host(output), pattern(n, peer, torch.float32))
        whole = [operand(70 * world, r, world, torch.float32, "SUM") for r in range(world)]
        shares = [room(comm, 70, torch.float32, "plain", turn) for turn in range(2)]
        comm.reduce_scatter_coalesced(shares, [put(comm, whole[rank], "plain") for _ in shares])
        for share in shares:
            assert same(on_host(share), reduced(whole, "SUM").chunk(world)[rank])

    devices.run(devices.world(3), body)


def test_a_barrier_waits_for_all(devices):
    """Stores before a barrier are visible after it: each rank writes into all heap tensors."""
    world = devices.world(3)
    shared = [room(comm, 3, torch.int32, "heap") for comm in world]
    with devices.as_on_gpu():
        for tensor in shared:
            tensor.zero_()
            on_host(tensor)

    def body(comm):
        for turn in range(1, 20):
            for tensor in shared:
                tensor[comm.rank] = turn
            comm.barrier(async_op=turn % 2 == 0, timeout=50 if turn % 3 else None)
            comm.barrier()
            assert on_host(shared[comm.rank]).tolist() == [turn] * 3
            comm.barrier()

    devices.run(world, body)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
def test_a_slice_that_lies_in_the_heap_is_read_in_one_pass(devices, name):
    """More segments add no barriers of blocks; with staged slices they do, as a control."""
    if not devices.emulated or devices.emulated.ptx is not None:
        pytest.skip("counts the barriers of emulated blocks, which are those of host code")
    world = devices.new_world(2, options=with_options(segment_bytes=1024, channels=1))

    def body(comm, segments, memory):
        whole, part = (
            put(comm, torch.ones(elems), memory) for elems in (segments * 512, segments * 256)
        )
        if name == "reduce_scatter":
            comm.reduce_scatter_tensor(part, whole, algorithm="one_shot")
        else:
            comm.all_gather_into_tensor(whole, part, algorithm="one_shot")
        comm.engine.finish_host_side()

    def barriers(segments, memory):
        before = library().emulated_barriers_met()
        devices.run(world, lambda comm: body(comm, segments, memory))
        return library().emulated_barriers_met() - before

    assert barriers(40, "heap") == barriers(90, "heap") > 0
    assert barriers(40, "plain") < barriers(90, "plain")
    world.close()


def test_calls_advance_the_versions_of_their_outputs(devices):
    def work(comm):
        tensor = torch.ones(4, device=comm.device)
        whole = torch.empty(8, device=comm.device)
        comm.all_gather_into_tensor(whole, tensor)
        before = tensor._version
        comm.all_reduce(tensor)
        comm.all_reduce(tensor, async_op=True).wait()
        return before, tensor._version, whole._version

    with devices.new_world(2) as world:
        assert devices.run(world, work) == [(0, 2, 1)] * 2
