"""What a disk gives to plain loops: threads that pread and pwrite blocks of a file, past the cache.

This is the limit to which state on a disk is compared: the same bytes, pattern and depth, without
checksums, order or error handling. Notes give the CPU time of the process for 10^9 bytes.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from . import run
from .options import option, parse_size
from .report import row_of
from .run import Bench, Run

PATTERNS = ("read", "write", "mixed")
DEPTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Timed:
    """One run: what it moved, reads and writes together, and what it took."""

    moved_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def gbps(self) -> float:
        """10^9 bytes a second."""
        return self.moved_bytes / self.wall_s / 1e9

    @property
    def cpu_ms_per_gb(self) -> float:
        """CPU time of the process, in the system and outside, for 10^9 bytes."""
        return self.cpu_s * 1e12 / self.moved_bytes


def operations(pattern: str, blocks: int, depth: int) -> Iterator[tuple[bool, int]]:
    """(is a write, block): "mixed" reads each block, and writes it ``depth`` blocks later."""
    if pattern != "mixed":
        yield from ((pattern == "write", block) for block in range(blocks))
        return
    for block in range(blocks + depth):
        if block < blocks:
            yield False, block
        if block >= depth:
            yield True, block - depth


class RawFile:
    """An unnamed file for direct I/O whose blocks have all been written once."""

    def __init__(self, path: str, size_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks = size_bytes // block_bytes
        flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)
        os.posix_fallocate(self.descriptor, 0, self.blocks * block_bytes)
        # A write into space that is only reserved also makes its entry in the file system.
        self.time("write", 2)

    def time(self, pattern: str, depth: int) -> Timed:
        """Moves every block, by ``depth`` threads of which each has one request under way."""
        todo = list(operations(pattern, self.blocks, depth))
        turn = itertools.count()
        failures: list[BaseException] = []

        def loop(memory: mmap.mmap) -> None:
            try:
                while (place := next(turn)) < len(todo):
                    self._move(*todo[place], memory)
            except BaseException as error:
                failures.append(error)

        memories = [mmap.mmap(-1, self.block_bytes, flags=mmap.MAP_PRIVATE) for _ in range(depth)]
        for memory in memories:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.write(bytes(self.block_bytes))
        threads = [threading.Thread(target=loop, args=(memory,)) for memory in memories]
        wall, cpu = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for memory in memories:
            memory.close()
        if failures:
            raise failures[0]
        return Timed(len(todo) * self.block_bytes, wall, cpu)

    def _move(self, is_write: bool, block: int, memory: mmap.mmap) -> None:
        call = os.pwritev if is_write else os.preadv
        moved = call(self.descriptor, [memory], block * self.block_bytes)
        if moved != self.block_bytes:
            raise OSError(f"block {block}: expected {self.block_bytes} bytes, got {moved}")

    def close(self) -> None:
        os.close(self.descriptor)


@contextmanager
def raw_file(path: str, size_bytes: int, block_bytes: int) -> Iterator[RawFile]:
    """A :class:`RawFile` in the folder ``path``, closed when the block ends."""
    file = RawFile(path, size_bytes, block_bytes)
    try:
        yield file
    finally:
        file.close()


def measure(run: Run) -> None:
    asked = run.options
    with raw_file(asked.path, asked.size, asked.block_bytes) as file:
        for pattern, depth in itertools.product(PATTERNS, DEPTHS):
            timed = file.time(pattern, depth)
            row = row_of(f"disk_{pattern}", f"{depth} deep", 1, timed.moved_bytes, torch.uint8)
            time_us = round(timed.wall_s * 1e6)
            found = replace(
                row,
                system="pread and pwrite",
                time_us=time_us,
                best_us=time_us,
                algbw_gbps=round(timed.gbps, 3),
                rounds=1,
                batch=1,
                note=f"CPU {timed.cpu_ms_per_gb:.1f} ms/GB",
            )
            run.add([found])


BENCH = Bench(
    "disk",
    __doc__,
    measure,
    (
        option("--path", required=True, help="a folder on the disk"),
        option("--size", type=parse_size, default=1 << 30, help="of the file (1G)"),
        option("--block-bytes", type=parse_size, default=8 << 20, help="of a request (8M)"),
    ),
    ranks=0,
    rounds=0,
)

if __name__ == "__main__":
    run.run_process(BENCH)
