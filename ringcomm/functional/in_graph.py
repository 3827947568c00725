# SPDX-License-Identifier: Apache-2.0
"""The native functions that inductor's code calls in place of the collectives' operators.

See NOTE [Calls of a graph] in ``kernels/bindings/graph_calls.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

from ringcomm import _native
from ringcomm.comm.functions import default_places

__all__ = ["FUNCTIONS", "describe", "name_in_graph", "serve"]

# The attribute of torch.ops where inductor's generated code finds the native functions.
_PLACE = "ringcomm_in_graph"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_gather": _native.graph_all_gather,
    "all_reduce": _native.graph_all_reduce,
    "all_to_all": _native.graph_all_to_all,
    "broadcast": _native.graph_broadcast,
    "reduce": _native.graph_reduce,
    "reduce_scatter": _native.graph_reduce_scatter,
}
# torch's function that makes an uninitialized tensor from sizes, strides and a dtype.
_EMPTY = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)


def serve(holders: Mapping[str, Any], operators: Mapping[str, Any]) -> None:
    """Passes tables of communicators and operators to the native functions; called once.

    Args:
        holders: weak references to the communicators, by their keys.
        operators: torch's operators, by their names.
    """
    thread, process = default_places()
    names = {
        "holders": holders,
        "thread": thread,
        "process": process,
        "world": _world,
        "empty": _EMPTY,
    }
    _native.serve_graphs(names, dict(operators))
    setattr(torch.ops, _PLACE, SimpleNamespace(**FUNCTIONS))


def name_in_graph(operator: str) -> str | None:
    """Returns the name of the native function for an operator in inductor's code, or None."""
    name = operator.removeprefix("ringcomm::")
    if name not in FUNCTIONS or _EMPTY is None:
        return None
    return f"torch.ops.{_PLACE}.{name}"


def describe() -> tuple[str, str]:
    """Describes how compiled graphs call collectives; also returns advice, or "" for none."""
    lacks = ""
    if _EMPTY is None:
        lacks = "has no empty_strided_cpu for inductor"
    elif not _native.takes_fast_path(torch.ones(1, device="cpu")):
        lacks = "does not let its tensors be read natively"
    if not lacks:
        return "inductor's code calls the native module", ""
    advice = "calls take tens of microseconds more; docs/versions.md lists the versions of torch"
    return f"torch's operators in Python, since torch {torch.__version__} {lacks}", advice
