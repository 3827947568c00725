# SPDX-License-Identifier: Apache-2.0
"""The exchange of handles, by which the ranks of a new communicator find each other's heaps.

All data pass through a torch store as JSON text, and every field is checked on arrival. There are
two rounds: each rank posts its handle and reads all others; then each rank posts whether it could
map all heaps. A rank that fails posts its error. Its peers then fail at once, without waiting, with
the message of the rank that failed first.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import re
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ringcomm.errors import (
    AbortedError,
    ArgumentError,
    HeapError,
    MismatchError,
    PeerLost,
    RendezvousError,
    RingcommError,
    UnsupportedError,
    printable,
    timed_out,
    where,
)
from ringcomm.json_reader import FORMAT_VERSION, digest_of, read_fields, read_record, shown
from ringcomm.process import Deadline
from ringcomm.rendezvous.same_node import Lookout

# ---- File descriptors: errors if the process has none left; sending a descriptor to a process ----
# A GPU driver's descriptor cannot be opened through ``/proc/<pid>/fd``: this would open its device
# again. ``pidfd_getfd`` needs the permission to trace the other process, which Yama usually denies.
# So descriptors are sent as SCM_RIGHTS over a Unix socket.

_NONE_LEFT = {
    errno.EMFILE: "this process has no file descriptor left. Its limit is {limit} (ulimit -n): "
    "raise it, or close files",
    errno.ENFILE: "the system has no file descriptor left for any process, whatever ulimit -n says "
    "(fs.file-max): raise that, or end processes",
    errno.ENOMEM: "the system has no memory or no room for a mapping left (ulimit -v, "
    "vm.max_map_count): raise the limits, or free memory",
}


def _words_of(number: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _NONE_LEFT[number].format(limit=limit)


def _spare(count: int) -> OSError | None:
    """Returns the error of opening ``count`` more descriptors, or None if that works."""
    opened: list[int] = []
    try:
        # "/" always exists, and opening it needs no other descriptor, unlike duplicating.
        opened.extend(os.open("/", os.O_PATH | os.O_CLOEXEC) for _ in range(count))
    except OSError as error:
        return error
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None


def shortage_of(error: BaseException | None) -> str:
    """Returns a sentence on the resource whose exhaustion caused an error, or ""."""
    texts = {os.strerror(number): number for number in (errno.EMFILE, errno.ENFILE)}
    seen, known = error, set[int]()
    while seen is not None and id(seen) not in known:  # a chain of causes may be circular
        known.add(id(seen))
        if isinstance(seen, OSError) and seen.errno in _NONE_LEFT:
            return _words_of(seen.errno)
        for text, number in texts.items():
            if text in str(seen):
                return _words_of(number)
        # These exceptions hide why a file could not be opened, so try to open a file now.
        if isinstance(seen, (ImportError, socket.gaierror)) and (spare := _spare(1)) is not None:
            return shortage_of(spare)
        seen = seen.__cause__ or seen.__context__
    return ""


@contextlib.contextmanager
def forming(operation: str) -> Iterator[None]:
    """Converts an error of the block to RendezvousError if a lack of file descriptors caused it.

    Args:
        operation: begins error messages; it names the rank and the communicator to be built.

    Raises:
        RendezvousError: no descriptor is left; the error names ``ulimit -n``.
    """
    try:
        yield
    except Exception as error:
        # If there is no memory for the heap, HeapError's message already says so.
        no_memory = isinstance(error, HeapError) and not _is_of_descriptors(error)
        shortage = "" if no_memory else shortage_of(error)
        if not shortage:
            raise
        raise RendezvousError(f"{operation}: {shortage}") from error


def _is_of_descriptors(error: HeapError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.ENOMEM


def need_descriptors(count: int, operation: str, purpose: str) -> None:
    """Checks that ``count`` descriptors can be opened, for code that does not report a shortage.

    Args:
        count: the number of descriptors.
        operation: the name of the operation, for the error.
        purpose: the purpose of the descriptors, for the error.

    Raises:
        RendezvousError: they cannot be opened; the error names ``ulimit -n``.
    """
    error = _spare(count)
    if error is not None:
        raise RendezvousError(
            f"{operation}: expected {count} free file descriptors for {purpose}, but "
            f"{shortage_of(error) or error}"
        ) from error


_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_MOST_DESCRIPTORS = 8
_PAYLOAD = b"descriptor"


class DescriptorInbox:
    """A socket to which another process, or thread, may send one descriptor.

    Attributes:
        name: the address for :func:`send_descriptor`, chosen by the kernel; it is not a file.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # With this option the kernel reports the sender of each message.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")
        self.name: bytes = self._socket.getsockname()

    def receive(self, sender_pid: int, wait_s: float) -> int | None:
        """Returns the descriptor, which the caller must close, or None if it does not come in time.

        Messages from other processes than ``sender_pid`` of this user are dropped: every process on
        the machine can find the inbox's name.
        """
        self._socket.settimeout(wait_s)
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
        try:
            _, ancillary, _, _ = self._socket.recvmsg(len(_PAYLOAD), room, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            return None
        descriptors, sender = array.array("i"), (0, 0)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) // 4 * 4])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                sender = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[:2]
        if sender == (sender_pid, os.geteuid()) and len(descriptors) == 1:
            return descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def close(self) -> None:
        self._socket.close()


