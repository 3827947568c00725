# SPDX-License-Identifier: Apache-2.0
"""Second derivatives by finite differences; negative controls with wrong gradients.

``test_values.py`` compares first derivatives bit for bit.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from ringcomm import ReduceOp
from ringcomm import functional as F
from ringcomm.functional import collectives
from ringcomm.functional.collectives import OPERATORS
from tests.functional.cases import CASES, Case, expected, gradient, inputs_of
from tests.functional.lock_step import on_all_ranks
from tests.functional.test_values import check
from tests.support.covering import covering, in_test_all
from tests.support.exact import equal

BY_NAME = {case.name: case for case in CASES}


def squared(case: Case, comm, tensor):
    """Squares its input, so that the second derivative is not zero; one column, for speed."""
    return (case.call(comm, tensor * tensor),)


def problem(world, case: Case, dtype=torch.float64):
    """Returns a function for gradcheck, and the point at which to check it."""
    generator = torch.Generator().manual_seed(5)
    leaves = [
        torch.randn(case.rows(rank, len(world)), generator=generator, dtype=dtype).requires_grad_()
        for rank in range(len(world))
    ]
    function = partial(squared, case)
    return (lambda *tensors: on_all_ranks(world, function, tensors)), leaves


@covering(strength=1, world_size=[1, 3], case=CASES)
def test_second_order(worlds, world_size, case):
    assert gradgradcheck(*problem(worlds(world_size), case), fast_mode=world_size != 2)


@pytest.mark.parametrize("name", ["all_reduce PREMUL_SUM", *in_test_all("all_gather", "broadcast")])
def test_complex(worlds, name):
    function, leaves = problem(worlds(2), BY_NAME[name], torch.complex128)
    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


def compose(comm, tensor):
    gathered = F.all_gather(tensor * tensor, comm)
    shard = F.reduce_scatter(gathered.sin() * gathered, ReduceOp.AVG, comm)
    return (F.broadcast(F.all_reduce(shard, group=comm) * tensor, 0, comm) * shard,)


def test_compositions(worlds):
    world = worlds(2)
    leaves = [torch.linspace(0.1, 1.0, 2, dtype=torch.float64) + rank for rank in range(2)]
    leaves = [each.requires_grad_() for each in leaves]

    def function(*tensors):
        return on_all_ranks(world, compose, tensors)

    assert gradcheck(function, leaves) and gradgradcheck(function, leaves)


# ---- wrong gradients, which the checks above must notice ----------------------------------------


def with_wrong_duals(monkeypatch, change: Any) -> None:
    """Makes the backward functions call ``change(operator, name)`` in place of each operator."""
    real = collectives._duals
    wrong = {name: change(getattr(real, name), name) for name in OPERATORS}
    monkeypatch.setattr(collectives, "_duals", SimpleNamespace(**wrong))


def doubled(operator, name):
    return lambda grad, *rest: 2 * operator(grad, *rest)


def without_graph(operator, name):
    return lambda grad, *rest: operator(grad, *rest).detach()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_multiple_is_noticed(worlds, monkeypatch, case):
    with_wrong_duals(monkeypatch, doubled)
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        gradcheck(*problem(worlds(2), case), fast_mode=True)
    with pytest.raises(AssertionError):
        check(worlds(2), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_second_order_is_noticed(worlds, monkeypatch, case):
    with_wrong_duals(monkeypatch, without_graph)
    function, leaves = problem(worlds(2), case)
    assert gradcheck(function, leaves, fast_mode=True)
    with pytest.raises((GradcheckError, RuntimeError)):
        gradgradcheck(function, leaves, fast_mode=True)


def on_this_rank(operator, name):
    """Mutant: a gradient that ignores the other ranks."""

    def local(grad, *rest):
        world_size = rest[-1]
        if name == "reduce_scatter":
            return grad.chunk(world_size)[0]
        return torch.cat([grad] * world_size) if name == "all_gather" else grad.clone()

    return local


def swapped(operator, name):
    return lambda grad, into, out_of, *rest: operator(grad, out_of, into, *rest)


def summed(operator, name):
    return lambda grad, op, *rest: operator(grad, "SUM", *rest)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("all_gather", on_this_rank),
        ("reduce_scatter", on_this_rank),
        ("all_reduce", on_this_rank),
        ("all_to_all", on_this_rank),
        ("broadcast", on_this_rank),
        ("all_reduce AVG", summed),
        ("all_to_all uneven", swapped),
    ],
)
def test_a_plausible_mistake_is_noticed(monkeypatch, worlds, name, change):
    with_wrong_duals(monkeypatch, change)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        check(worlds(3), BY_NAME[name])


# ---- what backward is called with ---------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_twice(worlds, case):
    inputs = inputs_of(case, 2)
    _, fed, want = expected(case.reference, inputs)

    def body(comm):
        mine = inputs[comm.rank].clone().requires_grad_()
        output = case.call(comm, mine)
        output.backward(fed[comm.rank], retain_graph=True)
        output.backward(fed[comm.rank])
        assert equal(mine.grad, 2 * want[comm.rank])

    worlds(2).run(body)


def test_a_loss_that_all_ranks_compute_alike(worlds):
    """NOTE [What the gradient is of]: each rank computes the loss, so it counts once per rank."""

    def body(comm):
        mine = torch.full((2,), 3.0, requires_grad=True)
        F.all_reduce(mine, group=comm).sum().backward()
        assert gradient(mine).tolist() == [4.0, 4.0]
        mine.grad = None
        F.all_reduce(mine, ReduceOp.AVG, group=comm).sum().backward()
        assert gradient(mine).tolist() == [1.0, 1.0]

    worlds(4).run(body)


def test_several_collectives_run_backward_in_reverse(worlds):
    """The collectives have different sizes, so ranks in different orders would raise."""

    def body(comm):
        parts = [torch.ones(count, requires_grad=True) for count in range(1, 9)]
        outputs = [F.all_reduce(part, group=comm) for part in parts]
        # Each rank sums in another order, but autograd follows the order of creation.
        order = outputs[comm.rank :] + outputs[: comm.rank]
        loss = order[0].sum()
        for each in order[1:]:
            loss = loss + each.sum()
        loss.backward()
        assert all(equal(gradient(part), torch.full_like(part, 2.0)) for part in parts)

    worlds(2).run(body)
