# SPDX-License-Identifier: Apache-2.0
"""Bad input raises on the rank that passed it; ranks that disagree all raise."""

from __future__ import annotations

import gc
import re

import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm import AbortedError, ArgumentError, MismatchError, RingcommError, UnsupportedError
from ringcomm import functional as F

ReduceOp = dist.ReduceOp
T = torch.ones


def G(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


# Calls of rank 1 in a world of 2, and the pattern of the error.
CASES = {
    "not a tensor": (
        lambda c: F.all_reduce([1.0], group=c),  # type: ignore[arg-type]
        "tensor: expected a tensor, got list",
    ),
    "sparse": (lambda c: F.all_gather(T(3).to_sparse(), c), "expected a dense tensor"),
    "nested": (
        lambda c: F.all_to_all(torch.nested.nested_tensor([T(2), T(1)]), group=c),
        "expected a dense tensor with memory, got a nested tensor; pass its values()",
    ),
    "jagged": (
        lambda c: F.all_reduce(
            torch.nested.nested_tensor([T(2), T(1)], layout=torch.jagged), group=c
        ),
        "got a NestedTensor; pass tensor.values()",
    ),
    "unknown dtype": (
        lambda c: F.broadcast(T(3, dtype=torch.complex32), 0, c),
        "dtype torch.complex32 is not supported",
    ),
    "gather scalar": (
        lambda c: F.all_gather(T(()), c),
        "expected at least one dimension, got a scalar",
    ),
    "scatter scalar": (lambda c: F.reduce_scatter(T(()), group=c), "got a scalar"),
    "exchange scalar": (lambda c: F.all_to_all(T(()), group=c), "got a scalar"),
    "scatter rows": (
        lambda c: F.reduce_scatter(T(3, 2), group=c),
        "expected dimension 0 divisible by world_size 2, got shape (3, 2)",
    ),
    "exchange rows": (
        lambda c: F.all_to_all(T(3), group=c),
        "expected dimension 0 divisible by world_size 2, got 3 rows; pass input_splits",
    ),
    "split count": (
        lambda c: F.all_to_all(T(4), [4], [4], c),
        "input_splits: expected 2 numbers >= 0, one per rank, with the sum of the rows (4), "
        "got [4]",
    ),
    "split sum": (lambda c: F.all_to_all(T(4), [2, 2], [2, 3], c), "input_splits: expected 2"),
    "split sign": (lambda c: F.all_to_all(T(4), [2, 2], [5, -1], c), "input_splits: expected 2"),
    "empty splits": (lambda c: F.all_to_all(T(4), [], [], c), "input_splits: expected 2"),
    "output split count": (
        lambda c: F.all_to_all(T(4), [4], [2, 2], c),
        "output_splits: expected 2 numbers",
    ),
    "output split sign": (
        lambda c: F.all_to_all(T(4), [-1, 2], [2, 2], c),
        "output_splits: expected 2 numbers",
    ),
    "output splits missing": (
        lambda c: F.all_to_all(T(4), None, [1, 3], c),
        "output_splits: expected a list where input_splits is one, got None",
    ),
    "own piece": (
        lambda c: F.all_to_all(T(4), [1, 2], [1, 3], c),
        "expected 12 bytes (this rank's own input piece), got 8",
    ),
    "root": (lambda c: F.broadcast(T(3), 2, c), "src: expected one of the group's global ranks"),
    "no op": (lambda c: F.all_reduce(T(3), "sum", c), "op: expected a torch.distributed.ReduceOp"),
    "premul without factor": (
        lambda c: F.reduce_scatter(T(4), ReduceOp.PREMUL_SUM, c),
        "PREMUL_SUM needs a factor",
    ),
    "fractional factor": (
        lambda c: F.all_reduce(T(3).int(), ringcomm.premul_sum(0.5), c),
        "expected a whole number",
    ),
    "bits of floats": (
        lambda c: F.all_reduce(T(3), ReduceOp.BXOR, c),
        "op BXOR is not defined for dtype torch.float32",
    ),
    "largest": (
        lambda c: F.all_reduce(G(3), ReduceOp.MAX, c),
        "expected one of the ops SUM, AVG, PREMUL_SUM for a tensor that requires grad, got MAX",
    ),
    "smallest": (lambda c: F.reduce_scatter(G(4), ReduceOp.MIN, c), "got MIN"),
    "product": (lambda c: F.all_reduce(G(3), ReduceOp.PRODUCT, c), "got PRODUCT"),
}
UNSUPPORTED = ("sparse", "nested", "jagged", "unknown dtype", "largest", "smallest", "product")


@pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental", "ignore:The PyTorch API of nested tensors"
)
@pytest.mark.parametrize("name", CASES)
def test_bad_argument(worlds, name):
    call, message = CASES[name]
    kind = UnsupportedError if name in UNSUPPORTED else ArgumentError

    def body(comm):
        if comm.rank == 1:
            with pytest.raises(kind, match=re.escape(message)) as caught:
                call(comm)
            assert "on rank 1 of 2: " in str(caught.value)
        # The peer did not notice, and both ranks can continue.
        assert F.all_reduce(T(1), group=comm).item() == 2.0

    worlds(2).run(body)


