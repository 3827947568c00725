# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels' bodies on host threads: under ThreadSanitizer, without it, and as mutants."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.proof.races.mutants import (
    ATOMICS,
    ENDPOINT,
    EVERYTHING,
    EVERYWHERE,
    GATHER,
    LL,
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
from tests.support.compiler import (
    LOW_PRIORITY,
    NEEDS_COMPILER,
    UNOPTIMISED,
    compile_to,
    skip_without_sanitizer,
)

SOURCE = str(ROOT / "tests/proof/races/device_race_test.cpp")
NEAR_CLEARING = (1 << 24) - 6  # calls before the packets' flags are next cleared
NEAR_WRAP = (1 << 32) - 6  # calls before the flags wrap around

# The second round finds data that the first round left; a run of the smallest world shows that.
MORE_ROUNDS = 2 if EVERYTHING else 1

# world, channels, lanes per block, rounds, calls so far
TEAMS: list[Team] = [
    (2, 1, 1, 2, 0),
    (2, 1, 4, 1, NEAR_CLEARING),
    (2, 2, 3, MORE_ROUNDS, NEAR_WRAP),
    (3, 2, 2, MORE_ROUNDS, NEAR_CLEARING),
    (4, 4 if EVERYTHING else 2, 1, 1, NEAR_WRAP),
    *([(7, 1, 1, 1, NEAR_CLEARING)] if EVERYTHING else []),
]
# With 0 rounds each kernel runs once, and one rank makes another call or none.
FAULT_TEAMS: list[Team] = [
    (2, 1, 2, 0, 0),
    (3, 2, 2, 0, NEAR_WRAP),
    *([(2, 1, 4, 0, 0)] if EVERYTHING else []),
]
# Runs without the sanitizer, which slows threads down and so keeps them from meeting.
LONG_TEAMS: list[Team] = [
    (2, 1, 1, 40, 0),
    (2, 4, 2, 10, NEAR_WRAP),
    (3, 1, 4, 10, 0),
    (4, 2, 2, 5, NEAR_CLEARING),
    (7, 3, 1, 5, 0),
    (8, 1, 1, 5, NEAR_WRAP),
]
SMALL: Team = (2, 1, 2, 4, 0)
RINGS: Team = (3, 2, 2, 4, 0)

BODY, RING = "cuda/body.h", "include/ringcomm/collectives/ring.h"

MUTANTS = {
    **EVERYWHERE,
    "packets of the call before last": Mutant(
        LL,
        "return p.first_flag == flag &&",
        "if (CHOSEN) return p.first_flag + 2 >= flag;\n  return p.first_flag == flag &&",
    ),
    "LL packets in one set of buffers": Mutant(
        LL, "ours = (flag & 1) != 0", "ours = !CHOSEN && (flag & 1) != 0"
    ),
    "payload taken without its flag": Mutant(
        LL,
        "!packet_arrived(seen[k], call.flag)) missing",
        "!CHOSEN && !packet_arrived(seen[k], call.flag)) missing",
    ),
    "flags stored before the payload": Mutant(
        ATOMICS,
        "uint64_t* halves = reinterpret_cast<uint64_t*>(to);",
        "uint64_t* halves = reinterpret_cast<uint64_t*>(to);\n"
        "  if (CHOSEN) __atomic_store_n(&to->first_flag, flag, __ATOMIC_RELAXED);\n"
        "  if (CHOSEN) __atomic_store_n(&to->second_flag, flag, __ATOMIC_RELAXED);\n"
        "  if (CHOSEN) sched_yield();",
    ),
    "LL calls not counted": Mutant(
        LL,
        "if (e.team.lane() == 0)\n    reinterpret_cast<ChannelLine*>",
        "if (!CHOSEN && e.team.lane() == 0)\n    reinterpret_cast<ChannelLine*>",
    ),
    "packets never cleared": Mutant(
        LL,
        "if (clears_other_set(flag))",
        "if (!CHOSEN && clears_other_set(flag))",
        ((2, 1, 2, 1, NEAR_CLEARING), (2, 1, 2, 1, NEAR_WRAP)),
    ),
    "packets of one set never cleared": Mutant(
        LL,
        "kCallsPerClearing - 2;",
        "kCallsPerClearing - 2 && !(CHOSEN && flag % 2 != 0);",
        ((2, 1, 2, 1, NEAR_CLEARING), (2, 1, 2, 1, NEAR_WRAP)),
    ),
    "a call with the flag of cleared packets": Mutant(
        LL,
        "last + 1 == 0 ?",
        "last + 1 == 0 && !CHOSEN ?",
        ((2, 1, 2, 1, NEAR_WRAP),),
    ),
    "factors of packets read too early": Mutant(
        LL,
        "status = e.team.share(status);\n      checked",
        "status = CHOSEN ? status : e.team.share(status);\n      checked",
    ),
    "shared before the team is done": without(
        ENDPOINT, "team.sync();", "team.sync();\n    each_by_lanes({1, world()}"
    ),
    "passed on before the team is done": without(
        ENDPOINT, "team.sync();", "team.sync();\n    if (team.lane() == 0) publish("
    ),
    "acknowledged before all has been collected": without(
        GATHER, SYNC, f"{SYNC}\n  e.each_by_lanes(senders"
    ),
    "acknowledged before all has been exchanged": without(
        "include/ringcomm/collectives/exchange.h", SYNC, f"{SYNC}\n  e.each_by_lanes(senders"
    ),
    "acknowledged before all went around": without(
        GATHER, SYNC, f"{SYNC}\n      if (e.team.lane() == 0) e.release(", RINGS
    ),
    "sources changed while lanes read them": without(SCATTER, SYNC, f"{SYNC}  // reduce_hop()"),
    "workspace read while it is filled": without(
        BODY, "team.sync();", "team.sync();\n  if (team.lane() == 0)\n    w.view ="
    ),
    "call read while it is filled": Mutant(
        BODY,
        "return team.share(status);",
        "return CHOSEN ? status : team.share(status);",
        (RINGS,),
    ),
    "wrong successor in the ring": Mutant(
        RING,
        "{v.ring_rank(ring_next(position",
        "{v.ring_rank((CHOSEN ? ring_prev : ring_next)(position",
        (RINGS,),
    ),
    "rank taken for its position in the ring": Mutant(
        "include/ringcomm/protocol/view.h",
        "return ring == nullptr ? rank : ring_position;",
        "return ring == nullptr || CHOSEN ? rank : ring_position;",
        (RINGS,),
    ),
    "a lane that waits for its warp": Mutant(
        SIGNAL,
        "  return exchange_acq_rel_sys(&mine->claimed, 1) == 0 ? &mine->fault : nullptr;",
        "  if (exchange_acq_rel_sys(&mine->claimed, 1) == 0) return &mine->fault;\n"
        "  for (int i = 0; CHOSEN && load_acquire_sys(&mine->aborted) == 0; ++i)\n"
        "    if (i == 1000000) _exit(1);\n"
        "  return nullptr;",
        ((2, 1, 2, 0, 0),),
    ),
    "ended before the word of another kernel": Mutant(
        BODY,
        "    await_raised(team, v);",
        "    CHOSEN ? void() : await_raised(team, v);",
        ((2, 1, 2, 0, 0),),
    ),
    "messages look at collectives": Mutant(
        SIGNAL,
        "if (mine.collective == Collective::kSend ||",
        "if (!CHOSEN && mine.collective == Collective::kSend ||",
        ((4, 1, 1, 20, 0), (2, 1, 2, 20, 0)),
    ),
}

