# SPDX-License-Identifier: Apache-2.0
"""The layout of parameters in flat buckets, and the chunk of each bucket that a rank owns.

A *bucket* is a flat run of parameters of one dtype. It is divided into W *chunks*, and each of W
ranks keeps the optimizer's state for one chunk: rank r for chunk r, or over several nodes for chunk
``StepCalls.shard_index``. The location of a parameter does not depend on W, so that state can be
loaded with another W. Chunks begin at multiples of ``TILE_ELEMS``, so that norms do not depend on W
either (``kernels/include/ringcomm/optimizer/grad_norm.h``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import ArgumentError, CheckpointError
from ringcomm.integers import integer
from ringcomm.optim.dtensors import Sharding, local_of

Tensor = torch.Tensor

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Further dtypes of frozen parameters in buckets, whose elements are copied but never updated.
FROZEN_DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in (DTYPES | FROZEN_DTYPES).items()}
BUCKET_DTYPES = frozenset(_NAMES)


@dataclass(frozen=True)
class ParamSpec:
    """A description of a parameter for the layout; it has no memory.

    Attributes:
        shape: shape of the parameter, which may have zero elements; for a DTensor, the shape of
            this rank's local tensor.
        dtype: float32, bfloat16 or float16; for a frozen parameter also one of ``FROZEN_DTYPES``.
        group: index of its param group.
        name: name for messages; "" if it has no name.
        trainable: False keeps the parameter out of the buckets.
        tied_to: index of the earlier entry that is the same tensor; a tied entry is in no bucket.
        stride: strides of the elements if they fill their memory in another order than the shape's
            (channels_last); None means contiguous.
        sharding: the position of the local tensor in a DTensor; None if it is the whole parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0
    name: str = ""
    trainable: bool = True
    tied_to: int | None = None
    stride: tuple[int, ...] | None = None
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise _unknown(self.name or self.shape, self.dtype)

    @classmethod
    def of(
        cls, tensor: Tensor, group: int = 0, name: str = "", tied_to: int | None = None
    ) -> ParamSpec:
        """Returns the spec of a parameter of any strides.

        Raises:
            ArgumentError: the tensor's dtype is not float32, bfloat16 or float16.
        """
        if tensor.dtype not in DTYPE_NAMES:
            raise _unknown(name or tuple(tensor.shape), tensor.dtype)
        local = local_of(tensor)
        shape, stride = tuple(local.shape), tuple(local.stride())
        keeps = not local.is_contiguous() and _fills_its_memory(shape, stride)
        return cls(
            shape,
            tensor.dtype,
            group,
            name,
            tensor.requires_grad,
            tied_to,
            stride if keeps else None,
            Sharding.of(tensor),
        )

    @property
    def elems(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dimensions along which the parameter is sharded."""
        return () if self.sharding is None else self.sharding.mesh_dims

    @property
    def in_bucket(self) -> bool:
        """True if the parameter is in a bucket."""
        return self.trainable and self.tied_to is None and self.elems > 0

    def view(self, flat: Tensor) -> Tensor:
        """Returns contiguous ``flat`` [elems] viewed in this parameter's shape and strides."""
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride)

    def describe(self) -> dict[str, Any]:
        """Returns the spec as JSON types."""
        described: dict[str, Any] = {
            "name": self.name,
            "shape": list(self.shape),
            "stride": None if self.stride is None else list(self.stride),
            "dtype": _NAMES[self.dtype],
            "group": self.group,
            "trainable": self.trainable,
            "tied_to": self.tied_to,
        }
        if self.sharding is not None:
            described["sharding"] = self.sharding.describe()
        return described

    def describe_whole(self) -> dict[str, Any]:
        """Returns the spec of the whole parameter as JSON types."""
        if self.sharding is None:
            return self.describe()
        whole = replace(self, shape=self.sharding.shape, stride=None, sharding=None)
        return {**whole.describe(), "divided_by": list(self.sharding.mesh_dims)}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> ParamSpec:
        """Inverse of :meth:`describe`.

        Raises:
            CheckpointError: an entry is missing or of the wrong kind.
        """
        try:
            stride, sharding = described["stride"], described.get("sharding")
            spec = cls(
                tuple(described["shape"]),
                DTYPES[described["dtype"]],
                described["group"],
                described["name"],
                described["trainable"],
                described["tied_to"],
                None if stride is None else tuple(stride),
                None if sharding is None else Sharding.from_description(sharding),
            )
            if spec.describe() != dict(described) or any(size < 0 for size in spec.shape):
                raise ValueError("unexpected entries")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"layout: expected the description of a parameter, got {described!r} ({error!r})"
            ) from error
        return spec


