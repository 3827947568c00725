# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of one launch on one machine without a launcher's store (mpirun, srun).

Rank 0 makes a TCPStore on the loopback interface and sends its port over a Unix socket. The name of
the socket follows from two facts that all ranks of a launch share: the user, and the launcher that
started them. The socket is in a folder that only this user can enter, so no other user can take it.

Rank 0 also listens at an abstract socket of the same name, which needs no folder: ranks in
containers that share the network but not the folder find rank 0 there, and warn. Another user may
own this name, so each side gets the other side's user from the kernel.
"""

from __future__ import annotations

import errno
import hashlib
import os
import selectors
import socket
import stat
import struct
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Protocol

from ringcomm import _native
from ringcomm.errors import PeerLost, RendezvousError, RingcommError, start_thread, timed_out, where
from ringcomm.process import Deadline

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["LOOPBACK", "Lookout", "Parent", "store_on_node"]


# ---- Watches the members of a rendezvous for ranks that can no longer come ----------------------
# A rank that ends without an error posts nothing, so the others would wait for it until the
# timeout. But a rank can watch some ranks' processes: a group's parent communicator has processes,
# and each handle that has arrived names one.


LOOK_S = 0.01
# Seconds to wait for a process's end: a process loses its connections before it counts as ended.
ENDS_S = 0.5


class Parent(Protocol):
    """The parent communicator, which contains the members."""

    def raise_if_unusable(self, name: str) -> None: ...

    def lost(self, ranks: Collection[int]) -> dict[int, str]:
        """Returns the ranks among ``ranks`` that make no more calls here, with the reasons.

        Ranks are numbered as in the outermost communicator; a reason is the end of a sentence.
        """
        ...


class Lookout:
    """Keeps the processes of other members, and finds members that can no longer come.

    Args:
        ranks: the members' ranks in the outermost communicator, by new rank.
        processes: the processes known already, by rank in the outermost communicator.
        parent: the parent of the new communicator; None if it has no parent.

    Attributes:
        processes: the known processes on this machine, except this process.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        processes: Mapping[int, _native.Process],
        parent: Parent | None = None,
    ) -> None:
        self._ranks = ranks
        self._parent = parent
        self._looked_s = time.monotonic()
        self.processes = dict(processes)

    def learn(self, rank: int, pid: int) -> None:
        """Stores the process of a member that is on this machine and in this PID namespace."""
        if pid != os.getpid() and self._ranks[rank] not in self.processes:
            self.processes[self._ranks[rank]] = _native.Process(pid, with_descriptor=False)

    def named(self, rank: int) -> str:
        """Names a member by its rank; also by its outermost rank, if this is another number."""
        world_rank = self._ranks[rank] if rank < len(self._ranks) else rank
        return f"rank {rank}" if world_rank == rank else f"rank {world_rank} (rank {rank} here)"

    def named_all(self, ranks: Collection[int], most: int = 16) -> str:
        """Names several members."""
        first = [self.named(rank).removeprefix("rank ") for rank in sorted(ranks)[:most]]
        more = ", ..." if len(ranks) > most else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(first)}{more}"

    def look(self, awaited: Iterable[int], operation: str) -> None:
        """Raises if an awaited member cannot come any more, or this rank cannot continue.

        It may be called often: it looks only 100 times per second.

        Raises:
            PeerLost: a member, named in the error, has ended, or has closed or left the parent.
            AbortedError: the parent is unusable on this rank, for example closed.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        awaited = list(awaited)
        for rank in self.ended_among(awaited):
            raise self._lost(rank, "its process has ended", operation)
        if self._parent is None:
            return
        self._parent.raise_if_unusable("the rendezvous of a group")
        lost = self._parent.lost({self._ranks[rank] for rank in awaited})
        for rank in awaited:
            if self._ranks[rank] in lost:
                raise self._lost(rank, lost[self._ranks[rank]], operation)

    def ended_among(self, members: Iterable[int]) -> Iterator[int]:
        """Yields the members whose processes are known here and have ended."""
        return (rank for rank in members if self._has_ended(self._ranks[rank]))

    def ended(self) -> list[int]:
        """Returns the outermost ranks whose processes have ended, or are about to end."""
        return self._ended_of(self.processes)

    def raise_if_ended(self, rank: int, operation: str) -> None:
        """Raises PeerLost if the process of a member has ended, or is about to end.

        Waits up to ``ENDS_S`` for the end: a process loses its files before it counts as ended.
        """
        if self._ended_of(self.processes.keys() & {self._ranks[rank]}):
            raise self._lost(rank, "its process has ended", operation)

    def _ended_of(self, world_ranks: Collection[int]) -> list[int]:
        deadline_s = time.monotonic() + ENDS_S
        while True:
            found = [rank for rank in sorted(world_ranks) if self._has_ended(rank)]
            if found or not world_ranks or time.monotonic() >= deadline_s:
                return found
            time.sleep(LOOK_S)

    def _has_ended(self, world_rank: int) -> bool:
        process = self.processes.get(world_rank)
        return process is not None and process.has_ended()

    def _lost(self, rank: int, why: str, operation: str) -> PeerLost:
        return PeerLost(
            f"{operation}: expected {self.named(rank)} to take part, but {why}. See why, and build "
            "a communicator of the ranks that are left"
        )


LOOPBACK = "127.0.0.1"
RETRY_S, ACCEPT_S = 0.005, 0.1
# Seconds: a socket of this age that refuses connections belonged to a process that was killed.
STALE_S = 3600
# Seconds to wait for a request: a rank sends it as soon as it is connected.
ASKS_WITHIN_S = 1.0
_REQUEST = b"?"
_PORT = struct.Struct("!H")
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MASTER = "set MASTER_ADDR and MASTER_PORT on all ranks"
# Every rank counts its rendezvous, so that each rendezvous of a process has a name of its own.
_rendezvous_numbers = count()


def store_on_node(rank: int, world_size: int, timeout_s: float, job: str = "") -> Store:
    """Returns a store shared by the ranks of one launch on this machine.

    Args:
        rank: this rank.
        world_size: how many ranks take part.
        timeout_s: how long to wait for the other ranks, in seconds.
        job: the launcher's name for this launch; "" without a name: then the ranks must be children
            of one process.

    Raises:
        RendezvousError: the ranks did not find each other within ``timeout_s`` seconds, or another
            process owns the socket of the rendezvous.
    """
    operation = where("communicator from the launcher", rank, world_size)
    sockets = LaunchSockets.of(job or _parent(), next(_rendezvous_numbers), operation)
    if rank == 0:
        return serve(sockets, world_size, timeout_s)
    deadline = Deadline(timeout_s)
    port = ask_port(sockets, deadline)
    from torch.distributed import TCPStore

    return TCPStore(
        LOOPBACK,
        port,
        world_size,
        is_master=False,
        timeout=timedelta(seconds=max(deadline.left_s(), 1.0)),
        wait_for_workers=False,
    )


def _parent() -> str:
    parent = os.getppid()
    # Field 22 is the start time; the second field may contain blanks and parentheses.
    fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    return f"{parent}-{fields[19]}"


# ---- the folder, and the two sockets ------------------------------------------------------------


@dataclass(frozen=True)
class LaunchSockets:
    """The sockets at which the ranks of one launch find each other.

    Attributes:
        folder: a folder of this user only; None if there is none.
        refused: why there is no folder; "" if there is a folder.
        name: the name of the socket in the folder.
        operation: the name of the operation, for errors.
    """

    folder: Path | None
    refused: str
    name: str
    operation: str

    @classmethod
    def of(cls, job: str, number: int, operation: str) -> LaunchSockets:
        """Returns the sockets of a launch; makes the folder if it does not exist."""
        # A socket's name must be short, but a launcher's job name may be long, so hash it.
        digest = hashlib.sha256(job.encode()).hexdigest()[:24]
        name = f"rendezvous-{digest}-{number}.sock"
        folder = folder_of_user()
        try:
            with opened(folder):
                return cls(folder, "", name, operation)
        except OSError as error:
            return cls(None, f"{folder}: {error.strerror or error}", name, operation)

    @property
    def abstract(self) -> str:
        return f"\0ringcomm-{os.geteuid()}-{self.name}"

    @property
    def shown(self) -> str:
        """Describes the sockets for an error."""
        path = f"{self.folder / self.name}" if self.folder is not None else "no folder"
        return f"{path} and at the abstract socket @{self.abstract[1:]}"


def folder_of_user() -> Path:
    """Returns the folder of sockets: in XDG_RUNTIME_DIR, else in the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        with suppress(OSError):
            status = os.stat(runtime)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                return Path(runtime, "ringcomm")
    return Path(gettempdir(), f"ringcomm-{os.geteuid()}")


