# SPDX-License-Identifier: Apache-2.0
"""Attention over ranks equals attention in one process, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import ringcomm
from ringcomm import ArgumentError, Communicator, MismatchError, UnsupportedError
from ringcomm.functional import attention, context_positions, ring_attention, ulysses_attention
from ringcomm.functional import collectives as traced_groups
from tests.functional.compiling import alone

Tensor = torch.Tensor

BATCH, HEADS, TOKENS, DIM = 2, 6, 4, 8
# An element results from some hundred operations on numbers below 10; each operation rounds by at
# most 2^-53 of its result.
FLOAT64_ERROR = 100 * 10 * 2.0**-53


def whole(
    world_size: int, key_heads: int = HEADS, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Returns query, keys, values and the gradient of the result, for all ranks."""
    generator = torch.Generator().manual_seed(3)
    length = world_size * TOKENS
    return [
        torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=dtype)
        for heads in (HEADS, key_heads, key_heads, HEADS)
    ]


def with_gradients(
    call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, *args: Any, **options: Any
) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    result = call(*leaves, *args, **options)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def of_one_process(inputs: list[Tensor], is_causal: bool) -> list[Tensor]:
    *inputs, grad = inputs
    gqa = inputs[0].size(1) != inputs[1].size(1)
    call = F.scaled_dot_product_attention
    return with_gradients(call, inputs, grad, is_causal=is_causal, enable_gqa=gqa)


def of_ranks(
    world: ringcomm.LocalWorld, call: Callable[..., Tensor], inputs: list[Tensor], **options: Any
) -> list[Tensor]:
    """Returns the result and gradients of the whole sequence, joined from all ranks."""
    length = inputs[0].size(2)
    zigzag = options.get("zigzag", False)

    def body(comm: Communicator) -> tuple[Tensor, list[Tensor]]:
        at = context_positions(length, comm, zigzag=zigzag)
        *own, grad = (each[:, :, at] for each in inputs)
        return at, with_gradients(call, own, grad, comm, **options)

    found = world.run(body)
    order = torch.cat([at for at, _ in found]).argsort()
    by_tensor = zip(*(tensors for _, tensors in found), strict=True)
    return [torch.cat(parts, 2)[:, :, order] for parts in by_tensor]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("call", [ring_attention, ulysses_attention])
def test_it_is_the_attention_of_one_process(worlds, call, world_size, is_causal, zigzag):
    for key_heads in (HEADS, 3, 1):
        if call is ulysses_attention and world_size == 2 and key_heads == 3:
            continue
        inputs = whole(world_size, key_heads)
        found = of_ranks(worlds(world_size), call, inputs, is_causal=is_causal, zigzag=zigzag)
        for ours, theirs in zip(found, of_one_process(inputs, is_causal), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT64_ERROR)


def test_sixteen_bits_round_as_one_process_does(worlds):
    """Each rank's result is rounded to 2^-9, relative, and so is the weighted sum of all three."""
    inputs = whole(3, dtype=torch.bfloat16)
    exact = of_one_process([each.double() for each in inputs], is_causal=True)
    found = of_ranks(worlds(3), ring_attention, inputs, is_causal=True, zigzag=True)
    assert all(each.dtype is torch.bfloat16 for each in found)
    result, expected = found[0].double(), exact[0]
    largest = inputs[2].abs().max().item()  # no weighted mean of values is larger
    assert (result - expected).abs().max() <= 2 * 2.0**-8 * largest
    again = of_ranks(worlds(3), ring_attention, inputs, is_causal=True, zigzag=True)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_alone_it_is_torchs_own_to_the_bit(worlds):
    inputs = whole(1, dtype=torch.float32)
    for ours, theirs in zip(
        of_ranks(worlds(1), ring_attention, inputs, is_causal=True, scale=0.3),
        with_gradients(
            F.scaled_dot_product_attention, inputs[:3], inputs[3], is_causal=True, scale=0.3
        ),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_over_nodes():
    inputs = whole(3)
    with ringcomm.local_world(3, nodes=[2, 1], timeout=60) as world:
        for call in (ring_attention, ulysses_attention):
            found = of_ranks(world, call, inputs, is_causal=True)
            for ours, theirs in zip(found, of_one_process(inputs, True), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT64_ERROR)


def test_zigzag_gives_all_ranks_the_same_to_do():
    def scores(rank: int, world_size: int, zigzag: bool) -> int:
        comm: Any = SimpleNamespace(rank=rank, world_size=world_size)
        form = attention._AttentionForm(comm, True, zigzag, None)
        parts = (attention._range_of(form, owner, 8) for owner in range(world_size))
        return sum(
            len(range(8)[part.queries]) * len(range(8)[part.keys]) // (2 if part.is_causal else 1)
            for part in parts
            if part is not None
        )

    assert len({scores(rank, 5, True) for rank in range(5)}) == 1
    assert [scores(rank, 5, False) for rank in range(5)] == [32, 96, 160, 224, 288]


def test_positions(worlds):
    def body(comm: Communicator) -> list[list[int]]:
        return [context_positions(8, comm, zigzag=zigzag).tolist() for zigzag in (False, True)]

    assert worlds(2).run(body) == [[[0, 1, 2, 3], [0, 1, 6, 7]], [[4, 5, 6, 7], [2, 3, 4, 5]]]


@pytest.mark.parametrize(
    ("shapes", "options", "says"),
    [
        (((2, 4, 8), (2, 4, 8), (2, 4, 8)), {}, r"query: expected a tensor \[batch, heads"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 3, 8)), {}, "expected keys and values"),
        (((1, 4, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8)), {}, "key heads that divide the 4 heads"),
        (((1, 4, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)), {"zigzag": True}, "even number of tokens"),
    ],
)
def test_wrong_tensors(worlds, shapes, options, says):
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=says):
            query, key, value = (torch.zeros(shape) for shape in shapes)
            ring_attention(query, key, value, comm, **options)
        comm.barrier()

    worlds(2).run(body)


