"""Optimizer state on a disk, or in the host's memory, which streams through buffers in pieces.

Terms. A rank's chunk of a bucket is divided into *pieces* of equal size, up to 1 Mi elements,
however large a parameter is. The *swap unit* of a piece is its state, tensor after tensor, each
from the begin of a page on: what one transfer moves. A *buffer* is memory for one swap unit. A
*visit* of a piece swaps its unit in, lets the caller change it, and marks it as changed.

Order. A step visits the pieces in the order of the buckets. The buffers are taken in turn, so that
a piece always has the same one: addresses that kernels were given, and views that torch's
optimizers keep, stay right. When a visit ends, the write of its swap unit is submitted, and behind
it the read of the unit that will need the buffer next. So reads run as many pieces ahead as there
are buffers; the last writes of a step, and the first reads of the next one, run while the model
computes. Pieces in ``resident_bytes``, the last ones, have buffers of their own and never move.

Bytes. A step reads and writes each other swap unit once: 16 bytes an element with AdamW in FP32, 24
with FP32 masters of 16-bit parameters, and 20 with remainders. A piece none of whose parameters
takes the step does not move, nor does anything in a step that is skipped. Muon and Adafactor come
back to the masters of 16-bit parameters once whole parameters are computed, so that their swap
units move twice.
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
# The largest state of an element: three moments and a master in FP32.
LARGEST_ELEM_BYTES = 16
# Swap units that the buffers must have space for, so that reads, writes and updates run at once.
LEAST_BUFFERS = 4
# Of a device's memory, with offload_state="cpu": what a disk has by default.
PINNED_BUFFER_BYTES = 64 << 20


def piece_elems(buffer_bytes: int) -> int:
    """Returns the largest number of elements of a piece, for buffers of so many bytes.

    Raises:
        ArgumentError: they are too small for any piece.
    """
    most = buffer_bytes // (LEAST_BUFFERS * LARGEST_ELEM_BYTES)
    if most < TILE_ELEMS:
        least = LEAST_BUFFERS * LARGEST_ELEM_BYTES * TILE_ELEMS
        raise ArgumentError(f"buffer_bytes: expected at least {least}, got {buffer_bytes}")
    return min(PIECE_ELEMS, most // TILE_ELEMS * TILE_ELEMS)


def elems_of_pieces(elems: int, largest: int) -> int:
    """Returns the elements of each piece of a chunk of so many, but of the last one."""
    count = -(-elems // largest)
    return round_up(-(-elems // count), TILE_ELEMS)


def pieces_of(chunk: Chunk, largest: int) -> list[Chunk]:
    """Divides a chunk into as few pieces as there must be, of nearly equal numbers of elements."""
    if not chunk.elems:
        return []
    size = elems_of_pieces(chunk.elems, largest)
    begins = range(chunk.begin, chunk.end, size)
    return [Chunk(begin, min(begin + size, chunk.end)) for begin in begins]


@dataclass(frozen=True)
class UnitTensor:
    """One tensor of a swap unit: float32, int16, or uint8 of an 8-bit moment."""

    name: str
    dtype: torch.dtype

    def size_bytes(self, elems: int) -> int:
        """Returns the bytes of so many elements."""
        if self.dtype is torch.uint8:
            return QuantizedMoment.size_bytes(elems)
        return elems * self.dtype.itemsize


class OffloadedState(ShardState):
    """Stands for the state of a bucket that is offloaded: tensors without memory.

    Names, dtypes and sizes are theirs; elements are read and written through the pieces.
    """

    # The bucket has the state, and nothing here may keep it alive, nor in the pieces.
    _bucket_ref: weakref.ref[Bucket]

    @classmethod
    def of(
        cls, bucket: Bucket, unit_tensors: Sequence[UnitTensor], quantized_state: bool
    ) -> OffloadedState:
        """Returns what stands for tensors of a bucket's chunk."""
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
        # A step visits the pieces that it changes alone; elsewhere parameters stay as they are.
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
    """Sets the tensors of a state to those of a swap unit: uint8 [bytes].

    On the device "meta" the tensors are of that device, and the swap unit need not be of any size.
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
    """A read or a write that is under way."""

    def wait(self) -> None:
        """Waits for it.

        Raises:
            DiskError: it failed.
        """
        ...


class SwapStorage(Protocol):
    """The extents in which the swap units lie, numbered.

    Transfers that share an extent or memory run in the order in which they were submitted. An
    extent that was never written reads as zeros.
    """

    def buffer(self, size_bytes: int) -> Tensor:
        """Returns memory for swap units, of zeros: uint8 [bytes]."""
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
    """Memory for one swap unit, which pieces take in turn.

    Attributes:
        memory: uint8 [bytes], from the begin of a page on.
        is_shared: True if several pieces take it in turn.
        changed: True if the swap unit here is newer than that on the disk.
    """

    def __init__(self, memory: Tensor, is_shared: bool) -> None:
        self.memory = memory
        self.is_shared = is_shared
        self.changed = False
        # Pieces have their buffers, and a cycle would keep the parameters' memory for a while.
        self._holds: weakref.ref[StatePiece] | None = None
        self._coming: SwapTransfer | None = None

    @property
    def holds(self) -> StatePiece | None:
        """The piece whose swap unit is here, or is on its way; None for none."""
        return None if self._holds is None else self._holds()

    def begin_with(self, piece: StatePiece) -> None:
        """Holds a piece's swap unit from now on, as the memory is."""
        self._holds = weakref.ref(piece)

    def swap_in(self, piece: StatePiece, storage: SwapStorage) -> None:
        """Submits what has to be done until a piece's swap unit is here; see :meth:`wait`."""
        if self.holds is piece:
            return
        self.swap_out(storage)
        self.begin_with(piece)
        if piece.size_bytes:
            self._coming = storage.read(piece.extent_of(storage), self._unit(piece))

    def swap_out(self, storage: SwapStorage) -> SwapTransfer | None:
        """Submits the write of the swap unit that is here, if it has been changed."""
        piece, changed = self.holds, self.changed
        self.changed = False
        if piece is None or not changed or not piece.size_bytes:
            return None
        self.wait()
        return storage.write(piece.extent_of(storage), self._unit(piece))

    def wait(self) -> None:
        """Waits for the swap unit that is on its way."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def _unit(self, piece: StatePiece) -> Tensor:
        return self.memory[: piece.size_bytes]


@dataclass(eq=False)
class StatePiece:
    """A piece of a bucket's chunk whose state moves at once.

    Attributes:
        bucket_ref: the bucket.
        chunk: the elements of the bucket.
        unit_tensors: the tensors of its swap unit.
        buffer: where its swap unit is while it is visited.
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
        """Returns the number of its extent, which is made at the first call; 0 without a state."""
        if not self.size_bytes:
            return 0
        if self.extent is None:
            self.extent = storage.add_extent(self.size_bytes)
        return self.extent

    def move_in(self, buffer: SwapBuffer) -> None:
        """Takes a buffer, and makes the bucket of the piece there."""
        self.buffer = buffer
        state = ShardState(quantized_state=self.bucket.state.quantized_state)
        add_unit_tensors(state, self.unit_tensors, buffer.memory, self.chunk.elems)
        self.view = self.bucket.piece(self.chunk, state)


