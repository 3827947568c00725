# SPDX-License-Identifier: Apache-2.0
"""The buckets of a sharded module, and the memory that this rank has for each bucket."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter

import torch
from torch import nn

from ringcomm import _native
from ringcomm.comm.agreement import all_or_none, first_other, unequal
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.engine import Work
from ringcomm.comm.peer_memory import peer_tensors
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError, where
from ringcomm.memory import normal_tensors, zeros
from ringcomm.offload.scratch import Disk, DiskChunk, DiskChunks
from ringcomm.optim.buckets import dequantized, empty_for_streams
from ringcomm.optim.dtensors import (
    apart,
    is_distributed,
    local_of,
    set_local,
    without_torch_function,
)
from ringcomm.optim.layout import (
    BucketLayout,
    Chunk,
    ParamSpec,
)
from ringcomm.zero.stages.resharded import (
    advance_versions,
    make_resharded,
    make_unsharded,
    stand_in,
    void,
)
from ringcomm.zero.stages.units import Values

Tensor = torch.Tensor

# torch's C++ functions, for speed: a step unshards some ten buckets of several parameters each.
_count_references: Callable[[int], int] = torch._C._storage_Use_Count
_count_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_set_data: Callable[[Tensor, Tensor], None] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
_version_of: Callable[[Tensor], int] = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


#: A device moves a unit's parameters, or a bucket's gradients, on the caller's stream if they have
#: at most this number of bytes. Not tuned: over NVLink the move takes some microseconds, as long as
#: the four driver calls and two waits of the device that a side stream would cost.
SMALL_BYTES = 1 << 20
#: The most bytes of units that a device unshards ahead, beyond ``ZeroOptions.prefetch``. Not tuned:
#: 16 MiB is a small part of a GPU's memory, and takes some 50 microseconds over NVLink.
AHEAD_BYTES = 1 << 24


@dataclass(frozen=True)
class BucketParam:
    """A parameter that is elements [begin, end) of its bucket, with the shape of ``spec``."""

    name: str
    param: nn.Parameter
    spec: ParamSpec
    begin: int
    end: int

    def view(self, flat: Tensor) -> Tensor:
        """Returns the parameter as a view of ``flat`` [bucket elements]."""
        return self.spec.view(flat[self.begin : self.end])


class ParamBucket(ABC):
    """The base of replicated and sharded buckets.

    Attributes:
        layout: layout of the bucket.
        chunk: the part that belongs to this rank alone: the rank saves it, and counts it in norms.
        state_chunk: the part for which an optimizer on this rank keeps state. It contains
            ``chunk``, and is equal to ``chunk`` unless other ranks have copies of the state.
        params: the parameters and their positions, in the order of the bucket.
        tensors: the parameters themselves.
        has_dtensors: True if a parameter is a DTensor; False saves tests of each parameter.
        trains: True if an optimizer steps the bucket.
        wide: float32 [state chunk elements], the parameters before they were rounded; None if they
            were not rounded, or if an optimizer has taken this tensor over. With
            :attr:`compression` the tensor holds the masters, and an optimizer's state refers to it;
            see NOTE [Quantized parameters] in ``optim/buckets.py``.
        compression: format in which nodes exchange the parameters; None if they are not quantized.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[BucketParam],
        comm: Communicator,
        trains: bool,
        state: str,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.tensors = tuple(entry.param for entry in params)
        self._are_dtensors = tuple(map(is_distributed, self.tensors))
        self.has_dtensors = any(self._are_dtensors)
        # The function that gives a parameter other memory.
        self._set_value = set_local if self.has_dtensors else _set_data
        self.trains = trains
        self.comm = comm
        if state == "node":
            self.chunk = layout.chunk_of_copy(comm)
            self.state_chunk = layout.chunk(comm.node.rank, comm.node.world_size)
        else:
            self.chunk = self.state_chunk = layout.chunk(comm.steps.shard_index, comm.world_size)
        self.wide: Tensor | None = None
        self.compression: str | None = None

    def own_chunk_of(self, state: Tensor) -> Tensor:
        """Returns the part of ``state`` [state chunk elements] that belongs to ``chunk``."""
        begin = self.state_chunk.begin
        return state[self.chunk.begin - begin : self.chunk.end - begin]

    def here(self, write: bool = False, anew: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which this rank's part of the parameters is in memory.

        Except in calls of the module, code may read or write the part only in this context. If the
        part is always in memory, the context does nothing.

        Args:
            write: True if changes made inside are to be kept.
            anew: True if the body writes the whole part, so that its old values are not needed.

        Raises:
            DiskError: the part is on a disk that has failed; raised on entry.
        """
        return nullcontext()

    def connect(self) -> None:  # noqa: B027 -- replicated buckets do nothing here
        """Maps the peers' chunks, if this kind of bucket reads them; collective."""

    def give_back(self) -> None:
        """Releases all memory, even if other objects, such as a traceback, refer to the bucket."""
        vars(self).clear()

    @abstractmethod
    def take(self, values: Sequence[Values], keeps_wide: bool) -> None:
        """Moves the parameters into the bucket.

        Args:
            values: one per parameter, of any floating-point dtype.
            keeps_wide: keep the unrounded values in ``wide`` if the bucket's dtype rounds them.
        """

    def _fill(self, values: Sequence[Values], flat: Tensor, held: Chunk, keeps_wide: bool) -> None:
        """Reads ``values`` into ``flat`` [held elements], which must hold zeros."""
        chunk = self.state_chunk
        rounds = flat.dtype is not torch.float32
        rounds = rounds and any(each.dtype is torch.float32 for each in values)
        if self.compression is not None or (keeps_wide and rounds):
            self.wide = empty_for_streams(chunk.elems, torch.float32, flat.device).zero_()
            self._read(values, self.wide, chunk)
        if self.wide is not None and held == chunk:
            flat.copy_(self.wide)
        else:
            self._read(values, flat, held)

    def _read(self, values: Sequence[Values], flat: Tensor, held: Chunk) -> None:
        for entry, value in zip(self.params, values, strict=True):
            low, high = max(entry.begin, held.begin), min(entry.end, held.end)
            if low < high:
                value.read(low - entry.begin, flat[low - held.begin : high - held.begin])

    @abstractmethod
    def settle(self, async_op: bool = False) -> Work | None:
        """Sends this rank's part of the parameters to all ranks with copies of it; collective.

        With :attr:`compression`, all copies, also this rank's, get the masters' values after
        quantization.
        """

    def _moved(self, entry: BucketParam) -> ArgumentError:
        head = where("zero", self.comm.rank, self.comm.world_size)
        found = local_of(entry.param)
        return ArgumentError(
            f"{head}: parameter {entry.name}: its memory was replaced after shard() had moved it "
            "(by .to(), .data = or the like, perhaps in forward): expected "
            f"{self.layout.dtype} of shape {tuple(entry.spec.shape)} in the memory of shard(), "
            f"got {found.dtype} of shape {tuple(found.shape)} elsewhere. Replace memory before "
            "shard() or after remove_sharding(); else change values in place. Frozen parameters "
            "may get other memory of the same values"
        )

    @abstractmethod
    def check(self) -> None:
        """Raises ArgumentError if a parameter's memory was replaced."""


class ReplicatedBucket(ParamBucket):
    """A bucket whose parameters every rank keeps, as views into the heap."""

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[BucketParam],
        comm: Communicator,
        trains: bool,
        state: str,
    ) -> None:
        super().__init__(layout, params, comm, trains, state)
        self.flat = zeros(layout.elems, dtype=layout.dtype, device=comm.heap_device)
        self._addresses = [entry.view(self.flat).data_ptr() for entry in self.params]

    def take(self, values: Sequence[Values], keeps_wide: bool) -> None:
        self._fill(values, self.flat, Chunk(0, self.layout.elems), keeps_wide)
        for entry in self.params:
            set_local(entry.param, apart(entry.param, entry.view(self.flat)))

    def settle(self, async_op: bool = False) -> Work | None:
        chunks = self.layout.chunks(self.comm)
        gathered = [self.flat[chunk.begin : chunk.end] for chunk in chunks]
        if self.compression is None:
            return self.comm.all_gather(gathered, gathered[self.comm.rank], async_op=async_op)
        assert self.wide is not None
        return self.comm.steps.all_gather_quantized(
            self.wide, gathered, self.compression, async_op=async_op
        )

    def check(self) -> None:
        with without_torch_function():
            here = map(local_of, self.tensors) if self.has_dtensors else self.tensors
            for local, address, entry in zip(here, self._addresses, self.params, strict=True):
                if local.data_ptr() != address:
                    raise self._moved(entry)


