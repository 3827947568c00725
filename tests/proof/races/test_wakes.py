"""Sleepers are woken by the peer, not by the end of their nap; and mutants of that."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import SIGNAL, VARIABLE, Mutant, write_sources
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, PLAIN, compile_to

WAITER = "host/waiter.cpp"
AN_HOUR = Mutant("host/waiter.h", "kSleepNs = 10'000'000;", "kSleepNs = 3'600'000'000'000;")
LOOK = "if (load_relaxed_sys(sleeping) != 0) team.wake(word);"
MUTANTS = {
    "nobody looks for a sleeper": Mutant(SIGNAL, LOOK, f"if (!CHOSEN) {LOOK}"),
    "publications wake nobody": Mutant(
        SIGNAL,
        "wake(team, word, &v.sleepers(reader",
        "if (!CHOSEN) wake(team, word, &v.sleepers(reader",
    ),
    "acknowledgements wake nobody": Mutant(
        SIGNAL,
        "wake(team, word, &v.sleepers(sender",
        "if (!CHOSEN) wake(team, word, &v.sleepers(sender",
    ),
    "asleep without a word": Mutant(
        WAITER,
        "store_relaxed_sys(pause.sleeping, 1);",
        "if (!CHOSEN) store_relaxed_sys(pause.sleeping, 1);",
    ),
    "no call of the kernel": Mutant(
        WAITER, "futex(word, FUTEX_WAKE,", "if (!CHOSEN) futex(word, FUTEX_WAKE,"
    ),
}
ITEMS = 2000

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program of all mutants."""
    folder = tmp_path_factory.mktemp("wake")
    write_sources(folder, MUTANTS, [AN_HOUR])
    return compile_to(
        folder / "wake_test",
        folder / "kernels/include",
        ROOT / "tests/proof/races/wake_test.cpp",
        folder / "kernels/host/waiter.cpp",
        flags=PLAIN,
        extra=(f"-I{folder}", "-include", str(folder / "chosen.h")),
    )


def run(program: Path, mutant: int, limit_s: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: str(mutant)}
    command = [str(program), str(ITEMS), str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_sleepers_are_woken(program):
    done = run(program, 0, 120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_mutants_sleep_on(program):
    with ThreadPoolExecutor() as pool:
        ends = pool.map(lambda mutant: run(program, mutant, 2), range(1, len(MUTANTS) + 1))
    assert {
        name: done.returncode for name, done in zip(MUTANTS, ends, strict=True)
    } == dict.fromkeys(MUTANTS, -signal.SIGALRM)
