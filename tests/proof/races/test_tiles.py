# SPDX-License-Identifier: Apache-2.0
"""The tiles of a chunk, the loops that skip the gaps between them, and mutants of both."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, OPTIMISED, compile_to

TILES, OPS = "include/ringcomm/core/tiles.h", "cuda/ops.h"
RING = "include/ringcomm/collectives/ring.h"
MUTANTS = {
    "the next tile of a channel is one tile too far": (
        TILES,
        "uint32_t((deal.round_bytes - tile) >> 4)",
        "uint32_t(deal.round_bytes >> 4)",
    ),
    "the rest begins with the channel's tile": (TILES, "all_dealt + rest.begin_bytes", "all_dealt"),
    "a round more than the chunk has": (TILES, ">> shift, share);", ">> shift, share) + 1;"),
    "the rounds of chunk 0 alone": (RING, "most = bytes > most ? bytes : most;", ""),
    "the gap of the former turn": (OPS, "gaps_before(vector + step);", "gaps_before(vector);"),
    "no gap before the rest": (TILES, "* each : to_rest;", "* each : 0;"),
    "vectors across the ends of tiles": (
        OPS,
        "const bool by_tiles = most",
        "const bool by_tiles = most > 9 && most",
    ),
    "copied across the ends of tiles": (OPS, "aligned || all.gaps.dealt == 0", "true"),
    "the last elements of a part without the gaps": (OPS, "from.gaps->offset(", "("),
}


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, check=False)


@NEEDS_COMPILER
def test_tiles_partition_a_chunk_and_loops_access_them_alone(tmp_path):
    source = ROOT / "tests/proof/races/tiles_test.cpp"
    made = compile_to(tmp_path / "tiles", ROOT / "kernels/include", source, flags=OPTIMISED)
    done = run(made)
    assert done.returncode == 0, done.stdout


@NEEDS_COMPILER
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(tmp_path, name):
    header, text, replacement = MUTANTS[name]
    for part in ("cuda", "host", "include"):
        shutil.copytree(ROOT / "kernels" / part, tmp_path / "kernels" / part)
    changed = tmp_path / "kernels" / header
    original = changed.read_text()
    assert original.count(text) == 1
    changed.write_text(original.replace(text, replacement))
    made = compile_to(
        tmp_path / "tiles",
        tmp_path / "kernels/include",
        ROOT / "tests/proof/races/tiles_test.cpp",
        flags=OPTIMISED,
        extra=(f"-I{tmp_path}",),
    )
    assert run(made).returncode != 0