def test_what_cannot_be_divided(worlds):
    def body(comm: Communicator) -> None:
        three = torch.zeros(1, 3, 2, 8)
        with pytest.raises(ArgumentError, match="multiples of 2 heads and key heads, got 3 and 3"):
            ulysses_attention(three, three, three, comm)
        with pytest.raises(ArgumentError, match=r"multiple of 4 .*zigzag.*, got 6; pad it"):
            context_positions(6, comm, zigzag=True)
        with pytest.raises(ArgumentError, match=r"positive multiple of 2 below 2\^63, got 4\.0"):
            context_positions(4.0, comm)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"value: expected torch\.float32 on cpu"):
            ring_attention(three, three, three.double(), comm)
        with pytest.raises(ArgumentError, match="scale: expected a number or None, got 'x'"):
            ring_attention(three, three, three, comm, scale="x")  # type: ignore[arg-type]

    worlds(2).run(body)


def test_ranks_with_different_lengths_are_told():
    def body(comm: Communicator) -> None:
        own = torch.zeros(1, 2, 4 + comm.rank, 8)
        with pytest.raises(MismatchError, match="expected a message of"):
            ring_attention(own, own, own, comm)

    with ringcomm.local_world(2, timeout=20) as world:
        world.run(body)


@pytest.mark.parametrize("call", [ring_attention, ulysses_attention])
def test_ranks_with_different_options_are_told(worlds, call):
    def body(comm: Communicator) -> None:
        own = torch.zeros(1, 2, 4, 8)
        options: list[dict[str, Any]] = [
            {"is_causal": comm.rank == 0},
            {"zigzag": comm.rank == 0},
            {"scale": 0.5 if comm.rank == 0 else None},
        ]
        for each in options:
            (name,) = each
            with pytest.raises(MismatchError, match=rf"Option {name} is (true|0\.5) on rank 0 and"):
                call(own, own, own, comm, **each)

    worlds(2).run(body)


def test_second_derivatives_of_the_ring_are_refused():
    with alone() as comm:
        own = torch.ones(1, 2, 4, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(
            ring_attention(own, own, own, comm).sum(), own, create_graph=True
        )
        with pytest.raises(UnsupportedError, match="expected to be differentiated once"):
            grad.sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_all_numbers_of_heads():
    """Covers different numbers of query heads; with fewer key heads torch is called differently."""
    with alone() as comm:
        compiled = torch.compile(ulysses_attention, backend="eager", fullgraph=True, dynamic=True)
        for heads, key_heads in ((2, 2), (4, 4), (6, 2)):
            query, keys = torch.rand(1, heads, 4, 8), torch.rand(1, key_heads, 4, 8)
            assert torch.equal(
                compiled(query, keys, keys, comm), ulysses_attention(query, keys, keys, comm)
            )


def test_on_a_gpu_the_kernels_take_what_they_are_given():
    """Checks only shapes: torch's meta functions of flash attention replace the kernels."""
    with FakeTensorMode():
        query = torch.empty(2, 4, 8, 16, device="cuda", dtype=torch.bfloat16)
        keys = torch.empty(2, 2, 2, 6, 16, device="cuda", dtype=torch.bfloat16)
        result, logs = attention._attend(query, keys, False, None)
        assert (result.shape, logs.shape) == (query.shape, (2, 4, 8))
        attended = attention._Attended(query, result, logs)
        grads = attention._attend_backward(query, attended, keys, False, None)
        assert [each.shape for each in grads] == [query.shape, keys.shape]
        with pytest.raises(UnsupportedError, match=r"bfloat16 or float16, for .* on cuda"):
            attention._attend(query.float(), keys.float(), False, None)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiler_takes_it():
    generator = torch.Generator().manual_seed(4)
    *inputs, grad = [torch.randn(1, 2, 4, 8, generator=generator) for _ in range(4)]
    with alone() as comm:
        form = (True, True, None, traced_groups.key_of(comm), 1)
        own = [each.clone().requires_grad_() for each in inputs]
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(torch.ops.ringcomm.ring_attention.default, (*own, *form), test_utils=checks)
        compiled = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
        ours = with_gradients(compiled, inputs, grad, comm, is_causal=True)
        theirs = with_gradients(ring_attention, inputs, grad, comm, is_causal=True)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
