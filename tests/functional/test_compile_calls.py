# SPDX-License-Identifier: Apache-2.0
"""A compiled function calls every collective once, in the order of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch._library.effects import EffectType
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ringcomm import Communicator
from ringcomm import functional as F
from ringcomm.functional import collectives
from ringcomm.functional.collectives import OPERATORS
from tests.functional.compiling import alone, check, evaluate, recorded_calls
from tests.support.exact import equal
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Tensor = torch.Tensor


def unused(tensor: Tensor, group: Communicator) -> Tensor:
    F.all_reduce(tensor, group=group)
    return tensor * 2


def repeated(tensor: Tensor, group: Communicator) -> Tensor:
    return F.all_gather(tensor, group) + F.all_gather(tensor, group)


def reordered(tensor: Tensor, group: Communicator) -> Tensor:
    parts = [F.all_reduce(tensor[:rows].cos(), group=group) for rows in (3, 1, 2)]
    return parts[2].sum() - parts[0].sum() * parts[1].sum()


def constant(tensor: Tensor, group: Communicator) -> Tensor:
    return F.broadcast(torch.ones(16), 0, group) + tensor


def cheap_to_repeat(tensor: Tensor, group: Communicator) -> Tensor:
    gathered = F.all_gather(tensor.sin(), group)
    return (gathered.cos() * gathered.sin()).sum()


def thrifty(tensor: Tensor, group: Communicator) -> Tensor:
    """Would take less memory in another order. Uses only products, so no C++ compiler runs."""
    F.all_gather(tensor, group)
    parts = [F.all_gather(tensor[:rows], group) for rows in (3, 16, 2, 8)]
    F.all_reduce(tensor[:3], group=group)
    F.all_reduce(tensor[:4], group=group)
    last = parts[2] @ (parts[3].t() @ parts[3]) @ parts[1]
    return parts[0] @ last.t()


PROGRAMS = (unused, repeated, reordered, constant, cheap_to_repeat)


def differing(
    programs: Sequence[Callable[[Tensor, Communicator], Tensor]], backend: str
) -> set[str]:
    """Returns the names of programs whose compiled form makes other calls than the eager one."""
    names = set()
    with alone() as group, recorded_calls() as calls:
        for program in programs:
            seen = []
            for each in ("eager", backend):
                calls.clear()
                tensor = torch.ones(16, 16, requires_grad=program is not thrifty)
                output = torch.compile(program, backend=each, fullgraph=True)(tensor, group)
                if output.requires_grad:
                    output.sum().backward()
                seen.append(list(calls))
            assert seen[0]
            if seen[1] != seen[0]:
                names.add(program.__name__)
    torch._dynamo.reset()
    return names


def with_and_without_effects(store: Any, rank: int, world_size: int) -> list[set[str]]:
    found = []
    # None comes first, because torch never forgets that an operator had an effect.
    for effect in (None, EffectType.ORDERED):
        for name in OPERATORS:
            torch.library._register_effectful_op(f"ringcomm::{name}", effect)
        programs = [unused] if effect is None else PROGRAMS
        found.append(differing(programs, "aot_eager_decomp_partition"))
    return found


def test_every_call_is_kept():
    """Negative control: without effects of the operators, an unused call is dropped."""
    assert run_ranks(with_and_without_effects, 1, timeout_s=150.0) == [[{"unused"}, set()]]


def by_inductor(rank: int, world_size: int) -> None:
    from torch._inductor.lowering import lowerings  # only this process needs the import

    if rank:
        return
    # This test records the calls of the operators, so it turns off the native functions.
    with mock.patch.object(collectives, "name_in_graph", return_value=None):
        assert differing([thrifty], "inductor") == set()
    operators = [getattr(torch.ops.ringcomm, name).default for name in OPERATORS]
    kept = {each: lowerings.pop(each) for each in operators}
    assert differing([thrifty], "inductor") == {"thrifty"}
    lowerings.update(kept)


def test_inductor_keeps_the_order(compiling_ranks):
    """Negative control: with inductor's fallback lowerings the order changes."""
    compiling_ranks.run(by_inductor)


# ---- activation checkpointing -------------------------------------------------------------------


def block(tensor: Tensor, group: Communicator) -> Tensor:
    return F.reduce_scatter(F.all_gather(tensor.sin(), group).cos(), group=group) * tensor


def keep_collectives(context: Any, operator: Any, *rest: Any, **options: Any) -> CheckpointPolicy:
    if operator.namespace == "ringcomm":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(tensor: Tensor, group: Communicator, **options: Any) -> Tensor:
    result: Tensor = checkpoint(block, tensor, group, use_reentrant=False, **options)
    return result


def test_checkpointing(worlds):
    """Backward runs the collectives again, the same ones on all ranks."""

    def body(comm):
        want = evaluate(block, 2, comm.rank, comm)
        assert all(map(equal, evaluate(checkpointed, 2, comm.rank, comm), want))

    worlds(2).run(body)


def test_checkpointing_in_a_graph():
    policy = partial(create_selective_checkpoint_contexts, keep_collectives)
    with alone() as group:
        check(partial(checkpointed, context_fn=policy), 2, 1, group)
        # Around a compiled graph, any checkpoint function works.
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)

        def around(tensor: Tensor) -> Any:
            return checkpoint(compiled, tensor, group, use_reentrant=False)

        want = evaluate(block, 2, 1, group)
        assert all(map(equal, evaluate(around, 2, 1), want))
