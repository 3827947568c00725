# SPDX-License-Identifier: Apache-2.0
"""The transport between nodes: its process groups, and the messages of each rail.

A *transport* makes a process group for a rail: torch's ProcessGroupGloo on CPUs, or the group that
the user's function returns. ringcomm only uses its sends and receives, and makes reductions itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import queue
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch.distributed import BroadcastOptions, HashStore, PrefixStore, Store, is_nccl_available

from ringcomm.comm.host.rendezvous import NodeLayout
from ringcomm.cuda.runtime import DeviceRuntime, Stream
from ringcomm.errors import (
    ArgumentError,
    RendezvousError,
    RingcommError,
    UnsupportedError,
    printable,
    start_thread,
    waited_for,
)
from ringcomm.json_reader import read_record
from ringcomm.process import Deadline
from ringcomm.rendezvous.handles import (
    FIRST_POLL_S,
    LAST_POLL_S,
    Rendezvous,
    host_and_port,
    need_descriptors,
)
from ringcomm.rendezvous.same_node import LOOPBACK

#: Makes a rail's group from (store of the rail, this node's number, number of nodes, timeout).
Transport = Callable[[Store, int, int, timedelta], Any]

# File descriptors that Gloo needs in addition to those of its connections.
SPARE_DESCRIPTORS = 4
# How long, in seconds, ranks try to connect once all are present; not measured.
CONNECT_S = 60.0
LOOK_S = 0.05
# Seconds for which a rank whose connection has broken waits for another rank's failure report.
ECHO_S = 0.5
INTERFACE_VARIABLES = ("RINGCOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LONGEST_ADDRESS = 200
_SIOCGIFADDR = 0x8915


def transport_of(asked: str | Transport, operation: str) -> Transport:
    """Returns the transport for CPU tensors that ``CommOptions.transport`` selects.

    Raises:
        UnsupportedError: the transport is NCCL, which moves no CPU memory.
    """
    if callable(asked):
        return asked
    if asked == "nccl":
        raise UnsupportedError(
            f'{operation}: transport: expected "gloo" or a function for tensors of the CPU, got '
            '"nccl", which moves memory of GPUs only. Leave transport="auto"'
        )
    return gloo


def gloo(store: Store, node: int, num_nodes: int, timeout: timedelta) -> Any:
    """Makes a ProcessGroupGloo over the interface that leads to the store's host.

    Args:
        store: used by this group only.
        node: this rank's number in the group.
        num_nodes: the size of the group.
        timeout: timeout for connecting, and default timeout of the group's calls.

    Raises:
        UnsupportedError: this torch was built without Gloo.
    """
    kind = _gloo_kind()
    # torch's type stubs lack the class of the group's options.
    options = cast(Any, kind)._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(**_interface(store))]
    return kind(store, node, num_nodes, options)


def _gloo_kind() -> Any:
    try:
        from torch.distributed import ProcessGroupGloo
    except ImportError as error:
        raise UnsupportedError(
            "transport: this torch has no Gloo; pass CommOptions(transport=FUNCTION) with another "
            "torch.distributed process group"
        ) from error
    return ProcessGroupGloo


def _interface(store: Any) -> dict[str, str]:
    """Returns the interface or address that Gloo's connections use on this rank."""
    for variable in INTERFACE_VARIABLES:
        if os.environ.get(variable):
            return {"interface": os.environ[variable].split(",")[0]}
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, HashStore):  # ranks are threads of one process
        return {"hostname": LOOPBACK}
    found = host_and_port(store)
    if found is None:
        return {"hostname": socket.gethostname()}
    # Connecting a datagram socket sends nothing, but gives it the local address of the route.
    family, kind, protocol, _, address = socket.getaddrinfo(found[0], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return {"hostname": probe.getsockname()[0]}


def _here(store: Any) -> str:
    """Describes the interface or address from which Gloo connects on this rank."""
    host = socket.gethostname()
    for variable in INTERFACE_VARIABLES:
        if os.environ.get(variable):
            name = os.environ[variable].split(",")[0]
            return f"interface {name} ({_address_of(name)}, {variable}) of {host}"
    try:
        return f"address {_interface(store)['hostname']} of {host}"
    except OSError as unknown:
        return f"{host}, which has no address on the way to the store ({unknown})"


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
        except OSError as error:
            return f"no IPv4 address: {error.strerror}"


# Matches the position in a C++ source file with which messages of Gloo and torch begin.
_SOURCE = re.compile(r"\[[^\]]*?[\w./-]+\.(?:cc|cpp|h|hpp):\d+\] ?")


def told_by(error: BaseException | str) -> str:
    """Returns a transport's error message on one line, without positions in source files."""
    return printable(_SOURCE.sub("", str(error)).strip().partition("\n")[0][:200])


# NOTE [Connecting on a thread]
#
# A transport's function returns when all ranks of a group have connected, or at its timeout;
# neither Ctrl-C nor Python can end it earlier. So the function runs on a thread, while this rank
# checks whether another rank has failed; otherwise the rank would notice a failure only at the
# timeout. The thread's store polls instead of waiting: a wait would block the connection and could
# not be ended, so the thread might return from the wait while Python exits; see NOTE [Threads at
# exit]. A thread that is left behind in an unfinished connection ends when its peer does.
class AskingStore(Store):
    """A store in which a transport's waits end when a rank has failed.

    Args:
        inner: the store.
        look: raises RendezvousError if a rank has failed.
    """

    def __init__(self, inner: Store, look: Callable[[], None]) -> None:
        super().__init__()
        self.underlying_store = inner
        self._look = look

    def set(self, key: str, value: Any) -> None:
        self.underlying_store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.underlying_store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=CONNECT_S)) -> None:
        """Waits until the store has all keys.

        Raises:
            RendezvousError: a rank has failed.
            TimeoutError: the keys did not appear in time.
        """
        deadline, pause_s = Deadline(timeout.total_seconds()), FIRST_POLL_S
        while not self.underlying_store.check(keys):
            self._look()
            if deadline.is_over():
                raise TimeoutError(waited_for(timeout.total_seconds(), ", ".join(keys)))
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_POLL_S)

    def check(self, keys: list[str]) -> bool:
        return self.underlying_store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self.underlying_store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.underlying_store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(key)

    def num_keys(self) -> int:
        return self.underlying_store.num_keys()

    def has_extended_api(self) -> bool:
        """Returns False: this store lacks append(), multi_get() and multi_set()."""
        return False


