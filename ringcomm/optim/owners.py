"""Whole parameters on one rank each, their owners, where the state is sharded by elements.

Terms. Chunk r of a bucket, of W chunks, has pieces of several parameters. The *owner* of a
parameter is the rank that brings its pieces together, computes with the whole, and sends each rank
its piece of the result. Both ways are an all-to-all, in which a rank sends on average (W-1)/W^2 of
the bytes. A parameter that lies in its owner's chunk does not travel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import UnsupportedError
from ringcomm.optim.any_torch import StepControl
from ringcomm.optim.buckets import Bucket, empty_for_streams, gather_params
from ringcomm.optim.dtensors import is_distributed
from ringcomm.optim.kernels import Kernels
from ringcomm.optim.layout import Chunk, ParamSpec
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.reduction import Into, Reducer

Tensor = torch.Tensor


def owners_of(costs: Sequence[int], ranks: int) -> list[int]:
    """Gives each parameter an owner, the most expensive first and each to the least busy rank."""
    busy, owners = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owners[number] = min(range(ranks), key=lambda rank: busy[rank])
        busy[owners[number]] += costs[number]
    return owners


@dataclass(frozen=True)
class OwnedParam:
    """A parameter that one rank computes with as a whole: elements [begin, end) of a bucket."""

    index: int
    bucket: int
    begin: int
    end: int
    spec: ParamSpec

    def within(self, chunk: Chunk) -> slice | None:
        """Returns the part of the parameter's elements that a chunk has, or None."""
        low, high = max(self.begin, chunk.begin), min(self.end, chunk.end)
        return slice(low - self.begin, high - self.begin) if low < high else None

    def piece_in(self, flat: Tensor, chunk: Chunk) -> Tensor | None:
        """Returns the parameter's piece of a tensor with a chunk's elements, or None."""
        part = self.within(chunk)
        if part is None:
            return None
        shift = self.begin - chunk.begin
        return flat[part.start + shift : part.stop + shift]


