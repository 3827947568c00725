# SPDX-License-Identifier: Apache-2.0
"""Offloaded optimizer state: on a disk or in host memory, it streams through buffers in pieces.

Terms. A rank's chunk of a bucket is divided into *pieces* of equal size, at most 1 Mi elements; a
large parameter may have several pieces. The *swap unit* of a piece is its state: tensors one after
the other, each beginning at a page. A transfer moves one swap unit. A *buffer* is memory for one
swap unit. A *visit* of a piece reads its swap unit, and lets the caller change it.

Order. A step visits the pieces in the order of the buckets. Pieces are assigned to the buffers in
turn, and a piece always has the same buffer: addresses that kernels keep, and views that torch's
optimizers keep, stay valid. When a visit ends, the write of its swap unit is submitted, and then
the read of the swap unit that needs the buffer next. So reads run as many pieces ahead as there are
buffers; the last writes of a step, and the first reads of the next step, run while the model
computes. The last pieces, up to ``resident_bytes``, have buffers of their own and never move.

Bytes. A step reads and writes each swap unit that is not resident once: 16 bytes per element with
AdamW in FP32, 24 with FP32 masters of 16-bit parameters, and 20 with remainders. A piece does not
move if none of its parameters takes the step, and a skipped step moves nothing. Muon and Adafactor
visit the masters of 16-bit parameters a second time, once the parameters' updates are computed, so
these swap units move twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ringcomm import cuda
from ringcomm.comm.agreement import all_or_none
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, DiskError, UnsupportedError
from ringcomm.memory.device_heap import PinnedStorage
from ringcomm.offload.scratch import DEFAULT_TIMEOUT_S, PAGE_BYTES, Disk, ScratchFile, rounded_up
from ringcomm.optim.buckets import (
    MOMENT_FORMATS,
    NO_OFFLOAD,
    Bucket,
    QuantizedMoment,
    ShardState,
    StateOffload,
    master_dtype,
)
from ringcomm.optim.layout import TILE_ELEMS, BucketLayout, Chunk, round_up
from ringcomm.optim.placement import OPERATION
from ringcomm.optim.setting import Setting

Tensor = torch.Tensor

PIECE_ELEMS = 1 << 20
# The largest state of one element in bytes: three moments and a master in FP32.
LARGEST_ELEM_BYTES = 16
# Least number of swap units that the buffers must hold, so that reads, writes and updates overlap.
LEAST_BUFFERS = 4
# Bytes of device memory for buffers with offload_state="cpu"; equal to Disk.buffer_bytes' default.
PINNED_BUFFER_BYTES = 64 << 20


def piece_elems(buffer_bytes: int) -> int:
    """Returns the largest number of elements of a piece, for buffers of ``buffer_bytes``.

    Raises:
        ArgumentError: the buffers are too small for any piece.
    """
    most = buffer_bytes // (LEAST_BUFFERS * LARGEST_ELEM_BYTES)
    if most < TILE_ELEMS:
        least = LEAST_BUFFERS * LARGEST_ELEM_BYTES * TILE_ELEMS
        raise ArgumentError(f"buffer_bytes: expected at least {least}, got {buffer_bytes}")
    return min(PIECE_ELEMS, most // TILE_ELEMS * TILE_ELEMS)


def elems_of_pieces(elems: int, largest: int) -> int:
    """Returns the size in elements of a chunk's pieces; the last piece may be smaller."""
    count = -(-elems // largest)
    return round_up(-(-elems // count), TILE_ELEMS)


def pieces_of(chunk: Chunk, largest: int) -> list[Chunk]:
    """Divides a chunk into as few pieces as possible, of nearly equal numbers of elements."""
    if not chunk.elems:
        return []
    size = elems_of_pieces(chunk.elems, largest)
    begins = range(chunk.begin, chunk.end, size)
    return [Chunk(begin, min(begin + size, chunk.end)) for begin in begins]


@dataclass(frozen=True)
class UnitTensor:
    """One tensor of a swap unit: float32, int16, or uint8 (an 8-bit moment)."""

    name: str
    dtype: torch.dtype

    def size_bytes(self, elems: int) -> int:
        """Returns the bytes of ``elems`` elements."""
        if self.dtype is torch.uint8:
            return QuantizedMoment.size_bytes(elems)
        return elems * self.dtype.itemsize


class OffloadedState(ShardState):
    """A placeholder for the offloaded state of a bucket: tensors without memory.

    The tensors have the state's names, dtypes and sizes; the pieces read and write the elements.
    """

    # A weak reference: the bucket refers to the state, which must not keep the bucket alive.
    _bucket_ref: weakref.ref[Bucket]

    @classmethod
    def of(
        cls, bucket: Bucket, unit_tensors: Sequence[UnitTensor], quantized_state: bool
    ) -> OffloadedState:
        """Returns the placeholder for tensors of a bucket's chunk."""
        made = cls(quantized_state=quantized_state)
        made._bucket_ref = weakref.ref(bucket)
        add_unit_tensors(made, unit_tensors, torch.empty(0, device="meta"), bucket.chunk.elems)
        return made

    @property
    def _bucket(self) -> Bucket:
        return _alive(self._bucket_ref)

    def wide(self) -> dict[str, Tensor]:
        return self._copies([*self.moments, *self.quantized])

    def tensors(self) -> dict[str, Tensor]:
        return self._copies(self.names())

    def _copies(self, names: Sequence[str]) -> dict[str, Tensor]:
        bucket = self._bucket
        device = bucket.device
        dtypes = self.dtypes()
        copies = {
            name: torch.empty(bucket.chunk.elems, dtype=dtypes[name], device=device)
            for name in names
        }
        for piece in bucket.pieces(write=False):
            here, _ = bucket.within(*piece.chunk)
            given = piece.state.tensors()
            for name, copy in copies.items():
                copy[here].copy_(given[name])
        return copies

    def whole_master(self) -> Tensor:
        # Inside a step, pieces() yields only pieces that the step changes; for all other pieces
        # this returns the parameters.
        bucket = self._bucket
        with bucket.params_here():
            values = bucket.own_params.to(torch.float32, copy=True)
        for piece in bucket.pieces(write=False):
            here, _ = bucket.within(*piece.chunk)
            values[here].copy_(piece.state.whole_master())
        return values

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        for piece in self._bucket.pieces() if tensors else ():
            here, _ = self._bucket.within(*piece.chunk)
            piece.state.take({name: each[here] for name, each in tensors.items()})

    def zero(self, names: Iterable[str]) -> None:
        named = [*names]
        for piece in self._bucket.pieces() if named else ():
            piece.state.zero(named)


def _alive(bucket: weakref.ref[Bucket]) -> Bucket:
    found = bucket()
    assert found is not None
    return found


def add_unit_tensors(
    state: ShardState, unit_tensors: Sequence[UnitTensor], unit: Tensor, elems: int
) -> None:
    """Makes the tensors of a state views of a swap unit: uint8 [bytes].

    If ``unit`` is on the device "meta", so are the tensors, and ``unit`` may have any size.
    """
    begin = 0
    for each in unit_tensors:
        count = each.size_bytes(elems)
        if unit.is_meta:
            flat = torch.empty(count // each.dtype.itemsize, dtype=each.dtype, device="meta")
        else:
            flat = unit[begin : begin + count].view(each.dtype)
        begin += rounded_up(count)
        if each.name in ("master", "remainder"):
            setattr(state, each.name, flat)
        elif each.dtype is torch.uint8:
            state.quantized[each.name] = QuantizedMoment(MOMENT_FORMATS[each.name], flat)
        else:
            state.moments[each.name] = flat


class SwapTransfer(Protocol):
    """A read or write of a swap unit that is under way."""

    def wait(self) -> None:
        """Waits for the transfer.

        Raises:
            DiskError: the transfer failed.
        """
        ...


class SwapStorage(Protocol):
    """The storage of swap units, in numbered extents.

    Transfers that share an extent or memory run in the order in which they were submitted. An
    extent that was never written reads as zeros.
    """

    def buffer(self, size_bytes: int) -> Tensor:
        """Returns zeroed memory for a swap unit: uint8 [bytes]."""
        ...

    def add_extent(self, size_bytes: int) -> int:
        """Adds an extent, and returns its number."""
        ...

    def read(self, extent: int, memory: Tensor) -> SwapTransfer:
        """Begins to read an extent."""
        ...

    def write(self, extent: int, memory: Tensor) -> SwapTransfer:
        """Begins to write an extent."""
        ...


class SwapBuffer:
    """Memory for one swap unit, which pieces may use in turn.

    Attributes:
        memory: uint8 [bytes], which begins at a page boundary.
        is_shared: True if several pieces use the memory in turn.
        changed: True if the swap unit in the memory is newer than its copy in the storage.
    """

    def __init__(self, memory: Tensor, is_shared: bool) -> None:
        self.memory = memory
        self.is_shared = is_shared
        self.changed = False
        # A weak reference, since pieces refer to buffers: a cycle would free memory late.
        self._holds: weakref.ref[StatePiece] | None = None
        self._coming: SwapTransfer | None = None

    @property
    def holds(self) -> StatePiece | None:
        """The piece whose swap unit is in the buffer or is being read into it, or None."""
        return None if self._holds is None else self._holds()

    def begin_with(self, piece: StatePiece) -> None:
        """Declares the present content of the memory to be the swap unit of a piece."""
        self._holds = weakref.ref(piece)

    def swap_in(self, piece: StatePiece, storage: SwapStorage) -> None:
        """Submits transfers that replace the content by a piece's swap unit; then call wait()."""
        if self.holds is piece:
            return
        self.swap_out(storage)
        self.begin_with(piece)
        if piece.size_bytes:
            self._coming = storage.read(piece.extent_of(storage), self._unit(piece))

    def swap_out(self, storage: SwapStorage) -> SwapTransfer | None:
        """Submits the write of the buffer's swap unit if it has been changed."""
        piece, changed = self.holds, self.changed
        self.changed = False
        if piece is None or not changed or not piece.size_bytes:
            return None
        self.wait()
        return storage.write(piece.extent_of(storage), self._unit(piece))

    def wait(self) -> None:
        """Waits for the swap unit that is being read."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def _unit(self, piece: StatePiece) -> Tensor:
        return self.memory[: piece.size_bytes]


@dataclass(eq=False)
class StatePiece:
    """A piece of a bucket's chunk, whose state moves in one transfer.

    Attributes:
        bucket_ref: the bucket.
        chunk: the elements of the piece in the bucket.
        unit_tensors: the tensors of its swap unit.
        buffer: the buffer of its swap unit during visits.
        view: the bucket that a visit yields.
    """

    bucket_ref: weakref.ref[Bucket]
    chunk: Chunk
    unit_tensors: tuple[UnitTensor, ...]
    extent: int | None = None
    buffer: SwapBuffer | None = None
    view: Bucket | None = None

    @property
    def bucket(self) -> Bucket:
        return _alive(self.bucket_ref)

    @property
    def size_bytes(self) -> int:
        """Bytes of the swap unit."""
        sizes = (each.size_bytes(self.chunk.elems) for each in self.unit_tensors)
        return sum(map(rounded_up, sizes))

    def extent_of(self, storage: SwapStorage) -> int:
        """Returns the number of the piece's extent, allocated at first use; 0 without state."""
        if not self.size_bytes:
            return 0
        if self.extent is None:
            self.extent = storage.add_extent(self.size_bytes)
        return self.extent

    def move_in(self, buffer: SwapBuffer) -> None:
        """Sets the piece's buffer, and makes ``view``, a bucket whose state is in the buffer."""
        self.buffer = buffer
        state = ShardState(quantized_state=self.bucket.state.quantized_state)
        add_unit_tensors(state, self.unit_tensors, buffer.memory, self.chunk.elems)
        self.view = self.bucket.piece(self.chunk, state)


@dataclass
class _OffloadedBucket:
    """A bucket with offloaded state: the state's tensors, and its pieces once they are laid out."""

    bucket_ref: weakref.ref[Bucket]
    unit_tensors: tuple[UnitTensor, ...]
    pieces: list[StatePiece] = field(default_factory=list)


class PiecedOffload(StateOffload):
    """The offloaded state of one optimizer on one rank, in extents of a storage.

    Args:
        storage: the storage of the state.
        buffer_bytes: bytes of the buffers in the memory of the parameters' device.
        resident_bytes: bytes of the state that stay in this memory.

    Attributes:
        fault: the first error of the disk, after which no piece is visited.
    """

    in_memory = False

    def __init__(self, storage: SwapStorage, buffer_bytes: int, resident_bytes: int) -> None:
        self._buffer_bytes, self._resident_bytes = buffer_bytes, resident_bytes
        self._largest = piece_elems(buffer_bytes)
        self.storage = storage
        self._kept: dict[int, _OffloadedBucket] = {}
        self._is_laid_out = True
        # Maps each piece that the current step visits to the piece that needs its buffer next, in
        # this step or at the start of the next step; None between steps.
        self._visited: dict[StatePiece, StatePiece] | None = None
        # By parameter, nonzero if it takes the step; None unless update_only() has set the numbers.
        self._active: Sequence[float] | None = None
        self.fault: DiskError | None = None

    def add(self, bucket: Bucket, master: str, quantized_state: bool) -> ShardState:
        """Adds a bucket's state, and returns its placeholder."""
        dtype = master_dtype(bucket.layout, master)
        name = "remainder" if dtype is torch.int16 else "master"
        unit_tensors = () if dtype is None else (UnitTensor(name, dtype),)
        self._kept[bucket.number] = _OffloadedBucket(weakref.ref(bucket), unit_tensors)
        self._is_laid_out = False
        return OffloadedState.of(bucket, unit_tensors, quantized_state)

    def ensure(self, bucket: Bucket, names: Sequence[str]) -> bool:
        """Implements :meth:`Bucket.ensure`; copies the pieces' state to larger swap units."""
        state, kept = bucket.state, self._kept[bucket.number]
        missing = [name for name in names if state.memory(name) is None]
        if not missing:
            return False
        dtype = torch.uint8 if state.quantized_state else torch.float32
        kept.unit_tensors += tuple(UnitTensor(name, dtype) for name in missing)
        bucket.state = OffloadedState.of(bucket, kept.unit_tensors, state.quantized_state)
        self._is_laid_out = False
        return True

    def _pieces(self, order: Iterable[int] | None = None) -> list[StatePiece]:
        numbers = self._kept if order is None else order
        return [piece for number in numbers for piece in self._kept[number].pieces]

    def _lay_out(self) -> None:
        """Divides the buckets into pieces, and gives them buffers."""
        self.wait(resident=True)
        for kept in self._kept.values():
            before = kept.pieces
            if not before:
                chunks = pieces_of(_alive(kept.bucket_ref).chunk, self._largest)
                kept.pieces = [
                    StatePiece(kept.bucket_ref, chunk, kept.unit_tensors) for chunk in chunks
                ]
            elif before[0].unit_tensors != kept.unit_tensors:
                kept.pieces = [self._enlarged(piece, kept.unit_tensors) for piece in before]
        self._give_buffers()
        self._is_laid_out = True

    def _enlarged(self, piece: StatePiece, unit_tensors: tuple[UnitTensor, ...]) -> StatePiece:
        """Returns a copy of a piece, whose swap unit also has the missing tensors, as zeros."""
        made = StatePiece(piece.bucket_ref, piece.chunk, unit_tensors)
        if piece.extent is None or not piece.size_bytes:
            return made
        old, new = map(self.storage.buffer, (piece.size_bytes, made.size_bytes))
        self.storage.read(piece.extent, old).wait()
        new.zero_()
        # The new tensors follow the old tensors in the swap unit.
        new[: piece.size_bytes].copy_(old)
        self.storage.write(made.extent_of(self.storage), new).wait()
        return made

    def _give_buffers(self) -> None:
        pieces = self._pieces()
        left, resident = self._resident_bytes, []
        while pieces and 0 < pieces[-1].size_bytes <= left:
            resident.append(pieces.pop())
            left -= resident[-1].size_bytes
        for piece in resident:
            buffer = SwapBuffer(self.storage.buffer(piece.size_bytes), is_shared=False)
            if piece.extent is None:
                buffer.begin_with(piece)  # new memory has zeros, and so does a new state
            piece.move_in(buffer)
        if not pieces:
            return
        # A state without tensors, as in SGD without momentum, moves nothing.
        size = max(PAGE_BYTES, *(piece.size_bytes for piece in pieces))
        count = min(len(pieces), self._buffer_bytes // size)
        buffers = [SwapBuffer(self.storage.buffer(size), is_shared=True) for _ in range(count)]
        for number, piece in enumerate(pieces):
            piece.move_in(buffers[number % count])
            if count < len(pieces):
                # Reserve now, before the disk is full, the extents of pieces that will leave their
                # buffers.
                piece.extent_of(self.storage)

    def reserve(self) -> None:
        """Reserves the memory and the disk space that the state needs.

        Raises:
            DiskError: the disk has too little space.
        """
        if not self._is_laid_out:
            self._lay_out()

    def visit(self, bucket: Bucket, begin: int, end: int, write: bool) -> Iterator[Bucket]:
        """Implements :meth:`Bucket.pieces`; in a step, only for the pieces that the step visits.

        In a step an error of the disk ends the visits, and is stored in :attr:`fault`. The rank
        continues with the calls for which other ranks wait; at the end of the step all ranks raise
        the error.

        Raises:
            DiskError: the disk has failed; raised here only between steps.
        """
        if self.fault is not None and self._visited is None:
            raise self.fault
        try:
            if not self._is_laid_out:
                self._lay_out()
            for piece in self._kept[bucket.number].pieces:
                reaches = piece.chunk.begin < end and begin < piece.chunk.end
                if reaches and self._is_visited(piece):
                    yield from self._visit(piece, write)
        except DiskError as error:
            self.fault = self.fault or error
            if self._visited is None:
                raise

    def _is_visited(self, piece: StatePiece) -> bool:
        """True if a visit of the piece's bucket includes the piece."""
        if self._visited is None:
            return True
        return (
            piece in self._visited
            if self._active is None
            else takes_step(piece.bucket.layout, piece.chunk, self._active)
        )

    def _visit(self, piece: StatePiece, write: bool) -> Iterator[Bucket]:
        buffer, view = piece.buffer, piece.view
        assert buffer is not None and view is not None
        # Update the layout: the bucket gets a new layout when param groups are added.
        view.layout, view.segments = piece.bucket.layout, piece.bucket.segments
        buffer.swap_in(piece, self.storage)
        buffer.wait()
        try:
            yield view
        finally:
            buffer.changed |= write
        following = None if self._visited is None else self._visited.get(piece)
        if following is not None:
            buffer.swap_in(following, self.storage)

    def begin_step(
        self,
        find_active: Callable[[], Sequence[float] | None],
        order: Iterable[int] | None = None,
    ) -> None:
        """Plans the visits of a step.

        Args:
            find_active: returns a number per parameter, nonzero if the parameter takes the step; or
                None to visit all pieces.
            order: the buckets' numbers in the order of their updates; None for ascending numbers. A
                later :meth:`update_only` overrides the plan.
        """
        self._visited, self._active = {}, None
        active = find_active()
        if self.fault is not None or (active is not None and not any(active)):
            return
        try:
            if not self._is_laid_out:
                self._lay_out()
            by_buffer: dict[SwapBuffer, list[StatePiece]] = {}
            for piece in self._pieces(order):
                if active is None or takes_step(piece.bucket.layout, piece.chunk, active):
                    assert piece.buffer is not None
                    by_buffer.setdefault(piece.buffer, []).append(piece)
            for buffer, pieces in by_buffer.items():
                self._visited.update(zip(pieces, [*pieces[1:], pieces[0]], strict=True))
                buffer.swap_in(pieces[0], self.storage)
        except DiskError as error:
            self.fault = error

    def update_only(self, active: Sequence[float]) -> None:
        """Makes the step's later visits include all pieces of active parameters, planned or not.

        Args:
            active: a number per parameter, nonzero if the parameter takes the step.
        """
        self._active = active

    def end_step(self) -> None:
        """Ends the visits of a step; its last transfers continue."""
        self._visited = self._active = None

    def wait(self, resident: bool = False) -> None:
        """Waits until no transfer is under way, and all changed swap units are written.

        Args:
            resident: True to include the pieces that stay in memory.
        """
        buffers = {piece.buffer for piece in self._pieces() if piece.buffer is not None}
        used = [buffer for buffer in buffers if buffer.is_shared or resident]
        for transfer in [buffer.swap_out(self.storage) for buffer in used]:
            if transfer is not None:
                transfer.wait()
        for buffer in used:
            buffer.wait()

    def raise_fault(self) -> None:
        """Raises the first error of the disk, if there was any."""
        if self.fault is not None:
            raise self.fault


def takes_step(layout: BucketLayout, chunk: Chunk, active: Sequence[float]) -> bool:
    """True if some parameter with elements in a chunk of a bucket takes the step."""
    return any(
        active[segment.param] and segment.begin < chunk.end and chunk.begin < segment.end
        for segment in layout.segments
    )


def wait_limit_s(disk: Disk, comms: Iterable[Communicator]) -> float:
    """Returns the seconds for which a rank waits for one transfer.

    Args:
        disk: the disk; its ``timeout_s``, if set, is returned.
        comms: communicators of the ranks that may wait for this rank in the meantime.
    """
    if disk.timeout_s is not None:
        return disk.timeout_s
    # Half, so that this rank can report its error before the waiting ranks time out.
    return min((comm.timeout.total_seconds() / 2 for comm in comms), default=DEFAULT_TIMEOUT_S)


def make_offload(setting: Setting) -> StateOffload:
    """Returns the offload that an optimizer's options choose; collective if state is offloaded.

    Raises:
        UnsupportedError: the offload does not support the parameters' device.
        ArgumentError, DiskError: this rank or another cannot offload its state.
    """
    target = setting.options.offload_state
    if target is None:
        return NO_OFFLOAD
    on_cpu = setting.device.type == "cpu" and not setting.launches
    if on_cpu is not isinstance(target, Disk):
        expected = (
            "parameters on the CPU, whose state can stream to a disk"
            if isinstance(target, Disk)
            else "parameters on a device, whose state can stream to the CPU's memory"
        )
        there = setting.device if setting.comm is None else setting.comm.heap_device
        raise UnsupportedError(
            f"{setting.where('prepare')}: offload_state: expected {expected}; they are on {there}"
        )
    with all_or_none(setting.comm, OPERATION):
        if isinstance(target, Disk):
            owner = f"state of the optimizer on rank {setting.rank}"
            sizes = target.buffer_bytes, target.resident_bytes
            comms = () if setting.comm is None else (setting.comm,)
            file = ScratchFile(target.path, owner, lambda: wait_limit_s(target, comms))
            made = PiecedOffload(file, *sizes)
        else:
            assert setting.comm is not None
            device = cuda.find_device(setting.comm.heap_device, OPERATION)
            assert device is not None
            made = PiecedOffload(PinnedStorage(cuda.current(), device), PINNED_BUFFER_BYTES, 0)
    return made
