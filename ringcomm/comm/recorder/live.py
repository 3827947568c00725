"""Flight recorders of running processes, read out of their heaps without their help.

A process holds its own heap and those of its peers as open files. One process is therefore enough
to read all ranks, even a rank that was killed. Nothing is written, and no process is stopped.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringcomm import _native
from ringcomm.comm.recorder.records import (
    HEADER_BYTES,
    Clock,
    NodeLevel,
    RankRecording,
    RecorderHeader,
    Recording,
    read_block,
    read_header,
    renumbered,
    unstable_records,
)
from ringcomm.errors import RingcommError

__all__ = ["ended_ranks", "live_recordings", "running_communicators"]

# kernels/host/heap.h
_HEAP_MAGIC = int.from_bytes(b"RNGHEAP1", "little")
_HEAP_HEAD = struct.Struct("<QQII")
_MOST_RECORDERS = 4096
# proc_pid_stat(5): none, a zombie, dead.
ENDED = ("", "Z", "X")
CLOCKS_DIFFER_S = 0.1
# kernels/include/ringcomm/protocol/call.h: ControlPage
WAITS_FOR_OFFSET, WORD_BYTES = _native.STRUCTURES["page.waits_for"], 4


@dataclass(frozen=True)
class FoundRecorder:
    header: RecorderHeader
    block: bytes
    unstable: list[int]
    waits_for: int


def live_recordings(pids: Iterable[int]) -> list[Recording]:
    """Reads the recordings of all communicators that these processes take part in.

    Raises:
        RingcommError: a process does not exist, is another user's, or has no flight recorder.
    """
    found: dict[tuple[int, int, int], FoundRecorder] = {}
    known: set[int] = set()
    for pid in pids:
        has_heap = False
        for token, descriptor in _heaps_of(pid):
            has_heap = True
            if token in known:
                continue
            known.add(token)
            for each in _recorders(descriptor):
                found[each.header.world_id, each.header.rank, each.header.created_ns] = each
        if not has_heap:
            raise RingcommError(
                f"trace: expected process {pid} to be a rank of a ringcomm communicator that "
                "records, got a process without a heap of ringcomm's"
            )
    if not found:
        raise RingcommError("trace: these processes have no communicator that records its calls")
    return _by_world(found.values())


def running_communicators() -> list[Recording]:
    """Returns the recordings of all communicators of this user's other processes."""
    found: dict[tuple[str, int, int], Recording] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError, RingcommError):  # it ends meanwhile, or takes part in none
            if folder.stat().st_uid == os.geteuid():
                for each in live_recordings([int(folder.name)]):
                    # Each process has the heaps of its peers, so each shows the communicator.
                    key = (each.communicator, each.world_id, each.ranks[0].pid)
                    found[key] = each
    return list(found.values())


def ended_ranks(recording: Recording, pid: int) -> frozenset[int]:
    """Returns the ranks whose processes have ended.

    Zombies count, and so do ranks whose pid now belongs to another process.

    Args:
        recording: a live one, just taken.
        pid: of a process that it was read from. If that process is in another pid namespace, the
            ranks' pids mean nothing here, and the result is empty.
    """
    try:
        theirs, mine = (os.readlink(f"/proc/{each}/ns/pid") for each in (pid, "self"))
    except OSError:
        return frozenset()
    ranks = recording.ranks if theirs == mine else ()
    return frozenset(each.rank for each in ranks if _has_ended(each, recording.taken_ns))


def _has_ended(rank: RankRecording, taken_ns: int) -> bool:
    state, age_s = _state_of(rank.pid)
    if state in ENDED:
        return True
    begun = [each.begin_ns for each in (*rank.collectives, *rank.messages)]
    # A process that is younger than its first record is another one with the same pid. The margin
    # is for comparing times of two clocks with ticks of 10 ms.
    return bool(begun) and (taken_ns - min(begun)) / 1e9 > age_s + CLOCKS_DIFFER_S


