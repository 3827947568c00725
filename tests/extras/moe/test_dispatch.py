# SPDX-License-Identifier: Apache-2.0
"""Rows arrive in order, and sums and gradients have the bits of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, _native
from ringcomm.comm.local_world import LocalWorld
from ringcomm.extras import moe
from ringcomm.extras.moe.rows import COMPRESSIONS
from tests.extras.moe.cases import Case, case, combined, dense, dispatched, joined, learn, seeded
from tests.support.covering import EVERY_CASE, covering, in_test_all

Tensor = torch.Tensor
EXPERTS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Results of this size bypass the caches when stored (kStreamingMinBytes).
STREAMED_BYTES = 16 << 20


NODES = ((1,), (2,), (4,), (1, 1), (2, 2), (1, 3))


@pytest.fixture(scope="module", params=[(2,), (1, 3), *in_test_all(*NODES)], ids=str)
def world(request) -> Iterator[LocalWorld]:
    """Worlds of one node and of several nodes."""
    with ringcomm.local_world(
        sum(request.param), nodes=request.param, options=CommOptions(timeout=60)
    ) as made:
        yield made


def cases_of(world: LocalWorld, k: int, dtype: torch.dtype = torch.float32) -> list[Case]:
    """Returns ranks' cases with different numbers of tokens; the last of several ranks has none."""
    last = len(world) - 1
    sizes = [0 if rank == last and last else 9 + 5 * rank for rank in range(len(world))]
    return [case(rank, k, tokens, dtype=dtype) for rank, tokens in enumerate(sizes)]


def own(ys: list[Tensor], comm: ringcomm.Communicator) -> list[Tensor]:
    here = len(ys) // comm.world_size
    return ys[comm.rank * here : (comm.rank + 1) * here]


@covering(strength=1, indirect=["world"], world=NODES, k=[1, 2, 8], dtype=DTYPES)
def test_rows_and_sums_have_the_bits_of_loops(world, k, dtype):
    cases = cases_of(world, k, dtype)
    rows_of = dispatched(cases, EXPERTS)
    ys = [rows * (expert + 1) / 3 for expert, rows in enumerate(rows_of)]

    def body(comm):
        mine = cases[comm.rank]
        rows, counts, handle = moe.dispatch(mine.x, mine.idx, mine.weights, EXPERTS, comm)
        expected = own(rows_of, comm)
        assert counts.tolist() == [len(each) for each in expected]
        assert torch.equal(rows, torch.cat(expected))
        y = torch.cat(own(ys, comm))
        assert torch.equal(moe.combine(y, handle), combined(cases, ys, comm.rank))
        # A handle can be used again, and heap memory is read in place.
        again = ringcomm.empty(y.shape, dtype=dtype).copy_(y)
        assert torch.equal(moe.combine(again, handle), combined(cases, ys, comm.rank))

    world.run(body)


@covering(strength=1, indirect=["world"], world=NODES, weighted=[True, False], k=[1, 2, 8])
def test_ranks_learn_what_one_rank_learns(world, k, weighted):
    """The result and all gradients have one rank's bits, for any number of ranks."""
    cases = cases_of(world, k)
    if not weighted:
        cases = [each._replace(weights=None) for each in cases]
    experts = torch.randn(EXPERTS, 40, 40, generator=seeded(7)) / 6
    whole = joined(cases)
    target = torch.randn(whole.x.shape, generator=seeded(8))
    expected = dense(whole, experts, target)
    targets = target.split([len(each.x) for each in cases])

    def body(comm):
        return learn(comm, cases[comm.rank], experts, targets[comm.rank])

    found = world.run(body)
    assert torch.equal(torch.cat([each.out for each in found]), expected.out)
    assert torch.equal(torch.cat([each.of_x for each in found]), expected.of_x)
    assert torch.equal(torch.cat([each.of_experts for each in found]), expected.of_experts)
    assert torch.equal(torch.cat([each.of_weights for each in found]), expected.of_weights)


