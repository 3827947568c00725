"""The heaps of other processes, mapped here once each however many communicators use them."""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakValueDictionary

from ringcomm import _native
from ringcomm.errors import RendezvousError, UnsupportedError


class HeapAddress(Protocol):
    """Where a rank's heap is: its process, the descriptor there, and how to know the heap."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def token(self) -> int: ...


class MappedHeap:
    """One peer's heap as mapped in this process; unmapped when the last user lets go.

    ``mapping`` is the native object, ``base_ptr`` its address here; ``pid`` is 0 when the "peer"
    is a thread of this process.
    """

    __slots__ = ("__weakref__", "base_ptr", "mapping", "pid")

    def __init__(self, mapping: _native.PeerHeap | _native.Heap, pid: int) -> None:
        self.mapping = mapping
        self.base_ptr: int = mapping.base_ptr
        self.pid = pid


_Key = tuple[int, int, int]
_lock = threading.Lock()
_mapped: WeakValueDictionary[_Key, MappedHeap] = WeakValueDictionary()
_inherited: list[MappedHeap] = []


def _forget_mappings_in_child() -> None:
    global _lock, _mapped
    _lock = threading.Lock()
    _inherited.extend(_mapped.values())
    _mapped = WeakValueDictionary()


os.register_at_fork(after_in_child=_forget_mappings_in_child)


def map_heap(handle: HeapAddress, own: _native.Heap, operation: str) -> MappedHeap:
    """The heap that ``handle`` names, mapped into this process.

    Args:
        handle: as received from the peer.
        own: the heap of this process; a peer that is a thread of it needs no mapping.
        operation: named in errors.

    Raises:
        UnsupportedError: the kernel does not let this process map the peer's memory.
        RendezvousError: the peer is gone, or is not who it said.
    """
    if handle.token == own.token:
        return MappedHeap(own, pid=0)
    key = (handle.pid, handle.fd, handle.token)
    with _lock:
        found = _mapped.get(key)
        if found is not None:
            return found
        try:
            mapping = _native.PeerHeap.open(
                handle.pid, handle.fd, handle.capacity_bytes, handle.token
            )
        except PermissionError as error:
            raise UnsupportedError(
                f"{operation}: the kernel does not let this process map the heap of rank "
                f"{handle.rank} (pid {handle.pid}): {error}. All ranks must run as one user, "
                "in one user namespace, and be dumpable"
            ) from error
        except OSError as error:
            raise RendezvousError(
                f"{operation}: cannot map the heap of rank {handle.rank} (pid {handle.pid}): "
                f"{error}. Is that process alive, and in the same PID namespace?"
            ) from error
        found = _mapped[key] = MappedHeap(mapping, handle.pid)
        return found
