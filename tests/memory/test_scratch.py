# SPDX-License-Identifier: Apache-2.0
"""Scratch files return what was written, or an error says why not; no file is left behind."""

import fcntl
import gc
import os
import random
import resource
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import ArgumentError, Disk, DiskError, ForkError, _native
from ringcomm.offload.scratch import PAGE_BYTES, ScratchFile, aligned_buffer
from tests.memory.disk_folder import filled, skip_unless_disk

MIB = 1 << 20
CUT_BYTES = 8 * MIB  # kScratchCutBytes
EXTENT_BYTES = 3 * CUT_BYTES


@pytest.fixture
def folder(tmp_path):
    return skip_unless_disk(tmp_path)


@pytest.fixture
def scratch(folder):
    with ScratchFile(folder, "state of rank 3") as made:
        yield made


def reference_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def sums(data: bytes, start: int = 0) -> dict[str, int]:
    buffer = aligned_buffer(start + max(len(data), 1))[start:]
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    ways = _native.crc32c_ways()
    return {way: _native.crc32c(buffer.data_ptr(), len(data), way) for way in ways}


def test_checksums_are_crc32c():
    """Known values of RFC 3720, and lengths around the three strands, by each implementation."""
    assert "tables" in _native.crc32c_ways()
    known = {b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43}
    for data, wanted in known.items():
        assert set(sums(data).values()) == {wanted}
    drawn = random.Random(1)
    for length in (0, 1, 7, 8, 9, 12287, 12288, 12289, 24576, 3 * 65536 + 12288 + 9):
        data = drawn.randbytes(length)
        assert set(sums(data, length % 3).values()) == {reference_crc32c(data)}, length


@pytest.mark.parametrize(
    "size_bytes",
    [
        PAGE_BYTES,
        CUT_BYTES - PAGE_BYTES,
        CUT_BYTES,
        CUT_BYTES + PAGE_BYTES,
        3 * CUT_BYTES + PAGE_BYTES,
    ],
)
def test_what_is_written_comes_back(scratch, size_bytes):
    others = [scratch.add_extent(PAGE_BYTES) for _ in range(2)]
    extent = scratch.add_extent(size_bytes)
    for seed in range(2):  # the second version replaces the first
        written, back = filled(size_bytes, seed), aligned_buffer(size_bytes)
        scratch.write(extent, written).wait()
        scratch.read(extent, back).wait()
        assert torch.equal(written, back)
    assert (scratch.bytes_written, scratch.bytes_read) == (2 * size_bytes, 2 * size_bytes)
    assert scratch.writing_s > 0
    assert scratch.reading_s > 0
    for other in others:
        page = filled(PAGE_BYTES, 0)
        scratch.read(other, page).wait()
        assert not page.any()


def test_the_file_has_whole_pages_this_user_alone_and_never_a_name(scratch, folder):
    extent = scratch.add_extent(PAGE_BYTES + 1)
    assert scratch.size_bytes == 2 * PAGE_BYTES
    scratch.write(extent, filled(2 * PAGE_BYTES, 0)).wait()
    (file,) = direct_files()
    status = os.stat(file)
    assert (status.st_size, status.st_nlink, status.st_mode & 0o777) == (2 * PAGE_BYTES, 0, 0o600)
    assert status.st_blocks * 512 >= 2 * PAGE_BYTES
    descriptor = os.open(folder, os.O_PATH)
    with pytest.raises(FileNotFoundError):  # the descriptors make Python call linkat
        os.link(file, "name", src_dir_fd=descriptor, dst_dir_fd=descriptor)
    os.close(descriptor)


def test_what_was_never_written_reads_as_zeros_and_not_from_the_disk(scratch):
    extent, buffer = scratch.add_extent(EXTENT_BYTES), filled(EXTENT_BYTES, 0)
    other = scratch.add_extent(EXTENT_BYTES)
    written = scratch.write(other, buffer)  # the zeros must not overtake this write
    scratch.read(extent, buffer).wait()
    assert not buffer.any()
    assert scratch.bytes_read == 0
    written.wait()
    scratch.read(other, buffer).wait()
    assert torch.equal(buffer, filled(EXTENT_BYTES, 0))


