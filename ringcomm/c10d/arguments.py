"""Turns the argument forms of ``torch.distributed.ProcessGroup`` into one, and checks tensors.

Every method of torch's class has the form of ``torch.distributed`` itself (lists of tensors and
an options object) and older ones (single tensors, ``op`` or ``root``, ``timeout``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ringcomm.errors import ArgumentError, UnsupportedError

__all__ = ["UNSET_TIMEOUT", "in_memory", "in_memory_all", "options", "single"]

_Options = TypeVar("_Options")

# What an options object says when the caller gave no timeout.
UNSET_TIMEOUT = timedelta(milliseconds=-1)

_PLAIN = frozenset({Tensor, Parameter})
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def options(kind: type[_Options], given: Any, timeout: timedelta | None, **fields: Any) -> _Options:
    """The options object that says what the arguments of an older form say.

    Args:
        kind: class of the options, as ``AllreduceOptions``.
        given: the first of the older arguments (op or root), or None.
        timeout: for this one call.
        fields: further arguments by the name of their field; None leaves torch's default.

    Raises:
        ArgumentError: ``given`` is neither an options object nor an argument of an older form.
    """
    made = kind()
    if given is not None:
        if not fields:
            raise ArgumentError(f"opts: expected {kind.__name__}, got {type(given).__name__}")
        fields[next(iter(fields))] = given
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout  # type: ignore[attr-defined]
    return made


def single(tensors: Any, operation: str) -> Tensor:
    """The one tensor of a list, as every CPU backend of torch takes it.

    Raises:
        ArgumentError: the list has another length.
    """
    if isinstance(tensors, Tensor):
        return in_memory(tensors, operation)
    if len(tensors) != 1:
        raise ArgumentError(
            f"{operation}: expected one tensor per rank, got {len(tensors)}; call it once per "
            "tensor, or use the coalesced form"
        )
    tensor = tensors[0]
    return tensor if type(tensor) in _PLAIN else _unwrapped(tensor, operation)


def in_memory(tensor: Tensor, operation: str) -> Tensor:
    """A tensor whose data can be read through its address.

    Raises:
        UnsupportedError: the tensor is of a class that stands for data elsewhere (DTensor), or
            for none (a fake tensor).
    """
    if type(tensor) in _PLAIN:
        return tensor
    return _unwrapped(tensor, operation)


def in_memory_all(tensors: Sequence[Tensor], operation: str) -> list[Tensor]:
    """:func:`in_memory` for each tensor of a list."""
    return [in_memory(tensor, operation) for tensor in tensors]


def _unwrapped(tensor: Tensor, operation: str) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return in_memory(tensor.wait(), operation)
    if type(tensor).__torch_dispatch__ is _NO_DISPATCH:
        return tensor
    raise UnsupportedError(
        f"{operation}: expected a tensor with data in memory, got a {type(tensor).__name__}; pass "
        "its local part, as in tensor.to_local()"
    )
