"""Runs the project's programs from the source tree, as a user would."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK")


def run_program(*command, environment=None, timeout_s=100):
    """``python -m`` and the words given; returns the finished process with its output as text."""
    outside = {key: os.environ[key] for key in os.environ if key not in LAUNCHER_VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**outside, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
