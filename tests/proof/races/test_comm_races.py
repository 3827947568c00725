"""Communicators and messengers of the host under ThreadSanitizer, and mutants of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import Mutant, write_sources
from tests.proof.races.test_races import COMPILER, ROOT, compile_to, run

# world, generations, rounds
WORLDS = [(2, 6, 4), (3, 6, 2), (4, 2, 2)]
SHOWING = (2, 20, 12)
RUNS = 10
HOST = ROOT / "kernels/host"
# What is compiled once, apart from what other programs have too, and what is compiled again with
# the mutants in it.
STEADY = (
    "comm",
    "comm_optimizer",
    "describe",
    "fault_plan",
    "heap",
    "peer_heap",
    "recorder",
)
MUTATED = ("comm_report", "messenger", "messenger_wait", "retired")
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
        "  std::unique_lock lock(mutex_);\n  const uint64_t started_ns = Waiter::now_ns();\n",
        "  std::unique_lock lock(mutex_);\n"
        # For long enough that the thread in the background takes its turn meanwhile.
        "  if (CHOSEN) lock.unlock(), progress(), usleep(2000), progress(), lock.lock();\n"
        "  const uint64_t started_ns = Waiter::now_ns();\n",
    ),
    "region returned without a farewell": Mutant(
        "host/retired.cpp",
        "if (load_acquire_sys(&line->farewell) != 0) continue;",
        "if (CHOSEN || load_acquire_sys(&line->farewell) != 0) continue;",
    ),
    "region never returned": Mutant(
        "host/retired.cpp",
        "    if (!free_of_peers(region)) return false;",
        "    if (CHOSEN || !free_of_peers(region)) return false;",
    ),
}

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.shares("sanitized"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def programs(sanitized_objects, tmp_path_factory):
    """The right program, and the one of all mutants."""
    folder = tmp_path_factory.mktemp("comm_races")
    include = ROOT / "kernels/include"
    mutants = folder / "mutants"
    write_sources(mutants, MUTANTS)
    mutated = mutants / "kernels/host"
    chosen = ("-c", "-include", str(mutants / "chosen.h"))
    jobs: list[tuple[Path, Path, tuple[str, ...]]] = [
        (HOST / f"{name}.cpp", folder / f"{name}.o", ("-c",)) for name in (*STEADY, *MUTATED)
    ]
    jobs += [(mutated / f"{name}.cpp", mutants / f"{name}.o", chosen) for name in MUTATED]
    jobs += [(ROOT / "tests/proof/races/comm_race_test.cpp", folder / "main.o", ("-c",))]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: compile_to(job[1], include, job[0], extra=job[2]), jobs))
    steady = [folder / "main.o", *sanitized_objects, *(folder / f"{name}.o" for name in STEADY)]
    return [
        compile_to(folder / name, include, *steady, *(place / f"{each}.o" for each in MUTATED))
        for name, place in (("right", folder), ("mutated", mutants))
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_no_race_and_nothing_left(programs, world):
    done = run(programs[0], world)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(programs, name):
    number = list(MUTANTS).index(name) + 1
    # What two threads do at the same time is not the same in every run.
    assert any(run(programs[1], SHOWING, number).returncode != 0 for _ in range(RUNS))


def test_without_a_mutant_the_other_program_is_right(programs):
    done = run(programs[1], SHOWING)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]
