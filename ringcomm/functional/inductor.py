"""Keeps inductor's scheduler in step with the program.

NOTE [Order in inductor]
inductor turns the tokens of NOTE [Ranks stay in step] into dependencies between kernels. It files
them under the name of a buffer, where its scheduler looks for the name of an operation, so they are
lost (torch 2.11 to 2.14, pytorch/pytorch#189209), and the scheduler, which reorders to save memory,
may exchange two collectives on one rank only. So the operators get lowerings that file them under
the right name; as dependencies that order, and do not keep the earlier result in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._library.effects import EffectType


@cache
def keep_order(operators: tuple[str, ...]) -> bool:
    """Gives the operators their lowerings; loads inductor, so only once something is compiled."""
    from torch._inductor.lowering import lowerings

    for name in operators:
        operator = getattr(torch.ops.ringcomm, name).default
        lowerings[operator] = _in_order(operator)
    return True


def _in_order(operator: Any) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower: Callable[..., Any] = fallback_handler(  # type: ignore[no-untyped-call]
        operator, add_to_fallback_set=False
    )

    def lower_in_order(*arguments: Any) -> Any:
        graph = V.graph
        before = len(graph.operations)
        result = lower(*arguments)
        previous = graph.effectful_ops.get(EffectType.ORDERED)
        if previous is not None:
            for operation in graph.operations[before:]:
                name = operation.get_operation_name()
                graph.additional_buffer_deps[name].add(previous.get_name())
        return result

    return lower_in_order