def _refuse(bucket: ShardedBucket) -> bool:
    return False


class ShardedBucket(ParamBucket):
    """A bucket that is sharded over the ranks, and unsharded and resharded as a whole.

    Over several nodes each node has a copy of all parameters, and a rank keeps a chunk of the copy.
    If the state is sharded over all ranks, the ranks of one rail (equal local ranks on all nodes)
    keep the same chunk, and each updates a part of it; see NOTE [A copy on each node].

    Attributes:
        kept_chunk: the part of the bucket that this rank keeps.
        own_memory: the memory of :attr:`own`; its values may be on a disk now.

    While the bucket is resharded, its parameters keep their shapes and raise when they are used;
    see NOTE [Resharded parameters]. Their values are placeholders that torch refuses to read.

    NOTE [Unsharding is one-sided]
    A rank copies the chunks straight out of its peers' heaps, and the peers take no part. So each
    rank may unshard in any order and at any time, or not at all: calls cannot be mismatched, and no
    rank waits. Chunks change only in an optimizer's step, between two barriers: at the first
    barrier all ranks have finished reading, at the second all ranks have finished writing.

    NOTE [A copy on each node]
    Memory can be mapped only within a node. So with N nodes of L ranks, a rank keeps 1/L of the
    parameters instead of 1/(N L), and unshards from its node: forward and backward do not wait for
    the network. In the step a rank updates 1/N of its chunk and sends this part to its rail peers,
    from which it gets the other parts. With P parameters, P (N-1)/N of them leave a node in each
    step, and none in an unsharding.

    NOTE [Storage comes and goes]
    Autograd saves views of parameters for backward. They share the storage of ``flat``, which is
    emptied and filled again in place, so saved views find their values again.

    NOTE [Memory that others hold]
    Memory that a NumPy array shares cannot be freed, and views that the user took in
    ``unsharded()`` would refer to freed memory. Resharding leaves such memory and its values to the
    array or view, and the next unsharding allocates other memory.
    """

    #: Called when a resharded parameter is used; returns True if the call has unsharded the bucket.
    #: The default, also after give_back(), refuses to unshard.
    asked: Callable[[ShardedBucket], bool] = staticmethod(_refuse)

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[BucketParam],
        comm: Communicator,
        trains: bool,
        state: str,
    ) -> None:
        super().__init__(layout, params, comm, trains, state)
        number, self._kept_elems = self._keeping(state)
        # Equal on all ranks: peers read this size even from a rank whose chunk is shorter.
        self._shard = self._make_shard()
        self.kept_chunk = layout.chunk_of_size(number, self._kept_elems)
        self._kept = self._shard[: self.kept_chunk.elems]
        self.own_memory = self._kept_values(self.state_chunk)
        self._on_rail = [self._kept_values(chunk) for chunk in self._chunks_on_rail(state)]
        #: For each rank of this node, the memory of its chunk, and the memory's address.
        self.peers: tuple[Tensor, ...] = ()
        self.peer_ptrs: list[int] = []
        #: The bytes of all chunks, which ``flat`` takes while the bucket is unsharded.
        self.size_bytes = self.full_elems * layout.dtype.itemsize
        self._names = [entry.name for entry in self.params]
        self._make_flat()
        dtype, device = self.layout.dtype, self.flat.device
        self._placeholders = [stand_in(entry.spec.shape, dtype, device) for entry in self.params]
        self._placeholder_storages = [each.untyped_storage()._cdata for each in self._placeholders]
        # Weak, since parameters hold this callback and may outlive the bucket.
        self._ask = partial(_ask, weakref.ref(self))
        # Addresses and versions of the parameters as this bucket last set them. For resharded
        # parameters, which have no data_ptr(), the addresses of their storages.
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self.coming: Future[None] | None = None
        self.is_unsharded = False
        # True while the user sees the values, and may write to them through ``.data``.
        self._in_the_open = False

    def _make_shard(self) -> Tensor:
        """Allocates this rank's chunk: [kept chunk elements, or more], filled with zeros."""
        return zeros(self._kept_elems, dtype=self.layout.dtype, device=self.comm.heap_device)

    @property
    def kept(self) -> Tensor:
        """The values of this rank's chunk: [kept chunk elements]; see :meth:`here`."""
        return self._kept

    @property
    def own(self) -> Tensor:
        """The parameters that an optimizer on this rank updates: [state chunk elements]."""
        return self.own_memory

    def _keeping(self, state: str) -> tuple[int, int]:
        """Returns the number of the chunk that this rank keeps, and the elements per chunk."""
        node = self.comm.node
        if state == "node":
            return node.rank, self.layout.chunk(0, node.world_size).elems
        each = self.layout.chunk(0, self.comm.world_size).elems
        return node.rank, each * self.comm.num_nodes

    def _chunks_on_rail(self, state: str) -> list[Chunk]:
        """Returns, by node, the parts of this rank's chunk that the ranks of its rail update."""
        comm = self.comm
        if comm.num_nodes == 1 or state == "node":
            return []
        first = comm.node.rank * comm.num_nodes
        return [self.layout.chunk(first + node, comm.world_size) for node in range(comm.num_nodes)]

    @property
    def full_elems(self) -> int:
        """The number of elements of all chunks; at least the number of elements of the bucket."""
        return self._kept_elems * self.comm.node.world_size

    def connect(self) -> None:
        self.peers = peer_tensors(self.comm.node, self._shard, "zero.shard")
        self.peer_ptrs = [peer.data_ptr() for peer in self.peers]

    def _kept_values(self, chunk: Chunk) -> Tensor:
        """Returns the values of a chunk that is a part of this rank's chunk."""
        begin = self.kept_chunk.begin
        return self._kept[chunk.begin - begin : chunk.end - begin]

    def share(self, async_op: bool = False) -> Work | None:
        """Exchanges updated parts with the other nodes' copies of this rank's chunk; collective.

        Does nothing if no other node has a copy, or if each node has updated its own copy.
        """
        if not self._on_rail:
            return None
        return self.comm.steps.all_gather_on_rail(self._on_rail, async_op)

    def settle(self, async_op: bool = False) -> Work | None:
        if self.compression is None:
            return self.share(async_op) if self._on_rail else None
        assert self.wide is not None
        return self.comm.steps.all_gather_quantized(
            self.wide, self._on_rail, self.compression, on_rail=True, async_op=async_op
        )

    def _make_flat(self) -> None:
        """Makes ``flat``, whose storage has no memory yet."""
        with normal_tensors():
            elems, device = self.full_elems, self.comm.device
            self.flat = torch.empty(elems, dtype=self.layout.dtype, device=device)
            # A parameter keeps its version when it gets other memory. A DTensor's local tensor gets
            # a version of its own here, which does not count the writes of unsharding to ``flat``.
            views = [entry.view(self.flat) for entry in self.params]
            #: For each rank of this node, the part of ``flat`` that is copied from the rank.
            self.chunks_of_flat = torch.split(self.flat, self._kept_elems)
            self._views = [
                view.data if is_dtensor else view
                for view, is_dtensor in zip(views, self._are_dtensors, strict=True)
            ]
        self._local_views = list(compress(self._views, self._are_dtensors))
        advance_versions(self._local_views, 1)
        self._references: int | None = None
        self._references_at_first = 0
        self._uses_at_first = 0
        self.flat.untyped_storage().resize_(0)

    def _leave_memory(self) -> None:
        """Leaves ``flat``'s memory to arrays and views; see NOTE [Memory that others hold]."""
        advance_versions(self._local_views, -1)  # cancels the advance in _make_flat()
        self._make_flat()

    def fill(self) -> None:
        """Reads all chunks, this rank's own included; callable from any thread."""
        for mine, peer in zip(self.chunks_of_flat, self.peers, strict=True):
            mine.copy_(peer)

    def to_unsharded(self) -> None:
        """Points the parameters at the unsharded values."""
        with without_torch_function():
            self._check()
            for _ in map(self._set_value, self.tensors, self._views):
                pass
        self._addresses = list(map(Tensor.data_ptr, self._views))
        self._versions = make_unsharded(self.tensors)
        if self.has_dtensors and not self.is_unsharded:
            advance_versions(self._local_views, -1)
        self.is_unsharded = True
        self._references_at_first = _count_references(self.flat.untyped_storage()._cdata)
        with without_torch_function():
            self._uses_at_first = sum(map(_count_uses, self.tensors))
        if self._references is None:
            self._references = self._references_at_first

    @property
    def is_referred_to(self) -> bool:
        """True if views of the unsharded memory exist besides the parameters themselves.

        Compares the reference count with the count at the first unsharding, when none existed.
        """
        references = self._references
        return (
            references is not None
            and _count_references(self.flat.untyped_storage()._cdata) > references
        )

    @property
    def is_in_graph(self) -> bool:
        """True if an autograd graph may have saved parameters, or views of the unsharded memory."""
        # One reference is the parameter's own; the node of a trainable parameter holds another.
        saved = any(
            entry.param._use_count() > 1 + entry.param.requires_grad  # type: ignore[attr-defined]
            for entry in self.params
        )
        return saved or self.is_referred_to

    @property
    def is_used(self) -> bool:
        """True if graphs may have saved the parameters, or views, since the last unsharding."""
        with without_torch_function():
            return sum(map(_count_uses, self.tensors)) > self._uses_at_first

    def to_sharded(self, keeps_views: bool = False) -> None:
        """Reshards the parameters.

        Args:
            keeps_views: leave the memory to views that were taken since the bucket was unsharded.

        Raises:
            ArgumentError: the user has written to an unsharded parameter; the change is lost.
        """
        try:
            with without_torch_function():
                self._check()
                if self._in_the_open and self.is_unsharded:
                    self._check_values()
        finally:
            storage = self.flat.untyped_storage()
            has_new_views = _count_references(storage._cdata) > self._references_at_first
            self._leave()
            if (keeps_views and has_new_views) or not storage.resizable():
                self._leave_memory()
            else:
                storage.resize_(0)

    def _leave(self) -> None:
        with without_torch_function():
            for _ in map(self._set_value, self.tensors, self._placeholders):
                pass
        self._in_the_open = False
        self._addresses = self._placeholder_storages
        self._versions = make_resharded(self.tensors, self._names, self._ask)
        if self.has_dtensors and self.is_unsharded:
            advance_versions(self._local_views, 1)
        self.is_unsharded = False

    def check(self) -> None:
        with without_torch_function():
            self._check()
            if self.is_unsharded and self._in_the_open:
                self._check_values()

    def open(self) -> None:
        """Marks the bucket as open to writes from outside the module, until it is resharded."""
        self._in_the_open = True

    def shut(self) -> None:
        """Checks an unsharded bucket for the last time before its peers' chunks change."""
        if self.is_unsharded:
            self.check()
            self._in_the_open = False

    @torch.no_grad()
    def _check_values(self) -> None:
        """Finds writes that advance no version: through ``.data`` or a NumPy array."""
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        kind = bits[self.flat.element_size()]
        for number, (mine, peer) in enumerate(zip(self.chunks_of_flat, self.peers, strict=True)):
            changed = (mine.view(kind) != peer.view(kind)).nonzero()
            if len(changed):
                at = number * self._kept_elems + int(changed[0])
                self.fill()
                self._forget_changes()
                raise self._changed(next(p for p in self.params if p.begin <= at < p.end))

    def _changed(self, entry: BucketParam) -> ArgumentError:
        head = where("zero", self.comm.rank, self.comm.world_size)
        return ArgumentError(
            f"{head}: parameter {entry.name} was changed in place, and at stage 3 the change is "
            "lost. Change parameters in ringcomm.zero.unsharded(module, write_from=0)"
        )

    def _check(self) -> None:
        is_sharded = self._addresses is self._placeholder_storages
        here: Iterable[Tensor] = self.tensors
        if self.has_dtensors:
            here = [
                param._local_tensor if is_dtensor else param  # type: ignore[attr-defined]
                for param, is_dtensor in zip(self.tensors, self._are_dtensors, strict=True)
            ]
        # First compares all addresses at once: nearly always none has changed.
        if is_sharded:
            found_at = list(map(_address_of, map(Tensor.untyped_storage, here)))
        else:
            found_at = list(map(Tensor.data_ptr, here))
        versions = list(map(_version_of, self.tensors))
        if found_at == self._addresses and versions == self._versions:
            return
        expected = zip(self.params, self._addresses, self._versions, strict=True)
        for local, (entry, address, version) in zip(here, expected, strict=True):
            found = local.untyped_storage()._cdata if is_sharded else local.data_ptr()
            if found != address and not self._is_equal_copy(entry):
                raise self._moved(entry)
            if entry.param._version != version:
                self._forget_changes()
                raise self._changed(entry)

    def _is_equal_copy(self, entry: BucketParam) -> bool:
        """True if a frozen parameter has other memory, with the bucket's unsharded values.

        Layers with quantized weights make such copies: they assign ``weight.data`` in forward.
        """
        local, there = local_of(entry.param).detach(), entry.view(self.flat)
        if self.trains or not self.is_unsharded:
            return False
        if (local.shape, local.dtype, local.device) != (there.shape, there.dtype, there.device):
            return False
        return torch.equal(as_bytes(local), as_bytes(there))

    def _forget_changes(self) -> None:
        self._in_the_open = False
        if not self.is_unsharded:
            for each in self._placeholders:
                void(each)
        self.accept_changes()

    def take(self, values: Sequence[Values], keeps_wide: bool) -> None:
        with self.here(write=True):
            self._fill(values, self.kept, self.kept_chunk, keeps_wide)
        self._leave()

    def keep_own(self, begin: int = 0, end: int | None = None) -> None:
        """Copies from ``flat`` this rank's part of elements [begin, end), by default all."""
        first, last = self.kept_chunk
        low, high = max(begin, first), last if end is None else min(end, last)
        if low < high:
            with self.here(write=True):
                self.kept[low - first : high - first].copy_(self.flat[low:high])

    def count_change(self, only: Container[int]) -> None:
        """Advances the expected versions of parameters whose values all ranks have changed.

        Args:
            only: ``id`` of the parameters; ids of other tensors are ignored.
        """
        for index, param in enumerate(self.tensors):
            if id(param) in only:
                self._versions[index] += 1
        if self._local_views and not self.is_unsharded:
            # The parameters' local tensors are placeholders now, and these views again later.
            views = zip(self.tensors, self._views, strict=True)
            changed = [v for p, v in views if id(p) in only and is_distributed(p)]
            advance_versions(changed, 1)

    def accept_changes(self, only: Container[int] | None = None) -> None:
        """Accepts the unsharded parameters' values, so that :meth:`check` does not refuse them.

        Args:
            only: ``id`` of the parameters to accept; None for all.
        """
        with without_torch_function():
            for index, param in enumerate(self.tensors):
                if only is None or id(param) in only:
                    self._versions[index] = param._version