_left: list[threading.Thread] = []
LEAVES_S = 1.0


@atexit.register
def _wait_for_those_left() -> None:
    for thread in _left:
        thread.join(LEAVES_S)


@dataclass
class _Outcome:
    group: Any = None
    error: BaseException | None = None


class Connector:
    """Makes groups with ranks of other nodes, by a transport.

    Args:
        layout: the nodes of all ranks.
        transport: makes the groups.
        timeout_s: the timeout of the communicator, in seconds.
        operation: the name of the operation, for errors.
        rendezvous: lets all ranks exchange the addresses from which they connect, or their errors.
        store: the store of the communicator.

    Raises:
        RendezvousError: this rank lacks the named interface, or another rank has failed.
    """

    def __init__(
        self,
        layout: NodeLayout,
        transport: Transport,
        timeout_s: float,
        operation: str,
        rendezvous: Rendezvous,
        store: Store,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._timeout = timedelta(seconds=min(timeout_s, CONNECT_S))
        self._operation = operation
        self._rendezvous = rendezvous
        self._asking: list[AskingStore] = []
        here = "the interface of the user's transport"
        if transport is gloo:
            here = _here(store)
            try:
                _gloo_kind().create_device(**_interface(store))
            except (RuntimeError, OSError) as error:
                raise self._unreachable(here, "other nodes", error) from error
        # Every rank can connect now: no rank will wait for a missing rank any more.
        self._from = [
            printable(str(read_record(text, rank, operation).get("from"))[:LONGEST_ADDRESS], "")
            for rank, text in enumerate(rendezvous.everyone("addresses", {"from": here}))
        ]

    def group(self, store: Store, number: int, ranks: Sequence[int]) -> Any:
        """Makes a group.

        Args:
            store: used by this group only.
            number: this rank's number in the group.
            ranks: the members, by number in the group.

        Raises:
            RendezvousError: a member cannot be reached, or the transport or another rank failed.
        """
        # Check for free file descriptors here: if there are too few, Gloo's threads hang.
        need_descriptors(
            SPARE_DESCRIPTORS + 2 * len(ranks), self._operation, "the connections to other nodes"
        )
        outcome, ended = _Outcome(), threading.Event()
        peers = [rank for rank in ranks if rank != self._layout.rank]
        look = partial(self._rendezvous.look_for_failures, peers)
        asking = AskingStore(store, look)
        self._asking.append(asking)  # must live as long as the group that the transport makes

        def make() -> None:
            try:
                outcome.group = self._transport(asking, number, len(ranks), self._timeout)
            except BaseException as error:
                outcome.error = error
            ended.set()

        thread = threading.Thread(target=make, name="ringcomm-connect", daemon=True)
        start_thread(thread, self._operation, "The communicator was not built")
        self._watch(thread, ended, look)
        error = outcome.error
        # Ctrl-C, or the failure of another rank: raise it unchanged, without a new cause.
        if isinstance(error, RingcommError) or not isinstance(error, Exception | None):
            raise error
        if error is not None:
            # A connection may break before its rank reports the cause or is known to have ended.
            limit = Deadline(ECHO_S)
            while not limit.is_over():
                look()
                time.sleep(LOOK_S)
            raise self._failed(error, ranks) from error
        group = outcome.group
        if not callable(getattr(group, "send", None)) or not callable(getattr(group, "recv", None)):
            raise ArgumentError(
                f"{self._operation}: transport: expected a function that returns a process group "
                f"of torch.distributed, got one that returned {group!r}"
            )
        return group

    def _watch(
        self, thread: threading.Thread, ended: threading.Event, look: Callable[[], None]
    ) -> None:
        """Waits for a connecting thread; raises if another rank has failed."""
        if ended.wait(LOOK_S):
            return
        try:
            while not ended.wait(LOOK_S):
                look()
        except BaseException:
            _left.append(thread)
            raise

    def _failed(self, error: Exception, ranks: Sequence[int]) -> RendezvousError:
        layout = self._layout
        if self._transport is not gloo:
            return transport_failed(self._operation, layout, self._transport, error)
        peers = ", ".join(
            f"{layout.named(rank)} at {self._from[rank]}" for rank in ranks if rank != layout.rank
        )
        return self._unreachable(self._from[layout.rank], peers, error)

    def _unreachable(self, here: str, peers: str, error: BaseException) -> RendezvousError:
        return RendezvousError(
            f"{self._operation}: {self._layout.named(self._layout.rank)} expected to connect from "
            f"{here} to {peers}, got: {told_by(error)}. Name the interface that all nodes share in "
            "RINGCOMM_SOCKET_IFNAME, and let no firewall close its ports"
        )


def transport_failed(
    operation: str, layout: NodeLayout, transport: Transport, error: BaseException
) -> RendezvousError:
    """Returns the error for a user's transport function that raised."""
    name = getattr(transport, "__qualname__", type(transport).__qualname__)
    return RendezvousError(
        f"{operation}: {layout.named(layout.rank)} called the function {name} of "
        f"CommOptions(transport=) for a process group, and it raised {type(error).__name__}: "
        f"{told_by(error)}"
    )


# ---- The rails of one rank: messages to the ranks of other nodes ---------------------------------

Tensor = torch.Tensor

# Gloo ends the process when a message exceeds the receive's buffer. So the tag of data is a hash of
# their meaning and size: data of another size match no receive, and the headers show both sizes.
HEADER_TAG = 1


def tag_of(what: object, size_bytes: int) -> int:
    """Returns the tag of data; both ends pass ``what`` with equal text."""
    return zlib.crc32(f"{what} {size_bytes}".encode()) & 0x3FFFFFFF | 0x40000000


def memory_at(ptr: int, size_bytes: int) -> Tensor:
    """Returns a uint8 tensor over [ptr, ptr + size_bytes), which the caller keeps alive."""
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(ptr), dtype=torch.uint8)


