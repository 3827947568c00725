# SPDX-License-Identifier: Apache-2.0
"""Keeps on a disk the tensors that autograd saves in forward, until backward needs them.

NOTE [What stays where it is]
Parameters, buffers and their views are not written: they are in memory anyway, or stage 3 unshards
them again, in the same memory. Small tensors are not written either, since their transfer would
cost more than their memory is worth. In backward an activation checkpoint computes its layer again;
the tensors that are saved then are needed at once, so they also stay in memory. Tensors that are
not dense stay in memory, too.

NOTE [Changes in place]
If saved tensors have hooks, torch does not check whether they have changed. So an alias of each
saved tensor is kept. It shares the tensor's version; if the tensor is on the disk, the alias has no
memory.

NOTE [When the disk fails]
If a rank raised in the middle of a forward or backward, the other ranks would wait for it in a
reduction. So the rank continues with the calls that the others wait for, with NaN in place of lost
values. Its backward raises the error at the end, after the reductions. Its next step or clipping
raises on all ranks, until the gradients are dropped.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import only_inlined
from ringcomm.errors import ArgumentError, DiskError, UnsupportedError
from ringcomm.integers import integer
from ringcomm.json_reader import shown
from ringcomm.offload.scratch import (
    PAGE_BYTES,
    Disk,
    ScratchFile,
    Transfer,
    aligned_buffer,
    rounded_up,
)
from ringcomm.optim.dtensors import local_of, without_torch_function
from ringcomm.optim.state_offload import wait_limit_s
from ringcomm.zero.stages.engine import ShardEngine, owner_of

Tensor = torch.Tensor
Storage = torch.UntypedStorage

# ---- The store: written in forward, read ahead in backward ---------------------------------------
#
# Terms. A *content* is the bytes of a storage, or of a part of it, at one version; they are written
# once even if several saved tensors share them. A *receipt* is the object that a graph holds in
# place of a saved tensor. Receipts are numbered in the order of forward, and backward mostly takes
# them in the reverse order. A content exists as long as some graph has a receipt of it.
#
# Writing. The newest contents stay in memory, up to ``resident_bytes``, since backward needs them
# first. An older content is cut into pieces of up to ``PIECE_BYTES`` and copied into *slots*,
# aligned buffers for one piece each, from which the disk's threads write. Its storage is released.
# While all slots are in use the caller waits.
#
# Reading. A content is read into new memory, which autograd then owns, without a copy. After the
# content that is needed, contents of earlier receipts are read *ahead*. Backward does not follow
# the order strictly, so contents that it has skipped stay for some turns. Slots, and contents that
# were read ahead, share ``buffer_bytes``, so backward frees the slots, which only a forward needs.
#
# The size of an extent of the file, in pages, is a power of two, at most a piece. Freed extents are
# used again. So a step uses the extents of the step before, and the file does not grow.

# Small compared with the default buffers, so that many transfers run at once; not tuned.
PIECE_BYTES = 2 << 20

# The number of receipts that are searched for contents to read ahead, and the number of turns for
# which a content that backward has skipped stays. A turn begins when backward takes a receipt.
LOOK_AHEAD = 64
PATIENCE = 32

#: A storage's address, and bytes [begin, end) of the storage.
Key = tuple[int, int, int]


@dataclass(frozen=True)
class _StoredExtent:
    """An extent of the file: its number, and its capacity in bytes."""

    number: int
    size_bytes: int


class Content:
    """The bytes of a storage, or of a part of it, at one version.

    Attributes:
        number: number in the order of creation.
        begin: offset of the first byte in the storage.
        size_bytes: number of bytes.
        version: version of the tensor that was saved first.
        held: the storage with the bytes, while this object keeps it in memory; or None.
        extents: the extents of its pieces on the disk; empty if it was not written.
        coming: the reads of this content that are under way.
        ahead: number of receipts read ahead that refer to this content.
        ahead_bytes: bytes of the buffers that this content takes while it is read ahead.
    """

    def __init__(self, number: int, storage: Storage, begin: int, end: int, version: int) -> None:
        self.number, self.version = number, version
        self.begin, self.size_bytes = begin, end - begin
        self.key: Key = (storage._cdata, begin, end)
        self.held: Storage | None = None
        self.extents: list[_StoredExtent] = []
        self.coming: list[Transfer] = []
        self.ahead = self.ahead_bytes = 0
        self.lies_in(storage, begin)

    def lies_in(self, storage: Storage, at: int) -> None:
        """Stores a weak reference to the storage with the bytes, and their offset in it."""
        self._memory, self._memory_bytes, self.at = weak(storage), storage.nbytes(), at

    def find_storage(self) -> Storage | None:
        """Returns the storage with the bytes, at offset ``at``; None if it no longer exists."""
        if self.held is not None:
            return self.held
        # A storage that was shrunk after the save no longer has its values.
        found: Any = cast(Any, Storage)._new_with_weak_ptr(self._memory.cdata)
        return found if found is not None and found.nbytes() == self._memory_bytes else None

    def wait(self) -> None:
        """Waits for the reads of this content.

        Raises:
            DiskError: a read failed; each later call raises again.
        """
        for transfer in self.coming:
            transfer.wait()
        self.coming = []


@dataclass(eq=False)
class Receipt:
    """The object that a graph holds in place of a saved tensor.

    Attributes:
        number: number in the order of saving.
        content: the content with the tensor's bytes; None if the disk had failed before.
        offset_bytes: offset of the tensor's first element in the content.
        shape, stride, dtype: shape, stride and dtype of the tensor.
        watch: an object of the caller that checks whether the tensor has changed.
        taken_in: number of the backward that last took the receipt.
    """

    number: int
    content: Content | None
    offset_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    watch: Any
    taken_in: int = -1


@dataclass
class _Ahead:
    """A content in memory, or being read, before its receipt is taken.

    Attributes:
        receipt: the receipt whose turn is expected.
        content: the content of this receipt.
        storage: the storage that has the content.
        turn: the last turn in which this content was among the contents expected next.
    """

    receipt: weakref.ref[Receipt]
    content: Content
    storage: Storage
    turn: int = 0


def weak(storage: Storage) -> StorageWeakRef:
    """Returns a weak reference; while it exists, the storage's address is not used again."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def reach_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns the number of elements of memory that a non-empty tensor spans."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the part of a tensor's storage that is to be saved, as bytes [begin, end).

    If the tensor spans at least half of its storage, the whole storage is saved, since its other
    parts are mostly saved as well. A view of a few rows of a data set does not save the other rows.
    """
    begin = int(tensor.storage_offset()) * tensor.element_size()
    end = begin + reach_of(tensor.shape, tensor.stride()) * tensor.element_size()
    whole = tensor.untyped_storage().nbytes()
    return (0, whole) if 2 * (end - begin) >= whole else (begin, end)


class _Gone(NamedTuple):
    """Identifies a freed content, for which no graph has a receipt any more."""

    key: Key
    number: int
    extents: list[_StoredExtent]


class ActivationStore:
    """Stores one rank's saved activations, as :class:`Content`, in memory and on a disk.

    Args:
        disk: the folder, and how much memory the store may use.
        what: name of the stored data in errors.
        timeout_s: returns the time limit of a transfer, in seconds.
    """

    def __init__(self, disk: Disk, what: str, timeout_s: Callable[[], float]) -> None:
        self.scratch = ScratchFile(disk.path, what, timeout_s)
        self._most_bytes, self._most_resident_bytes = disk.buffer_bytes, disk.resident_bytes
        share = disk.buffer_bytes // 4 // PAGE_BYTES * PAGE_BYTES
        self._piece_bytes = max(PAGE_BYTES, min(PIECE_BYTES, share))
        # Bytes of the buffers that are used by slots and by contents read ahead.
        self._used_bytes = 0
        self._idle: list[Tensor] = []
        self._writing: deque[tuple[Tensor, Transfer]] = deque()
        self._ahead: dict[int, _Ahead] = {}
        self._turn = 0
        self._numbers = itertools.count()
        self._receipts: list[tuple[int, weakref.ref[Receipt]]] = []
        # Contents whose storages may still exist. A content's weak reference to its storage keeps
        # the storage's address from being used again; the key is removed with this reference.
        self._known: dict[Key, weakref.ref[Content]] = {}
        self._resident: dict[int, tuple[weakref.ref[Content], int]] = {}
        self._resident_bytes = 0
        self._free: dict[int, list[_StoredExtent]] = {}
        self._extents_in_use = 0
        # Garbage collection may free a content at any time: its finalizer only adds an entry here.
        self._gone: deque[_Gone] = deque()

    @property
    def extents_in_use(self) -> int:
        """Number of the file's extents that graphs still need."""
        self._settle()
        return self._extents_in_use

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that slots, contents read ahead and resident contents take now."""
        self._settle()
        return self._used_bytes + self._resident_bytes

    # ---- forward --------------------------------------------------------------------------------

    def save(self, tensor: Tensor, watch: Any) -> Receipt:
        """Returns a receipt for a dense tensor on the CPU.

        Raises:
            DiskError: the disk fails or is full, or an earlier write has failed.
        """
        self._settle()
        begin, end = extent_of(tensor)
        content = self._content_of(tensor, begin, end)
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size() - begin
        return self.receipt(tensor, content, offset_bytes, watch)

    def receipt(
        self, tensor: Tensor, content: Content | None, offset_bytes: int, watch: Any
    ) -> Receipt:
        """Returns a receipt with the next number."""
        number = next(self._numbers)
        shape, stride = tensor.shape, tensor.stride()
        made = Receipt(number, content, offset_bytes, shape, stride, tensor.dtype, watch)
        while self._receipts and self._receipts[-1][1]() is None:
            self._receipts.pop()
        self._receipts.append((number, weakref.ref(made)))
        return made

    def _content_of(self, tensor: Tensor, begin: int, end: int) -> Content:
        storage = tensor.untyped_storage()
        key = (storage._cdata, begin, end)
        reference = self._known.get(key)
        known = None if reference is None else reference()
        if known is not None and known.version == tensor._version:
            return known
        content = Content(next(self._numbers), storage, begin, end, tensor._version)
        gone = _Gone(key, content.number, content.extents)
        weakref.finalize(content, self._gone.append, gone).atexit = False
        self._known[key] = weakref.ref(content)
        if content.size_bytes == storage.nbytes():
            self._keep(content, storage)
        else:
            # To hold this content in memory would keep the whole storage in memory.
            self._write(content, storage)
        return content

    def _keep(self, content: Content, storage: Storage) -> None:
        """Holds a new content in memory, and writes the oldest contents if not all fit."""
        content.held = storage
        self._resident[content.number] = (weakref.ref(content), content.size_bytes)
        self._resident_bytes += content.size_bytes
        while self._resident_bytes > self._most_resident_bytes:
            number, (reference, _) = next(iter(self._resident.items()))
            oldest = reference()
            if oldest is not None and oldest.held is not None:
                self._write(oldest, oldest.held)
                oldest.held = None
            self._leave_resident(number)

    def _leave_resident(self, number: int) -> None:
        _, size_bytes = self._resident.pop(number, (None, 0))
        self._resident_bytes -= size_bytes

    def _write(self, content: Content, storage: Storage) -> None:
        """Copies the bytes of a content from its storage into slots, and submits their writes."""
        whole = _bytes_of(storage, content.begin, content.size_bytes)
        for at in range(0, content.size_bytes, self._piece_bytes):
            piece = whole[at : at + self._piece_bytes]
            slot = self._slot()
            slot[: piece.numel()].copy_(piece)
            extent = self._take_extent(piece.numel())
            content.extents.append(extent)
            pages = slot[: rounded_up(piece.numel())]
            self._writing.append((slot, self.scratch.write(extent.number, pages)))

    def _take_extent(self, size_bytes: int) -> _StoredExtent:
        size = min(self._piece_bytes, _next_power_of_two(rounded_up(size_bytes)))
        free = self._free.setdefault(size, [])
        extent = free.pop() if free else _StoredExtent(self.scratch.add_extent(size), size)
        self._extents_in_use += 1
        return extent

    def _slot(self) -> Tensor:
        """Returns a buffer for one piece; if none is free, waits for the oldest write."""
        while True:
            self._reap()
            if self._idle:
                return self._idle.pop()
            if self._used_bytes + self._piece_bytes <= self._most_bytes:
                self._used_bytes += self._piece_bytes
                return aligned_buffer(self._piece_bytes)
            if self._writing:
                slot, transfer = self._writing.popleft()
                transfer.wait()  # a slot whose write hangs must not be used again
                self._idle.append(slot)
            else:
                # All buffers hold contents that were read ahead for a backward that still runs.
                number, last = self._ahead.popitem()
                self._ahead[number] = last
                last.content.wait()
                self._let_go(number)

    def _reap(self) -> None:
        """Frees the slots of finished writes."""
        while self._writing and self._writing[0][1].done():
            slot, transfer = self._writing.popleft()
            self._idle.append(slot)
            transfer.wait()

    def _settle(self) -> None:
        """Frees the memory and extents of receipts and contents that no graph has any more."""
        for number in [number for number, item in self._ahead.items() if item.receipt() is None]:
            self._let_go(number)
        while self._gone:
            gone = self._gone.popleft()
            self._leave_resident(gone.number)
            self._forget(gone.key, None)
            for extent in gone.extents:
                self._free[extent.size_bytes].append(extent)
            self._extents_in_use -= len(gone.extents)

    def _forget(self, key: Key, content: Content | None) -> None:
        """Removes a content's entry in ``_known``, unless a newer content has the key."""
        reference = self._known.get(key)
        if reference is not None and reference() in (content, None):
            del self._known[key]

    # ---- backward -------------------------------------------------------------------------------

    def bring(self, receipt: Receipt, backward: int) -> tuple[Storage, int]:
        """Returns a storage that has a receipt's content, and the content's byte offset there.

        Args:
            receipt: the receipt that a node of the graph takes.
            backward: the number of the running backward.

        Raises:
            DiskError: the disk has failed.
        """
        content = receipt.content
        assert content is not None
        self._settle()
        storage = self._memory_of(content)
        receipt.taken_in = backward
        self._let_go(receipt.number)
        self._read_ahead(receipt)
        content.wait()
        return storage, content.at

    def _memory_of(self, content: Content) -> Storage:
        """Returns the storage of a content; if there is none, submits reads into a new storage."""
        storage = content.find_storage()
        if storage is not None:
            return storage
        memory = torch.empty(_room_bytes(content), dtype=torch.uint8, device="cpu")
        storage, at = memory.untyped_storage(), -memory.data_ptr() % PAGE_BYTES
        self._forget(content.key, content)
        content.lies_in(storage, at)
        content.coming = []
        left = content.size_bytes
        for extent in content.extents:
            size = min(left, self._piece_bytes)
            pages = memory[at : at + rounded_up(size)]
            content.coming.append(self.scratch.read(extent.number, pages))
            at, left = at + size, left - size
        return storage

    def _read_ahead(self, receipt: Receipt) -> None:
        """Submits reads for earlier receipts, as long as the buffers have room."""
        self._turn += 1
        for before in itertools.islice(self._those_before(receipt.number), LOOK_AHEAD):
            content = before.content
            if content is None or content.held is not None or before.taken_in == receipt.taken_in:
                continue
            item = self._ahead.get(before.number)
            if item is None:
                if not self._has_room_for(content):
                    return
                item = _Ahead(weakref.ref(before), content, self._memory_of(content))
                self._ahead[before.number] = item
            item.turn = self._turn

    def _has_room_for(self, content: Content) -> bool:
        """Reserves buffer memory for a content that is to be read ahead, if there is enough."""
        if not content.ahead:
            size = _room_bytes(content)
            self._reap()
            while self._used_bytes + size > self._most_bytes and self._idle:
                self._idle.pop()
                self._used_bytes -= self._piece_bytes
            if self._used_bytes + size > self._most_bytes:
                waited = self._turn - PATIENCE
                for number in [n for n, item in self._ahead.items() if item.turn < waited]:
                    self._let_go(number)
            if self._used_bytes + size > self._most_bytes:
                return False
            content.ahead_bytes = size
            self._used_bytes += size
        content.ahead += 1
        return True

    def _let_go(self, number: int) -> None:
        """Releases the content that was read ahead for receipt ``number``, if there is one."""
        item = self._ahead.pop(number, None)
        if item is not None:
            content = item.content
            content.ahead -= 1
            if not content.ahead:
                self._used_bytes -= content.ahead_bytes
                content.ahead_bytes = 0

    def _those_before(self, number: int) -> Iterator[Receipt]:
        """Yields earlier receipts that some graph still has, the latest one first."""
        receipts = self._receipts
        at = bisect_left(receipts, number, key=itemgetter(0))
        while at:
            at -= 1
            receipt = receipts[at][1]()
            if receipt is None:
                del receipts[at]
            else:
                yield receipt


