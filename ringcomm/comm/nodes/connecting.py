"""How the ranks of several nodes connect: the carrier's process groups, and who cannot be reached.

A *carrier* makes a process group for a rail: torch's ProcessGroupGloo on CPUs, or what the user's
function returns. ringcomm has it send and receive, and nothing else: reductions are its own.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

from torch.distributed import HashStore, Store

from ringcomm.comm.nodes.places import Places
from ringcomm.deadlines import Deadline
from ringcomm.errors import (
    ArgumentError,
    RendezvousError,
    RingcommError,
    UnsupportedError,
    printable,
    start_thread,
)
from ringcomm.json_reader import read_record
from ringcomm.rendezvous.descriptors import need_descriptors
from ringcomm.rendezvous.handles import (
    FIRST_POLL_S,
    LAST_POLL_S,
    Rendezvous,
    host_and_port,
)
from ringcomm.rendezvous.same_node import LOOPBACK

#: Makes the group of a rail: (store of the rail, number of this rank's node, nodes, timeout).
Carrier = Callable[[Store, int, int, timedelta], Any]

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


def carrier_of(asked: str | Carrier, operation: str) -> Carrier:
    """Returns the carrier that ``CommOptions.carrier`` names, for tensors of the CPU.

    Raises:
        UnsupportedError: it is NCCL, which moves no memory of the CPU.
    """
    if callable(asked):
        return asked
    if asked == "nccl":
        raise UnsupportedError(
            f'{operation}: carrier: expected "gloo" or a function for tensors of the CPU, got '
            '"nccl", which moves memory of GPUs only. Leave carrier="auto"'
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
            "carrier: this torch has no Gloo; pass CommOptions(carrier=FUNCTION) with another "
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


# Where Gloo's and torch's C++ begins its messages with a place in its sources.
_SOURCE = re.compile(r"\[[^\]]*?[\w./-]+\.(?:cc|cpp|h|hpp):\d+\] ?")


def told_by(error: BaseException | str) -> str:
    """Returns what a carrier says, on one line, without places in its sources."""
    return printable(_SOURCE.sub("", str(error)).strip().partition("\n")[0][:200])


# NOTE [Connecting on a thread]
#
# A carrier's function returns when all ranks of a group have connected, or at its timeout, and
# neither Ctrl-C nor Python ends it before. So it runs on a thread, and this rank looks meanwhile
# whether another rank has failed, which it could else not learn before that timeout. Its store asks
# again and again instead of waiting: a wait would hold the connection, and could not be ended, so
# that the thread might come back while Python ends; see NOTE [Threads at exit]. A thread that is
# left behind in a connection that is not made ends when its peer does.
class AskingStore(Store):
    """A store in which a carrier's waits end when a rank has failed.

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
                raise TimeoutError(f"waited {timeout.total_seconds():g} s for {', '.join(keys)}")
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
    """Has a carrier make groups with ranks of other nodes.

    Args:
        places: of all ranks.
        carrier: makes the groups.
        timeout_s: of the communicator, in seconds.
        operation: named in errors.
        rendezvous: of all ranks, which tell each other from where they connect, or why they cannot.
        store: of the communicator.

    Raises:
        RendezvousError: this rank has no such interface, or another one has failed.
    """

    def __init__(
        self,
        places: Places,
        carrier: Carrier,
        timeout_s: float,
        operation: str,
        rendezvous: Rendezvous,
        store: Store,
    ) -> None:
        self._places = places
        self._carrier = carrier
        self._timeout = timedelta(seconds=min(timeout_s, CONNECT_S))
        self._operation = operation
        self._rendezvous = rendezvous
        self._asking: list[AskingStore] = []
        here = "the interface of the user's carrier"
        if carrier is gloo:
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
            RendezvousError: a member cannot be reached, or the carrier or another rank failed.
        """
        # Gloo's threads report no shortage of descriptors: they wait.
        need_descriptors(
            SPARE_DESCRIPTORS + 2 * len(ranks), self._operation, "the connections to other nodes"
        )
        outcome, ended = _Outcome(), threading.Event()
        peers = [rank for rank in ranks if rank != self._places.rank]
        look = partial(self._rendezvous.look_for_failures, peers)
        asking = AskingStore(store, look)
        self._asking.append(asking)  # as long as what the carrier has made of it

        def make() -> None:
            try:
                outcome.group = self._carrier(asking, number, len(ranks), self._timeout)
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
                f"{self._operation}: carrier: expected a function that returns a process group of "
                f"torch.distributed, got one that returned {group!r}"
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
        places = self._places
        if self._carrier is not gloo:
            return carrier_failed(self._operation, places, self._carrier, error)
        peers = ", ".join(
            f"{places.named(rank)} at {self._from[rank]}" for rank in ranks if rank != places.rank
        )
        return self._unreachable(self._from[places.rank], peers, error)

    def _unreachable(self, here: str, peers: str, error: BaseException) -> RendezvousError:
        return RendezvousError(
            f"{self._operation}: {self._places.named(self._places.rank)} expected to connect from "
            f"{here} to {peers}, got: {told_by(error)}. Name the interface that all nodes share in "
            "RINGCOMM_SOCKET_IFNAME, and let no firewall close its ports"
        )


def carrier_failed(
    operation: str, places: Places, carrier: Carrier, error: BaseException
) -> RendezvousError:
    """Returns the error of a user's carrier function that has raised."""
    name = getattr(carrier, "__qualname__", type(carrier).__qualname__)
    return RendezvousError(
        f"{operation}: {places.named(places.rank)} called the function {name} of "
        f"CommOptions(carrier=) for a process group, and it raised {type(error).__name__}: "
        f"{told_by(error)}"
    )