# NOTE [Ending a wait of Gloo's]
#
# ProcessGroupGloo.abort() ends no wait for a message, and Python cannot reach the message's own
# abort (torch 2.13). But a wait that times out breaks all connections of its group and so all other
# waits, here and on the peers. So break_up() waits briefly for a message that nobody sends.
#
# Gloo then wakes the waits for messages that have not begun to move, but not the wait for a message
# that is being moved (Pair::signalException in gloo/transport/tcp/pair.cc visits neither rx_ nor
# the unbound buffers of tx_). The same happens when the peer's process ends in the middle of a
# message: Gloo wakes no wait. So every wait runs on a thread that can be left behind (Waiter, and
# the _Line of a tag's messages): a broken connection is closed, so Gloo touches no memory any more.
# A long wait also checks whether its connection still exists (Probe).
NOBODYS_TAG = 2
# The watch ends long waits: a transport's timeout would also count a suspension of this process.
FOR_EVER = timedelta(days=365)


def break_up(group: Any, peers: Iterable[int]) -> bool:
    """Ends all waits in a transport's group, here and on the peers; the group is unusable then.

    Args:
        group: the process group.
        peers: all other ranks of the group.

    Returns:
        True if the transport is known to touch no memory any more, even if some waits continue.
    """
    if group.name() != "gloo":
        with contextlib.suppress(RuntimeError):  # the group was already broken
            group.abort()
        return False
    for peer in peers:
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            work = group.recv([nothing], peer, NOBODYS_TAG)
        except RuntimeError:  # this connection was already broken, but others may exist
            continue
        with contextlib.suppress(RuntimeError):  # the intended timeout
            work.wait(timedelta(milliseconds=1))
        break
    return True