def _unknown(called: object, dtype: torch.dtype) -> ArgumentError:
    return ArgumentError(f"parameter {called}: expected dtype {', '.join(DTYPES)}, got {dtype}")


def _fills_its_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements fill their memory without gaps and without overlap."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


# Parameters begin at multiples of 64 elements (128 bytes of a 16-bit dtype, 256 bytes of float32),
# so that vector loads and cache lines are aligned.
ALIGN_ELEMS = 64
# Chunks begin at multiples of kTileElems of kernels/include/ringcomm/optimizer/adamw.h.
TILE_ELEMS = _native.ADAMW_TILE_ELEMS


def checked_bucket_elems(value: Any) -> int:
    """Checks a bucket's number of elements, and returns it as an int.

    Raises:
        ArgumentError: ``value`` is not a positive multiple of 512.
    """
    count = integer(value)
    if count is None or count < 1 or count % TILE_ELEMS:
        raise ArgumentError(
            f"bucket_elems: expected a positive multiple of {TILE_ELEMS} below 2^63, got {value!r}"
        )
    return count


DEFAULT_BUCKET_ELEMS = 32 << 20
LAYOUT_VERSION = 1


def round_up(count: int, multiple: int) -> int:
    """Returns ``count`` rounded up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


class Segment(NamedTuple):
    """The elements [begin, end) of a bucket that parameter ``param`` fills."""

    begin: int
    end: int
    param: int


class Chunk(NamedTuple):
    """The elements [begin, end) of a bucket that a rank owns; empty if the bucket is too small."""

    begin: int
    end: int

    @property
    def elems(self) -> int:
        return self.end - self.begin


def within(own: Tensor, chunk: Chunk, segment: Segment) -> Tensor:
    """Returns the part of a chunk's tensor ``own`` that a parameter fills, as a view."""
    low, high = max(segment.begin, chunk.begin), min(segment.end, chunk.end)
    return own[low - chunk.begin : high - chunk.begin] if low < high else own[:0]


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: ``elems`` elements of ``dtype``, a multiple of 512, and its segments.

    The elements between the segments and after the last segment are padding, or belong to
    parameters that no optimizer steps. All parameters of a bucket are sharded along the same
    dimensions ``mesh_dims`` of a mesh, so that a norm over the mesh counts each shard of the bucket
    once.
    """

    dtype: torch.dtype
    elems: int
    segments: tuple[Segment, ...]
    mesh_dims: tuple[int, ...] = ()

    def chunk(self, number: int, world_size: int) -> Chunk:
        """Returns chunk ``number`` of ``world_size`` chunks; one rank keeps state for it."""
        return self.chunk_of_size(number, _native.chunk_elems(self.elems, world_size))

    def chunk_of_size(self, number: int, size_elems: int) -> Chunk:
        """Returns chunk ``number`` of size ``size_elems``, or smaller at the bucket's end."""
        begin, end = number * size_elems, (number + 1) * size_elems
        return Chunk(min(begin, self.elems), min(end, self.elems))

    def chunks(self, sharers: Communicator) -> list[Chunk]:
        """Returns, for each of the ranks ``sharers``, the chunk whose state the rank keeps."""
        count = sharers.world_size
        return [self.chunk(sharers.steps.shard_index_of(rank), count) for rank in range(count)]

    def chunk_of_copy(self, comm: Communicator) -> Chunk:
        """Returns this rank's part of its chunk, for state that is copied on each node.

        The ranks with the same chunk, one on each node, are a *rail*; they divide the chunk.
        """
        node = comm.node
        each = _native.chunk_elems(self.elems, node.world_size)
        elems = _native.chunk_elems(each, comm.num_nodes)
        chunk, number = self.chunk_of_size(node.rank, each), comm.node_of(comm.rank)
        begin, end = (chunk.begin + at * elems for at in (number, number + 1))
        return Chunk(min(begin, chunk.end), min(end, chunk.end))

    def with_params(self, index_of: Callable[[int], int | None]) -> BucketLayout:
        """Maps parameter indices by ``index_of``; drops parameters for which it returns None."""
        moved = ((s.begin, s.end, index_of(s.param)) for s in self.segments)
        segments = (Segment(low, high, index) for low, high, index in moved if index is not None)
        return replace(self, segments=tuple(segments))

    def segment_table(self, device: torch.device | str = "cpu") -> Tensor:
        """Returns the sorted segments as int64 [segments, 3]: begin, end, param."""
        return torch.tensor(self.segments, dtype=torch.int64, device=device).view(-1, 3)

    def describe(self) -> dict[str, Any]:
        """Returns the bucket's layout as JSON types."""
        described = {
            "dtype": _NAMES[self.dtype],
            "elems": self.elems,
            "segments": [list(segment) for segment in self.segments],
        }
        return {**described, "mesh_dims": list(self.mesh_dims)} if self.mesh_dims else described


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a list of parameters in buckets; made by :meth:`assign`.

    Attributes:
        params: all parameters, in the order of the optimizer's groups.
        bucket_elems: maximum number of elements of a bucket that holds more than one parameter.
        buckets: the buckets, in the order of their first parameters.
    """

    params: tuple[ParamSpec, ...]
    bucket_elems: int
    buckets: tuple[BucketLayout, ...]

    @classmethod
    def assign(
        cls, params: Sequence[ParamSpec], bucket_elems: int = DEFAULT_BUCKET_ELEMS
    ) -> ShardLayout:
        """Lays out parameters in order; all parameters of a bucket have equal dtype and mesh_dims.

        Frozen, tied and empty parameters are in no bucket. A parameter larger than ``bucket_elems``
        has a bucket of its own.

        Raises:
            ArgumentError: ``bucket_elems`` is not a positive multiple of 512.
        """
        bucket_elems = checked_bucket_elems(bucket_elems)
        runs: list[list[Segment]] = []
        open_runs: dict[tuple[torch.dtype, tuple[int, ...]], list[Segment]] = {}
        for index, spec in enumerate(params):
            if not spec.in_bucket:
                continue
            kind = spec.dtype, spec.mesh_dims
            run = open_runs.get(kind)
            begin = round_up(run[-1].end, ALIGN_ELEMS) if run else 0
            if run is None or begin + spec.elems > bucket_elems:
                run, begin = [], 0
                open_runs[kind] = run
                runs.append(run)
            run.append(Segment(begin, begin + spec.elems, index))
        buckets = tuple(
            BucketLayout(
                params[run[0].param].dtype,
                round_up(run[-1].end, TILE_ELEMS),
                tuple(run),
                params[run[0].param].mesh_dims,
            )
            for run in runs
        )
        return cls(tuple(params), bucket_elems, buckets)

    def extended(self, params: Sequence[ParamSpec]) -> ShardLayout:
        """Returns the layout with additional parameters, in new buckets after the existing ones."""
        first = len(self.params)
        more = ShardLayout.assign(params, self.bucket_elems)
        moved = tuple(bucket.with_params(lambda param: param + first) for bucket in more.buckets)
        return ShardLayout((*self.params, *params), self.bucket_elems, (*self.buckets, *moved))

    def chunk(self, bucket: int, number: int, world_size: int) -> Chunk:
        """Returns chunk ``number`` of the ``world_size`` chunks of bucket ``bucket``."""
        return self.buckets[bucket].chunk(number, world_size)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all buckets' parameters, including the padding."""
        return sum(bucket.elems * bucket.dtype.itemsize for bucket in self.buckets)

    @cached_property
    def locations(self) -> dict[int, tuple[int, Segment]]:
        """Bucket number and segment of each parameter in a bucket, by parameter index."""
        return {
            segment.param: (number, segment)
            for number, bucket in enumerate(self.buckets)
            for segment in bucket.segments
        }

    def group_table(self, device: torch.device | str = "cpu") -> Tensor:
        """Returns int64 [params]: the group of each parameter."""
        groups = [spec.group for spec in self.params]
        return torch.tensor(groups, dtype=torch.int64, device=device)

    def views(self, bucket: int, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields a bucket's parameters as (index, view into ``flat`` [bucket elements])."""
        for begin, end, param in self.buckets[bucket].segments:
            yield param, self.params[param].view(flat[begin:end])

    def flatten(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies one tensor per parameter into new flat buckets, padded with zeros.

        Args:
            tensors: [params], of the parameters' shapes; entries that are in no bucket are not
                read.
        """
        flats = []
        for number, bucket in enumerate(self.buckets):
            like = tensors[bucket.segments[0].param]
            flat = torch.zeros(bucket.elems, dtype=like.dtype, device=like.device)
            for param, view in self.views(number, flat):
                view.copy_(tensors[param].detach())
            flats.append(flat)
        return flats

    def unflatten(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the parameters that are in a bucket, by index, as views into flat buckets."""
        return {
            param: view
            for number, flat in enumerate(flats)
            for param, view in self.views(number, flat)
        }

    def describe(self) -> dict[str, Any]:
        """Returns the layout as JSON types; equal layouts have equal descriptions."""
        return {
            "version": LAYOUT_VERSION,
            "bucket_elems": self.bucket_elems,
            "params": [spec.describe() for spec in self.params],
            "buckets": [bucket.describe() for bucket in self.buckets],
        }

    def describe_whole(self) -> dict[str, Any]:
        """Returns the specs of whole parameters as JSON types, which do not depend on the shard."""
        return {"params": [spec.describe_whole() for spec in self.params]}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the description, in hexadecimal."""
        return digest_of(self.describe())

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> ShardLayout:
        """Inverse of :meth:`describe`.

        Raises:
            CheckpointError: ``described`` is not a layout's description in this version.
        """
        try:
            if described["version"] != LAYOUT_VERSION:
                raise ValueError(f"version {described['version']}, not {LAYOUT_VERSION}")
            params = tuple(ParamSpec.from_description(each) for each in described["params"])
            buckets = tuple(_bucket_from(each, len(params)) for each in described["buckets"])
            return cls(params, int(described["bucket_elems"]), buckets)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"layout: cannot be read: {error!r}") from error


def digest_of(described: Any) -> str:
    """Returns the SHA-256 of JSON data in hexadecimal, independent of the order of dict keys."""
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _bucket_from(described: Mapping[str, Any], params: int) -> BucketLayout:
    segments = tuple(Segment(*segment) for segment in described["segments"])
    mesh_dims = tuple(described.get("mesh_dims", ()))
    bucket = BucketLayout(DTYPES[described["dtype"]], described["elems"], segments, mesh_dims)
    last = 0
    for begin, end, param in segments:
        if not (last <= begin < end <= bucket.elems and 0 <= param < params):
            raise ValueError(f"segment {begin}..{end} of parameter {param}")
        last = end
    if bucket.elems % TILE_ELEMS:
        raise ValueError(f"bucket of {bucket.elems} elements")
    return bucket
