# SPDX-License-Identifier: Apache-2.0
"""Scratch files on a failing disk: each call of a small job fails in each way; and a full disk."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcomm import DiskError
from ringcomm.offload.scratch import ScratchFile, aligned_buffer
from tests.memory.disk_folder import filled, skip_unless_disk
from tests.memory.faulty_job import CALLS, TROUBLES
from tests.support import ROOT
from tests.support.compiler import NEEDS_COMPILER, OPTIMISED, compile_to

MIB = 1 << 20


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Any:
    """The output of the job, which runs once for all tests."""
    folder = tmp_path_factory.mktemp("faulty")
    skip_unless_disk(folder)
    library = compile_to(
        folder / "faulty_calls.so",
        ROOT / "kernels/include",
        ROOT / "tests/memory/faulty_calls.cpp",
        flags=OPTIMISED,
        extra=("-shared", "-fPIC"),
    )
    command = [sys.executable, "-m", "tests.memory.faulty_job", str(folder)]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WORDS = {
    "write: EIO": r"expected to write \d+ bytes at offset \d+ .*Input/output error \(EIO\)",
    "write: ENOSPC": r"expected to write .*No space left on device \(ENOSPC\)\. Free space",
    "write: nothing for ever": r"expected to write .*the system moves no bytes",
    "read: EIO": r"expected to read \d+ bytes at offset \d+ .*Input/output error \(EIO\)",
    "read: nothing": r"expected to read .*the file ends before these bytes",
    "reserve: ENOSPC": r"No space left on device\. \d+ bytes are free",
    "reserve: EOPNOTSUPP": r"cannot reserve space",
}


# Operations that raise, in the order in which the job waits; a read after a failed write raises.
RAISING = {"write": ["write", "read"], "read": ["read"], "reserve": ["reserve"]}


@pytest.mark.compiles
@NEEDS_COMPILER
@pytest.mark.parametrize("name", TROUBLES)
def test_every_call_may_go_wrong(told, name):
    """The extent of the failed call raises or has the right bytes; the other extent is intact."""
    trouble, runs = TROUBLES[name], told["outcomes"][name]
    calls = CALLS[trouble.call]
    assert len(runs) == calls + 1
    for n, outcome in enumerate(runs, 1):
        assert outcome["wrong"] == []
        errors = outcome["errors"]
        if name not in WORDS or n > calls:
            assert errors == []
            assert outcome["calls"] >= calls
            continue
        raising = RAISING[name.partition(":")[0]]
        extents = {extent for _, extent, _ in errors}
        if not trouble.for_ever:
            assert len(extents) == 1
        assert sorted(operation for operation, _, _ in errors) == sorted(raising * len(extents))
        for _, _, text in errors:
            assert re.search(WORDS[name], text)


@pytest.mark.compiles
@NEEDS_COMPILER
def test_a_signal_ends_a_wait_and_not_the_transfer(told):
    assert told["interrupted"]


@pytest.mark.compiles
@NEEDS_COMPILER
def test_a_disk_that_hangs_is_an_error_after_a_while(told):
    """Waits and close() end long before the writes, whose memory and file stay until they end.

    The process must also end while another write hangs; otherwise the job would not finish.
    """
    hanging = told["hanging"]
    first, second = hanging["texts"]
    head = (
        r"state: write of extent {} in \S+: expected to write 4096 bytes at offset {} .*, got: {}"
    )
    assert re.match(head.format(0, 0, r"it is not done after 0\.1 s\. The disk hangs"), first)
    earlier = r"an earlier transfer is not done after 0\.1 s\. The disk hangs, .*timeout_s"
    assert re.match(head.format(1, 4096, earlier), second)
    assert hanging["told_s"] >= 0.1
    assert hanging["kept"] or hanging["early_s"] > 1.9
    assert hanging["freed"]


CLONE_NEWNS = 0x20000


def on_small_disk(check: Callable[[Path], object], folder: Path) -> Any:
    """Runs ``check`` in a child with an 8 MiB ext4 file system, unmounted when the child ends."""
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    image.write_bytes(bytes(8 * MIB))
    if not shutil.which("mkfs.ext4"):
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    reading, writing = os.pipe()
    # A child process enters new namespaces; a fork already has `check` and all imports.
    pid = os.fork()
    if pid == 0:
        told: object = "the child raised"
        try:
            told = _mounted(check, image, mounted)
        finally:
            os.write(writing, json.dumps(told).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        result = json.loads(stream.read())
    os.waitpid(pid, 0)
    if isinstance(result, str):
        pytest.skip(f"no file system of our own: {result}")
    return result


def _mounted(check: Callable[[Path], object], image: Path, mounted: Path) -> object:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-o", "loop", str(image), str(mounted)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{' '.join(command)}: {done.stderr}"
    return check(mounted)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def fill_disk(folder: Path) -> dict[str, Any]:
    free = free_bytes(folder)
    seen: dict[str, Any] = {"folder": str(folder), "error": "", "extents": 0}
    memory, back = filled(MIB, 0), aligned_buffer(MIB)
    with ScratchFile(folder, "state of rank 3") as scratch:
        try:
            for _ in range(9):
                scratch.add_extent(MIB)
                seen["extents"] += 1
        except DiskError as error:
            seen["error"] = str(error)
        seen["free when full"] = free_bytes(folder)
        last = seen["extents"] - 1
        scratch.write(last, memory).wait()
        scratch.read(last, back).wait()
        seen["the last extent holds"] = torch.equal(memory, back)
    seen["given back by close"] = free_bytes(folder) == free
    # A child process is killed; a fork already has the mount and all imports.
    pid = os.fork()
    if pid == 0:
        mine = ScratchFile(folder, "state of a rank that is killed")
        mine.write(mine.add_extent(4 * MIB), aligned_buffer(4 * MIB)).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    seen["given back by kill -9"] = free_bytes(folder) == free
    return seen


def test_a_full_disk_is_an_error_and_takes_its_space_back(tmp_path):
    skip_unless_disk(tmp_path)
    seen = on_small_disk(fill_disk, tmp_path)
    extents = seen["extents"]
    assert 1 <= extents < 8
    assert seen["error"] == (
        f"state of rank 3: expected {MIB} bytes after {extents * MIB} of its own in a scratch file "
        f"in {seen['folder']}, got: No space left on device. {seen['free when full']} bytes are "
        "free. Free space on that disk, raise the limit (quota, ulimit -f), or name a folder on a "
        "larger one"
    )
    assert seen["free when full"] > 0  # the space that the refused extent had taken
    assert seen["the last extent holds"]
    assert seen["given back by close"]
    assert seen["given back by kill -9"]
