"""Calls of a process group as the modes of torch see them: as operators of ``torch.ops.c10d``.

torch's own groups make their calls through its dispatcher, so a mode on the stack, such as
CommDebugMode, sees each of them. This package's group is in Python, where torch calls it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["Seen", "seen_by_modes"]


class Seen(NamedTuple):
    """One call in the communicator's terms: its method's name and arguments, and its options."""

    group: ProcessGroup
    name: str
    args: tuple[Any, ...]
    async_op: bool
    timeout: timedelta


def _lists(tensors: Sequence[Tensor] | None) -> list[list[Tensor]]:
    return [] if not tensors else [list(tensors)]


def _any_op() -> Any:
    # Opaque in Python, which can make only this one; the call has its own.
    return torch.classes.c10d.ReduceOp()


# The operator of each method, and how its arguments begin; the group follows at _GROUP.
_GROUP = object()
_OPERATORS: dict[str, tuple[str, Callable[..., list[Any]]]] = {
    "all_reduce": ("allreduce_", lambda t, op: [[t], _GROUP, _any_op(), None]),
    "all_reduce_coalesced": ("allreduce_coalesced_", lambda ts, op: [ts, _GROUP, _any_op()]),
    "all_reduce of sparse tensors": ("allreduce_", lambda t, op: [[t], _GROUP, _any_op(), None]),
    "broadcast": ("broadcast_", lambda t, root: [[t], _GROUP, root, 0]),
    "reduce": ("reduce_", lambda t, root, op: [[t], _GROUP, _any_op(), root, 0]),
    "all_gather": ("allgather_", lambda outs, t: [_lists(outs), [t], _GROUP]),
    "all_gather_into_tensor": ("_allgather_base_", lambda out, t: [out, t, _GROUP]),
    "all_gather_coalesced": ("allgather_into_tensor_coalesced_", lambda o, i: [o, i, _GROUP]),
    "all_gather_lists_coalesced": ("allgather_coalesced_", lambda o, i: [o, i, _GROUP]),
    "gather": ("gather_", lambda t, outs, root: [_lists(outs), [t], _GROUP, root]),
    "scatter": ("scatter_", lambda out, given, root: [[out], _lists(given), _GROUP, root]),
    "reduce_scatter": ("reduce_scatter_", lambda o, i, op: [[o], _lists(i), _GROUP, _any_op()]),
    "reduce_scatter_tensor": (
        "_reduce_scatter_base_",
        lambda out, t, op: [out, t, _GROUP, _any_op()],
    ),
    "reduce_scatter_coalesced": (
        "reduce_scatter_tensor_coalesced_",
        lambda o, i, op: [o, i, _GROUP, _any_op()],
    ),
    "all_to_all": ("alltoall_", lambda outs, ins: [outs, ins, _GROUP]),
    "all_to_all_single": (
        "alltoall_base_",
        lambda o, i, to, of: [o, i, _GROUP, to or [], of or []],
    ),
    "barrier": ("barrier", lambda: [torch.empty(1, device="cpu"), _GROUP, []]),
    "send": ("send", lambda t, peer, tag: [[t], _GROUP, peer, tag]),
    "recv": ("recv_", lambda t, peer, tag: [[t], _GROUP, peer, tag]),
    "recv from any source": ("recv_any_source_", lambda t, tag: [[t], _GROUP, tag]),
}


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below all other modes: makes the call whose operator they have seen."""

    def __init__(self, operator: Any, make: Callable[[], Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator = operator
        self._make = make
        self.work: Work | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not self._operator or self.work is not None:
            return func(*args, **(kwargs or {}))
        # torch's dispatcher has told autograd of the operator already.
        with torch._C._AutoDispatchBelowAutograd():
            self.work = self._make()
        boxed = self.work.boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


@contextmanager
def _below_all(mode: TorchDispatchMode) -> Iterator[None]:
    above = _get_current_dispatch_mode_stack()
    for _ in above:
        _pop_mode()
    for each in (mode, *above):
        _push_mode(each)
    try:
        yield
    finally:
        for _ in range(len(above) + 1):
            _pop_mode()
        for each in above:
            _push_mode(each)


def seen_by_modes(call: Seen, make: Callable[[], Work]) -> Work | None:
    """Makes a call through torch's dispatcher, so that the modes on the stack see its operator.

    Args:
        call: what the operator's arguments say.
        make: makes the call; runs below the modes.

    Returns:
        What ``make`` returned; None if a mode did not let the operator through.
    """
    name, arguments = _OPERATORS[call.name]
    operator = getattr(torch.ops.c10d, name).default
    below = _Made(operator, make)
    given = [call.group.boxed() if each is _GROUP else each for each in arguments(*call.args)]
    takes = {argument.name for argument in operator._schema.arguments}
    how: dict[str, Any] = {"async_op": call.async_op} if "async_op" in takes else {}
    if "timeout" in takes:
        how["timeout"] = call.timeout // timedelta(milliseconds=1)
    with _below_all(below):
        operator(*given, **how)
    return below.work