def _ask(reference: weakref.ref[ShardedBucket]) -> bool | None:
    bucket = reference()
    return None if bucket is None else bucket.asked(bucket)


class WorldBucket(ShardedBucket):
    """A sharded bucket with one chunk per rank of all nodes, so that no node has all chunks.

    Other nodes' memory cannot be mapped, so unsharding is a collective of all ranks. A tag
    distinguishes the unshardings of different buckets.

    Args:
        layout, params, comm, trains: as for :class:`ParamBucket`.
        tag: identifies the bucket among buckets of the same size; equal on all ranks.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[BucketParam],
        comm: Communicator,
        trains: bool,
        tag: int,
    ) -> None:
        self._tag = tag
        super().__init__(layout, params, comm, trains, "world")
        # The checksum of each parameter's values, while the bucket is open.
        self._checksums: list[int] = []
        #: True while chunks differ from the masters; the chunks are then gathered unquantized.
        self.has_other_values = False

    def _keeping(self, state: str) -> tuple[int, int]:
        return self.comm.steps.shard_index, self.layout.chunk(0, self.comm.world_size).elems

    def _chunks_on_rail(self, state: str) -> list[Chunk]:
        return []

    @property
    def full_elems(self) -> int:
        return self.layout.elems

    def connect(self) -> None:
        return

    def settle(self, async_op: bool = False) -> Work | None:
        if self.compression is not None:
            assert self.wide is not None
            self.own.copy_(dequantized(self.wide, self.compression, self.layout.dtype))
        return None

    def fill(self) -> None:
        if self.compression is None or self.has_other_values:
            self.comm.steps.all_gather_bucket(self.kept, self.flat, self._tag)
            return
        assert self.wide is not None
        chunks = self.layout.chunks(self.comm)
        gathered = [self.flat[chunk.begin : chunk.end] for chunk in chunks]
        self.comm.steps.all_gather_quantized(self.wide, gathered, self.compression, tag=self._tag)

    def open(self) -> None:
        super().open()
        self._checksums = self._sum_up()

    def _sum_up(self) -> list[int]:
        return [checksum(self.flat[entry.begin : entry.end]) for entry in self.params]

    def _check_values(self) -> None:
        sums = zip(self.params, self._checksums, self._sum_up(), strict=True)
        for entry, expected, found in sums:
            if found != expected:
                self._forget_changes()
                raise self._changed(entry)

    def accept_changes(self, only: Container[int] | None = None) -> None:
        super().accept_changes(only)
        if self._in_the_open:
            for index, found in enumerate(self._sum_up()):
                if only is None or id(self.tensors[index]) in only:
                    self._checksums[index] = found


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a flat view of a tensor's memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def checksum(flat: Tensor) -> int:
    """Returns the CRC-32 of a contiguous tensor's memory."""
    here = flat.cpu()
    return _native.crc32(here.data_ptr(), here.nbytes)