def _bytes_of(storage: Storage, begin: int, size_bytes: int) -> Tensor:
    """Returns bytes of a storage as a tensor that has its own version."""
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return empty.set_(storage, begin, (size_bytes,), (1,))


def _room_bytes(content: Content) -> int:
    """Returns the bytes of memory for reading a content: whole pages, and room to align them."""
    return rounded_up(content.size_bytes) + PAGE_BYTES


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


# ---- The hooks of autograd, and the modules whose activations they save --------------------------

LEAST_BYTES = 64 << 10


def activations_on(
    disk: Disk,
    *,
    module: nn.Module | Iterable[nn.Module] | None = None,
    least_bytes: int = LEAST_BYTES,
) -> Activations:
    """Returns a context that keeps tensors saved for backward on a disk; see ``docs/disk.md``.

    Args:
        disk: the folder, the memory for transfers, and the number of bytes of the most recently
            saved tensors that stay in memory.
        module: the modules that run, sharded or not. Their buffers, and all tensors that share
            memory with their parameters and buffers, stay in memory. Without ``module`` only
            parameters and their views surely stay in memory.
        least_bytes: smaller tensors stay in memory.

    Returns:
        A context manager for this thread, which may be entered any number of times. Backward may
        run inside or outside of it. Keep the object from step to step, to reuse its file's space.

    Raises:
        ArgumentError: an argument has a wrong type or value.
        UnsupportedError: a module has parameters on a device.
        DiskError: the folder does not support such a file.
    """
    if not isinstance(disk, Disk):
        raise ArgumentError(f"activations_on: disk: expected a ringcomm.Disk, got {disk!r}")
    least = integer(least_bytes)
    if least is None or least < 1:
        raise ArgumentError(
            f"activations_on: least_bytes: expected an integer from 1 to 2^63 - 1, got "
            f"{shown(least_bytes)}"
        )
    modules = [module] if isinstance(module, nn.Module) else list(module or ())
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ArgumentError(f"activations_on: module: expected torch modules, got {each!r}")
    return Activations(disk, modules, least)


