# SPDX-License-Identifier: Apache-2.0
"""Bad arguments raise on all ranks, no rank waits, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, CommOptions, MismatchError
from ringcomm.comm.local_world import LocalWorld
from ringcomm.extras import moe
from ringcomm.extras.moe import rows
from tests.extras.moe.cases import case

Tensor = torch.Tensor
EXPERTS = 8


@pytest.fixture(scope="module", params=[(3,), (1, 2)], ids=str)
def world(request) -> Iterator[LocalWorld]:
    """Worlds of one node and of several nodes."""
    with ringcomm.local_world(3, nodes=request.param, options=CommOptions(timeout=60)) as made:
        yield made


def arguments(rank: int, **others: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a valid dispatch, changed by ``others``."""
    given = case(rank, 2, experts=6)
    options: dict[str, Any] = {
        name: others.pop(name) for name in ("compression", "max_rows") if name in others
    }
    named = {"x": given.x, "idx": given.idx, "weights": given.weights, "experts": 6} | others
    return tuple(named.values()), options


def dispatch(comm: ringcomm.Communicator, **others: Any) -> tuple[Tensor, Tensor, moe.Handle]:
    (x, idx, weights, experts), options = arguments(comm.rank, **others)
    return moe.dispatch(x, idx, weights, experts, comm, **options)


def bad_idx(value: int) -> Tensor:
    idx = case(1, 2, experts=6).idx.clone()
    idx[4, 1] = value
    return idx


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "expert too large": ({"idx": bad_idx(6)}, r"topk_idx\[4, 1\]: expected an expert from 0 to 5"),
    "expert below -1": ({"idx": bad_idx(-2)}, r"topk_idx\[4, 1\]: .* got -2"),
    "experts of 32 bits": ({"idx": bad_idx(0).int()}, "topk_idx: expected int64"),
    "fewer routes than tokens": ({"idx": bad_idx(0)[:4]}, r"topk_idx: expected int64 \[13, k\]"),
    "a vector": ({"x": torch.zeros(13)}, r"x: expected rows \[n, hidden\]"),
    "integers": ({"x": torch.zeros(13, 40).long()}, "x: expected float32, bfloat16 or float16"),
    "uneven experts": ({"experts": 7}, "num_experts: expected a multiple of the 3 ranks"),
    "other weights": ({"weights": torch.zeros(13, 3)}, r"topk_weights: expected .*\(13, 2\)"),
    "weights of 64 bits": ({"weights": torch.zeros(13, 2).double()}, "topk_weights: expected"),
    "unknown compression": (
        {"compression": "int4"},
        "compression: expected None, 'int8' or 'fp8', got 'int4'",
    ),
    "negative room": ({"max_rows": -5}, "max_rows: expected a number >= 0"),
    # The operator takes -1 as None.
    "room of -1": ({"max_rows": -1}, "max_rows: expected a number >= 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_rank_refuses_its_arguments(world, name):
    others, message = REFUSED[name]

    def body(comm):
        given = others if comm.rank == 1 else {}
        kind = ArgumentError if comm.rank == 1 else MismatchError
        expected = message if comm.rank == 1 else "rank 1 refused its arguments"
        with pytest.raises(kind, match=expected):
            dispatch(comm, **given)
        rows, _, handle = dispatch(comm)
        assert moe.combine(rows, handle).shape == (13, 40)

    world.run(body)


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"experts": 9}, "Option num_experts is 6 on rank 0 and 9 on rank 1"),
    "hidden": ({"x": torch.zeros(13, 41)}, "The columns of the rows"),
    "dtype": ({"x": torch.zeros(13, 40).bfloat16()}, "The dtype of the rows"),
    "k": ({"idx": torch.zeros(13, 1).long(), "weights": torch.zeros(13, 1)}, "columns of topk_idx"),
    "weights": ({"weights": None}, "Whether there are weights"),
    "compression": ({"compression": "fp8"}, "compression"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_differ(world, name):
    others, message = DIFFERENT[name]

    def body(comm):
        with pytest.raises(MismatchError, match=message):
            dispatch(comm, **others if comm.rank == 1 else {})
        rows, _, handle = dispatch(comm)
        assert moe.combine(rows, handle).shape == (13, 40)

    world.run(body)


def test_too_little_room(world):
    """One rank's experts get all tokens: every rank names that rank, and no row is copied."""

    def body(comm):
        idx = torch.full((13, 2), 5)
        with pytest.raises(ArgumentError, match="rank 2 get 78 rows, and there is room for 77"):
            dispatch(comm, idx=idx, max_rows=77)
        rows, _, _ = dispatch(comm, idx=idx, max_rows=78)
        assert rows.shape == (78, 40)

    world.run(body)


def test_rows_of_another_dispatch(world):
    def body(comm):
        rows, _, first = dispatch(comm)
        rows, _, second = dispatch(comm)
        with pytest.raises(MismatchError, match="The dispatch whose rows these are"):
            moe.combine(rows, first if comm.rank == 1 else second)
        assert moe.combine(rows, second).shape == (13, 40)

    world.run(body)


def test_another_number_of_rows(world):
    def body(comm):
        rows, _, handle = dispatch(comm)
        given = rows[:-1] if comm.rank == 1 else rows
        kind = ArgumentError if comm.rank == 1 else MismatchError
        with pytest.raises(kind, match=r"as dispatch returned|rank 1 refused"):
            moe.combine(given, handle)
        assert moe.combine(rows, handle).shape == (13, 40)

    world.run(body)


def test_one_rank_calls_something_else(world):
    def body(comm):
        rows, _, handle = dispatch(comm)
        with pytest.raises(MismatchError, match="Which call it makes"):
            if comm.rank == 1:
                moe.combine(rows, handle)
            else:
                dispatch(comm)
        rows, _, handle = dispatch(comm)
        assert moe.combine(rows, handle).shape == (13, 40)

    world.run(body)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (moe.dispatch, "tensor: expected a tensor"),
        (moe.combine, "handle: expected the third result of dispatch"),
    ],
)
def test_what_is_no_tensor(world, call: Callable[..., object], message: str):
    def body(comm):
        with pytest.raises(ArgumentError, match=message):
            call([1], *[None, None, 1][: 3 if call is moe.dispatch else 1])

    world.run(body)


@pytest.mark.parametrize("nodes", [(3,), (1, 2)], ids=str)
def test_an_error_amid_a_call_ends_it_on_all_ranks(nodes, monkeypatch):
    """A rank that fails in a call tells its peers, so that they do not wait for the timeout."""
    found = rows.new_rows

    def body(comm):
        def fail(comm: ringcomm.Communicator, like: Tensor, count: int) -> Tensor:
            if like is bad:
                raise MemoryError("no room")
            return found(comm, like, count)

        given = case(comm.rank, 2, experts=6)
        bad = given.x if comm.rank == 1 else None
        x = ringcomm.empty(given.x.shape).copy_(given.x)
        if comm.rank == 1:
            bad = x
            monkeypatch.setattr(rows, "new_rows", fail)
        kind = MemoryError if comm.rank == 1 else ringcomm.AbortedError
        with pytest.raises(kind, match="no room"):
            # Ranks that lend memory meet at the end of a call; all ranks meet in the next call.
            for _ in range(2):
                moe.dispatch(x, given.idx, given.weights, 6, comm)

    with ringcomm.local_world(3, nodes=nodes, options=CommOptions(timeout=600)) as made:
        made.run(body)