def look_at_connection(group: Any, peer: int) -> None:
    """Raises RuntimeError if a Gloo group has lost its connection to a peer."""
    if group.name() == "gloo":
        # Starting a receive fails unless the connection exists. No rank sends with this tag.
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, NOBODYS_TAG)


# Each check leaves a receive behind, so the time between two checks grows from the first to the
# second value, in seconds.
PROBE_S, LONGEST_PROBE_S = 0.5, 10.0
# Messages that a rank sent before it left arrive within this time, in seconds (not measured).
ARRIVAL_S = 1.0


class Probe:
    """Checks during a long wait whether its connection has broken.

    Args:
        look: raises RuntimeError if the connection has broken.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._next_s = PROBE_S
        self._broken: tuple[str, float] | None = None

    def broken(self, waited_s: float) -> str | None:
        """Returns how the connection broke, once ``ARRIVAL_S`` have passed since; until then None.

        Args:
            waited_s: how long the wait has lasted, in seconds.
        """
        if self._broken is None and waited_s >= self._next_s:
            self._next_s = waited_s + min(waited_s, LONGEST_PROBE_S)
            try:
                self._look()
            except RuntimeError as error:
                self._broken = str(error), waited_s
        if self._broken is not None and waited_s >= self._broken[1] + ARRIVAL_S:
            return self._broken[0]
        return None


@dataclass
class RailMessage:
    """A send or a receive under way on a rail.

    Attributes:
        work: the work of the process group.
        rank: the peer.
        memory: the message's memory, kept alive until the message is done.
        check: called when the message has arrived, before a wait for later messages; it may raise.
    """

    work: Any
    rank: int
    memory: Tensor
    check: Callable[[RailMessage], None] | None = None


@dataclass(frozen=True)
class RefusedMessage:
    """The work of a message that could not begin, as its connection has broken: wait() raises."""

    error: RuntimeError

    def wait(self, timeout: timedelta) -> None:
        raise self.error


def begun(begin: Callable[[], Any]) -> Any:
    """Returns the work that ``begin`` starts; if it fails, the work's wait() raises its error."""
    try:
        return begin()
    except RuntimeError as error:
        return RefusedMessage(error)


