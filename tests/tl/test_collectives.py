# SPDX-License-Identifier: Apache-2.0
"""The Triton collectives in Triton's interpreter, one process per rank, on the host's heap."""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch

import ringcomm
from ringcomm import (
    AbortedError,
    ArgumentError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    RingcommError,
    UnsupportedError,
    _native,
)
from ringcomm.algorithms import spelled
from tests.support.covering import in_test_all
from tests.support.exact import op_of, operand, pattern, reduced, same
from tests.tl.interpreter import LIMIT_S, Ranks, connect, run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Nothing, one element, a part of a block, and more than the slots hold; make test-all runs all
# sizes in each algorithm.
COUNTS = {"one_shot": (1, 1030, *in_test_all(0, 257)), "ring": (0, 1030, *in_test_all(1, 257))}


def _put(tensor, memory):
    """Returns the tensor in a kind of memory: plain, heap, or one element off any alignment."""
    skip = 1 if memory == "unaligned" else 0
    make = torch.empty if memory == "plain" else ringcomm.empty
    whole = make(tensor.numel() + skip, dtype=tensor.dtype)
    whole[skip:].copy_(tensor)
    return whole[skip:]


def _check_all(comm, count, dtype, memory, algorithm, op="SUM"):
    rank, world = comm.rank, comm.world_size
    case = (count, dtype, memory, algorithm, op)
    inputs = [operand(count, each, world, dtype, op) for each in range(world)]
    tensor = _put(inputs[rank], memory)
    comm.all_reduce(tensor, op_of(op), algorithm=spelled(algorithm, "all_reduce"))
    assert torch.equal(tensor, reduced(inputs, op)), case

    wholes = [operand(count * world, each, world, dtype, op) for each in range(world)]
    output = _put(torch.full((count,), -1.0).to(dtype), memory)
    comm.reduce_scatter_tensor(output, _put(wholes[rank], memory), op_of(op), algorithm=algorithm)
    want = reduced(wholes, op)[rank * count : (rank + 1) * count]
    assert torch.equal(output, want), case

    parts = [pattern(count, each, dtype) for each in range(world)]
    gathered = _put(torch.zeros(count * world, dtype=dtype), memory)
    comm.all_gather_into_tensor(gathered, _put(parts[rank], memory), algorithm=algorithm)
    assert same(gathered, torch.cat(parts)), case


