# SPDX-License-Identifier: Apache-2.0
"""Values and gradients equal one process with the inputs of all ranks, bit for bit."""

from __future__ import annotations

import pytest
import torch

import ringcomm
from ringcomm import ReduceOp
from ringcomm import functional as F
from ringcomm.comm.host.arguments import is_contiguous
from tests.functional.cases import CASES, Case, expected, gradient, inputs_of
from tests.support.covering import covering
from tests.support.exact import equal, op_of, operand, reduced

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128)


def run(world, case: Case, inputs, fed):
    """Returns the outputs and gradients of all ranks."""

    def body(comm):
        mine = inputs[comm.rank].detach().clone().requires_grad_()
        output = case.call(comm, mine)
        output.backward(fed[comm.rank])
        return output.detach(), mine.grad

    return zip(*world.run(body), strict=True)


def check(world, case: Case, dtype: torch.dtype = torch.float64) -> None:
    inputs = inputs_of(case, len(world), dtype)
    outputs, fed, gradients = expected(case.reference, inputs)
    got_outputs, got_gradients = run(world, case, inputs, fed)
    assert all(map(equal, got_outputs, outputs))
    assert all(map(equal, got_gradients, gradients))


@covering(world_size=[1, 2, 3], case=CASES)
def test_every_function(worlds, world_size, case):
    check(worlds(world_size), case)


@covering(strength=1, dtype=DTYPES, case=CASES)
def test_every_dtype(worlds, dtype, case):
    check(worlds(2), case, dtype)


@pytest.mark.parametrize("op", ["MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "SUM", "AVG"])
def test_ops_on_tensors_without_gradient(worlds, op):
    """A function takes any operator and returns a new tensor, equal to the collective's sum."""
    inputs = [operand(6, rank, 3, torch.int32, op) for rank in range(3)]
    want = reduced(inputs, op)

    def body(comm):
        mine = inputs[comm.rank].clone()
        assert equal(F.all_reduce(mine, op_of(op), comm), want)
        assert equal(F.reduce_scatter(mine, op_of(op), comm), want.chunk(3)[comm.rank])
        assert equal(mine, inputs[comm.rank])

    worlds(3).run(body)


# The same values in memory layouts that no kernel accepts.
LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "spread": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "negated": lambda x: torch._neg_view(-x),
    "conjugated": lambda x: x.conj().resolve_conj().conj(),
}


@covering(strength=1, layout=[*LAYOUTS], case=CASES)
def test_other_layouts_of_inputs_and_gradients(worlds, layout, case):
    dtype = torch.complex64 if layout == "conjugated" else torch.float32
    world = worlds(3)
    inputs = inputs_of(case, 3, dtype)
    outputs, fed, gradients = expected(case.reference, inputs)

    def body(comm):
        mine = inputs[comm.rank].clone().requires_grad_()
        given, fed_here = LAYOUTS[layout](mine), LAYOUTS[layout](fed[comm.rank])
        assert not is_contiguous(given) and not is_contiguous(fed_here)
        output = case.call(comm, given)
        assert is_contiguous(output)
        output.backward(fed_here)
        return output.detach(), mine.grad

    got_outputs, got_gradients = zip(*world.run(body), strict=True)
    assert all(map(equal, got_outputs, outputs))
    assert all(map(equal, got_gradients, gradients))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_expanded_gradient(worlds, case):
    inputs = inputs_of(case, 2)

    def summed(leaves):
        return [each.sum() for each in case.reference(leaves)]

    leaves = [each.clone().requires_grad_() for each in inputs]
    want = torch.autograd.grad(summed(leaves), leaves, materialize_grads=True)

    def body(comm):
        mine = inputs[comm.rank].clone().requires_grad_()
        case.call(comm, mine).sum().backward()
        assert equal(mine.grad, want[comm.rank])

    worlds(2).run(body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_to_move(worlds, world_size):
    def even(tensor):
        return [tensor.size(0) // world_size] * world_size

    calls = (
        F.all_gather,
        lambda x, c: F.reduce_scatter(x, group=c),
        lambda x, c: F.all_reduce(x, group=c),
        lambda x, c: F.all_to_all(x, group=c),
        lambda x, c: F.all_to_all(x, even(x), even(x), c),
        lambda x, c: F.broadcast(x, 0, c),
    )

    def body(comm):
        for shape in ((0,), (0, 3), (6, 0)):
            for call in calls:
                mine = torch.ones(shape, requires_grad=True)
                output = call(mine, comm)
                assert output.numel() == 0 and output.shape[1:] == mine.shape[1:]
                output.sum().backward()
                assert equal(gradient(mine), torch.zeros(shape))

    worlds(world_size).run(body)


def test_scalars(worlds):
    def body(comm):
        mine = torch.tensor(comm.rank + 1.0, requires_grad=True)
        output = F.all_reduce(mine, group=comm) + 10 * F.broadcast(mine, 1, comm)
        assert output.shape == () and output.item() == 23.0
        output.backward()
        assert mine.grad.item() == (22.0 if comm.rank == 1 else 2.0)

    worlds(2).run(body)


@covering(strength=1, world_size=[1, 2], case=CASES)
def test_outputs_are_new(worlds, world_size, case):
    """Outputs are new even if a rank only gets its own input back."""
    inputs = inputs_of(case, world_size)

    def body(comm):
        mine = inputs[comm.rank].clone()
        output = case.call(comm, mine)
        assert output.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
        output.fill_(-1)
        assert equal(mine, inputs[comm.rank])

    worlds(world_size).run(body)


def test_without_grad_nothing_is_remembered(worlds):
    def body(comm):
        mine = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert F.all_gather(mine, comm).grad_fn is None
            assert F.all_reduce(mine, ReduceOp.MAX, comm).grad_fn is None
        with torch.inference_mode():
            assert F.all_gather(torch.ones(2), comm).is_inference()
        assert not F.all_gather(mine.detach(), comm).requires_grad
        assert F.all_gather(mine, comm).requires_grad

    worlds(2).run(body)


def test_default_group_and_groups(worlds):
    def body(comm):
        mine = torch.full((2,), 2.0 + comm.rank, requires_grad=True)
        everyone = F.all_gather(mine)
        assert equal(everyone.detach(), torch.tensor([2.0, 2, 3, 3, 4, 4]))
        with comm.new_group([comm.rank]) as alone:
            assert equal(F.all_gather(mine, alone), mine)
        if comm.rank:
            with comm.new_group([1, 2]) as pair:
                both = F.broadcast(F.all_reduce(mine, group=pair), 2, pair)
                both.sum().backward()
                assert both[0].item() == 7.0
                assert mine.grad.tolist() == [2.0, 2.0]

    worlds(3).run(body)


def test_a_tensor_of_the_heap(worlds):
    def body(comm):
        mine = ringcomm.empty(4).fill_(comm.rank + 1.0).requires_grad_()
        output = F.reduce_scatter(mine, group=comm)
        output.backward(torch.full((2,), comm.rank + 5.0))
        assert equal(output.detach(), torch.full((2,), 3.0))
        assert equal(gradient(mine), torch.tensor([5.0, 5.0, 6.0, 6.0]))

    worlds(2).run(body)
