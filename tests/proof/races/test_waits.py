# SPDX-License-Identifier: Apache-2.0
"""How host threads wait: which threads they wake and yield to, and which time counts; and mutants.

The peer wakes a sleeper, not the end of its nap. On a core that other threads want, a waiter
sleeps, and does not yield to a computing thread. A wait does not count the time in which its
process did not run.
"""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import SIGNAL, VARIABLE, Mutant, write_sources
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, OPTIMISED, compile_to

WAITER = "host/waiter.cpp"
# Makes kSleepNs a variable, so that the program chooses how long a sleep lasts.
SLEEP = Mutant(
    "host/waiter.h", "static constexpr uint64_t kSleepNs", "static inline uint64_t kSleepNs"
)
WAKES = "if (load_relaxed_sys(sleeping) != 0) team.wake(word);"
LOOK = "looked = now;\n    store_relaxed_sys("
ASLEEP = {
    "nobody looks for a sleeper": Mutant(SIGNAL, WAKES, f"if (!CHOSEN) {WAKES}"),
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
BESIDE = {
    "the core is not left out": Mutant(
        WAITER, "CPU_CLR(core - 1,", "if (!CHOSEN) CPU_CLR(core - 1,"
    ),
    "nothing is given back": Mutant(WAITER, "if (apart_ &&", "if (!CHOSEN && apart_ &&"),
    "others are overruled": Mutant(
        WAITER, "CPU_EQUAL(&now, &meanwhile_)", "(CHOSEN || CPU_EQUAL(&now, &meanwhile_))"
    ),
    "a thread of all cores is fixed to those of the moment": Mutant(
        WAITER, "known.follows_cpuset ? all", "!CHOSEN && known.follows_cpuset ? all"
    ),
    "a thread of some cores gets all": Mutant(
        WAITER, "CPU_EQUAL(&widest, &cores)", "(CHOSEN || CPU_EQUAL(&widest, &cores))"
    ),
    "waits do not sleep apart": Mutant(
        WAITER,
        "= sleep_apart(pause.peer_core)",
        "= sleep_apart(CHOSEN ? nullptr : pause.peer_core)",
    ),
    "crowded ranks sleep apart": Mutant(
        WAITER, "crowded = policy_.yields != 0", "crowded = !CHOSEN && policy_.yields != 0"
    ),
}
MUTANTS = {
    **ASLEEP,
    **BESIDE,
    "a spinner keeps the core from its peer": Mutant(
        WAITER, "pause.core_shared ? 0 :", "!CHOSEN && pause.core_shared ? 0 :"
    ),
    "yields go on": Mutant(
        WAITER,
        "if (begin_ns < until_ns) return false;",
        "if (!CHOSEN && begin_ns < until_ns) return false;",
    ),
    "the suspension counts": Mutant(
        SIGNAL, "started += unwatched_ns(", "if (!CHOSEN) started += unwatched_ns("
    ),
    "no look is noted": Mutant(SIGNAL, LOOK, f"if (!CHOSEN) {LOOK}"),
}
LIMIT_S = 120
ANSWERS = 40

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Builds the program of all mutants."""
    folder = tmp_path_factory.mktemp("waits")
    write_sources(folder, MUTANTS, [SLEEP])
    return compile_to(
        folder / "wait_test",
        folder / "kernels/include",
        ROOT / "tests/proof/races/wait_test.cpp",
        folder / "kernels" / WAITER,
        flags=OPTIMISED,
        extra=(f"-I{folder}", "-include", str(folder / "chosen.h")),
    )


def run(program: Path, what: str, mutant: str = "", limit_s: int = LIMIT_S):
    number = 1 + list(MUTANTS).index(mutant) if mutant else 0
    environment = {**os.environ, VARIABLE: str(number)}
    command = [str(program), what, str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def numbers(program: Path, what: str, mutant: str = "") -> list[int]:
    done = run(program, what, mutant)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_sleepers_are_woken(program):
    done = run(program, "wake")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_mutants_sleep_on(program):
    with ThreadPoolExecutor() as pool:
        ends = pool.map(lambda name: run(program, "wake", name, 2).returncode, ASLEEP)
    assert dict(zip(ASLEEP, ends, strict=True)) == dict.fromkeys(ASLEEP, -signal.SIGALRM)


def test_ranks_on_one_core_sleep_for_each_other(program):
    # At each item one of the ranks waits for the other, which needs the core.
    assert numbers(program, "answer")[0] >= ANSWERS // 2
    assert numbers(program, "answer", "a spinner keeps the core from its peer")[0] < ANSWERS // 2


def test_nobody_yields_again_and_again_to_who_computes(program):
    small, huge = numbers(program, "yield")
    assert small > 0
    assert huge == 0
    assert numbers(program, "yield", "yields go on")[0] == 0


def test_a_suspension_does_not_count(program):
    # The first look begins the wait, and then the timeout of 100 looks must be exceeded.
    assert numbers(program, "suspend") == [103]
    assert numbers(program, "suspend", "the suspension counts") == [50]  # the look after it
    done = run(program, "suspend", "no look is noted")
    assert done.stdout + done.stderr != "103\n"


APART = [
    # The cores during the sleep, after it, and last requested; the number of calls that set them.
    "fb ff ffffffff 3",
    "fb ff ffffffff 2",
    "b f f 4",
    "f f 0 0",
    "4 4 0 0",
    "ff ff 0 0",
    "b 30 b 1",
    "3",
    "0",
]


def test_a_sleeper_leaves_out_the_core_of_its_peer(program):
    assert run(program, "apart").stdout.splitlines() == APART
    for mutant in BESIDE:
        assert run(program, "apart", mutant).stdout.splitlines() != APART, mutant