# NOTE [Threads at exit]
#
# If a thread returns from a wait in torch while Python exits, Python unwinds it through C++ code
# that does not allow that, and the process aborts. So ringcomm waits for the end of such threads:
# at exit, every communicator is closed before Python ends.


def join(thread: threading.Thread | None) -> None:
    """Waits for the end of a thread that was requested to end. See NOTE [Threads at exit]."""
    if thread is not None and thread is not threading.current_thread():
        thread.join(LEAVES_S)


_Answer: TypeAlias = "queue.SimpleQueue[BaseException | None]"
_Asked: TypeAlias = "tuple[Sequence[RailMessage], _Answer]"
_BROKEN_UP = "the connections were broken up"


class Waiter:
    """Waits for messages on a thread of its own, so that Ctrl-C and a break-up can end a wait.

    A process group's wait blocks its thread until the wait ends, which may be never: see NOTE
    [Ending a wait of Gloo's]. Handing over a wait takes two thread switches, so several messages
    are handed over together.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._answer: _Answer | None = None
        self._is_over = False
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, messages: Sequence[RailMessage]) -> None:
        """Waits for messages in order; raises the error of a process group or a check.

        Raises:
            RuntimeError: the connection broke, or :meth:`give_up` was called.
        """
        answer: _Answer = queue.SimpleQueue()
        with self._guard:
            if self._is_over:
                raise RuntimeError(_BROKEN_UP)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                start_thread(self._thread, self._name, "The message was not awaited")
            self._answer = answer
        self._asked.put((messages, answer))
        error = answer.get()
        if error is not None:
            raise error

    def give_up(self) -> None:
        """Ends the current wait and all later ones."""
        with self._guard:
            self._is_over = True
            if self._answer is not None:
                self._answer.put(RuntimeError(_BROKEN_UP))

    def stop(self) -> None:
        """Ends the thread after its current wait."""
        self._asked.put(None)
        join(self._thread)

    def _loop(self) -> None:
        while (asked := self._asked.get()) is not None:
            messages, answer = asked
            error: BaseException | None = None
            try:
                for message in messages:
                    message.work.wait(FOR_EVER)
                    if message.check is not None:
                        message.check(message)
            except BaseException as raised:
                error = raised
            del asked, messages, message
            answer.put(error)
            del answer, error


class Rails:
    """The rails that this rank is on, each with a process group of the transport.

    Args:
        layout: the nodes of all ranks.
        store: used by this communicator only.
        connector: makes the groups.

    Raises:
        RendezvousError: a rank of a rail cannot be reached; the error names the addresses.
    """

    def __init__(self, layout: NodeLayout, store: Store, connector: Connector) -> None:
        self.layout = layout
        self._waiter = Waiter("ringcomm-rail")
        self._connector = connector  # keep the connector: it holds objects that the groups need
        self._groups: dict[int, Any] = {
            number: connector.group(
                PrefixStore(f"rail{number}", store), layout.node, layout.rail(number)
            )
            for number in layout.rails_of(layout.rank)
        }

    def send(self, rail: int, node: int, memory: Tensor, tag: int) -> RailMessage:
        """Starts to send contiguous one-dimensional memory to a node's rank on a rail."""
        work = begun(lambda: self._groups[rail].send([memory], node, tag))
        return RailMessage(work, self.layout.rail(rail)[node], memory)

    def receive(self, rail: int, node: int, memory: Tensor, tag: int) -> RailMessage:
        """Starts to receive from a node's rank on a rail; the sender's size must be equal."""
        work = begun(lambda: self._groups[rail].recv([memory], node, tag))
        return RailMessage(work, self.layout.rail(rail)[node], memory)

    def wait(self, messages: Sequence[RailMessage]) -> None:
        """Waits for messages; if the wait takes too long, the watch breaks up the rails.

        Raises:
            RuntimeError: the connection broke.
        """
        self._waiter.wait(messages)

    def look(self, peer: int) -> None:
        """Raises RuntimeError if a rail of this rank has lost its connection to a rank."""
        for rail, group in self._groups.items():
            if peer in self.layout.rail(rail):
                look_at_connection(group, self.layout.node_of(peer))

    def break_up(self) -> None:
        """Ends all messages under way. See NOTE [Ending a wait of Gloo's]."""
        others = tuple(self.layout.others())
        are_quiet = [break_up(group, others) for group in self._groups.values()]
        if all(are_quiet):
            self._waiter.give_up()

    def close(self) -> None:
        """Releases the groups; no message may be under way."""
        self._waiter.stop()
        self._groups.clear()


