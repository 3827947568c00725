# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs with a fixed number of rows give the same results as eager calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.library import opcheck

import ringcomm
from ringcomm import Communicator
from ringcomm.extras import moe
from tests.extras.moe.cases import Case, case
from tests.functional.compiling import alone

Tensor = torch.Tensor
EXPERTS = 8
ROOM = 40


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with alone("moe") as made:
        yield made
    torch._dynamo.reset()


def step(comm: Communicator, x: Tensor, given: Case) -> tuple[Tensor, Tensor]:
    rows, counts, handle = moe.dispatch(x, given.idx, given.weights, EXPERTS, comm, max_rows=ROOM)
    return moe.combine(torch.tanh(rows), handle), counts


@pytest.mark.compiles
def test_a_compiled_layer_is_the_eager_one(comm):
    def evaluate(function) -> list[Tensor]:
        given = case(0, 2)
        x = given.x.clone().requires_grad_()
        weights = given.weights.clone().requires_grad_()
        out, counts = function(comm, x, given._replace(weights=weights))
        out.square().sum().backward()
        return [out.detach(), counts, x.grad, weights.grad]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for one, other in zip(evaluate(compiled), evaluate(step), strict=True):
        torch.testing.assert_close(one, other)


def test_the_operators_are_what_they_say(comm):
    """The operators' shapes without data are right, and they write to no input."""
    given = case(0, 2)
    key = ringcomm.functional.collectives.key_of(comm)
    ops = torch.ops.ringcomm
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()
    tests = ("test_schema", "test_faketensor")
    arguments = (x, given.idx, weights.detach(), EXPERTS, ROOM, None, key, 1)
    opcheck(ops.moe_dispatch.default, arguments, test_utils=tests)
    rows, _, *tables = ops.moe_dispatch(*arguments)
    y = rows.detach().requires_grad_()
    opcheck(ops.moe_combine.default, (y, weights, *tables, key, 1), test_utils=tests)
    grad = torch.ones_like(given.x)
    for weighting in range(3):
        backward = (grad, y, *tables, weighting, key, 1)
        opcheck(ops.moe_combine_backward.default, backward, test_utils=tests)
