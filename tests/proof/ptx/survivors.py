# SPDX-License-Identifier: Apache-2.0
"""Finds mutants of the PTX that no job shows, and reasons that explain no mutant.

A mutant is a pair: its place (a job or a subunit), and the name of its access. A
reason is a pattern of such names, as ``ACCESS`` or as ``WHERE: ACCESS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Mutant = tuple[str, str]
RIGHT = "right"
# On a busy machine all waits of a job may be long or none. A wait's first look and its polls are
# different accesses, so another run may show a mutant that one run does not show.
RUNS = 3


def is_explained(mutant: Mutant, reasons: Iterable[str]) -> bool:
    """Tells whether one of the patterns matches this mutant."""
    where, access = mutant
    return any(
        re.match(known, name) for known in reasons for name in (access, f"{where}: {access}")
    )


def unexplained(
    mutants: list[Mutant],
    reasons: Iterable[str],
    outcomes: Callable[[list[Mutant]], Mapping[Mutant, Any]],
) -> list[Mutant]:
    """Returns the mutants that no reason explains and that none of ``RUNS`` runs shows.

    ``outcomes`` runs mutants and returns for each of them ``RIGHT``, or the failure.
    """
    known = list(reasons)
    left = mutants
    for _ in range(RUNS):
        found = outcomes(left)
        assert set(found) == set(left)
        left = [each for each in left if found[each] == RIGHT and not is_explained(each, known)]
        if not left:
            break
    return left


def stale(reasons: Iterable[str], mutants: Iterable[Mutant]) -> list[str]:
    """Returns the reasons that match none of these mutants."""
    given = list(mutants)
    return [known for known in reasons if not any(is_explained(each, [known]) for each in given)]
