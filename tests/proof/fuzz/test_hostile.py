# SPDX-License-Identifier: Apache-2.0
"""Junk from a peer under AddressSanitizer and UBSan, which must notice each missing check.

``make fuzz`` runs more cases: ``RINGCOMM_FUZZ`` multiplies their number.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import ENDPOINT, VARIABLE, Mutant, write_sources
from tests.support import ROOT, together
from tests.support.compiler import (
    ADDRESS_SANITIZER,
    LOW_PRIORITY,
    NEEDS_COMPILER,
    compile_to,
    skip_without_sanitizer,
)

SOURCES = [
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
    "waiter",
    "worker_pool",
]
MORE = int(os.environ.get("RINGCOMM_FUZZ", "1"))
CASES = 800 * MORE
# A run ends with the first case that shows its mutant; some mutants need thousands of cases.
CASES_FOR_MUTANTS = 20_000
MESSENGER, DESCRIBE = "host/messenger.cpp", "host/describe.cpp"
COMM, VIEW = "host/comm.cpp", "include/ringcomm/protocol/view.h"
SOUND = "include/ringcomm/protocol/header_check.h"

MUTANTS = {
    "any size of items": Mutant(ENDPOINT, "if (!sized ||", "if ((!CHOSEN && !sized) ||"),
    "any place of the data": Mutant(
        ENDPOINT,
        "(in_heap && !readable(v, sender,",
        "(!CHOSEN && in_heap && !readable(v, sender,",
    ),
    "any stream from its process": Mutant(
        ENDPOINT, "s != Stream::kShared ||", "(!CHOSEN && s != Stream::kShared) ||"
    ),
    "any place of the results": Mutant(
        ENDPOINT,
        "!storable(v, stores, sender, results)",
        "(!CHOSEN && !storable(v, stores, sender, results))",
    ),
    "results at the alignment of an element": Mutant(
        SOUND,
        "stores.bytes, kResultAlign)",
        "stores.bytes, CHOSEN ? 4 : kResultAlign)",
    ),
    "results at any alignment": Mutant(
        SOUND, "(offset & (align - 1)) == 0", "(CHOSEN || (offset & (align - 1)) == 0)"
    ),
    "only the begin is in the heap": Mutant(
        VIEW,
        "bytes <= heap_bytes[owner] - offset",
        "(CHOSEN || bytes <= heap_bytes[owner] - offset)",
    ),
    "any message": Mutant(MESSENGER, "if (!sound(h, peer))", "if (!CHOSEN && !sound(h, peer))"),
    "a status as the peer wrote it": Mutant(
        DESCRIBE,
        "int(fault.status) >= kStatuses)",
        "(!CHOSEN && int(fault.status) >= kStatuses))",
    ),
    "a reason without its end": Mutant(
        DESCRIBE, "strnlen(text, sizeof(text))", "(CHOSEN ? strlen(text) : strnlen(text, 256))"
    ),
    "any dtype is looked up": Mutant(
        DESCRIBE, "dtype < DType::kCount ?", "(CHOSEN || dtype < DType::kCount) ?"
    ),
    "a region anywhere": Mutant(
        COMM,
        "bytes > peer.heap_bytes - peer.region_offset)",
        "(!CHOSEN && bytes > peer.heap_bytes - peer.region_offset))",
    ),
    "a region of anybody": Mutant(
        COMM, "if (page->rank != p ||", "if ((!CHOSEN && page->rank != p) ||"
    ),
    "any proof": Mutant(
        COMM, "if (page->proof != peer.proof)", "if (!CHOSEN && page->proof != peer.proof)"
    ),
}

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    skip_without_sanitizer(folder, ADDRESS_SANITIZER)
    write_sources(folder, MUTANTS)
    include, chosen = folder / "kernels/include", ("-include", str(folder / "chosen.h"))
    parts = [
        together(folder / "sources.cpp", (folder / f"kernels/host/{each}.cpp" for each in SOURCES)),
        ROOT / "tests/proof/fuzz/hostile_test.cpp",
    ]

    def compiled(part: Path) -> Path:
        output = folder / f"{part.stem}.o"
        extra = (f"-I{folder}", "-c", *chosen)
        return compile_to(output, include, part, flags=ADDRESS_SANITIZER, extra=extra)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, parts))
    return compile_to(folder / "hostile", include, *objects, flags=ADDRESS_SANITIZER)


def run(program: Path, seed: int, cases: int, mutant: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0:hard_rss_limit_mb=2000:allocator_may_return_null=0",
        VARIABLE: str(mutant),
    }
    return subprocess.run(
        [*LOW_PRIORITY, str(program), str(seed), str(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )


def test_junk_ends_in_a_status(program):
    done = run(program, 1, CASES)
    assert done.returncode == 0, done.stderr[:4000]
    ended = {tuple(line.split()[:2]) for line in done.stdout.splitlines()}
    for name in ("gather", "scatter", "step", "receive", "announce"):
        assert {(name, "0"), (name, "7")} <= ended, done.stdout
    for name in ("gather", "scatter", "step"):
        assert (name, "3") in ended, done.stdout


def test_without_a_check_it_is_found(program):
    def survives(number: int) -> bool:
        return run(program, 2, CASES_FOR_MUTANTS, number).returncode == 0

    assert run(program, 2, CASES).returncode == 0
    with ThreadPoolExecutor(2) as pool:
        alive = list(pool.map(survives, range(1, len(MUTANTS) + 1)))
    assert [name for name, lives in zip(MUTANTS, alive, strict=True) if lives] == []
