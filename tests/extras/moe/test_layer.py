# SPDX-License-Identifier: Apache-2.0
"""The layer of experts: its results, how it balances the load of experts, and that it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ringcomm
from ringcomm import ArgumentError, CommOptions, MismatchError
from ringcomm.comm.local_world import LocalWorld
from ringcomm.extras import moe
from tests.extras.moe.cases import seeded

Tensor = torch.Tensor
EXPERTS, HIDDEN = 8, 24


@pytest.fixture(scope="module", params=[1, 4])
def world(request) -> Iterator[LocalWorld]:
    with ringcomm.local_world(request.param, options=CommOptions(timeout=60)) as made:
        yield made


def expert(number: int) -> nn.Module:
    """Makes a small network, with values that depend on its number."""
    made = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))
    return filled(made, number)


def filled(module: nn.Module, seed: int) -> nn.Module:
    generator = seeded(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 5)
    return module


def layer(
    comm: ringcomm.Communicator,
    options: moe.RoutingOptions | None = None,
    counted_over: ringcomm.Communicator | None = None,
) -> Any:
    here = EXPERTS // comm.world_size
    mine = nn.ModuleList(expert(comm.rank * here + number) for number in range(here))
    router = filled(nn.Linear(HIDDEN, EXPERTS, bias=False), 99)
    return moe.MoE(router, mine, comm, options=options, counted_over=counted_over)


def tokens(rank: int, count: int = 20) -> Tensor:
    return torch.randn(count, HIDDEN, generator=seeded(rank))


OPTIONS = {
    "top 1": moe.RoutingOptions(top_k=1, normalized=False),
    "top 2": moe.RoutingOptions(),
    "all": moe.RoutingOptions(top_k=EXPERTS),
    "sigmoid": moe.RoutingOptions(top_k=3, scores="sigmoid"),
}


def expected_of(x: Tensor, made: Any, experts: list[nn.Module]) -> Tensor:
    """Returns the layer's definition, in which every expert computes every token."""
    logits = made.router(x)
    scores = logits.softmax(-1) if made.options.scores == "softmax" else logits.sigmoid()
    weights, idx = scores.topk(made.options.top_k, -1)
    if made.options.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    every = torch.stack([each(x) for each in experts], 1)
    chosen = every.gather(1, idx[..., None].expand(-1, -1, HIDDEN))
    return torch.einsum("tk,tkh->th", weights, chosen)


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_what_it_is_defined_as(world, name):
    """Compares with all experts on one rank; the bits equal those of a layer with one rank."""

    def body(comm):
        made = layer(comm, OPTIONS[name])
        x = tokens(comm.rank).requires_grad_()
        out = made(x)
        out.square().mean().backward()
        return out.detach(), x.grad, [each.grad for each in made.experts.parameters()]

    found = world.run(body)
    with ringcomm.local_world(1) as one:
        made = layer(one[0], OPTIONS[name])
        whole = torch.cat([tokens(rank) for rank in range(len(world))])
        x = whole.clone().requires_grad_()
        out = made(x)
        sum(part.square().mean() for part in out.split(20)).backward()
        assert torch.equal(torch.cat([each[0] for each in found]), out)
        torch.testing.assert_close(torch.cat([each[1] for each in found]), x.grad)
        gradients = [each.grad for each in made.experts.parameters()]
        assert all(map(torch.equal, [each for rank in found for each in rank[2]], gradients))
        experts = [expert(number) for number in range(EXPERTS)]
        torch.testing.assert_close(out, expected_of(whole, made, experts))


def test_the_auxiliary_loss_is_that_of_switch_transformers(world):
    """The loss is E times the sum of share x mean probability, smallest if all are equal."""

    def body(comm):
        made = layer(comm)
        x = tokens(comm.rank)
        made(x)
        probabilities = made.router(x).softmax(-1)
        chosen = F.one_hot(probabilities.topk(2, -1).indices, EXPERTS).sum(1).float()
        expected = EXPERTS * (chosen.sum(0) / chosen.sum() * probabilities.mean(0)).sum()
        torch.testing.assert_close(made.auxiliary_loss, expected)
        made.auxiliary_loss.backward()
        assert made.router.weight.grad.any()
        with torch.no_grad():
            made.router.weight.zero_()
        made(x)
        torch.testing.assert_close(made.auxiliary_loss, torch.tensor(1.0))
        made(x[:0])
        assert made.auxiliary_loss == 0 and made.auxiliary_loss.requires_grad

    world.run(body)


def test_shares_of_all_tokens_make_the_loss_of_all(world):
    """With different numbers of tokens, the ranks' mean loss is the loss of all tokens."""
    ranks = len(world)
    whole = torch.cat([tokens(rank, 5 + 4 * rank) for rank in range(ranks)])
    with ringcomm.local_world(1) as one:
        made = layer(one[0])
        made(whole)
        made.auxiliary_loss.backward()
        expected, of_router = made.auxiliary_loss.detach(), made.router.weight.grad
        counts = made.tokens_by_expert

    def body(comm):
        made = layer(comm, counted_over=comm)
        made(tokens(comm.rank, 5 + 4 * comm.rank))
        (made.auxiliary_loss / ranks).backward()
        total, grad = made.auxiliary_loss.detach() / ranks, made.router.weight.grad
        here = made.tokens_by_expert.clone()
        for each in (total, grad, here):
            comm.all_reduce(each)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(grad, of_router)
        assert torch.equal(here, counts)
        # The shares are constants: only the probabilities have gradients.
        again = layer(comm, counted_over=comm)
        x = tokens(comm.rank, 5 + 4 * comm.rank)
        again(x)
        of_mean = EXPERTS * ranks * (counts / counts.sum() * again.router(x).softmax(-1).sum(0))
        torch.testing.assert_close(again.auxiliary_loss, of_mean.sum() / len(whole))

    world.run(body)


