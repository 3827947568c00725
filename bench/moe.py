# SPDX-License-Identifier: Apache-2.0
"""Times dispatch and combine of experts' tokens, against all_to_all_single with splits.

Each rank, one thread, dispatches ``--tokens`` tokens and combines them, forward alone and with
backward, without experts in between. The compared code is written by hand: exchange counts, sort
tokens by expert, send them with splits, sort them by local expert; then undo these steps in reverse
order, and add with weights. It runs on Gloo and on the backend "ringcomm".
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single

import ringcomm
from ringcomm.extras import moe

from .launch import LaunchError, started_by
from .options import option, positive, tuples
from .report import row_of
from .run import Bench, Run

Tensor = torch.Tensor
OURS = "ringcomm.extras.moe"
ON_GLOO, ON_BACKEND = "all_to_all on gloo", "all_to_all on ringcomm"
RANKS = 4
KINDS = ("forward", "backward")
SHAPES = ((16, 2), (64, 2), (16, 8), (64, 8))


class RoutedShape(NamedTuple):
    """The sizes of a layer's tokens and routes on each rank."""

    tokens: int
    hidden: int
    experts: int
    k: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}, {self.k} of {self.experts}"


class Inputs(NamedTuple):
    """One rank's tokens and routes, and the gradients of its results."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    of_out: Tensor


def inputs(shape: RoutedShape, rank: int) -> Inputs:
    seed = torch.Generator(device="cpu").manual_seed(rank)
    x = torch.randn(shape.tokens, shape.hidden, generator=seed)
    scores, idx = torch.rand(shape.tokens, shape.experts, generator=seed).topk(shape.k)
    return Inputs(x, idx, scores, torch.randn(x.shape, generator=seed))


Dispatch = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]]


def by_hand(shape: RoutedShape, group: Any) -> Dispatch:
    """Returns dispatch and combine of a layer, made of calls of all_to_all_single."""
    world = dist.get_world_size(group)

    def exchange(rows: Tensor, arriving: list[int], leaving: list[int]) -> Tensor:
        out = rows.new_empty(sum(arriving), rows.size(1))
        call: Any = all_to_all_single
        found: Tensor = call(out, rows, arriving, leaving, group=group)
        return found

    def dispatch(x: Tensor, idx: Tensor, _: Tensor) -> Any:
        order = idx.view(-1).argsort(stable=True)
        counts = idx.view(-1).bincount(minlength=shape.experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, got = (each.view(world, -1).sum(1).tolist() for each in (counts, arriving))
        rows = exchange(x.index_select(0, order // shape.k), got, sent)
        here = torch.arange(shape.experts // world, device="cpu").repeat(world)
        by_expert = here.repeat_interleave(arriving).argsort(stable=True)

        def combine(y: Tensor, weights: Tensor) -> Tensor:
            back = exchange(y.index_select(0, inverse(by_expert)), sent, got)
            rows = back.index_select(0, inverse(order)).view(*weights.shape, -1)
            return (rows * weights[..., None]).sum(1)

        return rows.index_select(0, by_expert), combine

    return dispatch


def inverse(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device="cpu")
    return found


def ours(shape: RoutedShape, comm: ringcomm.Communicator) -> Dispatch:
    def dispatch(x: Tensor, idx: Tensor, weights: Tensor) -> Any:
        rows, _, handle = moe.dispatch(x, idx, weights, shape.experts, comm)
        return rows, lambda y, _: moe.combine(y, handle)

    return dispatch


Turn = Callable[[], list[Tensor]]


def turn(dispatch: Dispatch, given: Inputs, of_experts: Tensor, backward: bool) -> Turn:
    """Returns a call, whose inputs (experts' results, rows' gradient) are made in advance."""
    x, y, weights = (
        each.detach().requires_grad_(backward) for each in (given.x, of_experts, given.weights)
    )

    def run() -> list[Tensor]:
        rows, combine = dispatch(x, given.idx, weights)
        out = combine(y, weights)
        if not backward:
            return [rows, out]
        x.grad = y.grad = weights.grad = None
        torch.autograd.backward([out, rows], [given.of_out, of_experts])
        gradients = [each.grad for each in (x, y, weights) if each.grad is not None]
        return [rows.detach(), out.detach(), *gradients]

    return run


def unfit(shapes: Sequence[tuple[int, int]], ranks: int) -> str | None:
    """Returns an error message if experts do not divide among ranks, or K is too large."""
    for experts, k in shapes:
        if experts % ranks:
            told = f"{experts} experts do not divide among {ranks} ranks"
            return f"{told}; give shapes EXPERTS,K such as {4 * ranks},2, or other --ranks"
        if not 1 <= k <= experts:
            return f"shape {experts},{k}: expected K from 1 to the {experts} experts"
    return None


def check_shapes(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Refuses wrong shapes before ranks start; under a launcher :func:`measure` checks them."""
    told = unfit(asked.shapes, asked.ranks or RANKS) if started_by(os.environ) is None else None
    if told is not None:
        parser.error(told)


def check(calls: Mapping[str, Turn]) -> None:
    """Raises AssertionError unless the first rows of all systems agree."""
    expected = [each[:99].clone() for each in calls[OURS]()]
    for call in calls.values():
        for one, other in zip(call(), expected, strict=True):
            torch.testing.assert_close(one[:99], other, rtol=1e-4, atol=1e-4)


def ignore_deprecation() -> None:
    """Silences torch's warning that the autograd function of all_to_all_single is deprecated.

    The benchmark times the code that users have written by hand, which calls this function.
    """
    warnings.filterwarnings("ignore", r".*all_to_all_single is deprecated", FutureWarning)


def measure(run: Run) -> None:
    asked = run.options
    told = unfit(asked.shapes, run.world)
    if told is not None:
        raise LaunchError(told)
    comm = run.connect()
    ignore_deprecation()
    gloo = dist.new_group(backend="gloo")
    run.pacing.expect(len(asked.shapes) * len(KINDS))
    for experts, k in asked.shapes:
        shape = RoutedShape(asked.tokens, asked.hidden, experts, k)
        given = inputs(shape, comm.rank)
        systems = {
            OURS: ours(shape, comm),
            ON_BACKEND: by_hand(shape, dist.group.WORLD),
            ON_GLOO: by_hand(shape, gloo),
        }
        of_experts = systems[OURS](given.x, given.idx, given.weights)[0].clone()
        for number, kind in enumerate(KINDS):
            how = (given, of_experts, number == 1)
            calls = {name: turn(each, *how) for name, each in systems.items()}
            check(calls)
            row = row_of(f"moe_{kind}", str(shape), run.world, given.x.numel())
            run.compare(row, calls, OURS)


BENCH = Bench(
    "moe",
    __doc__,
    measure,
    (
        tuples("shapes", "EXPERTS,K", SHAPES),
        option("--tokens", type=positive, default=4096, help="tokens per rank"),
        option("--hidden", type=positive, default=1024),
    ),
    ranks=RANKS,
    check=check_shapes,
)
BENCH.run_as_main(__name__)
