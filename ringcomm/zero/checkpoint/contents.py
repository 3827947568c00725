"""The contents that each rank brings to a save: described, put together, and written."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringcomm.errors import ArgumentError, MismatchError, UnsupportedError
from ringcomm.json_reader import decode, encode, text_of
from ringcomm.zero.checkpoint.manifest import (
    Piece,
    RankRecord,
    SavedTensor,
    check_fill,
    file_name,
    flat_boxes,
    piece_key,
    rank_key,
)
from ringcomm.zero.checkpoint.tensor_file import TensorEntry, dtype_name, host_blocks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# A part of a flat tensor, as checkpoints take it.

Tensor = torch.Tensor


class Box(NamedTuple):
    """A box of a tensor as it is cut, and this rank's memory of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: Tensor


class FlatShard(torch.Tensor):
    """Elements [begin, begin + data.numel()) of a flat tensor of ``elems`` elements.

    To ``torch.distributed.checkpoint`` it is a tensor of size [elems] of which this rank has a
    part, with any planner: torch asks for parts of tensors only. It cannot be computed with.

    Args:
        elems: of the whole flat tensor: a parameter, a master weight, a moment.
        begin: of the first element that is here.
        data: [n], contiguous, on any device, perhaps empty. It is saved from and loaded into.
        shape: of the parameter, with ``elems`` elements; default [elems]. Exports have it.

    Attributes:
        elems, begin: as given.
        local: ``data``, without gradient.
        read: where ``local`` has no memory (device "meta"), yields the elements of a range of the
            tensor that ``local`` is a view of; else None.
        param_shape: ``shape``.

    Raises:
        ArgumentError: these do not fit.
        UnsupportedError: files have no such dtype.
    """

    elems: int
    begin: int
    local: Tensor
    param_shape: tuple[int, ...]
    read: Callable[[int, int], Iterator[Tensor]] | None = None

    @staticmethod
    def __new__(
        cls, elems: int, begin: int, data: Tensor, shape: Sequence[int] | None = None
    ) -> FlatShard:
        _check(elems, begin, data, shape)
        made: FlatShard = cls._make((elems,), data)
        made.elems, made.begin, made.local = elems, begin, data.detach()
        made.param_shape = (elems,) if shape is None else tuple(shape)
        return made

    @classmethod
    def _make(cls, size: Sequence[int], data: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=data.dtype, device=data.device
        )

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.begin + self.local.numel()
        return f"FlatShard({self.begin}..{end} of {self.elems}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:
            # torch's staging of background saves makes these, and fills their ``local``.
            like, device = args[0], (kwargs or {}).get("device")
            return like.with_memory(torch.empty_like(like.local, device=device))
        raise UnsupportedError(
            f"{func}: a FlatShard is a part of a tensor, for checkpoints only; compute with its "
            ".local"
        )

    def with_memory(self, local: Tensor) -> FlatShard:
        """Returns the same elements in other memory."""
        return FlatShard(self.elems, self.begin, local, self.param_shape)

    def boxes(self) -> list[Box]:
        """Returns the boxes of the saved tensor, of the size ``self.size()``, that are here."""
        # An empty part may begin where another rank's begins, and torch keeps one of those.
        if self.elems and not self.local.numel():
            return []
        return [Box((self.begin,), tuple(self.local.shape), self.local)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.size())),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        here = {box.offsets: box.local for box in self.boxes()}
        if index.offset is None and len(here) == 1:
            return next(iter(here.values()))
        offsets = tuple(index.offset or ())
        if offsets not in here:
            raise ArgumentError(
                f"{index.fqn}: expected a part that begins at one of {list(here)}, which this rank "
                f"has, got {offsets}"
            )
        return here[offsets]


