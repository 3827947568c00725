# SPDX-License-Identifier: Apache-2.0
"""Sums in groups of ranks: their bits, equal to those of combined node sums, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch.distributed import HashStore

import ringcomm
from ringcomm import (
    ArgumentError,
    CommOptions,
    Communicator,
    LocalWorld,
    RingcommError,
    UnsupportedError,
    _native,
)
from ringcomm.comm.host.arguments import DTYPE_CODES
from ringcomm.comm.host.engine import Call
from ringcomm.optim import AdamW, AdamWOptions
from tests.comm.test_partial import combine, scatter_partial
from tests.support.exact import REDUCIBLE, equal, op_of, operand, ops_for, reduced, same
from tests.support.memories import put, room

Tensor = torch.Tensor
WORLD = 5  # without groups, and in groups of two or three, summed in three different orders
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT")
FACTOR = 0.7
LARGE = 2.0**15


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[..., LocalWorld]]:
    """``worlds(L)`` is a world of five rank threads: sums in groups of L, small segments."""
    built: dict[tuple[int, int], LocalWorld] = {}

    def get(sum_group_size: int, world_size: int = WORLD) -> LocalWorld:
        if (sum_group_size, world_size) not in built:
            options = CommOptions(timeout=60, segment_bytes=2048, sum_group_size=sum_group_size)
            built[sum_group_size, world_size] = ringcomm.local_world(world_size, options=options)
        return built[sum_group_size, world_size]

    yield get
    for world in built.values():
        world.close()


def inputs(dtype: torch.dtype, elems: int, world_size: int = WORLD) -> list[Tensor]:
    """Returns values whose sum depends on the order of additions, even after rounding to 16 bits.

    In half of the elements ranks 0 and 3 have a large number and its opposite. Until these cancel,
    FP32 drops the last bits of the values that are added.
    """
    generator = torch.Generator().manual_seed(elems)
    shape = (world_size, elems)
    scales = 2.0 ** torch.randint(-6, 6, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * scales
    values[0, ::2], values[3, ::2] = LARGE, -LARGE
    return list(values.to(dtype))


def folded(wide: list[Tensor], op: str) -> Tensor:
    total = wide[0]
    for each in wide[1:]:
        total = total * each if op == "PRODUCT" else total + each
    return total


def in_groups(tensors: list[Tensor], group: int, op: str) -> Tensor:
    """The reference: sums in FP32, groups in order, and one rounding at the end."""
    wide = [each.float() * (FACTOR if op == "PREMUL_SUM" else 1.0) for each in tensors]
    parts = [folded(wide[first : first + group], op) for first in range(0, len(wide), group)]
    total = folded(parts, op)
    return (total / len(wide) if op == "AVG" else total).to(tensors[0].dtype)


def operator(op: str) -> object:
    return ringcomm.premul_sum(FACTOR) if op == "PREMUL_SUM" else op_of(op)


def check_bits(
    comm: Communicator, tensors: list[Tensor], op: str, want: Tensor, memory: str
) -> None:
    """Checks all_reduce, reduce, and both forms of reduce_scatter against the reference."""
    rank, how = comm.rank, operator(op)
    whole = put(tensors[rank], memory, rank)
    comm.all_reduce(whole, how)
    assert same(whole, want), (op, memory, "all_reduce")
    whole = put(tensors[rank], memory, rank)
    comm.reduce(whole, 1, how)
    assert same(whole, want if rank == 1 else tensors[rank]), (op, memory, "reduce")
    whole, share = put(tensors[rank], memory, rank), want.numel() // WORLD
    out = room(share, want.dtype, memory, rank)
    comm.reduce_scatter_tensor(out, whole, how)
    assert same(out, want.split(share)[rank]), (op, memory, "reduce_scatter_tensor")
    counts = [want.numel() - 4 * 7, 7, 7, 7, 7]
    out = room(counts[rank], want.dtype, memory, rank)
    comm.reduce_scatter(out, list(whole.split(counts)), how)
    assert same(out, want.split(counts)[rank]), (op, memory, "reduce_scatter")


@pytest.mark.parametrize("group", [2, 3])
def test_bits_are_those_of_the_groups(worlds, group):
    """One and two hops, staged and zero copy. The negative control: without groups bits differ."""

    cases = []
    for dtype in FLOATS:
        for elems, memory in ((60, "plain"), (12_005, "mixed"), (60_000, "heap")):
            tensors = inputs(dtype, elems)
            cases += [(tensors, op, in_groups(tensors, group, op), memory) for op in OPS]

    def body(comm):
        for case in cases:
            check_bits(comm, *case)

    for dtype in FLOATS:
        tensors = inputs(dtype, 12_005)
        assert not same(in_groups(tensors, group, "SUM"), in_groups(tensors, WORLD, "SUM"))
        assert not same(in_groups(tensors, 2, "SUM"), in_groups(tensors, 3, "SUM"))
    worlds(group).run(body)


@pytest.mark.parametrize("group", [0, 1, 5, 9])
def test_groups_of_one_and_of_all_are_the_order_without(worlds, group):
    tensors = inputs(torch.bfloat16, 205)
    wanted = {op: in_groups(tensors, WORLD, op) for op in OPS}

    def body(comm):
        for op, want in wanted.items():
            check_bits(comm, tensors, op, want, "mixed")

    worlds(group).run(body)


def test_every_dtype_and_op(worlds):
    def body(comm):
        for dtype in REDUCIBLE:
            for op in ops_for(dtype):
                tensors = [operand(1667, each, WORLD, dtype, op) for each in range(WORLD)]
                mine = tensors[comm.rank].clone()
                comm.all_reduce(mine, op_of(op))
                assert equal(mine, reduced(tensors, op)), (dtype, op)

    worlds(3).run(body)


def test_results_past_the_caches():
    """16 MiB and more, with a ragged tail: in FP32, 1 + 2^-24 is 1, but 1 + 2^-23 is not."""
    elems = (16 << 20) // 4 + 3

    def body(comm):
        whole = torch.full((elems,), 2.0**-24 if comm.rank else 1.0)
        comm.all_reduce(whole)
        return whole

    for sum_group_size, want in ((0, 1.0), (2, 1.0 + 2.0**-23)):
        options = CommOptions(timeout=60, sum_group_size=sum_group_size)
        with ringcomm.local_world(4, options=options) as world:
            assert bool((world.run(body)[0] == want).all())


def test_nodes_and_a_combination_give_the_same_bits(worlds):
    """Combined FP32 partial sums of two nodes of two ranks equal sums of four ranks in groups."""
    share, world_size = 1501, 4

    def node_sums(tensors: list[Tensor], op: str) -> list[Tensor]:
        """Returns the node's sums: chunk r from rank r."""

        def body(comm: Communicator) -> Tensor:
            mine, out = tensors[comm.rank], torch.empty(2 * share)
            scatter_partial(comm, list(mine.split(2 * share)), out, op)
            return out

        with ringcomm.local_world(2, options=CommOptions(timeout=60)) as node:
            return node.run(body)

    def whole_world(comm: Communicator) -> Tensor:
        out = torch.empty(share, dtype=tensors[0].dtype)
        comm.reduce_scatter_tensor(out, tensors[comm.rank], op_of(op))
        return out

    for dtype in FLOATS:
        tensors = inputs(dtype, world_size * share, world_size)
        for op in ("SUM", "AVG", "PREMUL_SUM"):
            first, second = node_sums(tensors[:2], op), node_sums(tensors[2:], op)
            divide_by = world_size if op == "AVG" else 0
            want = torch.cat(worlds(2, world_size).run(whole_world))
            got = [
                combine([a, b], torch.empty(2 * share, dtype=dtype), op, divide_by)
                for a, b in zip(first, second, strict=True)
            ]
            assert same(torch.cat(got), want), (dtype, op)


