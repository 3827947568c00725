# SPDX-License-Identifier: Apache-2.0
"""Only this user's processes can reach a heap."""

import ctypes
import json
import os
import stat
import subprocess
import sys

import pytest

from ringcomm import _native

MIB = 1 << 20
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# A program that runs as another user, and prints which accesses succeeded.
STRANGER = """
import ctypes, json, os, sys
pid, fd, address = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
could = []
def tries(name, call):
    try:
        call()
        could.append(name)
    except OSError:
        pass
tries("open", lambda: os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)))
tries("list", lambda: os.listdir(f"/proc/{pid}/fd"))
tries("maps", lambda: open(f"/proc/{pid}/mem", "rb").close())
tries("map files", lambda: os.listdir(f"/proc/{pid}/map_files"))
libc = ctypes.CDLL(None, use_errno=True)
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(8)
mine, theirs = Part(ctypes.addressof(room), 8), Part(address, 8)
for name in ("process_vm_readv", "process_vm_writev"):
    if getattr(libc, name)(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:
        could.append(name)
taken = libc.syscall(438, libc.syscall(434, pid, 0), fd, 0)  # pidfd_getfd, pidfd_open
if taken >= 0:
    could.append("pidfd_getfd")
print(json.dumps(could))
"""


def _what_a_stranger_can(fd: int, address: int) -> list[str]:
    run = [sys.executable, "-I", "-c", STRANGER, str(os.getpid()), str(fd), str(address)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def _weaknesses(fd: int) -> list[str]:
    """Returns the weaknesses of the file behind a heap."""
    status = os.fstat(fd)
    wrong = []
    if status.st_mode & 0o077:
        wrong.append("others may open it")
    if status.st_nlink:
        wrong.append("it has a name")
    if status.st_uid != os.geteuid():
        wrong.append("it belongs to another user")
    if not os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)"):
        wrong.append("its path leads to it")
    return wrong


def _names() -> set[str]:
    """Returns the shared memory files, except for those of torch and multiprocessing."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "torch_"))}


@pytest.mark.parametrize("directory", ["", "/dev/shm"])
def test_a_heap_has_no_name_and_one_owner(directory):
    before = _names()
    heap = _native.Heap(4 * MIB, directory)
    assert _weaknesses(heap.fd) == []
    assert _names() <= before
    assert stat.S_IMODE(os.fstat(heap.fd).st_mode) == 0o600
    if not directory:
        for size in (2 * MIB, 8 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(heap.fd, size)


def test_the_checker_sees_a_heap_for_everybody():
    heap = _native.Heap(4 * MIB, "")
    os.fchmod(heap.fd, 0o666)
    assert _weaknesses(heap.fd) == ["others may open it"]
    named = os.open("/dev/shm/ringcomm-test-named", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        assert "it has a name" in _weaknesses(named)
    finally:
        os.unlink("/dev/shm/ringcomm-test-named")
        os.close(named)


@needs_root
@pytest.mark.parametrize("directory", ["", "/dev/shm"])
def test_another_user_reaches_nothing(directory):
    heap = _native.Heap(4 * MIB, directory)
    assert _what_a_stranger_can(heap.fd, heap.base_ptr) == []


@needs_root
def test_the_same_program_reaches_what_is_its_own():
    """Negative control: without the change of user, all calls succeed."""
    heap = _native.Heap(4 * MIB, "")
    program = STRANGER.replace("os.setgroups([]); os.setgid(65534); os.setuid(65534)", "")
    run = [sys.executable, "-I", "-c", program, str(os.getpid()), str(heap.fd), str(heap.base_ptr)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    assert {"open", "list", "maps", "process_vm_readv"} <= set(json.loads(done.stdout))


def _file(kind: str) -> int:
    if kind == "file on a disk":
        fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    else:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    if kind == "directory":
        return os.open("/tmp", os.O_RDONLY)
    os.ftruncate(fd, 4 * MIB)
    os.fchmod(fd, 0o666 if kind == "everybody's" else 0o600)
    if kind == "another user's":
        os.fchown(fd, NOBODY, NOBODY)
    if kind in ("everybody's", "another user's", "of zeros", "of another size"):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


FILES = {
    "unsealed memfd": "its size is not sealed",
    "everybody's": "other users may open it",
    "another user's": f"it belongs to user {NOBODY}",
    "file on a disk": "no memory file|its size is not sealed",
    "of zeros": "its token differs",
    "of another size": "its size is",
    "directory": "Is a directory",
}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_heap_is_not_mapped(kind):
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    fd = _file(kind)
    size = 2 * MIB if kind == "of another size" else 4 * MIB
    try:
        with pytest.raises(OSError, match=FILES[kind]):
            _native.PeerHeap.open(os.getpid(), fd, size, 17)
    finally:
        os.close(fd)


def test_a_heap_is_mapped():
    """Negative control: both kinds of heap pass the checks, opened as a peer opens them."""
    for directory in ("", "/dev/shm"):
        heap = _native.Heap(4 * MIB, directory)
        peer = _native.PeerHeap.open(os.getpid(), heap.fd, heap.capacity_bytes, heap.token)
        assert ctypes.string_at(peer.base_ptr, 8) == ctypes.string_at(heap.base_ptr, 8)
