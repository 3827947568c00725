# SPDX-License-Identifier: Apache-2.0
"""Compressed reductions over nodes: their sums, exact exceptions, and refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, CommOptions, MismatchError, ReduceOp, _native
from ringcomm.comm.local_world import LocalWorld
from ringcomm.comm.nodes import core as sums
from tests.comm.test_quantization import KINDS, dequantized
from tests.support.covering import covering

Tensor = torch.Tensor
SHAPES = [(1, 1), (2, 2), (2, 1, 1)]
DTYPES = (torch.float32, torch.bfloat16)
COUNT = 5003  # elements per rank: several segments and a short last block


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def world(request) -> Iterator[LocalWorld]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "SEGMENT_BYTES", 4096)
        with ringcomm.local_world(
            sum(request.param), nodes=request.param, options=CommOptions(timeout=60)
        ) as made:
            yield made


def numbers(elems: int, rank: int, dtype: torch.dtype) -> Tensor:
    seed = torch.Generator(device="cpu").manual_seed(rank)
    return torch.randn(elems, generator=seed).to(dtype)


def partials(nodes: list[list[int]], elems: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns each node's message: its ranks' sum in FP32, in rank order."""
    made = []
    for ranks in nodes:
        total = numbers(elems, ranks[0], dtype).float()
        for rank in ranks[1:]:
            total = total + numbers(elems, rank, dtype).float()
        made.append(total)
    return made


def nodes_of(comm: ringcomm.Communicator) -> list[list[int]]:
    ranks = range(comm.world_size)
    return [[r for r in ranks if comm.node_of(r) == node] for node in range(comm.num_nodes)]


def in_blocks(compression: str, whole: Tensor, cuts: list[int]) -> Tensor:
    """Quantizes runs that begin at ``cuts``, and returns the dequantized numbers."""
    ends = [*cuts[1:], whole.numel()]
    return torch.cat(
        [dequantized(compression, whole[a:b]) for a, b in zip(cuts, ends, strict=True)]
    )


@covering(indirect=["world"], world=SHAPES, dtype=DTYPES, compression=[*KINDS])
def test_a_reduce_scatter_adds_what_was_quantized_once(world, compression, dtype):
    """Bits: each node's partial sum is quantized and dequantized, then added in node order."""

    def body(comm):
        size, rank, nodes = comm.world_size, comm.rank, nodes_of(comm)
        whole = numbers(COUNT * size, rank, dtype)
        out = torch.empty(COUNT, dtype=dtype)
        comm.reduce_scatter_tensor(out, whole, compression=compression)
        chunk = slice(rank * COUNT, (rank + 1) * COUNT)
        terms = [
            dequantized(compression, each[chunk]) for each in partials(nodes, COUNT * size, dtype)
        ]
        expected = terms[0]
        for term in terms[1:]:
            expected = expected + term
        assert torch.equal(out, expected.to(dtype))
        comm.reduce_scatter_tensor(out, whole, ReduceOp.AVG, compression=compression)
        assert torch.equal(out, (expected / size).to(dtype))
        chunks = list(whole.split(COUNT))
        comm.reduce_scatter(out, chunks, compression=compression)
        assert torch.equal(out, expected.to(dtype))

    world.run(body)


@covering(indirect=["world"], world=SHAPES, dtype=DTYPES, compression=[*KINDS])
def test_an_all_reduce_quantizes_its_sums_again(world, compression, dtype):
    """All ranks have equal bits; the error is bounded by that of quantized terms and sums."""

    def body(comm):
        nodes, elems = nodes_of(comm), COUNT * 3
        mine = numbers(elems, comm.rank, dtype)
        comm.all_reduce(mine, compression=compression)
        same = [torch.empty_like(mine) for _ in range(comm.world_size)]
        comm.all_gather(same, mine)
        assert all(torch.equal(each, mine) for each in same)
        terms = [dequantized(compression, each) for each in partials(nodes, elems, dtype)]
        expected = terms[0]
        for term in terms[1:]:
            expected = expected + term
        assert torch.equal(mine, dequantized(compression, expected).to(dtype))

    world.run(body)


@covering(strength=1, indirect=["world"], world=SHAPES, compression=[*KINDS])
def test_a_reduce_to_one_rank(world, compression):
    def body(comm):
        root = comm.world_size - 1
        mine = numbers(COUNT, comm.rank, torch.float32)
        comm.reduce(mine, root, compression=compression)
        terms = [
            dequantized(compression, each)
            for each in partials(nodes_of(comm), COUNT, torch.float32)
        ]
        expected = terms[0]
        for term in terms[1:]:
            expected = expected + term
        if comm.rank == root:
            assert torch.equal(mine, expected)
        else:
            assert torch.equal(mine, numbers(COUNT, comm.rank, torch.float32))

    world.run(body)


