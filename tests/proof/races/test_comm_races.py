# SPDX-License-Identifier: Apache-2.0
"""Communicators and messengers of the host under ThreadSanitizer, and mutants of them.

Calls that several threads of a rank share are made by ranks with different numbers of threads.
"""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import EVERYTHING, SIGNAL, Mutant, write_sources
from tests.proof.races.test_races import run
from tests.support import ROOT, together
from tests.support.compiler import NEEDS_COMPILER, compile_to

# World, generations, rounds; the first team shows the mutants. Runs without mutants need few
# generations: these have every order of accesses that the sanitizer can judge.
SHOWING = (2, 20, 12)
WORLDS = [SHOWING, (3, 6, 2), (4, 2, 2)] if EVERYTHING else [(2, 6, 12), (3, 2, 2)]
RUNS = 10
# The sources, except those that other programs compile as well.
SOURCES = (
    "comm",
    "comm_optimizer",
    "comm_report",
    "describe",
    "fault_injection",
    "heap",
    "messenger",
    "messenger_wait",
    "numa",
    "peer_heap",
    "recorder",
    "retired",
    "worker_pool",
)
MUTANTS = {
    "a failed call that returns before the word": Mutant(
        "host/comm_report.cpp",
        "  if (status != Status::kOk) await_raised(",
        "  if (!CHOSEN && status != Status::kOk) await_raised(",
    ),
    "an abort that returns before the word": Mutant(
        "host/comm_report.cpp",
        "  if (record == nullptr) return await_own_word(",
        "  if (record == nullptr && CHOSEN) return;\n"
        "  if (record == nullptr) return await_own_word(",
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
        # Long enough for the background thread to take its turn meanwhile.
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

# World, channels and rounds for ranks with several threads; the first shows the mutants.
TEAMS_SHOWING = (2, 3, 6)
TEAMS = [TEAMS_SHOWING, (3, 5, 2), *([(4, 8, 4), (2, 8, 40)] if EVERYTHING else [])]
COMM, OPS, OPTIMIZER = "host/comm.h", "host/ops.h", "host/optimizer_ops.h"


def shared(header: str, text: str) -> Mutant:
    """The mutant in which channels share the member that `text` gives each channel."""
    return Mutant(header, text, f"if (!CHOSEN) {text}")


def of_first(text: str) -> Mutant:
    """The mutant in which all channels use the first channel's member that `text` names."""
    return Mutant("host/comm.cpp", text, text.replace("each", "(CHOSEN ? channels_[0] : each)", 1))


TEAM_MUTANTS = {
    "channels have one view": Mutant(
        COMM, "channels_[size_t(team.channel())]", "channels_[CHOSEN ? 0 : size_t(team.channel())]"
    ),
    "channels have one way to store": shared(OPS, "same.path = &channel.store_path;"),
    "channels have one norm": shared(OPTIMIZER, "same.words = &channel.norm;"),
    "channels have one list of results": shared(OPTIMIZER, "same.copies = channel.view.results;"),
    "channels have one state of peers": of_first("each.in.data()"),
    "channels have one list of sources": of_first("each.sources.data()"),
    "channels have one header": Mutant(
        "host/comm.cpp", "&each.mine}", "&(CHOSEN ? channels_[0] : each).mine}"
    ),
    "one channel's norm is the chunk's": Mutant(
        "host/comm_optimizer.cpp",
        "for (const Channel& each : channels_) merge_norms(",
        "for (const Channel& each : channels_) if (!CHOSEN || &each == &channels_[0]) merge_norms(",
    ),
    "channels for the threads of this rank": Mutant(
        COMM,
        "threads_for(bytes, used_channels_)",
        "threads_for(bytes, CHOSEN ? threads() : used_channels_)",
    ),
}

# Arguments for calls beside a thread that stops after it has claimed the fault record and before it
# raises the abort word. An alarm ends the program if a call does not return.
STOPPED_OWNER, STOPPED_OWNER_BRIEFLY = (100,), (5,)
STOPPED_OWNER_MUTANTS = {
    "an owner that is awaited for ever": (
        Mutant(
            SIGNAL,
            "if (team.now_ns() - started > kLongestRecordNs)",
            "if (!CHOSEN && team.now_ns() - started > kLongestRecordNs)",
        ),
        STOPPED_OWNER_BRIEFLY,
        -signal.SIGALRM,
    ),
    "an incomplete record that is read": (
        Mutant(
            "host/comm_report.cpp",
            "if (word == kRaisedWithoutRecord) {",
            "if (!CHOSEN && word == kRaisedWithoutRecord) {",
        ),
        STOPPED_OWNER,
        1,
    ),
}
ALL = {
    **MUTANTS,
    **TEAM_MUTANTS,
    **{name: mutant for name, (mutant, _, _) in STOPPED_OWNER_MUTANTS.items()},
}
# Small calls use several threads, too, and small copies are timed.
SMALL = [
    Mutant("host/worker_pool.h", "kBytesPerThread = 512 << 10", "kBytesPerThread = 1 << 10"),
    Mutant("host/store_path.h", "kTimedMinBytes = 32768", "kTimedMinBytes = 256"),
]

pytestmark = [
    pytest.mark.compiles,
    NEEDS_COMPILER,
]


@pytest.fixture(scope="module")
def programs(sanitized_objects, tmp_path_factory) -> dict[str, Path]:
    """Builds the programs of all mutants, by name; with number 0 they are the right programs."""
    folder = tmp_path_factory.mktemp("comm_races")
    include = folder / "kernels/include"
    write_sources(folder, ALL, SMALL)
    mains = ("comm_race_test", "team_race_test")
    parts = [
        together(folder / "sources.cpp", (folder / f"kernels/host/{each}.cpp" for each in SOURCES)),
        *(ROOT / f"tests/proof/races/{each}.cpp" for each in mains),
    ]

    def compiled(part: Path) -> Path:
        extra = ("-c", f"-I{folder}", "-include", str(folder / "chosen.h"))
        return compile_to(folder / f"{part.stem}.o", include, part, extra=extra)

    with ThreadPoolExecutor(2) as pool:
        sources, *tests = pool.map(compiled, parts)
    return {
        test.stem: compile_to(folder / test.stem, include, sources, test, *sanitized_objects)
        for test in tests
    }


@pytest.mark.parametrize("world", WORLDS)
def test_no_race_and_nothing_left(programs, world):
    done = run(programs["comm_race_test"], world)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]


@pytest.mark.parametrize("teams", TEAMS)
def test_teams_of_different_sizes_race_for_nothing(programs, teams):
    done = run(programs["team_race_test"], teams)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]


def test_calls_end_beside_a_stopped_owner_of_the_record(programs):
    done = run(programs["comm_race_test"], STOPPED_OWNER)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]


@pytest.mark.parametrize("name", STOPPED_OWNER_MUTANTS)
def test_mutants_beside_a_stopped_owner_are_rejected(programs, name):
    _, arguments, end = STOPPED_OWNER_MUTANTS[name]
    done = run(programs["comm_race_test"], arguments, list(ALL).index(name) + 1)
    assert done.returncode == end, done.stderr[:4000]


def is_rejected(program: Path, name: str, arguments: tuple[int, ...]) -> bool:
    number = list(ALL).index(name) + 1
    # Two threads interleave differently in each run.
    return any(run(program, arguments, number).returncode != 0 for _ in range(RUNS))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(programs, name):
    assert is_rejected(programs["comm_race_test"], name, SHOWING)


@pytest.mark.parametrize("name", TEAM_MUTANTS)
def test_mutants_of_teams_are_rejected(programs, name):
    assert is_rejected(programs["team_race_test"], name, TEAMS_SHOWING)
