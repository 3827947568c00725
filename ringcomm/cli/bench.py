"""``ringcomm bench``: starts the benchmark harness, which runs by itself."""

from __future__ import annotations

import argparse
import subprocess
import sys

COLLECTIVES, TRAINING = "collectives", "training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Runs the harness with the options as given, and returns its exit status."""
    return run_harness(*args.arguments)


def run_harness(*words: str) -> int:
    """Runs the harness, the first word naming a bench; returns its exit status."""
    with subprocess.Popen([sys.executable, "-m", "ringcomm.bench", *words]) as harness:
        while True:
            try:
                return harness.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the harness as well: let it stop its ranks first.
                continue
