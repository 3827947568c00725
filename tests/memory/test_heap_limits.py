# SPDX-License-Identifier: Apache-2.0
"""The heap under system limits: its sizes adapt, and errors give advice for the cause."""

import errno
import os
import resource
from contextlib import contextmanager

import pytest
import torch

import ringcomm
from ringcomm import _native
from ringcomm.errors import HeapError, RendezvousError
from ringcomm.memory import host_heap
from ringcomm.process import free_address_space_bytes
from tests.support.ranks import run_ranks

MIB = 1 << 20
SIZE, FOLDER = "RINGCOMM_HEAP_BYTES", "RINGCOMM_HEAP_DIR"


@contextmanager
def limited(kind, value):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def limited_address_space(more_bytes):
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    return limited(resource.RLIMIT_AS, used_bytes + more_bytes)


def _sums_in_little_address_space(store, rank, world, by_launcher):
    if by_launcher:
        os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE=str(world))
    with limited_address_space(1024 * MIB):
        if by_launcher:
            ringcomm.zeros(4)  # before the number of ranks is known
        with ringcomm.Communicator.from_store(store, rank, world, timeout=60) as comm:
            tensor = torch.ones(3)
            comm.all_reduce(tensor)
        capacity_bytes = ringcomm.heap_stats()["capacity_bytes"]
        return tensor.tolist(), 150 * MIB < capacity_bytes <= 512 * MIB // world


@pytest.mark.parametrize("by_launcher", [False, True])
def test_ranks_share_a_limited_address_space(by_launcher):
    """A limit like ulimit -v applies to each process, which maps the heaps of all ranks."""
    assert run_ranks(_sums_in_little_address_space, 2, by_launcher) == [([2.0] * 3, True)] * 2


def test_the_default_size_follows_from_the_least_limit(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER, raising=False)
    whole = host_heap.default_heap_bytes()
    monkeypatch.setattr(host_heap, "memory_limit_bytes", lambda: 64 * MIB)
    assert host_heap.default_heap_bytes() == 32 * MIB < whole
    monkeypatch.setattr(host_heap, "memory_limit_bytes", lambda: 100)
    assert host_heap.default_heap_bytes() == host_heap.SMALLEST_HEAP_BYTES
    monkeypatch.setattr(host_heap, "memory_limit_bytes", lambda: None)
    monkeypatch.setattr(host_heap, "largest_file_bytes", lambda: 50 * MIB)
    assert host_heap.default_heap_bytes() == 50 * MIB
    monkeypatch.setattr(host_heap, "free_address_space_bytes", lambda: 64 * MIB)
    assert host_heap.default_heap_bytes(1) == 32 * MIB
    assert host_heap.default_heap_bytes(4) == 8 * MIB
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(host_heap, "_size_of", lambda directory: [6 * MIB])
    assert host_heap.default_heap_bytes(1) == 6 * MIB
    monkeypatch.setenv(SIZE, "1k")
    with pytest.raises(ringcomm.ArgumentError, match="heap_bytes: expected at least"):
        host_heap._wanted_heap_bytes(None, 1)


def _under_a_real_limit(store, rank, world, cause):
    os.environ[SIZE] = "4G"
    kind, value = {
        "address space": (resource.RLIMIT_AS, 2 << 30),
        "files": (resource.RLIMIT_FSIZE, 64 * MIB),
        "descriptors": (resource.RLIMIT_NOFILE, 0),
    }[cause]
    if kind == resource.RLIMIT_AS:
        value = 1 << 30
        limit = limited_address_space(value)
    else:
        limit = limited(kind, value)
    with limit, pytest.raises(HeapError) as raised:
        host_heap.process_heap()
    return str(raised.value)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("address space", (SIZE, "ulimit -v")),
        ("files", (SIZE, "ulimit -f", str(64 * MIB))),
        ("descriptors", ("ulimit -n",)),
    ],
)
def test_a_real_limit_is_named(cause, words):
    (text,) = run_ranks(_under_a_real_limit, 1, cause)
    assert all(word in text for word in words), text
    assert (SIZE in words) == (SIZE in text), text
    assert FOLDER not in text


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EACCES])
def test_no_size_helps_where_memfd_create_is_refused(monkeypatch, code):
    def refuse(*arguments):
        raise OSError(code, f"cannot create shared memory in memory: {os.strerror(code)}")

    monkeypatch.setattr(_native, "Heap", refuse)
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(HeapError) as raised:
        host_heap._make_heap(8 * MIB)
    text = str(raised.value)
    assert "memfd_create" in text and f"{FOLDER} to a folder of a tmpfs" in text
    assert SIZE not in text


