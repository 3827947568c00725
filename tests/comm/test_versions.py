# SPDX-License-Identifier: Apache-2.0
"""Versions of a call's outputs, by which a backward detects that a saved tensor was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.covering import covering

Tensor = torch.Tensor


def full(count: int = 4) -> Tensor:
    return torch.ones(count)


def messages(comm: Any, out: Tensor, given: Tensor, at_once: bool) -> None:
    if not at_once:
        works = [comm.isend(given, 1 - comm.rank), comm.irecv(out, 1 - comm.rank)]
        for work in works:
            work.wait()
    elif comm.rank:
        comm.send(given, 0)
        comm.recv(out, 0)
    else:
        comm.recv(out, 1)
        comm.send(given, 1)


# The outputs, the inputs, and the call.
Case = tuple[list[Tensor], list[Tensor], Callable[[Any, bool], Any]]


def cases() -> dict[str, Case]:
    a, b, c, d, e, f = (full() for _ in range(6))
    lists = [full(), full()]
    whole, chunk, half, strided = full(8), full(2), full(2), torch.ones(4, 2)[:, 0]
    out, given = full(), full()
    return {
        "all_reduce": ([a], [], lambda comm, now: comm.all_reduce(a, async_op=not now)),
        "strided": ([strided], [], lambda comm, now: comm.all_reduce(strided, async_op=not now)),
        "reduce": ([b], [], lambda comm, now: comm.reduce(b, 0, async_op=not now)),
        "broadcast": ([c], [], lambda comm, now: comm.broadcast(c, 0, async_op=not now)),
        "all_gather": (lists, [d], lambda comm, now: comm.all_gather(lists, d, async_op=not now)),
        "all_gather_into_tensor": (
            [whole],
            [d],
            lambda comm, now: comm.all_gather_into_tensor(whole, d, async_op=not now),
        ),
        "reduce_scatter_tensor": (
            [chunk],
            [d],
            lambda comm, now: comm.reduce_scatter_tensor(chunk, d, async_op=not now),
        ),
        "reduce_scatter": (
            [half],
            [chunk],
            lambda comm, now: comm.reduce_scatter(half, [chunk, chunk], async_op=not now),
        ),
        "all_to_all_single": (
            [e],
            [f],
            lambda comm, now: comm.all_to_all_single(e, f, async_op=not now),
        ),
        "messages": ([out], [given], lambda comm, now: messages(comm, out, given, now)),
    }


def unchanged(rank: int) -> set[str]:
    """Returns the calls that do not change this rank's tensor."""
    return {"reduce" if rank else "broadcast"}


# Fast versions of these advance no version unless the output requires grad; NOTE [Fast path].
FAST = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}


@pytest.mark.parametrize("now", [True, False])
def test_calls_advance_the_versions_of_their_outputs(worlds, now):
    def work(comm):
        found = {}
        for name, (outputs, inputs, call) in cases().items():
            before = [tensor._version for tensor in (*outputs, *inputs)]
            started = call(comm, now)
            if started is not None:
                started.wait()
            after = [tensor._version for tensor in (*outputs, *inputs)]
            advanced = [late > early for late, early in zip(after, before, strict=True)]
            assert not any(advanced[len(outputs) :]), name
            found[name] = all(advanced[: len(outputs)])
        return {name for name, advanced in found.items() if not advanced}

    fast = FAST if now else set()
    assert worlds(2).run(work) == [fast | unchanged(rank) for rank in range(2)]


def test_a_backward_that_needs_what_a_call_has_overwritten_raises(worlds):
    def work(comm):
        weight, saved = torch.ones(4, requires_grad=True), full()
        loss = (weight * saved).sum()
        comm.all_reduce(saved, async_op=True).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    worlds(2).run(work)


@covering(strength=1, name=sorted(cases().keys() - {"strided"}), now=[True, False])
def test_a_backward_that_needs_a_parameter_which_a_call_has_overwritten_raises(worlds, name, now):
    """Inside ``no_grad()``, where calls may write to parameters."""

    def work(comm):
        outputs, _, call = cases()[name]
        losses = [output.requires_grad_().square().sum() for output in outputs]
        with torch.no_grad():
            started = call(comm, now)
        if started is not None:
            started.wait()
        for loss in losses:
            if name in unchanged(comm.rank):
                loss.backward()
                continue
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    worlds(2).run(work)
