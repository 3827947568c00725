# SPDX-License-Identifier: Apache-2.0
"""The flight recorder under ThreadSanitizer, and mutants of its protocol that it must reject."""

import pytest

from tests.proof.races.mutants import Mutant, survivors, write_sources
from tests.proof.races.test_races import run
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, compile_to, skip_without_sanitizer

TURNS_HEADER = ROOT / "tests/proof/races/recorder_turns.h"
RECORDER = "host/recorder.cpp"
MUTANTS = {
    "an owner that does not say that it writes": Mutant(
        RECORDER,
        "store_relaxed_sys(&r->version, version_ + 1);",
        "if (!CHOSEN) store_relaxed_sys(&r->version, version_ + 1);",
    ),
    "a reader that takes what is being written": Mutant(
        RECORDER, "before % 2 == 0 &&", "(CHOSEN || before % 2 == 0) &&"
    ),
    "a reader that does not look again": Mutant(
        RECORDER,
        "load_relaxed_sys(&from->version) == before",
        "(CHOSEN || load_relaxed_sys(&from->version) == before)",
    ),
    "an owner that stores as if nobody read": Mutant(
        RECORDER,
        "store_relaxed_sys(static_cast<uint64_t*>(to) + i, word);",
        "if (CHOSEN) static_cast<uint64_t*>(to)[i] = word; "
        "else store_relaxed_sys(static_cast<uint64_t*>(to) + i, word);",
    ),
    "a message that ends in another's record": Mutant(
        RECORDER,
        "if (r->id.sequence != sequence) return;  // a message",
        "if (!CHOSEN && r->id.sequence != sequence) return;  // a message",
    ),
}
# The places in the middle of a record at which the program's hooks run.
TURNS = [
    Mutant(
        RECORDER,
        "uint64_t word;\n",
        "uint64_t word;\n    if (i == 3 && in_store != nullptr) in_store();\n",
    ),
    Mutant(
        RECORDER,
        "const uint64_t word =",
        "if (i == 12 && in_load != nullptr) in_load();\n    const uint64_t word =",
    ),
]

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


def test_records_are_whole_and_mutants_are_rejected(tmp_path):
    skip_without_sanitizer(tmp_path)
    write_sources(tmp_path, MUTANTS, TURNS)
    program = compile_to(
        tmp_path / "program",
        tmp_path / "kernels/include",
        ROOT / "tests/proof/races/recorder_test.cpp",
        tmp_path / "kernels" / RECORDER,
        ROOT / "kernels/host/waiter.cpp",
        extra=("-include", str(tmp_path / "chosen.h"), "-include", str(TURNS_HEADER)),
    )
    done = run(program, ())
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[:4000]
    assert survivors(MUTANTS, lambda name, number: run(program, (), number).returncode == 0) == []