def _everything(store, rank, world):
    with connect(store, rank, world, segment_bytes=1024, slots=2) as comm:
        for algorithm in ("one_shot", "ring"):
            # The interpreter is slow: only 2 ranks, which have a core each, run all sizes.
            counts = {2: COUNTS[algorithm], 3: (257,)}.get(world, (world + 1,))
            for turn, count in enumerate(counts):
                dtype = DTYPES[(turn + world) % 3]
                memory = ("plain", "heap", "unaligned")[(turn + len(algorithm) // 2) % 3]
                _check_all(
                    comm, count, dtype, memory, algorithm, ("SUM", "AVG")[(turn + world) % 2]
                )
        if world == 2:
            # Zero copy needs chunks of 16 KiB.
            for count in in_test_all(8200):
                _check_all(comm, count, torch.bfloat16, "heap", "one_shot")
            _in_place(comm)
    return True


def _in_place(comm):
    rank, world, count = comm.rank, comm.world_size, 4100
    wholes = [operand(count * world, each, world, torch.float32, "SUM") for each in range(world)]
    tensor = _put(wholes[rank], "heap")
    own = tensor[rank * count : (rank + 1) * count]
    comm.reduce_scatter_tensor(own, tensor)
    assert torch.equal(own, reduced(wholes, "SUM")[rank * count : (rank + 1) * count])
    comm.all_gather_into_tensor(tensor, own)
    assert torch.equal(tensor, reduced(wholes, "SUM"))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_and_copies_are_exact(world):
    assert all(run_ranks(_everything, world))


def _shorter_chunk_with_a_longer_slice(store, rank, world):
    """The third of five channels gets 4 of 23 lines, but 5 of 22 lines, and so one more segment."""
    with connect(store, rank, world, segment_bytes=256, channels=5) as comm:
        for algorithm in ("one_shot", "ring"):
            _check_all(comm, (23 + 22) * 64 // 4, torch.float32, "plain", algorithm)
    return True


def test_a_shorter_chunk_whose_slice_is_longer_by_a_segment():
    assert all(run_ranks(_shorter_chunk_with_a_longer_slice, 2))


def _alternate(store, rank, world):
    """Native and Triton kernels run alternately and advance the same epochs."""
    with connect(store, rank, world, kernels="native", slots=2, segment_bytes=256) as comm:
        for turn in range(5):  # each pair of successive kernels, in both algorithms
            kernels = "triton" if turn % 2 else "native"
            algorithm = ("one_shot", "ring")[turn // 2 % 2]
            tensor = torch.arange(300, dtype=torch.float32) + rank + turn
            comm.all_reduce(tensor, kernels=kernels, algorithm=spelled(algorithm, "all_reduce"))
            want = (torch.arange(300) + turn) * world + sum(range(world))
            assert torch.equal(tensor, want.float()), turn
        comm.barrier()
        work = comm.all_reduce(tensor, async_op=True, kernels="triton")
        assert work.wait() and tensor[0] == want[0] * world
    return True


def test_native_and_triton_calls_alternate():
    assert all(run_ranks(_alternate, 2))


def _bits(store, rank, world):
    """One-shot results have the native kernels' bits, for values that are rounded at every sum."""
    with connect(store, rank, world) as comm:
        forms = (("SUM", "one_shot"), ("AVG", "ring"), ("SUM", "one_shot"))
        for dtype, (op, algorithm) in zip(DTYPES, forms, strict=True):
            torch.manual_seed(rank)
            given = (torch.randn(300) * 10.0 ** torch.randint(-3, 4, (300,))).to(dtype)
            both = [given.clone(), given.clone()]
            for tensor, kernels in zip(both, ("native", "triton"), strict=True):
                comm.all_reduce(
                    tensor, op_of(op), kernels=kernels, algorithm=spelled(algorithm, "all_reduce")
                )
            assert torch.equal(*both), (dtype, op, algorithm)
    return True


def test_the_bits_are_those_of_the_native_kernels():
    assert all(run_ranks(_bits, 3))


def _without_waiting(store, rank, world, broken):
    from ringcomm._tl import endpoint

    if broken:

        def no_wait(*arguments):
            return arguments[-2]  # the status so far

        # Otherwise the rank would notice the stale header before the stale data.
        setattr(endpoint, "await_acquire_sys", no_wait)  # noqa: B010
        setattr(endpoint, "same_call", lambda ws, theirs: True)  # noqa: B010
    with connect(store, rank, world, segment_bytes=256, slots=2) as comm:
        for turn in range(2):
            comm.barrier()
            if rank == 1:
                time.sleep(0.3)  # the other rank is early, and must wait
            tensor = torch.full((200,), float(rank + turn))
            comm.all_reduce(tensor)
            if not torch.equal(tensor, torch.full((200,), 1.0 + 2 * turn)):
                return "wrong"
    return "right"


def test_without_its_waits_a_collective_is_wrong():
    """The negative control of all tests here."""
    assert run_ranks(_without_waiting, 2, False) == ["right", "right"]
    with Ranks(_without_waiting, 2, True) as ranks:
        outcomes = ranks.wait(LIMIT_S)
    assert any(each.value != "right" for each in outcomes)


def _other_kernels(store, rank, world):
    with connect(store, rank, world) as comm:
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(torch.ones(300), kernels=("native", "triton")[rank])
        with pytest.raises(RingcommError):
            comm.all_reduce(torch.ones(300))
    return str(caught.value)


def test_ranks_that_run_other_kernels_are_told_so():
    for text in run_ranks(_other_kernels, 2):
        assert "Triton kernels" in text and text.count("all_reduce(float32, SUM, 1200 bytes") == 2
        line = _other_kernels.__code__.co_firstlineno + 3
        assert text.count(f" at {__file__}:{line}") == 2, text


def _late(store, rank, world):
    with connect(store, rank, world) as comm:
        comm.all_reduce(torch.ones(3))  # the first call may take seconds, since it imports Triton
        comm.timeout = 0.5
        if rank == 1:
            store.wait(["over"], timedelta(seconds=LIMIT_S))
            return ""
        try:
            with pytest.raises(CollectiveTimeout) as caught:
                comm.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        finally:
            store.set("over", "1")
        return str(caught.value)


def test_a_wait_ends_at_its_deadline():
    text, _ = run_ranks(_late, 2)
    assert "rank 1" in text and "reduce_scatter" in text and "item 0" in text


def _killed(store, rank, world):
    with connect(store, rank, world) as comm:
        comm.all_reduce(torch.ones(3))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 1"):
            comm.all_reduce(torch.ones(300))
    return "told"


def test_a_killed_peer_is_reported():
    with Ranks(_killed, 2) as ranks:
        assert ranks.wait(LIMIT_S, [0])[0].value == "told"


def _closed(store, rank, world):
    comm = connect(store, rank, world)
    comm.all_reduce(torch.ones(3))
    if rank == 0:
        with pytest.raises(PeerLost, match="rank 1"):
            comm.all_gather_into_tensor(torch.empty(4), torch.ones(2), algorithm="ring")
    comm.close()
    return "told"


def test_a_closed_peer_is_reported():
    assert run_ranks(_closed, 2) == ["told", "told"]


def _told_of_no_record(store, rank, world, call):
    with connect(store, rank, world) as comm:
        comm.all_reduce(torch.ones(3))
        if rank == 0:
            comm.timeout = 0.5
            try:
                call(comm)
            finally:
                store.set("over", "1")
            assert comm.aborted
        else:
            store.wait(["over"], timedelta(seconds=LIMIT_S))
        with pytest.raises(AbortedError, match="rank 0 aborted the communicator: the thread that"):
            comm.all_reduce(torch.ones(3))
    return "told"


def _interrupted_in_its_record(comm):
    from ringcomm._tl import waiting

    def interrupt(*arguments):
        raise KeyboardInterrupt

    # As if a signal handler ran between the claim of the fault record and the abort word.
    setattr(waiting, "raise_fault", interrupt)  # noqa: B010
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(torch.ones(3))


def _fails_beside_a_claimed_record(comm):
    core = comm.engine.owner
    regions = _native.STRUCTURES["table.regions"] // 8
    table = memoryview(core.rank_table(0)).cast("Q")
    # As if another thread of the rank had stopped right behind its claim.
    claimed = table[regions + comm.rank] + _native.STRUCTURES["page.claimed"]
    ctypes.c_uint32.from_address(claimed).value = 1
    with pytest.raises(AbortedError):
        comm.all_reduce(torch.ones(3))


@pytest.mark.parametrize("call", [_interrupted_in_its_record, _fails_beside_a_claimed_record])
def test_a_failed_call_ends_without_the_record_that_nobody_completes(call):
    assert run_ranks(_told_of_no_record, 2, call) == ["told", "told"]


def _refusals(store, rank, world):
    with connect(store, rank, world, kernels="native") as comm:
        floats, ints = torch.ones(4), torch.ones(4, dtype=torch.int32)
        for error, words, tensor, op, kernels in [
            (ArgumentError, "expected one of native, triton", floats, "SUM", "cuda"),
            (UnsupportedError, "reduces float32, bfloat16, float16", ints, "SUM", "triton"),
            (UnsupportedError, "by SUM and AVG", floats, "MAX", "triton"),
        ]:
            with pytest.raises(error, match=words):
                comm.all_reduce(tensor, op_of(op), kernels=kernels)
        comm.all_reduce(floats, kernels="triton")
        assert torch.equal(floats, torch.full((4,), float(world)))
        gathered = torch.zeros(4 * world, dtype=torch.int32)
        comm.all_gather_into_tensor(gathered, ints * rank, kernels="triton")
        assert gathered.tolist() == [each for each in range(world) for _ in range(4)]
    return "fine"


def test_what_the_kernels_do_not_do_is_refused():
    assert run_ranks(_refusals, 2) == ["fine", "fine"]


def test_ranks_of_one_process_are_refused():
    with ringcomm.local_world(2) as world:

        def body(comm):
            with pytest.raises(UnsupportedError, match=r"TRITON_INTERPRET|threads of one process"):
                comm.all_reduce(torch.ones(3), kernels="triton")

        world.run(body)


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with ringcomm.local_world(1) as world, pytest.raises(UnsupportedError, match="needs Triton"):
        world[0].all_reduce(torch.ones(3), kernels="triton")
