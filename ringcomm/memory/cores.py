"""How many cores there are to compute with."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use: its affinity mask, cut to the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:  # no version-2 control group here: the affinity mask is all there is to know
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))