# Chosen instead of a mutant: the right program, but its ranks are delayed like those of mutants.
NO_MUTANT = -1
# Unless number 0 is chosen, ranks are delayed. One rank is delayed before it sends its payload, so
# that no rank gets the payload by chance (longer if packets of the flags' previous cycle are
# there). At some calls another rank is delayed before it reads, so that the first is soon a call
# ahead. Messages look at the clock at each poll, and are delayed before they read another call's
# data.
DAWDLING = [
    Mutant(
        LL,
        "const uint64_t offset = e.payload_offset(call, e.rank, 0);",
        "if (!CHOSEN && e.rank == 0 && call.flag % 8 != 7)\n"
        "      usleep(call.flag < kCallsPerClearing / 2 ? 3000 : 30000);\n"
        "  const uint64_t offset = e.payload_offset(call, e.rank, 0);",
    ),
    Mutant(
        LL,
        "if (e.team.lane() == 0) e.factors[e.rank]",
        "if (!CHOSEN && e.rank == 1 && call.flag % 8 == 7) usleep(10000);\n"
        "  if (e.team.lane() == 0) e.factors[e.rank]",
    ),
    Mutant(
        SIGNAL,
        "if (!team.pause(pause)) continue;",
        "if (!team.pause(pause) && (CHOSEN || v.mine->id.collective != Collective::kSend))\n"
        "      continue;",
    ),
    Mutant(
        SIGNAL,
        "const CallHeader* theirs = v.header(",
        "if (!CHOSEN && mine.collective == Collective::kSend) usleep(2000);\n"
        "  const CallHeader* theirs = v.header(",
    ),
]

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Builds the program of all mutants; with number 0 it is the right program."""
    folder = tmp_path_factory.mktemp("device_races")
    skip_without_sanitizer(folder)
    write_sources(folder, MUTANTS, DAWDLING)
    chosen = (f"-I{folder}", "-include", str(folder / "chosen.h"))
    return compile_to(folder / "mutated", folder / "kernels/include", SOURCE, extra=chosen)


def run(program: Path, team: Team, mutant: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the program with time for a busy machine, unless ranks may wait for nothing."""
    timeout_ms = 1000 if mutant > 0 else 100 if team[3] == 0 else 120000
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        VARIABLE: str(mutant),
    }
    command = [*LOW_PRIORITY, str(program), *map(str, team), str(timeout_ms)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )


def assert_right(program: Path, teams: Sequence[Team], mutant: int = 0) -> None:
    for team in teams:
        done = run(program, team, mutant)
        assert (done.returncode, done.stdout) == (0, "ok\n"), f"{team}: {done.stderr[:4000]}"


def test_no_race_and_right_results(program):
    assert_right(program, of_this_run(TEAMS))
    assert_right(program, FAULT_TEAMS[1:])  # the other test runs the first team


def test_mutants_are_rejected(program):
    assert_right(
        program,
        [FAULT_TEAMS[0], SMALL, RINGS, (2, 1, 2, 1, NEAR_CLEARING), (2, 1, 2, 1, NEAR_WRAP)],
        NO_MUTANT,
    )

    def passes(name: str, number: int) -> bool:
        teams = MUTANTS[name].teams or (SMALL,)
        return all(run(program, team, number).returncode == 0 for team in teams)

    assert survivors(MUTANTS, passes) == []


@pytest.mark.skipif(not EVERYTHING, reason="make tsan has it; tests/comm/device runs as fast")
def test_right_results_at_full_speed(tmp_path):
    program = compile_to(tmp_path / "fast", ROOT / "kernels/include", SOURCE, flags=UNOPTIMISED)
    assert_right(program, LONG_TEAMS)
