# SPDX-License-Identifier: Apache-2.0
"""The search for mutants of the PTX that no job shows, and for reasons that explain none.

A mutant is a pair: where it is made (a job, or a subunit), and the name of its access. A
reason is a pattern of such names, as ``ACCESS`` or as ``WHERE: ACCESS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Mutant = tuple[str, str]
RIGHT = "right"
# On a busy machine all waits of a job may be long, or none, and a wait's first look and its polls
# are accesses of their own: what one run does not show another one may.
RUNS = 3


def is_explained(mutant: Mutant, reasons: Iterable[str]) -> bool:
    """Tells whether one of the patterns is of this mutant."""
    where, access = mutant
    return any(
        re.match(known, name) for known in reasons for name in (access, f"{where}: {access}")
    )


def unexplained(
    mutants: list[Mutant],
    reasons: Iterable[str],
    outcomes: Callable[[list[Mutant]], Mapping[Mutant, Any]],
) -> list[Mutant]:
    """Those that show in none of ``RUNS`` runs and that no reason is for.

    ``outcomes`` runs mutants and returns for each of them ``RIGHT``, or what went wrong.
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
    """The reasons that are of none of these mutants."""
    given = list(mutants)
    return [known for known in reasons if not any(is_explained(each, [known]) for each in given)]