class Part(NamedTuple):
    """A box of a tensor that some ranks have together, under tensor parallelism.

    Attributes:
        shape: shape of the whole tensor.
        offsets, sizes: of the box, by dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class PartShard(FlatShard):
    """Elements [begin, begin + data.numel()) of a flattened box of a tensor.

    It is saved as boxes of the tensor in its real shape, since a run of a box's elements is none of
    the tensor's.

    Args:
        part: the box.
        begin: of the first element that is here, in the flattened box.
        data: [n], contiguous, on any device, perhaps empty.
    """

    part: Part

    @staticmethod
    def __new__(cls, part: Part, begin: int, data: Tensor) -> PartShard:
        _check(prod(part.sizes), begin, data, None)
        made: PartShard = cls._make(part.shape, data)
        made.part, made.param_shape = part, tuple(part.shape)
        made.elems, made.begin, made.local = prod(part.sizes), begin, data.detach()
        return made

    def with_memory(self, local: Tensor) -> FlatShard:
        return PartShard(self.part, self.begin, local)

    def boxes(self) -> list[Box]:
        if not prod(self.part.shape):
            return [Box((0,) * len(self.part.shape), self.part.shape, self.local.view(self.shape))]
        end, done = self.begin + self.local.numel(), 0
        found = []
        for at, sizes in flat_boxes(self.part.sizes, self.begin, end):
            offsets = tuple(a + b for a, b in zip(self.part.offsets, at, strict=True))
            found.append(Box(offsets, sizes, self.local[done : done + prod(sizes)].view(sizes)))
            done += prod(sizes)
        return found


def _check(elems: int, begin: int, data: Tensor, shape: Sequence[int] | None) -> None:
    if not isinstance(data, Tensor) or isinstance(data, FlatShard):
        raise ArgumentError(f"FlatShard: expected data as a tensor, got {type(data).__name__}")
    dtype_name(data.dtype, "FlatShard")
    if data.dim() != 1 or not data.is_contiguous():
        raise ArgumentError(
            "FlatShard: expected contiguous data of one dimension, got shape "
            f"{tuple(data.shape)} with stride {data.stride()}"
        )
    if not 0 <= begin <= begin + data.numel() <= elems:
        raise ArgumentError(
            f"FlatShard: expected a part of {elems} elements, got {data.numel()} from {begin} on"
        )
    if shape is not None and prod(shape) != elems:
        raise ArgumentError(f"FlatShard: expected a shape of {elems} elements, got {tuple(shape)}")


@dataclass(frozen=True)
class Contents:
    """The contents that one rank saves.

    Attributes:
        tensors: by name, this rank's parts.
        data: plain data, equal on all ranks.
        rank_data: this rank's own plain data.
        rank_tensors: this rank's own tensors, by name.
    """

    tensors: Mapping[str, FlatShard]
    data: Any = None
    rank_data: Any = None
    rank_tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Describes it in plain JSON types: all but the elements, and the checksum of ``data``.

        Raises:
            ArgumentError: a name or a tensor is none.
            UnsupportedError: data are not plain, or a dtype cannot be saved.
        """
        parts = {}
        for name, shard in self.tensors.items():
            check_name(name)
            if not isinstance(shard, FlatShard):
                raise ArgumentError(
                    f"tensor {name!r}: expected a FlatShard, got {type(shard).__name__}"
                )
            boxes = [[*each[:2]] for each in shard.boxes() if each.local.numel()]
            dtype = dtype_name(shard.dtype, name)
            parts[name] = [dtype, list(shard.size()), list(shard.param_shape), boxes]
        own = {}
        for name, tensor in self.rank_tensors.items():
            check_name(name)
            if not isinstance(tensor, Tensor) or isinstance(tensor, FlatShard):
                raise ArgumentError(
                    f"rank_tensors: {name!r}: expected a tensor, got {type(tensor).__name__}"
                )
            own[name] = [dtype_name(tensor.dtype, name), list(tensor.shape)]
        return {
            "tensors": parts,
            "rank_tensors": own,
            "rank_data": encode(self.rank_data, "rank_data"),
            "data": zlib.crc32(text_of(encode(self.data, "data")).encode()),
        }

    def entries(self) -> list[TensorEntry]:
        """The tensors that go into this rank's file."""
        parts = [
            TensorEntry(
                piece_key(name, box.offsets),
                shard.dtype,
                box.sizes,
                partial(blocks_of, box.local, shard.read),
            )
            for name, shard in self.tensors.items()
            for box in shard.boxes()
            if box.local.numel()
        ]
        own = [
            TensorEntry(
                rank_key(name), tensor.dtype, tuple(tensor.shape), partial(host_blocks, tensor)
            )
            for name, tensor in self.rank_tensors.items()
        ]
        return parts + own


def blocks_of(
    local: Tensor, read: Callable[[int, int], Iterator[Tensor]] | None
) -> Iterator[Tensor]:
    """Yields the elements of a shard's box, in blocks in host memory."""
    if read is None:
        yield from host_blocks(local)
    else:
        begin = int(local.storage_offset())
        for block in read(begin, begin + local.numel()):
            yield from host_blocks(block)


def check_name(name: object) -> None:
    """Raises ArgumentError unless a tensor can have this name."""
    try:
        if isinstance(name, str) and name.encode():
            return
    except UnicodeEncodeError:
        pass  # half of a surrogate pair
    raise ArgumentError(f"expected tensors' names as text that is not empty, got {name!r}")


def put_together(
    described: Sequence[Mapping[str, Any]], operation: str
) -> tuple[dict[str, SavedTensor], tuple[RankRecord, ...]]:
    """The tensors and the ranks' own of a manifest, from all ranks' descriptions.

    Raises:
        MismatchError: ranks differ in a tensor or in the data.
        ArgumentError: a tensor has a gap, or an element that two ranks save.
    """
    heads: dict[str, tuple[int, list[Any]]] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank, each in enumerate(described):
        if each["data"] != described[0]["data"]:
            raise MismatchError(
                f"{operation}: ranks 0 and {rank} give different data; give what differs as "
                "rank_data"
            )
        for name, (dtype, size, shape, boxes) in each["tensors"].items():
            head = [dtype, size, shape]
            first, expected = heads.setdefault(name, (rank, head))
            if head != expected:
                raise MismatchError(
                    f"{operation}: tensor {name!r} has dtype, size and shape {expected} on "
                    f"rank {first} and {head} on rank {rank}"
                )
            for offsets, sizes in boxes:
                key = piece_key(name, offsets)
                piece = Piece(tuple(offsets), tuple(sizes), file_name(rank), key)
                pieces.setdefault(name, []).append(piece)
    tensors = {}
    for name, (_, (dtype, size, shape)) in heads.items():
        parts = tuple(sorted(pieces.get(name, []), key=lambda piece: piece.offsets))
        try:
            check_fill(size, parts)
        except ValueError as error:
            raise ArgumentError(
                f"{operation}: tensor {name!r}: {error}; expected each of its {prod(size)} "
                "elements on one rank"
            ) from None
        tensors[name] = SavedTensor(dtype, tuple(size), tuple(shape), parts)
    return tensors, tuple(_record(rank, each) for rank, each in enumerate(described))


def _record(rank: int, described: Mapping[str, Any]) -> RankRecord:
    tensors = {}
    for name, (dtype, extents) in described["rank_tensors"].items():
        size = tuple(extents)
        piece = Piece((0,) * len(size), size, file_name(rank), rank_key(name))
        tensors[name] = SavedTensor(dtype, size, size, (piece,) if piece.elems else ())
    return RankRecord(decode(described["rank_data"]), tensors)
