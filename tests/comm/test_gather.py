import pytest
import torch

from tests.support.exact import MOVABLE, pattern, same
from tests.support.placing import PLACES, put, room


def _check(comm, count, dtype, place, root):
    tensor = put(pattern(count, comm.rank, dtype), place, comm.rank)
    outputs = [room(count, dtype, place, rank) for rank in range(comm.world_size)]
    comm.gather(tensor, outputs if comm.rank == root else None, root)
    if comm.rank == root:
        for rank, output in enumerate(outputs):
            assert same(output, pattern(count, rank, dtype)), (count, dtype, place, root)


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
        grid = torch.zeros(4, 2)
        columns = [grid[:, 0], grid[:, 1]]
        comm.gather(torch.full((4,), 1.0 + comm.rank), columns if comm.rank == 0 else None)
        want = torch.tensor([[1.0, 2.0]] * 4) if comm.rank == 0 else torch.zeros(4, 2)
        assert torch.equal(grid, want)
        parts = [torch.full((3,), float(comm.rank)) for _ in range(2)]
        comm.gather(parts[comm.rank], parts if comm.rank == 1 else None, 1)
        if comm.rank == 1:
            assert torch.equal(torch.stack(parts), torch.tensor([[0.0] * 3, [1.0] * 3]))

    worlds(2).run(body)