def test_the_gradients_of_one_rank_are_autograds():
    """Compares with torch's own gradients of the same sums."""
    given = case(0, 2)
    x = given.x.clone().requires_grad_()
    weights = given.weights.clone().requires_grad_()
    experts = (torch.randn(EXPERTS, 40, 40, generator=seeded(7)) / 6).requires_grad_()
    target = torch.randn(given.x.shape, generator=seeded(8))
    by_expert = torch.tanh(torch.einsum("th,ehg->teg", x, experts))
    chosen = by_expert.gather(1, given.idx.clamp(min=0)[..., None].expand(-1, -1, 40))
    terms = weights[..., None] * chosen
    torch.where(given.idx[..., None] >= 0, terms, 0.0).sum(1).backward(target)
    found = dense(given, experts.detach(), target)
    torch.testing.assert_close(found.of_x, x.grad)
    torch.testing.assert_close(found.of_weights, weights.grad)
    torch.testing.assert_close(found.of_experts, experts.grad)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_weights_of_16_bits_have_gradients_of_16_bits(world, dtype):
    cases = cases_of(world, 2, dtype)
    cases = [each._replace(weights=each.weights.to(dtype)) for each in cases]
    experts = (torch.randn(EXPERTS, 40, 40, generator=seeded(7)) / 6).to(dtype)

    def body(comm):
        mine = cases[comm.rank]
        return learn(comm, mine, experts, torch.ones_like(mine.x))

    found = world.run(body)
    whole = joined(cases)
    expected = dense(whole, experts, torch.ones_like(whole.x))
    assert torch.equal(torch.cat([each.of_x for each in found]), expected.of_x)
    of_weights = torch.cat([each.of_weights for each in found])
    assert of_weights.dtype is dtype and torch.equal(of_weights, expected.of_weights)


def test_memory_of_the_heap_is_free_once_a_call_ends(world):
    """A rank may overwrite lent memory after the call, because all peers have read it by then."""

    def body(comm):
        mine = case(comm.rank, 2)
        for _ in range(20 if EVERY_CASE else 10):
            x = ringcomm.empty(mine.x.shape).copy_(mine.x)
            rows, _, handle = moe.dispatch(x, mine.idx, None, EXPERTS, comm)
            x.fill_(float("nan"))
            y = ringcomm.empty(rows.shape).copy_(rows)
            out = moe.combine(y, handle)
            y.fill_(float("nan"))
            assert rows.isfinite().all() and out.isfinite().all()

    world.run(body)


def test_outboxes_are_written_by_turns(world):
    """Consecutive calls without a final collective, with rows of growing size."""

    def body(comm):
        for turn in range(30 if EVERY_CASE else 12):
            mine = case(comm.rank, 2, tokens=1 + turn, hidden=8 + 8 * turn)
            rows, _, handle = moe.dispatch(mine.x + turn, mine.idx, None, EXPERTS, comm)
            out = moe.combine(rows, handle)
            times = (mine.idx >= 0).sum(1, keepdim=True)
            assert torch.equal(out, torch.where(times == 2, 2 * (mine.x + turn), out))
            assert torch.equal(out, torch.where(times == 1, mine.x + turn, out))
            assert torch.equal(out, torch.where(times == 0, 0.0, out))

    world.run(body)


def test_any_strides(world):
    cases = cases_of(world, 2)

    def body(comm):
        mine = cases[comm.rank]
        x = mine.x.t().contiguous().t()
        idx, weights = mine.idx.t().contiguous().t(), mine.weights.t().contiguous().t()
        rows, counts, handle = moe.dispatch(x, idx, weights, EXPERTS, comm)
        expected, same, usual = moe.dispatch(mine.x, mine.idx, mine.weights, EXPERTS, comm)
        assert torch.equal(rows, expected) and torch.equal(counts, same)
        y = rows.t().contiguous().t()
        assert torch.equal(moe.combine(y, handle), moe.combine(expected, usual))

    world.run(body)


