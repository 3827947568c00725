"""A random walk over collective, dtype, op, size, world, place and algorithm."""

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringcomm import Communicator
from tests.support.exact import (
    MOVABLE,
    REDUCIBLE,
    equal,
    op_of,
    operand,
    ops_for,
    pattern,
    reduced,
    same,
)
from tests.support.placing import PLACES, put, room

WORLDS = (1, 2, 3, 4, 6)
SIZES = st.one_of(st.integers(0, 9), st.integers(10, 300), st.integers(301, 3000))


@dataclass(frozen=True)
class Case:
    collective: str
    dtype: torch.dtype
    op: str
    count: int
    world: int
    in_place: bool
    place: str
    algorithm: str
    root: int
    async_op: bool


@st.composite
def cases(draw) -> Case:
    collective = draw(st.sampled_from(sorted(CHECKS)))
    reduces = "reduce" in collective
    dtype = draw(st.sampled_from(REDUCIBLE if reduces else MOVABLE))
    world = draw(st.sampled_from(WORLDS))
    return Case(
        collective,
        dtype,
        draw(st.sampled_from(ops_for(dtype))) if reduces else "",
        draw(SIZES),
        world,
        draw(st.booleans()),
        draw(st.sampled_from(PLACES)),
        draw(st.sampled_from(("auto", "direct", "ring"))),
        draw(st.integers(0, world - 1)),
        draw(st.booleans()),
    )


def _end(work) -> None:
    if work is not None:
        work.wait()


def _all_reduce(comm: Communicator, case: Case) -> None:
    inputs = [operand(case.count, r, case.world, case.dtype, case.op) for r in range(case.world)]
    tensor = put(inputs[comm.rank], case.place, comm.rank)
    _end(comm.all_reduce(tensor, op_of(case.op), case.async_op, algorithm=case.algorithm))
    assert equal(tensor, reduced(inputs, case.op))


def _reduce(comm: Communicator, case: Case) -> None:
    inputs = [operand(case.count, r, case.world, case.dtype, case.op) for r in range(case.world)]
    tensor = put(inputs[comm.rank], case.place, comm.rank)
    _end(comm.reduce(tensor, case.root, op_of(case.op), case.async_op))
    want = reduced(inputs, case.op) if comm.rank == case.root else inputs[comm.rank]
    assert equal(tensor, want)


def _reduce_scatter(comm: Communicator, case: Case) -> None:
    total = case.count * case.world
    inputs = [operand(total, r, case.world, case.dtype, case.op) for r in range(case.world)]
    own = slice(comm.rank * case.count, (comm.rank + 1) * case.count)
    source = put(inputs[comm.rank], case.place, comm.rank)
    output = source[own] if case.in_place else room(case.count, case.dtype, case.place, comm.rank)
    work = comm.reduce_scatter_tensor(
        output, source, op_of(case.op), case.async_op, algorithm=case.algorithm
    )
    _end(work)
    assert equal(output, reduced(inputs, case.op)[own])


def _all_gather(comm: Communicator, case: Case) -> None:
    parts = [pattern(case.count, rank, case.dtype) for rank in range(case.world)]
    output = room(case.count * case.world, case.dtype, case.place, comm.rank)
    places = [output[r * case.count : (r + 1) * case.count] for r in range(case.world)]
    source = put(parts[comm.rank], case.place, comm.rank)
    if case.in_place:
        if case.count:
            places[comm.rank].view(torch.uint8).copy_(source.view(torch.uint8))
        source = places[comm.rank]
    _end(comm.all_gather_into_tensor(output, source, case.async_op, algorithm=case.algorithm))
    assert all(same(a, b) for a, b in zip(places, parts, strict=True))


def _all_gather_uneven(comm: Communicator, case: Case) -> None:
    counts = [case.count * (rank % 3) // 2 for rank in range(case.world)]
    parts = [pattern(n, rank, case.dtype) for rank, n in enumerate(counts)]
    outputs = [room(n, case.dtype, case.place, comm.rank) for n in counts]
    _end(comm.all_gather(outputs, put(parts[comm.rank], case.place, comm.rank), case.async_op))
    assert all(same(a, b) for a, b in zip(outputs, parts, strict=True))


def _broadcast(comm: Communicator, case: Case) -> None:
    tensor = put(pattern(case.count, comm.rank, case.dtype), case.place, comm.rank)
    _end(comm.broadcast(tensor, case.root, case.async_op))
    assert same(tensor, pattern(case.count, case.root, case.dtype))


def _gather_then_scatter(comm: Communicator, case: Case) -> None:
    mine = put(pattern(case.count, comm.rank, case.dtype), case.place, comm.rank)
    parts = [room(case.count, case.dtype, case.place, comm.rank) for _ in range(case.world)]
    held = parts if comm.rank == case.root else None
    _end(comm.gather(mine, held, case.root, case.async_op))
    if held is not None:
        for rank, part in enumerate(held):
            assert same(part, pattern(case.count, rank, case.dtype))
    back = room(case.count, case.dtype, case.place, comm.rank)
    _end(comm.scatter(back, held, case.root, case.async_op))
    assert same(back, mine)


def _all_to_all(comm: Communicator, case: Case) -> None:
    def size(sender: int, receiver: int) -> int:
        return (case.count + sender * 3 + receiver * 5) % 41 if case.in_place else case.count

    me, ranks = comm.rank, range(case.world)
    inputs = [put(pattern(size(me, p), me * 9 + p, case.dtype), case.place, me) for p in ranks]
    outputs = [room(size(p, me), case.dtype, case.place, me) for p in ranks]
    _end(comm.all_to_all(outputs, inputs, case.async_op))
    for p, output in enumerate(outputs):
        assert same(output, pattern(size(p, me), p * 9 + me, case.dtype))


def _ring_of_messages(comm: Communicator, case: Case) -> None:
    if case.world == 1:
        return
    ahead, behind = (comm.rank + 1) % case.world, (comm.rank - 1) % case.world
    got = room(case.count, case.dtype, case.place, comm.rank + 1)
    receive = comm.irecv(got, None if case.in_place else behind, tag=case.count)
    comm.send(put(pattern(case.count, comm.rank, case.dtype), case.place), ahead, tag=case.count)
    receive.wait()
    assert receive.source_rank() == behind
    assert same(got, pattern(case.count, behind, case.dtype))


CHECKS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather uneven": _all_gather_uneven,
    "broadcast": _broadcast,
    "gather then scatter": _gather_then_scatter,
    "all_to_all": _all_to_all,
    "messages": _ring_of_messages,
}


@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_call_is_exact(worlds, case):
    worlds(case.world).run(CHECKS[case.collective], case)
