# SPDX-License-Identifier: Apache-2.0
"""Partial reductions in the accumulator's type, and how their combination rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ringcomm
from ringcomm import Communicator, MismatchError, _native
from ringcomm.comm.host.arguments import DTYPE_CODES, reduction_of
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import Call, itself
from tests.support.exact import REDUCIBLE, equal, op_of, operand, ops_for, reduced, same
from tests.support.memories import MEMORIES, put, room

Tensor = torch.Tensor
OPS = _native.OPS
comm_of: Callable[[Core], _native.Comm] = itself
HALVES = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def unfinished(inputs: list[Tensor], op: str) -> Tensor:
    """The reduction in the accumulator's type, for AVG before the division; inputs are exact."""
    wide = [each.to(accumulator(each.dtype)) for each in inputs]
    return reduced(wide, "SUM" if op == "AVG" else op)


def scatter_partial(comm: Communicator, inputs: list[Tensor], out: Tensor, op: str) -> None:
    how = reduction_of(op_of(op))

    def run(core: Core) -> int:
        return comm_of(core).reduce_scatter_partial(
            [each.data_ptr() for each in inputs],
            [each.numel() for each in inputs],
            out.data_ptr(),
            DTYPE_CODES[inputs[0].dtype],
            how.code,
            how.factor,
        )

    comm.engine.start_call(Call("reduce_scatter_partial", run, [out]))


def reduce_partial(comm: Communicator, tensor: Tensor, out: Tensor, op: str, root: int) -> None:
    how, dtype = reduction_of(op_of(op)), DTYPE_CODES[tensor.dtype]

    def run(core: Core) -> int:
        return comm_of(core).reduce_partial(
            tensor.data_ptr(), out.data_ptr(), tensor.numel(), dtype, how.code, how.factor, root
        )

    comm.engine.start_call(Call("reduce_partial", run, [out]))


def combine(arrays: list[Tensor], out: Tensor, op: str, divide_by: int = 0) -> Tensor:
    _native.combine_partials(
        [each.data_ptr() for each in arrays],
        DTYPE_CODES[arrays[0].dtype],
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        out.numel(),
        OPS[op],
        divide_by,
    )
    return out


def check_scatter(comm: Communicator, count: int, dtype: torch.dtype, op: str, memory: str) -> None:
    """Rank r's chunk has ``count + r`` elements, through slots or from the heap."""
    world, rank = comm.world_size, comm.rank
    counts = [count + each for each in range(world)]
    inputs = [operand(sum(counts), each, world, dtype, op) for each in range(world)]
    want = unfinished(inputs, op).split(counts)[rank]
    chunks = list(put(inputs[rank], memory, rank).split(counts))
    out = room(counts[rank], accumulator(dtype), memory, rank + 1)
    scatter_partial(comm, chunks, out, op)
    assert equal(out, want), (count, dtype, op, memory)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_dtype_and_op(worlds, world_size):
    def body(comm):
        for dtype in REDUCIBLE:
            for op in ops_for(dtype):
                check_scatter(comm, 67, dtype, op, "mixed")
                tensor = operand(67, comm.rank, world_size, dtype, op)
                out = torch.zeros(67, dtype=accumulator(dtype))
                reduce_partial(comm, tensor, out, op, world_size - 1)
                inputs = [operand(67, each, world_size, dtype, op) for each in range(world_size)]
                receives = comm.rank == world_size - 1
                assert equal(out, unfinished(inputs, op) if receives else torch.zeros_like(out))

    worlds(world_size).run(body)


@pytest.mark.parametrize("memory", MEMORIES)
def test_sizes(worlds, memory):
    """Several segments, zero copy from the heap, and empty chunks."""

    def body(comm):
        for count in (0, 1, 1111, 20_000):
            check_scatter(comm, count, torch.bfloat16, "SUM", memory)

    worlds(2).run(body)


def test_sums_are_not_rounded(worlds):
    """1 + 2^-12 fits into FP32, but into no 16-bit type: the partial sum must keep it."""

    def body(comm):
        for dtype in HALVES:
            value = 1.0 if comm.rank == 0 else 2.0**-12
            out = torch.empty(5)
            scatter_partial(comm, [torch.full((5,), value, dtype=dtype)] * 2, out, "AVG")
            assert torch.equal(out, torch.full((5,), 1 + 2.0**-12))

    worlds(2).run(body)


