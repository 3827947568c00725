# SPDX-License-Identifier: Apache-2.0
"""``ringcomm bench``: starts the benchmark harness in a process of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from ringcomm.cli.progress import TERMINAL_VARIABLE

COLLECTIVES, TRAINING = "collectives", "training"
_BEAT_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Runs the harness with the given options, and returns its exit status."""
    return run_harness(*args.arguments)


def run_harness(
    *words: str, output: IO[Any] | None = None, beat: Callable[[], object] = lambda: None
) -> int:
    """Runs the harness, whose first word names a benchmark; returns its exit status.

    Args:
        words: the command line of the harness.
        output: a file for stdout and for errors; None: stdout and stderr of this process, with
            the harness's progress.
        beat: a function to call every second while the harness runs.
    """
    error, environment = None, None
    if output is not None:
        # Errors belong into the file, but progress does not: the caller shows it itself.
        error, environment = subprocess.STDOUT, {**os.environ, TERMINAL_VARIABLE: "none"}
    command = [sys.executable, "-m", "ringcomm.bench", *words]
    with subprocess.Popen(command, stdout=output, stderr=error, env=environment) as harness:
        while True:
            try:
                return harness.wait(_BEAT_S)
            except subprocess.TimeoutExpired:
                beat()
            except KeyboardInterrupt:
                # The terminal also interrupts the harness: wait until it has stopped its ranks.
                continue
