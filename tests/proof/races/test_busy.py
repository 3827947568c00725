"""Waiters on a core that others want: they sleep, and do not yield to who computes."""

import os
import subprocess

import pytest

from tests.proof.races.mutants import VARIABLE, Mutant, write_sources
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, PLAIN, compile_to

MUTANTS = {
    "a spinner keeps the core from its peer": Mutant(
        "host/waiter.cpp", "pause.core_shared ? 0 :", "!CHOSEN && pause.core_shared ? 0 :"
    ),
    "yields go on": Mutant(
        "host/waiter.cpp",
        "if (begin_ns < until_ns) return false;",
        "if (!CHOSEN && begin_ns < until_ns) return false;",
    ),
}
ITEMS = 40

pytestmark = [pytest.mark.deadlines, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program of all mutants."""
    folder = tmp_path_factory.mktemp("busy")
    write_sources(folder, MUTANTS, [])
    return compile_to(
        folder / "busy_test",
        folder / "kernels/include",
        ROOT / "tests/proof/races/busy_test.cpp",
        folder / "kernels/host/waiter.cpp",
        flags=PLAIN,
        extra=("-include", str(folder / "chosen.h")),
    )


def run(program, what, mutant=0):
    environment = {**os.environ, VARIABLE: str(mutant)}
    command = [program, what, "120"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_ranks_on_one_core_sleep_for_each_other(program):
    # Each item makes one of them wait for the other, which needs the core.
    assert run(program, "answer")[0] >= ITEMS // 2
    assert run(program, "answer", 1)[0] < ITEMS // 2


def test_nobody_yields_again_and_again_to_who_computes(program):
    small, huge = run(program, "yield")
    assert small > 0
    assert huge == 0
    assert run(program, "yield", 2)[0] == 0
