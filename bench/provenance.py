"""The provenance of figures: machine, software, commit and command, without private paths."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

# Names the commit of a source tree that came without its history, or with another one.
COMMIT_VARIABLE = "RINGCOMM_COMMIT"


def collect(
    command: Sequence[str], versions: Mapping[str, str], device_facts: Mapping[str, str]
) -> dict[str, str]:
    """Plain text by key; ``versions`` are those of the systems that were timed."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{f"version of {name}": version for name, version in versions.items()},
        **device_facts,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(command),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    model = facts.get("model name", platform.machine())
    if "cpu family" in facts:
        model += f" (family {facts['cpu family']} model {facts['model']})"
    return model


def commit() -> str:
    """Returns what RINGCOMM_COMMIT says, else the commit of the source tree, or "unknown"."""
    root = Path(__file__).resolve().parent.parent
    told = os.environ.get(COMMIT_VARIABLE)
    if told:
        return told
    if not (root / ".git").exists():
        return "unknown"
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return name + ("-dirty" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        # No git here, or a tree that belongs to another user, which git refuses to read.
        return "unknown"


def _git(root: Path, *words: str) -> str:
    return subprocess.check_output(
        ["git", *words], cwd=root, text=True, stderr=subprocess.DEVNULL
    ).strip()


def lines(facts: Mapping[str, str]) -> list[str]:
    """The facts as lines of text, and as the head of a CSV file."""
    return [f"# {key}: {value}" for key, value in facts.items()]
