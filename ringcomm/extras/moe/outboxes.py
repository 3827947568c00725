"""Outboxes in the heap, where a rank's mates read rows, and the one collective before they do.

NOTE [Two outboxes by turns]
What a call publishes stays where it is until all mates have read it, and no call ends with a
collective to say so. Each rank has two outboxes and writes them by turns: it writes one again in
the call after the next one. In between lies that next call's exchange of headers, which a mate
enters once it has read all it wants of the call before, and which ends once all have entered. So
when an outbox is written again, or replaced by a larger one, nobody reads it. They end with their
communicator; a rank whose last call on it was one of these meets its mates, in a barrier, say,
before it drops the communicator and goes on.

Memory of the caller's that lies in the heap is read where it is, and not copied to an outbox. It
may be written once the call ends; so then, if any rank has lent such memory, all meet at the end.

On devices the outboxes lie in the devices' heaps, and all of this is in the order of the streams: a
rank enters the exchange once its kernels have read what they want of the call before. Its host
waits for the headers, by which it knows what to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ringcomm.comm.arguments import is_plain
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.comm.peer_memory import heap_bases, is_in_heap
from ringcomm.errors import MismatchError, where
from ringcomm.memory import empty, normal_tensors

Tensor = torch.Tensor
T = TypeVar("T")

# Parts of an outbox begin at multiples of a cache line.
_LINE_BYTES = 64


class RowsHeader(NamedTuple):
    """The header of a rank's call, in numbers alone, so that one collective exchanges all.

    Attributes:
        operation: which of the calls that exchange rows it is.
        number: that of the dispatch whose rows these are; 0 in a dispatch.
        refused: not 0 if this rank's arguments are no good; the rest then says nothing.
        experts, k, hidden, dtype, wire, weighted: what ranks must have in common.
        tokens: rows that this rank publishes.
        limit: rows that it has room for; -1: any number.
        wants: what it wants of gradients of weights; see operators.WANTS_GRADIENT.
        lent: 1 if what it publishes is the caller's memory.
        payload: where in its heap the rows begin.
        tables: where in its heap the tables begin.
    """

    operation: int
    number: int = 0
    refused: int = 0
    experts: int = 0
    k: int = 0
    hidden: int = 0
    dtype: int = 0
    wire: int = 0
    weighted: int = 0
    tokens: int = 0
    limit: int = -1
    wants: int = 0
    lent: int = 0
    payload: int = 0
    tables: int = 0


_IN_COMMON = {
    "operation": "which call it makes (dispatch, combine, or the backward of one)",
    "number": "the dispatch whose rows these are (its number)",
    "experts": "num_experts",
    "k": "experts of a token (the columns of topk_idx)",
    "hidden": "the columns of the rows",
    "dtype": "the dtype of the rows (ringcomm's code)",
    "wire": "wire (0: none)",
    "weighted": "whether there are weights",
}


class Outboxes:
    """The outboxes of this rank, and the heaps of its node as mapped here.

    Attributes:
        calls: how many dispatches there were, of which all ranks agreed on the arguments.
    """

    def __init__(self, comm: Communicator) -> None:
        self._bases = heap_bases(comm.node)
        self._own_base = self._bases[comm.node.rank]
        self._heap_device = comm.heap_device
        nothing = torch.empty(0, dtype=torch.uint8, device=comm.device)
        self._outboxes = [nothing, nothing]
        self._turn = 0
        self.calls = 0

    def take(self, *sizes_bytes: int) -> list[Tensor]:
        """Returns parts of the outbox whose turn it is, as tensors of bytes.

        Raises:
            HeapError: there is no room for a larger outbox.
        """
        ends, total = [], 0
        for size in sizes_bytes:
            ends.append(total)
            total += -(-size // _LINE_BYTES) * _LINE_BYTES
        self._turn ^= 1
        if self._outboxes[self._turn].numel() < total:
            # The smaller one goes first: there may not be room for both.
            self._outboxes[self._turn] = self._outboxes[self._turn].new_empty(0)
            with normal_tensors():
                made = empty(total, dtype=torch.uint8, device=self._heap_device)
            self._outboxes[self._turn] = made
        outbox = self._outboxes[self._turn]
        return [outbox[end : end + size] for end, size in zip(ends, sizes_bytes, strict=True)]

    def offset_of(self, tensor: Tensor) -> int:
        """Returns where in this rank's heap a tensor of it begins."""
        return tensor.data_ptr() - self._own_base if tensor.numel() else 0

    def at(self, offsets: Sequence[int]) -> list[int]:
        """Returns by rank of the node the addresses, as mapped here, of offsets in the heaps."""
        return [base + offset for base, offset in zip(self._bases, offsets, strict=True)]


