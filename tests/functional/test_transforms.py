# SPDX-License-Identifier: Apache-2.0
"""Forward mode and the transforms of ``torch.func`` through every function and operator.

A problem is a function of one rank and a reference, which computes the outputs of all ranks from
the inputs of all ranks with ordinary tensor operations. So torch's derivatives of the reference
give each rank's expected result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as nn_functional
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringcomm import Communicator, MismatchError, ReduceOp, UnsupportedError
from ringcomm import functional as F
from ringcomm.extras import moe
from ringcomm.functional import collectives
from tests.extras.moe import cases as moe_cases
from tests.functional import cases
from tests.functional.cases import whole
from tests.support.rank_pool import default_group, same

Tensor = torch.Tensor
Inputs = tuple[Tensor, ...]
WORLD_SIZE = 2


@dataclass(frozen=True)
class Problem:
    """A function of one rank, and a reference for its results.

    Attributes:
        call: takes the communicator and this rank's inputs.
        reference: takes the inputs of all ranks, rank by rank; returns the outputs of all ranks.
        shapes: returns the shapes of a rank's inputs.
        reverse: whether the gradient is that of the sum over the ranks; False for functions of
            sequence parallelism, whose results all ranks use in the same way.
        alike: whether the inputs have one shape on all ranks, so that Jacobians fit.
        exact: whether results are compared bit for bit.
    """

    call: Callable[..., Tensor]
    reference: Callable[[Sequence[Inputs]], Sequence[Tensor]]
    shapes: Callable[[int], Sequence[tuple[int, ...]]]
    reverse: bool = True
    alike: bool = True
    exact: bool = True

    def inputs(self, rank: int, seed: int) -> Inputs:
        return tuple(
            whole(shape, 31 * seed + 7 * rank + number, WORLD_SIZE, torch.float64)
            for number, shape in enumerate(self.shapes(rank))
        )

    def all_inputs(self, seed: int) -> list[Inputs]:
        return [self.inputs(rank, seed) for rank in range(WORLD_SIZE)]


def collective(case: cases.Case) -> Problem:
    return Problem(
        case.call,
        lambda inputs: case.reference([each for (each,) in inputs]),
        lambda rank: [(case.rows(rank, WORLD_SIZE), cases.COLUMNS)],
        alike=case.name != "all_to_all uneven",
    )


def gathered_product(inputs: Sequence[Inputs]) -> list[Tensor]:
    rows = torch.cat([x for x, _, _ in inputs], -2)
    return [rows @ weight + bias for _, weight, bias in inputs]


def scattered_product(inputs: Sequence[Inputs]) -> list[Tensor]:
    products = torch.stack([x @ weight + bias for x, weight, bias in inputs])
    return list(products.sum(0).chunk(len(inputs), -2))


def whole_attention(inputs: Sequence[Inputs]) -> list[Tensor]:
    query, key, value = (torch.cat(parts, 2) for parts in zip(*inputs, strict=True))
    with sdpa_kernel(SDPBackend.MATH):
        result = nn_functional.scaled_dot_product_attention(query, key, value)
    return list(result.chunk(len(inputs), 2))


def attention(comm: Communicator, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.ulysses_attention(query, key, value, comm)


# By public function; the collectives have a problem for each op.
PROBLEMS: dict[str, list[Problem]] = {
    "all_gather_matmul": [
        Problem(
            lambda comm, x, weight, bias: F.all_gather_matmul(x, weight, comm, bias=bias),
            gathered_product,
            shapes,
        )
        for shapes in (lambda rank: [(3, 2), (2, 3), (3,)], lambda rank: [(2, 3, 2), (2, 3), (3,)])
    ],
    "matmul_reduce_scatter": [
        Problem(
            lambda comm, x, weight, bias: F.matmul_reduce_scatter(x, weight, comm, bias=bias),
            scattered_product,
            shapes,
        )
        for shapes in (lambda rank: [(4, 2), (2, 3), (3,)], lambda rank: [(2, 4, 2), (2, 3), (3,)])
    ],
    "split_sequence": [
        Problem(
            lambda comm, x: F.split_sequence(x, comm),
            lambda inputs: [x.chunk(len(inputs), -2)[at] for at, (x,) in enumerate(inputs)],
            lambda rank: [(3, 2 * WORLD_SIZE, 2)],
            reverse=False,
        )
    ],
    "join_sequence": [
        Problem(
            lambda comm, x: F.join_sequence(x, comm),
            lambda inputs: [torch.cat([x for (x,) in inputs], -2)] * len(inputs),
            lambda rank: [(3, 2, 2)],
            reverse=False,
        )
    ],
    "ulysses_attention": [
        Problem(attention, whole_attention, lambda rank: [(1, WORLD_SIZE, 3, 2)] * 3, exact=False)
    ],
}
for _case in cases.CASES:
    PROBLEMS.setdefault(_case.name.split()[0], []).append(collective(_case))

# Functions that forward mode refuses by name, and those without tensors to differentiate.
REFUSED = ("ring_attention", "partitioned_checkpoint")
WITHOUT_DERIVATIVES = ("context_positions",)
OPERATORS_WITHOUT_DERIVATIVES = ("same_options",)


def test_every_function_and_operator_is_here():
    """Fails for a new function without a problem, or a new operator without derivatives."""
    assert set(F.__all__) == {*PROBLEMS, *REFUSED, *WITHOUT_DERIVATIVES}
    everything = set(collectives.registered)
    moe_operators = {"moe_dispatch", "moe_combine", "moe_combine_backward"}
    of_backward = {"reduce", "weight_gradient"}  # second derivatives reach these below
    covered = {*PROBLEMS, "ring_attention", "ring_attention_backward", "same_options"}
    assert everything == (covered - {"ulysses_attention"}) | moe_operators | of_backward
    for name in everything:
        has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, f"ringcomm::{name}")
        assert has_kernel("Autograd") == (name not in OPERATORS_WITHOUT_DERIVATIVES), name
        assert has_kernel("FuncTorchBatched"), name


# ---- what the transforms of the reference say ----------------------------------------------------


def agree(problem: Problem, got: Any, want: Any) -> None:
    if problem.exact:
        same(got, want)
    else:
        torch.testing.assert_close(got, want)


def of_rank(problem: Problem, rank: int, inputs: Sequence[Inputs]) -> Tensor:
    return problem.reference(inputs)[rank]


def pushed(problem: Problem, rank: int, inputs: Sequence[Inputs], tangents: Sequence[Inputs]):
    """Returns a rank's output and tangent, from all ranks' inputs and tangents."""
    return jvp(lambda given: of_rank(problem, rank, given), (inputs,), (tangents,))


def shifted(inputs: Sequence[Inputs], by: Tensor) -> list[Inputs]:
    """Shifts every rank's first input equally, as a Jacobian by columns does."""
    return [(first + by, *rest) for first, *rest in inputs]


