"""``ringcomm bench``: starts the benchmark harness, whose programs run by themselves."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

COLLECTIVES, TRAINING = "ringcomm.bench.collectives", "ringcomm.bench.training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Runs the harness with the options as given, and returns its exit status."""
    return run_harness(COLLECTIVES, args.arguments)


def run_harness(module: str, arguments: Sequence[str]) -> int:
    """Runs one of the harness's programs, and returns its exit status."""
    with subprocess.Popen([sys.executable, "-m", module, *arguments]) as harness:
        while True:
            try:
                return harness.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the harness as well: let it stop its ranks first.
                continue