def test_all_tokens_to_one_expert(world):
    def body(comm):
        x = torch.full((50, 40), float(comm.rank))
        idx = torch.full((50, 1), EXPERTS - 1)
        rows, counts, handle = moe.dispatch(x, idx, None, EXPERTS, comm)
        last = comm.rank == comm.world_size - 1
        assert counts.sum() == (50 * comm.world_size if last else 0)
        assert torch.equal(moe.combine(rows, handle), x)

    world.run(body)


def test_no_experts_at_all(world):
    """Without any expert, outputs and gradients are zeros."""

    def body(comm):
        x = torch.randn(5, 40).requires_grad_()
        weights = torch.full((5, 2), float("nan")).requires_grad_()
        idx = torch.full((5, 2), -1)
        rows, counts, handle = moe.dispatch(x, idx, weights, EXPERTS, comm)
        assert rows.shape == (0, 40) and not counts.any()
        out = moe.combine(rows, handle)
        out.sum().backward()
        for zeros in (out, x.grad, weights.grad):
            assert not zeros.any()

    world.run(body)


def test_nan_weights_flow(world):
    def body(comm):
        mine = case(comm.rank, 2)
        weights = mine.weights.clone()
        weights[3] = float("nan")
        rows, _, handle = moe.dispatch(mine.x, mine.idx, weights, EXPERTS, comm)
        out = moe.combine(rows, handle)
        lost = out.isnan().any(1)
        lost[3] = False
        assert out[3].isnan().all() and not lost.any()

    world.run(body)


def test_another_size_comes_back(world):
    """Experts may return rows of another size and another dtype."""

    def body(comm):
        mine = case(comm.rank, 2)
        rows, _, handle = moe.dispatch(mine.x, mine.idx, mine.weights, EXPERTS, comm)
        out = moe.combine(rows.bfloat16()[:, :7], handle)
        assert out.shape == (13, 7) and out.dtype is torch.bfloat16

    world.run(body)


@covering(strength=1, indirect=["world"], world=NODES, dtype=DTYPES, compression=[*COMPRESSIONS])
def test_rows_travel_quantized(world, compression, dtype):
    """Each row is quantized and dequantized separately; gradients are not quantized."""
    from tests.comm.test_quantization import dequantized

    cases = [case(rank, 2, hidden=200, dtype=dtype) for rank in range(len(world))]

    def body(comm):
        mine = cases[comm.rank]
        x = mine.x.clone().requires_grad_()
        rows, _, handle = moe.dispatch(
            x, mine.idx, mine.weights, EXPERTS, comm, compression=compression
        )
        quantized = [
            each._replace(
                x=torch.stack([dequantized(compression, row.float()).to(dtype) for row in each.x])
            )
            for each in cases
        ]
        assert torch.equal(rows, torch.cat(own(dispatched(quantized, EXPERTS), comm)))
        grad = torch.autograd.grad(rows, x, torch.ones_like(rows))[0]
        times = (mine.idx >= 0).sum(1, keepdim=True)
        assert torch.equal(grad, times.to(dtype).expand_as(grad))
        assert moe.combine(rows, handle).shape == x.shape

    world.run(body)


def test_room_for_more_rows(world):
    """Rows after the last one are zeros, even if experts return NaN, and have no gradients."""
    cases = cases_of(world, 2)

    def body(comm):
        mine = cases[comm.rank]
        x = mine.x.clone().requires_grad_()
        weights = mine.weights.clone().requires_grad_()
        least, _, usual = moe.dispatch(x, mine.idx, weights, EXPERTS, comm)
        rows, counts, handle = moe.dispatch(x, mine.idx, weights, EXPERTS, comm, max_rows=200)
        count = int(counts.sum())
        assert rows.shape == (200, 40) and not rows[count:].any()
        assert torch.equal(rows[:count], least)
        y = torch.cat([rows[:count] * 2, torch.full((200 - count, 40), float("nan"))])
        out = moe.combine(y, handle)
        assert torch.equal(out, moe.combine(least * 2, usual))
        grad = torch.autograd.grad(out, [y, weights], torch.ones_like(out), allow_unused=True)
        assert not grad[0][count:].any() and grad[1].isfinite().all()

    world.run(body)


