import pytest
import torch

from ringcomm import Communicator
from tests.support.covering import covering
from tests.support.exact import (
    REDUCIBLE,
    WORLD_SIZES,
    equal,
    op_of,
    operand,
    ops_for,
    reduced,
    same,
)
from tests.support.placing import PLACES, put, room

ALGORITHMS = ("direct", "ring")


def _check(comm: Communicator, count: int, dtype, op: str, place: str, algorithm: str):
    """Out of place and in place; ``count`` elements of output."""
    world, rank = comm.world_size, comm.rank
    inputs = [operand(count * world, each, world, dtype, op) for each in range(world)]
    own = slice(rank * count, (rank + 1) * count)
    want = reduced(inputs, op)[own]
    source = put(inputs[rank], place, rank)
    output = room(count, dtype, place, rank + 1)
    comm.reduce_scatter_tensor(output, source, op_of(op), algorithm=algorithm)
    assert equal(output, want), (count, dtype, op, place, algorithm)
    assert same(source, inputs[rank])
    comm.reduce_scatter_tensor(source[own], source, op_of(op), algorithm=algorithm)
    assert equal(source[own], want), (count, dtype, op, place, algorithm, "in place")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype_and_op(worlds, world_size, algorithm):
    def body(comm):
        for dtype in REDUCIBLE:
            for op in ops_for(dtype):
                _check(comm, 67, dtype, op, "mixed", algorithm)

    worlds(world_size).run(body)


@covering(strength=1, world_size=WORLD_SIZES, algorithm=ALGORITHMS, place=PLACES)
def test_every_world_and_size(worlds, world_size, algorithm, place):
    def body(comm):
        for count in (0, 1, 2, 63, 64, 1111):
            _check(comm, count, torch.float32, "SUM", place, algorithm)

    worlds(world_size).run(body)


def test_large_with_default_segments(worlds):
    def body(comm):
        for algorithm in ALGORITHMS:
            for place in ("plain", "heap"):
                _check(comm, 2_200_001, torch.float32, "SUM", place, algorithm)

    worlds(2, segment_bytes=0).run(body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_lists_of_even_and_uneven_counts(worlds, world_size):
    def body(comm):
        rank = comm.rank
        for counts in ([65] * world_size, [each * 37 for each in range(world_size)]):
            inputs = [
                [operand(n, each, world_size, torch.int32, "SUM") for n in counts]
                for each in range(world_size)
            ]
            want = reduced([each[rank] for each in inputs], "SUM")
            sources = [put(each, "mixed", index) for index, each in enumerate(inputs[rank])]
            output = torch.empty(counts[rank], dtype=torch.int32)
            comm.reduce_scatter(output, sources)
            assert same(output, want)
            assert all(same(a, b) for a, b in zip(sources, inputs[rank], strict=True))
            comm.reduce_scatter(sources[rank], sources)
            assert same(sources[rank], want)

    worlds(world_size).run(body)


def test_strided_lists(worlds):
    def body(comm):
        grid = torch.arange(12.0).view(3, 4).clone()
        output = torch.zeros(3, 2)[:, 0]
        comm.reduce_scatter(output, [grid[:, 0], grid[:, 1]])
        assert torch.equal(output, 2 * grid[:, comm.rank])

    worlds(2).run(body)


def test_a_negated_element_gets_its_sign(worlds):
    """A view of one element is contiguous, but its memory has the other sign."""

    def body(comm):
        mine = torch.tensor([0 + 7j]).conj().imag
        assert mine.is_neg() and mine.is_contiguous()
        comm.reduce_scatter_tensor(mine, torch.tensor([1.0, 2.0]))
        assert mine.tolist() == [2 + 2 * comm.rank]

    worlds(2).run(body)
