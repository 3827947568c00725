"""How ranks of one machine find a store when their launcher names none (mpirun, srun).

Rank 0 makes a TCPStore on the loopback interface and hands its port out over an abstract Unix
socket, whose name follows from what all ranks of a launch share: the user, and the
launcher process that started them. An abstract socket has no file and vanishes with its process.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

from torch.distributed import Store, TCPStore

from ringcomm.comm import thread_start
from ringcomm.errors import RendezvousError, RingcommError, where

LOOPBACK = "127.0.0.1"
RETRY_S = 0.005
_PORT = struct.Struct("!H")
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# Every rank counts its meetings, so that the second one of a process has a name of its own.
_meetings = count()


def meet_on_node(rank: int, world_size: int, timeout_s: float, job: str = "") -> Store:
    """A store shared by the ranks of one launch on this machine.

    Args:
        rank: this rank.
        world_size: how many ranks meet.
        timeout_s: seconds.
        job: the launcher's name for this launch; "" when it has none, and the ranks must then be
            children of one process.

    Raises:
        RendezvousError: the ranks did not find each other within ``timeout_s`` seconds.
    """
    operation = where("communicator from the launcher", rank, world_size)
    address = _address(job or _parent(), next(_meetings))
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return _serve(address, world_size, deadline, operation, timeout_s)
    port = _ask_port(address, deadline, operation, timeout_s)
    return TCPStore(
        LOOPBACK,
        port,
        world_size,
        is_master=False,
        timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)),
        wait_for_workers=False,
    )


def _address(job: str, meeting: int) -> str:
    return f"\0ringcomm-{os.getuid()}-{job}-{meeting}"


def _parent() -> str:
    parent = os.getppid()
    # Field 22 is the start time; the second field may contain blanks and parentheses.
    fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    return f"{parent}-{fields[19]}"


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size
    )
    return int(_PEER_CREDENTIALS.unpack(credentials)[1])


def _serve(
    address: str, world_size: int, deadline: float, operation: str, timeout_s: float
) -> Store:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"{operation}: another rank 0 of this launcher holds the meeting point already: "
            f"{error}. Start each job with its own launcher, or set MASTER_ADDR and MASTER_PORT"
        ) from error
    listener.listen(world_size)
    # Listening before torch does confines the store to the loopback interface; by itself it
    # would listen on all of them.
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
        target=_hand_out, args=(listener, port, world_size - 1, deadline), daemon=True
    )
    try:
        thread_start.start(thread, operation, "The other ranks cannot find this one")
    except RingcommError as error:
        listener.close()
        raise RendezvousError(str(error)) from error
    return store


def _hand_out(listener: socket.socket, port: int, peers: int, deadline: float) -> None:
    with listener:
        while peers and (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                return
            with connection:
                if _peer_uid(connection) == os.getuid():
                    connection.sendall(_PORT.pack(port))
                    peers -= 1


def _ask_port(address: str, deadline: float, operation: str, timeout_s: float) -> int:
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(deadline - time.monotonic(), RETRY_S))
            try:
                connection.connect(address)
                if _peer_uid(connection) == os.getuid():
                    answer = connection.recv(_PORT.size)
                    if len(answer) == _PORT.size:
                        return int(_PORT.unpack(answer)[0])
            except OSError:
                # Rank 0 is not there yet.
                pass
        time.sleep(RETRY_S)
    raise RendezvousError(
        f"{operation}: waited {timeout_s:g} s for rank 0 of the same launcher, which did not "
        "come. Ranks must be started by one launcher process directly; otherwise set MASTER_ADDR "
        "and MASTER_PORT on all of them"
    )
