# SPDX-License-Identifier: Apache-2.0
"""Mutants of the templates that a race test must find.

All mutants of a test are compiled into one program, and an environment variable selects the mutant:
one compilation instead of dozens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

VARIABLE = "CHOSEN_MUTANT"

# The arguments of `race_test` or `device_race_test`, beginning with the world.
Team = tuple[int, ...]

# ``make tsan`` runs every world. A large world uses the same code as a small one.
EVERYTHING = os.environ.get("RINGCOMM_TSAN") == "all"
LARGEST_WORLD = 4


def of_this_run(teams: Sequence[Team]) -> list[Team]:
    """Returns the teams that this run uses: ``make test`` leaves out large worlds."""
    return [team for team in teams if EVERYTHING or team[0] <= LARGEST_WORLD]


LL, ENDPOINT = "include/ringcomm/protocol/ll.h", "include/ringcomm/protocol/endpoint.h"
ATOMICS, SIGNAL = "include/ringcomm/core/atomics.h", "include/ringcomm/protocol/signal.h"
SCATTER, GATHER = (
    "include/ringcomm/collectives/reduce_scatter.h",
    "include/ringcomm/collectives/all_gather.h",
)
LEVELS = "host/two_levels.h"
SYNC = "e.team.sync();"
LOAD, STORE = "__atomic_load_n(word, __ATOMIC_", "__atomic_store_n(word, value, __ATOMIC_"


@dataclass(frozen=True)
class Mutant:
    """Replaces `text` of a header below kernels/; in `replacement`, CHOSEN is true for this mutant.

    `teams` are the teams that show the mutant; if empty, the test's usual teams do.
    """

    header: str
    text: str
    replacement: str
    teams: tuple[Team, ...] = ()


def without(header: str, sync: str, around: str, *teams: Team) -> Mutant:
    """Returns the mutant that lacks the `sync` in `around`."""
    assert around.count(sync) == 1, around
    return Mutant(header, around, around.replace(sync, f"if (!CHOSEN) {sync}"), teams)


# Mutants that both tests must find, on host threads and in the kernels' blocks.
EVERYWHERE = {
    "acquire loads relaxed": Mutant(
        ATOMICS, f"return {LOAD}ACQUIRE", f"return CHOSEN ? {LOAD}RELAXED) : {LOAD}ACQUIRE"
    ),
    "release stores relaxed": Mutant(
        ATOMICS, f"{STORE}RELEASE", f"CHOSEN ? {STORE}RELAXED) : {STORE}RELEASE"
    ),
    "sent before the team is done": without(
        ENDPOINT, "team.sync();", "team.sync();\n    each_by_lanes(readers"
    ),
    "acknowledged before all has been reduced": without(
        SCATTER, SYNC, f"{SYNC}\n  e.each_by_lanes({{1, e.world()}}, [&](int p) {{ e.release("
    ),
    "slot reused before it was read": Mutant(
        ENDPOINT, "v.layout.held_before(epoch))", "v.layout.held_before(epoch - (CHOSEN ? 64 : 0)))"
    ),
    "returned while peers read the buffer": Mutant(
        ENDPOINT, "sent(s, reader) + items_sent);", "sent(s, reader) + (CHOSEN ? 0 : items_sent));"
    ),
    "a slot taken for free that was not found so": Mutant(
        ENDPOINT,
        "if (!reached(in(s, reader).consumed, epoch))",
        "if (!CHOSEN && !reached(in(s, reader).consumed, epoch))",
    ),
    "the second time around counted from the first": Mutant(
        ENDPOINT, "st.base += st.items;", "if (!CHOSEN) st.base += st.items;"
    ),
}


# On a busy machine, in one run, threads may never meet where a mutant breaks them.
TRIES = 6


def survivors(mutants: Mapping[str, Mutant], passes: Callable[[str, int], bool]) -> list[str]:
    """Returns the names of the mutants that ``TRIES`` runs of each do not show.

    Args:
        mutants: numbered from 1, as :func:`write_sources` has them.
        passes: runs the mutant of a name and number, and returns whether it found nothing.
    """

    def survives(name: str, number: int) -> bool:
        return all(passes(name, number) for _ in range(TRIES))

    with ThreadPoolExecutor(2) as pool:
        alive = list(pool.map(survives, mutants, range(1, len(mutants) + 1)))
    return [name for name, lives in zip(mutants, alive, strict=True) if lives]


def write_sources(root: Path, mutants: Mapping[str, Mutant], always: Iterable[Mutant] = ()) -> None:
    """Writes the kernels' folder with all mutants below ``root``; chosen.h must be included first.

    Args:
        root: a new folder.
        mutants: numbered from 1; with 0 in the environment, none is chosen.
        always: changes that are not mistakes and are always applied.
    """
    for part in ("include", "host", "cuda"):
        shutil.copytree(ROOT / "kernels" / part, root / "kernels" / part)
    for number, mutant in [(0, each) for each in always] + list(enumerate(mutants.values(), 1)):
        header = root / "kernels" / mutant.header
        source = header.read_text()
        assert source.count(mutant.text) == 1, f"{header.name}: {mutant.text!r}, to be mutated"
        replacement = mutant.replacement.replace("CHOSEN", f"(chosen_mutant == {number})")
        header.write_text(source.replace(mutant.text, replacement))
    (root / "chosen.h").write_text(
        "#include <sched.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        f'inline const int chosen_mutant = atoi(getenv("{VARIABLE}"));\n'
    )
