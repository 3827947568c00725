"""Keeps hooks out of what ``torch.compile`` traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

# Dynamo says it where it breaks a graph, and in the error that fullgraph=True makes of that.
_REASON = (
    "ringcomm.zero works between the graphs: at stage 3 it gathers each unit before it runs and "
    "frees it afterwards. For fullgraph=True pass each unit, such as every block, through "
    "torch.compile() before shard(), and leave the module around them uncompiled"
)


def outside_of_compile(function: F) -> F:
    """``torch.compiler.disable``, without its import of Dynamo where nothing is compiled.

    That takes 1.2 s (Zen 4), which importing ringcomm.zero would take longer.
    """
    # What Dynamo looks for before it traces a call.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return only_inlined(function)


def only_inlined(function: F) -> F:
    """Has Dynamo trace a function inside of a larger graph, and never for itself.

    Behind a graph break a hook is called as a frame of its own. It is skipped, as is whatever it
    calls: Dynamo would compile both anew for each unit until it gave up.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile()`` was called with, if this is what it returned."""
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module