def test_a_bias_counts_over_the_ranks_that_it_is_told():
    """Groups of two ranks: the biases agree only if tokens are counted over all ranks."""

    def body(comm):
        group = comm.split(comm.rank // 2)
        found = []
        for counted_over in (None, comm):
            options = moe.RoutingOptions(top_k=1, normalized=False, balance_bias=0.5)
            made = layer(group, options, counted_over=counted_over)
            made(tokens(comm.rank // 2, 3))
            made.update_bias()
            biases = made.bias.new_empty(4, EXPERTS)
            comm.all_gather_into_tensor(biases, made.bias)
            found.append(bool((biases == made.bias).all()))
        assert found == [False, True]

    with ringcomm.local_world(4, options=CommOptions(timeout=60)) as four:
        four.run(body)


def test_a_bias_evens_out_the_experts(world):
    """The bias is equal on all ranks, changes the choice but no weight, and evens out the load."""

    def body(comm):
        options = moe.RoutingOptions(top_k=1, normalized=False, balance_bias=0.02)
        made = layer(comm, options)
        with torch.no_grad():
            made.router.weight[:, 0] += torch.arange(EXPERTS) / 20
        x = tokens(comm.rank, 400) + torch.eye(1, HIDDEN)
        spread = []
        for _ in range(60):
            made(x)
            counts = made.tokens_by_expert.clone()
            assert counts.sum() == len(x)
            comm.all_reduce(counts)
            spread.append(float(counts.max() / counts.float().mean()))
            made.update_bias()
            assert not made.tokens_by_expert.any()
        assert spread[-1] < 1.3 < 2 < spread[0]
        biases = made.bias.new_empty(comm.world_size, EXPERTS)
        comm.all_gather_into_tensor(biases, made.bias)
        assert (biases == made.bias).all() and "bias" in made.state_dict()
        made.eval()(x)
        assert not made.tokens_by_expert.any()

    world.run(body)


class Grouped(nn.Module):
    """Several experts in one module, each one matrix."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, HIDDEN, HIDDEN, generator=seeded(5)))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([part @ each for part, each in zip(parts, self.weight, strict=True)])


def test_experts_as_one_module(world):
    def body(comm):
        here = EXPERTS // comm.world_size
        router = filled(nn.Linear(HIDDEN, EXPERTS), 99)
        grouped: Any = moe.MoE(router, Grouped(here), comm, num_experts=EXPERTS)
        listed = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(here))
        with torch.no_grad():
            each: Any
            for each, weight in zip(listed, grouped.experts.weight, strict=True):
                each.weight.copy_(weight.t())
        x = tokens(comm.rank).view(4, 5, HIDDEN)
        out = grouped(x)
        assert out.shape == x.shape
        same: Any = moe.MoE(router, listed, comm)
        torch.testing.assert_close(same(x), out)

    world.run(body)


def test_the_router_is_fp32_under_autocast(world):
    def body(comm):
        made = layer(comm)
        x = tokens(comm.rank).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            out = made(x)
        assert out.dtype is torch.bfloat16
        assert made.auxiliary_loss.dtype is torch.float32

    world.run(body)


def test_room_for_rows_behind(world):
    def body(comm):
        x = tokens(comm.rank)
        options = moe.RoutingOptions(max_rows=40 * comm.world_size)
        assert torch.equal(layer(comm, options)(x), layer(comm)(x))

    world.run(body)


@pytest.mark.parametrize("counted", [False, True])
def test_one_rank_has_more_experts(counted):
    """Its router has no scores for the extra expert: it raises, and no rank waits for it."""

    def body(comm):
        here = EXPERTS // comm.world_size + (comm.rank == 1)
        experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(here))
        router = filled(nn.Linear(HIDDEN, EXPERTS), 99)
        made = moe.MoE(router, experts, comm, counted_over=comm if counted else None)
        refused = comm.rank == 1
        expected = "router: expected float32" if refused else "rank 1 refused its arguments"
        with pytest.raises(ArgumentError if refused else MismatchError, match=expected):
            made(tokens(comm.rank))
        assert layer(comm)(tokens(comm.rank)).shape == tokens(comm.rank).shape

    with ringcomm.local_world(2, options=CommOptions(timeout=60)) as world:
        world.run(body)


def test_bad_layers():
    with ringcomm.local_world(1) as world:
        comm = world[0]
        router, experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        for message, call in {
            "router: expected float32 parameters": lambda: moe.MoE(router.half(), experts, comm),
            "num_experts: expected the number": lambda: moe.MoE(nn.Linear(4, 2), Grouped(2), comm),
            "experts: expected this rank's share of 3": lambda: moe.MoE(
                nn.Linear(4, 3), experts, comm, num_experts=3
            ),
            "top_k: expected at most the 2": lambda: moe.MoE(
                nn.Linear(4, 2), experts, comm, options=moe.RoutingOptions(top_k=3)
            ),
            "top_k: expected an integer": lambda: moe.RoutingOptions(top_k=0),
            "scores: expected one of": lambda: moe.RoutingOptions(scores="none"),
            "balance_bias: expected a number": lambda: moe.RoutingOptions(balance_bias=-1),
            r"router: expected float32 \[tokens, 2\]": lambda: moe.MoE(
                nn.Linear(4, 3), experts, comm
            )(torch.zeros(1, 4)),
        }.items():
            with pytest.raises(ArgumentError, match=message):
                call()
