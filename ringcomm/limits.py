"""Limits of this process: cores, memory, address space, sizes of files.

Control groups limit a process at every level of their hierarchy, so the least limit counts.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "available_cores",
    "control_groups",
    "free_address_space_bytes",
    "largest_file_bytes",
    "memory_limit_bytes",
]

_SELF = Path("/proc/self")
# Version 1 writes "no limit" as a number of pages near 2^63.
_NO_LIMIT = 1 << 62


def control_groups(controller: str, process: Path = _SELF) -> list[Path]:
    """Returns the folders of the process's control groups that limit one resource.

    Args:
        controller: "memory" or "cpu".
        process: the folder in /proc of the process.

    Returns:
        The folder of its own group and those of the groups around it as far as they are mounted,
        innermost first, in version 2 and then in version 1.
    """
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:
        return []  # a kernel without control groups, or no /proc
    folders: list[Path] = []
    for line in memberships:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # cgroup2 is one hierarchy of all controllers; in version 1 each has its own.
        points = list(_mount_points(mounts, controller if controllers else ""))
        inside = [each for each in points if Path(group).is_relative_to(each[0])]
        # A group outside of what is mounted is limited by what is mounted, at least.
        for root, mounted_at in (inside or points)[:1]:
            folder = mounted_at / (Path(group).relative_to(root) if inside else "")
            around = [each for each in folder.parents if each.is_relative_to(mounted_at)]
            folders += [folder, *around]
    return folders


def _mount_points(mounts: list[str], controller: str) -> Iterator[tuple[Path, Path]]:
    """Yields the root and the mount point of each mount of a hierarchy; "" means cgroup2."""
    for line in mounts:
        # proc_pid_mountinfo(5): optional fields end with a hyphen.
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_it = kind[0] == "cgroup" and controller in kind[2].split(",")
        if is_it if controller else kind[0] == "cgroup2":
            yield Path(_unescaped(fields[3])), Path(_unescaped(fields[4]))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _text(path: Path) -> str:
    """Returns the text of a file of a control group; "" where the group has no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def memory_limit_bytes(process: Path = _SELF) -> int | None:
    """Returns the least memory limit of the process's control groups, or None without one."""
    limits = []
    for folder in control_groups("memory", process):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name)
            if text.isdecimal() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def available_cores(process: Path = _SELF) -> int:
    """Returns the cores of the process's affinity mask, cut to its control groups' quotas."""
    cores = len(os.sched_getaffinity(0))
    for folder in control_groups("cpu", process):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        # No limit is "max" in version 2 and "-1" in version 1.
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def free_address_space_bytes() -> int | None:
    """Returns the bytes that RLIMIT_AS (``ulimit -v``) leaves, or None without a limit."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit_bytes == resource.RLIM_INFINITY:
        return None
    used_bytes = int((_SELF / "statm").read_text().split()[0]) * resource.getpagesize()
    return max(limit_bytes - used_bytes, 0)


def largest_file_bytes() -> int | None:
    """Returns RLIMIT_FSIZE (``ulimit -f``), which counts for memory files too, or None."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
