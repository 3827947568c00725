"""Ranks as processes, compared with Gloo in the same run."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ringcomm import CommOptions, Communicator
from tests.support.exact import operand, pattern
from tests.support.placing import put, room
from tests.support.ranks import run_ranks

COUNTS = (1, 63, 40_007)
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16)
OPS = ("SUM", "PRODUCT", "MIN", "MAX")


def _compare(name, gloo, ours):
    assert torch.equal(gloo, ours), name


def _reductions(comm: Communicator, count: int, dtype, op: str, place: str):
    world, rank = comm.world_size, comm.rank
    value = operand(count * world, rank, world, dtype, op)
    case = (count, dtype, op, place)
    gloo, ours = value.clone(), put(value, place, rank)
    dist.all_reduce(gloo, getattr(dist.ReduceOp, op))
    comm.all_reduce(ours, getattr(dist.ReduceOp, op))
    _compare(("all_reduce", *case), gloo, ours)
    gloo, ours = value.clone(), put(value, place, rank)
    dist.reduce(gloo, world - 1, getattr(dist.ReduceOp, op))
    comm.reduce(ours, world - 1, getattr(dist.ReduceOp, op))
    if rank == world - 1:
        _compare(("reduce", *case), gloo, ours)
    full, ours = value.clone(), room(count, dtype, place, rank)
    dist.all_reduce(full, getattr(dist.ReduceOp, op))
    comm.reduce_scatter_tensor(ours, put(value, place, rank), getattr(dist.ReduceOp, op))
    _compare(("reduce_scatter", *case), full[rank * count : (rank + 1) * count], ours)


def _movements(comm: Communicator, count: int, dtype, place: str):
    world, rank = comm.world_size, comm.rank
    value = put(operand(count, rank, world, dtype, "SUM"), place, rank)
    case = (count, dtype, place)
    gloo, ours = torch.empty(count * world, dtype=dtype), room(count * world, dtype, place, rank)
    dist.all_gather_into_tensor(gloo, value.clone())
    comm.all_gather_into_tensor(ours, value)
    _compare(("all_gather", *case), gloo, ours)
    dist.broadcast(gloo, world - 1)
    comm.broadcast(ours, world - 1)
    _compare(("broadcast", *case), gloo, ours)
    gloo_out, ours_out = torch.empty_like(gloo), room(count * world, dtype, place, rank)
    dist.all_to_all_single(gloo_out, gloo + rank)
    comm.all_to_all_single(ours_out, put(ours + rank, place, rank))
    _compare(("all_to_all", *case), gloo_out, ours_out)
    parts = [torch.empty(count, dtype=dtype) for _ in range(world)]
    comm.gather(value, parts if rank == 0 else None, 0)
    if rank == 0:
        _compare(("gather", *case), gloo[: count * world], torch.cat(parts))
    got = torch.empty_like(value)
    comm.scatter(got, parts if rank == 0 else None, 0)
    assert torch.equal(got, value)


def _messages(comm: Communicator):
    world, rank = comm.world_size, comm.rank
    for count in (1, 1000, 500_000):
        for place in ("plain", "heap"):
            got = room(count, torch.float32, place, rank)
            work = comm.irecv(got, (rank - 1) % world)
            comm.send(put(pattern(count, rank, torch.float32), place, rank), (rank + 1) % world)
            assert work.wait()
            want = pattern(count, (rank - 1) % world, torch.float32)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def _rank_against_gloo(store, rank, world):
    gloo = dist.PrefixStore("gloo", store)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=gloo, rank=rank, world_size=world, timeout=timeout)
    for place, options in (("heap", CommOptions()), ("mixed", CommOptions(segment_bytes=1024))):
        with Communicator.from_store(
            store, rank, world, name=place, timeout=60, options=options
        ) as comm:
            for count in COUNTS:
                for dtype in DTYPES if count == 63 else (torch.float32, torch.int64):
                    for op in OPS if count == 63 else ("SUM",):
                        _reductions(comm, count, dtype, op, place)
                    _movements(comm, count, dtype, place)
            _messages(comm)
            part = comm.new_group([0, world - 1])
            if part is not None:
                tensor = torch.ones(1000)
                part.all_reduce(tensor)
                assert tensor[-1] == part.world_size
                part.close()
            comm.barrier()
    dist.destroy_process_group()
    return "done"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_against_gloo(world_size):
    assert run_ranks(_rank_against_gloo, world_size, timeout_s=150) == ["done"] * world_size
