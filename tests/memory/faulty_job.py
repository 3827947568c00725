# SPDX-License-Identifier: Apache-2.0
"""Runs a small job with a scratch file once per call that can fail; prints the outcomes.

``test_scratch_faults.py`` starts it with ``faulty_calls.cpp`` preloaded before the C library.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import signal
import sys
import time
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ringcomm.errors import DiskError
from ringcomm.offload.scratch import ScratchFile, Transfer, aligned_buffer

CUT_BYTES = 8 << 20  # kScratchCutBytes
EXTENT_BYTES = CUT_BYTES + 4096
CUTS, EXTENTS = 2, 2
READ, WRITE, RESERVE = range(3)
CALLS = {READ: CUTS * EXTENTS, WRITE: CUTS * EXTENTS, RESERVE: EXTENTS}


@dataclass(frozen=True)
class Trouble:
    """The fault of the n-th call of a kind: an error ``code``, or a move of ``size_bytes`` only."""

    call: int
    code: int = 0
    size_bytes: int = 0
    for_ever: bool = False


TROUBLES = {
    "write: EIO": Trouble(WRITE, errno.EIO),
    "write: ENOSPC": Trouble(WRITE, errno.ENOSPC),
    "write: nothing for ever": Trouble(WRITE, for_ever=True),
    "write: nothing once": Trouble(WRITE),
    "write: a page": Trouble(WRITE, size_bytes=4096),
    "write: a page and a half": Trouble(WRITE, size_bytes=6144),
    "write: EINTR": Trouble(WRITE, errno.EINTR),
    "read: EIO": Trouble(READ, errno.EIO),
    "read: nothing": Trouble(READ),
    "read: a page": Trouble(READ, size_bytes=4096),
    "read: EINTR": Trouble(READ, errno.EINTR),
    "reserve: ENOSPC": Trouble(RESERVE, errno.ENOSPC),
    "reserve: EOPNOTSUPP": Trouble(RESERVE, errno.EOPNOTSUPP),
    "reserve: EINTR": Trouble(RESERVE, errno.EINTR),
}


@dataclass
class Outcome:
    """The outcome of a run; ``wrong`` lists extents that read back wrong bytes without an error."""

    errors: list[tuple[str, int | None, str]] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    calls: int = 0

    def wait(self, operation: str, extent: int, transfer: Transfer) -> bool:
        try:
            transfer.wait()
        except DiskError as error:
            self.errors.append((operation, error.extent, str(error)))
            assert error.extent == extent
            return False
        return True


def run(folder: str, outcome: Outcome, memories: list[torch.Tensor]) -> None:
    with ScratchFile(folder, "state") as scratch:
        try:
            extents = [scratch.add_extent(EXTENT_BYTES) for _ in range(EXTENTS)]
        except DiskError as error:
            outcome.errors.append(("reserve", error.extent, str(error)))
            return
        backs = [aligned_buffer(EXTENT_BYTES) for _ in extents]
        writes = [scratch.write(extent, memories[extent]) for extent in extents]
        for extent in extents:
            outcome.wait("write", extent, writes[extent])
        reads = [scratch.read(extent, backs[extent]) for extent in extents]
        for extent in extents:
            if outcome.wait("read", extent, reads[extent]) and not torch.equal(
                backs[extent], memories[extent]
            ):
                outcome.wrong.append(extent)


def interrupted_wait(folder: str, library: ctypes.CDLL) -> bool:
    """Waits for a slow write; True if a signal handler ran meanwhile and the write went on."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    with ScratchFile(folder, "state") as scratch:
        extent, memory = scratch.add_extent(EXTENT_BYTES), aligned_buffer(EXTENT_BYTES)
        library.arm(WRITE, 0, 0, 0, 0, 2_000_000)
        transfer = scratch.write(extent, memory)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            transfer.wait()
        except Interrupted:
            early = not transfer.done()
            transfer.wait()
            return early and scratch.bytes_written == EXTENT_BYTES
    return False


def hanging_wait(folder: str, library: ctypes.CDLL) -> dict[str, object]:
    """Waits at most 0.1 s for writes that take 2 s, and closes the file meanwhile."""
    scratch = ScratchFile(folder, "state", lambda: 0.1)
    extents = [scratch.add_extent(4096) for _ in range(2)]
    memory = aligned_buffer(4096)
    alive = weakref.ref(memory.untyped_storage())
    library.arm(WRITE, 0, 0, 0, 0, 2_000_000)
    begin, texts = time.monotonic(), []
    for transfer in [scratch.write(extent, memory) for extent in extents]:
        try:
            transfer.wait()
        except DiskError as error:
            texts.append(str(error))
    scratch.close()
    descriptor, told_s = scratch._file.descriptor, time.monotonic() - begin
    del scratch, memory, transfer
    gc.collect()
    kept = alive() is not None and Path(f"/proc/self/fd/{descriptor}").exists()
    early_s = time.monotonic() - begin
    time.sleep(2.5)
    library.arm(WRITE, 0, 0, 0, 0, 0)
    ScratchFile(folder, "another state").close()
    gc.collect()
    freed = alive() is None and not Path(f"/proc/self/fd/{descriptor}").exists()
    return {
        "texts": texts,
        "told_s": told_s,
        "kept": kept,
        "early_s": early_s,
        "freed": freed,
    }


def hanging_end(folder: str, library: ctypes.CDLL) -> None:
    """Leaves a write that hangs until the process ends."""
    scratch = ScratchFile(folder, "state", lambda: 0.1)
    extent, memory = scratch.add_extent(4096), aligned_buffer(4096)
    library.arm(WRITE, 0, 0, 0, 0, 600_000_000)
    scratch.write(extent, memory)


def main() -> None:
    folder, library = sys.argv[1], ctypes.CDLL(None)
    library.calls_of.restype = ctypes.c_long
    memories = [aligned_buffer(EXTENT_BYTES).random_(0, 256) for _ in range(EXTENTS)]
    outcomes: dict[str, list[dict[str, object]]] = {}
    for name, trouble in TROUBLES.items():
        outcomes[name] = []
        for n in range(1, CALLS[trouble.call] + 2):
            outcome = Outcome()
            library.arm(trouble.call, n, trouble.code, trouble.size_bytes, trouble.for_ever, 0)
            run(folder, outcome, memories)
            outcome.calls = library.calls_of(trouble.call)
            outcomes[name].append(asdict(outcome))
    told = {
        "outcomes": outcomes,
        "interrupted": interrupted_wait(folder, library),
        "hanging": hanging_wait(folder, library),
    }
    print(json.dumps(told), flush=True)
    hanging_end(folder, library)


if __name__ == "__main__":
    main()
