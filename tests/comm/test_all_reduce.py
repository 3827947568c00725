import pytest
import torch

from ringcomm import Communicator, ReduceOp
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
from tests.support.placing import PLACES, put

ALGORITHMS = ("direct", "ring")


def _check(comm: Communicator, count: int, dtype, op: str, place: str, algorithm: str):
    world = comm.world_size
    inputs = [operand(count, rank, world, dtype, op) for rank in range(world)]
    tensor = put(inputs[comm.rank], place, comm.rank)
    assert comm.all_reduce(tensor, op_of(op), algorithm=algorithm) is None
    assert equal(tensor, reduced(inputs, op)), (count, dtype, op, place, algorithm, tensor)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_dtype_and_op(worlds, world_size, algorithm):
    def body(comm):
        for dtype in REDUCIBLE:
            for op in ops_for(dtype):
                for count in (1, 131):
                    _check(comm, count, dtype, op, "mixed", algorithm)

    worlds(world_size).run(body)


@covering(world_size=WORLD_SIZES, algorithm=ALGORITHMS, place=PLACES)
def test_every_world_and_size(worlds, world_size, algorithm, place):
    def body(comm):
        # None; one; fewer than ranks; not divisible; one segment to the byte; many segments.
        for count in (0, 1, world_size - 1, world_size + 1, 64, 64 * world_size, 5003):
            _check(comm, count, torch.float32, "SUM", place, algorithm)
        _check(comm, 1001, torch.bfloat16, "AVG", place, algorithm)

    worlds(world_size).run(body)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_large_with_default_segments(worlds, algorithm):
    def body(comm):
        for place in ("plain", "heap"):
            # Large enough for results to be stored past the cache.
            _check(comm, 4_400_001, torch.float32, "SUM", place, algorithm)

    worlds(2, segment_bytes=0).run(body)


def test_low_precision_is_summed_in_fp32_and_rounded_once(worlds):
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = [torch.randn(777, generator=generator).to(dtype) for _ in range(4)]
        wide = inputs[0].float()
        for each in inputs[1:]:
            wide = wide + each.float()

        def body(comm, inputs, want):
            tensor = inputs[comm.rank].clone()
            comm.all_reduce(tensor, algorithm="direct")
            assert same(tensor, want)

        worlds(4).run(body, inputs, wide.to(dtype))


def test_nan_and_infinity_survive(worlds):
    def body(comm):
        tensor = torch.zeros(4)
        if comm.rank == 1:
            tensor[:] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
        total, largest = tensor.clone(), tensor.clone()
        comm.all_reduce(total)
        comm.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        for result in (total, largest):
            assert result[0].isnan()
            assert result[1] == float("inf")
        assert total[2] == float("-inf")

    worlds(3).run(body)


def test_strided_conjugated_and_scalar_tensors(worlds):
    def body(comm):
        wide = torch.arange(24.0).view(4, 6).clone()
        column = wide.t()[1:4]
        comm.all_reduce(column)
        want = torch.arange(24.0).view(4, 6)
        want[:, 1:4] *= 2
        assert torch.equal(wide, want)
        scalar = torch.tensor(3)
        comm.all_reduce(scalar)
        assert scalar.item() == 6
        base = torch.tensor([1 + 2j, 3 - 1j])
        comm.all_reduce(base.conj())
        assert torch.equal(base, torch.tensor([2 + 4j, 6 - 2j]))
        negated = torch.tensor([2 + 5j]).conj().imag
        comm.all_reduce(negated)
        assert negated.item() == -10
        negated = torch.tensor([2 + (5 + comm.rank) * 1j]).conj().imag
        comm.all_reduce(negated, ReduceOp.MAX)
        assert negated.item() == -5  # its memory has 5 and 6

    worlds(2).run(body)


def test_parameter_that_needs_gradients(worlds):
    def body(comm):
        parameter = torch.nn.Parameter(torch.ones(5))
        comm.all_reduce(parameter)
        comm.all_reduce(parameter.t())
        assert torch.equal(parameter.detach(), torch.full((5,), 4.0))

    worlds(2).run(body)