def test_not_a_group():
    with pytest.raises(ArgumentError, match=r"functional\.all_gather: expected a ringcomm"):
        F.all_gather(T(2), "world")  # type: ignore[arg-type]
    with pytest.raises(RingcommError, match=r"functional\.all_reduce: expected a default group"):
        F.all_reduce(T(2))


def test_not_a_member(worlds):
    def body(comm):
        group = ringcomm.new_group([0])
        if comm.rank == 0:
            group.close()
            return
        with pytest.raises(ArgumentError, match="expected a group that this rank is in"):
            F.all_reduce(T(2), group=group)

    worlds(2).run(body)


@pytest.mark.parametrize("op", ["MAX", "PRODUCT", "BOR"])
def test_an_operator_called_directly_has_no_gradient_either(op):
    with ringcomm.local_world(1) as world:
        key = F.collectives.key_of(world[0])
        mine = G(2)
        for operator in (torch.ops.ringcomm.all_reduce, torch.ops.ringcomm.reduce_scatter):
            with pytest.raises(UnsupportedError, match=f"got {op}, which has no gradient"):
                operator(mine, op, 1.0, key, 1)


def test_an_unknown_op_name():
    with ringcomm.local_world(1) as world:
        key = F.collectives.key_of(world[0])
        with pytest.raises(ArgumentError, match=r"expected a torch\.distributed\.ReduceOp"):
            torch.ops.ringcomm.all_reduce(T(2), "sum", 1.0, key, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: F.all_gather(T(4, dtype=torch.float64 if c.rank else torch.float32), c),
        lambda c: F.all_reduce(T(4, dtype=torch.float16 if c.rank else torch.bfloat16), group=c),
        lambda c: F.all_gather(T(4 + c.rank), c),
        lambda c: F.all_reduce(T(4), ReduceOp.AVG if c.rank else ReduceOp.SUM, c),
        lambda c: F.broadcast(T(4), c.rank, c),
        lambda c: F.all_gather(T(4), c) if c.rank else F.all_reduce(T(4), group=c),
    ],
)
def test_ranks_that_call_differently(call):
    """These functions use the same native comparison of calls as all others."""
    with ringcomm.local_world(2, timeout=20.0) as world, pytest.raises(MismatchError):
        world.run(call)


def test_one_rank_goes_backward_alone():
    def body(comm):
        output = F.all_gather(G(2), comm)
        if comm.rank == 0:
            output.sum().backward()
        else:
            F.all_gather(T(2), comm)

    told = pytest.raises(MismatchError, match="reduce_scatter")
    with ringcomm.local_world(2, timeout=20.0) as world, told:
        world.run(body)


def test_ranks_that_disagree_about_gradients_are_told_in_debug_mode(worlds):
    before = dist.get_debug_level()

    def body(comm):
        for mine in (T(2), G(2)):
            F.all_reduce(mine, group=comm)
        told = pytest.raises(
            MismatchError,
            match=r"functional\.broadcast on rank \d of 3: .*requires grad is false on rank 0 and "
            r"true on rank 2\. It is true on ranks \[2\] of the group",
        )
        with torch.set_grad_enabled(comm.rank != 0), told:
            F.broadcast(T(2) if comm.rank == 1 else G(2), 0, comm)
        # All ranks raised, so all can continue.
        assert F.all_reduce(T(1), group=comm).item() == 3.0

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        worlds(3).run(body)
    finally:
        dist.set_debug_level(before)


def test_backward_after_the_communicator_was_closed_or_vanished():
    def forward(comm):
        return F.all_reduce(G(2), group=comm).sum()

    with ringcomm.local_world(1) as world:
        closed = world.run(forward)[0]
    with pytest.raises(AbortedError, match="'local' was closed; build a new one"):
        closed.backward()
    vanished = forward(world[0].__class__.from_store(dist.HashStore(), 0, 1, name="brief"))
    gc.collect()
    with pytest.raises(RingcommError, match=r"the communicator 'brief:0/1' is gone"):
        vanished.backward()