class Activations(AbstractContextManager[None]):
    """A context that keeps saved tensors on a disk; made by :func:`activations_on`."""

    def __init__(self, disk: Disk, modules: list[nn.Module], least_bytes: int) -> None:
        for module in modules:
            for param in module.parameters():
                expect_host(param.device)
        self._residents = _Residents(modules)
        rank = self._residents.rank
        owner = f"process {os.getpid()}" if rank is None else f"rank {rank}"
        residents = self._residents
        self._store = ActivationStore(
            disk,
            f"activations of {owner}",
            lambda: wait_limit_s(disk, residents.comms),
        )
        self._least_bytes = least_bytes
        # A backward may have a thread per device, and forwards may run in several threads.
        self._lock = threading.RLock()
        self._fault: DiskError | None = None
        # The backward that raises the fault at its end.
        self._raises_in = -1

    def __repr__(self) -> str:
        return f"<ringcomm.zero.Activations on {self._store.scratch.path}, {self.size_bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._store.scratch.size_bytes

    @property
    def bytes_written(self) -> int:
        """Number of bytes written to the disk."""
        return self._store.scratch.bytes_written

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from the disk."""
        return self._store.scratch.bytes_read

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use now: at most ``buffer_bytes`` plus ``resident_bytes``."""
        with self._lock:
            return self._store.held_bytes

    @property
    def extents_in_use(self) -> int:
        """Number of extents of the file that graphs still need."""
        with self._lock:
            return self._store.extents_in_use

    def __enter__(self) -> None:
        self._residents.outdated = True
        saved_tensors_hooks(self._pack, self._unpack).__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # torch keeps these hooks as a stack per thread, so any object can pop the innermost ones.
        saved_tensors_hooks(self._pack, self._unpack).__exit__(kind, error, traceback)

    # ---- forward --------------------------------------------------------------------------------

    @only_inlined
    def _pack(self, tensor: Tensor) -> Receipt | _DTensorOnDisk | _InMemory:
        local = local_of(tensor)
        if not self._goes(tensor, local):
            return _InMemory(tensor)
        if local is tensor:
            return self._save(tensor, _VersionWatch(tensor, _without_memory(tensor)))
        return _DTensorOnDisk(tensor, self._save(local, _watch_dtensor(tensor)))

    def _goes(self, tensor: Tensor, local: Tensor) -> bool:
        """True if a tensor is to be written to the disk; see NOTE [What stays where it is]."""
        if torch._C._current_graph_task_id() != -1 or not _is_dense(local):
            return False
        if self._residents.have(tensor, local):
            return False
        if local.is_meta or not local.numel():
            return False
        expect_host(local.device)
        begin, end = extent_of(local)
        return end - begin >= self._least_bytes

    def _save(self, tensor: Tensor, watch: _VersionWatch) -> Receipt:
        with self._lock:
            if self._fault is None:
                try:
                    return self._store.save(tensor, watch)
                except DiskError as error:
                    self._fault = error
            return self._store.receipt(tensor, None, 0, watch)

    # ---- backward -------------------------------------------------------------------------------

    @only_inlined
    def _unpack(self, packed: Receipt | _DTensorOnDisk | _InMemory) -> Tensor:
        if isinstance(packed, Receipt):
            return self._restore(packed)
        if isinstance(packed, _DTensorOnDisk):
            return packed.around(self._restore(packed.receipt))
        return packed.tensor()

    def _restore(self, receipt: Receipt) -> Tensor:
        receipt.watch.check()
        self._residents.outdated = True
        with self._lock, torch.no_grad():
            if self._fault is None and receipt.content is not None:
                try:
                    backward = torch._C._current_graph_task_id()
                    storage, at = self._store.bring(receipt, backward)
                except DiskError as error:
                    self._fault = error
                else:
                    return _view(receipt, storage, at)
            self._tell_at_end()
        return _nothing_for(receipt)

    def _tell_at_end(self) -> None:
        """Makes the running backward raise the fault; see NOTE [When the disk fails]."""
        assert self._fault is not None
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            raise self._fault
        for engine in self._residents.engines:
            engine.placement.lost = self._fault
        if backward != self._raises_in:
            self._raises_in = backward
            # A callback queues _raise, which then runs after the nodes' callbacks (reductions).
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(partial(queue, partial(_raise, self._fault)))


