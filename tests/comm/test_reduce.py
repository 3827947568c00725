import pytest
import torch

from tests.support.exact import REDUCIBLE, equal, op_of, operand, ops_for, reduced, same
from tests.support.placing import PLACES, put


def _check(comm, count, dtype, op, place, root):
    world = comm.world_size
    inputs = [operand(count, rank, world, dtype, op) for rank in range(world)]
    tensor = put(inputs[comm.rank], place, comm.rank)
    comm.reduce(tensor, root, op_of(op))
    if comm.rank == root:
        assert equal(tensor, reduced(inputs, op)), (count, dtype, op, place)
    else:
        assert same(tensor, inputs[comm.rank]), (count, dtype, op, place)


def test_every_dtype_and_op(worlds):
    def body(comm):
        for dtype in REDUCIBLE:
            for op in ops_for(dtype):
                _check(comm, 131, dtype, op, "mixed", 1)

    worlds(3).run(body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 16])
def test_every_root_size_and_place(worlds, world_size):
    def body(comm):
        roots = range(world_size) if world_size <= 5 else (0, world_size // 2, world_size - 1)
        for root in roots:
            for place in PLACES:
                for count in (0, 1, 65, 1003):
                    _check(comm, count, torch.float32, "SUM", place, root)

    worlds(world_size).run(body)


def test_strided_tensor(worlds):
    def body(comm):
        grid = torch.ones(4, 4)
        comm.reduce(grid[:, 1], 1)
        want = torch.ones(4, 4)
        if comm.rank == 1:
            want[:, 1] = 2
        assert torch.equal(grid, want)

    worlds(2).run(body)