# ---- The rails of a rank on a device: exchanges with other nodes ---------------------------------
# A transport's process group moves bytes between the ranks of a rail by ``alltoall_base`` and
# ``broadcast``, in the order of the current stream; it adds nothing. The group is NCCL's, or the
# group that the user's function returns. ringcomm's kernels and the exchanges are ordered only by
# the stream.


# NOTE [NCCL's watchdog]
#
# The watchdog of a ProcessGroupNCCL in torch ends the process when a call fails or times out.
# ringcomm's watch aborts the group instead, and calls raise the cause. So ringcomm's groups have no
# timeout, and are made while the variable below turns the watchdog's error handling off. Only the
# group's constructor reads the variable.

WATCHDOG_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()

PROOF_POLL_S = 0.001


def device_transport_of(asked: str | Transport, operation: str) -> Transport:
    """Returns the transport for device tensors that ``CommOptions.transport`` selects.

    Raises:
        UnsupportedError: the transport is Gloo, which moves CPU memory; or torch has no NCCL.
    """
    if callable(asked):
        return asked
    if asked == "gloo":
        raise UnsupportedError(
            f'{operation}: transport: expected "nccl" or a function for tensors of GPUs, got '
            '"gloo", which moves memory of the CPU only. Leave transport="auto"'
        )
    if not is_nccl_available():
        raise UnsupportedError(
            f"{operation}: transport: between nodes tensors of GPUs are carried by NCCL, and this "
            f"torch ({torch.__version__}) was built without it. Install a torch for CUDA, or pass "
            "CommOptions(transport=FUNCTION) with another torch.distributed process group for GPUs"
        )
    return nccl


def nccl(store: Store, node: int, num_nodes: int, timeout: timedelta) -> Any:
    """Makes a ProcessGroupNCCL on the current device.

    Args:
        store: used by this group only.
        node: this rank's number in the group.
        num_nodes: the size of the group.
        timeout: not used: see NOTE [NCCL's watchdog].
    """
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = FOR_EVER
    with _making:
        before = os.environ.get(WATCHDOG_VARIABLE)
        os.environ[WATCHDOG_VARIABLE] = "0"
        try:
            return ProcessGroupNCCL(store, node, num_nodes, options)
        finally:
            if before is None:
                del os.environ[WATCHDOG_VARIABLE]
            else:
                os.environ[WATCHDOG_VARIABLE] = before