def squares_of(problem: Problem, comm: Any, *inputs: Tensor) -> Tensor:
    return (problem.call(comm, *inputs) ** 2).sum()


def squares(problem: Problem, inputs: Sequence[Inputs]) -> Tensor:
    """Returns the sum over the ranks of :func:`squares_of`."""
    return torch.stack([(each**2).sum() for each in problem.reference(inputs)]).sum()


def gradient_of_first(problem: Problem, rank: int, inputs: Sequence[Inputs]) -> Tensor:
    def loss(first: Tensor) -> Tensor:
        given = list(inputs)
        given[rank] = (first, *inputs[rank][1:])
        return squares(problem, given)

    return grad(loss)(inputs[rank][0])


# ---- on a rank -----------------------------------------------------------------------------------


def forward_mode(problem: Problem, comm: Any) -> None:
    call = partial(problem.call, comm)
    inputs, tangents = problem.all_inputs(1), problem.all_inputs(2)
    mine, towards = inputs[comm.rank], tangents[comm.rank]
    want = pushed(problem, comm.rank, inputs, tangents)
    agree(problem, jvp(call, mine, towards), want)
    for leaves in (False, True):
        with forward_ad.dual_level():
            given = [each.clone().requires_grad_(leaves) for each in mine]
            duals = [forward_ad.make_dual(*each) for each in zip(given, towards, strict=True)]
            found = [each.detach() for each in forward_ad.unpack_dual(call(*duals))]
        agree(problem, tuple(found), want)
    # A tangent of the first input only.
    zeros = [tuple(map(torch.zeros_like, each)) for each in tangents]
    firsts = [(each[0], *rest[1:]) for each, rest in zip(tangents, zeros, strict=True)]
    first = jvp(lambda x: call(x, *mine[1:]), mine[:1], towards[:1])
    agree(problem, first, pushed(problem, comm.rank, inputs, firsts))