class OwnerExchange:
    """The way of pieces to the owners of parameters, and back.

    Args:
        params: those that travel, in the same order on all ranks.
        costs: of the work for each, by which owners are balanced.
        buckets: by number, those that they lie in.
        sharers: the ranks that share the work; None for this one alone.
        is_replicated: every rank has the pieces of all, as at stage 0.
        dtype: of all tensors.

    Attributes:
        mine: numbers of the parameters that this rank owns.
    """

    def __init__(
        self,
        params: Sequence[OwnedParam],
        costs: Sequence[int],
        buckets: Mapping[int, Bucket],
        sharers: Communicator | None,
        is_replicated: bool,
        dtype: torch.dtype,
    ) -> None:
        self._params = params
        self._dtype = dtype
        self._sharers = sharers
        self._is_replicated = is_replicated
        ranks = 1 if sharers is None else sharers.world_size
        self._ranks = range(ranks)
        self._rank = 0 if sharers is None else sharers.rank
        self._owners = owners_of(costs, ranks)
        self.mine = [number for number, owner in enumerate(self._owners) if owner == self._rank]
        # By parameter, the parts of it that the ranks have.
        self._parts = [self._parts_of(each, buckets[each.bucket]) for each in params]

    def _parts_of(self, param: OwnedParam, bucket: Bucket) -> list[slice | None]:
        if self._sharers is None or self._is_replicated:
            return [param.within(bucket.chunk)] * len(self._ranks)
        return [param.within(chunk) for chunk in bucket.layout.chunks(self._sharers)]

    def _is_whole(self, number: int) -> bool:
        """Tells whether the owner of a parameter has all of it."""
        part = self._parts[number][self._owners[number]]
        return part == slice(0, self._params[number].spec.elems)

    def to_owners(self, pieces: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Returns by number this rank's parameters, whole and flat, which may be changed.

        Args:
            pieces: by number, this rank's piece; None where it has none.
        """
        sent: list[list[Tensor]] = [[] for _ in self._ranks]
        for number, piece in enumerate(pieces):
            if piece is not None and not self._is_whole(number):
                sent[self._owners[number]].append(piece)
        found: dict[int, Tensor] = {}
        room: list[list[Tensor]] = [[] for _ in self._ranks]
        for number in self.mine:
            piece = pieces[number]
            if self._is_whole(number):
                assert piece is not None
                found[number] = piece.clone()
                continue
            found[number] = self._empty(self._params[number].spec.elems)
            for rank in self._ranks:
                part = self._parts[number][rank]
                if part is not None:
                    room[rank].append(found[number][part])
        self._all_to_all(room, sent)
        return found

    def from_owners(
        self,
        wholes: Mapping[int, Tensor],
        room_for: Mapping[int, Tensor],
        shared: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        """Fills each rank's pieces with those of the wholes that the owners have.

        Args:
            wholes: by number, this rank's parameters, flat.
            room_for: by number, this rank's piece of each parameter that it has a part of.
            shared: by number, tensors that all ranks get as the owner has them.
        """
        sent: list[list[Tensor]] = [[] for _ in self._ranks]
        for number, whole in wholes.items():
            for rank in self._ranks:
                part = self._parts[number][rank]
                if part is not None:
                    sent[rank].append(whole[part])
                if rank != self._rank and shared:
                    sent[rank] += [each.reshape(-1) for each in shared[number]]
        room: list[list[Tensor]] = [[] for _ in self._ranks]
        for number, owner in enumerate(self._owners):
            if number in room_for:
                room[owner].append(room_for[number])
            if owner != self._rank and shared:
                room[owner] += [each.view(-1) for each in shared[number]]
        self._all_to_all(room, sent)

    def _empty(self, elems: int) -> Tensor:
        device = "cpu" if self._sharers is None else self._sharers.device
        return torch.empty(elems, dtype=self._dtype, device=device)

    def _all_to_all(self, room: Sequence[list[Tensor]], sent: Sequence[list[Tensor]]) -> None:
        """Fills the tensors of ``room[r]`` with those that rank r sends, in their order."""
        outputs = [self._empty(sum(each.numel() for each in tensors)) for tensors in room]
        inputs = [torch.cat(tensors) if tensors else self._empty(0) for tensors in sent]
        if self._sharers is None or self._sharers.world_size == 1:
            outputs = inputs
        else:
            self._sharers.all_to_all(outputs, inputs)
        for output, tensors in zip(outputs, room, strict=True):
            end = 0
            for tensor in tensors:
                begin, end = end, end + tensor.numel()
                tensor.copy_(output[begin:end])


class OwnerKernels(Kernels):
    """A step whose updates need whole parameters: buckets are taken up first, and updated later.

    It reads on the host whether a step is skipped, and which parameters have gradients. Parameters
    that may be away it has in memory while it uses them.

    Args:
        alone: there are no other ranks.
        reducer: reduces gradients.
        sharers: the ranks that share the state; None for this one alone.
    """

    def __init__(self, alone: bool, reducer: Reducer, sharers: Communicator | None) -> None:
        super().__init__(alone, reducer)
        self.sharers = sharers
        self.control = StepControl()
        self._gathers = False

    def update_shard(self, bucket: Bucket, grad: Tensor) -> None:
        self._gathers = False
        self.take_up(bucket, grad)

    def update_gather(self, bucket: Bucket, grad: Tensor) -> None:
        self._gathers = True
        self.take_up(bucket, grad)

    def one_pass(self, bucket: Bucket, grads: Tensor) -> None:
        if self.control.skips:
            return
        own = empty_for_streams(bucket.chunk.elems, torch.float32, grads.device)
        into = Into(own, "l2", None, tag=bucket.tag(), residual=bucket.residual)
        self.reducer.reduce(grads, into)
        self.update_gather(bucket, own)

    @abstractmethod
    def take_up(self, bucket: Bucket, grad: Tensor) -> None:
        """Takes up a bucket that is to be updated by the end of the step.

        Args:
            bucket: the bucket.
            grad: [chunk elements], the reduced gradient, which lasts to the end of the step.
        """

    def scaled(self, grad: Tensor) -> Tensor:
        """Returns a gradient as float32, multiplied by the step's factors."""
        found = grad.to(torch.float32)
        for factor in self.control.factors:
            found = found * factor
        return found

    def publish(self, buckets: Iterable[Bucket]) -> None:
        """Gives all ranks the chunks of parameters that were updated."""
        for bucket in buckets:
            if self._gathers and self.sharers is not None:
                gather_params(bucket, self.sharers)
            else:
                bucket.share()


def refuse_other_options(name: str, options: AdamWOptions) -> None:
    """Raises UnsupportedError unless the options are those that owners' steps have."""
    if options.kernels != "native" or options.master == "remainder":
        raise UnsupportedError(
            f'{name}: expected kernels="native" and master="fp32", got '
            f"kernels={options.kernels!r} and master={options.master!r}"
        )
    if options.rounding != "nearest":
        raise UnsupportedError(f'{name}: expected rounding="nearest", got "stochastic"')


def params_of(entries: Sequence[object]) -> list[tuple[str, Tensor]]:
    """Returns a group's parameters that are tensors, each with its words for an error."""
    bare = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return [
        (f"parameter {number}", param)
        for number, param in enumerate(bare)
        if isinstance(param, Tensor)
    ]


def is_divided(param: Tensor) -> bool:
    """Returns whether ranks of a mesh have different parts of a parameter."""
    return is_distributed(param) and any(each.is_shard() for each in param.placements)  # type: ignore[attr-defined]
