"""``ringcomm bench``: starts the benchmark harness, which is a program of its own."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import ringcomm
from ringcomm.errors import UnsupportedError

INSTALLED = "ringcomm._bench"
IN_TREE = "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Runs the harness with the options as given, and returns its exit status."""
    package, environment = find_harness()
    command = [sys.executable, "-m", f"{package}.collectives", *args.arguments]
    with subprocess.Popen(command, env=environment) as harness:
        while True:
            try:
                return harness.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the harness as well: let it stop its ranks first.
                continue


def find_harness() -> tuple[str, dict[str, str]]:
    """The harness's package and the environment it needs.

    Raises ``UnsupportedError`` where neither an installation nor a source tree has it.
    """
    environment = dict(os.environ)
    if importlib.util.find_spec(INSTALLED) is not None:
        return INSTALLED, environment
    root = Path(ringcomm.__file__).resolve().parent.parent
    if not (root / IN_TREE / "collectives.py").exists():
        raise UnsupportedError(
            f"the benchmark harness is neither installed as {INSTALLED} nor beside the package: "
            "install ringcomm[bench] again"
        )
    paths = [str(root), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return IN_TREE, environment