def play_in_order(scratch: ScratchFile, plays: int, seed: int) -> None:
    """Submits reads and writes that share extents and memory, and compares with a model."""
    drawn = random.Random(seed)
    size = CUT_BYTES // 2  # size of a part of memory; transfers have 1 or 3 parts
    memory = filled(8 * size, seed)
    extents = [scratch.add_extent(3 * size) for _ in range(3)]
    model, contents = memory.clone(), [torch.empty(0, dtype=torch.uint8, device="cpu")] * 3
    transfers = []
    for _ in range(plays):
        which = drawn.randrange(3)
        known = contents[which].numel()
        reads = known and drawn.random() < 0.5
        length = known if reads else drawn.choice([1, 3]) * size
        start = drawn.randrange((memory.numel() - length) // size + 1) * size
        part = slice(start, start + length)
        if reads:
            transfers.append(scratch.read(extents[which], memory[part]))
            model[part] = contents[which]
        else:
            transfers.append(scratch.write(extents[which], memory[part]))
            contents[which] = model[part].clone()
    for transfer in transfers:
        transfer.wait()
    assert torch.equal(memory, model)


def test_transfers_that_share_an_extent_or_memory_keep_their_order(scratch):
    for seed in range(3):
        play_in_order(scratch, 40, seed)


def test_transfers_are_done_when_they_are_over(scratch):
    extent = scratch.add_extent(EXTENT_BYTES)
    first = scratch.write(extent, filled(EXTENT_BYTES, 0))
    last = scratch.write(extent, filled(EXTENT_BYTES, 1))
    last.wait()
    assert first.done()
    assert last.done()
    last.wait()
    back = aligned_buffer(EXTENT_BYTES)
    scratch.read(extent, back).wait()
    assert torch.equal(back, filled(EXTENT_BYTES, 1))


def test_what_cannot_be_moved_is_refused(scratch):
    extent, buffer = scratch.add_extent(2 * PAGE_BYTES), aligned_buffer(4 * PAGE_BYTES)
    whole = buffer[: 2 * PAGE_BYTES]
    refused: list[tuple[str, int, Any]] = [
        ("an extent below 1", 1, whole),
        ("an extent below 1", -1, whole),
        ("expected a tensor", extent, bytearray(PAGE_BYTES)),
        ("contiguous uint8", extent, whole.view(torch.float32)),
        ("contiguous uint8", extent, whole[::2]),
        ("contiguous uint8", extent, whole.to("meta")),
        ("whole pages", extent, buffer[8 : 8 + PAGE_BYTES]),
        ("whole pages", extent, whole[:100]),
        ("whole pages", extent, whole[:0]),
        ("at most 8192 bytes", extent, buffer),
    ]
    for words, which, memory in refused:
        for begin in (scratch.read, scratch.write):
            with pytest.raises(ArgumentError, match=rf"state of rank 3: .*extent {which}.*{words}"):
                begin(which, memory)
    scratch.write(extent, whole).wait()
    with pytest.raises(ArgumentError, match="as many bytes as the extent's last write"):
        scratch.read(extent, whole[:PAGE_BYTES])
    with pytest.raises(ArgumentError, match="an extent of 1 byte or more, got 0"):
        scratch.add_extent(0)


def test_disk_checks_its_values(tmp_path):
    assert Disk(tmp_path).buffer_bytes == 64 * MIB
    assert ringcomm.Disk is Disk
    for arguments in (
        {"path": ""},
        {"path": 3},
        {"path": "x", "buffer_bytes": 0},
        {"path": "x", "buffer_bytes": 1.5},
        {"path": "x", "resident_bytes": -1},
        {"path": "x", "resident_bytes": True},
        {"path": "x", "timeout_s": 0},
        {"path": "x", "timeout_s": True},
    ):
        with pytest.raises(ArgumentError, match=r"Disk\(\w+=\): expected"):
            Disk(**arguments)


def test_buffers_are_aligned_zeros_of_their_size():
    for size_bytes in (1, PAGE_BYTES, 2 * MIB - 1, 2 * MIB, 5 * MIB + 17):
        buffer = aligned_buffer(size_bytes)
        assert buffer.numel() == size_bytes
        assert buffer.data_ptr() % (PAGE_BYTES if size_bytes < 2 * MIB else 2 * MIB) == 0
        assert not buffer.any()
    with pytest.raises(ArgumentError, match="at least 1 byte"):
        aligned_buffer(0)


def test_folders_that_take_no_scratch_file_are_refused(tmp_path):
    (tmp_path / "file").touch()
    refused = {
        tmp_path / "absent": "No such file or directory. Make the folder",
        tmp_path / "file": "Not a directory",
        Path("/dev/shm"): "it is a tmpfs, whose files take RAM. Name a folder on a local disk",
        Path("/proc"): "no unnamed files",
    }
    for folder, words in refused.items():
        with pytest.raises(DiskError, match=rf"state: .*got {folder}: .*{words}") as caught:
            ScratchFile(folder, "state")
        assert caught.value.path == str(folder)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    """Simulates the system's refusal, because root may write anywhere."""

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, mode)

    opened = os.open
    skip_unless_disk(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskError, match=r"Permission denied\. Give this user the right to write"):
        ScratchFile(tmp_path, "state")