# ---- Buckets whose chunks each rank keeps on a disk, and reads when the bucket is unsharded ------


def make_store(disk: Disk, comm: Communicator) -> DiskChunks:
    """Makes the file for this rank's chunks.

    Raises:
        UnsupportedError: parameters are on a device.
        DiskError: the folder does not support such a file.
    """
    if comm.launches or comm.device.type != "cpu":
        raise UnsupportedError(
            f"{where('shard', comm.rank, comm.world_size)}: offload_params: expected parameters "
            f"on the CPU, whose chunks can be on a disk, got them on {comm.heap_device}"
        )
    return DiskChunks(disk, f"parameters of rank {comm.rank}")


def reserve(
    store: DiskChunks, stored: Sequence[ParamBucket], frozen: Sequence[ParamBucket]
) -> None:
    """Reserves disk space for the chunks of buckets; the last trained buckets stay in memory.

    Raises:
        DiskError: the disk is full.
    """
    everything = [*frozen, *stored]
    chunks = [bucket.disk_chunk for bucket in everything if isinstance(bucket, DiskBucket)]
    # Forward uses the last buckets at its end, and backward uses them first.
    store.reserve(chunks)


def expect(store: DiskChunks, buckets: Iterable[ParamBucket]) -> None:
    """Reads the chunks of buckets ahead, in the order in which they will be needed."""
    store.expect(bucket.disk_chunk for bucket in buckets if isinstance(bucket, DiskBucket))


