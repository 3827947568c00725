# SPDX-License-Identifier: Apache-2.0
"""The templates under ThreadSanitizer, several lanes per team, and mutants that it must reject."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.proof.races.mutants import (
    EVERYWHERE,
    GATHER,
    LEVELS,
    SCATTER,
    SIGNAL,
    SYNC,
    VARIABLE,
    Mutant,
    Team,
    of_this_run,
    survivors,
    without,
    write_sources,
)
from tests.support import ROOT
from tests.support.compiler import COMPILER, LOW_PRIORITY, NEEDS_COMPILER, compile_to

# World, channels, lanes per team, rounds. Other worlds use the same code: schedule_test.cpp proves
# the arithmetic for 1 to 16 ranks.
TEAMS: list[Team] = [
    (1, 1, 2, 1),
    (2, 1, 1, 3),
    (2, 1, 2, 3),
    (2, 2, 3, 2),
    (3, 1, 2, 2),
    (4, 2, 1, 2),
    (7, 1, 2, 1),
    (8, 1, 2, 1),
]

WAIT = "reached(load_acquire_sys(word_at(v, team.channel(), site)), want)"
ONE_HOP = (
    "e.ops.reduce(e.team, {result, false, nullptr}, HopSources{e.all_sources()}, mine.bytes,\n"
    "               e.world());"
)
EARLY = "e.release(Stream::kShared, p, mine.bytes, mine.bytes);"
MUTANTS = {
    **EVERYWHERE,
    "data read without waiting": Mutant(
        SIGNAL, f"if ({WAIT}) return", f"if ((CHOSEN && site.item <= 1) || {WAIT}) return"
    ),
    "exchanged buffer returned at once": Mutant(
        "include/ringcomm/collectives/exchange.h",
        "if (e.zero_copy(span)) RC_RETURN",
        "if (!CHOSEN && e.zero_copy(span)) RC_RETURN",
    ),
    "reduced buffer returned at once": Mutant(
        SCATTER, "if (e.zero_copy(chunk)) RC_RETURN", "if (!CHOSEN && e.zero_copy(chunk)) RC_RETURN"
    ),
    "shared buffer returned at once": Mutant(
        GATHER, "  if (stays)\n    RC_RETURN", "  if (!CHOSEN && stays)\n    RC_RETURN"
    ),
    "acknowledged before one hop has been reduced": Mutant(
        "include/ringcomm/collectives/all_reduce.h",
        f"  {ONE_HOP}",
        f"  if (CHOSEN) e.each_by_lanes(all, [&](int p) {{ {EARLY} }});\n  {ONE_HOP}",
    ),
    "partial sums of a piece in the place of the next": Mutant(
        LEVELS, "e.rank(), j + 1);", "e.rank(), CHOSEN ? 1 : j + 1);"
    ),
    "partial sums acknowledged before they are added": without(
        LEVELS, SYNC, f"{SYNC}\n  e.each_by_lanes({{1, e.world()}}, [&](int p) {{\n    if (sends"
    ),
    "partial sums added before all are found": without(
        LEVELS, SYNC, f"{SYNC}\n  e.ops.reduce_groups("
    ),
}
WRONG_ARGUMENTS = 2
SHOWING: list[Team] = [(2, 1, 2, 20), (4, 1, 2, 10)]

pytestmark = [
    pytest.mark.compiles,
    NEEDS_COMPILER,
]


@pytest.fixture(scope="module")
def program(sanitized_objects, tmp_path_factory) -> Path:
    """Builds the program of all mutants; with number 0 it is the right program."""
    folder = tmp_path_factory.mktemp("races")
    write_sources(folder, MUTANTS)
    return compile_to(
        folder / "races",
        folder / "kernels/include",
        ROOT / "tests/proof/races/race_test.cpp",
        *sanitized_objects,
        extra=(f"-I{folder}", "-include", str(folder / "chosen.h")),
    )


def run(program: Path, team: Team, mutant: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        VARIABLE: str(mutant),
    }
    # A mutant may wait for an event that never happens.
    timeout_ms = ["1000"] if mutant > 0 else []
    arguments = [*LOW_PRIORITY, str(program), *map(str, team), *timeout_ms]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode != WRONG_ARGUMENTS, arguments
    return done


def assert_right(program: Path, teams: Sequence[Team]) -> None:
    for team in teams:
        done = run(program, team)
        assert (done.returncode, done.stdout) == (0, "ok\n"), f"{team}: {done.stderr[:4000]}"


def test_no_race_and_right_results(program):
    assert_right(program, of_this_run(TEAMS))


def test_mutants_are_rejected(program):
    assert_right(program, SHOWING)

    def passes(name: str, number: int) -> bool:
        return all(run(program, team, number).returncode == 0 for team in SHOWING)

    assert survivors(MUTANTS, passes) == []


def test_schedule_compiles(tmp_path):
    """The schedule's proofs are static assertions; a wrong schedule must not compile."""
    source = str(ROOT / "tests/proof/races/schedule_test.cpp")
    command = [str(COMPILER), "-std=c++20", "-fsyntax-only", "-fconstexpr-ops-limit=1000000000"]
    include = ROOT / "kernels/include"
    right = subprocess.run(
        [*command, f"-I{include}", f"-I{ROOT}", source], capture_output=True, text=True, check=False
    )
    assert right.returncode == 0, right.stderr
    mutated = tmp_path / "include"
    shutil.copytree(include, mutated)
    schedule = mutated / "ringcomm/core/schedule.h"
    text = schedule.read_text()
    assert "rank + 2 * world - 1 - hop" in text
    schedule.write_text(text.replace("rank + 2 * world - 1 - hop", "rank + 2 * world - hop"))
    # The first failing proof ends the compilation.
    wrong = subprocess.run(
        [*command, "-fmax-errors=1", f"-I{mutated}", f"-I{ROOT}", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode != 0
    assert "ring_reduce_hands_on" in wrong.stderr