def send_descriptor(name: bytes, descriptor: int) -> None:
    """Sends a copy of ``descriptor`` to the inbox with the address ``name``.

    Raises:
        OSError: this network namespace has no such inbox.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        # Not send_fds(), which ignores its address (https://github.com/python/cpython/issues/107898).
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        sender.sendmsg([_PAYLOAD], [rights], 0, name)


# A wait of a store cannot be interrupted by Ctrl-C, so the store is polled: often at first, since
# ranks mostly arrive together, then less often. Shortest and longest pause, in seconds.
FIRST_POLL_S = 0.0002
LAST_POLL_S = 0.02
# The first stages: a rank that has arrived has posted in one of them.
FIRST_STAGES = ("device", "heap")
# Seconds for which rank 0 waits for peers to read its error: the store usually ends with rank 0.
LINGER_S = 2.0
NODE_ID_VARIABLE = "RINGCOMM_NODE_ID"
MOST_NODE_ID_CHARS = 200
LONGEST_REASON = 300


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that rendezvous needs."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class RendezvousSpec:
    """The members of one rendezvous, their store, the deadline, and their :class:`Lookout`.

    The lookout finds members that can no longer come.
    """

    store: Store
    name: str
    rank: int
    world_size: int
    deadline: Deadline
    lookout: Lookout

    @property
    def operation(self) -> str:
        return where(f"rendezvous of communicator {self.name!r}", self.rank, self.world_size)


@dataclass(frozen=True)
class HeapHandle:
    """The address of a rank's heap and of its region, and the values on which ranks must agree.

    ``host``, ``boot`` and ``pid_namespace`` show which ranks may be able to map each other; the
    user's ``node_id`` overrides them. ``proof`` is random in every communicator and is also
    stored in the region, which only this user's processes can read. ``cpus``, ``cores``,
    ``torch_threads`` and ``threads`` (0: not set) determine how many threads ranks use.
    ``numa_nodes`` are the NUMA nodes of the heap, and determine whether sums use two levels.
    """

    rank: int
    world_size: int
    host: str
    boot: str
    pid_namespace: str
    node_id: str
    pid: int
    fd: int
    capacity_bytes: int
    token: int
    region_offset_bytes: int
    region_bytes: int
    proof: int
    layout: str
    cpus: str
    cores: int
    torch_threads: int
    threads: int
    numa_nodes: str

    @property
    def machine(self) -> tuple[str, ...]:
        """Facts that ranks share if they may be able to map each other's memory.

        Host names are not included: they may be truncated, or equal on different machines.
        """
        return (self.node_id,) if self.node_id else (self.boot, self.pid_namespace)

    @classmethod
    def from_json(cls, text: bytes, rank: int, operation: str) -> HeapHandle:
        """Reads the handle that ``rank`` posted; raises RendezvousError if it is not valid."""
        return cls(**read_fields(cls, text, rank, operation))


def launch_attempt() -> str:
    """Returns the number of this attempt of an elastic launch; it is part of every store key.

    torchrun's store survives its attempts (``--max-restarts``), with the keys of earlier attempts.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def attempts_differ() -> bool:
    """True if ranks of one attempt may have different numbers for the attempt.

    Each agent of torchrun counts only the restarts that its own ranks caused.
    """
    nodes = os.environ.get("GROUP_WORLD_SIZE") or "1"
    return bool(os.environ.get("TORCHELASTIC_RUN_ID")) and nodes != "1"


def named_node() -> str:
    """Returns the node name that the user has set for this rank, or ""."""
    return os.environ.get(NODE_ID_VARIABLE, "")[:MOST_NODE_ID_CHARS]


