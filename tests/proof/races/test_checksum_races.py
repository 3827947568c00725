# SPDX-License-Identifier: Apache-2.0
"""CRC-32 by several threads under ThreadSanitizer, compared with its definition; and mutants."""

from __future__ import annotations

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.races.mutants import VARIABLE, Mutant, write_sources
from tests.support import ROOT, together
from tests.support.compiler import (
    LOW_PRIORITY,
    NEEDS_COMPILER,
    compile_to,
    skip_without_sanitizer,
)

SUM = "host/crc32.cpp"
# Parts are short, so that the program ends in a moment.
SHORT = [
    Mutant(SUM, "kPartBytes = 512 << 10", "kPartBytes = 16 << 10"),
    Mutant("host/worker_pool.h", "kBytesPerThread = 512 << 10", "kBytesPerThread = 16 << 10"),
]
LAST, PART = "sums.back(), bytes_of(parts - 1)", "Crc32::power(8 * kPartBytes)"
SOURCE = "uint64_t(i) * kPartBytes, bytes_of"
MUTANTS = {
    "the last part counts as a whole one": Mutant(
        SUM, LAST, LAST.replace("bytes_of", "CHOSEN ? kPartBytes : bytes_of")
    ),
    "the last part's length in bits": Mutant(
        SUM, "Crc32::power(8 * b_bytes)", "Crc32::power((CHOSEN ? 1 : 8) * b_bytes)"
    ),
    "parts of a byte more": Mutant(SUM, PART, PART.replace("8 *", "8 * (CHOSEN ? 1 : 0) + 8 *")),
    "each part begins as the first one": Mutant(SUM, SOURCE, f"(CHOSEN ? 0 : 1) * {SOURCE}"),
    "what is before is forgotten": Mutant(
        SUM, "before = joined(before,", "before = joined(CHOSEN && i == 0 ? 0 : before,"
    ),
}
if platform.machine() == "x86_64":
    MUTANTS |= {
        "folded by another distance": Mutant(
            SUM, "powers(kBlockBytes)", "powers(CHOSEN ? 2 * kBlockBytes : kBlockBytes)"
        ),
        "what is before is not folded in": Mutant(
            SUM, "_mm_cvtsi32_si128(int(~before))", "_mm_cvtsi32_si128(CHOSEN ? -1 : int(~before))"
        ),
    }

pytestmark = [pytest.mark.compiles, NEEDS_COMPILER]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checksum")
    skip_without_sanitizer(folder)
    write_sources(folder, MUTANTS, SHORT)
    names = ("waiter", "worker_pool", "crc32")
    sources = [folder / f"kernels/host/{name}.cpp" for name in names]
    whole = together(folder / "whole.cpp", [*sources, ROOT / "tests/proof/races/checksum_test.cpp"])
    extra = (f"-I{folder}", "-include", str(folder / "chosen.h"))
    return compile_to(folder / "checksum_test", folder / "kernels/include", whole, extra=extra)


def run(program: Path, mutant: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: str(mutant)}
    command = [*LOW_PRIORITY, str(program)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_any_number_of_threads_has_the_sum_of_the_definition(program: Path) -> None:
    done = run(program, 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_every_mutant_is_seen(program: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda n: run(program, n + 1).returncode, range(len(MUTANTS)))
    seen = dict(zip(MUTANTS, ends, strict=True))
    assert {name for name, status in seen.items() if status != 1} == set(), seen