@contextmanager
def opened(folder: Path) -> Iterator[str]:
    """Opens a folder of this user only, and yields a short path to it.

    The path leads to the folder that was checked, even if another folder takes its name.

    Raises:
        OSError: the folder does not exist and cannot be made, belongs to another user, or is open
            to others. The message names the owner.
    """
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                errno.EPERM,
                "expected a folder of this user's alone (mode 0700), got "
                f"{stat.filemode(status.st_mode)} of user {status.st_uid}",
            )
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns pid and uid of the process at the connection's other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return pid, uid


def _holder(address: str) -> str:
    """Describes the process that listens at an address; "" if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address)
            pid, uid = credentials(connection)
        except OSError:
            return ""
    return f"process {pid} of user {uid}"


# ---- rank 0 -------------------------------------------------------------------------------------


def serve(sockets: LaunchSockets, world_size: int, timeout_s: float) -> Store:
    """Serves a store, and sends its port to the other ranks in the background."""
    with ExitStack() as undo:
        listeners = _listen(sockets, world_size)
        for listener in listeners:
            undo.callback(listener.close)
        from torch.distributed import TCPStore

        # Pass torch a socket that already listens on the loopback interface: otherwise torch would
        # listen on all interfaces.
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.bind((LOOPBACK, 0))
        server.listen(world_size)
        port: int = server.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
        thread = threading.Thread(
            target=hand_out, args=(sockets, listeners, port, world_size - 1, timeout_s), daemon=True
        )
        try:
            start_thread(thread, sockets.operation, "The other ranks cannot find this one")
        except RingcommError as error:
            _remove(sockets)
            raise RendezvousError(str(error)) from error
        undo.pop_all()
        return store


def _listen(sockets: LaunchSockets, world_size: int) -> list[socket.socket]:
    """Listens in the folder, then at the abstract socket, for ranks that lack the folder."""
    listeners = []
    if sockets.folder is not None:
        with opened(sockets.folder) as short:
            _remove_stale(short)
            listeners.append(_listener(f"{short}/{sockets.name}", sockets, world_size))
    else:
        warnings.warn(
            f"{sockets.operation}: the rendezvous has an abstract socket, which any user may hold: "
            f"{sockets.refused}. Remove that folder, set XDG_RUNTIME_DIR or TMPDIR to another one, "
            f"or {_MASTER}",
            RuntimeWarning,
            stacklevel=2,
        )
    try:
        listeners.append(_listener(sockets.abstract, sockets, world_size))
    except RendezvousError:
        # Ranks that share the folder do not need the abstract socket, so another user may own it.
        if not listeners:
            raise
    return listeners


def _listener(address: str, sockets: LaunchSockets, world_size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or _holder(address) or address[0] == "\0":
                raise
            os.unlink(address)  # a killed rank 0 has left this socket
            listener.bind(address)
        listener.listen(world_size)
    except OSError as error:
        listener.close()
        holder = _holder(address)
        held = f" {holder} holds it." if holder else ""
        raise RendezvousError(
            f"{sockets.operation}: cannot listen at {sockets.shown}: {error}.{held} If another "
            f"rank 0 of this launcher listens, start each job with its own launcher; else {_MASTER}"
        ) from error
    return listener


def _remove_stale(short: str) -> None:
    """Removes the sockets of processes that were killed long ago."""
    for entry in os.scandir(short):
        with suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            is_ours = entry.name.startswith("rendezvous-") and stat.S_ISSOCK(status.st_mode)
            is_old = time.time() - status.st_mtime > STALE_S
            if is_ours and is_old and not _holder(entry.path):
                os.unlink(entry.path)


def _remove(sockets: LaunchSockets) -> None:
    if sockets.folder is not None and sockets.folder.exists():
        with suppress(OSError), opened(sockets.folder) as short:
            os.unlink(f"{short}/{sockets.name}")


def hand_out(
    sockets: LaunchSockets,
    listeners: Sequence[socket.socket],
    port: int,
    peers: int,
    timeout_s: float,
) -> None:
    """Sends the port to ``peers`` ranks of this user, for at most ``timeout_s`` seconds."""
    deadline = Deadline(timeout_s, 3 * ASKS_WITHIN_S)
    with ExitStack() as end, selectors.DefaultSelector() as selector:
        end.callback(_remove, sockets)
        for listener in listeners:
            end.enter_context(listener)
            selector.register(listener, selectors.EVENT_READ)
        while peers and not deadline.is_over():
            for key, _ in selector.select(min(deadline.left_s(), ASKS_WITHIN_S)):
                with suppress(OSError), key.fileobj.accept()[0] as connection:  # type: ignore[union-attr]
                    connection.settimeout(ASKS_WITHIN_S)
                    is_peer = credentials(connection)[1] == os.geteuid()
                    # A process that only checks which process listens here sends no request.
                    if is_peer and connection.recv(len(_REQUEST)) == _REQUEST:
                        connection.sendall(_PORT.pack(port))
                        peers -= 1


# ---- the other ranks ----------------------------------------------------------------------------


def ask_port(sockets: LaunchSockets, deadline: Deadline) -> int:
    """Requests the port of rank 0's store, repeatedly until the deadline, and returns it."""
    strangers: set[str] = set()
    while not deadline.is_over():
        with _connected(sockets.abstract, strangers) as outside:
            # Rank 0 listens in its folder before it listens at the abstract socket. If it
            # listens at this socket, but not in this rank's folder, it uses another folder.
            port = _asked_in_folder(sockets, deadline, strangers)
            if port is None and outside is not None:
                port = _answer(outside, deadline)
                if port is not None:
                    _warn_of_no_folder(sockets)
        if port is not None:
            return port
        time.sleep(RETRY_S)
    held = f"{' and '.join(sorted(strangers))} answered in its place. " if strangers else ""
    raise timed_out(
        f"{sockets.operation}:",
        deadline.timeout_s,
        f"rank 0 of the same launcher, which did not come to {sockets.shown}",
        f"{held}Ranks must be started by one launcher process directly, and as one user; otherwise "
        f"{_MASTER}",
        kind=RendezvousError,
    )