@cache
def machine_identity() -> tuple[str, str, str]:
    """Returns host name, boot id and PID namespace: equal for ranks that may map each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, os.readlink("/proc/self/ns/pid")


def machine_of(node_id: str) -> str:
    """Returns a word that ranks share if they may map each other's memory.

    Args:
        node_id: the name of this rank's node, or "".
    """
    _, boot, pid_namespace = machine_identity()
    return f"node {node_id}" if node_id else f"boot {boot} {pid_namespace}"


def host_and_port(store: Any) -> tuple[str, int] | None:
    """Returns the address of a torch store's server, or None for a store without a server."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (str(host), int(port))


def store_address(store: Any) -> str:
    """Returns the address of a torch store for an error, such as " at node0:29500", or ""."""
    found = host_and_port(store)
    return f" at {found[0]}:{found[1]}" if found else ""


@contextlib.contextmanager
def _asking(spec: RendezvousSpec) -> Iterator[None]:
    """Converts the errors of store operations inside to errors of ringcomm."""
    try:
        yield
    except RuntimeError as error:
        silent = f"{spec.operation}: the store{store_address(spec.store)} does not answer any more"
        if ended := spec.lookout.ended():
            raise PeerLost(
                f"{silent}, and the process of rank {', '.join(map(str, ended))} has ended. See "
                "why, and build a communicator of the ranks that are left, with another store"
            ) from error
        raise RendezvousError(
            f"{silent}: {str(error).partition(chr(10))[0]}. See whether the process that holds it "
            "(usually rank 0) has ended"
        ) from error


def _look_up(spec: RendezvousSpec, key: str) -> bytes | None:
    """Returns the value of ``key``, or None if the store does not have it yet."""
    with _asking(spec):
        return spec.store.get(key) if spec.store.check([key]) else None


def _write(spec: RendezvousSpec, key: str, value: str) -> None:
    with _asking(spec):
        spec.store.set(key, value)


# NOTE [Agreeing on a rendezvous]
#
# If ranks may have different numbers for their attempt, rank 0 draws a random number for each
# rendezvous. Every other rank draws a word and posts it as a hello; rank 0 posts an answer with its
# number and the words that it has read; a rank takes the number once the answer has its own word.
# So an answer left by an earlier attempt has no effect: no rank finds its word in it. Rank 0
# rereads the words of the ranks that have not taken the number, and continues when all have taken
# it. torchrun ends all ranks of an attempt before it starts the next attempt.


def _agree(spec: RendezvousSpec) -> str:
    """Returns a word that is equal for all ranks of this rendezvous and unique to it."""
    here, mine = f"ringcomm/{spec.name}", secrets.token_hex(8)
    others = list(range(1, spec.world_size))
    words: dict[str, str] = {}
    pause_s = FIRST_POLL_S
    if spec.rank != 0:
        _write(spec, f"{here}/hello/{spec.rank}", mine)
    while True:
        if spec.rank != 0:
            answer = (_look_up(spec, f"{here}/answer") or b"").decode(errors="replace").split()
            if mine in answer[1:]:
                _write(spec, f"{here}/{answer[0]}/taken/{spec.rank}", "")
                return answer[0]
            others = [0]
        else:
            others = [
                rank for rank in others if _look_up(spec, f"{here}/{mine}/taken/{rank}") is None
            ]
            if not others:
                return mine
            found = {str(rank): _look_up(spec, f"{here}/hello/{rank}") for rank in others}
            heard = {rank: word.decode(errors="replace") for rank, word in found.items() if word}
            if not heard.items() <= words.items():
                words |= heard
                _write(spec, f"{here}/answer", " ".join([mine, *words.values()]))
        _wait_for(spec, others, pause_s)
        pause_s = min(pause_s * 2, LAST_POLL_S)


def _wait_for(
    spec: RendezvousSpec, missing: list[int], pause_s: float, hint: Callable[[], str] = str
) -> None:
    """Sleeps before the next poll for the posts of the ``missing`` ranks.

    Raises:
        PeerLost, AbortedError: as :meth:`Lookout.look`.
        RendezvousError: the deadline has passed; the message includes ``hint()``.
    """
    spec.lookout.look(missing, spec.operation)
    if spec.deadline.is_over():
        raise timed_out(
            f"{spec.operation}:",
            spec.deadline.timeout_s,
            f"{spec.lookout.named_all(missing)}, which did not come",
            f"{hint()}See that all {spec.world_size} ranks were started and build this "
            "communicator",
            kind=RendezvousError,
        )
    time.sleep(pause_s)


