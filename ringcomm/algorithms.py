"""The algorithms of collectives, by the names that each operation has for them.

The algorithm that makes each phase of a call in one hop is "one_shot". An all-reduce has two
phases, a reduce-scatter and an all-gather, so there it is "two_shot". Options that hold for several
collectives name it "one_shot".
"""

from __future__ import annotations

from ringcomm import _native

__all__ = ["algorithm_name", "algorithms_of", "spelled"]


def algorithms_of(operation: str) -> dict[str, int]:
    """Returns the code of each algorithm by the name that ``operation`` has for it."""
    return _native.ALGORITHMS_OF.get(operation, _native.ALGORITHMS)


def algorithm_name(operation: str, code: int) -> str:
    """Returns the name that ``operation`` has for an algorithm; "" for a code that has none."""
    return next((name for name, each in algorithms_of(operation).items() if each == code), "")


def spelled(algorithm: str, operation: str) -> str:
    """Returns the name that ``operation`` has for an algorithm that an option names."""
    return algorithm_name(operation, _native.ALGORITHMS[algorithm])
