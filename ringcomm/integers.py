# SPDX-License-Identifier: Apache-2.0
"""Checks of number arguments: integers, lists of integers and real numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any

LEAST, MOST = -(2**63), 2**63 - 1


def integer(value: Any, *, most: int = MOST, bools: bool = False) -> int | None:
    """Returns the value as an int, or None if it is not an integer of 64 bits.

    Any object with ``__index__`` is an integer: NumPy's integers, integer tensors of one element,
    and users' classes. Bools are integers only if ``bools`` is set: ``keep=True`` does not mean 1.

    Args:
        value: any object.
        most: the largest accepted integer; the least is ``LEAST``.
        bools: accept True and False, also NumPy's and torch's, as 1 and 0, for example for ranks.
    """
    number = value if type(value) is int else _index_of(value, bools)
    return number if number is not None and LEAST <= number <= most else None


def _index_of(value: Any, bools: bool) -> int | None:
    if _is_bool(value):
        return int(value) if bools else None
    try:
        return int(operator.index(value))
    except TypeError:
        return None
    except RuntimeError:
        # A tensor without data, for example on the device "meta".
        if hasattr(value, "is_meta"):
            return None
        raise


def _is_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    # Zero-dimensional bools of NumPy or torch.
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool") and value.ndim == 0


def integers(values: Any, *, bools: bool = False) -> list[int] | None:
    """Returns the integers of an iterable, or None if an element is not an integer of 64 bits.

    Args:
        values: any object; accepted are lists, ranges, NumPy arrays, one-dimensional tensors and
            other iterables.
        bools: as in :func:`integer`.
    """
    if type(values) is not list and not isinstance(values, Iterable):
        return None
    found = []
    try:
        for value in values:
            number = integer(value, bools=bools)
            if number is None:
                return None
            found.append(number)
    except TypeError:  # a scalar array or tensor: its type is iterable, but it is not
        return None
    return found


def real(value: Any) -> float | None:
    """Returns the value as a float, or None if it is neither a real number nor an integer.

    NumPy's numbers are accepted; bools are not.
    """
    if type(value) is float:
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, Real):
        return float(value)
    number = integer(value)
    return None if number is None else float(number)
