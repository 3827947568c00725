import pytest
import torch

from ringcomm import Communicator
from tests.support.covering import covering
from tests.support.exact import MOVABLE, WORLD_SIZES, pattern, same
from tests.support.placing import PLACES, put, room

ALGORITHMS = ("direct", "ring")


def _joined(count: int, world: int, dtype) -> torch.Tensor:
    parts = [pattern(count, rank, dtype).view(torch.uint8) for rank in range(world)]
    return torch.cat(parts).view(dtype)


def _check(comm: Communicator, count: int, dtype, place: str, algorithm: str):
    """Out of place and in place; ``count`` elements of input."""
    world, rank = comm.world_size, comm.rank
    want = _joined(count, world, dtype)
    source = put(pattern(count, rank, dtype), place, rank)
    output = room(count * world, dtype, place, rank + 1)
    comm.all_gather_into_tensor(output, source, algorithm=algorithm)
    assert same(output, want), (count, dtype, place, algorithm)
    again = room(count * world, dtype, place, rank)
    own = again[rank * count : (rank + 1) * count]
    if count:
        own.view(torch.uint8).copy_(source.view(torch.uint8))
    comm.all_gather_into_tensor(again, own, algorithm=algorithm)
    assert same(again, want), (count, dtype, place, algorithm, "in place")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype(worlds, world_size, algorithm):
    def body(comm):
        for dtype in MOVABLE:
            for count in (1, 333):
                _check(comm, count, dtype, "mixed", algorithm)

    worlds(world_size).run(body)


@covering(strength=1, world_size=WORLD_SIZES, algorithm=ALGORITHMS, place=PLACES)
def test_every_world_and_size(worlds, world_size, algorithm, place):
    def body(comm):
        for count in (0, 1, 63, 64, 65, 2222):
            _check(comm, count, torch.float32, place, algorithm)

    worlds(world_size).run(body)


def test_large_with_default_segments(worlds):
    def body(comm):
        for algorithm in ALGORITHMS:
            for place in ("plain", "heap"):
                _check(comm, 2_200_001, torch.float32, place, algorithm)

    worlds(2, segment_bytes=0).run(body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_lists_of_even_and_uneven_counts(worlds, world_size):
    def body(comm):
        for counts in ([65] * world_size, [each * 41 for each in range(world_size)]):
            parts = [pattern(n, rank, torch.int16) for rank, n in enumerate(counts)]
            outputs = [room(n, torch.int16, "mixed", rank) for rank, n in enumerate(counts)]
            comm.all_gather(outputs, parts[comm.rank].clone())
            assert all(same(a, b) for a, b in zip(outputs, parts, strict=True))
            for output in outputs:
                output.zero_()
            outputs[comm.rank].copy_(parts[comm.rank])
            comm.all_gather(outputs, outputs[comm.rank])
            assert all(same(a, b) for a, b in zip(outputs, parts, strict=True))

    worlds(world_size).run(body)


def test_strided_lists_and_other_shapes(worlds):
    def body(comm):
        grid = torch.zeros(4, 2)
        comm.all_gather([grid[:, 0], grid[:, 1]], torch.full((2, 2), 1.0 + comm.rank).t())
        assert torch.equal(grid, torch.tensor([[1.0, 2.0]] * 4))
        stacked = torch.zeros(2, 3)
        comm.all_gather_into_tensor(stacked, torch.full((3,), float(comm.rank)))
        assert torch.equal(stacked, torch.tensor([[0.0] * 3, [1.0] * 3]))

    worlds(2).run(body)


def test_conjugated_input(worlds):
    def body(comm):
        mine = torch.tensor([1 + 2j]).conj()
        parts = [torch.zeros(1, dtype=torch.complex64) for _ in range(2)]
        comm.all_gather(parts, mine)
        assert all(part.item() == 1 - 2j for part in parts)

    worlds(2).run(body)


def test_a_negated_element_is_gathered_with_its_sign(worlds):
    """A view of one element is contiguous, but its memory has the other sign."""

    def body(comm):
        mine = torch.tensor([1 + 2j]).conj().imag
        assert mine.is_neg() and mine.is_contiguous()
        gathered = torch.zeros(2)
        comm.all_gather_into_tensor(gathered, mine)
        assert gathered.tolist() == [-2, -2]

    worlds(2).run(body)