def test_second_gradients_are_refused(world):
    def body(comm):
        mine = case(comm.rank, 2)
        x = mine.x.clone().requires_grad_()
        weights = mine.weights.clone().requires_grad_()
        rows, _, handle = moe.dispatch(x, mine.idx, weights, EXPERTS, comm)
        out = moe.combine(rows * rows, handle)
        grad = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        with pytest.raises(ringcomm.UnsupportedError, match="no gradient of its own"):
            grad.sum().backward()

    world.run(body)


@pytest.mark.parametrize("compression", [None, "fp8"])
def test_a_token_crosses_to_a_node_once(compression, monkeypatch):
    """A token crosses once per node that has its experts, and not to other nodes."""
    sent: dict[int, list[int]] = {}
    found = ringcomm.Communicator.all_to_all_single

    def recording(self, output, input, *rest):
        if input.dtype is torch.uint8:
            sent.setdefault(self.rank, []).append(input.numel())
        return found(self, output, input, *rest)

    monkeypatch.setattr(ringcomm.Communicator, "all_to_all_single", recording)

    def body(comm):
        # Ranks 2 and 3, on the other node than ranks 0 and 1, hold experts 4 to 7.
        idx = torch.tensor([[0, 4, 5, 7], [4, 5, 6, 7], [0, 1, 2, 3], [-1, 4, -1, -1]])
        moe.dispatch(torch.zeros(4, 256), idx, None, EXPERTS, comm, compression=compression)
        quantized_bytes = _native.quantized_bytes(_native.QUANT_FORMATS["fp8"], 256)
        row_bytes = 256 * 4 if compression is None else quantized_bytes
        assert sent[comm.rank] == [(3 if comm.rank < 2 else 2) * row_bytes]

    with ringcomm.local_world(4, nodes=(2, 2), options=CommOptions(timeout=60)) as made:
        made.run(body)


def large(dtype: torch.dtype) -> Case:
    """Returns rows of several blocks of numbers, enough of them to bypass the caches."""
    tokens, hidden = 4300, 2050
    given = case(0, 2, tokens, hidden, dtype=dtype)
    return given._replace(idx=given.idx.clamp(min=0))


@pytest.mark.parametrize("dtype", [*DTYPES[:2], *in_test_all(DTYPES[2])], ids=str)
def test_large_rows(dtype):
    given = large(dtype)
    x, weights = given.x.requires_grad_(), given.weights.requires_grad_()
    with ringcomm.local_world(1) as made:
        rows, _, handle = moe.dispatch(x, given.idx, weights, EXPERTS, made[0])
        assert x.nbytes >= STREAMED_BYTES
        y = rows.detach().requires_grad_()
        out = moe.combine(y, handle)
        out.backward(x.detach())
        torch.autograd.backward(rows, y.grad)
    wide = x.detach().float()
    first, second = weights.detach().unbind(1)
    expected = first[:, None] * wide + second[:, None] * wide
    assert torch.equal(out, expected.to(dtype))
    # Each row's gradient is rounded, and so is the sum of a token's two gradients.
    parts = [(each[:, None] * wide).to(dtype).float() for each in (first, second)]
    assert x.grad is not None
    assert torch.equal(x.grad, (parts[0] + parts[1]).to(dtype))
    squares = wide.square().sum(1, keepdim=True).expand(-1, 2)
    torch.testing.assert_close(weights.grad, squares, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_has_the_same_bits(dtype):
    given = case(0, 3, hidden=1100, dtype=dtype)
    experts = (torch.randn(EXPERTS, 1100, 1100, generator=seeded(7)) / 33).to(dtype)
    found = []
    try:
        for name in ("baseline", "avx2", "avx512"):
            if _native.force_isa(name):
                found.append(dense(given, experts, torch.ones_like(given.x)))
    finally:
        _native.force_isa("")
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