def batches(problem: Problem, comm: Any) -> None:
    call = partial(problem.call, comm)
    samples = [problem.all_inputs(seed) for seed in range(3, 6)]
    want = torch.stack([of_rank(problem, comm.rank, each) for each in samples])
    mine = [
        torch.stack(each) for each in zip(*(every[comm.rank] for every in samples), strict=True)
    ]
    agree(problem, vmap(call)(*mine), want)
    last = [each.movedim(0, -1) for each in mine]
    agree(problem, vmap(call, in_dims=-1, out_dims=1)(*last), want.movedim(0, 1))
    rest = [each[0] for each in mine[1:]]
    alone = vmap(lambda x: call(x, *rest))(mine[0])
    one_by_one = torch.stack([call(x, *rest) for x in mine[0]])
    agree(problem, alone, one_by_one)


def jacobians(problem: Problem, comm: Any) -> None:
    inputs = problem.all_inputs(1)
    mine, nothing = inputs[comm.rank], torch.zeros_like(inputs[comm.rank][0])
    rest = mine[1:]
    columns = jacfwd(lambda by: of_rank(problem, comm.rank, shifted(inputs, by)))(nothing)
    agree(problem, jacfwd(lambda x: problem.call(comm, x, *rest))(mine[0]), columns)
    by_strategy = torch.autograd.functional.jacobian(
        lambda x: problem.call(comm, x, *rest), mine[0], strategy="forward-mode", vectorize=True
    )
    agree(problem, by_strategy, columns)


def reverse_mode(problem: Problem, comm: Any) -> None:
    inputs = problem.all_inputs(1)
    mine, rest = inputs[comm.rank], inputs[comm.rank][1:]

    def loss(x: Tensor) -> Tensor:
        return squares_of(problem, comm, x, *rest)

    want = gradient_of_first(problem, comm.rank, inputs)
    agree(problem, grad(loss)(mine[0]), want)
    agree(problem, functionalize(grad(loss))(mine[0]), want)
    with torch.no_grad():
        agree(problem, grad(loss)(mine[0]), want)
    value, pull = vjp(lambda x: problem.call(comm, x, *rest), mine[0])
    agree(problem, pull(2 * value)[0], want)


def twice(problem: Problem, comm: Any) -> None:
    """Checks every nesting of the two modes, on the first input and on all inputs."""
    inputs = problem.all_inputs(1)
    mine, rest = inputs[comm.rank], inputs[comm.rank][1:]
    nothing = torch.zeros_like(mine[0])

    def loss(x: Tensor) -> Tensor:
        return squares_of(problem, comm, x, *rest)

    def moved(by: Tensor) -> Tensor:
        return gradient_of_first(problem, comm.rank, shifted(inputs, by))

    # A row is an element of this rank's input; a column shifts that element on all ranks.
    want = jacfwd(moved)(nothing)
    agree(problem, hessian(loss)(mine[0]), want)
    dims = range(nothing.dim())
    columns_first = [*(nothing.dim() + dim for dim in dims), *dims]
    agree(problem, jacrev(jacrev(loss))(mine[0]), want.permute(columns_first))

    def own_loss(by: Tensor) -> Tensor:
        return (of_rank(problem, comm.rank, shifted(inputs, by)) ** 2).sum()

    agree(problem, jacfwd(jacfwd(loss))(mine[0]), jacfwd(jacfwd(own_loss))(nothing))

    # Reverse over forward: the gradient of the summed squares of all ranks' tangents.
    def tangents_squared(given: Sequence[Inputs]) -> Tensor:
        found = [pushed(problem, rank, given, given)[1] for rank in range(len(given))]
        return torch.stack([(each**2).sum() for each in found]).sum()

    def mine_squared(*given: Tensor) -> Tensor:
        return (jvp(partial(problem.call, comm), given, given)[1] ** 2).sum()

    every = tuple(range(len(mine)))
    agree(problem, grad(mine_squared, every)(*mine), grad(tangents_squared)(inputs)[comm.rank])


