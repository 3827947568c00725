"""Several processes on one GPU, connected by CUDA IPC: all collectives, exact."""

import pytest
import torch

import ringcomm
from tests.gpu.device import PLAIN, REAL, new_stream, synchronize
from tests.gpu.worlds import connect, run_ranks, to_device
from tests.support.call_checks import MOVEMENTS, REDUCTIONS, Case

# One element, a tail, several segments of every channel; an emulated device has too little time for
# all of them.
COUNTS = (1, 1000, 300_001) if REAL else (1, 1000, 5001)
DTYPES = (torch.float32, torch.bfloat16) if REAL else (torch.bfloat16,)
# An emulated device has each world and each place once.
WORLDS_AND_PLACES = [(2, "plain"), (4, "heap"), *([(2, "heap"), (4, "plain")] if REAL else [])]
WITH_ALGORITHMS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
# Each waits for a time slice of every process.
LIMIT_S = 100.0


def calls(comm, count, dtype, place, reductions):
    root, names = count % comm.world_size, REDUCTIONS if reductions else MOVEMENTS
    for op in ("SUM", "MAX", "AVG") if reductions else ("",):
        for algorithm in ("auto", "direct", "ring", "copy"):
            case = Case(count, dtype, op, place, algorithm, root=root)
            for name, check in names.items():
                if name in WITH_ALGORITHMS or algorithm == "auto":
                    check(comm, case)


def everything(store, rank, world, place):
    with connect(store, rank, world) as comm:
        assert comm.device == torch.device(PLAIN)
        for count in COUNTS:
            for dtype in DTYPES:
                calls(comm, count, dtype, place, reductions=False)
        for count in COUNTS[:2]:
            for dtype in DTYPES:
                calls(comm, count, dtype, place, reductions=True)
        calls(comm, COUNTS[2], torch.float32, place, reductions=True)
        comm.barrier()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(("world", "place"), WORLDS_AND_PLACES)
def test_all_collectives(world, place):
    run_ranks(everything, world, place, timeout_s=LIMIT_S - 10)


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
