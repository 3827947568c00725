# SPDX-License-Identifier: Apache-2.0
"""Runs commands and finds interpreters for `make matrix` and `make wheels`. Needs no package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
_LIMIT_S = 1800


class CommandFailed(SystemExit):
    """A command failed or did not end in time; the message has its name and last output line."""


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Runs a command with additional environment variables; returns its output.

    Raises:
        CommandFailed: its exit status is not 0, or it has not ended after 30 minutes. The
            command's output goes to stderr.
    """
    words = [str(word) for word in command]
    name = " ".join(Path(word).name for word in words[:3])
    # Python must find the installed package, not a source tree or the user's own packages.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    fixed = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            *(words,),
            cwd=cwd,
            env={**inherited, **fixed, **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{name}: not done after {_LIMIT_S} s") from error
    if done.returncode:
        sys.stderr.write(done.stdout)
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CommandFailed(f"{name}: {lines[-1]}")
    return done.stdout


def interpreter(version: str) -> Path | None:
    """Finds an interpreter of ``version`` ("3.12") on the PATH or in pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    found = [Path(on_path)] if on_path else []
    for each in [*found, *pyenv.glob(f"{version}.*/bin/python{version}")]:
        command = [str(each), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == version:
            return each
    return None


def make_environment(python: Path, folder: Path, *packages: str | Path) -> Path:
    """Creates a virtual environment with packages in ``folder``; returns its interpreter."""
    run(python, "-m", "venv", folder)
    own = folder / "bin" / "python"
    if packages:
        run(own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages)
    return own