def expect_host(device: torch.device) -> None:
    """Raises UnsupportedError for memory that the disk's threads cannot reach."""
    if device.type not in ("cpu", "meta"):
        raise UnsupportedError(
            f"activations_on: expected tensors on the CPU, got one on {device}; copies from there "
            "to a disk, through pinned memory, are not implemented yet. Use "
            "torch.autograd.graph.save_on_cpu(pin_memory=True) for this device"
        )


def _raise(error: DiskError) -> NoReturn:
    raise error


def _is_dense(tensor: Tensor) -> bool:
    """True if a tensor is dense memory itself, and not a wrapper around another tensor."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and torch._C._has_storage(tensor)
    )


def _view(receipt: Receipt, storage: torch.UntypedStorage, at: int) -> Tensor:
    """Returns a receipt's tensor, in a storage that has the content from byte ``at`` on."""
    offset = (at + receipt.offset_bytes) // receipt.dtype.itemsize
    empty = torch.empty(0, dtype=receipt.dtype, device="cpu")
    return empty.set_(storage, offset, receipt.shape, receipt.stride)


def _nothing_for(receipt: Receipt) -> Tensor:
    """Returns a tensor with the shape of a receipt's tensor, all NaN, or zeros for integers."""
    dtype = receipt.dtype
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    flat = torch.full((reach_of(receipt.shape, receipt.stride),), value, dtype=dtype, device="cpu")
    return flat.as_strided(receipt.shape, receipt.stride)


