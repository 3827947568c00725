# SPDX-License-Identifier: Apache-2.0
"""Runs of the benchmark harness, one after the other, with progress and a line for each."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from ringcomm.cli.bench import run_harness
from ringcomm.cli.progress import Progress

__all__ = ["INTERRUPTED", "Phase", "run_phase"]

# Exit status of a run that Ctrl-C ended.
INTERRUPTED = 130
# Lines of the harness that are printed when a phase fails.
_LAST_LINES = 20


@dataclass(frozen=True)
class Phase:
    """One run of the harness.

    Attributes:
        title: one line that says what the run shows.
        bench: the name of the benchmark.
        words: the benchmark's command line.
        about_s: seconds that the run takes on two cores; 0 if not known.
    """

    title: str
    bench: str
    words: tuple[str, ...]
    about_s: float = 0.0


def run_phase(phase: Phase, place: str, tables: IO[str], files: Sequence[str] = ()) -> int:
    """Runs a phase, and prints a line when it ends; returns its exit status.

    Args:
        phase: the run.
        place: its place among the phases, such as "2/4".
        tables: a file, open for reading and writing, that gets the output of the harness.
        files: options of the harness that name result files.
    """
    progress, began = Progress(), time.perf_counter()
    line = f"{place}  {phase.title}"
    about = f" of about {phase.about_s:.0f} s" if phase.about_s else " s"

    def beat() -> None:
        progress.show(f"{line}: running for {time.perf_counter() - began:.0f}{about}")

    tables.write(f"\n=== {phase.title}\n")
    tables.flush()
    start = tables.tell()
    status = run_harness(phase.bench, *phase.words, *files, output=tables, beat=beat)
    progress.clear()
    if status != INTERRUPTED:
        done = "done" if status == 0 else "FAILED"
        print(f"{line}: {done} in {time.perf_counter() - began:.0f} s", flush=True)
        if status != 0:
            tables.seek(start)
            sys.stderr.writelines(tables.readlines()[-_LAST_LINES:])
    tables.seek(0, 2)
    return status
