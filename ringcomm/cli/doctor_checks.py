"""What ``ringcomm doctor`` looks at: each check reads one thing and says what it means."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ringcomm.errors import RingcommError
from ringcomm.memory.cores import available_cores

OK, NOTE, FAIL = "ok", "note", "FAIL"
SELF_TEST_S = 60.0
# torch, staging and tensors of a small run; below this a training process is likely to be killed.
LITTLE_MEMORY_BYTES = 2 << 30
LARGE_TENSOR_BYTES = 32 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``advice`` says what to do about a note or a failure."""

    name: str
    verdict: str
    value: str
    advice: str = ""


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def check_versions() -> list[Finding]:
    found = [
        Finding("python", OK, f"{platform.python_version()} ({platform.machine()})"),
        Finding("torch", OK, torch.__version__),
    ]
    try:
        found.append(Finding("ringcomm", OK, importlib.metadata.version("ringcomm")))
    except importlib.metadata.PackageNotFoundError:
        found.append(Finding("ringcomm", NOTE, "source tree", "not installed: pip install ."))
    backends = importlib.metadata.entry_points(group="torch.backends")
    if any(entry.name == "ringcomm" for entry in backends):
        found.append(Finding("backend", OK, 'init_process_group("ringcomm") finds it'))
    else:
        advice = "import ringcomm.c10d first, or install the package"
        found.append(Finding("backend", NOTE, "no entry point in torch.backends", advice))
    return found


def check_native() -> Finding:
    try:
        from ringcomm import _native
    except ImportError as error:
        return Finding("native module", FAIL, "cannot be imported", str(error))
    return Finding("native module", OK, f"instruction set {_native.isa()}")


def check_cores() -> Finding:
    usable, online = available_cores(), os.cpu_count() or 1
    text = f"{usable} usable of {online}"
    if usable < 2:
        return Finding("cores", NOTE, text, "two ranks will take turns on one core")
    return Finding("cores", OK, text)


def check_memory(meminfo: str, limit_bytes: int | None) -> Finding:
    """``meminfo`` is the text of /proc/meminfo, ``limit_bytes`` what the control group allows."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    total, available = (int(fields[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    limit = "none" if limit_bytes is None else gib(limit_bytes)
    text = f"{gib(available)} available of {gib(total)}, control group limit {limit}"
    if min(available, limit_bytes or available) < LITTLE_MEMORY_BYTES:
        return Finding("memory", NOTE, text, "little: set RINGCOMM_HEAP_BYTES low, or free memory")
    return Finding("memory", OK, text)


def cgroup_limit_bytes(membership: str, root: Path) -> int | None:
    """The least limit from this process's control group upwards; None without one.

    ``membership`` is the text of /proc/self/cgroup, ``root`` the folder /sys/fs/cgroup.
    """
    limits: list[int] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        files = [level / name for level in (folder, *folder.parents) if level.is_relative_to(top)]
        texts = [file.read_text().strip() for file in files if file.exists()]
        limits += [int(text) for text in texts if text != "max"]
    # Version 1 writes "no limit" as a number of pages near 2^63.
    return min((limit for limit in limits if limit < 1 << 62), default=None)


def check_shm(directory: str) -> Finding:
    status = os.statvfs(directory)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{gib(free)} free of {gib(total)}"
    return Finding(directory, OK, text + " (the heap does not use it unless told to)")


def check_heap(shmem_setting: str) -> Finding:
    """Tries the heap. ``shmem_setting`` is the text of transparent_hugepage/shmem_enabled."""
    import ringcomm
    from ringcomm.memory.heap import HEAP_DIR_VARIABLE

    directory = os.environ.get(HEAP_DIR_VARIABLE, "")
    kind = f"unnamed file in {directory}" if directory else "memfd"
    try:
        tried = ringcomm.empty(LARGE_TENSOR_BYTES, dtype=torch.uint8)
    except RingcommError as error:
        return Finding("heap", FAIL, kind, str(error))
    stats = ringcomm.heap_stats()
    del tried
    text = f"{kind}, up to {gib(stats['capacity_bytes'])}"
    if stats["huge_bytes"]:
        return Finding("heap", OK, f"{text}, huge pages for large tensors")
    advice = f"large tensors are slower: shmem_enabled is {shmem_setting.strip() or 'missing'}"
    return Finding("heap", NOTE, f"{text}, 4 KiB pages only", advice)


def _refusal(reader: str, *arguments: str) -> str:
    """Why another process does not find "found" with the program ``reader``; empty: it does."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", reader, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.strip() == "found":
        return ""
    return next(iter(done.stderr.strip().splitlines()[-1:]), "wrong content")


_OPENER = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(0); print(f.read().decode())"


def check_descriptor_paths() -> Finding:
    """Whether one process can map another's memory through /proc/<pid>/fd, as ranks do."""
    descriptor = os.memfd_create("ringcomm-doctor")
    try:
        os.write(descriptor, b"found")
        reason = _refusal(_OPENER, f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if not reason:
        return Finding("peer memory", OK, "/proc/<pid>/fd opens from another process")
    advice = "run all ranks as one user, in one PID namespace, with /proc mounted without hidepid"
    return Finding("peer memory", FAIL, f"/proc/<pid>/fd does not open: {reason}", advice)


_COPIER = """
import ctypes, os, sys
pid, address = map(int, sys.argv[1:])
class Span(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
to = ctypes.create_string_buffer(5)
mine, theirs = Span(ctypes.addressof(to), 5), Span(address, 5)
copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
copy.argtypes = [ctypes.c_int, *2 * (ctypes.c_void_p, ctypes.c_ulong), ctypes.c_ulong]
copy(pid, ctypes.addressof(mine), 1, ctypes.addressof(theirs), 1, 0)
if to.raw != b"found":
    sys.exit(os.strerror(ctypes.get_errno()))
print("found")
"""


def check_single_copy() -> Finding:
    """Whether one process can copy out of another (process_vm_readv), which spares a copy."""
    found = ctypes.create_string_buffer(b"found")
    reason = _refusal(_COPIER, str(os.getpid()), str(ctypes.addressof(found)))
    if not reason:
        return Finding("single copy", OK, "process_vm_readv reads another process")
    advice = (
        "plain tensors are copied twice, heap tensors as ever: see kernel.yama.ptrace_scope, the "
        "container's seccomp profile and its capabilities"
    )
    return Finding("single copy", NOTE, f"process_vm_readv is refused: {reason}", advice)


def check_self_test(timeout_s: float = SELF_TEST_S) -> Finding:
    """Two ranks, one all-reduce and one reduce-scatter each on plain and heap tensors."""
    with tempfile.TemporaryDirectory(prefix="ringcomm-doctor-") as directory:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "ringcomm.cli.doctor_rank", f"{directory}/store", str(rank)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            errors = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return Finding("self-test", FAIL, f"2 ranks hang for {timeout_s:.0f} s", "see above")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for number, (rank, error) in enumerate(zip(ranks, errors, strict=True)):
        if rank.returncode != 0:
            reason = error.strip().splitlines()[-1:] or [f"exit status {rank.returncode}"]
            return Finding("self-test", FAIL, f"rank {number}: {reason[0]}", "see above")
    return Finding("self-test", OK, "2 ranks exchanged and summed what they should")