class DiskBucket(WorldBucket):
    """A sharded bucket whose chunk is on the rank's disk while it is not used.

    NOTE [Each rank reads its own]
    Peers cannot map data that direct I/O reads past the page cache; and if each rank read all
    chunks, a node's disk would transfer them once per rank. So a rank reads only its own chunk, and
    unsharding is a collective of all ranks, in one order, as with ``params="world"``.

    NOTE [A chunk that cannot be read]
    Before each unsharding the ranks exchange the bucket's tag, and whether they have their chunks.
    So a fault of one rank's disk raises on all ranks, in the same call.

    Args:
        layout, params, comm, trains, tag: as for :class:`WorldBucket`.
        store: the storage of this rank's chunks.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[BucketParam],
        comm: Communicator,
        trains: bool,
        tag: int,
        store: DiskChunks,
    ) -> None:
        self.store = store
        super().__init__(layout, params, comm, trains, tag)

    def _make_shard(self) -> Tensor:
        size_bytes = self._kept_elems * self.layout.dtype.itemsize
        self.disk_chunk = DiskChunk(max(1, size_bytes))
        return self.disk_chunk.memory[:size_bytes].view(self.layout.dtype)

    @property
    def full_elems(self) -> int:
        # On one node the chunks are gathered with equal sizes, so the last chunks may be padded.
        if self.comm.num_nodes > 1:
            return super().full_elems
        return self._kept_elems * self.comm.world_size

    @property
    def kept(self) -> Tensor:
        self._expect_here()
        return super().kept

    @property
    def own(self) -> Tensor:
        self._expect_here()
        return super().own

    @property
    def is_here(self) -> bool:
        """True inside :meth:`here`, where the chunk is in memory."""
        return self.disk_chunk.in_use

    def _expect_here(self) -> None:
        if not self.is_here:
            names = ", ".join(entry.name for entry in self.params)
            raise AssertionError(f"the chunk of {names} is on the disk; use it inside of here()")

    def here(self, write: bool = False, anew: bool = False) -> AbstractContextManager[None]:
        return self.store.here(self.disk_chunk, write, anew)

    def fill(self) -> None:
        with self.store.keeping_faults(), self.here():
            self._agree(self.store.fault)
            if self.comm.num_nodes > 1:
                super().fill()
            else:
                self.comm.all_gather_into_tensor(self.flat, self._shard)

    def _agree(self, fault: RingcommError | None) -> None:
        """Raises on all ranks if one lacks its chunk or unshards another bucket; collective."""
        comm = self.comm
        if comm.world_size > 1:
            mine = torch.tensor([self._tag, fault is None], dtype=torch.int64, device="cpu")
            told = torch.empty(2 * comm.world_size, dtype=torch.int64, device="cpu")
            comm.all_gather_into_tensor(told, mine)
            tags, have = told[::2].tolist(), told[1::2].tolist()
        else:
            tags, have = [self._tag], [fault is None]
        if not all(have):
            with all_or_none(comm, "zero: unsharding parameters"):
                if fault is not None:
                    raise fault
        if set(tags) != {self._tag}:
            # This rank does not know which parameters belong to another rank's tag.
            names = [self.params[0].name if tag == self._tag else "another one" for tag in tags]
            raise unequal(
                where("zero", comm.rank, comm.world_size),
                ("unsharded parameter",),
                [(name,) for name in names],
                first_other(names),
                "With parameters on a disk all ranks must unshard the same parameters in the same "
                "order: run the same modules on all ranks, and call unsharded() on all of them",
            )
