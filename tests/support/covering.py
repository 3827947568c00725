# SPDX-License-Identifier: Apache-2.0
"""Covering arrays: a few cases that contain each pair of values, instead of all combinations.

``@covering(stage=STAGES, dtype=DTYPES)`` parametrizes a test so that each pair of values of two
parameters occurs in a case; with ``strength=1``, each single value. ``make test-all`` sets
RINGCOMM_TEST_CASES=all, which runs all combinations and the values given to :func:`in_test_all`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

import pytest

Case: TypeAlias = dict[str, Any]
#: Takes some or all parameters of a case. False: no further values make the case valid.
Valid: TypeAlias = Callable[[Mapping[str, Any]], bool]

EVERY_CASE = os.environ.get("RINGCOMM_TEST_CASES") == "all"

_Chosen: TypeAlias = dict[str, int]  # by axis, the index of the value


def in_test_all(*values: Any) -> tuple[Any, ...]:
    """Returns the values in ``make test-all``, otherwise nothing."""
    return values if EVERY_CASE else ()


def thinned(values: Iterable[Any], step: int) -> list[Any]:
    """Returns every ``step``-th value, starting with the first; in ``make test-all`` all values."""
    return list(values)[:: 1 if EVERY_CASE else step]


def is_valid(case: Mapping[str, Any]) -> bool:
    """Accepts every case."""
    return True


class _Array:
    """Builds a covering array case by case."""

    def __init__(self, axes: Mapping[str, Sequence[Any]], valid: Valid, strength: int) -> None:
        self._axes = axes
        self._valid = valid
        self._strength = strength
        self._uses: Counter[tuple[str, int]] = Counter()
        # A dict is an ordered set, so the array is the same in every process.
        self._open = dict.fromkeys(self._tuples({name: len(axes[name]) for name in axes}))

    def _tuples(self, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, int], ...]]:
        for names in combinations(self._axes, self._strength):
            for numbers in product(*(range(sizes[name]) for name in names)):
                yield tuple(zip(names, numbers, strict=True))

    def case_of(self, chosen: _Chosen) -> Case:
        """Returns the values at these indices, in the order of the axes."""
        return {name: self._axes[name][chosen[name]] for name in self._axes if name in chosen}

    def _completed(self, chosen: _Chosen, left: Sequence[str]) -> _Chosen | None:
        """Returns a valid case that contains these values, or None."""
        if not self._valid(self.case_of(chosen)):
            return None
        if not left:
            return chosen
        for number in range(len(self._axes[left[0]])):
            found = self._completed({**chosen, left[0]: number}, left[1:])
            if found is not None:
                return found
        return None

    def _gain(self, chosen: _Chosen, name: str, number: int) -> int:
        """Returns how many open tuples this value completes together with the chosen values."""
        order = list(self._axes)
        closed = 0
        for others in combinations(chosen, self._strength - 1):
            names = sorted((*others, name), key=order.index)
            closed += tuple((n, number if n == name else chosen[n]) for n in names) in self._open
        return closed

    def _extended(self, chosen: _Chosen) -> _Chosen:
        """Gives each axis the value that completes most tuples; of equal ones the least used."""
        for name in sorted(self._axes, key=lambda name: -len(self._axes[name])):
            if name in chosen:
                continue
            numbers = sorted(
                range(len(self._axes[name])),
                key=lambda number: (-self._gain(chosen, name, number), self._uses[name, number]),
            )
            for number in numbers:
                found = {**chosen, name: number}
                if self._completed(found, [each for each in self._axes if each not in found]):
                    chosen = found
                    break
        return chosen

    def cases(self) -> Iterator[Case]:
        """Yields cases until each tuple that a valid case can contain has occurred."""
        while self._open:
            first = next(iter(self._open))
            left = [name for name in self._axes if name not in dict(first)]
            if self._completed(dict(first), left) is None:
                del self._open[first]
                continue
            chosen = self._extended(dict(first))
            for names in combinations(self._axes, self._strength):
                self._open.pop(tuple((name, chosen[name]) for name in names), None)
            self._uses.update(chosen.items())
            yield self.case_of(chosen)


def covering_array(
    axes: Mapping[str, Sequence[Any]], valid: Valid = is_valid, strength: int = 2
) -> list[Case]:
    """Returns cases in which each tuple of values that a valid case can have occurs.

    Args:
        axes: the values of each parameter.
        valid: returns False for invalid cases; also called with incomplete cases.
        strength: 2 covers pairs of values of two parameters, and 1 values.
    """
    return list(_Array(axes, valid, min(strength, len(axes))).cases())


def product_of(axes: Mapping[str, Sequence[Any]], valid: Valid = is_valid) -> list[Case]:
    """Returns all valid cases."""
    cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [case for case in cases if valid(case)]


def name_of(value: Any) -> str:
    """Returns the part of a test's name that represents a value."""
    if isinstance(value, (tuple, list)):
        return "+".join(map(name_of, value))
    return str(getattr(value, "__name__", value)).removeprefix("torch.").replace(" ", "_")


def covering(
    strength: int = 2,
    valid: Valid = is_valid,
    indirect: bool | Sequence[str] = False,
    **axes: Sequence[Any] | Mapping[str, Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test with a covering array of its parameters, in test-all with all cases.

    Args:
        strength: see :func:`covering_array`.
        valid: returns False for invalid cases; gets the name of a value if the axis has names.
        indirect: the parameters that fixtures receive, as in ``parametrize``.
        axes: the values of each parameter, or a mapping from names to values.
    """
    named: dict[str, dict[str, Any]] = {}
    for axis, values in axes.items():
        given = values if isinstance(values, Mapping) else {name_of(each): each for each in values}
        assert len(given) == len(values), f"{axis}: two values have one name"
        named[axis] = dict(given)

    def accepts(case: Mapping[str, Any]) -> bool:
        return valid(
            {a: n if isinstance(axes[a], Mapping) else named[a][n] for a, n in case.items()}
        )

    keys = {axis: tuple(values) for axis, values in named.items()}
    cases = product_of(keys, accepts) if EVERY_CASE else covering_array(keys, accepts, strength)
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(*(named[a][n] for a, n in case.items()), id="-".join(case.values()))
            for case in cases
        ],
        indirect=indirect,
    )
