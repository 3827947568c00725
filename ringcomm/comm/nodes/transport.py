"""The transport between nodes: its process groups, and the messages of each rail.

A *transport* makes a process group for a rail: torch's ProcessGroupGloo on CPUs, or what the user's
function returns. ringcomm has it send and receive, and nothing else: reductions are its own.
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

#: Makes the group of a rail: (store of the rail, number of this rank's node, nodes, timeout).
Transport = Callable[[Store, int, int, timedelta], Any]

# Descriptors that Gloo needs beside its connections.
SPARE_DESCRIPTORS = 4
# How long ranks, all of which are there, try to connect; a choice.
CONNECT_S = 60.0
LOOK_S = 0.05
# How long a rank whose connection has broken listens for the failure of another rank: a choice.
ECHO_S = 0.5
INTERFACE_VARIABLES = ("RINGCOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LONGEST_ADDRESS = 200
_SIOCGIFADDR = 0x8915


def transport_of(asked: str | Transport, operation: str) -> Transport:
    """Returns the transport that ``CommOptions.transport`` names, for tensors of the CPU.

    Raises:
        UnsupportedError: it is NCCL, which moves no memory of the CPU.
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
        store: of this group alone.
        node: this rank's number in the group.
        num_nodes: the size of the group.
        timeout: for connecting, and the default of its calls.

    Raises:
        UnsupportedError: this torch was built without Gloo.
    """
    kind = _gloo_kind()
    # torch's own type of the module leaves the class of its options out.
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
    """Returns the interface or address that Gloo's connections use here."""
    for variable in INTERFACE_VARIABLES:
        if os.environ.get(variable):
            return {"interface": os.environ[variable].split(",")[0]}
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, HashStore):  # of threads of one process
        return {"hostname": LOOPBACK}
    found = host_and_port(store)
    if found is None:
        return {"hostname": socket.gethostname()}
    # A connected datagram socket sends nothing, but has the address that the route would use.
    family, kind, protocol, _, address = socket.getaddrinfo(found[0], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return {"hostname": probe.getsockname()[0]}


def _here(store: Any) -> str:
    """Returns from where Gloo connects on this rank, in words."""
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


# Where Gloo's and torch's C++ begins its messages with a line of its sources.
_SOURCE = re.compile(r"\[[^\]]*?[\w./-]+\.(?:cc|cpp|h|hpp):\d+\] ?")


def told_by(error: BaseException | str) -> str:
    """Returns what a transport says, on one line, without lines of its sources."""
    return printable(_SOURCE.sub("", str(error)).strip().partition("\n")[0][:200])


# NOTE [Connecting on a thread]
#
# A transport's function returns when all ranks of a group have connected, or at its timeout, and
# neither Ctrl-C nor Python ends it before. So it runs on a thread, and this rank looks meanwhile
# whether another rank has failed, which it could else not learn before that timeout. Its store asks
# again and again instead of waiting: a wait would hold the connection, and could not be ended, so
# that the thread might come back while Python ends; see NOTE [Threads at exit]. A thread that is
# left behind in a connection that is not made ends when its peer does.
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
        """Waits until all keys are there.

        Raises:
            RendezvousError: a rank has failed.
            TimeoutError: they did not come in time.
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
        """Says that it has none of append(), multi_get() and multi_set()."""
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
    """Has a transport make groups with ranks of other nodes.

    Args:
        layout: of all ranks.
        transport: makes the groups.
        timeout_s: of the communicator, in seconds.
        operation: named in errors.
        rendezvous: of all ranks, which tell each other from where they connect, or why they cannot.
        store: of the communicator.

    Raises:
        RendezvousError: this rank has no such interface, or another one has failed.
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
        # All ranks have what they need: from here on nobody waits for one that does not begin.
        self._from = [
            printable(str(read_record(text, rank, operation).get("from"))[:LONGEST_ADDRESS], "")
            for rank, text in enumerate(rendezvous.everyone("addresses", {"from": here}))
        ]

    def group(self, store: Store, number: int, ranks: Sequence[int]) -> Any:
        """Makes a group.

        Args:
            store: of this group alone.
            number: this rank's in the group.
            ranks: the members, by number in the group.

        Raises:
            RendezvousError: a member cannot be reached, or the transport or another rank failed.
        """
        # Gloo's threads report no shortage of descriptors: they wait.
        need_descriptors(
            SPARE_DESCRIPTORS + 2 * len(ranks), self._operation, "the connections to other nodes"
        )
        outcome, ended = _Outcome(), threading.Event()
        peers = [rank for rank in ranks if rank != self._layout.rank]
        look = partial(self._rendezvous.look_for_failures, peers)
        asking = AskingStore(store, look)
        self._asking.append(asking)  # as long as what the transport has made of it

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
        # Ctrl-C, or another rank has failed: an error cannot be its own cause.
        if isinstance(error, RingcommError) or not isinstance(error, Exception | None):
            raise error
        if error is not None:
            # A connection breaks before the rank that failed has told why or counts as ended.
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
        """Waits for a thread that connects; raises what another rank has failed by."""
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
    """Returns the error of a user's transport function that has raised."""
    name = getattr(transport, "__qualname__", type(transport).__qualname__)
    return RendezvousError(
        f"{operation}: {layout.named(layout.rank)} called the function {name} of "
        f"CommOptions(transport=) for a process group, and it raised {type(error).__name__}: "
        f"{told_by(error)}"
    )


# ---- The rails of one rank: messages to the ranks of other nodes, sent by an engine that exists

Tensor = torch.Tensor

# Gloo ends the process when more arrives than a receive has room for. So the tag of data stands for
# what they are and for their size: what does not fit finds no receive, and headers tell why.
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
# them other waits, here and on the peers. So break_up() waits a moment for what nobody sends.
#
# Gloo then wakes the waits for messages that have not begun to move, but not the wait for the
# message that was moving at that moment (Pair::signalException in gloo/transport/tcp/pair.cc visits
# neither rx_ nor the unbound buffers of tx_). The same happens when the peer's process ends in the
# middle of a message: Gloo wakes no wait. So a wait runs on a thread that can be left behind
# (Waiter, and the lines of messages): a broken connection is closed, and Gloo touches no memory any
# more. A long wait also checks whether its connection still exists (Probe).
NOBODYS_TAG = 2
# The transport's own timeout would count a suspension of this process, so the watch keeps the time.
FOR_EVER = timedelta(days=365)


def break_up(group: Any, peers: Iterable[int]) -> bool:
    """Ends all that waits in a transport's group, here and on the peers; the group is dead then.

    Args:
        group: the process group.
        peers: all other ranks of it.

    Returns:
        True if the transport is known to touch no memory from here on, even if its waits go on.
    """
    if group.name() != "gloo":
        with contextlib.suppress(RuntimeError):  # it was dead already
            group.abort()
        return False
    for peer in peers:
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            work = group.recv([nothing], peer, NOBODYS_TAG)
        except RuntimeError:  # this connection was broken already, but others may exist
            continue
        with contextlib.suppress(RuntimeError):  # as is meant
            work.wait(timedelta(milliseconds=1))
        break
    return True


def look_at_connection(group: Any, peer: int) -> None:
    """Raises RuntimeError if a group of Gloo's has lost its connection to a peer."""
    if group.name() == "gloo":
        # A receive begins only on a connection that exists. Nobody sends to it.
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, NOBODYS_TAG)