@pytest.mark.parametrize("reduce", ["avg", "sum"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient_shards_are_summed_in_groups(worlds, dtype, reduce):
    """An optimizer's FP32 shards have the bits of sums in groups; sums without groups differ."""
    elems = WORLD * _native.ADAMW_TILE_ELEMS
    grads, op = inputs(dtype, elems), reduce.upper()

    def body(comm):
        mine, out = put(grads[comm.rank], "heap"), torch.empty(elems // WORLD)

        def run(native):
            return native.reduce_scatter_norm(
                mine.data_ptr(),
                elems,
                DTYPE_CODES[dtype],
                _native.OPS[op],
                out.data_ptr(),
                False,
                0,
                0,
                0,
                0,
                0,
            )

        comm.engine.start_call(Call("reduce_scatter_norm", run, [out]))
        return out

    wide = [each.float() for each in grads]
    for group in (2, 3):
        want = in_groups(wide, group, op)
        assert not same(want, in_groups(wide, WORLD, op))
        assert same(torch.cat(worlds(group).run(body)), want)


def stepped(comm: Communicator, grads: list[Tensor], max_norm: float | None) -> Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = AdamW([parameter], comm=comm, eps=1e-2)
    parameter.grad = grads[comm.rank].clone()
    if max_norm is not None:
        optimizer.clip_grad_norm_(max_norm)
    optimizer.step()
    return parameter.detach().clone()


def test_a_step_in_one_pass_sums_as_one_in_two(worlds):
    """A limit that clips nothing forces two passes; AdamW sees the gradients of one pass."""
    grads = inputs(torch.float32, 4096)

    def both(comm):
        one, two = stepped(comm, grads, None), stepped(comm, grads, 1e30)
        assert same(one, two)
        return one

    results = {group: worlds(group).run(both)[0] for group in (0, 2, 3)}
    for a, b in pairwise(results):
        assert not same(results[a], results[b])


def test_what_sums_otherwise_is_refused(worlds):
    def body(comm):
        tensor = torch.ones(8)
        with pytest.raises(UnsupportedError, match=r"all_reduce.*ring.*sum_group_size=2"):
            comm.all_reduce(tensor, algorithm="ring")
        with pytest.raises(
            UnsupportedError, match=r"reduce_scatter_tensor.*ring.*sum_group_size=2"
        ):
            comm.reduce_scatter_tensor(torch.ones(1), torch.ones(5), algorithm="ring")
        with pytest.raises(UnsupportedError, match=r"triton.*sum_group_size=2"):
            comm.all_reduce(tensor, kernels="triton")
        parameter = torch.nn.Parameter(torch.ones(8))
        with pytest.raises(UnsupportedError, match=r"optimizer.*ring.*sum_group_size=2"):
            AdamW([parameter], comm=comm, options=AdamWOptions(algorithm="ring")).step()
        out = torch.ones(40)
        comm.all_gather_into_tensor(out, tensor, algorithm="ring")  # it sums nothing
        comm.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((8,), 5.0))

    worlds(2).run(body)


def test_bad_options():
    with pytest.raises(ArgumentError, match="sum_group_size: expected 0 or more, got -1"):
        CommOptions(sum_group_size=-1)
    for number in (1.5, "2", 2**63):
        with pytest.raises(ArgumentError, match="sum_group_size: expected an integer from"):
            CommOptions(sum_group_size=number)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="sum_group_size: expected 0 with kernels"):
        CommOptions(sum_group_size=2, kernels="triton")


def test_ranks_agree_on_the_groups():
    store = HashStore()

    def refused(rank: int) -> str:
        options = CommOptions(timeout=60, sum_group_size=rank)
        with pytest.raises(RingcommError, match="different options") as raised:
            Communicator.from_store(store, rank, 2, options=options)
        return str(raised.value)

    with ThreadPoolExecutor(2) as ranks:
        for text in ranks.map(refused, range(2)):
            assert "sum_group_size=0" in text
            assert "sum_group_size=1" in text
