# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments raise only on the rank that passed them; its peers notice nothing."""

import re
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, UnsupportedError, _native
from ringcomm.comm.host.arguments import DTYPE_CODES
from tests.support.exact import MOVABLE, OPS, ops_for

ReduceOp = torch.distributed.ReduceOp
T = torch.ones

# Calls of rank 1 in a world of 2, and what the message must say.
CASES = {
    "not a tensor": (lambda c: c.all_reduce([1.0]), "tensor: expected a tensor, got list"),
    "meta": (lambda c: c.all_reduce(T(3, device="meta")), "memory, got a meta tensor"),
    "sparse": (lambda c: c.all_reduce(T(3).to_sparse()), "expected a dense tensor"),
    "unknown dtype": (
        lambda c: c.broadcast(T(3, dtype=torch.complex32), 0),
        "dtype torch.complex32 is not supported",
    ),
    "no op": (lambda c: c.all_reduce(T(3), "sum"), "op: expected a torch.distributed.ReduceOp"),
    "premul without factor": (
        lambda c: c.all_reduce(T(3), ReduceOp.PREMUL_SUM),
        "PREMUL_SUM needs a factor",
    ),
    "fractional factor": (
        lambda c: c.all_reduce(T(3).int(), ringcomm.premul_sum(0.5)),
        "expected a whole number",
    ),
    "bits of floats": (
        lambda c: c.all_reduce(T(3), ReduceOp.BXOR),
        "op BXOR is not defined for dtype torch.float32",
    ),
    "order of complex": (
        lambda c: c.reduce(T(3, dtype=torch.complex64), 0, ReduceOp.MAX),
        "op MAX is not defined for dtype torch.complex64",
    ),
    "mean of bool": (lambda c: c.all_reduce(T(3).bool(), ReduceOp.AVG), "AVG is not defined"),
    "sum of fp8": (
        lambda c: c.all_reduce(T(3).to(torch.float8_e5m2)),
        "SUM is not defined for dtype torch.float8_e5m2",
    ),
    "algorithm": (
        lambda c: c.all_reduce(T(3), algorithm="tree"),
        "algorithm: expected one of auto, two_shot, ring, got 'tree'",
    ),
    "one shot in two phases": (
        lambda c: c.all_reduce(T(3), algorithm="one_shot"),
        "auto, two_shot, ring, got 'one_shot'; an all-reduce has two phases of one hop each, so it "
        'is "two_shot"',
    ),
    "two shots in one phase": (
        lambda c: c.all_gather_into_tensor(T(6), T(3), algorithm="two_shot"),
        "auto, one_shot, ring, got 'two_shot'; only all_reduce has two phases of one hop each, so "
        'it is "one_shot"',
    ),
    "algorithm of another type": (
        lambda c: c.all_gather_into_tensor(T(6), T(3), algorithm=[]),
        "algorithm: expected one of",
    ),
    "expanded": (lambda c: c.all_reduce(T(1).expand(3)), "memory of its own, got an expanded"),
    "root": (lambda c: c.broadcast(T(3), 2), "src: expected a rank from 0 to 1, got 2"),
    "negative root": (lambda c: c.reduce(T(3), -1), "dst: expected a rank from 0 to 1, got -1"),
    "root of another type": (lambda c: c.gather(T(3), None, "0"), "dst: expected a rank"),
    "scatter count": (
        lambda c: c.reduce_scatter_tensor(T(3), T(5)),
        "input: expected 6 elements (world_size x those of output), got 5",
    ),
    "scatter dtype": (
        lambda c: c.reduce_scatter_tensor(T(3), T(6).double()),
        "input: expected the dtype of output, torch.float32, got torch.float64",
    ),
    "scatter strided": (
        lambda c: c.reduce_scatter_tensor(T(3), T(6, 2)[:, 0]),
        "input: expected a contiguous tensor",
    ),
    "scatter overlap": (
        lambda c: c.reduce_scatter_tensor((x := T(6))[:3], x),
        "output and input: expected separate memory",
    ),
    "scatter overlap across an end": (
        lambda c: c.reduce_scatter_tensor((x := T(8))[5:], x[:6]),
        "expected separate memory",
    ),
    "scatter list length": (
        lambda c: c.reduce_scatter(T(3), [T(3)]),
        "input_list: expected 2 tensors, one per rank, got 1",
    ),
    "scatter list type": (
        lambda c: c.reduce_scatter(T(3), T(2, 3)),
        "input_list: expected a list of tensors, got Tensor",
    ),
    "scatter list dtype": (
        lambda c: c.reduce_scatter(T(3), [T(3), T(3).half()]),
        "input_list[1]: expected the dtype of output",
    ),
    "scatter list count": (
        lambda c: c.reduce_scatter(T(3), [T(3), T(4)]),
        "output: expected 4 elements (those of input_list[rank]), got 3",
    ),
    "scatter list overlap": (
        lambda c: c.reduce_scatter(x := T(3), [x, T(3)]),
        "output and input_list[0]: expected separate memory",
    ),
    "gather count": (
        lambda c: c.all_gather_into_tensor(T(5), T(3)),
        "output: expected 6 elements (world_size x those of input), got 5",
    ),
    "gather dtype": (
        lambda c: c.all_gather_into_tensor(T(6).int(), T(3)),
        "output: expected the dtype of input",
    ),
    "gather strided": (
        lambda c: c.all_gather_into_tensor(T(6, 2)[:, 0], T(3)),
        "output: expected a contiguous tensor",
    ),
    "gather overlap": (
        lambda c: c.all_gather_into_tensor(x := T(6), x[1:4]),
        "input and output: expected separate memory",
    ),
    "gather list": (
        lambda c: c.all_gather([T(3)] * 3, T(3)),
        "tensor_list: expected 2 tensors, one per rank, got 3",
    ),
    "gather list twice": (
        lambda c: c.all_gather([x := T(3), x], T(3)),
        "tensor_list[0] and tensor_list[1]: expected separate memory",
    ),
    "gather list input": (
        lambda c: c.all_gather([x := T(3), T(3)], x),
        "tensor and tensor_list[0]: expected separate memory",
    ),
    "gather list count": (
        lambda c: c.all_gather([T(3), T(4)], T(3)),
        "tensor: expected 4 elements (those of tensor_list[rank]), got 3",
    ),
    "gather list elsewhere": (
        lambda c: c.gather(T(3), [T(3), T(3)], 0),
        "gather_list: expected None on ranks other than dst 0",
    ),
    "no gather list": (lambda c: c.gather(T(3), None, 1), "gather_list: expected a list"),
    "gather list counts": (
        lambda c: c.gather(T(3), [T(3), T(2)], 1),
        "gather_list[1]: expected 3 elements",
    ),
    "scatter list elsewhere": (
        lambda c: c.scatter(T(3), [T(3), T(3)], 0),
        "scatter_list: expected None on ranks other than src 0",
    ),
    "scatter list overlaps output": (
        lambda c: c.scatter(x := T(3), [x, T(3)], 1),
        "tensor and scatter_list[0]: expected separate memory",
    ),
    "all_to_all splits": (
        lambda c: c.all_to_all_single(T(4), T(4), [1, 2], None),
        "output_split_sizes: expected 2 numbers >= 0 with the sum 4",
    ),
    "all_to_all negative split": (
        lambda c: c.all_to_all_single(T(4), T(4), None, [5, -1]),
        "input_split_sizes: expected 2 numbers >= 0",
    ),
    "all_to_all odd": (
        lambda c: c.all_to_all_single(T(3), T(3)),
        "expected dimension 0 divisible by world_size 2",
    ),
    "all_to_all in place": (
        lambda c: c.all_to_all_single(x := T(4), x),
        "output and input: expected separate memory",
    ),
    "all_to_all own piece": (
        lambda c: c.all_to_all_single(T(4), T(4), [1, 3], [3, 1]),
        "output piece 1: expected 4 bytes",
    ),
    "all_to_all list in place": (
        lambda c: c.all_to_all([T(3), x := T(3)], [x, T(3)]),
        "expected separate memory",
    ),
    "all_to_all list dtypes": (
        lambda c: c.all_to_all([T(3), T(3)], [T(3), T(3).half()]),
        "input_tensor_list[1]: expected the dtype of output_tensor_list[0]",
    ),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("case", CASES)
def test_bad_argument(worlds, case):
    call, text = CASES[case]

    def body(comm):
        if comm.rank == 1:
            with pytest.raises((ArgumentError, UnsupportedError)) as raised:
                call(comm)
            assert text in str(raised.value)
            assert re.match(r"\w+ on rank 1 of 2: ", str(raised.value))
        # Rank 0 is already in its call: rank 1's errors must not affect it or the order of calls.
        tensor = T(2)
        comm.all_reduce(tensor)
        assert tensor[0] == 2

    worlds(2).run(body)


class _CudaTensor(torch.Tensor):
    """Claims to be on a GPU, since the machines that run these tests may have none."""

    is_cpu = False
    is_cuda = True
    device = torch.device("cuda:0")


@pytest.mark.parametrize("collective", ["all_reduce", "barrier_like_broadcast"])
def test_cuda_tensors_are_refused(worlds, collective):
    comm = worlds(1)[0]
    tensor = T(3).as_subclass(_CudaTensor)
    with pytest.raises(ArgumentError, match=r"expected a CPU tensor, got one on cuda:0.*\.cpu"):
        if collective == "all_reduce":
            comm.all_reduce(tensor)
        else:
            comm.broadcast(tensor, 0)


def test_factors_of_premul_sum(worlds):
    def body(comm):
        make = torch.distributed._make_nccl_premul_sum
        for op in (
            ringcomm.premul_sum(0.5),
            ringcomm.premul_sum(torch.tensor([0.5])),
            make(0.5),
            make(torch.tensor([0.5])),
        ):
            tensor = torch.full((3,), 4.0)
            comm.all_reduce(tensor, op)
            assert torch.equal(tensor, torch.full((3,), 4.0))
        for op_of_max in (ReduceOp(ReduceOp.MAX), ReduceOp.MAX):
            tensor = torch.full((3,), float(comm.rank))
            comm.all_reduce(tensor, op_of_max)
            assert torch.equal(tensor, torch.full((3,), 1.0))
        bad_factors: list[Any] = ["2", torch.ones(2), True, None]
        for bad in bad_factors:
            with pytest.raises(ArgumentError, match="PREMUL_SUM: expected a real number"):
                ringcomm.premul_sum(bad)
        assert "0.5" in repr(ringcomm.premul_sum(0.5))

    worlds(2).run(body)


def test_the_sweeps_have_every_dtype_and_op():
    assert set(MOVABLE) == set(DTYPE_CODES), "tests/support/exact.py lists the dtypes of the sweeps"
    for dtype, code in DTYPE_CODES.items():
        known = [op for op in OPS if _native.supports(code, _native.OPS[op])]
        assert known == list(ops_for(dtype)), dtype
