# SPDX-License-Identifier: Apache-2.0
"""The loops over a disk: each pattern moves every extent, and no file is left."""

import os
from contextlib import closing

import pytest

from ringcomm.bench import disk
from tests.memory.disk_folder import skip_unless_disk

PAGE_BYTES = 4096


def test_mixed_writes_each_extent_after_its_read():
    todo = list(disk.operations("mixed", 5, 2))
    assert sorted(todo) == [(is_write, extent) for is_write in (False, True) for extent in range(5)]
    for extent in range(5):
        assert todo.index((True, extent)) > todo.index((False, extent))
    assert list(disk.operations("write", 2, 8)) == [(True, 0), (True, 1)]
    assert list(disk.operations("read", 2, 8)) == [(False, 0), (False, 1)]


def test_loops_move_every_extent(tmp_path):
    skip_unless_disk(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with closing(disk.RawFile(str(tmp_path), 8 * PAGE_BYTES, PAGE_BYTES)) as file:
        assert os.fstat(file.descriptor).st_size == 8 * PAGE_BYTES
        for pattern, times in (("read", 1), ("write", 1), ("mixed", 2)):
            moved_bytes, wall_s, _ = file.time(pattern, 3)
            assert moved_bytes == times * 8 * PAGE_BYTES and wall_s > 0
        os.ftruncate(file.descriptor, 0)
        with pytest.raises(OSError, match="extent 0: expected 4096 bytes, got 0"):
            file.time("read", 1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []
