"""Native waits do not count the time in which their process did not run; and mutants of that."""

import os
import subprocess

import pytest

from tests.proof.races.mutants import SIGNAL, VARIABLE, Mutant, write_sources
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, PLAIN, compile_to

LOOK = "looked = now;\n    store_relaxed_sys("
MUTANTS = {
    "the suspension counts": Mutant(
        SIGNAL, "started += unwatched_ns(", "if (!CHOSEN) started += unwatched_ns("
    ),
    "no look is noted": Mutant(SIGNAL, LOOK, f"if (!CHOSEN) {LOOK}"),
}

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


def test_a_suspension_does_not_count(tmp_path):
    write_sources(tmp_path, MUTANTS)
    program = compile_to(
        tmp_path / "suspension_test",
        tmp_path / "kernels/include",
        ROOT / "tests/proof/races/suspension_test.cpp",
        tmp_path / "kernels/host/waiter.cpp",
        flags=PLAIN,
        extra=(f"-I{tmp_path}", "-include", str(tmp_path / "chosen.h")),
    )

    def looks(mutant: int) -> str:
        environment = {**os.environ, VARIABLE: str(mutant)}
        done = subprocess.run([program], capture_output=True, text=True, env=environment)
        return done.stdout + done.stderr

    # The first look begins the wait, and the timeout of 100 looks must be exceeded.
    assert looks(0) == "103\n"
    assert looks(1) == "50\n"  # the look that follows the suspension
    assert looks(2) != "103\n"
