# SPDX-License-Identifier: Apache-2.0
"""Formulas for the memory, traffic and time of sharded training; see ``docs/estimate.md``."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import NamedTuple

import torch
from torch import nn

from ringcomm import _native
from ringcomm.errors import ArgumentError
from ringcomm.memory import Disk
from ringcomm.offload.scratch import PAGE_BYTES, rounded_up
from ringcomm.optim import AdamWOptions, ParamSpec
from ringcomm.optim.layout import TILE_ELEMS, round_up
from ringcomm.optim.state_offload import PINNED_BUFFER_BYTES, elems_of_pieces, piece_elems
from ringcomm.zero import ZeroOptions
from ringcomm.zero.stages.options import Units
from ringcomm.zero.stages.units import find_units

CHECKPOINTING = ("none", "selective", "full")


def require_at_least(what: str, least: int, **values: int) -> None:
    """Raises ArgumentError for the first of ``values`` that is not an integer >= ``least``."""
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ArgumentError(f"{what}: expected {name} of at least {least}, got {value!r}")


@dataclass(frozen=True)
class ModelElems:
    """Elements of a model's parameters, each parameter counted once.

    Attributes:
        trainable: elements of parameters with gradients.
        frozen: elements of parameters without gradients.
        largest: elements of the largest trainable parameter; 0 if unknown.
        units: elements of each unit that stage 3 unshards, including frozen elements; () if
            unknown.
        root: elements outside the units, which stage 3 keeps unsharded while it computes.
    """

    trainable: int
    frozen: int = 0
    largest: int = 0
    units: tuple[int, ...] = ()
    root: int = 0

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "units"}
        require_at_least("model", 0, **sizes)

    @property
    def total(self) -> int:
        return self.trainable + self.frozen

    @property
    def has_units(self) -> bool:
        """True if the units of stage 3 are known."""
        return bool(self.units) or self.root > 0

    @classmethod
    def of_module(cls, module: nn.Module, units: Units | None = None) -> ModelElems:
        """Counts a module's parameters, but no buffers; the module may be on the meta device.

        Args:
            module: a module with parameters of float32, bfloat16 or float16.
            units: as in :class:`ringcomm.zero.ZeroOptions`.

        Raises:
            ArgumentError: a parameter has another dtype or no shape yet, or ``units`` is invalid.
        """
        by_unit = [
            [_spec(*each) for each in unit.params.items()] for unit in find_units(module, units)
        ]
        specs = [spec for each in by_unit for spec in each]
        trainable = [spec.elems for spec in specs if spec.trainable]
        root, *sizes = [sum(spec.elems for spec in each) for each in by_unit]
        return cls(
            trainable=sum(trainable),
            frozen=sum(spec.elems for spec in specs if not spec.trainable),
            largest=max(trainable, default=0),
            units=tuple(size for size in sizes if size),
            root=root,
        )


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    if nn.parameter.is_lazy(param):
        raise ArgumentError(f"model: parameter {name} has no shape before the first forward")
    return ParamSpec.of(param, name=name)


class ActivationBytes(NamedTuple):
    """The bytes that a rank's activations take between forward and backward.

    Attributes:
        layers: tensors that the layers keep for the backward, or their checkpoints.
        recomputed: tensors that the backward computes again, as many as it holds at a time.
        ends: the embedding's dropout mask, the inputs of the last norm and of the output layer, and
            the FP32 logits.
        moved: bytes that the forward writes to a disk and the backward reads.
    """

    layers: int
    recomputed: int
    ends: int
    moved: int = 0

    def kept_on(self, disk: Disk, layer: int) -> ActivationBytes:
        """Returns the bytes with ``zero.activations_on(disk)``; ``layers`` then include ``ends``.

        In memory are the disk's buffers, resident tensors, and the larger of ``layer`` and
        ``ends``.
        """
        kept = self.layers + self.ends
        at_work = max(self.ends, layer - self.recomputed)
        most = disk.buffer_bytes + disk.resident_bytes + at_work
        moved = max(0, kept - disk.resident_bytes)
        return ActivationBytes(min(kept, most), self.recomputed, 0, moved)


@dataclass(frozen=True)
class Transformer:
    """The sizes of a GPT-2: pre-norm decoder layers with biases, and learned positions.

    Attributes:
        layers: number of layers, each with four width x width matrices and an MLP of 4 x width.
        width: channels of a token, a multiple of ``heads``.
        heads: attention heads.
        context: tokens of a sequence.
        vocab: entries of the vocabulary.
        tied: True if the output layer uses the matrix of the embedding.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in vars(self).items() if name != "tied"}
        require_at_least("transformer", 1, **sizes)
        if self.width % self.heads:
            raise ArgumentError(
                f"transformer: expected a width that is a multiple of {self.heads} heads, got "
                f"{self.width}"
            )

    @property
    def model(self) -> ModelElems:
        """The elements of all parameters, all trainable; each layer is a unit."""
        layer = 12 * self.width**2 + 13 * self.width  # matrices; biases and two norms
        ends = ((1 if self.tied else 2) * self.vocab + self.context + 2) * self.width
        return ModelElems(
            trainable=self.layers * layer + ends,
            largest=self.width * max(4 * self.width, self.vocab, self.context),
            units=(layer,) * self.layers,
            root=ends,
        )

    def attention_core_bytes(self, micro_batch: int, elem_bytes: int = 2) -> int:
        """Returns the bytes of the attention's softmax, dropout mask and dropout output.

        With 16-bit elements they are 5 x heads x context^2 x sequences.
        """
        return (2 * elem_bytes + 1) * self.heads * self.context**2 * micro_batch

    def layer_bytes(self, micro_batch: int, elem_bytes: int = 2) -> int:
        """Returns the bytes that a layer keeps for backward, with :meth:`attention_core_bytes`.

        With 16-bit elements the rest is 34 bytes per channel of each token.
        """
        plane = self.context * micro_batch * self.width
        core = self.attention_core_bytes(micro_batch, elem_bytes)
        return (16 * elem_bytes + 2) * plane + core

    def activations(
        self, micro_batch: int, checkpointing: str = "none", every: int = 1, elem_bytes: int = 2
    ) -> ActivationBytes:
        """Returns the activations of one rank.

        Args:
            micro_batch: sequences of a forward.
            checkpointing: "none"; "selective", which computes softmax, dropout and output of the
                attention again; or "full", which keeps only the input of every ``every``-th layer.
            every: layers between two checkpoints of "full".
            elem_bytes: bytes of an activation.

        Raises:
            ArgumentError: an argument is out of range.
        """
        if checkpointing not in CHECKPOINTING:
            known = ", ".join(CHECKPOINTING)
            raise ArgumentError(f"checkpointing: expected one of {known}, got {checkpointing!r}")
        sizes = {"micro_batch": micro_batch, "every": every, "elem_bytes": elem_bytes}
        require_at_least("activations", 1, **sizes)
        tokens = self.context * micro_batch
        plane = tokens * self.width
        core = self.attention_core_bytes(micro_batch, elem_bytes)
        layer = self.layer_bytes(micro_batch, elem_bytes)
        checkpoints = -(-self.layers // every) * elem_bytes * plane
        kept, again = {
            "none": (self.layers * layer, 0),
            "selective": (self.layers * (layer - core), core),
            "full": (checkpoints, min(every, self.layers) * layer),
        }[checkpointing]
        ends = (1 + 2 * elem_bytes) * plane + 4 * tokens * self.vocab
        return ActivationBytes(kept, again, ends)


# ---- State on a disk or on the host, and parameters on a disk: bytes of a rank, and time ---------

GIGA = 1e9


class SwapUnits(NamedTuple):
    """Some consecutive swap units of one size; one transfer moves one swap unit."""

    size_bytes: int
    number: int


def bytes_of(units: Sequence[SwapUnits], begin: int = 0, end: int | None = None) -> int:
    """Returns the bytes of swap units [begin, end)."""
    found, at = 0, 0
    for size, count in units:
        last = at + count if end is None else min(end, at + count)
        found += max(0, last - max(begin, at)) * size
        at += count
    return found


def moving(units: Sequence[SwapUnits], disk: Disk) -> list[SwapUnits]:
    """Returns the units that move; the last ones stay in memory, up to ``disk.resident_bytes``."""
    left, rest = disk.resident_bytes, list(units)
    while rest:
        size, count = rest.pop()
        kept = min(count, left // size) if size else 0
        left -= kept * size
        if kept < count:
            return [*rest, SwapUnits(size, count - kept)]
    return []


class DiskTime(NamedTuple):
    """Seconds of a step's reads and writes; ``between_s`` of them can overlap with computing."""

    read_s: float
    write_s: float
    between_s: float

    def added_s(self, compute_s: float) -> float:
        """Returns the seconds by which the disk lengthens a step that computes ``compute_s``."""
        return self.read_s + self.write_s - min(self.between_s, compute_s)


class OffloadBytes(NamedTuple):
    """The bytes that a rank's offloaded state or parameters take and move.

    Attributes:
        buffers: bytes of the buffers in memory, which swap units use in turn.
        resident: bytes of swap units that stay in memory.
        stored: bytes of the file, or of pinned memory of the host.
        read: bytes that a step reads, at most.
        written: bytes that a step writes.
        ahead: the part of ``read`` that can be read while the model computes.
        behind: the part of ``written`` that can be written while the model computes.
    """

    buffers: int = 0
    resident: int = 0
    stored: int = 0
    read: int = 0
    written: int = 0
    ahead: int = 0
    behind: int = 0

    @classmethod
    def of_state(cls, units: Sequence[SwapUnits], disk: Disk) -> OffloadBytes:
        """Returns the bytes of a state whose swap units a step visits in this order."""
        rest = moving(units, disk)
        resident, total = bytes_of(units) - bytes_of(rest), sum(count for _, count in rest)
        if not total:
            return cls(resident=resident)
        size = max(PAGE_BYTES, *(size for size, _ in rest))
        buffers = min(total, disk.buffer_bytes // size)
        # Buffer b has units b, b + buffers, ...: only the first ``sharing`` buffers have several.
        sharing = min(buffers, total - buffers)
        ahead, behind = bytes_of(rest, 0, sharing), bytes_of(rest, total - sharing)
        moved = ahead + bytes_of(rest, buffers)
        return cls(buffers * size, resident, bytes_of(rest), moved, moved, ahead, behind)

    @classmethod
    def of_params(
        cls,
        frozen: Sequence[SwapUnits],
        trained: Sequence[SwapUnits],
        disk: Disk,
        has_masters: bool,
    ) -> OffloadBytes:
        """Returns the bytes of parameters at stage 3, whose chunks are swap units of whole pages.

        Forward, backward and optimizer each read every chunk that is not resident, except that an
        optimizer with FP32 masters reads no chunk. Chunks that are still in buffers count as read.
        """
        chunks = [*frozen, *trained]
        stored = bytes_of(moving(chunks, disk))
        largest = max((size for size, _ in chunks), default=0)
        buffers = min(stored, max(disk.buffer_bytes, largest))
        written = min(stored, bytes_of(trained))
        ahead = 2 * stored if stored > buffers else 0
        read = ahead + (written if ahead and not has_masters else 0)
        resident = bytes_of(chunks) - stored
        return cls(buffers, resident, stored, read, written, ahead, min(written, buffers))

    def time(self, ranks_per_node: int, read: float, write: float) -> DiskTime:
        """Returns the time if ``ranks_per_node`` ranks share a disk; reads and writes alternate.

        ``read`` and ``write`` are the rates of the node's disk, in 1e9 bytes/s.
        """
        require_positive(disk_read=read, disk_write=write)
        read_s, write_s = ranks_per_node / (read * GIGA), ranks_per_node / (write * GIGA)
        between_s = self.ahead * read_s + self.behind * write_s
        return DiskTime(self.read * read_s, self.written * write_s, between_s)


def require_positive(**values: float) -> None:
    """Raises ArgumentError for the first of ``values`` that is not above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ArgumentError(f"time: expected {name} above 0 and finite, got {value!r}")


# ---- Memory, traffic and time of sharded data-parallel training, by stage ------------------------

STAGES = (0, 1, 2, 3)
FP32_BYTES = 4
# The number of elements of an 8-bit moment that share an exponent of one byte.
MOMENT_BLOCK = _native.MOMENT_BLOCK_ELEMS


class BytesPerElement(NamedTuple):
    """The bytes that one element of a parameter takes in each tensor of the training state.

    ``grad`` is for the gradient after a backward, ``reduced`` for the reduced gradient, ``maximum``
    for amsgrad's maximum. A moment of one byte per element also has exponents.
    """

    param: int
    grad: int
    reduced: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    maximum: int

    def state_tensors(self, elems: int) -> list[int]:
        """Returns the bytes of each tensor of the optimizer's state for ``elems`` elements."""
        exponents = -(-elems // MOMENT_BLOCK)
        moments = (self.exp_avg, self.exp_avg_sq)
        sizes = [each * elems + (exponents if each == 1 else 0) for each in moments]
        sizes = [self.master * elems, *sizes, self.maximum * elems]
        return [size for size in sizes if size]


class StateBytes(NamedTuple):
    """The bytes of a rank's parameters, gradients and optimizer state."""

    params: int
    grads: int
    state: int


class WorkingBytes(NamedTuple):
    """The bytes of a rank's working buffers.

    ``buckets`` are the buckets of full gradients before reduction, or at stage 0 of gathered sums.
    ``units`` are unsharded parameters, 0 if the model's units are unknown. ``grad_shard`` is the
    reduced gradient if the model state does not include it.
    """

    buckets: int
    units: int
    grad_shard: int


def check_stage(stage: int) -> None:
    """Raises ArgumentError unless ZeRO has the stage."""
    if stage not in STAGES:
        raise ArgumentError(f"stage: expected 0, 1, 2 or 3, got {stage!r}")


def _share(elems: int, shares: int) -> int:
    """Returns the elements of the largest of ``shares`` shards."""
    return -(-elems // shares)


def quantized_bytes(compression: str, elems: int) -> int:
    """Returns the bytes of ``elems`` FP32 numbers in a quantized format."""
    return _native.quantized_bytes(_native.QUANT_FORMATS[compression], elems)


@dataclass(frozen=True)
class Training:
    """A training run; methods return the bytes of the rank that needs most, without padding.

    Methods raise ArgumentError for a stage that is not 0 to 3.

    Attributes:
        model: sizes of the model; frozen parameters have neither gradient nor state.
        ranks: number of ranks on all nodes.
        nodes: number of nodes; all have equally many ranks.
        options: as for :func:`ringcomm.zero.shard`; parameters count as float32 without
            ``precision.param``. At stages 0 to 2 ``offload_params`` has no effect.
        optimizer: as for :class:`ringcomm.optim.AdamW`; ``options.precision`` has priority.
        amsgrad: True if the optimizer keeps the maximum of the second moment.
        quantized_state: True for :class:`ringcomm.optim.AdamW8bit`.
        two_passes: True if steps are clipped, scaled or checked.

    Raises:
        ArgumentError: a size is not positive, or ringcomm does not support the combination.
    """

    model: ModelElems
    ranks: int
    nodes: int = 1
    options: ZeroOptions = field(default_factory=ZeroOptions)
    optimizer: AdamWOptions = field(default_factory=AdamWOptions)
    amsgrad: bool = False
    quantized_state: bool = False
    two_passes: bool = False

    def __post_init__(self) -> None:
        require_at_least("training", 1, ranks=self.ranks, nodes=self.nodes)
        if self.ranks % self.nodes:
            raise ArgumentError(
                f"nodes: expected a divisor of {self.ranks} ranks, got {self.nodes}"
            )
        if self.amsgrad and self.quantized_state:
            raise ArgumentError("amsgrad: AdamW8bit keeps no maximum; drop one of the two")
        if self.two_passes and self.optimizer.update == "in_backward":
            raise ArgumentError('update: expected "in_step" for steps of two passes')
        chosen = replace(self.optimizer, **self.options.precision.optimizer_defaults)
        object.__setattr__(self, "optimizer", chosen)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of a node."""
        return self.ranks // self.nodes

    @property
    def each(self) -> BytesPerElement:
        """The bytes per element in each tensor, if nodes exchange parameters unquantized."""
        precision, moment = self.options.precision, 1 if self.quantized_state else 4
        param = precision.param or torch.float32
        masters = {"fp32": 4, "remainder": 2, "none": 0}
        return BytesPerElement(
            param=param.itemsize,
            grad=(self.optimizer.accumulate_dtype or param).itemsize,
            reduced=precision.reduced_dtype(param).itemsize,
            master=0 if param is torch.float32 else masters[self.optimizer.master],
            exp_avg=moment,
            exp_avg_sq=moment,
            maximum=4 if self.amsgrad else 0,
        )

    @property
    def _param_shares(self) -> int:
        return self.ranks if self.options.params == "world" else self.ranks_per_node

    def _state_shares(self, stage: int) -> int:
        check_stage(stage)
        if stage == 0:
            return 1
        return self.ranks if self.options.state == "world" else self.ranks_per_node

    def _quantizes_params(self, stage: int) -> bool:
        return self.nodes > 1 and stage > 0 and self.options.compression.quantizes_parameters

    @property
    def _offload(self) -> Disk:
        """The offload of the optimizer's state; raises ArgumentError if the state is in memory."""
        offload = self.optimizer.offload_state
        if offload is None:
            raise ArgumentError(
                "offload_state: expected the optimizer's state outside memory, got None"
            )
        return offload if isinstance(offload, Disk) else Disk(offload, PINNED_BUFFER_BYTES)

    def state(self, stage: int) -> StateBytes:
        """Returns the model state in memory; of offloaded state only buffers and resident bytes."""
        model, each, disk = self.model, self.each, self.options.offload_params
        shard = _share(model.trainable, self._state_shares(stage))
        params = each.param * model.total
        if stage == 3:
            shares = self._param_shares
            params = each.param * (_share(model.trainable, shares) + _share(model.frozen, shares))
            if disk is not None:
                buffers = max(disk.buffer_bytes, each.param * _share(model.largest, shares))
                params = min(params, buffers + disk.resident_bytes)
        if self._quantizes_params(stage):
            each = each._replace(master=FP32_BYTES)
        grads, state = each.grad * model.trainable, sum(each.state_tensors(shard))
        if stage >= 2:
            grads = each.reduced * shard if self.optimizer.update == "in_step" else 0
        if self.optimizer.offload_state is not None:
            state = min(state, self._offload.buffer_bytes + self._offload.resident_bytes)
        return StateBytes(params, grads, state + self._error_feedback_bytes(stage))

    def _error_feedback_bytes(self, stage: int) -> int:
        """Returns the bytes of a rank's error-feedback buffers."""
        if self.nodes == 1 or not self.options.compression.error_feedback:
            return 0
        # If each node has a copy of the state, sums are quantized as well, except at stage 0.
        sums = stage > 0 and self.options.state == "node"
        elems = _share(self.model.trainable, self.ranks_per_node)
        return FP32_BYTES * (elems + (_share(self.model.trainable, self.ranks) if sums else 0))

    @property
    def largest_bucket(self) -> int:
        """Elements of the largest bucket; no bucket spans two units or divides a parameter."""
        model = self.model
        unit = max((*model.units, model.root)) if model.has_units else model.trainable
        return min(model.trainable, max(model.largest, min(self.options.bucket_elems, unit)))

    def buffers(self, stage: int) -> WorkingBytes:
        """Returns the working buffers, which ``docs/estimate.md`` explains."""
        model, each, options, bucket = self.model, self.each, self.options, self.largest_bucket
        shares, alone = self._state_shares(stage), self.ranks == 1
        offload = self.optimizer.offload_state
        if stage == 0:
            own = _share(model.trainable, self.ranks)
            return WorkingBytes(each.reduced * bucket, 0, each.reduced * own)
        # A gradient that is rounded after the reduction needs a separate reduction pass.
        one_pass = not (self.two_passes or alone) and each.reduced == FP32_BYTES
        of_bucket = _share(bucket, shares)
        chunk = of_bucket if one_pass and offload is not None else 0
        if stage == 1:
            shard = _share(model.trainable, shares) if self.two_passes and not alone else 0
            return WorkingBytes(0, 0, each.reduced * (shard + chunk))
        buckets = min(options.in_flight, -(-model.trainable // bucket)) if bucket else 0
        fetched = 0 if options.overlap is False else options.prefetch
        shown = fetched + 1 if options.reshard_after_forward else len(model.units)
        units = each.param * (model.root + sum(heapq.nlargest(shown, model.units)))
        grad_shard = each.reduced * chunk if stage == 2 and isinstance(offload, Disk) else 0
        if self.optimizer.update == "in_backward":
            in_one_pass = stage == 2 and (offload is None or alone)
            grad_shard = 0 if in_one_pass else each.reduced * of_bucket
            if each.reduced < FP32_BYTES:  # the gradient before and after rounding
                grad_shard = (FP32_BYTES + each.reduced) * of_bucket
        return WorkingBytes(each.grad * bucket * buckets, units if stage == 3 else 0, grad_shard)

    def _chunks(self, elems: int, shares: int) -> Iterator[tuple[int, int]]:
        """Yields (elements of a chunk, number of chunks) for a rank's full and last buckets."""
        bucket = self.largest_bucket
        whole, rest = divmod(elems, bucket) if bucket else (0, 0)
        for size, count in ((bucket, whole), (rest, 1)):
            if size and count:
                yield round_up(_share(size, shares), TILE_ELEMS), count

    def swap_units(self, elems: int, count: int) -> list[SwapUnits]:
        """Returns the swap units of offloaded state, for ``count`` chunks of ``elems`` elements."""
        size = elems_of_pieces(elems, piece_elems(self._offload.buffer_bytes))
        equal = (elems - 1) // size
        sizes = ((size, equal * count), (elems - equal * size, count))
        return [
            SwapUnits(sum(map(rounded_up, self.each.state_tensors(each))), number)
            for each, number in sizes
            if number
        ]

    def offloaded_state(self, stage: int) -> OffloadBytes:
        """Returns the bytes of offloaded optimizer state, if all buckets have the largest size.

        Raises:
            ArgumentError: the state is in memory, or the buffers are too small.
        """
        chunks = self._chunks(self.model.trainable, self._state_shares(stage))
        units = [each for chunk in chunks for each in self.swap_units(*chunk)]
        return OffloadBytes.of_state(units, self._offload)

    def offloaded_params(self) -> OffloadBytes:
        """Returns the bytes of parameters on a disk at stage 3, if buckets have the largest size.

        Raises:
            ArgumentError: the parameters are in memory.
        """
        if self.options.offload_params is None:
            raise ArgumentError("offload_params: expected the parameters on a disk, got None")
        each = self.each
        frozen, trained = (
            [
                SwapUnits(rounded_up(each.param * chunk), count)
                for chunk, count in self._chunks(elems, self._param_shares)
            ]
            for elems in (self.model.frozen, self.model.trainable)
        )
        return OffloadBytes.of_params(
            frozen, trained, self.options.offload_params, each.master >= FP32_BYTES
        )

    def traffic(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Returns (elements, bytes per element) of a step's reduce-scatters and all-gathers.

        Stage 0 reduces gradients and gathers sums. Stages 1 and 2 reduce gradients and gather
        parameters. Stage 3 reduces gradients and unshards all parameters, including frozen ones,
        for the forward and for the backward. Gradients move in their own dtype.
        """
        check_stage(stage)
        elems, each = self.model.trainable, self.each
        if stage == 0:
            return (elems, each.grad), (elems, each.reduced)
        gathers = (elems, each.param), (self.model.frozen, each.param)
        return ((elems, each.grad), *(gathers[:1] if stage < 3 else gathers * 2))

    def sent_bytes(self, stage: int, ranks: int | None = None) -> int:
        """Returns the bytes that a rank sends in a step to ``ranks`` ranks (default: all)."""
        ranks = ranks or self.ranks
        return sum((elems - elems // ranks) * size for elems, size in self.traffic(stage))

    def leaving_node_bytes(self, stage: int) -> int:
        """Returns the bytes that leave each node in a step of one backward.

        On N nodes (N - 1) / N of the gradients and of the updated parameters leave a node; at stage
        0 and with ``state="node"``, sums of gradients leave it instead of parameters. With
        ``params="world"`` stage 3 unshards the parameters over the network in forward and in
        backward, but the parameters of ``model.root`` only once. The padding of buckets, which
        matters for models of a few thousand elements, is not counted.
        """
        model, each, options = self.model, self.each, self.options
        compression = options.compression.gradients
        grads = sums = model.trainable * FP32_BYTES
        if compression in _native.QUANT_FORMATS:
            grads = sums = quantized_bytes(compression, model.trainable)
        elif compression == "param":
            grads = model.trainable * each.grad
        back = self._params_bytes(model.trainable, stage)
        if stage == 0:
            back = model.trainable * each.reduced
        elif options.state == "node":
            back = sums
        elif stage == 3 and options.params == "world":
            back = self._params_bytes(2 * model.trainable - model.root, stage)
            back += 2 * model.frozen * each.param
        return (grads + back) * (self.nodes - 1) // self.nodes

    def _params_bytes(self, elems: int, stage: int) -> int:
        if self._quantizes_params(stage):
            return quantized_bytes(self.options.compression.parameters, max(elems, 0))
        return elems * self.each.param

    def communication_s(
        self,
        stage: int,
        bandwidth: float,
        network: float | None = None,
        latency_us: float = 14.3,
        message_us: float = 1.0,
    ) -> float:
        """Returns the seconds of a step's collectives if buckets follow one another.

        The time has two parts: a rank sends bytes within its node, and each node sends bytes over
        the network. Between nodes each bucket needs two one-shot calls: one for gradients, and one
        for parameters or sums. It needs three if stage 3 unshards over the network.

        Args:
            stage: 0 to 3.
            bandwidth: 1e9 bytes/s that a rank sends to the ranks of its node.
            network: 1e9 bytes/s that a rank sends to other nodes while all ranks of its node send.
            latency_us: microseconds from the end of a message between nodes until the receiver
                continues; the defaults are assumptions, which ``docs/scaling.md`` explains.
            message_us: microseconds that a message occupies the network in addition to its bytes.

        Raises:
            ArgumentError: a rate is missing, or not positive and finite.
        """
        require_positive(bandwidth=bandwidth)
        seconds = self.sent_bytes(stage, self.ranks_per_node) / (bandwidth * GIGA)
        if self.nodes == 1:
            return seconds
        if network is None:
            raise ArgumentError("time: expected the rate of the network between nodes, got None")
        require_positive(network=network)
        calls = 2 * -(-self.model.trainable // self.options.bucket_elems)
        if stage == 3 and self.options.params == "world":
            calls = calls // 2 + 2 * -(-self.model.total // self.options.bucket_elems)
        call_us = latency_us + (self.nodes - 1) * message_us
        leaving_s = self.leaving_node_bytes(stage) / (self.ranks_per_node * network * GIGA)
        return seconds + calls * call_us / 1e6 + leaving_s

    def flops(self, tokens: int, recompute: bool = False) -> int:
        """Returns the operations of a rank in a step, without the operations on attention scores.

        Each parameter takes 2 operations per token in forward and 4 in backward, and 2 more if full
        checkpointing runs the forward twice (``recompute``).
        """
        require_at_least("step", 1, tokens=tokens)
        return (8 if recompute else 6) * tokens * self.model.total


# ---- Memory and traffic of a layer of experts, by the ranks that divide the experts --------------

# Bytes that dispatch sends with each row to another node: three words (token, assignment, weight).
ENTRY_BYTES = 3 * 8


class ExpertBytes(NamedTuple):
    """Bytes that a rank sends to other nodes in each call and its backward, on average."""

    dispatch: float
    combine: float
    combine_backward: float
    dispatch_backward: float


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts that are divided over ranks.

    Attributes:
        experts: experts of all ranks.
        top_k: number of experts per token.
        hidden: elements of a token.
        tokens: tokens of a rank in a forward.
        params: elements of an expert's parameters.
        group: number of ranks that divide the experts: a divisor of a node's ranks, or whole nodes.
        ranks: number of ranks on all nodes; the ranks with the same experts share their state.
        nodes: number of nodes; all have equally many ranks.
        elem_bytes: bytes of an element of a token.
        compression: None, or the quantized format of dispatch, "int8" or "fp8".

    Raises:
        ArgumentError: a size is not positive, or the group does not divide experts and ranks.
    """

    experts: int
    top_k: int
    hidden: int
    tokens: int
    params: int
    group: int
    ranks: int
    nodes: int = 1
    elem_bytes: int = 2
    compression: str | None = None

    def __post_init__(self) -> None:
        sizes = {name: each for name, each in vars(self).items() if name != "compression"}
        require_at_least("experts", 1, **sizes)
        if self.top_k > self.experts:
            raise ArgumentError(f"experts: expected top-k of at most {self.experts} experts")
        fits = self.ranks % self.nodes == 0
        fits = fits and 0 in (self._ranks_per_node % self.group, self.group % self._ranks_per_node)
        if not fits or self.ranks % self.group or self.experts % self.group:
            raise ArgumentError(
                f"experts: expected a group that divides a node's ranks or is whole nodes, and "
                f"divides {self.ranks} ranks and {self.experts} experts, got {self.group}"
            )
        if self.compression not in (None, "int8", "fp8"):
            raise ArgumentError(
                f"experts: compression: expected None, int8 or fp8, got {self.compression!r}"
            )

    @property
    def _ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def row_bytes(self) -> int:
        """Bytes of a token or of a row that is not quantized."""
        return self.hidden * self.elem_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of a token as dispatch sends it, quantized or not."""
        return (
            self.row_bytes
            if self.compression is None
            else quantized_bytes(self.compression, self.hidden)
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank's rows and two send buffers, if experts get equally many tokens."""
        rows = self.tokens * self.top_k * self.row_bytes
        return rows + 2 * max(rows, self.tokens * self.payload_bytes)

    def training(self, options: ZeroOptions) -> Training:
        """Returns the training of a rank's experts, sharded over the ranks with these experts."""
        replicas, per_node = self.ranks // self.group, max(1, self._ranks_per_node // self.group)
        model = ModelElems(self.experts // self.group * self.params)
        return Training(model, replicas, replicas // per_node, options)

    def between_nodes(self) -> ExpertBytes:
        """Returns the bytes of tokens and rows, without headers and counts."""
        nodes, k = max(1, self.group // self._ranks_per_node), self.top_k
        none = comb(self.experts - self.experts // nodes, k) / comb(self.experts, k)
        crossings = self.tokens * (nodes - 1) * (1 - none)
        rows = self.tokens * k * (nodes - 1) / nodes
        return ExpertBytes(
            dispatch=crossings * self.payload_bytes + rows * ENTRY_BYTES,
            combine=rows * self.row_bytes,
            combine_backward=crossings * self.row_bytes + rows * FP32_BYTES,
            dispatch_backward=rows * self.row_bytes,
        )