# Each look leaves a receive behind, so the time between two looks grows up to the second value:
# choices.
PROBE_S, LONGEST_PROBE_S = 0.5, 10.0
# Messages that a rank sent before it left arrive within this time: a choice.
ARRIVAL_S = 1.0


class Probe:
    """Checks whether the connection of a long wait has broken.

    Args:
        look: raises RuntimeError if it has.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._next_s = PROBE_S
        self._broken: tuple[str, float] | None = None

    def broken(self, waited_s: float) -> str | None:
        """Returns how the connection broke, ``ARRIVAL_S`` after it did; None: it exists.

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
        work: of the process group.
        rank: the peer.
        memory: kept alive until the message is done.
        check: called when the message has come, before later messages are awaited; it may raise.
    """

    work: Any
    rank: int
    memory: Tensor
    check: Callable[[RailMessage], None] | None = None


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


_Answer: TypeAlias = "queue.SimpleQueue[BaseException | None]"
_Asked: TypeAlias = "tuple[Sequence[RailMessage], _Answer]"
_BROKEN_UP = "the connections were broken up"


class Waiter:
    """Waits for messages on a thread of its own, so that Ctrl-C and a break-up can end a wait.

    The wait of a process group holds its thread until it ends, which may be never: see NOTE [Ending
    a wait of Gloo's]. To hand a wait over takes two switches of threads, so messages are handed
    over together.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._answer: _Answer | None = None
        self._is_over = False
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, messages: Sequence[RailMessage]) -> None:
        """Waits for messages, one after the other; raises what a process group or a check raised.

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
        """Ends the wait under way, and all later ones."""
        with self._guard:
            self._is_over = True
            if self._answer is not None:
                self._answer.put(RuntimeError(_BROKEN_UP))

    def stop(self) -> None:
        """Lets the thread end once it waits for nothing."""
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
    """The rails that this rank is on, each with a process group of the transport's.

    Args:
        layout: of all ranks.
        store: of this communicator alone.
        connector: makes the groups.

    Raises:
        RendezvousError: a rank of a rail cannot be reached; says from which address.
    """

    def __init__(self, layout: NodeLayout, store: Store, connector: Connector) -> None:
        self.layout = layout
        self._waiter = Waiter("ringcomm-rail")
        self._connector = connector  # which keeps what the groups need
        self._groups: dict[int, Any] = {
            number: connector.group(
                PrefixStore(f"rail{number}", store), layout.node, layout.rail(number)
            )
            for number in layout.rails_of(layout.rank)
        }

    def send(self, rail: int, node: int, memory: Tensor, tag: int) -> RailMessage:
        """Starts to send memory, contiguous and of one dimension, to a node's rank on a rail."""
        work = begun(lambda: self._groups[rail].send([memory], node, tag))
        return RailMessage(work, self.layout.rail(rail)[node], memory)

    def receive(self, rail: int, node: int, memory: Tensor, tag: int) -> RailMessage:
        """Starts to receive from a node's rank on a rail; the sizes must be equal."""
        work = begun(lambda: self._groups[rail].recv([memory], node, tag))
        return RailMessage(work, self.layout.rail(rail)[node], memory)

    def wait(self, messages: Sequence[RailMessage]) -> None:
        """Waits for messages; the watch breaks the rails up when that takes too long.

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
        """Gives up the groups, once no message is under way."""
        self._waiter.stop()
        self._groups.clear()


# ---- The rails of a rank on a device: exchanges with other nodes, enqueued by an engine that
# exists. A transport's process group moves bytes between the ranks of a rail by ``alltoall_base``
# and ``broadcast``, in the order of the current stream; it adds nothing. That is NCCL, or what the
# user's function returns. ringcomm's own kernels know nothing of it: between a node's call and an
# exchange there is the order of the stream.


# NOTE [NCCL's watchdog]
#
# torch's watchdog of a ProcessGroupNCCL ends the process where a call fails or its time is over.
# ringcomm's watch aborts the group instead, and calls raise what happened. So our groups have no
# timeout, and are made while the variable says that errors are not handled. It is read by the
# constructor alone.

WATCHDOG_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()

PROOF_POLL_S = 0.001


def device_transport_of(asked: str | Transport, operation: str) -> Transport:
    """Returns the transport that ``CommOptions.transport`` names, for tensors of devices.

    Raises:
        UnsupportedError: it is Gloo, which moves memory of the CPU; or this torch has no NCCL.
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
        store: of this group alone.
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
    """The rails that this rank is on, each with a process group of the transport's.

    Args:
        layout: of all ranks.
        store: of this communicator's transport alone.
        transport: makes the groups.
        device_ref: the runtime, and this rank's device.
        operation: named in errors.

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
            RendezvousError: they did not arrive; names the ranks of the rail.
        """
        runtime, device = self.runtime, self.device
        # Of its own: on one stream with other ranks of this process it would wait for theirs.
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
        """Returns what the ranks of a rail say that their numbers are."""
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
                    waited_for(deadline.timeout_s, "the numbers of those ranks, of which none came")
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
        """Enqueues an exchange on a rail, behind and before other work of the current stream.

        Args:
            rail: one that this rank is on.
            output: one dimension; what arrives, by node.
            input: one dimension; what is sent, by node, this one included.
            output_elems: by node.
            input_elems: by node.

        Raises:
            RuntimeError: the transport refuses.
        """
        # As bytes, which every transport knows.
        into, given = (
            [each * tensor.itemsize for each in elems]
            for tensor, elems in ((output, output_elems), (input, input_elems))
        )
        self._groups[rail].alltoall_base(
            output.view(torch.uint8), input.view(torch.uint8), into, given
        ).wait()

    def broadcast(self, rail: int, tensor: Tensor, node: int) -> None:
        """Enqueues a broadcast from a node's rank of a rail; else as :meth:`exchange`."""
        options = BroadcastOptions()
        options.rootRank = node
        self._groups[rail].broadcast([tensor], options).wait()

    def break_up(self) -> None:
        """Ends all that is under way in the transport's groups, which are dead then."""
        self._broken = True
        for group in tuple(self._groups.values()):
            break_up(group, self.layout.others())

    def close(self) -> None:
        """Gives up the groups, once nothing is under way."""
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            if group.name() == "nccl" and not self._broken:
                group.shutdown()