def _asked_in_folder(sockets: LaunchSockets, deadline: Deadline, strangers: set[str]) -> int | None:
    if sockets.folder is None:
        return None
    with (
        opened(sockets.folder) as short,
        _connected(f"{short}/{sockets.name}", strangers) as connection,
    ):
        return None if connection is None else _answer(connection, deadline)


def _warn_of_no_folder(sockets: LaunchSockets) -> None:
    why = sockets.refused or f"rank 0 is not in {sockets.folder}, as if it had another file system"
    warnings.warn(
        f"{sockets.operation}: found rank 0 at an abstract socket, which any user may hold: {why}. "
        f"Have the ranks share XDG_RUNTIME_DIR or TMPDIR, or {_MASTER}",
        RuntimeWarning,
        stacklevel=2,
    )


@contextmanager
def _connected(address: str, strangers: set[str]) -> Iterator[socket.socket | None]:
    """Yields a connection to this user's process at an address; None if none listens there.

    If a process of another user listens there, adds it to ``strangers``.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ACCEPT_S)
        try:
            connection.connect(address)
            pid, uid = credentials(connection)
        except OSError:
            yield None  # rank 0 does not listen yet
            return
        if uid != os.geteuid():
            strangers.add(f"process {pid} of user {uid}")
            yield None
            return
        yield connection


def _answer(connection: socket.socket, deadline: Deadline) -> int | None:
    """Requests and returns the port; None if rank 0 does not answer because it has ended."""
    try:
        connection.sendall(_REQUEST)
        while not deadline.is_over():
            with suppress(TimeoutError):
                answer = connection.recv(_PORT.size)
                return int(_PORT.unpack(answer)[0]) if len(answer) == _PORT.size else None
    except OSError:
        pass
    return None
