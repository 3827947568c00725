# SPDX-License-Identifier: Apache-2.0
"""Builds and runs C++ tests of the kernels' headers, also with a mutant of a header."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT
from tests.support.compiler import OPTIMISED, compile_to


def run_program(
    name: str, folder: Path, *mutants: Path, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Compiles ``tests/optim/NAME.cpp`` and runs it.

    Args:
        name: the program's name.
        folder: gets the program.
        mutants: folders whose headers replace the headers of the tree.
        arguments: of the program.
    """
    program = compile_to(
        folder / name,
        ROOT / "kernels/include",
        ROOT / f"tests/optim/{name}.cpp",
        flags=OPTIMISED,
        extra=[f"-I{include}" for include in (*mutants, ROOT)],
    )
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)


def write_mutant(folder: Path, header: str, text: str, instead: str) -> None:
    """Writes a copy of ``header`` to ``folder`` in which ``instead`` replaces the only ``text``."""
    original = (ROOT / header).read_text()
    assert original.count(text) == 1
    mutant = folder / header
    mutant.parent.mkdir(parents=True)
    mutant.write_text(original.replace(text, instead))