class _Residents:
    """Finds tensors that share memory with parameters or buffers: these stay in memory."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # Storages by address; no address is used again as long as its weak reference exists.
        self._storages: dict[int, StorageWeakRef] = {}
        self._engines: weakref.WeakSet[ShardEngine] = weakref.WeakSet()
        #: True if parameters may have moved since :meth:`have` last noted their storages.
        self.outdated = True

    @property
    def engines(self) -> list[ShardEngine]:
        """The engines of the known modules that are sharded."""
        self._refresh()
        return list(self._engines)

    @property
    def comms(self) -> list[Communicator]:
        """The communicators of the engines that are known so far."""
        return [engine.comm for engine in self._engines]

    @property
    def rank(self) -> int | None:
        """This rank among the ranks that share a module; None if no module is shared."""
        return next((engine.comm.rank for engine in self.engines), None)

    def have(self, tensor: Tensor, local: Tensor) -> bool:
        """True if a tensor with local tensor ``local`` is in parameters' or buffers' memory."""
        for each in (tensor, tensor._base):
            if each is not None and (
                isinstance(each, nn.Parameter) or (each.is_leaf and each.requires_grad)
            ):
                self._note(each, self._storages)
                return True
        self._refresh()
        if local.untyped_storage()._cdata in self._storages:
            return True
        unsharders = (engine.unsharder for engine in self._engines)
        return any(unsharder is not None and unsharder.has(local) for unsharder in unsharders)

    def _note(self, tensor: Tensor, storages: dict[int, StorageWeakRef]) -> None:
        """Notes the storage of a parameter or buffer, and the engine that owns it."""
        engine = owner_of(tensor)
        if engine is not None:
            self._engines.add(engine)
        local = local_of(tensor)
        if torch._C._has_storage(local):
            storage = local.untyped_storage()
            storages[storage._cdata] = weak(storage)

    def _refresh(self) -> None:
        if not self.outdated:
            return
        self.outdated = False
        # A new dict, since the forward of another thread may read the old dict now.
        storages: dict[int, StorageWeakRef] = {}
        with without_torch_function():
            for module in self._modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    self._note(tensor, storages)
        self._storages = storages


class _VersionWatch:
    """Checks whether a tensor has changed since it was saved; see NOTE [Changes in place].

    Args:
        tensor: the tensor to be watched.
        alias: a tensor that shares the version of ``tensor``, and perhaps its memory.
    """

    def __init__(self, tensor: Tensor, alias: Tensor) -> None:
        self.alias = alias
        self._version, self._shape = tensor._version, tensor.shape
        node = tensor.grad_fn
        self._maker = None if node is None else (tensor.output_nr, node.name())

    def check(self) -> None:
        """Raises RuntimeError, in torch's words, if the tensor was changed."""
        if self.alias._version == self._version:
            return
        of = ""
        if self._maker is not None:
            number, name = self._maker
            of = f", which is output {number} of {name},"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{self.alias.type()} {list(self._shape)}]{of} is at version "
            f"{self.alias._version}; expected version {self._version} instead. Hint: enable "
            "anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def _without_memory(tensor: Tensor) -> Tensor:
    """Returns an empty tensor that shares the version of another tensor."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


def _watch_dtensor(tensor: Any) -> _VersionWatch:
    """Returns a watch of a DTensor itself: its local tensor has another version counter."""
    alias = tensor.detach()
    alias._local_tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _VersionWatch(tensor, alias)


class _DTensorOnDisk:
    """A DTensor whose local tensor is on the disk."""

    def __init__(self, tensor: Any, receipt: Receipt) -> None:
        self.receipt = receipt
        self._kind = type(tensor)
        names, self._context = tensor.__tensor_flatten__()
        self._others = {name: getattr(tensor, name) for name in names if name != "_local_tensor"}
        self._shape, self._stride = tensor.shape, tensor.stride()

    def around(self, local: Tensor) -> Tensor:
        """Returns the DTensor around its local tensor, which was read back."""
        inside = {**self._others, "_local_tensor": local}
        made: Tensor = self._kind.__tensor_unflatten__(
            inside, self._context, self._shape, self._stride
        )
        return made.detach()


class _InMemory:
    """Holds an alias of a saved tensor in memory: a node must not refer to its own output."""

    def __init__(self, tensor: Tensor) -> None:
        self._watch = _VersionWatch(tensor, tensor.detach())

    def tensor(self) -> Tensor:
        """Returns the tensor, if it has not changed since it was saved."""
        self._watch.check()
        return self._watch.alias
