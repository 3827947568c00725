"""Several processes on one GPU, connected by CUDA IPC: all collectives, exact."""

import pytest
import torch
from torch.distributed import ReduceOp

import ringcomm
from tests.gpu.device import PLAIN, REAL, new_stream, synchronize
from tests.gpu.worlds import connect, run_ranks, to_device
from tests.support.exact import operand, pattern, reduced, same

# One element, a tail, several segments of every channel; an emulated device has too little time for
# all of them.
COUNTS = (1, 1000, 300_001) if REAL else (1, 1000, 5001)
DTYPES = (torch.float32, torch.bfloat16) if REAL else (torch.bfloat16,)
# An emulated device has each world and each place once.
WORLDS_AND_PLACES = [(2, "plain"), (4, "heap"), *([(2, "heap"), (4, "plain")] if REAL else [])]
# Each waits for a time slice of every process.
LIMIT_S = 100.0


def expect(tensor, right, what):
    assert same(tensor.cpu(), right), what


def reductions(comm, count, dtype, in_heap):
    world, rank = comm.world_size, comm.rank
    for op in ("SUM", "MAX", "AVG"):
        chunks = [operand(count * world, peer, world, dtype, op) for peer in range(world)]
        total = reduced(chunks, op)
        own = total.chunk(world)[rank]
        for algorithm in ("auto", "direct", "ring"):
            what = f"{op}, {algorithm}, {count} of {dtype}, heap: {in_heap}, rank {rank} of {world}"
            tensor = to_device(chunks[rank], in_heap)
            comm.all_reduce(tensor, getattr(ReduceOp, op), algorithm=algorithm)
            expect(tensor, total, f"all_reduce, {what}")
            output = to_device(torch.zeros(count, dtype=dtype), in_heap)
            given = to_device(chunks[rank], in_heap)
            comm.reduce_scatter_tensor(output, given, getattr(ReduceOp, op), algorithm=algorithm)
            expect(output, own, f"reduce_scatter, {what}")
        tensor = to_device(chunks[rank], in_heap)
        comm.reduce(tensor, world - 1, getattr(ReduceOp, op))
        expect(tensor, total if rank == world - 1 else chunks[rank], f"reduce, {op}")


def movements(comm, count, dtype, in_heap):
    world, rank = comm.world_size, comm.rank
    parts = [pattern(count, peer, dtype) for peer in range(world)]
    wholes = [pattern(count * world, peer, dtype) for peer in range(world)]

    def room(elems):
        return to_device(torch.zeros(elems, dtype=dtype), in_heap)

    for algorithm in ("auto", "direct", "ring", "copy"):
        output = room(count * world)
        comm.all_gather_into_tensor(output, to_device(parts[rank], in_heap), algorithm=algorithm)
        expect(output, torch.cat(parts), f"all_gather, {algorithm}")
    tensor = to_device(parts[rank], in_heap)
    comm.broadcast(tensor, 1)
    expect(tensor, parts[1], "broadcast")
    output = room(count * world)
    comm.all_to_all_single(output, to_device(wholes[rank], in_heap))
    expect(output, torch.cat([whole.chunk(world)[rank] for whole in wholes]), "all_to_all_single")
    rooms = [room(count) for _ in range(world)] if rank == 0 else None
    comm.gather(to_device(parts[rank], in_heap), rooms, 0)
    for peer, tensor in enumerate(rooms or []):
        expect(tensor, parts[peer], "gather")
    pieces = [to_device(part, in_heap) for part in parts] if rank == 1 else None
    output = room(count)
    comm.scatter(output, pieces, 1)
    expect(output, parts[rank], "scatter")
    sent = comm.isend(to_device(parts[rank], in_heap), (rank + 1) % world)
    output = room(count)
    comm.recv(output, (rank - 1) % world)
    sent.wait()
    expect(output, parts[rank - 1], "send and recv")
    comm.barrier()


def everything(store, rank, world, in_heap):
    with connect(store, rank, world) as comm:
        assert comm.device == torch.device(PLAIN)
        for count in COUNTS:
            for dtype in DTYPES:
                movements(comm, count, dtype, in_heap)
        for count in COUNTS[:2]:
            for dtype in DTYPES:
                reductions(comm, count, dtype, in_heap)
        reductions(comm, COUNTS[2], torch.float32, in_heap)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(("world", "place"), WORLDS_AND_PLACES)
def test_all_collectives(world, place):
    run_ranks(everything, world, place == "heap", timeout_s=LIMIT_S - 10)


def mixed_places(store, rank, world):
    """Each rank decides for itself where its tensors lie."""
    with connect(store, rank, world) as comm:
        for turn in range(4):
            tensor = to_device(torch.full((70_000,), float(rank + turn)), (rank + turn) % 2 == 0)
            comm.all_reduce(tensor)
            expected = float(sum(range(world)) + world * turn)
            assert bool((tensor == expected).all())


def test_heap_and_plain_tensors_mix():
    run_ranks(mixed_places, 2, timeout_s=50)


def several_communicators(store, rank, world):
    comms = [connect(store, rank, world, name=f"number-{number}") for number in range(3)]
    tensors = [torch.full((50_000,), float(number + rank), device=PLAIN) for number in range(3)]
    synchronize()
    for comm, tensor in zip(comms, tensors, strict=True):
        with new_stream():
            comm.all_reduce(tensor)
    synchronize()
    for number, tensor in enumerate(tensors):
        assert bool((tensor == 2 * number + 1).all())
    for comm in comms:
        comm.close()


def test_communicators_on_several_streams_do_not_deadlock():
    """Kernels that the machine cannot run together raise; they never hang."""
    try:
        run_ranks(several_communicators, 2, timeout_s=50)
    except AssertionError as error:
        assert ringcomm.UnsupportedError.__name__ in str(error)
