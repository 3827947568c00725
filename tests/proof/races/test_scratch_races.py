# SPDX-License-Identifier: Apache-2.0
"""The pool of a scratch file under ThreadSanitizer, with disturbed system calls; and mutants."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import VARIABLE, Mutant, write_sources
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, compile_to, skip_without_sanitizer

POOL = "host/scratch.cpp"
OVERLAP = "!overlap(earlier->memory_, earlier->bytes_, wish.memory, wish.bytes)"
WHOLE_PAGES = "/ kScratchPageBytes * kScratchPageBytes;\n    if (pages"
WAITS = "!done_.wait_until(lock, deadline, [this] { return outstanding_.empty(); })"
FAULT = "how.end != ScratchEnd::kClosed) fault = how;"
END, ERROR = "moved == 0 && !is_write) return failed(", "if (moved < 0) return failed("
SUM = "sum = crc32c(memory, cut.bytes);\n    return"
MUTANTS = {
    "requests of an extent keep no order": Mutant(
        POOL, "if (earlier->extent_ != &extent &&", "if ((CHOSEN || earlier->extent_ != &extent) &&"
    ),
    "requests of the same memory keep no order": Mutant(POOL, OVERLAP, f"(CHOSEN || {OVERLAP})"),
    "done before its last cut is": Mutant(
        POOL, "if (r.cuts_under_way_ == 0 &&", "if ((CHOSEN || r.cuts_under_way_ == 0) &&"
    ),
    "what was never written comes from the disk": Mutant(
        POOL, "r->from_disk_ = extent.", "r->from_disk_ = CHOSEN || extent."
    ),
    "an interrupted call is an error": Mutant(
        POOL, "if (moved < 0 && errno == EINTR)", "if (!CHOSEN && moved < 0 && errno == EINTR)"
    ),
    "a short transfer counts as a whole one": Mutant(
        POOL, "at += pages;", "at += CHOSEN ? bytes : pages;"
    ),
    "bytes beyond the last whole page count": Mutant(
        POOL,
        WHOLE_PAGES,
        WHOLE_PAGES.replace("kScratchPageBytes", "(CHOSEN ? 1 : kScratchPageBytes)"),
    ),
    "an error of the system is ignored": Mutant(
        POOL, ERROR, ERROR.replace("failed", "CHOSEN ? ScratchResult() : failed")
    ),
    "the file's end is ignored": Mutant(
        POOL, END, END.replace("failed", "CHOSEN ? ScratchResult() : failed")
    ),
    "sums are not compared": Mutant(POOL, "if (seen == sum)", "if (CHOSEN || seen == sum)"),
    "the sum is that of the first write": Mutant(POOL, SUM, f"if (!CHOSEN || sum == 0) {SUM}"),
    "an extent's fault is forgotten": Mutant(POOL, FAULT, FAULT.replace(") f", " && !CHOSEN) f")),
    "closed while requests are under way": Mutant(POOL, WAITS, f"!CHOSEN && {WAITS}"),
    "what is late counts as done": Mutant(
        POOL, "if (request.done()) return", "if (CHOSEN || request.done()) return"
    ),
    "what waits begins after closing": Mutant(POOL, "&& closing_)", "&& closing_ && !CHOSEN)"),
}
HANGS = {
    "a call that moves nothing is repeated for ever": Mutant(
        POOL, "++stalls == kMaxStalls", "++stalls == kMaxStalls && !CHOSEN"
    ),
    "a wait has no limit": Mutant(POOL, "(now >= deadline)", "(!CHOSEN && now >= deadline)"),
    "closing has no limit": Mutant(
        POOL, "lock, deadline, [", "lock, CHOSEN ? deadline_in(kNoLimit) : deadline, ["
    ),
}
ALL = {**MUTANTS, **HANGS}
RACE = 66  # ThreadSanitizer's exit status

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Builds the program of all mutants."""
    folder = tmp_path_factory.mktemp("scratch")
    skip_without_sanitizer(folder)
    write_sources(folder, ALL)
    unit = folder / "pool.cpp"
    unit.write_text(
        '#include "tests/proof/races/scratch_calls.h"\n'
        "#define pread troubled_pread\n#define pwrite troubled_pwrite\n"
        f'#include "{folder}/kernels/host/scratch.cpp"\n'
        f'#include "{folder}/kernels/host/crc32c.cpp"\n'
    )
    return compile_to(
        folder / "scratch_test",
        folder / "kernels/include",
        ROOT / "tests/proof/races/scratch_test.cpp",
        unit,
        extra=(f"-I{folder}", "-include", str(folder / "chosen.h")),
    )


def run(program: Path, mutant: int, limit_s: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: str(mutant)}
    command = [str(program), "1", str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_requests_run_in_order_and_faults_end_them(program):
    done = run(program, 0, 120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_every_mutant_is_seen(program):
    """A wrong byte, end or place, or a race shows a mutant; the time limit shows one that hangs."""
    with ThreadPoolExecutor(2) as pool:
        limits = [120] * len(MUTANTS) + [3] * len(HANGS)
        ends = pool.map(lambda n: run(program, n + 1, limits[n]).returncode, range(len(ALL)))
    seen = dict(zip(ALL, ends, strict=True))
    assert {name: seen[name] for name in HANGS} == dict.fromkeys(HANGS, -signal.SIGALRM)
    assert {name for name in MUTANTS if seen[name] not in {1, RACE}} == set(), seen