def test_what_has_no_use_for_quantization_is_exact(world):
    """Integers, doubles, other ops, and small buffers are not quantized."""

    def body(comm):
        size = comm.world_size
        for dtype, op in (
            (torch.int32, ReduceOp.SUM),
            (torch.float64, ReduceOp.SUM),
            (torch.float32, ReduceOp.MAX),
        ):
            x = torch.arange(COUNT).to(dtype) * (comm.rank + 1)
            comm.all_reduce(x, op, compression="int4")
            factor = size if op == ReduceOp.MAX else size * (size + 1) // 2
            assert torch.equal(x, torch.arange(COUNT).to(dtype) * factor)
        small = torch.arange(2048.0) * (comm.rank + 1)
        comm.all_reduce(small, compression="int4")
        assert torch.equal(small, torch.arange(2048.0) * (size * (size + 1) // 2))

    world.run(body)


def test_infinities_and_nans_arrive(world):
    def body(comm):
        x = numbers(COUNT * 3, comm.rank, torch.float32)
        if comm.rank == 0:
            x[100], x[4000], x[5001] = torch.inf, -torch.inf, torch.nan
        for compression in KINDS:
            y = x.clone()
            comm.all_reduce(y, compression=compression)
            assert y[100] == torch.inf and y[4000] == -torch.inf and y[5001].isnan()
            assert int((~y.isfinite()).sum()) == 3

    world.run(body)


def test_the_options_compression_is_that_of_all_calls():
    options = CommOptions(timeout=60, compression="int8")
    with ringcomm.local_world(2, nodes=[1, 1], options=options) as world:

        def body(comm):
            by_option, exact = (numbers(COUNT, comm.rank, torch.float32) for _ in range(2))
            by_call = by_option.clone()
            comm.all_reduce(by_option)
            comm.all_reduce(by_call, compression="int8")
            comm.all_reduce(exact, compression="none")
            assert torch.equal(by_option, by_call) and not torch.equal(by_option, exact)
            both = [numbers(COUNT, rank, torch.float32) for rank in range(2)]
            assert torch.equal(exact, both[0] + both[1])

        world.run(body)


def test_ranks_that_differ_in_compression_are_told():
    with ringcomm.local_world(2, nodes=[1, 1], options=CommOptions(timeout=60)) as world:

        def body(comm):
            with pytest.raises(MismatchError) as raised:
                comm.all_reduce(torch.ones(COUNT), compression="int8" if comm.rank else None)
            return str(raised.value)

        assert all("compression int8" in text for text in world.run(body))


def test_compression_within_one_node_changes_nothing():
    with ringcomm.local_world(2) as world:

        def body(comm):
            x = numbers(COUNT, comm.rank, torch.float32)
            comm.all_reduce(x, compression="int4")
            assert torch.equal(
                x, numbers(COUNT, 0, torch.float32) + numbers(COUNT, 1, torch.float32)
            )
            with pytest.raises(
                ArgumentError, match=r"all_reduce.*compression: expected one of none"
            ):
                comm.all_reduce(x, compression="int2")

        world.run(body)


def test_bad_options():
    with pytest.raises(ArgumentError, match="compression: expected one of none, param, int8"):
        CommOptions(compression="int2")
    with pytest.raises(
        ArgumentError, match='rails: expected auto or one_shot with compression="fp8"'
    ):
        CommOptions(compression="fp8", rails="ring")


def test_bytes_on_the_rails(monkeypatch):
    """A node sends exactly the values and scales that the formula counts, plus headers of calls."""
    from ringcomm.comm.nodes import transport as rails

    elems = 1 << 16
    sent: list[int] = []
    send = rails.Rails.send

    def counted(self, rail, node, memory, tag):
        if tag != rails.HEADER_TAG:
            sent.append(memory.numel())
        return send(self, rail, node, memory, tag)

    monkeypatch.setattr(rails.Rails, "send", counted)
    with ringcomm.local_world(2, nodes=[1, 1], options=CommOptions(timeout=60)) as world:
        for compression, most in (("int8", 1.03), ("fp8", 1.03), ("int4", 0.53)):
            sent.clear()
            world.run(
                lambda comm, compression: comm.all_reduce(
                    torch.ones(elems), compression=compression
                ),
                compression,
            )
            # Each rank sends half of the terms, and half of the sums.
            assert sum(sent) == 2 * _native.quantized_bytes(
                _native.QUANT_FORMATS[compression], elems
            )
            assert sum(sent) / (2 * elems) <= most
