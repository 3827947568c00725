# SPDX-License-Identifier: Apache-2.0
"""Matrix products over ranks equal those of one process, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck

import ringcomm
from ringcomm import ArgumentError, Communicator, MismatchError
from ringcomm import functional as F
from ringcomm.functional import collectives as traced_groups
from ringcomm.functional import matmul
from tests.functional.cases import gradient
from tests.functional.compiling import alone
from tests.support.covering import covering_array, in_test_all, name_of

Tensor = torch.Tensor

ROWS, INNER, COLUMNS = 3, 4, 5


def whole(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns small integers, for which every sum here is exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, (2, *shape), generator=generator).double()
    return torch.complex(*values).to(dtype) if dtype.is_complex else values[0].to(dtype)


def gathers(inputs: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    rows = torch.cat(inputs, -2)
    return [rows @ weight + bias for weight, bias in zip(weights, biases, strict=True)]


def scatters(inputs: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    given = zip(inputs, weights, biases, strict=True)
    products = [each @ weight + bias for each, weight, bias in given]
    return list(torch.stack(products).sum(0).chunk(len(inputs), -2))


KINDS = {
    "gather": (F.all_gather_matmul, gathers, False),
    "scatter": (F.matmul_reduce_scatter, scatters, True),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def problem(
    kind: str, world_size: int, batch: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns inputs and weights of all ranks; one dimension of the weights differs by rank."""
    gathered = KINDS[kind][2]
    inputs, weights = [], []
    for rank in range(world_size):
        rows = ROWS * world_size if gathered else ROWS
        inner = INNER + (rank if gathered else 0)
        columns = COLUMNS + (0 if gathered else rank)
        inputs.append(whole(*batch, rows, inner, seed=rank, dtype=dtype))
        weights.append(whole(inner, columns, seed=50 + rank, dtype=dtype))
    return inputs, weights


def feed(outputs: list[Tensor]) -> list[Tensor]:
    return [
        whole(*each.shape, seed=100 + rank, dtype=each.dtype) for rank, each in enumerate(outputs)
    ]


