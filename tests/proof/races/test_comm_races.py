"""Communicators and messengers of the host under ThreadSanitizer, and mutants of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import EVERYTHING, Mutant, write_sources
from tests.proof.races.test_races import run
from tests.support import ROOT, together
from tests.support.compiler import NEEDS_COMPILER, compile_to

# World, generations, rounds; the first shows the mutants. Where no mutant is to be shown, a few
# generations have every order of accesses that the sanitizer can judge.
SHOWING = (2, 20, 12)
WORLDS = [SHOWING, (3, 6, 2), (4, 2, 2)] if EVERYTHING else [(2, 6, 12), (3, 2, 2)]
RUNS = 10
# Apart from those that other programs have, too.
SOURCES = (
    "comm",
    "comm_optimizer",
    "comm_report",
    "describe",
    "fault_injection",
    "heap",
    "messenger",
    "messenger_wait",
    "peer_heap",
    "recorder",
    "retired",
)
MUTANTS = {
    "a failed call that returns before the word": Mutant(
        "host/comm_report.cpp",
        "  if (status != Status::kOk) await_raised(",
        "  if (!CHOSEN && status != Status::kOk) await_raised(",
    ),
    "an abort that returns before the word": Mutant(
        "host/comm_report.cpp",
        "  if (record == nullptr) return await_raised(",
        "  if (record == nullptr && CHOSEN) return;\n  if (record == nullptr) return await_raised(",
    ),
    "a failed message that returns before the word": Mutant(
        "host/messenger_wait.cpp", "    await_raised(", "    if (!CHOSEN) await_raised("
    ),
    "acknowledged before it was copied": Mutant(
        "host/messenger.cpp",
        "  if (m.goes == Goes::kThere && bytes > 0) std::memcpy(",
        "  if (CHOSEN) { SoloTeam early{{&comm_.waiter()}}; "
        "acknowledge(early, v, Stream::kMessage, peer, epoch); sched_yield(); }\n"
        "  if (m.goes == Goes::kThere && bytes > 0) std::memcpy(",
    ),
    "completed without the lock": Mutant(
        "host/messenger_wait.cpp",
        "  std::unique_lock lock(mutex_);\n"
        "  note_look();\n  const uint64_t started_ns = watched_ns();\n",
        "  std::unique_lock lock(mutex_);\n"
        # For long enough that the thread in the background takes its turn meanwhile.
        "  if (CHOSEN) lock.unlock(), progress(), usleep(2000), progress(), lock.lock();\n"
        "  note_look();\n  const uint64_t started_ns = watched_ns();\n",
    ),
    "region returned before its peers detach": Mutant(
        "host/retired.cpp",
        "if (load_acquire_sys(&line->detached) != 0) continue;",
        "if (CHOSEN || load_acquire_sys(&line->detached) != 0) continue;",
    ),
    "region never returned": Mutant(
        "host/retired.cpp",
        "    if (!free_of_peers(region)) return false;",
        "    if (CHOSEN || !free_of_peers(region)) return false;",
    ),
}

pytestmark = [
    pytest.mark.compiles,
    NEEDS_COMPILER,
]


@pytest.fixture(scope="module")
def program(sanitized_objects, tmp_path_factory) -> Path:
    """The program of all mutants; with number 0 it is the right one."""
    folder = tmp_path_factory.mktemp("comm_races")
    include = ROOT / "kernels/include"
    write_sources(folder, MUTANTS)
    parts = [
        together(folder / "sources.cpp", (folder / f"kernels/host/{each}.cpp" for each in SOURCES)),
        ROOT / "tests/proof/races/comm_race_test.cpp",
    ]

    def compiled(part: Path) -> Path:
        extra = ("-c", "-include", str(folder / "chosen.h"))
        return compile_to(folder / f"{part.stem}.o", include, part, extra=extra)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, parts))
    return compile_to(folder / "comm_races", include, *objects, *sanitized_objects)


@pytest.mark.parametrize("world", WORLDS)
def test_no_race_and_nothing_left(program, world):
    done = run(program, world)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(program, name):
    number = list(MUTANTS).index(name) + 1
    # What two threads do at the same time is not the same in every run.
    assert any(run(program, SHOWING, number).returncode != 0 for _ in range(RUNS))