def test_whole_and_partial_forms_are_different_calls():
    for other in ("reduce_scatter", "reduce"):

        def body(comm, other=other):
            tensor, out = torch.ones(8), torch.ones(4)
            with pytest.raises(MismatchError) as raised:
                if other == "reduce_scatter" and comm.rank == 0:
                    comm.reduce_scatter(out, list(tensor.split(4)))
                elif other == "reduce_scatter":
                    scatter_partial(comm, list(tensor.split(4)), out, "SUM")
                elif comm.rank == 0:
                    comm.reduce(tensor, 0)
                else:
                    reduce_partial(comm, tensor, tensor, "SUM", 0)
                    comm.barrier()  # a sender need not wait for receivers
            text = str(raised.value)
            assert f"{other}(float32, SUM" in text
            assert f"{other}_partial(float32, SUM" in text

        with ringcomm.local_world(2, options=ringcomm.CommOptions(timeout=60)) as world:
            world.run(body)


def test_combined_partials_are_the_reduction():
    """Every dtype and op, from partial results and from elements, to both types."""
    for dtype in REDUCIBLE:
        wide = accumulator(dtype)
        for op in ops_for(dtype):
            if op == "PREMUL_SUM":  # its factors are applied earlier
                continue
            inputs = [operand(1500, each, 3, dtype, op) for each in range(3)]
            divide_by = 3 if op == "AVG" else 0
            for of in {dtype, wide}:
                for to in {dtype, wide}:
                    want = reduced([each.to(wide) for each in inputs], op).to(to)
                    arrays = [each.to(of) for each in inputs]
                    got = combine(arrays, torch.empty(1500, dtype=to), op, divide_by)
                    assert equal(got, want), (dtype, op, of, to)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_combination_rounds_once_in_list_order(dtype, count):
    """Bits of a sequential FP32 sum, with a vector tail; a single array is narrowed or widened."""
    generator = torch.Generator().manual_seed(count)
    arrays = [torch.randn(3333, generator=generator) * 3 for _ in range(count)]
    for of in (torch.float32, dtype):
        sources = [each.to(of) for each in arrays]
        total = sources[0].float()
        for each in sources[1:]:
            total = total + each.float()
        for to in (torch.float32, dtype):
            for divide_by in (0, 7):
                want = (total / divide_by if divide_by else total).to(to)
                got = combine(sources, torch.empty(3333, dtype=to), "SUM", divide_by)
                assert same(got, want), (of, to, divide_by)


def test_combination_of_large_arrays_and_in_place():
    """Results of 16 MiB or more are written by streaming stores, here also to an odd address."""
    elems = (16 << 20) // 2 + 5
    a, b = torch.full((elems,), 3.0), torch.full((elems,), -1.0)
    out = torch.full((elems + 1,), 9.0, dtype=torch.bfloat16)
    combine([a, b], out[1:], "SUM", 2)
    assert out[0] == 9
    assert bool((out[1:] == 1).all())
    combine([a, b], a, "MIN")
    assert torch.equal(a, b)


def test_what_cannot_be_combined():
    f32, f16, i32 = torch.ones(4), torch.ones(4, dtype=torch.float16), torch.ones(4).int()
    for arrays, out, op, divide_by in (
        ([f16], torch.ones(4, dtype=torch.bfloat16), "SUM", 0),
        ([f32], torch.ones(4, dtype=torch.float64), "SUM", 0),
        ([i32], f32.clone(), "SUM", 0),
        ([f32], f32.clone(), "BAND", 0),
        ([f32], f32.clone(), "MAX", 2),
        ([f32.bool()], f32.bool(), "SUM", 2),
    ):
        with pytest.raises(ValueError, match="combine_partials: expected"):
            combine(arrays, out, op, divide_by)
    code = DTYPE_CODES[torch.float32]
    with pytest.raises(ValueError, match="one array or more"):
        _native.combine_partials([], code, f32.data_ptr(), code, 4, OPS["SUM"], 0)
