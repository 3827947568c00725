"""``ringcomm bench``: starts the benchmark harness in a process of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys

COLLECTIVES, TRAINING = "collectives", "training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Runs the harness with the given options, and returns its exit status."""
    return run_harness(*args.arguments)


def run_harness(*words: str) -> int:
    """Runs the harness, whose first word names a benchmark; returns its exit status."""
    with subprocess.Popen([sys.executable, "-m", "ringcomm.bench", *words]) as harness:
        while True:
            try:
                return harness.wait()
            except KeyboardInterrupt:
                # The terminal also interrupts the harness: wait until it has stopped its ranks.
                continue