def usual_nestings(problem: Problem, comm: Any) -> None:
    """Uses dual numbers of leaves, with ``backward`` in both nestings."""
    inputs, tangents = problem.all_inputs(1), problem.all_inputs(2)
    mine, towards = inputs[comm.rank], tangents[comm.rank]

    def gradients(given: Sequence[Inputs]) -> Any:
        return grad(partial(squares, problem))(given)

    want = jvp(gradients, (inputs,), (tangents,))[1][comm.rank]
    leaves = [each.clone().requires_grad_() for each in mine]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*each) for each in zip(leaves, towards, strict=True)]
        found = torch.autograd.grad(squares_of(problem, comm, *duals), leaves, create_graph=True)
        got = tuple(forward_ad.unpack_dual(each).tangent.detach() for each in found)
    agree(problem, got, want)
    if not problem.exact:
        return  # torch cannot differentiate the tangent of its attention

    def total_tangent(given: Sequence[Inputs], along: Sequence[Inputs]) -> Tensor:
        found = [pushed(problem, rank, given, along)[1] for rank in range(len(given))]
        return torch.stack([(each**2).sum() for each in found]).sum()

    wanted = [each[comm.rank] for each in grad(total_tangent, (0, 1))(inputs, tangents)]
    directions = [each.clone().requires_grad_() for each in towards]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*each) for each in zip(leaves, directions, strict=True)]
        tangent = forward_ad.unpack_dual(problem.call(comm, *duals)).tangent
        assert tangent is not None
        pulled = torch.autograd.grad(
            (tangent**2).sum(), [*leaves, *directions], materialize_grads=True
        )
    agree(problem, (pulled[: len(mine)], pulled[len(mine) :]), tuple(wanted))


def through_everything(name: str, rank: int, world_size: int) -> None:
    comm = default_group().communicator
    for problem in PROBLEMS[name]:
        forward_mode(problem, comm)
        if problem.alike:
            batches(problem, comm)
            jacobians(problem, comm)
        if problem.reverse:
            reverse_mode(problem, comm)
            usual_nestings(problem, comm)
        if problem.reverse and problem.alike:
            twice(problem, comm)


@pytest.mark.parametrize("name", PROBLEMS)
def test_derivatives_and_batches(rank_pools, name):
    rank_pools(WORLD_SIZE).run(partial(through_everything, name))


# ---- experts -------------------------------------------------------------------------------------