_outboxes: WeakKeyDictionary[Communicator, Outboxes] = WeakKeyDictionary()


def outboxes_of(comm: Communicator) -> Outboxes:
    """Returns the outboxes of this rank of a communicator, which live as long as that."""
    found = _outboxes.get(comm)
    if found is None:
        found = _outboxes[comm] = Outboxes(comm)
    return found


def lendable(comm: Communicator, tensor: Tensor) -> bool:
    """True if the communicator's ranks can read the tensor where it lies."""
    return is_plain(tensor) if comm.world_size == 1 else is_in_heap(comm, tensor)


def prepared(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Runs what comes before an exchange; an error is for the exchange to tell all ranks."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def numbers_on_host(comm: Communicator, operation: str, tensor: Tensor) -> list[Any]:
    """Returns the numbers of a tensor, once the current stream has come to what made them.

    Raises:
        RingcommError: the communicator has become unusable, and the numbers say nothing.
    """
    if isinstance(comm, DeviceCallEngine):
        runtime, device = comm.device_place
        with runtime.on_device(device):
            runtime.record_event(device, runtime.current_stream(device)).synchronize()
        comm.raise_if_unusable(operation)
    return tensor.tolist()


def on_device_of(comm: Communicator, numbers: Tensor) -> Tensor:
    """Returns a tensor of the host where the communicator's tensors lie, and waits for nothing."""
    if comm.device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(comm.device, non_blocking=True)


def exchange(
    comm: Communicator,
    operation: str,
    mine: RowsHeader,
    refusal: Exception | None,
    refused: Tensor | None = None,
) -> list[RowsHeader]:
    """Returns the headers of all ranks; what they published may be read from now on. Collective.

    Args:
        comm: the ranks.
        operation: named in errors.
        mine: this rank's.
        refusal: why this rank refuses its arguments; raised here once all ranks know.
        refused: int64, on the device: what that has found out of the arguments takes the header's
            place. If it is not 0 here the headers are returned, and the caller raises.

    Raises:
        MismatchError: another rank refused its arguments, or has others than this one.
    """
    if comm.world_size == 1 and refused is None:
        if refusal is not None:
            raise refusal
        return [mine]
    own = on_device_of(comm, torch.tensor(mine, dtype=torch.int64, device="cpu"))
    if refused is not None:
        own[RowsHeader._fields.index("refused")] += refused
    everyone = own.new_empty((comm.world_size, len(mine)))
    comm.all_gather_into_tensor(everyone.view(-1), own)
    if refusal is not None:
        raise refusal
    headers = [RowsHeader(*row) for row in numbers_on_host(comm, operation, everyone)]
    if headers[comm.rank].refused:
        return headers
    head = where(operation, comm.rank, comm.world_size)
    for rank, theirs in enumerate(headers):
        if theirs.refused:
            raise MismatchError(f"{head}: rank {rank} refused its arguments; its error says why")
    for rank, theirs in enumerate(headers):
        for name, meaning in _IN_COMMON.items():
            expected, got = getattr(headers[0], name), getattr(theirs, name)
            if expected != got:
                raise MismatchError(
                    f"{head}: expected {meaning} to be equal on all ranks, but rank 0 has "
                    f"{expected} and rank {rank} has {got}"
                )
    return headers


@contextmanager
def reading(comm: Communicator, operation: str, headers: Sequence[RowsHeader]) -> Iterator[None]:
    """Surrounds what reads peers' memory; meets them at the end if that has to be.

    An error here is this rank's own: it would leave its peers waiting, so it aborts.
    """
    try:
        yield
    except BaseException as error:
        for each in (comm, comm.node):
            each.abort(f"{operation}: {type(error).__name__}: {error}")
        raise
    if comm.world_size > 1 and any(header.lent for header in headers):
        comm.barrier()
