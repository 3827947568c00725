# SPDX-License-Identifier: Apache-2.0
"""Measures a disk with plain loops: threads pread and pwrite extents of a file, without the page
cache.

This is the upper bound for state on a disk: the same bytes, pattern and depth, without checksums,
ordering or error handling. Notes give the CPU time of the process per 10^9 bytes.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch

from .options import option, parse_size
from .report import row_of
from .run import Bench, Run
from .timing import Timing, timed

PATTERNS = ("read", "write", "mixed")
DEPTHS = (1, 2, 4, 8)


def operations(pattern: str, extents: int, depth: int) -> list[tuple[bool, int]]:
    """Yields (is a write, extent): "mixed" reads each extent, and writes it again after ``depth``
    further extents have been read.
    """
    if pattern != "mixed":
        return [(pattern == "write", extent) for extent in range(extents)]
    turns = itertools.product(range(extents + depth), (False, True))
    todo = [(is_write, turn - depth * is_write) for turn, is_write in turns]
    return [(is_write, extent) for is_write, extent in todo if 0 <= extent < extents]


class RawFile:
    """An unnamed file in a folder, for direct I/O; every extent has been written once."""

    def __init__(self, path: str, size_bytes: int, extent_bytes: int) -> None:
        self.extent_bytes = extent_bytes
        self.extents = size_bytes // extent_bytes
        flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)
        os.posix_fallocate(self.descriptor, 0, self.extents * extent_bytes)
        # The first write into reserved space also changes the file system's metadata, so write once
        # here.
        self.time("write", 2)

    def time(self, pattern: str, depth: int) -> tuple[int, float, float]:
        """Transfers every extent, with ``depth`` threads that each have one request in flight.

        Returns the bytes read and written, the elapsed seconds, and the CPU seconds.
        """
        todo = operations(pattern, self.extents, depth)
        memories = [mmap.mmap(-1, self.extent_bytes, flags=mmap.MAP_PRIVATE) for _ in range(depth)]
        for memory in memories:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.write(bytes(self.extent_bytes))
        turn = itertools.count()

        def loop(memory: mmap.mmap) -> None:
            while (number := next(turn)) < len(todo):
                self._move(*todo[number], memory)

        with ThreadPoolExecutor(depth) as threads:
            wall, cpu = time.perf_counter(), time.process_time()
            list(threads.map(loop, memories))  # raises the exception of a loop, if any
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for memory in memories:
            memory.close()
        return len(todo) * self.extent_bytes, wall, cpu

    def _move(self, is_write: bool, extent: int, memory: mmap.mmap) -> None:
        call = os.pwritev if is_write else os.preadv
        moved = call(self.descriptor, [memory], extent * self.extent_bytes)
        if moved != self.extent_bytes:
            raise OSError(f"extent {extent}: expected {self.extent_bytes} bytes, got {moved}")

    def close(self) -> None:
        os.close(self.descriptor)


def measure(run: Run) -> None:
    asked = run.options
    run.pacing.expect(len(PATTERNS) * len(DEPTHS))
    with closing(RawFile(asked.path, asked.size, asked.extent_bytes)) as file:
        for pattern, depth in itertools.product(PATTERNS, DEPTHS):
            run.pacing.begin()
            moved_bytes, wall_s, cpu_s = file.time(pattern, depth)
            run.pacing.end()
            more = {
                "system": "pread and pwrite",
                "note": f"CPU {cpu_s * 1e12 / moved_bytes:.1f} ms/GB",
                "algbw_gbps": round(moved_bytes / wall_s / 1e9, 3),
            }
            what, shape = f"disk_{pattern}", f"{depth} deep"
            case = row_of(what, shape, 1, moved_bytes, torch.uint8, **more)
            run.add([timed(case, Timing((wall_s * 1e6,), batch=1), None)])


BENCH = Bench(
    "disk",
    __doc__,
    measure,
    (
        option("--path", required=True, help="a folder on the disk"),
        option("--size", type=parse_size, default=1 << 30, help="bytes of the file"),
        option("--extent-bytes", type=parse_size, default=8 << 20, help="bytes of a request"),
    ),
    ranks=0,
    rounds=0,
)
BENCH.run_as_main(__name__)
