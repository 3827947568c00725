# SPDX-License-Identifier: Apache-2.0
"""The optimizer's collectives under ThreadSanitizer, and mutants that the test must reject."""

from pathlib import Path

import pytest

from tests.proof.races import test_races as races
from tests.proof.races.mutants import SIGNAL, Mutant, of_this_run, survivors, without, write_sources
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, compile_to

TEAMS = [(1, 1, 2, 4), (2, 1, 1, 8), (2, 2, 3, 4), (3, 1, 2, 8), (4, 2, 1, 4), (8, 1, 1, 4)]
SHOWING = [(2, 1, 2, 20), (4, 1, 2, 12)]

BUCKETS = "include/ringcomm/optimizer/buckets.h"
REACHED = "reached(load_acquire_sys(word_at(v, team.channel(), site)), want)"
RETURN = "RC_RETURN_IF_FAILED(e.drained(e.pairs, p, 1));"
MUTANTS = {
    "parameters stored before their owner offers": Mutant(
        SIGNAL, f"if ({REACHED})", f"if ((CHOSEN && !site.on_consumed) || {REACHED})"
    ),
    "returned while peers read and store": Mutant(BUCKETS, RETURN, f"if (!CHOSEN) {RETURN}"),
    "returned before the team has read and stored": without(
        BUCKETS,
        "e.team.sync();",
        "e.team.sync();\n  e.each_by_lanes(all, [&](int p) {\n    e.release(",
    ),
    "a chunk's edge updated twice": Mutant(
        BUCKETS,
        "{begin, elems - begin < chunk_elems ? elems : begin + chunk_elems}",
        "{begin, elems - begin < chunk_elems + (CHOSEN ? 1 : 0)\n"
        "                       ? elems\n"
        "                       : begin + chunk_elems + (CHOSEN ? 1 : 0)}",
    ),
}

pytestmark = [
    pytest.mark.compiles,
    NEEDS_COMPILER,
]


@pytest.fixture(scope="module")
def program(sanitized_objects, tmp_path_factory) -> Path:
    """Builds the program of all mutants; with number 0 it is the right program."""
    folder = tmp_path_factory.mktemp("step_races")
    write_sources(folder, MUTANTS)
    return compile_to(
        folder / "step_races",
        folder / "kernels/include",
        ROOT / "tests/proof/races/step_race_test.cpp",
        *sanitized_objects,
        extra=("-include", str(folder / "chosen.h")),
    )


def test_no_race_and_right_results(program):
    races.assert_right(program, of_this_run(TEAMS))


def test_mutants_are_rejected(program):
    races.assert_right(program, SHOWING)

    def passes(name: str, number: int) -> bool:
        return all(races.run(program, team, number).returncode == 0 for team in SHOWING)

    assert survivors(MUTANTS, passes) == []
