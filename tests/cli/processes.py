# SPDX-License-Identifier: Apache-2.0
"""Runs the command for its tests, and finds processes that it has left running."""

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
    """Returns this environment without the variables of a launcher around the tests."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in launched}


def start(*arguments: object, path: Path = ROOT, anew: bool = False) -> subprocess.Popen[str]:
    """Starts ``python ARGUMENTS`` in the project's root, with modules found in ``path`` first.

    The process is a fork (see ``fork_server``), or a new interpreter if ``anew``.
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
    """Runs ``python ARGUMENTS`` to its end, started by ``start``."""
    with start(*arguments, path=path, anew=anew) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def command_lines(word: str) -> list[tuple[int, list[str]]]:
    """Returns this machine's processes with ``word`` among their arguments, except zombies."""
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
    """Returns the process ids of the ranks that ``launcher_pid`` started, by rank."""
    ranks = {}
    for pid, arguments in command_lines("ringcomm.launch"):
        if str(launcher_pid) in arguments:
            environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            values = dict(item.split("=", 1) for item in environment if "=" in item)
            ranks[int(values["RANK"])] = pid
    return ranks


def is_running(pid: int) -> bool:
    """True if the process runs; False for a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls until ``condition`` holds; fails after two minutes."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)


def train_arguments(*more: object) -> Sequence[object]:
    """Returns the arguments of a training run of a tiny model."""
    size = ("--width", 32, "--depth", 1, "--heads", 2, "--context", 32, "--batch", 4)
    return ("-m", "ringcomm", "train", *size, *more)
