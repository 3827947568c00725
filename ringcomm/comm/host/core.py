# SPDX-License-Identifier: Apache-2.0
"""The interface of a communicator's core: its collectives on addresses, and its owner.

A core makes the calls of one rank. ``_native.Comm`` is the core of ranks that share a node's host
memory, ``_native.DeviceComm`` the core of ranks on devices; :mod:`ringcomm.comm.nodes` has a core
over several nodes for each of them; :class:`ringcomm.comm.host.triton.TritonEnd` makes some of the
calls by Triton's kernels. Callers pass checked arguments: addresses and sizes of memory that stays
alive, and the native module's dtype, op and algorithm codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ringcomm import _native

__all__ = ["Core", "CoreOwner", "FastCalls", "NoFastCalls"]


class Core(Protocol):
    """The collectives of one rank, on tensors given by their addresses.

    Calls return 0, or a nonzero status when they have failed; the owner then has the fault.
    """

    def all_reduce(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
        /,
    ) -> int: ...

    def reduce(
        self,
        in_ptr: int,
        out_ptr: int,
        elems: int,
        dtype: int,
        op: int,
        factor: float,
        root: int,
        /,
    ) -> int: ...

    def reduce_scatter(
        self,
        in_ptr: int,
        out_ptr: int,
        out_elems: int,
        dtype: int,
        op: int,
        factor: float,
        algorithm: int,
        /,
    ) -> int: ...

    def reduce_scatter_list(
        self,
        in_ptrs: Sequence[int],
        in_elems: Sequence[int],
        out_ptr: int,
        dtype: int,
        op: int,
        factor: float,
        /,
    ) -> int: ...

    def all_gather(
        self, in_ptr: int, out_ptr: int, in_bytes: int, dtype: int, algorithm: int, /
    ) -> int: ...

    def all_gather_list(
        self, in_ptr: int, out_ptrs: Sequence[int], out_bytes: Sequence[int], dtype: int, /
    ) -> int: ...

    def broadcast(self, ptr: int, size_bytes: int, dtype: int, root: int, /) -> int: ...

    def gather(
        self, in_ptr: int, size_bytes: int, out_ptrs: Sequence[int], dtype: int, root: int, /
    ) -> int: ...

    def scatter(
        self, in_ptrs: Sequence[int], out_ptr: int, size_bytes: int, dtype: int, root: int, /
    ) -> int: ...

    def all_to_all(
        self,
        in_ptrs: Sequence[int],
        in_bytes: Sequence[int],
        out_ptrs: Sequence[int],
        out_bytes: Sequence[int],
        dtype: int,
        /,
    ) -> int: ...

    def barrier(self) -> int: ...


class FastCollectives(Protocol):
    """Collectives that take unchecked tensors; see NOTE [Fast path] in ``collectives.py``.

    They return the status of a call of :class:`Core`, or ``NOT_FAST`` if they have done nothing.
    """

    def all_reduce_fast(self, tensor: object, op: object, algorithm: object, /) -> int: ...

    def reduce_scatter_fast(
        self, output: object, input: object, op: object, algorithm: object, /
    ) -> int: ...

    def all_gather_fast(self, output: object, input: object, algorithm: object, /) -> int: ...


class FastCalls(FastCollectives, Protocol):
    """All calls that take unchecked tensors, also the calls for ``torch.distributed``."""

    def broadcast_fast(self, tensor: object, source: object, /) -> int: ...

    def barrier_fast(self) -> int: ...

    def all_reduce_for_torch(self, tensors: object, options: object, /) -> int: ...

    def reduce_scatter_for_torch(
        self, output: object, input: object, options: object, /
    ) -> int: ...

    def all_gather_for_torch(self, output: object, input: object, options: object, /) -> int: ...


class StartCollectives(Protocol):
    """Asynchronous collectives on unchecked tensors; None if they have done nothing.

    They return an event that passes at the end of the call. The core keeps the tensors until then.
    """

    def start_all_reduce(
        self, tensor: object, op: object, algorithm: object, /
    ) -> _native.DeviceEvent | None: ...

    def start_reduce_scatter(
        self, output: object, input: object, op: object, algorithm: object, /
    ) -> _native.DeviceEvent | None: ...

    def start_all_gather(
        self, output: object, input: object, algorithm: object, /
    ) -> _native.DeviceEvent | None: ...


class StartCalls(StartCollectives, Protocol):
    """All asynchronous calls on unchecked tensors."""

    def start_broadcast(self, tensor: object, source: object, /) -> _native.DeviceEvent | None: ...

    def start_barrier(self) -> _native.DeviceEvent | None: ...


class CompiledCalls(FastCollectives, StartCollectives, Protocol):
    """Fast calls by compiled Triton kernels; see NOTE [Launches of Triton's kernels]."""


class NoFastCalls:
    """The fast calls of a core that accepts only checked calls: each returns ``NOT_FAST``."""

    def all_reduce_fast(self, *_: object) -> int:
        """Does nothing, and returns ``NOT_FAST``."""
        not_fast: int = _native.NOT_FAST
        return not_fast

    reduce_scatter_fast = all_gather_fast = broadcast_fast = barrier_fast = all_reduce_fast
    all_reduce_for_torch = reduce_scatter_for_torch = all_gather_for_torch = all_reduce_fast


class CoreOwner(Protocol):
    """The owner of a core's state: its timeout and its faults.

    Attributes:
        timeout_ms: how long a call waits for peers; applies to calls that begin later.
    """

    timeout_ms: int

    @property
    def aborted(self) -> bool:
        """True once a fault, an abort or a close has ended the core."""

    @property
    def segment_bytes(self) -> int:
        """The bytes of a segment: the most that the ring algorithm moves in one hop."""

    @property
    def awaited(self) -> int:
        """The rank that a call waits for; -1 if no call waits, or the host does not wait."""

    @property
    def arrivals(self) -> int:
        """A count that grows while peers progress in a call."""

    @property
    def has_messages(self) -> bool:
        """True while messages are under way."""

    def chosen(self, algorithm: int, /) -> int:
        """Returns the code of the algorithm that a large call runs if given ``algorithm``."""

    def fault(self) -> dict[str, Any] | None:
        """Returns a fault record, if possible from the rank where the fault began."""

    def set_left(self, left: bool, /) -> None:
        """Notes whether the thread of this rank has left and makes no more calls."""

    def abort(self, reason: str, /) -> None:
        """Ends the calls of this rank and its peers; any thread may call this."""

    def close(self) -> None:
        """Frees the core; no call may be under way."""
