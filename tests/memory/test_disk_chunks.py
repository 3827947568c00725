# SPDX-License-Identifier: Apache-2.0
"""Chunks that are read from a disk and written to it: contents, the pages they take, and faults."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from ringcomm import Disk, DiskError
from ringcomm.offload import scratch
from ringcomm.offload import scratch as disk_chunks
from ringcomm.offload.scratch import PAGE_BYTES, DiskChunk, DiskChunks
from tests.memory.disk_folder import skip_unless_disk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skip_unless_disk(tmp_path_factory.mktemp("chunks"))


def store_with(
    folder: Path, pages: list[int], buffer_pages: int, resident_pages: int = 0
) -> tuple[DiskChunks, list[DiskChunk]]:
    sizes = (buffer_pages * PAGE_BYTES, resident_pages * PAGE_BYTES)
    store = DiskChunks(Disk(folder, *sizes), "chunks of the test")
    chunks = [DiskChunk(count * PAGE_BYTES) for count in pages]
    store.reserve(chunks)
    return store, chunks


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_chunk_has_what_was_written_last_in_any_order(folder, monkeypatch, seed, moves):
    """With chunks prefetched or not, equal sizes or not, and page moves supported or not."""
    if not moves:
        monkeypatch.setattr(disk_chunks, "_moved", lambda source, target: False)
    random = Random(seed)
    pages = [2] * 6 if seed % 2 else [1, 2, 3, 2, 2, 1]
    store, chunks = store_with(folder, pages, 6, 2 if seed > 1 else 0)
    addresses = [chunk.memory.data_ptr() for chunk in chunks]
    wanted = [0] * len(chunks)
    for turn in range(400):
        number = random.randrange(len(chunks))
        chunk = chunks[number]
        if random.random() < 0.4:
            store.expect(random.sample(chunks, 3))
            continue
        write = random.random() < 0.5
        with store.here(chunk, write=write):
            assert bool((chunk.memory == wanted[number]).all()), turn
            if write:
                wanted[number] = random.randrange(256)
                chunk.memory.fill_(wanted[number])
        assert store.held_bytes <= 6 * PAGE_BYTES
    assert [chunk.memory.data_ptr() for chunk in chunks] == addresses
    assert store.file.bytes_read > 0
    store.close()


def test_a_write_that_ends_while_room_is_made_takes_no_more_room(folder, monkeypatch):
    """The write was under way at the first query, and over at the second."""
    store, chunks = store_with(folder, [1, 1], 1)
    with store.here(chunks[0], write=True):
        chunks[0].memory.fill_(1)
    answers = iter([False, True, True])
    monkeypatch.setattr(scratch.Transfer, "done", lambda self: next(answers))
    with store.here(chunks[1]):
        assert store.held_bytes == PAGE_BYTES
    monkeypatch.undo()
    store.close()


def test_chunks_in_use_stay_whatever_they_take(folder):
    store, chunks = store_with(folder, [1] * 4, 1)
    for number, chunk in enumerate(chunks):
        with store.here(chunk, write=True):
            chunk.memory.fill_(number + 1)
    with store.here(chunks[0]), store.here(chunks[1]), store.here(chunks[2]):
        assert store.held_bytes == 3 * PAGE_BYTES
        store.expect([chunks[3]])
        assert store.held_bytes == 3 * PAGE_BYTES
        assert [int(chunk.memory[0]) for chunk in chunks[:3]] == [1, 2, 3]
    store.expect([chunks[3]])
    assert store.held_bytes == PAGE_BYTES
    store.close()


def test_what_is_read_ahead_is_not_given_up_for_what_comes_later(folder):
    store, chunks = store_with(folder, [1] * 4, 2)
    for chunk in chunks:
        with store.here(chunk, write=True):
            chunk.memory.fill_(7)
    store.wait()
    store.expect(chunks)
    assert [chunk.has_pages for chunk in chunks] == [True, True, False, False]
    for chunk in chunks[:2]:
        with store.here(chunk):
            assert bool((chunk.memory == 7).all())
    assert store.file.bytes_read == 2 * PAGE_BYTES
    # A chunk already in memory is not evicted for a chunk expected before it.
    store.expect([chunks[2], chunks[1]])
    assert [chunk.has_pages for chunk in chunks] == [False, True, True, False]
    store.close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_after_a_fault_nothing_is_brought_or_written(folder, monkeypatch, operation):
    """Inside ``keeping_faults()``, later calls do not raise the fault either."""
    store, chunks = store_with(folder, [1] * 3, 1)
    for chunk in chunks:
        with store.here(chunk, write=True):
            chunk.memory.fill_(3)
    store.wait()
    wait = scratch.Transfer.wait

    def failing(self: scratch.Transfer) -> None:
        wait(self)
        if self._operation == operation:
            raise DiskError("an error of the test")

    monkeypatch.setattr(scratch.Transfer, "wait", failing)
    with store.keeping_faults():
        for chunk in chunks:
            with store.here(chunk, write=True):
                chunk.memory.fill_(4)
        store.wait()
    assert store.fault is not None
    written = store.file.bytes_written
    with pytest.raises(DiskError, match="an error of the test"), store.here(chunks[0]):
        raise AssertionError("it is not here")
    store.expect([chunks[1]])
    with store.keeping_faults(), store.here(chunks[2], write=True):
        chunks[2].memory.fill_(5)
    assert store.file.bytes_written == written
    with pytest.raises(DiskError, match="an error of the test"):
        store.raise_fault()
    assert not any(chunk.in_use for chunk in chunks)
    store.close()


def test_moved_pages_have_their_content_and_leave_zeros(folder):
    """Checks the system's guarantee that chunks rely on."""
    source, target = (DiskChunk(5 * PAGE_BYTES) for _ in range(2))
    source.memory.copy_(torch.arange(5 * PAGE_BYTES) % 251)
    target.memory.fill_(9)
    if not disk_chunks._moved(source.memory, target.memory):
        pytest.skip("this system moves no pages")
    assert torch.equal(target.memory, (torch.arange(5 * PAGE_BYTES) % 251).to(torch.uint8))
    assert not bool(source.memory.any())
