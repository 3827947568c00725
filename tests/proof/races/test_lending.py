# SPDX-License-Identifier: Apache-2.0
"""A lender gives up or ends while another rank reads its buffer: a success never has torn data."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.proof.races.mutants import ENDPOINT, EVERYWHERE, VARIABLE, Mutant, write_sources
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, UNOPTIMISED, compile_to

DEADLINE_S = 60.0
# Numbers of the reader's stops, one per run, until it ends undisturbed: all its steps and copies.
STOPS = {"all_gather": 15, "single_copy": 15, "reduce_scatter": 10, "all_reduce": 36}
LOOK = "if (!reads_peer_buffers || !aborted(v, peer)) return"
DRAINED = "returned while peers read the buffer"
MUTANTS = {
    "what was read is not verified": Mutant(
        ENDPOINT, LOOK, LOOK.replace("(!reads", "(CHOSEN || !reads")
    ),
    DRAINED: EVERYWHERE[DRAINED],
    "a lender may have ended": Mutant(
        ENDPOINT, "if (team.has_ended(sender))", "if (!CHOSEN && team.has_ended(sender))"
    ),
}

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The right program, unless CHOSEN_MUTANT selects a mutant."""
    folder = tmp_path_factory.mktemp("lending")
    write_sources(folder, MUTANTS)
    return compile_to(
        folder / "lend_test",
        folder / "kernels/include",
        ROOT / "tests/proof/races/lend_test.cpp",
        flags=UNOPTIMISED,
        extra=("-include", str(folder / "chosen.h")),
    )


def run(program: Path, mutant: int = 0) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(program)],
        env={**os.environ, VARIABLE: str(mutant)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_what_was_lent_is_what_was_read_or_the_call_fails(program):
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [word for pair in STOPS.items() for word in map(str, pair)]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(program, name):
    done = run(program, 1 + list(MUTANTS).index(name))
    assert done.returncode == 1
    assert "a success with data of after the lender's call" in done.stdout
