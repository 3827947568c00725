# SPDX-License-Identifier: Apache-2.0
"""This process: its end, deadlines of its waits, its limits, and its environment variables.

Control groups limit a process at every level of their hierarchy, so the smallest limit counts.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TypeVar

__all__ = [
    "KNOWN",
    "LONGEST_LOOK_S",
    "Deadline",
    "available_cores",
    "control_groups",
    "free_address_space_bytes",
    "largest_file_bytes",
    "memory_limit_bytes",
    "new_unknown",
    "until_exit",
    "warn_of_unknown",
]


T = TypeVar("T")


def until_exit(destructor: Callable[[T], None]) -> Callable[[T], None]:
    """Makes a ``__del__`` do nothing once the interpreter ends.

    By then the interpreter has set globals of modules to None, and a destructor that reads one of
    them would print ``Exception ignored in``. Communicators and device heaps were closed earlier
    (:func:`multiprocessing.util.Finalize`), and the process frees everything else.
    """
    is_finalizing = sys.is_finalizing  # a local: the globals may be gone by then

    @wraps(destructor)
    def guarded(self: T) -> None:
        if not is_finalizing():
            destructor(self)

    return guarded


# ---- Deadlines of polling waits; time in which this process does not run does not count ----------


# Seconds. A waiter that has not read the clock for this long was not running: its process was
# stopped, or the machine suspended. kLongestLookNs in protocol/signal.h is the native equivalent.
LONGEST_LOOK_S = 0.25


class Deadline:
    """The deadline of a polling wait.

    A long time between two polls does not count: the process was stopped then, and usually its
    peers were stopped, too.

    Args:
        timeout_s: seconds from now on.
        longest_look_s: the longest time between two polls of a running waiter, in seconds. Use
            more than the default if a poll itself blocks, for example in a connection.

    Attributes:
        timeout_s: the timeout in seconds.
    """

    __slots__ = ("_begin_s", "_longest_look_s", "_looked_s", "timeout_s")

    def __init__(self, timeout_s: float, longest_look_s: float = LONGEST_LOOK_S) -> None:
        self.timeout_s = timeout_s
        self._longest_look_s = longest_look_s
        self._begin_s = self._looked_s = time.monotonic()

    def waited_s(self) -> float:
        """Returns the seconds that have passed, except those in which this process did not run."""
        now_s = time.monotonic()
        if now_s - self._looked_s > self._longest_look_s:
            self._begin_s += now_s - self._looked_s
        self._looked_s = now_s
        return now_s - self._begin_s

    def left_s(self) -> float:
        """Returns the seconds that are left, at least 0."""
        return max(self.timeout_s - self.waited_s(), 0.0)

    def is_over(self) -> bool:
        """True when the time has passed."""
        return self.waited_s() >= self.timeout_s


# ---- Limits of this process: cores, memory, address space, sizes of files -----------------------


_SELF = Path("/proc/self")
# Version 1 of control groups writes "no limit" as a number near 2^63 bytes.
_NO_LIMIT = 1 << 62


def control_groups(controller: str, process: Path = _SELF) -> list[Path]:
    """Returns the folders of the process's control groups that limit one resource.

    Args:
        controller: "memory" or "cpu".
        process: the folder in /proc of the process.

    Returns:
        The folders of its own group and of the enclosing groups, as far as they are mounted,
        innermost first; version 2 of control groups before version 1.
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
        # cgroup2 is one hierarchy of all controllers; version 1 has one hierarchy per controller.
        points = list(_mount_points(mounts, controller if controllers else ""))
        inside = [each for each in points if Path(group).is_relative_to(each[0])]
        # A group outside of the mounted groups has at least the limits of the mounted root.
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
    """Returns the text of a control group's file; "" if the group has no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def memory_limit_bytes(process: Path = _SELF) -> int | None:
    """Returns the smallest memory limit of the process's control groups, or None without one."""
    limits = []
    for folder in control_groups("memory", process):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name)
            if text.isdecimal() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def available_cores(process: Path = _SELF) -> int:
    """Returns the number of cores that the process's affinity mask and control groups allow."""
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
    """Returns RLIMIT_FSIZE (``ulimit -f``), which also limits memory files, or None."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes


# ---- The environment variables of ringcomm, and the warning about unknown names ------------------


PREFIX = "RINGCOMM_"
# docs/reference/environment.md describes each variable. USERS is for users.
USERS = frozenset(
    PREFIX + name
    for name in (
        *("HEAP_BYTES", "HEAP_DIR", "CUDA_HEAP_BYTES", "CUDA_HEAP", "NODE_ID", "MASTER_PORT"),
        *("THREADS", "SOCKET_IFNAME", "TRACE_DIR", "CACHE_DIR", "COMMIT", "BACKEND"),
        *("BUILD_BACKEND", "KERNELS"),
    )
)
KNOWN = USERS | frozenset(
    PREFIX + name
    for name in (
        # Passed from the commands to the processes that they start.
        *("STORE_PORT", "STORE_FD", "BENCH_STORE", "BENCH_TERMINAL"),
        # Used by the tests.
        *("TEST_CASES", "TEST_NODES", "TEST_PRELOADED", "FUZZ", "TSAN"),
        *("MODEL_CHECK", "CUDA_COMPILE", "PTX_CHECK"),
        *("EMULATED_KERNELS", "REAL_LAUNCHES", "TEST_MACHINE"),
    )
)
_warned: set[str] = set()
_LIBRARIES = ("ringcomm", "torch")


def warn_of_unknown() -> None:
    """Warns once of each environment variable ``RINGCOMM_*`` that nothing reads.

    The warning points at the line of the program that called ringcomm, perhaps through torch.
    """
    for told in new_unknown():
        warnings.warn(told, RuntimeWarning, stacklevel=1 + _frames_of_libraries())


def new_unknown() -> list[str]:
    """Returns a sentence for each unknown environment variable that no earlier call has returned.

    The sentence names the known variable with the most similar name, or all variables for users if
    no name is similar. torchrun gives all ranks of a node the same environment, so only local rank
    0 gets sentences.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return []
    unknown = {name for name in os.environ if name.startswith(PREFIX)} - KNOWN - _warned
    _warned.update(unknown)
    # Without the prefix, since it would make all names similar.
    endings = {known.removeprefix(PREFIX): known for known in sorted(KNOWN)}
    sentences = []
    for name in sorted(unknown):
        near = get_close_matches(name.removeprefix(PREFIX).upper(), endings, n=1)
        advice = f"Did you mean {endings[near[0]]}?" if near else f"Known are {_listed(USERS)}."
        sentences.append(
            f"ringcomm has no environment variable {name}, so it has no effect. {advice}"
        )
    return sentences


def _listed(names: Iterable[str]) -> str:
    *others, last = sorted(names)
    return f"{', '.join(others)} and {last}"


def _frames_of_libraries() -> int:
    """Returns how many frames of this package and of torch are above the program's code."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, count = frame.f_back, count + 1
    return count
