# SPDX-License-Identifier: Apache-2.0
"""Runs the command for its tests, and looks for processes that it has left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support import ROOT, fork_server

LIMIT_S = 120


def clean_environment() -> dict[str, str]:
    """This environment without what a launcher around the tests may have set."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in launched}


def start(*arguments: object, path: Path = ROOT, anew: bool = False) -> subprocess.Popen[str]:
    """Start ``python ARGUMENTS`` from the project's root, with modules found in ``path`` first.

    In a fork, as ``fork_server`` tells, unless it is to be an interpreter ``anew``.
    """
    popen = subprocess.Popen if anew else fork_server.Popen
    return popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**clean_environment(), "PYTHONPATH": f"{path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    *arguments: object, path: Path = ROOT, anew: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end, as ``start`` does."""
    with start(*arguments, path=path, anew=anew) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def command_lines(word: str) -> list[tuple[int, list[str]]]:
    """Processes of this machine that have ``word`` among their arguments, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_text().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if word in arguments:
                found.append((int(entry.name), arguments))
    return found


def ranks_of(launcher_pid: int) -> dict[int, int]:
    """Process ids of the ranks that ``launcher_pid`` started, by rank."""
    ranks = {}
    for pid, arguments in command_lines("ringcomm.launch"):
        if str(launcher_pid) in arguments:
            environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            values = dict(item.split("=", 1) for item in environment if "=" in item)
            ranks[int(values["RANK"])] = pid
    return ranks


def is_running(pid: int) -> bool:
    """Tells whether the process lives; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until ``condition`` holds; fails after two minutes."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)


def train_arguments(*more: object) -> Sequence[object]:
    """A training run of a tiny model."""
    size = ("--width", 32, "--depth", 1, "--heads", 2, "--context", 32, "--batch", 4)
    return ("-m", "ringcomm", "train", *size, *more)
