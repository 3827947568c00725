# SPDX-License-Identifier: Apache-2.0
"""torch.compile with fullgraph: eager values and gradients, with groups of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion

import ringcomm
from ringcomm import AbortedError, ArgumentError, Communicator, ReduceOp, premul_sum
from ringcomm import functional as F
from tests.functional.compiling import alone, check, evaluate, recorded_calls
from tests.support.exact import equal
from tests.support.meshes import mesh_of
from tests.support.rank_pool import default_group

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Tensor = torch.Tensor
# torch 2.11 crashes when two threads compile at once.
threads = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="dynamo is not safe to use from several threads",
)


def through_all(tensor: Tensor, op: Any, group: Communicator | None) -> Tensor:
    """Maps [2 * world_size, n] through all functions; whole numbers stay whole."""
    gathered = F.all_gather(tensor, group) * 2
    shard = F.reduce_scatter(gathered * gathered, op, group)
    means = F.all_reduce(shard, ReduceOp.AVG, group) + F.broadcast(tensor, 0, group)
    return F.all_to_all(means.t().contiguous().t(), group=group) * tensor + 1


def closed_over(group: Communicator | None, op: Any) -> Callable[[Tensor], Tensor]:
    return lambda tensor: through_all(tensor, op, group)


# ---- in processes -------------------------------------------------------------------------------


def unlike_graphs(tensor: Tensor, group: Communicator) -> Tensor:
    """Compiles to different graphs on each rank, but the ranks make the same calls.

    Uses only products and views, for which inductor needs no C++ compiler.
    """
    logged = F.all_reduce(tensor.detach(), group=group)
    again = F.all_reduce(tensor if group.rank == 0 else tensor.t(), group=group)
    F.all_gather(tensor, group)
    return again @ (logged if group.rank == 0 else tensor.detach())


def in_processes(rank: int, world_size: int) -> None:
    check(unlike_graphs, 3, rank, default_group().communicator, backend="inductor")
    torch._dynamo.reset()


def test_one_graph_serves_all_sizes():
    counter = CompileCounterWithBackend("aot_eager")
    with alone() as group:
        for rows in (2, 6, 4):
            check(through_all, rows, 0, ReduceOp.AVG, group, backend=counter, dynamic=True)
    assert counter.frame_count == 1


def gathered_twice(tensor: Tensor, group: Any) -> Tensor:
    return F.all_gather(tensor, group) * 2


def groups_of_torch(rank: int, world_size: int) -> None:
    """Compiles one graph per mesh or process group, as an argument and as a closure variable."""
    mesh = mesh_of(1, world_size)
    meshes: list[Any] = [mesh["tp"], mesh["dp"]]
    for groups in (meshes, [each.get_group() for each in meshes]):
        compiled = torch.compile(gathered_twice, backend="aot_eager", fullgraph=True)
        positions = torch.compile(F.context_positions, backend="eager", fullgraph=True)
        for group in groups:
            want = evaluate(gathered_twice, 2, rank, group)
            assert all(map(equal, evaluate(compiled, 2, rank, group), want))
            assert positions(8, group).tolist() == F.context_positions(8, group).tolist()
        check(lambda tensor, group=groups[0]: gathered_twice(tensor, group), 2, rank)
    torch._dynamo.reset()


@pytest.mark.parametrize("check", [in_processes, groups_of_torch])
def test_ranks_that_are_processes(compiling_ranks, check):
    compiling_ranks.run(check)


# ---- in threads ---------------------------------------------------------------------------------


@threads
def test_groups_in_threads(worlds):
    default = torch.compile(through_all, backend="aot_eager", fullgraph=True)

    def body(comm):
        check(through_all, 4, comm.rank, premul_sum(comm.rank + 2.0), comm)
        check(closed_over(comm, ReduceOp.SUM), 4, comm.rank)
        want = evaluate(through_all, 4, comm.rank, ReduceOp.SUM, None)
        for _ in range(2):
            got = evaluate(default, 4, comm.rank, ReduceOp.SUM, None)
            assert all(map(equal, got, want))

    worlds(2).run(body)


@threads
def test_another_default_group(worlds):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def gather(tensor):
        return F.all_gather(tensor)

    def body(comm):
        gathered = gather(torch.tensor([comm.rank]))
        assert gathered.tolist() == list(range(comm.world_size))

    worlds(2).run(body)
    with ringcomm.local_world(2) as other:
        other.run(body)
    with pytest.raises(ArgumentError, match=r"2 ranks as when .* call torch\.compiler\.reset\(\)"):
        worlds(3).run(body)
    torch.compiler.reset()
    worlds(3).run(body)


# ---- which communicator -------------------------------------------------------------------------


def test_a_graph_belongs_to_its_communicator():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def reduce(tensor, group):
        return F.all_reduce(tensor, group=group)

    def used(group):
        with recorded_calls() as calls:
            reduce(torch.ones(2), group)
        return calls[0][0]

    with alone("one") as one, alone("two") as two:
        assert [used(each) for each in (one, two, one)] == ["one", "two", "one"]
    with pytest.raises(AbortedError, match="'one' was closed"):
        reduce(torch.ones(2), one)
    with alone("one") as again:
        assert used(again) == "one"


def test_it_may_be_loaded_while_tracing(monkeypatch):
    monkeypatch.delattr(ringcomm, "functional")
    with alone() as group:
        compiled = torch.compile(
            lambda tensor: ringcomm.functional.all_reduce(tensor, group=group),
            backend="eager",
            fullgraph=True,
        )
        assert compiled(torch.ones(1)).item() == 1.0


def test_the_factor_is_guarded():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def twice(tensor, op, group):
        return F.all_reduce(tensor, op, group) + F.all_reduce(tensor, premul_sum(10.0), group)

    with alone() as group:
        for factor in (2.0, 3.0, 5.0, 3.0):
            assert twice(torch.ones(1), premul_sum(factor), group).item() == factor + 10


# ---- errors while tracing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, c: F.all_reduce(x, ReduceOp.MAX, c), "functional.all_reduce on rank 0 of 1: "),
        (lambda x, c: F.reduce_scatter(x, ReduceOp.MIN, c), "got MIN, which has no gradient"),
        (lambda x, c: F.all_reduce(x, ReduceOp.PREMUL_SUM, c), "torch.compile takes ReduceOp.SUM"),
        (lambda x, c: F.all_gather("x", c), "tensor: expected a tensor, got str"),  # type: ignore[arg-type]
        (lambda x, c: F.all_gather(x, "c"), "expected a ringcomm.Communicator"),  # type: ignore[arg-type]
    ],
)
def test_an_error_shows_while_tracing(call, message):
    with alone() as group:
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        with pytest.raises(Unsupported, match=message):
            compiled(torch.ones(2, requires_grad=True), group)


def test_an_op_without_gradient_works_without_grad():
    with alone() as group:
        compiled = torch.compile(
            lambda x: F.all_reduce(x, ReduceOp.MAX, group), backend="aot_eager", fullgraph=True
        )
        assert equal(compiled(torch.ones(2)), torch.ones(2))
        with torch.no_grad():
            assert equal(compiled(torch.ones(2, requires_grad=True)), torch.ones(2))
