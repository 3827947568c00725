"""The rails of a rank on a device: exchanges with other nodes, enqueued by an engine that exists.

A carrier's process group moves bytes between the ranks of a rail by ``alltoall_base`` and
``broadcast``, in the order of the current stream; it adds nothing. That is NCCL, or what the user's
function returns. ringcomm's own kernels know nothing of it: between a node's call and an exchange
there is the order of the stream.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, Store, is_nccl_available

from ringcomm.comm.nodes.connecting import CONNECT_S, Carrier, carrier_failed, told_by
from ringcomm.comm.nodes.places import Places
from ringcomm.comm.nodes.rails import break_up
from ringcomm.cuda.runtime import DeviceRuntime, Stream
from ringcomm.deadlines import Deadline
from ringcomm.errors import ArgumentError, RendezvousError, RingcommError, UnsupportedError

Tensor = torch.Tensor

# NOTE [NCCL's watchdog]
#
# torch's watchdog of a ProcessGroupNCCL ends the process where a call fails or its time is over.
# ringcomm's watch aborts the group instead, and calls raise what happened. So our groups have no
# timeout, and are made while the variable says that errors are not handled. It is read by the
# constructor alone.
FOR_EVER = timedelta(days=365)
WATCHDOG_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()

PROOF_POLL_S = 0.001


def device_carrier_of(asked: str | Carrier, operation: str) -> Carrier:
    """Returns the carrier that ``CommOptions.carrier`` names, for tensors of devices.

    Raises:
        UnsupportedError: it is Gloo, which moves memory of the CPU; or this torch has no NCCL.
    """
    if callable(asked):
        return asked
    if asked == "gloo":
        raise UnsupportedError(
            f'{operation}: carrier: expected "nccl" or a function for tensors of GPUs, got "gloo", '
            'which moves memory of the CPU only. Leave carrier="auto"'
        )
    if not is_nccl_available():
        raise UnsupportedError(
            f"{operation}: carrier: between nodes tensors of GPUs are carried by NCCL, and this "
            f"torch ({torch.__version__}) was built without it. Install a torch for CUDA, or pass "
            "CommOptions(carrier=FUNCTION) with another torch.distributed process group for GPUs"
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
    """The rails that this rank is on, each with a process group of the carrier's.

    Args:
        places: of all ranks.
        store: of this communicator's carrier alone.
        carrier: makes the groups.
        place: the runtime, and this rank's device.
        operation: named in errors.

    Raises:
        RendezvousError: a rank of a rail cannot be reached.
    """

    def __init__(
        self,
        places: Places,
        store: Store,
        carrier: Carrier,
        place: tuple[DeviceRuntime, int],
        operation: str,
    ) -> None:
        self.places = places
        self.runtime, self.device = place
        self._operation = operation
        self._groups: dict[int, Any] = {}
        self._broken = False
        for rail in places.rails_of(places.rank):
            own = PrefixStore(f"rail{rail}", store)
            try:
                with self.runtime.on_device(self.device):
                    group = carrier(
                        own, places.node, len(places.nodes), timedelta(seconds=CONNECT_S)
                    )
            except RingcommError:
                raise
            except Exception as error:
                if carrier is nccl:
                    raise self._unreachable(rail, told_by(error)) from error
                raise carrier_failed(operation, places, carrier, error) from error
            for name in ("alltoall_base", "broadcast"):
                if not callable(getattr(group, name, None)):
                    raise ArgumentError(
                        f"{operation}: carrier: expected a function that returns a process group "
                        f"of torch.distributed, got one that returned {group!r}"
                    )
            self._groups[rail] = group

    def prove(self, timeout_s: float) -> None:
        """Exchanges the ranks' numbers on every rail, which makes the carrier connect.

        Raises:
            RendezvousError: they did not arrive; names the ranks of the rail.
        """
        runtime, device = self.runtime, self.device
        # Of its own: on one stream with other ranks of this process it would wait for theirs.
        stream = runtime.make_stream(device)
        deadline = Deadline(min(timeout_s, CONNECT_S))
        with runtime.on_device(device), runtime.on_stream(stream):
            for rail in self._groups:
                expected = list(self.places.rail(rail))
                try:
                    found = self._numbers(rail, stream, deadline)
                except RuntimeError as error:
                    raise self._unreachable(rail, told_by(error)) from error
                if found != expected:
                    raise self._unreachable(rail, f"{found} in place of {expected}")

    def _numbers(self, rail: int, stream: Stream, deadline: Deadline) -> list[int]:
        """Returns what the ranks of a rail say that their numbers are."""
        ones = [1] * len(self.places.nodes)
        on = self.runtime.torch_device(self.device)
        mine = torch.full((len(ones),), self.places.rank, dtype=torch.int64, device=on)
        theirs = torch.full_like(mine, -1)
        self.exchange(rail, theirs, mine, ones, ones)
        arrived = self.runtime.record_event(self.device, stream.handle)
        while not arrived.query():
            if deadline.is_over():
                self.break_up()
                raise RuntimeError("nothing arrived in time")
            time.sleep(PROOF_POLL_S)
        numbers: list[int] = theirs.tolist()
        return numbers

    def _unreachable(self, rail: int, said: str) -> RendezvousError:
        places = self.places
        peers = ", ".join(places.named(rank) for rank in places.rail(rail) if rank != places.rank)
        return RendezvousError(
            f"{self._operation}: expected the carrier to connect device {self.device} of "
            f"{places.named(places.rank)} to {peers}, got: {said}. See what the carrier reports "
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
            RuntimeError: the carrier refuses.
        """
        # As bytes, which every carrier knows.
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
        """Ends all that is under way in the carrier's groups, which are dead then."""
        self._broken = True
        peer = next(self.places.others())
        for group in tuple(self._groups.values()):
            break_up(group, peer)

    def close(self) -> None:
        """Gives up the groups, once nothing is under way."""
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            if group.name() == "nccl" and not self._broken:
                group.shutdown()