def check(
    world: ringcomm.LocalWorld,
    kind: str,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    arrange: Callable[[Tensor], Tensor] = torch.clone,
    biased: bool = False,
) -> None:
    """Compares values and gradients with the reference, bit for bit."""
    call, reference, _ = KINDS[kind]
    inputs, weights = problem(kind, len(world), batch, dtype)
    biases = [
        biased * whole(each.size(1), seed=150 + rank, dtype=dtype)
        for rank, each in enumerate(weights)
    ]
    given = (inputs, weights, biases)
    leaves = [[each.clone().requires_grad_() for each in some] for some in given]
    outputs = reference(*leaves)
    fed = feed([each.detach() for each in outputs])
    flat = [each for some in leaves for each in some]
    expected = torch.autograd.grad(outputs, flat, fed)

    def body(comm: Communicator) -> list[Tensor]:
        rank = comm.rank
        own = [arrange(some[rank]).requires_grad_() for some in given[: 2 + biased]]
        found = call(own[0], own[1], comm, bias=own[2] if biased else None)
        assert found.is_contiguous()
        grads = torch.autograd.grad(found, own, fed[rank])
        return [found.detach(), *grads]

    for rank, found in enumerate(world.run(body)):
        wanted = [outputs[rank], *expected[rank :: len(world)][: 2 + biased]]
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.fixture(params=["read", "gathered"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs small sizes both by the method of large sizes and by their own."""
    limit = 0 if request.param == "read" else 1 << 40
    monkeypatch.setattr(matmul, "READ_FROM_BYTES", limit)
    monkeypatch.setattr(matmul, "IN_HEAP_FROM_BYTES", limit)
    return str(request.param)


PRODUCTS = covering_array(
    {
        "world_size": (3, 2, 1),
        "batch": ((2,), (1,), ()),
        "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.complex128),
        "biased": (False, True),
        "rows_of_a_product": (1, 1 << 20),
    }
)


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: "-".join(map(name_of, case.values())))
@every_kind
def test_it_is_the_product_of_one_process(worlds, each_way, kind, case, monkeypatch):
    """Covers gradients as well; test_transforms.py covers derivatives of any order."""
    monkeypatch.setattr(matmul, "ROWS_OF_A_PRODUCT", case["rows_of_a_product"])
    world = worlds(case["world_size"])
    check(world, kind, case["batch"], case["dtype"], biased=case["biased"])


@every_kind
def test_in_the_heap_and_in_any_layout(worlds, each_way, kind):
    def in_heap(tensor: Tensor) -> Tensor:
        return ringcomm.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    check(worlds(2), kind, (2,), arrange=in_heap)
    check(worlds(2), kind, (2,), arrange=lambda each: each.mT.contiguous().mT)
    check(worlds(2), kind, dtype=torch.complex128, arrange=lambda each: each.conj().clone().conj())


@every_kind
def test_over_nodes(each_way, kind):
    with ringcomm.local_world(3, nodes=[2, 1], timeout=60) as world:
        check(world, kind, (2,))


@pytest.mark.parametrize("rows", [0, 1])
@every_kind
def test_few_rows_or_none(worlds, each_way, kind, rows):
    def body(comm: Communicator) -> Tensor:
        gathered = KINDS[kind][2]
        tensor = torch.ones(rows * (2 if gathered else 1), 2)
        return KINDS[kind][0](tensor, torch.ones(2, 3), comm)

    for found in worlds(2).run(body):
        assert found.tolist() == [[4.0 if kind == "scatter" else 2.0] * 3] * found.size(0)
        assert found.size(0) == (rows if kind == "scatter" else 2 * rows)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sums_of_any_world_are_within_the_bound_of_the_documents(worlds, each_way, world_size):
    rows, inner = 8, 1024
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(*shape, generator=generator) for shape in ((rows, inner), (inner, 5)))
    exact, unit = x.double() @ w.double(), 2.0**-24
    bound = inner * unit / (1 - inner * unit) * (x.double().abs() @ w.double().abs())

    def body(comm: Communicator) -> Tensor:
        part = slice(comm.rank * inner // world_size, (comm.rank + 1) * inner // world_size)
        return F.matmul_reduce_scatter(x[:, part].contiguous(), w[part], comm)

    apart = (torch.cat(worlds(world_size).run(body)).double() - exact).abs()
    assert bool((apart <= bound).all())
    # The bound is far below one rank's part, so a missing part would be noticed.
    assert bool((bound < 1e-2 * (x[:, :256].double() @ w[:256].double()).abs().mean()).all())


def test_what_is_lent_may_be_written_to_afterwards(worlds, each_way):
    """A late peer reads the values at the time of the call."""

    def body(comm: Communicator, in_heap: bool) -> list[float]:
        empty = ringcomm.empty if in_heap else torch.empty
        tensor = empty((64, 8), dtype=torch.float32)
        found = []
        for step in range(50):
            tensor.fill_(step + comm.rank)
            found.append(F.all_gather_matmul(tensor, torch.ones(8, 1), comm).sum().item())
        return found

    for in_heap in (False, True):
        for found in worlds(3).run(body, in_heap):
            assert found == [3 * 64 * 8 * (step + 1.0) for step in range(50)]


def test_sixteen_bits_have_the_bits_of_the_collectives(worlds, each_way):
    """Sums of rounded products run in FP32 and rank order, and round once; one weight product."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 6, 32, generator=generator).bfloat16()
    w = torch.randn(3, 32, 8, generator=generator).bfloat16()

    def body(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        own, weight = x[comm.rank], w[comm.rank].clone().requires_grad_()
        F.all_gather_matmul(own, weight, comm).float().square().sum().backward()
        apart = w[comm.rank].clone().requires_grad_()
        (F.all_gather(own, comm) @ apart).float().square().sum().backward()
        scattered = F.matmul_reduce_scatter(own, w[comm.rank], comm)
        return [
            (scattered, F.reduce_scatter(own @ w[comm.rank], group=comm)),
            (gradient(weight), gradient(apart)),
        ]

    for found in worlds(3).run(body):
        for ours, theirs in found:
            assert torch.equal(ours, theirs)


# ---- torch.compile, autocast, operators -----------------------------------------------------


def block(x: Tensor, into: Tensor, out_of: Tensor, group: Communicator) -> Tensor:
    return F.matmul_reduce_scatter(F.all_gather_matmul(x, into, group).relu(), out_of, group)


def test_it_compiles_to_one_graph(worlds, fresh_dynamo):
    """On one thread, because two ranks would compile at the same time."""
    comm = alone("matmul")
    parts = [whole(4, 3, seed=1), whole(3, 5, seed=2), whole(5, 3, seed=3)]
    found = []
    for call in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        leaves = [each.clone().requires_grad_() for each in parts]
        result = call(leaves[0], leaves[1], leaves[2], comm)
        found.append([result.detach(), *torch.autograd.grad(result.square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(2, 4, 3), *in_test_all((4, 3))])
def test_operators_are_what_torch_expects(shape):
    comm = alone("matmul")
    group = (traced_groups.key_of(comm), 1)
    tensor, weight = (whole(*each, seed=1).requires_grad_() for each in (shape, (3, 5)))
    operators = torch.ops.ringcomm
    bias = whole(5, seed=3).requires_grad_() if len(shape) == 3 else None
    for operator in (operators.all_gather_matmul, operators.matmul_reduce_scatter):
        opcheck(operator.default, (tensor, weight, *group, bias))
    opcheck(operators.weight_gradient.default, (tensor, whole(*shape, seed=2), *group))


def test_autocast_is_that_of_a_product(worlds):
    def body(comm: Communicator) -> None:
        tensor, weight = torch.ones(2, 4).requires_grad_(), torch.ones(4, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found = block(tensor, weight, weight, comm)
        assert found.dtype is torch.bfloat16
        found.sum().backward()
        assert weight.grad is not None and weight.grad.dtype is torch.float32

    worlds(2).run(body)


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "tensor", "weight", "says"),
    [
        (F.all_gather_matmul, (4, 3), (4, 3), r"weight: expected a matrix of 3 rows, as tensor"),
        (F.all_gather_matmul, (4, 3), (3,), r"weight: expected a matrix of 3 rows.*got \(3,\)"),
        (F.all_gather_matmul, (3,), (3, 2), r"expected \[rows, columns\] or \[batch, rows"),
        (F.matmul_reduce_scatter, (3, 3), (3, 2), "rows that world_size 2 divides, got 3 of"),
        (F.matmul_reduce_scatter, (2, 2, 2, 2), (2, 2), r"expected \[rows, columns\]"),
    ],
)
def test_wrong_shapes(worlds, call, tensor, weight, says):
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=says):
            call(torch.zeros(tensor), torch.zeros(weight), comm)
        comm.barrier()

    worlds(2).run(body)


@pytest.mark.parametrize("bias", [torch.zeros(3), torch.zeros(1, 2), torch.zeros(2).double()])
@every_kind
def test_wrong_biases(worlds, kind, bias):
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=r"bias: expected 2 elements of torch\.float32"):
            KINDS[kind][0](torch.zeros(2, 4), torch.zeros(4, 2), comm, bias=bias)
        comm.barrier()

    worlds(2).run(body)


def test_wrong_dtypes_and_no_tensors(worlds):
    def body(comm: Communicator) -> None:
        tensor: Any = torch.zeros(2, 2)
        with pytest.raises(ArgumentError, match=r"weight: expected torch\.float32 as tensor has"):
            F.all_gather_matmul(tensor, tensor.double(), comm)
        no_tensor: Any = 1
        for one, other in ((tensor, no_tensor), (no_tensor, tensor)):
            with pytest.raises(ArgumentError, match="expected a tensor, got int"):
                F.matmul_reduce_scatter(one, other, comm)
        comm.barrier()

    worlds(2).run(body)


def test_ranks_with_other_rows_are_told(each_way):
    def body(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match=r"on rank 0 and|different calls"):
            F.all_gather_matmul(torch.zeros(2 + comm.rank, 4), torch.zeros(4, 2), comm)

    with ringcomm.local_world(2, timeout=20) as world:
        world.run(body)


def test_shapes_are_known_without_data():
    with alone() as comm:
        rows, weight = (torch.empty(each, device="meta") for each in ((2, 4), (4, 3)))
        for function in (F.all_gather_matmul, F.matmul_reduce_scatter):
            assert function(rows, weight, comm).shape == (2, 3)


# ---- where sequence parallelism begins and ends ----------------------------------------------


def test_splits_and_joins(worlds):
    """Each function is the gradient of the other."""

    def body(comm: Communicator) -> list[Tensor]:
        whole = torch.arange(12.0).view(6, 2).requires_grad_()
        part = F.split_sequence(whole, comm)
        assert torch.equal(part, whole.detach().chunk(comm.world_size)[comm.rank])
        part.square().sum().backward()
        joined = F.join_sequence(part.detach().requires_grad_(), comm)
        own = part.detach().requires_grad_()
        F.join_sequence(own, comm).square().sum().backward()
        assert whole.grad is not None and own.grad is not None
        return [joined.detach(), whole.grad, own.grad]

    for rank, (joined, of_whole, of_part) in enumerate(worlds(3).run(body)):
        assert torch.equal(joined, torch.arange(12.0).view(6, 2))
        assert torch.equal(of_whole, 2 * joined)
        assert torch.equal(of_part, 2 * joined.chunk(3)[rank])
