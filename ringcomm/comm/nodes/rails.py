"""The rails of one rank: messages to the ranks of other nodes, carried by an engine that exists."""

from __future__ import annotations

import ctypes
import queue
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from ringcomm.comm.nodes.connecting import LEAVES_S, Connector
from ringcomm.comm.nodes.places import Places
from ringcomm.errors import start_thread

Tensor = torch.Tensor

# Gloo ends the process when more arrives than a receive has room for. So the tag of data stands for
# what they are and for their size: what does not fit meets no receive, and headers tell why.
HEADER_TAG = 1


def tag_of(what: object, size_bytes: int) -> int:
    """Returns the tag of data; ``what`` is equal at both ends, as far as its text goes."""
    return zlib.crc32(f"{what} {size_bytes}".encode()) & 0x3FFFFFFF | 0x40000000


def memory_at(ptr: int, size_bytes: int) -> Tensor:
    """Returns uint8 [size_bytes] over memory that the caller keeps alive."""
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(ptr), dtype=torch.uint8)


# NOTE [Ending a wait of Gloo's]
#
# ProcessGroupGloo.abort() ends no wait for a message, and Python cannot reach the message's own
# abort (torch 2.13). But a wait whose time is over breaks all of its group's connections, and with
# them every other wait, here and on the peers. So break_up() waits a moment for what nobody sends.
NOBODYS_TAG = 2
# The carrier's own timeout would count a suspension of this process, so the watch keeps the time.
FOR_EVER = timedelta(days=365)


def break_up(group: Any, peer: int) -> None:
    """Ends all that waits in a carrier's group, here and on the peers; the group is dead then.

    Args:
        group: the process group.
        peer: any other rank of it.
    """
    try:
        if group.name() != "gloo":
            group.abort()
            return
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        group.recv([nothing], peer, NOBODYS_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:  # as is meant; or the group was dead already
        return


@dataclass
class RailMessage:
    """A send or a receive under way on a rail.

    Attributes:
        work: of the process group.
        rank: the peer.
        memory: kept alive until the message is done.
    """

    work: Any
    rank: int
    memory: Tensor


@dataclass(frozen=True)
class RefusedMessage:
    """Stands for a message that could not begin, as its connection has broken: its wait raises."""

    error: RuntimeError

    def wait(self, timeout: timedelta) -> None:
        raise self.error


def begun(begin: Callable[[], Any]) -> Any:
    """Returns the work of a message that ``begin`` starts; why it did not start, its wait says."""
    try:
        return begin()
    except RuntimeError as error:
        return RefusedMessage(error)


# NOTE [Threads at exit]
#
# A thread that comes back from a wait of torch's while Python ends is unwound through C++ that does
# not allow it, and the process aborts. So who ends such threads waits until they have gone: at exit
# every communicator is closed before Python ends.


def join(thread: threading.Thread | None) -> None:
    """Waits for the end of a thread that has been told to end. See NOTE [Threads at exit]."""
    if thread is not None and thread is not threading.current_thread():
        thread.join(LEAVES_S)


class Waiter:
    """Waits for messages in a way that Ctrl-C can end.

    The wait of a process group holds the thread until it ends. The main thread, which runs the
    handlers of signals, therefore has another thread wait for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: queue.SimpleQueue[tuple[Any, timedelta] | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Waits for a message; raises what the process group raised."""
        if threading.current_thread() is not threading.main_thread():
            work.wait(timeout)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            start_thread(self._thread, self._name, "Make calls with async_op=True instead")
        self._asked.put((work, timeout))
        error = self._told.get()
        if error is not None:
            raise error

    def _loop(self) -> None:
        while (asked := self._asked.get()) is not None:
            error: BaseException | None = None
            try:
                asked[0].wait(asked[1])
            except BaseException as raised:
                error = raised
            del asked
            self._told.put(error)

    def stop(self) -> None:
        """Lets the thread end once it waits for nothing."""
        self._asked.put(None)
        join(self._thread)


class Rails:
    """The rails that this rank is on, each with a process group of the carrier's.

    Args:
        places: of all ranks.
        store: of this communicator alone.
        connector: makes the groups.

    Raises:
        RendezvousError: a rank of a rail cannot be reached; says from which address.
    """

    def __init__(self, places: Places, store: Store, connector: Connector) -> None:
        self.places = places
        self._waiter = Waiter("ringcomm-rail")
        self._connector = connector  # which keeps what the groups need
        self._groups: dict[int, Any] = {
            number: connector.group(
                PrefixStore(f"rail{number}", store), places.node, places.rail(number)
            )
            for number in places.rails_of(places.rank)
        }

    def send(self, rail: int, node: int, memory: Tensor, tag: int) -> RailMessage:
        """Starts to send memory, contiguous and of one dimension, to a node's rank on a rail."""
        work = begun(lambda: self._groups[rail].send([memory], node, tag))
        return RailMessage(work, self.places.rail(rail)[node], memory)

    def receive(self, rail: int, node: int, memory: Tensor, tag: int) -> RailMessage:
        """Starts to receive from a node's rank on a rail; the sizes must be equal."""
        work = begun(lambda: self._groups[rail].recv([memory], node, tag))
        return RailMessage(work, self.places.rail(rail)[node], memory)

    def wait(self, message: RailMessage) -> None:
        """Waits for a message; the watch breaks the rails up when that takes too long.

        Raises:
            RuntimeError: the connection broke.
        """
        self._waiter.wait(message.work, FOR_EVER)

    def break_up(self) -> None:
        """Ends all messages under way. See NOTE [Ending a wait of Gloo's]."""
        peer = next(self.places.others())
        for group in self._groups.values():
            break_up(group, peer)

    def close(self) -> None:
        """Gives up the groups, once no message is under way."""
        self._waiter.stop()
        self._groups.clear()