class Announced(Protocol):
    """The part of a handle on which all ranks must agree."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def boot(self) -> str: ...
    @property
    def pid_namespace(self) -> str: ...
    @property
    def layout(self) -> str: ...


def check_announced(spec: RendezvousSpec, mine: Announced, theirs: Announced, rank: int) -> None:
    """Compares the handle that ``rank`` announced with this rank's handle.

    Raises:
        MismatchError: the ranks disagree on world size or options.
    """
    operation = spec.operation
    if theirs.rank != rank or theirs.world_size != mine.world_size:
        raise MismatchError(
            f"{operation}: the ranks disagree on who they are. Expected rank {rank} of "
            f"{mine.world_size}, which says it is rank {theirs.rank} of {theirs.world_size}. "
            "Give every rank the same world_size and a rank of its own"
        )
    if theirs.layout != mine.layout:
        raise MismatchError(
            f"{operation}: the ranks were given different options. Rank {mine.rank} has "
            f"{mine.layout}, rank {rank} has {theirs.layout}. Pass equal CommOptions everywhere"
        )


def check_one_machine(spec: RendezvousSpec, mine: Announced, theirs: Announced) -> None:
    """Checks that two ranks on devices are on one machine.

    Raises:
        UnsupportedError: two ranks cannot share memory; the error names both machines.
    """
    operation, rank = spec.operation, theirs.rank
    if (theirs.host, theirs.boot) != (mine.host, mine.boot):
        raise UnsupportedError(
            f"{operation}: all ranks must run on one machine, but rank {mine.rank} runs on "
            f"{mine.host} (boot {mine.boot}) and rank {rank} on {theirs.host} (boot {theirs.boot})"
        )
    if theirs.pid_namespace != mine.pid_namespace:
        raise UnsupportedError(
            f"{operation}: ranks {mine.rank} and {rank} run in different PID namespaces of "
            f"{mine.host} (containers?), so they cannot map each other's memory. Run all ranks "
            "in one container, or share the PID namespace"
        )


def members_of(handles: Sequence[HeapHandle]) -> int:
    """Returns a positive number of 63 bits that identifies all handles of a communicator."""
    everyone = {str(rank): asdict(handle) for rank, handle in enumerate(handles)}
    return int(digest_of(everyone), 16) >> 1 or 1


class Rendezvous:
    """The two rounds of one rendezvous."""

    def __init__(self, spec: RendezvousSpec) -> None:
        self._spec = spec
        # Each rank counts its arrivals under this name, so that keys of an earlier communicator
        # with the same name in the same store are never read again. After a failed attempt, the
        # ranks' counts may differ.
        self._arrivals, self._arrival = "", 0
        if attempts_differ():
            self._prefix = f"ringcomm/{spec.name}/{_agree(spec)}"
            return
        here = f"ringcomm/{spec.name}/attempt{launch_attempt()}"
        self._arrivals = f"{here}/arrivals"
        with _asking(spec):
            self._arrival = spec.store.add(f"{self._arrivals}/{spec.rank}", 1)
        self._prefix = f"{here}/{self._arrival}"

    @property
    def prefix(self) -> str:
        """The beginning of all keys of this rendezvous in the store."""
        return self._prefix

    def handles(self, mine: HeapHandle) -> list[HeapHandle]:
        """Posts this rank's handle and returns the handles of all ranks, by rank.

        Raises:
            RendezvousError: a rank (the error names it) is missing, failed, or posted junk.
            MismatchError: the ranks disagree on world size or options.
        """
        operation = self._spec.operation
        handles: dict[int, HeapHandle] = {}

        def read(rank: int, text: bytes) -> None:
            theirs = HeapHandle.from_json(text, rank, operation)
            if rank == mine.rank and theirs != mine:
                raise RendezvousError(
                    f"{operation}: another process posts as rank {mine.rank}, too (pid "
                    f"{theirs.pid}; this one is {mine.pid}). Give every rank a number of its own, "
                    "and every job a store of its own"
                )
            # Compare before all handles have come: a rank that finds a difference ends at once.
            check_announced(self._spec, mine, theirs, rank)
            if (theirs.boot, theirs.pid_namespace) == (mine.boot, mine.pid_namespace):
                self._spec.lookout.learn(rank, theirs.pid)
            handles[rank] = theirs

        self._post("heap", asdict(mine))
        self._collect("heap", read)
        return [handles[rank] for rank in range(self._spec.world_size)]

    def everyone(
        self,
        stage: str,
        record: dict[str, Any],
        read: Callable[[int, bytes], None] | None = None,
    ) -> list[bytes]:
        """Posts ``record`` and returns the texts that all ranks posted in this stage, by rank.

        Args:
            stage: the name of the stage.
            record: the record of this rank.
            read: called with each rank and text as soon as the text arrives.

        Raises:
            RendezvousError: a rank (the error names it) is missing, failed, or posted junk.
        """
        self._post(stage, record)
        return self._collect(stage, read)

    def _post(self, stage: str, record: dict[str, Any]) -> None:
        text = json.dumps({"version": FORMAT_VERSION, **record})
        _write(self._spec, f"{self._prefix}/{stage}/{self._spec.rank}", text)

    def _collect(self, stage: str, read: Callable[[int, bytes], None] | None = None) -> list[bytes]:
        """Waits for the posts of all ranks in a stage; returns them by rank.

        Args:
            stage: the name of the stage.
            read: called with each rank and text as soon as the text arrives.
        """
        spec = self._spec
        missing = list(range(spec.world_size))
        texts: dict[int, bytes] = {}
        pause_s = FIRST_POLL_S
        while True:
            for rank in tuple(missing):
                text = _look_up(spec, f"{self._prefix}/{stage}/{rank}")
                if text is not None:
                    texts[rank] = text
                    read_record(text, rank, spec.operation)
                    if read is not None:
                        read(rank, text)
                    missing.remove(rank)
            if not missing:
                return [texts[rank] for rank in range(spec.world_size)]
            self._look_for_told()
            try:
                _wait_for(spec, missing, pause_s, partial(self._came_twice, missing))
            except (PeerLost, AbortedError):
                self._look_for_told()  # the ended rank may have posted its error
                # A record that a rank posted before it ended is still valid.
                if all(self._has_posted(stage, rank) for rank in missing):
                    continue
                raise
            pause_s = min(pause_s * 2, LAST_POLL_S)

    def _has_posted(self, stage: str, rank: int) -> bool:
        return _look_up(self._spec, f"{self._prefix}/{stage}/{rank}") is not None

    def _came_twice(self, missing: list[int]) -> str:
        """Returns a hint, with a trailing blank, if two processes seem to have one rank, or ""."""
        if not self._arrivals:
            return ""
        store, few, fewer = self._spec.store, self._spec.rank, self._arrival
        with _asking(self._spec):
            came = [store.add(f"{self._arrivals}/{r}", 0) for r in range(self._spec.world_size)]
        often = max(range(len(came)), key=came.__getitem__)
        if came[often] <= fewer:
            behind = [rank for rank in missing if 0 < came[rank] < fewer]
            if not behind:
                return ""
            often, few, fewer = few, behind[0], came[behind[0]]
        other = f"rank {few} only {fewer}" if often != few else "this process is not the last"
        return (
            f"Rank {often} has come {came[often]} times, and {other}: was rank {often} given to "
            "two processes, or has it tried again by itself? "
        )

    def look_for_failures(self, awaited: Iterable[int]) -> None:
        """Raises if a rank has failed. Call it in waits during which peers post nothing.

        Args:
            awaited: the ranks without which this rank cannot continue.

        Raises:
            RendezvousError: a rank has reported a failure; the error names the rank.
            PeerLost, AbortedError: as :meth:`Lookout.look`.
        """
        self._look_for_told()
        try:
            self._spec.lookout.look(awaited, self._spec.operation)
        except PeerLost:
            self._look_for_told()
            raise

    def _look_for_told(self) -> None:
        """Raises the error of a rank that has reported a failure."""
        spec = self._spec
        text = _look_up(spec, f"{self._prefix}/failed")
        rank = (text or b"").decode(errors="replace")
        if rank.isdecimal() and len(rank) < 10 and int(rank) < spec.world_size:
            told = _look_up(spec, f"{self._prefix}/failed/{rank}")
            if told is not None:
                try:
                    read_record(told, int(rank), spec.operation)
                except RendezvousError as error:
                    raise _told_by(error, int(rank), spec) from None

    def confirm(
        self,
        handles: Sequence[HeapHandle] = (),
        unreached: Mapping[int, str] = MappingProxyType({}),
    ) -> list[dict[int, str]]:
        """Posts that this rank is ready, and returns when all ranks are; raises if a rank failed.

        Args:
            handles: the handles that this rank has read, to be compared; empty: no comparison.
            unreached: the ranks of this machine that this rank cannot map, with the reasons.

        Returns:
            For each rank, the ranks that it could not reach, with the reasons.

        Raises:
            RendezvousError: a rank failed, or ranks read different handles of one rank.
        """
        saw = [digest_of(asdict(handle)) for handle in handles]
        here = {str(rank): why[:LONGEST_REASON] for rank, why in unreached.items()}
        self._post("ready", {"saw": saw, "unreached": here})
        operation = self._spec.operation
        everyone = []
        for rank, text in enumerate(self._collect("ready")):
            record = read_record(text, rank, operation)
            everyone.append(_unreached_of(record.get("unreached"), rank, self._spec))
            theirs = record.get("saw")
            if theirs == saw:
                continue
            if not isinstance(theirs, list) or len(theirs) != len(saw):
                raise RendezvousError(
                    f"{operation}: expected {len(saw)} digests of rank {rank}, got {shown(theirs)}"
                )
            forged = next(i for i in range(len(saw)) if theirs[i] != saw[i])
            raise RendezvousError(
                f"{operation}: rank {rank} read another handle of rank {forged} than this rank: "
                f"more than one process posts as rank {forged}. Give every rank a number of its "
                "own, and every job a store of its own"
            )
        return everyone

    def fail(self, error: BaseException) -> bool:
        """Informs the peers, in any stage, that this rank cannot take part.

        Only the first failure is posted, since later ones mostly follow from it. Rank 0 waits
        briefly until the peers that have already arrived have read the failure.

        Returns:
            False if the store does not answer.
        """
        spec = self._spec
        told = str(error).removeprefix(f"{spec.operation}: ")
        # Ignore the store's errors: it may be gone, often with the rank that served it, and the
        # error that is being reported matters more.
        with contextlib.suppress(RuntimeError):
            if not spec.store.check([f"{self._prefix}/failed"]):
                self._post("failed", {"error": f"{type(error).__name__}: {told}"})
                spec.store.set(f"{self._prefix}/failed", str(spec.rank))
            spec.store.set(f"{self._prefix}/ended/{spec.rank}", "")
            if spec.rank == 0 and host_and_port(spec.store):
                self._wait_for_ends()
            return True
        return False

    def _wait_for_ends(self) -> None:
        """Waits briefly until the peers that have arrived have noticed the failure and ended."""
        store, here = self._spec.store, self._prefix
        peers = [
            rank
            for rank in range(1, self._spec.world_size)
            if any(store.check([f"{here}/{stage}/{rank}"]) for stage in FIRST_STAGES)
        ]
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline:
            peers = [rank for rank in peers if not store.check([f"{here}/ended/{rank}"])]
            if not peers:
                return
            time.sleep(LAST_POLL_S)


_FAILED = re.compile(r": rank (\d+) failed: (\w+): ")


def _told_by(error: RendezvousError, rank: int, spec: RendezvousSpec) -> RingcommError:
    """Returns the error that a rank has posted, in the form in which every member raises it."""
    text = str(error)
    kind = _FAILED.search(text)
    named = f": {spec.lookout.named(rank)} failed: "
    found: RingcommError = (PeerLost if kind and kind[2] == "PeerLost" else RendezvousError)(
        text.replace(f": rank {rank} failed: ", named, 1)
    )
    found.repeats = error.repeats
    return found


def _unreached_of(record: Any, rank: int, spec: RendezvousSpec) -> dict[int, str]:
    """Reads from a record which ranks ``rank`` could not reach."""
    found = {}
    for key, why in record.items() if isinstance(record, dict) else ():
        if not (key.isdecimal() and len(key) < 10 and int(key) < spec.world_size):
            break
        found[int(key)] = printable(why) if isinstance(why, str) else ""
    else:
        if isinstance(record, dict):
            return found
    raise RendezvousError(
        f"{spec.operation}: expected the ranks that rank {rank} cannot reach, got {shown(record)}"
    )


def check_name(name: str) -> None:
    """Raises ArgumentError unless ``name`` can be part of a store key."""
    if not isinstance(name, str) or not name or any(ord(char) < 33 for char in name):
        raise ArgumentError(
            f"name: expected a non-empty string without blanks or control characters, got {name!r}"
        )