@dataclass
class _OffloadedBucket:
    """A bucket whose state is here, its tensors, and its pieces once they are laid out."""

    bucket_ref: weakref.ref[Bucket]
    unit_tensors: tuple[UnitTensor, ...]
    pieces: list[StatePiece] = field(default_factory=list)


class PiecedOffload(StateOffload):
    """The state of one optimizer on one rank, in extents elsewhere.

    Args:
        storage: where it lies.
        buffer_bytes: of the buffers in the memory of the parameters' device.
        resident_bytes: of the state that stays there.

    Attributes:
        fault: the first error of the disk; nothing is visited any more.
    """

    in_memory = False

    def __init__(self, storage: SwapStorage, buffer_bytes: int, resident_bytes: int) -> None:
        self._buffer_bytes, self._resident_bytes = buffer_bytes, resident_bytes
        self._largest = piece_elems(buffer_bytes)
        self.storage = storage
        self._kept: dict[int, _OffloadedBucket] = {}
        self._is_laid_out = True
        # The pieces that the step under way visits, each with the one that needs its buffer next,
        # in this step or first in the next one; None between steps.
        self._visited: dict[StatePiece, StatePiece] | None = None
        # By parameter, not 0 where it takes the step; None where that was known from the begin on.
        self._active: Sequence[float] | None = None
        self.fault: DiskError | None = None

    def add(self, bucket: Bucket, master: str, quantized_state: bool) -> ShardState:
        """Takes up a bucket's state, and returns what stands for it."""
        dtype = master_dtype(bucket.layout, master)
        name = "remainder" if dtype is torch.int16 else "master"
        unit_tensors = () if dtype is None else (UnitTensor(name, dtype),)
        self._kept[bucket.number] = _OffloadedBucket(weakref.ref(bucket), unit_tensors)
        self._is_laid_out = False
        return OffloadedState.of(bucket, unit_tensors, quantized_state)

    def ensure(self, bucket: Bucket, names: Sequence[str]) -> bool:
        """Does :meth:`Bucket.ensure`; what the pieces have is moved to larger swap units."""
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
        """Returns a piece with more tensors in its swap unit, of zeros."""
        made = StatePiece(piece.bucket_ref, piece.chunk, unit_tensors)
        if piece.extent is None or not piece.size_bytes:
            return made
        old, new = map(self.storage.buffer, (piece.size_bytes, made.size_bytes))
        self.storage.read(piece.extent, old).wait()
        new.zero_()
        # Tensors are only added behind the others.
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
                buffer.begin_with(piece)  # new memory is of zeros, as a state that begins is
            piece.move_in(buffer)
        if not pieces:
            return
        # Without any tensor in the state, as of SGD without momentum, nothing moves.
        size = max(PAGE_BYTES, *(piece.size_bytes for piece in pieces))
        count = min(len(pieces), self._buffer_bytes // size)
        buffers = [SwapBuffer(self.storage.buffer(size), is_shared=True) for _ in range(count)]
        for number, piece in enumerate(pieces):
            piece.move_in(buffers[number % count])
            if count < len(pieces):
                # What will have to leave its buffer has an extent from now on, whatever else the
                # disk takes.
                piece.extent_of(self.storage)

    def reserve(self) -> None:
        """Takes the memory and the space that the state needs.

        Raises:
            DiskError: the disk has no room.
        """
        if not self._is_laid_out:
            self._lay_out()

    def visit(self, bucket: Bucket, begin: int, end: int, write: bool) -> Iterator[Bucket]:
        """Does :meth:`Bucket.pieces`; in a step, for the pieces that it visits.

        In a step an error of the disk ends the visits, and is kept in :attr:`fault`: the rank goes
        on with the calls that the others wait for, and all of them learn of it at the end.

        Raises:
            DiskError: between steps.
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
        """Tells whether a visit of the piece's bucket reaches it."""
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
        # A bucket is laid out anew when its optimizer grows.
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
            find_active: returns by parameter a number, not 0 where it takes the step; None for
                visits of all pieces.
            order: the buckets' numbers in the order in which they will be updated; None for their
                own. What :meth:`update_only` says of a bucket overrules the plan.
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
        """Has the visits that follow in a step reach pieces of these parameters, planned or not.

        Args:
            active: by parameter, not 0 where it takes the step.
        """
        self._active = active

    def end_step(self) -> None:
        """Ends the visits of a step, whose last transfers go on."""
        self._visited = self._active = None

    def wait(self, resident: bool = False) -> None:
        """Waits until no transfer is under way, and what is changed is on the disk.

        Args:
            resident: also what stays in memory.
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
    """Tells whether some parameter that has elements in a chunk of a bucket takes the step."""
    return any(
        active[segment.param] and segment.begin < chunk.end and chunk.begin < segment.end
        for segment in layout.segments
    )


def wait_limit_s(disk: Disk, comms: Iterable[Communicator]) -> float:
    """Returns how many seconds a rank waits for one transfer.

    Args:
        disk: whose own limit goes first.
        comms: of the ranks that may wait for this one meanwhile.
    """
    if disk.timeout_s is not None:
        return disk.timeout_s
    # Half: who waits for this rank must not give up before it can tell why.
    return min((comm.timeout.total_seconds() / 2 for comm in comms), default=DEFAULT_TIMEOUT_S)


def make_offload(setting: Setting) -> StateOffload:
    """Returns the offload that an optimizer's options ask for; collective but for memory.

    Raises:
        UnsupportedError: the parameters are not on the device that the offload serves.
        ArgumentError, DiskError: no state can be kept there, on this rank or another.
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
            f"{setting.where('prepare')}: offload_state: expected {expected}, got them on {there}"
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