def expert_layer(comm: Any, idx: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    rows, _, handle = moe.dispatch(x, idx, weights, 2 * WORLD_SIZE, comm)
    return moe.combine(rows * rows, handle)


def experts(rank: int, world_size: int) -> None:
    """Compares with torch's derivatives of the same sums per rank, since tokens do not mix."""
    comm = default_group().communicator
    case = moe_cases.case(rank, k=2, tokens=5, hidden=3, experts=2 * world_size)
    x, towards = (whole((5, 3), 10 * rank + at, 1, torch.float32) for at in range(2))
    weights, along = (whole((5, 2), 20 * rank + at, 1, torch.float32) for at in range(2))
    call = partial(expert_layer, comm, case.idx)

    def reference(x: Tensor, weights: Tensor) -> Tensor:
        chosen = torch.where(case.idx >= 0, weights, torch.zeros_like(weights))
        return chosen.sum(1, keepdim=True) * x * x

    same(jvp(call, (x, weights), (towards, along)), jvp(reference, (x, weights), (towards, along)))
    same(jacfwd(call, 1)(x, weights), jacfwd(reference, 1)(x, weights))
    both = (0, 1)
    same(
        grad(lambda *given: (call(*given) ** 2).sum(), both)(x, weights),
        grad(lambda *given: (reference(*given) ** 2).sum(), both)(x, weights),
    )
    same(jacrev(call, both)(x, weights), jacrev(reference, both)(x, weights))
    many = torch.stack((x, towards))
    same(vmap(call, (0, None))(many, weights), vmap(reference, (0, None))(many, weights))
    for nested in (
        hessian(lambda x: call(x, weights).sum()),
        grad(lambda x: jvp(lambda x: call(x, weights), (x,), (towards,))[1].sum()),
    ):
        with pytest.raises(UnsupportedError, match=r"moe\.combine_backward: "):
            nested(x)
    idx = torch.stack((case.idx, torch.full_like(case.idx, -1)))
    with pytest.raises(UnsupportedError, match=r"vmap of ringcomm::moe_dispatch.*max_rows"):
        vmap(lambda idx: moe.dispatch(x, idx, weights, 2 * world_size, comm)[0])(idx)


def test_experts(rank_pools):
    rank_pools(WORLD_SIZE).run(experts)


# ---- refusals ------------------------------------------------------------------------------------


def refused(rank: int, world_size: int) -> None:
    """Each is refused before any communication, so the ranks stay in step."""
    comm = default_group().communicator
    x = torch.ones(4)
    for call in (F.all_reduce, F.reduce_scatter):
        for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
            function = partial(call, op=op, group=comm)
            for transformed in (jvp, partial(vjp, function)):
                if rank == 1:
                    with pytest.raises(UnsupportedError, match=rf"rank 1 of 2.* got {op.name}"):
                        jvp(function, (x,), (x,)) if transformed is jvp else transformed(x)
            same(vmap(function)(torch.stack((x, x)).contiguous()).shape[0], 2)
    tokens = torch.ones(1, 1, 2, 2)

    def ring(query: Tensor) -> Tensor:
        return F.ring_attention(query, tokens, tokens, comm)

    advice = r"ring_attention: forward mode .*ulysses_attention.*SDPBackend.MATH"
    for transformed in (jacfwd(ring), jacfwd(lambda key: F.ring_attention(tokens, key, key, comm))):
        if rank == 1:
            with pytest.raises(UnsupportedError, match=advice):
                transformed(tokens)
    with pytest.raises(UnsupportedError, match=advice):
        hessian(lambda query: ring(query).sum())(tokens)
    with pytest.raises(UnsupportedError, match="expected to be differentiated once"):
        jacrev(jacrev(lambda query: ring(query).sum()))(tokens)
    same(grad(lambda query: ring(query).sum())(tokens), torch.zeros_like(tokens))

    def kept(given: Tensor) -> Tensor:
        return F.partitioned_checkpoint(torch.sin, given, group=comm)

    for transform in ("Jvp", "Grad", "Vmap"):
        transformed = {"Jvp": jacfwd(kept), "Grad": jacrev(kept), "Vmap": vmap(kept)}[transform]
        with pytest.raises(UnsupportedError, match=f"partitioned_checkpoint: .*(Vmap|{transform})"):
            transformed(x)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="checkpoint: forward mode"):
        kept(forward_ad.make_dual(x, x))
    same(F.all_reduce(x, group=comm), 2 * x)


def test_what_is_refused(rank_pools):
    rank_pools(WORLD_SIZE).run(refused)


def one_rank_with_a_tangent(rank: int, world_size: int) -> None:
    comm = default_group().communicator
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        x = torch.ones(3)
        jvp(lambda x: F.all_gather(x, comm), (x,), (x,))
        grad(lambda x: F.all_gather(x, comm).sum())(x)
        with forward_ad.dual_level():
            mine = forward_ad.make_dual(x, x) if rank else x
            with pytest.raises(MismatchError, match=r"tangent is false on rank 0 .* ranks \[1\]"):
                F.all_gather(mine, comm)
    finally:
        dist.set_debug_level(level)


def test_detail_compares_tangents(rank_pools):
    rank_pools(WORLD_SIZE).run(one_rank_with_a_tangent)


def compiled(rank: int, world_size: int) -> None:
    """Compiled graphs enter forward mode without ``torch.autograd.forward_ad``.

    The graph makes the calls of the eager function, so only rank 0 needs to compile.
    """
    made = partial(torch.compile, backend="aot_eager", disable=rank > 0)
    x, towards = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])

    def squared(x: Tensor) -> Tensor:
        return F.all_reduce(x * x)

    def of_duals(x: Tensor) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(squared(forward_ad.make_dual(x, towards))))

    for function in (
        lambda x: jvp(squared, (x,), (towards,)),
        jacfwd(squared),
        grad(lambda x: squared(x).sum()),
        vmap(squared),
        of_duals,
    ):
        same(made(function)(x), function(x))
    for transformed in (
        lambda f: jvp(f, (x,), (towards,)),
        lambda f: jacfwd(f)(x),
        lambda f: grad(lambda x: f(x).sum())(x),
        lambda f: vmap(f)(torch.stack([x, towards])),
    ):
        torch._dynamo.reset()
        same(transformed(made(squared)), transformed(squared))
    torch._dynamo.reset()


def test_transforms_in_a_compiled_function(compiling_ranks):
    compiling_ranks.run(compiled)
