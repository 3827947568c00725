# SPDX-License-Identifier: Apache-2.0
"""Runs SPIN on the models of this folder: generates their tables, compiles and explores them.

SPIN: Holzmann, The SPIN Model Checker, 2003; https://spinroot.com.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT
from tests.support.compiler import LOW_PRIORITY

FOLDER = Path(__file__).resolve().parent
INCLUDE = ROOT / "kernels/include"
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
LACKING = [
    name
    for name, path in (("spin", shutil.which("spin")), ("cc", COMPILER), ("c++", CXX))
    if not path
]

# Numbers of flags of the LL model and of epochs of the others; each is a power of two.
FLAGS = 8
EPOCHS = 4

# pan's messages about its first error, by the kind of error that a test expects.
ERRORS = {
    "assertion": "assertion violated",
    "deadlock": "invalid end state",
    "cycle": "non-progress cycle",
}
MEMORY_MB = 1900
DEPTH = 1_000_000


@dataclass(frozen=True)
class Model:
    """A model with its bounds.

    ``world`` picks the tables, ``epochs`` is the number of epochs until they wrap around, and
    ``defines`` are further macros (``"SEGMENTS=2"``).
    """

    source: str
    world: int = 2
    defines: tuple[str, ...] = ()
    epochs: int = EPOCHS

    def macros(self) -> list[str]:
        return [f"-D{each}" for each in (f"WORLD={self.world}", *self.defines)]


@dataclass(frozen=True)
class Result:
    """The result of an exploration: the error's kind ("" for none) and the number of states."""

    error: str
    states: int
    complete: bool
    output: str


def run(command: Sequence[str | Path], folder: Path, *, limit_s: float = 600) -> str:
    done = subprocess.run(
        [*LOW_PRIORITY, *(str(each) for each in command)],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}"
    return done.stdout


def ll_flags(include: Path) -> str:
    """Returns the text of ll.h's flag arithmetic, with FLAGS values in place of 2^32."""
    header = (include / "ringcomm/protocol/ll.h").read_text()
    functions = re.findall(
        r"^RC_FN constexpr \w+ (?:next_flag|clears_other_set)\(.*?\}$", header, re.M | re.S
    )
    assert len(functions) == 2, "next_flag() and clears_other_set() are not where they were"
    text = "\n".join(functions).replace("uint32_t", "Flag")
    return f"""\
#pragma once
namespace ringcomm {{
constexpr unsigned kCallsPerClearing = {FLAGS};
struct Flag {{
  unsigned value;
  constexpr Flag(unsigned v) : value(v % {FLAGS}) {{}}
}};
constexpr Flag operator+(Flag a, unsigned b) {{ return Flag(a.value + b); }}
constexpr bool operator==(Flag a, unsigned b) {{ return a.value == b; }}
constexpr unsigned operator%(Flag a, unsigned b) {{ return a.value % b; }}
{text}
}}
"""


def tables(folder: Path, include: Path, world: int, epochs: int) -> str:
    """Returns schedule.pml for a world, from the functions of the headers below ``include``."""
    (folder / "ll_flags.h").write_text(ll_flags(include))
    program = folder / f"schedule_tables_{world}_{epochs}"
    options = ["-std=c++20", "-O0", f"-DWORLD={world}", f"-DEPOCHS={epochs}", f"-DFLAGS={FLAGS}"]
    paths = [f"-I{include}", f"-I{folder}"]
    source = FOLDER / "schedule_tables.cpp"
    run([str(CXX), *options, *paths, source, "-o", program], folder)
    return run([program], folder)


class Checker:
    """Explores models in a folder of its own; a world's tables are computed once.

    ``include``: the headers that the tables come from.
    """

    def __init__(self, folder: Path, include: Path = INCLUDE) -> None:
        self.folder, self.include = folder, include
        self._tables: dict[tuple[int, int], str] = {}
        self._runs = 0

    def check(
        self,
        model: Model,
        mutant: str = "",
        *,
        cycles: bool = False,
        large: bool = False,
        depth: int = DEPTH,
    ) -> Result:
        """Explores all states of the model, up to the first error.

        Args:
            model: the model and its bounds.
            mutant: a further macro, that makes a mistake.
            cycles: look for cycles without progress, in place of assertions and deadlocks.
            large: the exploration takes longer than an optimized compilation, or its states do not
                fit into memory as they are.
            depth: steps of the longest path.
        """
        key = (model.world, model.epochs)
        if key not in self._tables:
            self._tables[key] = tables(self.folder, self.include, *key)
        self._runs += 1
        folder = self.folder / f"run_{self._runs}"
        folder.mkdir()
        macros = [*model.macros(), *([f"-D{mutant}"] if mutant else [])]
        for source in FOLDER.glob("*.pml"):
            shutil.copy(source, folder)
        (folder / "schedule.pml").write_text(self._tables[key])
        run(["spin", f"-P{COMPILER} -E -x c", *macros, "-a", model.source], folder)
        kind = ["-DNP"] if cycles else ["-DSAFETY"]
        # Compiling pan.c takes most of the time, so -O0 and uncompressed states are the fastest.
        options = ["-DCOLLAPSE", "-O1"] if large else ["-O0"]
        options += [f"-DMEMLIM={MEMORY_MB}", "-w"]
        run([str(COMPILER), *options, *kind, "-o", "pan", "pan.c"], folder)
        flags = ["-l", "-E"] if cycles else []  # -E: ignore deadlocks
        output = run(
            [folder / "pan", *flags, f"-m{depth}", "-w22" if large else "-w18"],
            folder,
            limit_s=1200,
        )
        return read_result(output)


def read_result(output: str) -> Result:
    """Reads pan's report."""
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d+)(?:\.\d+)?(?:e\+\d+)? states, stored", output)
    assert errors and states, output[-2000:]
    first = re.search(r"^pan:1: (.*)$", output, re.M)
    found = [kind for kind, text in ERRORS.items() if first and first.group(1).startswith(text)]
    limits = ("out of memory", "max search depth too small", "search interrupted", "not completed")
    complete = not any(text in output.lower() for text in limits)
    error = "" if errors.group(1) == "0" else (found or ["unknown"])[0]
    return Result(error, int(states.group(1)), complete, output)
