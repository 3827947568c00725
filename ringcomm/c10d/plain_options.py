# SPDX-License-Identifier: Apache-2.0
"""Finds the fields of torch's options objects in memory, for native code to read.

The native calls ``*_for_torch`` read the options of a call from memory. Probes, options objects
with known values, show the offset of a field. If several offsets have the known values in all
probes, or none has, calls with this class of options read each field through torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from ringcomm import _native

__all__ = ["read_from_memory"]

_WORD_BYTES = 8
# Sizes in bytes of the C++ objects of torch's c10d/Types.hpp, up to the last field that is read.
_VALUE_BYTES: dict[Any, int] = {
    AllgatherOptions: 16,
    AllreduceOptions: 48,
    ReduceScatterOptions: 48,
}
_PROBED_OPS = (ReduceOp.MAX, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BXOR)
# The probes' flags, timeouts and ops vary independently, so that no other offset can match.
_PROBED_FLAGS = (True, False, False, True, True)
_PROBED_MS = (0x1234567, 7, 0x7654321, 0x20301, 86_400_000)


def _probes(kind: Any) -> Iterable[Any]:
    for op, flag, milliseconds in zip(_PROBED_OPS, _PROBED_FLAGS, _PROBED_MS, strict=True):
        options = kind()
        options.asyncOp = flag
        options.timeout = timedelta(milliseconds=milliseconds)
        if hasattr(options, "reduceOp"):
            options.reduceOp = op
        yield options


def _value_of(options: Any) -> int:
    """Returns the address of the C++ object: a pybind11 object stores it after its header."""
    return ctypes.c_uint64.from_address(id(options) + object.__basicsize__).value


def _only(offsets: set[int]) -> int | None:
    return offsets.pop() if len(offsets) == 1 else None


def _find(kind: Any, size: int) -> tuple[int, int, int] | None:
    """Returns the offsets of timeout, ``asyncOp`` and op (-1: none), or None if not found."""
    timeouts, flags, ops = set(range(0, size, _WORD_BYTES)), set(range(size)), set(range(size))
    for options, milliseconds in zip(_probes(kind), _PROBED_MS, strict=True):
        value = (ctypes.c_uint8 * size).from_address(_value_of(options))
        word = milliseconds.to_bytes(_WORD_BYTES, "little")
        timeouts = {at for at in timeouts if bytes(value[at : at + _WORD_BYTES]) == word}
        flags = {at for at in flags if value[at] == int(options.asyncOp)}
        if hasattr(options, "reduceOp"):
            ops = {at for at in ops if value[at] == hash(options.reduceOp)}
    timeout, flag = _only(timeouts), _only(flags)
    op = _only(ops) if hasattr(kind(), "reduceOp") else -1
    return None if timeout is None or flag is None or op is None else (timeout, flag, op)


def _is_read(kind: Any, size: int) -> bool:
    is_bound = type(kind).__name__ == "pybind11_type"
    if not is_bound or kind.__basicsize__ < object.__basicsize__ + _WORD_BYTES:
        return False
    found = _find(kind, size)
    if found is None:
        return False
    unset_ms = kind().timeout // timedelta(milliseconds=1)
    _native.read_options_at(kind, object.__basicsize__, *found, unset_ms)
    return True


@cache
def read_from_memory() -> frozenset[Any]:
    """Makes native calls read options from memory; returns the classes for which this works."""
    return frozenset(kind for kind, size in _VALUE_BYTES.items() if _is_read(kind, size))
