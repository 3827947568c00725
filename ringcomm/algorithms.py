# SPDX-License-Identifier: Apache-2.0
"""The algorithms of collectives, under the names that each operation uses.

"one_shot" performs each phase of a call in one hop. An all-reduce has two phases, a reduce-scatter
and an all-gather, so there the same algorithm is named "two_shot". Options for several collectives
name it "one_shot".
"""

from __future__ import annotations

from ringcomm import _native

__all__ = ["algorithm_name", "algorithms_of", "spelled"]


def algorithms_of(operation: str) -> dict[str, int]:
    """Returns the code of each algorithm under the name that ``operation`` uses."""
    return _native.ALGORITHMS_OF.get(operation, _native.ALGORITHMS)


def algorithm_name(operation: str, code: int) -> str:
    """Returns an algorithm's name in ``operation``; "" if the operation lacks the algorithm."""
    return next((name for name, each in algorithms_of(operation).items() if each == code), "")


def spelled(algorithm: str, operation: str) -> str:
    """Converts an algorithm's name in an option to the name that ``operation`` uses."""
    return algorithm_name(operation, _native.ALGORITHMS[algorithm])
