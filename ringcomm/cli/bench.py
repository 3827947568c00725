"""``ringcomm bench``: starts the benchmark harness, which is a program of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys

HARNESS = "ringcomm.bench.collectives"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Runs the harness with the options as given, and returns its exit status."""
    command = [sys.executable, "-m", HARNESS, *args.arguments]
    with subprocess.Popen(command) as harness:
        while True:
            try:
                return harness.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the harness as well: let it stop its ranks first.
                continue