def test_a_folder_that_can_hold_no_heap_is_refused_by_its_rank(monkeypatch, tmp_path, disk_folder):
    """Also refuses a folder whose file system cannot seal files, such as a disk's."""
    for folder in (tmp_path / "none", disk_folder):
        monkeypatch.setenv(FOLDER, str(folder))
        with pytest.raises(HeapError) as raised:
            host_heap._make_heap(8 * MIB)
        text = str(raised.value)
        assert f"{FOLDER}={folder} must be an existing folder of a tmpfs" in text
        assert SIZE not in text
    assert f"{disk_folder} is not on a tmpfs" in text


@pytest.fixture
def disk_folder():
    """Returns a folder that is not on a tmpfs."""
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    except OSError:
        pytest.skip(f"the file system of {folder} has no O_TMPFILE")
    os.close(descriptor)
    return folder


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOMEM, (SIZE, "ulimit -v", "vm.max_map_count")),
        (errno.EMFILE, ("ulimit -n",)),
        (errno.ENFILE, ("ulimit -n",)),
        (errno.EINVAL, ("RINGCOMM_NODE_ID",)),
    ],
)
def test_a_peers_heap_that_cannot_be_mapped_is_told_by_its_cause(monkeypatch, code, words):
    class Refusing:
        @staticmethod
        def open(*arguments):
            raise OSError(code, os.strerror(code))

    class Address:
        rank, pid, fd, capacity_bytes, token = 1, 2, 3, 4, 5

    monkeypatch.setattr(_native, "PeerHeap", Refusing)
    with pytest.raises(RendezvousError) as raised:
        host_heap.map_heap(Address(), host_heap.process_heap(), "x")
    text = str(raised.value)
    assert all(word in text for word in words), text
    assert ("RINGCOMM_NODE_ID" in text) == ("RINGCOMM_NODE_ID" in words)


@pytest.mark.parametrize(
    ("code", "folder", "words"),
    [
        (errno.ENOBUFS, "", (f"raise {SIZE}",)),
        (errno.ENOMEM, "", ("control group", f"A larger {SIZE} cannot help")),
        (errno.ENOSPC, "/dev/shm", ("--shm-size", f"A larger {SIZE} cannot help")),
    ],
)
def test_a_heap_without_room_says_what_can_help(monkeypatch, code, folder, words):
    monkeypatch.setenv(FOLDER, folder)
    error = host_heap.no_room_error("x", host_heap.process_heap(), OSError(code, "no room"))
    assert all(word in str(error) for word in words), error


def test_memory_that_a_control_group_still_grants(tmp_path):
    """Reads both versions and every group given; cached pages of files count as available."""
    inner, old = tmp_path / "inner", tmp_path / "old"
    cached = f"anon 1\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\n"
    for folder, name, text in (
        (tmp_path, "memory.max", "max"),
        (inner, "memory.max", 64 * MIB),
        (inner, "memory.current", 60 * MIB),
        (inner, "memory.stat", cached),
        (old, "memory.limit_in_bytes", 8 * MIB),
        (old, "memory.usage_in_bytes", 5 * MIB),
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    roomy = _native.Heap(256 * MIB, "", [str(tmp_path), str(inner)])
    kept = roomy.allocate(30 * MIB)
    with pytest.raises(OSError, match="34 MiB is available") as raised:
        roomy.allocate(60 * MIB)
    assert raised.value.errno == errno.ENOMEM and kept.size_bytes == 30 * MIB
    tight = _native.Heap(256 * MIB, "", [str(inner), str(old)])
    with pytest.raises(OSError, match="3 MiB is available"):
        tight.allocate(30 * MIB)


def _free_address_space(store, rank, world):
    unlimited = free_address_space_bytes()
    with limited_address_space(100 * MIB):
        return unlimited, free_address_space_bytes()


def test_a_process_knows_its_free_address_space():
    """In a process of its own: threads of earlier tests may end meanwhile, and unmap memory."""
    ((unlimited, left),) = run_ranks(_free_address_space, 1)
    assert unlimited is None
    assert 90 * MIB < left <= 100 * MIB
