import pytest
import torch

from tests.support.exact import MOVABLE, WORLD_SIZES, pattern, same
from tests.support.placing import PLACES, put


def _check(comm, count, dtype, place, root):
    tensor = put(pattern(count, comm.rank, dtype), place, comm.rank)
    comm.broadcast(tensor, root)
    assert same(tensor, pattern(count, root, dtype)), (count, dtype, place, root)


def test_every_dtype(worlds):
    def body(comm):
        for dtype in MOVABLE:
            _check(comm, 131, dtype, "mixed", 1)

    worlds(3).run(body)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_root_size_and_place(worlds, world_size):
    def body(comm):
        for root in {0, world_size // 2, world_size - 1}:
            for place in PLACES:
                for count in (0, 1, 64, 65, 3001):
                    _check(comm, count, torch.float32, place, root)

    worlds(world_size).run(body)


def test_strided_and_expanded_tensors(worlds):
    def body(comm):
        grid = torch.full((3, 4), float(comm.rank))
        comm.broadcast(grid[:, 2], 1)
        want = torch.full((3, 4), float(comm.rank))
        want[:, 2] = 1
        assert torch.equal(grid, want)
        # The root's tensor is only read, so there it may repeat one element.
        tensor = torch.tensor(7.0).expand(5) if comm.rank == 0 else torch.zeros(5)
        comm.broadcast(tensor, 0)
        assert torch.equal(tensor, torch.full((5,), 7.0))

    worlds(2).run(body)
