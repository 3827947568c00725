"""Commands that a release is made with, each in an environment without what is around."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Runs a command to its end, with these environment variables; returns what it printed.

    Raises:
        SystemExit: it failed; what it said is shown.
    """
    words = [str(word) for word in command]
    # Neither a source tree nor a user's own packages shall be found instead of what is installed.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        *(words,),
        cwd=cwd,
        env={**inherited, "PYTHONNOUSERSITE": "1", **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise SystemExit(f"{' '.join(words)} failed ({done.returncode})")
    return done.stdout