def _state_of(pid: int) -> tuple[str, float]:
    """Returns the state letter of a process ("" when there is none) and its age in seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0.0
    # proc_pid_stat(5): fields 3 and 22; the second may hold blanks and parentheses.
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0], time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _heaps_of(pid: int) -> Iterator[tuple[int, int]]:
    """Yields the token of each heap that a process has open, with a descriptor open meanwhile."""
    folder = Path(f"/proc/{pid}/fd")
    if _state_of(pid)[0] in ENDED:
        raise RingcommError(f"trace: expected a running process, got pid {pid}, which has ended")
    try:
        names = sorted(os.listdir(folder), key=int)
    except FileNotFoundError:
        raise RingcommError(
            f"trace: expected a running process, got pid {pid}, which has ended"
        ) from None
    except PermissionError:
        raise RingcommError(
            f"trace: process {pid} is another user's, or not dumpable; run as its user, where "
            "ptrace is allowed"
        ) from None
    for name in names:
        try:
            descriptor = _open_regular(folder / name)
        except OSError:
            continue  # closed meanwhile, or a file that cannot be opened again
        if descriptor is None:
            continue
        try:
            token = _token(descriptor)
            if token is not None:
                yield token, descriptor
        finally:
            os.close(descriptor)


def _open_regular(path: Path) -> int | None:
    """Opens the file behind a descriptor if it is memory or a file without a name."""
    if not os.readlink(path).endswith(" (deleted)") or not stat.S_ISREG(path.stat().st_mode):
        return None
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _token(descriptor: int) -> int | None:
    head = os.pread(descriptor, _HEAP_HEAD.size, 0)
    if len(head) < _HEAP_HEAD.size:
        return None
    token, magic, version, _ = _HEAP_HEAD.unpack(head)
    return token if magic == _HEAP_MAGIC and version == 1 else None


def _recorders(descriptor: int) -> Iterator[FoundRecorder]:
    """Yields the recorders that a heap lists, except entries that lead nowhere."""
    count = min(_HEAP_HEAD.unpack(os.pread(descriptor, _HEAP_HEAD.size, 0))[3], _MOST_RECORDERS)
    size_bytes = os.fstat(descriptor).st_size
    table = os.pread(descriptor, 8 * count, _HEAP_HEAD.size)
    for (offset,) in struct.iter_unpack("<Q", table[: len(table) // 8 * 8]):
        if not 0 < offset < size_bytes:
            continue
        try:
            yield _recorder(descriptor, offset)
        except RingcommError:
            continue  # its memory was given back meanwhile


def _recorder(descriptor: int, offset: int) -> FoundRecorder:
    header = read_header(os.pread(descriptor, HEADER_BYTES, offset))
    # Read twice: a record whose bytes and version are equal both times did not change in between.
    first = os.pread(descriptor, header.block_bytes, offset)
    second = os.pread(descriptor, header.block_bytes, offset)
    if len(second) < header.block_bytes:
        raise RingcommError("trace: a recorder that does not end in its heap")
    unstable = unstable_records(first, second)
    if header.on_device:
        return FoundRecorder(header, first, unstable, 0)  # its control page is in device memory
    control = max(offset - header.control_bytes, 0)
    word = os.pread(descriptor, WORD_BYTES, control + WAITS_FOR_OFFSET)
    return FoundRecorder(header, first, unstable, int.from_bytes(word, "little"))


def _by_world(found: Iterable[FoundRecorder]) -> list[Recording]:
    """Makes one recording per communicator, and one per rank of those that never connected."""
    worlds: dict[tuple[int, int], list[FoundRecorder]] = {}
    for each in found:
        key = (each.header.world_id, 0 if each.header.world_id else each.header.created_ns)
        worlds.setdefault(key, []).append(each)
    recordings = []
    for (world_id, _), members in sorted(worlds.items(), key=lambda item: _oldest(item[1])):
        members.sort(key=lambda each: each.header.rank)
        header = members[0].header
        clock = Clock.since(header)
        recording = Recording(
            header.name,
            header.world_size,
            world_id,
            clock.now[1],
            tuple(_ranks(each, clock) for each in members),
        )
        level = NodeLevel.of(recording)
        recordings.append(recording if level is None else renumbered(recording, level.ranks))
    return recordings


def _ranks(found: FoundRecorder, clock: Clock) -> RankRecording:
    ranks = read_block(found.block, found.unstable, clock)
    return ranks.waiting_for(found.waits_for, found.header.world_size)


def _oldest(members: list[FoundRecorder]) -> int:
    return min(each.header.created_ns for each in members)
