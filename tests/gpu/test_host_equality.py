"""``direct`` gives the same bits on a GPU as on the host, for every dtype and op."""

import pytest
import torch

import ringcomm
from tests.gpu.device import PLAIN, REAL
from tests.support.call_checks import EMULATED, ops_on_device
from tests.support.exact import INTEGERS, REDUCIBLE, op_of, operand, raw_bytes

RANKS = 4
COUNT = 4 * 1021


def inputs(dtype, op):
    """Values whose sums round, so that another order of adding shows."""
    if not dtype.is_floating_point:
        return [operand(COUNT, rank, RANKS, dtype, op) for rank in range(RANKS)]
    generator = torch.Generator().manual_seed(7)
    scale = 1.5 if op == "PRODUCT" else 30.0
    drawn = torch.randn(RANKS, COUNT, generator=generator, dtype=torch.float64) * scale
    return list(drawn.to(dtype))


def reduced_by(dtype):
    """The ops that the device has; an emulated one has kernels for some of a GPU's."""
    ops = ops_on_device(dtype)
    return ops if REAL else [op for op in ops if op in EMULATED.get(dtype, ())]


def on_host(given, op, name):
    with ringcomm.local_world(RANKS) as world:
        return world.run(lambda comm: call(comm, given[comm.rank].clone(), op, name))


def call(comm, tensor, op, name):
    if name == "all_reduce":
        comm.all_reduce(tensor, op, algorithm="direct")
        return tensor
    output = torch.empty(tensor.numel() // RANKS, dtype=tensor.dtype)
    comm.reduce_scatter_tensor(output, tensor, op, algorithm="direct")
    return output


def on_gpu(world, given, op, name):
    tensors = [tensor.to(PLAIN, copy=True) for tensor in given]
    if name == "all_reduce":
        world.all_reduce(tensors, op=op, algorithm="direct")
        return tensors
    outputs = [torch.empty(COUNT // RANKS, dtype=t.dtype, device=PLAIN) for t in tensors]
    world.reduce_scatter_tensor(outputs, tensors, op=op, algorithm="direct")
    return outputs


@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_the_same_bits(gpu_worlds, dtype):
    for op_name in reduced_by(dtype):
        given, op = inputs(dtype, op_name), op_of(op_name)
        for name in ("all_reduce", "reduce_scatter"):
            host = on_host(given, op, name)
            device = on_gpu(gpu_worlds(RANKS), given, op, name)
            for rank in range(RANKS):
                assert torch.equal(raw_bytes(device[rank].cpu()), raw_bytes(host[rank])), (
                    f"{name}, {op_name}, rank {rank}"
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_rounded_once(gpu_worlds, dtype):
    given = inputs(dtype, "SUM")
    total = given[0].float()
    for values in given[1:]:
        total = total + values.float()
    for tensor in on_gpu(gpu_worlds(RANKS), given, op_of("SUM"), "all_reduce"):
        assert torch.equal(tensor.cpu(), total.to(dtype))


def test_runs_repeat_to_the_bit(gpu_worlds):
    given = inputs(torch.bfloat16, "SUM")
    for algorithm in ("direct", "ring"):
        results = []
        for _ in range(3):
            tensors = [tensor.to(PLAIN, copy=True) for tensor in given]
            gpu_worlds(RANKS).all_reduce(tensors, algorithm=algorithm)
            results.append(tensors)
        for again in results[1:]:
            for one, other in zip(results[0], again, strict=True):
                assert torch.equal(one, other)


def test_integers_wrap_alike(gpu_worlds):
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        given = [torch.full((COUNT,), info.max - rank, dtype=dtype) for rank in range(RANKS)]
        host = on_host(given, op_of("SUM"), "all_reduce")
        device = on_gpu(gpu_worlds(RANKS), given, op_of("SUM"), "all_reduce")
        for one, other in zip(device, host, strict=True):
            assert torch.equal(raw_bytes(one.cpu()), raw_bytes(other))
