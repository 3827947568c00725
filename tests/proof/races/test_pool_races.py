# SPDX-License-Identifier: Apache-2.0
"""The workers of a process under ThreadSanitizer, and mutants of them.

Several threads make calls at once, children of a process make calls, tasks wait for the same task
of another rank, and workers must be woken.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import EVERYTHING, VARIABLE, Mutant, write_sources
from tests.support import ROOT, together
from tests.support.compiler import (
    EMULATOR,
    LOW_PRIORITY,
    NEEDS_COMPILER,
    OPTIMISED,
    THREAD_SANITIZER,
    compile_to,
    skip_without_sanitizer,
)

POOL = "host/worker_pool.cpp"
# Makes kSleepNs a variable, so that the program chooses how long a sleep lasts.
SLEEP = Mutant(
    "host/waiter.h", "static constexpr uint64_t kSleepNs", "static inline uint64_t kSleepNs"
)
LEFT, DONE = "job.workers.load()", "job->workers.fetch_sub(1);"
NEXT, RUN = "(i = next.fetch_add(1))", "tasks.run(tasks.of, i);\n  }"
ERASE, ANEW = "jobs_.erase(std::find(", "pool_of_process.store(new Pool);"
TOOK = "const uint32_t seen = posted_.load();"
TAKES, WAKES = "Job* const job = take();", "Waiter::wake(futex_of(posted_), wanted)"
POSTS, LOOKS = "posted_.fetch_add(1);", "if (sleepers_.load() != 0)"
COUNTS, LOOK = "sleepers.fetch_add(1);\n", "  if (word.load() == seen) {\n"
SLEEPS, WAKES_CALLER = "    const SleepOn on{futex_of(word), seen};", "Waiter::wake(word);"
LOCKED = "const std::lock_guard lock(mutex_);\n    jobs_.push_back"
BEFORE_FORK = (
    "[] { shares().mutex.lock(); }, [] { shares().mutex.unlock(); },\n"
    "                   [] {\n                     shares().mutex.unlock();"
)
BEGIN_POST = "  // read before posting: awake workers may then count it down\n"
SIGNALS, BLOCK = "host/signals_blocked.h", "SIG_SETMASK, &all, &before_"
OWN = "sigdelset(&all, own)"
RELAXED = "CHOSEN ? std::memory_order_relaxed : std::memory_order_seq_cst"

# The mutants of each part of the program.
MUTANTS = {
    "jobs": {
        "the workers' end is seen without acquire": Mutant(
            POOL, LEFT, f"job.workers.load({RELAXED})"
        ),
        "a worker ends without release": Mutant(POOL, DONE, DONE.replace("1", f"1, {RELAXED}")),
        "the caller leaves its workers": Mutant(POOL, "left; (left", "left; !CHOSEN && (left"),
        "a task is taken twice": Mutant(
            POOL,
            NEXT,
            "(i = CHOSEN ? next.load() : next.fetch_add(1),"
            " CHOSEN ? (sched_yield(), next.store(i + 1)) : void(), i)",
        ),
        "a job stays in the list": Mutant(POOL, ERASE, f"if (!CHOSEN) {ERASE}"),
        "a job is posted without the lock": Mutant(
            POOL,
            LOCKED,
            LOCKED.replace("const std::lock_guard", "std::unique_lock").replace(
                "jobs_", "if (CHOSEN) lock.unlock();\n    jobs_"
            ),
        ),
        "workers are counted while they come": Mutant(
            POOL, WAKES, WAKES.replace("wanted", "CHOSEN ? job.wanted : wanted")
        ),
        "workers take the process's signals": Mutant(
            SIGNALS, BLOCK, BLOCK.replace("&all", "CHOSEN ? nullptr : &all")
        ),
        "workers do not take their own signals": Mutant(SIGNALS, OWN, f"if (!CHOSEN) {OWN}"),
    },
    "forks": {
        "a child keeps its parent's pool": Mutant(POOL, ANEW, f"if (!CHOSEN) {ANEW}"),
        "shares change while a child is made": Mutant(
            POOL,
            BEFORE_FORK,
            re.sub(r"(shares)", r"if (!CHOSEN) \1", BEFORE_FORK),
        ),
    },
    "ranks": {
        "tasks in descending order": Mutant(
            POOL, RUN, RUN.replace(" i)", " CHOSEN ? tasks.count - 1 - i : i)")
        ),
    },
    "wakes": {
        "nobody looks for sleepers": Mutant(
            POOL, LOOKS, LOOKS.replace("sleepers_", "!CHOSEN && sleepers_")
        ),
        # Late counting alone is right, because the kernel looks at the word once more.
        "sleepers are counted after the last look": Mutant(
            POOL,
            COUNTS + LOOK + SLEEPS,
            f"if (!CHOSEN || word.load() != seen) {COUNTS}"
            f"{LOOK}    if (CHOSEN) usleep(300), {COUNTS}"
            f"{SLEEPS.replace('seen', 'CHOSEN ? word.load() : seen')}",
        ),
        "the word is read after the look for jobs": Mutant(
            POOL,
            f"{TOOK}\n    {TAKES}",
            f"uint32_t seen = posted_.load();\n    {TAKES}\n"
            "    if (CHOSEN && job == nullptr) usleep(300), seen = posted_.load();",
        ),
        "the word stays": Mutant(POOL, POSTS, f"if (!CHOSEN) {POSTS}"),
        "one worker is woken for all": Mutant(
            POOL, "int wanted = job.wanted;", "int wanted = CHOSEN ? 1 : job.wanted;"
        ),
        "sleepers are looked for before the job is posted": Mutant(
            POOL,
            BEGIN_POST,
            f"{BEGIN_POST}  if (CHOSEN) {{\n    const bool any = sleepers_.load() != 0;\n"
            "    usleep(300), mutex_.lock(), jobs_.push_back(&job), mutex_.unlock();\n"
            "    posted_.fetch_add(1);\n"
            "    if (any) Waiter::wake(futex_of(posted_), wanted);\n    return;\n  }\n",
        ),
        "the caller is not woken": Mutant(POOL, WAKES_CALLER, f"if (!CHOSEN) {WAKES_CALLER}"),
    },
}
ALL = {name: mutant for group in MUTANTS.values() for name, mutant in group.items()}
# Seconds until a hanging program is ended: the right program, and a mutant.
LIMIT_S, MUTANTS_LIMIT_S = 120, 4
RUNS = 5

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[str, Path]:
    """Builds the programs of each part; mutant number 0 is the right program."""
    folder = tmp_path_factory.mktemp("pool_races")
    skip_without_sanitizer(folder)
    write_sources(folder, ALL, [SLEEP])
    sources = [folder / f"kernels/host/{each}.cpp" for each in ("waiter", "worker_pool")]
    whole = together(
        folder / "sources.cpp", [*sources, ROOT / "tests/proof/races/pool_race_test.cpp"]
    )

    def compiled(flags: Sequence[str]) -> Path:
        extra = (f"-I{folder}", "-include", str(folder / "chosen.h"))
        output = folder / f"pool_races{flags[-1]}"
        return compile_to(output, folder / "kernels/include", whole, flags=flags, extra=extra)

    with ThreadPoolExecutor(2) as pool:
        sanitized, plain = pool.map(compiled, (THREAD_SANITIZER, OPTIMISED))
    # The sanitizer does not support children that start threads.
    return {what: plain if what == "forks" else sanitized for what in MUTANTS}


def run(programs: dict[str, Path], what: str, mutant: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        VARIABLE: str(1 + list(ALL).index(mutant) if mutant else 0),
    }
    limit_s = MUTANTS_LIMIT_S if mutant else LIMIT_S
    command = [*LOW_PRIORITY, str(programs[what]), what, str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("what", MUTANTS)
def test_no_race_and_nobody_waits_in_vain(programs, what):
    if what == "forks" and EMULATOR is not None:
        pytest.skip("a child of a process with threads may wait for a lock of qemu forever")
    for _ in range(5 if EVERYTHING else 1):
        done = run(programs, what)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_are_rejected(programs, what):
    def survives(name: str) -> bool:
        # Threads interleave differently in each run.
        return all(run(programs, what, name).returncode == 0 for _ in range(RUNS))

    with ThreadPoolExecutor(4) as pool:
        alive = list(pool.map(survives, MUTANTS[what]))
    assert dict(zip(MUTANTS[what], alive, strict=True)) == dict.fromkeys(MUTANTS[what], False)