class DeviceRails:
    """The rails that this rank is on, each with a process group of the transport.

    Args:
        layout: the nodes of all ranks.
        store: used by this communicator's transport only.
        transport: makes the groups.
        device_ref: this rank's device: its runtime and its ordinal.
        operation: the name of the operation, for errors.

    Raises:
        RendezvousError: a rank of a rail cannot be reached.
    """

    def __init__(
        self,
        layout: NodeLayout,
        store: Store,
        transport: Transport,
        device_ref: tuple[DeviceRuntime, int],
        operation: str,
    ) -> None:
        self.layout = layout
        self.runtime, self.device = device_ref
        self._operation = operation
        self._groups: dict[int, Any] = {}
        self._broken = False
        for rail in layout.rails_of(layout.rank):
            own = PrefixStore(f"rail{rail}", store)
            try:
                with self.runtime.on_device(self.device):
                    group = transport(
                        own, layout.node, len(layout.nodes), timedelta(seconds=CONNECT_S)
                    )
            except RingcommError:
                raise
            except Exception as error:
                if transport is nccl:
                    raise self._unreachable(rail, told_by(error)) from error
                raise transport_failed(operation, layout, transport, error) from error
            for name in ("alltoall_base", "broadcast"):
                if not callable(getattr(group, name, None)):
                    raise ArgumentError(
                        f"{operation}: transport: expected a function that returns a process group "
                        f"of torch.distributed, got one that returned {group!r}"
                    )
            self._groups[rail] = group

    def prove(self, timeout_s: float) -> None:
        """Exchanges the ranks' numbers on every rail, which makes the transport connect.

        Raises:
            RendezvousError: the numbers did not arrive; the error names the ranks of the rail.
        """
        runtime, device = self.runtime, self.device
        # A private stream, so that this rank does not wait for other ranks of its process.
        stream = runtime.make_stream(device)
        deadline = Deadline(min(timeout_s, CONNECT_S))
        with runtime.on_device(device), runtime.on_stream(stream):
            for rail in self._groups:
                expected = list(self.layout.rail(rail))
                try:
                    found = self._numbers(rail, stream, deadline)
                except RuntimeError as error:
                    raise self._unreachable(rail, told_by(error)) from error
                if found != expected:
                    raise self._unreachable(rail, f"{found} in place of {expected}")

    def _numbers(self, rail: int, stream: Stream, deadline: Deadline) -> list[int]:
        """Returns the rank numbers that the ranks of a rail have sent."""
        ones = [1] * len(self.layout.nodes)
        on = self.runtime.torch_device(self.device)
        mine = torch.full((len(ones),), self.layout.rank, dtype=torch.int64, device=on)
        theirs = torch.full_like(mine, -1)
        self.exchange(rail, theirs, mine, ones, ones)
        arrived = self.runtime.record_event(self.device, stream.handle)
        while not arrived.query():
            if deadline.is_over():
                self.break_up()
                raise RuntimeError(
                    waited_for(deadline.timeout_s, "the numbers of those ranks, but none came")
                )
            time.sleep(PROOF_POLL_S)
        numbers: list[int] = theirs.tolist()
        return numbers

    def _unreachable(self, rail: int, said: str) -> RendezvousError:
        layout = self.layout
        peers = ", ".join(layout.named(rank) for rank in layout.rail(rail) if rank != layout.rank)
        return RendezvousError(
            f"{self._operation}: expected the transport to connect device {self.device} of "
            f"{layout.named(layout.rank)} to {peers}, got: {said}. See what the transport reports "
            "(NCCL_DEBUG=INFO), and name the interface that all nodes share in NCCL_SOCKET_IFNAME"
        )

    def exchange(
        self,
        rail: int,
        output: Tensor,
        input: Tensor,
        output_elems: Sequence[int],
        input_elems: Sequence[int],
    ) -> None:
        """Enqueues an exchange on a rail, in the order of the current stream.

        Args:
            rail: the number of a rail that this rank is on.
            output: one-dimensional; receives the arriving data, by node.
            input: one-dimensional; the data to send, by node, including this rank's own.
            output_elems: elements of each part of ``output``, by node.
            input_elems: elements of each part of ``input``, by node.

        Raises:
            RuntimeError: the transport refuses the exchange.
        """
        # Exchange bytes: every transport supports uint8.
        into, given = (
            [each * tensor.itemsize for each in elems]
            for tensor, elems in ((output, output_elems), (input, input_elems))
        )
        self._groups[rail].alltoall_base(
            output.view(torch.uint8), input.view(torch.uint8), into, given
        ).wait()

    def broadcast(self, rail: int, tensor: Tensor, node: int) -> None:
        """Enqueues a broadcast from a node's rank on a rail; otherwise as :meth:`exchange`."""
        options = BroadcastOptions()
        options.rootRank = node
        self._groups[rail].broadcast([tensor], options).wait()

    def break_up(self) -> None:
        """Ends all work under way in the transport's groups, which are unusable then."""
        self._broken = True
        for group in tuple(self._groups.values()):
            break_up(group, self.layout.others())

    def close(self) -> None:
        """Releases the groups; no work may be under way."""
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            if group.name() == "nccl" and not self._broken:
                group.shutdown()