def test_a_file_system_without_direct_io_is_refused(tmp_path, monkeypatch):
    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, mode)

    opened = os.open
    skip_unless_disk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(DiskError, match=r"no direct I/O \(O_DIRECT: Invalid argument\)"):
            ScratchFile(tmp_path, "state")
    before = len(os.listdir("/proc/self/fd"))
    for alignment, words in ((0, "no direct I/O for this file"), (65536, "multiples of 65536")):
        monkeypatch.setattr(_native, "direct_alignment", lambda _, found=alignment: found)
        with pytest.raises(DiskError, match=words):
            ScratchFile(tmp_path, "state")
    assert len(os.listdir("/proc/self/fd")) == before


def direct_files() -> list[str]:
    """Returns the files that a test has open for direct I/O, as paths that can be opened again."""
    return [path for path in _all_direct_files() if path not in _others]


_others: list[str] = []


@pytest.fixture(autouse=True)
def files_of_other_tests() -> None:
    """Excludes files that earlier tests left open, for example in a traceback."""
    gc.collect()
    _others[:] = _all_direct_files()


def _all_direct_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_DIRECT:
                found.append(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
    return found


class Corrupted:
    """Two extents, each written twice, and a second file descriptor to damage the file."""

    def __init__(self, scratch: ScratchFile) -> None:
        self.scratch = scratch
        self.extents = [scratch.add_extent(EXTENT_BYTES) for _ in range(2)]
        self.write_all(0)
        (path,) = direct_files()
        self.fd = os.open(path, os.O_RDWR)
        self.old = os.pread(self.fd, EXTENT_BYTES, 0)
        self.write_all(2)

    def write_all(self, seed: int) -> None:
        for extent in self.extents:
            self.scratch.write(extent, filled(EXTENT_BYTES, seed + extent)).wait()

    def flip(self) -> None:
        at = EXTENT_BYTES - 1
        byte = os.pread(self.fd, 1, at)
        os.pwrite(self.fd, bytes([byte[0] ^ 4]), at)

    def put_back(self) -> None:
        os.pwrite(self.fd, self.old[:PAGE_BYTES], 0)

    def swap(self) -> None:
        other = os.pread(self.fd, PAGE_BYTES, EXTENT_BYTES)
        os.pwrite(self.fd, other, 0)

    def truncate(self) -> None:
        os.ftruncate(self.fd, CUT_BYTES + PAGE_BYTES)


@pytest.mark.parametrize(
    ("damage", "offset_bytes", "words"),
    [
        (Corrupted.flip, 2 * CUT_BYTES, "other bytes than were written there last .CRC32C 0x"),
        (Corrupted.put_back, 0, "other bytes than were written"),
        (Corrupted.swap, 0, "other bytes than were written"),
        (Corrupted.truncate, None, "the file ends before these bytes"),
    ],
)
def test_a_damaged_extent_is_an_error_and_stays_one(scratch, damage, offset_bytes, words):
    corrupted = Corrupted(scratch)
    damaged, sound = corrupted.extents
    damage(corrupted)
    os.fsync(corrupted.fd)
    buffer = aligned_buffer(EXTENT_BYTES)
    reading = scratch.read(damaged, buffer)
    writing = scratch.write(damaged, filled(EXTENT_BYTES, 9))
    first = expect_error(reading, scratch, words)
    assert first.extent == damaged
    if offset_bytes is not None:
        assert first.offset_bytes == offset_bytes
        scratch.read(sound, buffer).wait()
        assert torch.equal(buffer, filled(EXTENT_BYTES, 3))
    # Later writes and reads are refused too, with the position of the first fault.
    for transfer in (writing, reading, scratch.read(damaged, buffer)):
        again = expect_error(transfer, scratch, words)
        assert again.offset_bytes == first.offset_bytes
    os.close(corrupted.fd)


def expect_error(transfer: Any, scratch: ScratchFile, words: str) -> DiskError:
    head = f"state of rank 3: (read|write) of extent 0 in {scratch.path}: expected to read"
    with pytest.raises(DiskError, match=rf"{head} \d+ bytes at offset \d+ .*{words}") as caught:
        transfer.wait()
    assert caught.value.path == str(scratch.path)
    return caught.value


def test_a_limit_of_file_sizes_is_an_error_and_gives_space_back(scratch):
    extent = scratch.add_extent(PAGE_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        wanted = f"expected {2 * MIB} bytes after {PAGE_BYTES} of its own in a scratch file in "
        with pytest.raises(DiskError, match=rf"{wanted}{scratch.path}, got: File too large. \d+ "):
            scratch.add_extent(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert scratch.size_bytes == PAGE_BYTES
    assert scratch.add_extent(2 * MIB) == extent + 1


def test_closing_ends_what_has_not_begun_and_frees_the_file(folder):
    scratch = ScratchFile(folder, "state of rank 3")
    extent = scratch.add_extent(EXTENT_BYTES)
    memory = filled(EXTENT_BYTES, 0)
    transfers = [scratch.write(extent, memory) for _ in range(64)]
    scratch.close()
    scratch.close()
    assert direct_files() == []
    ends = []
    for transfer in transfers:
        assert transfer.done()
        try:
            transfer.wait()
            ends.append("done")
        except DiskError as error:
            assert "closed before the transfer began" in str(error)
            ends.append("closed")
    assert ends == sorted(ends, reverse=True)  # in order: transfers that ran come first
    assert ends[-1] == "closed"
    for use in (
        lambda: scratch.add_extent(1),
        lambda: scratch.write(extent, aligned_buffer(PAGE_BYTES)),
    ):
        with pytest.raises(DiskError, match="is closed"):
            use()
    # The first transfer that was closed may have started: some of its cuts ran.
    assert 0 <= scratch.bytes_written - ends.count("done") * EXTENT_BYTES < EXTENT_BYTES


def test_garbage_collection_closes_and_memory_stays_until_a_transfer_is_over(folder):
    scratch = ScratchFile(folder, "state of rank 3")
    extent = scratch.add_extent(EXTENT_BYTES)
    memory = filled(EXTENT_BYTES, 0)
    kept = weakref.ref(memory.untyped_storage())
    for _ in range(4):
        scratch.write(extent, memory)
    del memory
    assert kept() is not None
    transfer = scratch.read(extent, aligned_buffer(EXTENT_BYTES))
    gone = weakref.ref(scratch)
    del scratch
    gc.collect()
    assert gone() is not None  # a transfer refers to it
    transfer.wait()
    del transfer
    gc.collect()
    assert gone() is None
    assert direct_files() == []


def test_a_forked_child_leaves_it_alone_and_ends(scratch):
    extent = scratch.add_extent(EXTENT_BYTES)
    transfer = scratch.write(extent, filled(EXTENT_BYTES, 0))
    pid = os.fork()
    if pid == 0:
        refused = 0
        for use in (
            lambda: scratch.add_extent(1),
            lambda: scratch.read(extent, aligned_buffer(PAGE_BYTES)),
            transfer.wait,
            lambda: scratch.bytes_read,
        ):
            try:
                use()
            except ForkError:
                refused += 1
        scratch.close()
        left = len(direct_files())
        del scratch, transfer
        gc.collect()
        os._exit(0 if (refused, left) == (4, 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    transfer.wait()
    back = aligned_buffer(EXTENT_BYTES)
    scratch.read(extent, back).wait()
    assert torch.equal(back, filled(EXTENT_BYTES, 0))


def test_a_process_that_is_killed_leaves_nothing(folder):
    """test_scratch_faults.py checks the freed space, on a disk that no other program uses."""
    pid = os.fork()
    if pid == 0:
        scratch, memory = ScratchFile(folder, "state"), aligned_buffer(EXTENT_BYTES)
        extent = scratch.add_extent(EXTENT_BYTES)
        for _ in range(8):
            scratch.write(extent, memory)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert os.listdir(folder) == []
