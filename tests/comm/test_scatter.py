import pytest
import torch

from tests.support.exact import MOVABLE, pattern, same
from tests.support.placing import PLACES, put, room


def _check(comm, count, dtype, place, root):
    inputs = [put(pattern(count, rank, dtype), place, rank) for rank in range(comm.world_size)]
    output = room(count, dtype, place, comm.rank + 1)
    comm.scatter(output, inputs if comm.rank == root else None, root)
    assert same(output, pattern(count, comm.rank, dtype)), (count, dtype, place, root)


def test_every_dtype(worlds):
    def body(comm):
        for dtype in MOVABLE:
            _check(comm, 131, dtype, "mixed", 2)

    worlds(3).run(body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
def test_every_root_size_and_place(worlds, world_size):
    def body(comm):
        for root in {0, world_size // 2, world_size - 1}:
            for place in PLACES:
                for count in (0, 1, 64, 65, 1001):
                    _check(comm, count, torch.float32, place, root)

    worlds(world_size).run(body)


def test_in_place_and_strided(worlds):
    def body(comm):
        grid = torch.arange(8.0).view(4, 2)
        output = torch.zeros(4, 3)[:, 1]
        comm.scatter(output, [grid[:, 0], grid[:, 1]] if comm.rank == 0 else None)
        assert torch.equal(output, grid[:, comm.rank])
        parts = [torch.full((3,), 5.0 + rank) for rank in range(2)]
        comm.scatter(parts[comm.rank], parts if comm.rank == 1 else None, 1)
        assert torch.equal(parts[comm.rank], torch.full((3,), 5.0 + comm.rank))

    worlds(2).run(body)
