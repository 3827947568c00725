"""The memory of buckets: parameters and gradients in the heap, and state of this rank's chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch.autograd.graph import increment_version

from ringcomm import _native
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import DTYPE_CODES
from ringcomm.comm.nodes.compressed_sums import ErrorFeedback
from ringcomm.memory import zeros
from ringcomm.optim.dtensors import (
    TORCH_CLASSES,
    apart,
    is_distributed,
    local_of,
    set_local,
    without_torch_function,
)
from ringcomm.optim.layout import BucketLayout, Chunk, ShardLayout
from ringcomm.optim.options import AdamWOptions

# ---- 8-bit moments in torch: what the kernels keep, and how it is made --------------------------
# Twin of ``kernels/include/ringcomm/optimizer/quantized_moments.h``, which says what a value means
# and why it is rounded so. Checkpoints go through it, and tests hold the kernels to it.

Tensor = torch.Tensor

#: Elements that share an exponent.
MOMENT_BLOCK = _native.MOMENT_BLOCK_ELEMS

_CUT_BITS = 20
_ONE_EXPONENT = 1 << 23
_LEAST_EXPONENT = 36
_NOT_FINITE = 255 - _LEAST_EXPONENT
_WORD = (1 << 32) - 1

#: In place of random bits, this rounds to the nearest value; of two, to the larger magnitude.
TO_NEAREST = 1 << (_CUT_BITS - 1)


@dataclass(frozen=True)
class MomentFormat:
    """The numbers that a moment can be.

    Attributes:
        below: number of exponents of normal numbers below that of the quantization block.
        signed: True if a value has a sign, its highest bit.
    """

    below: int
    signed: bool

    def least_normal(self, exponents: Tensor) -> Tensor:
        """Returns the bits of the smallest normal numbers of quantization blocks: int32."""
        return (exponents.to(torch.int32) + (_LEAST_EXPONENT - self.below)) << 23

    def dequantize(self, values: Tensor, exponents: Tensor) -> Tensor:
        """Returns the numbers of quantized values.

        Args:
            values: uint8 [blocks, MOMENT_BLOCK].
            exponents: uint8 [blocks].

        Returns:
            float32 [blocks, MOMENT_BLOCK].
        """
        least = self.least_normal(exponents)[:, None]
        wide = values.to(torch.int32)
        magnitude = wide & 0x7F if self.signed else wide
        bits = least + (magnitude << _CUT_BITS)
        subnormal = bits.view(torch.float32) - least.view(torch.float32)
        normal = (bits - _ONE_EXPONENT).view(torch.float32)
        numbers = torch.where(magnitude < 8, subnormal, normal)
        if self.signed:
            numbers = torch.where(wide > 0x7F, -numbers, numbers)
        return torch.where(exponents[:, None] == _NOT_FINITE, torch.nan, numbers)

    def quantize(self, numbers: Tensor, random: Tensor | int = TO_NEAREST) -> tuple[Tensor, Tensor]:
        """Returns quantized values and exponents of numbers; undoes :meth:`dequantize`.

        Args:
            numbers: float32 [blocks, MOMENT_BLOCK].
            random: int32 of the same shape, each of 20 bits; or one for all.

        Returns:
            uint8 [blocks, MOMENT_BLOCK] and uint8 [blocks].
        """
        bits = numbers.contiguous().view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        largest = magnitude.amax(1).to(torch.int64) + ((1 << _CUT_BITS) - 1)
        held = (largest >> 23).clamp(_LEAST_EXPONENT, 255) - _LEAST_EXPONENT
        exponents = held.to(torch.uint8)
        least = self.least_normal(exponents)[:, None]
        sums = magnitude.view(torch.float32) + least.view(torch.float32)
        subnormal = sums.view(torch.int32) - least
        normal = magnitude - least + _ONE_EXPONENT
        values = (torch.where(magnitude < least, subnormal, normal) + random) >> _CUT_BITS
        if self.signed:
            values = (values & 0x7F) | ((bits >> 24) & 0x80)
        else:
            values = torch.where((values == 0) & (magnitude != 0), 1, values)
        return (values & 0xFF).to(torch.uint8), exponents


#: The formats by moment.
MOMENT_FORMATS = {"exp_avg": MomentFormat(14, True), "exp_avg_sq": MomentFormat(30, False)}


class QuantizedMoment:
    """An 8-bit moment of a chunk.

    Attributes:
        memory: uint8 [elements + blocks], the values and then the exponents, as kernels take them.
    """

    def __init__(self, moment_format: MomentFormat, memory: Tensor) -> None:
        self._format = moment_format
        self.memory = memory

    @staticmethod
    def size_bytes(elems: int) -> int:
        """Returns the bytes of a moment of ``elems`` elements, in whole quantization blocks."""
        return elems + elems // MOMENT_BLOCK

    def _values_and_exponents(self) -> tuple[Tensor, Tensor]:
        elems = self.memory.numel() // (MOMENT_BLOCK + 1) * MOMENT_BLOCK
        return self.memory[:elems].view(-1, MOMENT_BLOCK), self.memory[elems:]

    def wide(self) -> Tensor:
        """Returns a copy in FP32: float32 [elements]."""
        return self._format.dequantize(*self._values_and_exponents()).view(-1)

    def take(self, numbers: Tensor) -> None:
        """Sets the moment to float32 [elements], each rounded to the nearest."""
        quantized = self._format.quantize(numbers.to(self.memory.device).view(-1, MOMENT_BLOCK))
        for own, given in zip(self._values_and_exponents(), quantized, strict=True):
            own.copy_(given)


def random_bits(seed: int, param: int, step: int, elems: int) -> tuple[Tensor, Tensor]:
    """Returns what a step rounds the two moments of a parameter by.

    Args:
        seed: of the optimizer's options.
        param: index of the parameter.
        step: number of the parameter's step, from 1.
        elems: number of the parameter's elements, below 2^32.

    Returns:
        Two of int32 [elems], each of 20 bits.
    """
    key, twist = _philox(seed, param, step)[:2]
    x = _times(torch.arange(elems, dtype=torch.int64, device="cpu") ^ key, 0x7FEB352D)
    x = _times(x ^ (x >> 15) ^ twist, 0x846CA68B)
    x = x ^ (x >> 16)
    first, second = x & ((1 << _CUT_BITS) - 1), x >> (32 - _CUT_BITS)
    return first.to(torch.int32), second.to(torch.int32)


def _times(x: Tensor, factor: int) -> Tensor:
    """Returns the low 32 bits of a product; in halves, since torch has no unsigned 64 bits."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & _WORD


def _philox(seed: int, counter: int, step: int) -> list[int]:
    """Philox4x32-10, as adamw_element.h has it, for the stream of moments."""
    k0, k1 = seed & _WORD, seed >> 32
    c = [counter & _WORD, counter >> 32, step, 1 << 31]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & _WORD, (a >> 32) ^ c[3] ^ k1, a & _WORD]
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c


# ---- Writes to parameters between steps, which the FP32 masters follow --------------------------


def count_change(params: Sequence[Tensor]) -> None:
    """Counts a change of values in the versions of parameters, as torch's in-place operations do.

    A kernel changes memory behind autograd's back. With the version advanced, the backward of a
    graph that has saved such a parameter raises instead of using the new values.
    """
    with without_torch_function():
        increment_version(with_local(params))


def with_local(params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns parameters, and behind them the local tensors of DTensors, which have versions."""
    if TORCH_CLASSES.issuperset(map(type, params)):
        return params
    others = [param for param in params if type(param) not in TORCH_CLASSES]
    return [*params, *(local_of(param) for param in others if is_distributed(param))]


class OutsideWrites:
    """The in-place writes to parameters between steps, which their masters follow.

    A step stores the rounded masters in the parameters, so it would otherwise silently undo a
    ``load_state_dict()`` of the module. Writes are detected by the parameters' versions, which
    writes through ``.data`` do not change. Masters do not follow under stochastic rounding, where
    the values do not tell which elements were written.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buckets: Buckets,
        options: AdamWOptions,
        left_out: Sequence[Tensor] = (),
    ) -> None:
        followed = [
            bucket
            for bucket in buckets
            if bucket.has_all_params
            and bucket.state.master is not None
            and options.rounding == "nearest"
        ]
        self._buckets = followed
        followed_params = [
            params[each.param] for bucket in followed for each in bucket.layout.segments
        ]
        # What no group has lies in the same buckets, and its masters with the others'.
        followed_params += left_out if followed else []
        # A local tensor that is written to changes no version of its DTensor.
        self._params = with_local(followed_params)
        self._versions = self._read()
        self._index_of = {id(param): at for at, param in enumerate(self._params)}

    def _read(self) -> list[int]:
        with without_torch_function():
            return [param._version for param in self._params]

    def accept(self) -> None:
        """Accepts the masters as they are, whatever was written so far."""
        self._versions = self._read()

    def found(self, params: Sequence[Tensor]) -> bool:
        """Tells whether some of these were written to since masters have followed last."""
        known = [(param, self._index_of.get(id(param))) for param in with_local(params)]
        with without_torch_function():
            return any(at is not None and each._version != self._versions[at] for each, at in known)

    def expect(self, written: Sequence[Tensor]) -> None:
        """Accepts one more version of parameters, whose masters are written with them."""
        if self._params:
            for at in map(self._index_of.get, map(id, with_local(written))):
                if at is not None:
                    self._versions[at] += 1

    def take_over(self) -> None:
        """Sets each master that does not round to its parameter to the parameter."""
        versions = self._read()
        if versions != self._versions:
            for bucket in self._buckets:
                bucket.follow_params()
            self._versions = versions


# ---- Parameters that cross between nodes quantized, beside their FP32 masters -------------------
# NOTE [Quantized parameters] With ``Compression(parameters=)`` every rank, the one that updates a
# parameter included, computes with its FP32 master quantized and dequantized, rounded to the
# parameter's dtype: so all nodes have equal bits, whoever updates. It is as in mixed precision,
# whose parameters are rounded masters, with another rounding, of quantization blocks of 128
# elements from the bucket's begin. Since chunks begin at such blocks, it depends on no world size.
# Quantized again, dequantized values are others, so the masters are kept for as long as the module
# is sharded: ``ParamBucket.wide`` is their memory, which an optimizer's state shares.
#
# Masters follow what is written to parameters from outside: one whose dequantized value is not its
# parameter becomes that. The block is then quantized anew, which moves the other elements of a
# block if its largest one has changed.


def dequantized(wide: Tensor, compression: str, dtype: torch.dtype) -> Tensor:
    """Returns FP32 numbers quantized, in blocks from the first one on, and dequantized.

    Args:
        wide: float32, contiguous, on the CPU.
        compression: "int8", "fp8" or "int4".
        dtype: of the result.
    """
    elems, code = wide.numel(), _native.QUANT_FORMATS[compression]
    quantized = torch.empty(
        _native.quantized_bytes(code, elems), dtype=torch.uint8, device=wide.device
    )
    found = torch.empty(elems, dtype=dtype, device=wide.device)
    _native.quantize(code, wide.data_ptr(), DTYPE_CODES[wide.dtype], quantized.data_ptr(), elems)
    _native.dequantize_and_sum(
        code, [quantized.data_ptr()], found.data_ptr(), DTYPE_CODES[dtype], elems, 0
    )
    return found


def following(master: Tensor, params: Tensor, compression: str | None) -> Tensor:
    """Returns ``master``, but the parameter wherever the master does not round to it.

    Args:
        master: float32 [elements], from the begin of a quantization block on.
        params: [elements].
        compression: as of :func:`dequantized`; None where parameters are masters rounded to their
            dtype.
    """
    rounded = (
        master.to(params.dtype)
        if compression is None
        else dequantized(master, compression, params.dtype)
    )
    return torch.where(rounded == params, master, params.to(master.dtype))


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Returns FP32 masters, joined from bfloat16 parameters and their remainders (int16).

    Twin of join_master() in ``kernels/include/ringcomm/optimizer/adamw_element.h``.
    """
    low = remainder.to(torch.int64) & 0xFFFF
    high = (param.view(torch.int16).to(torch.int64) - (low >> 15)) & 0xFFFF
    bits = (high << 16) | low
    # Mapped to the signed range, so that the conversion to 32 bits is exact.
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits FP32 masters into bfloat16 parameters (ties away from zero) and int16 remainders."""
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    wide = bits.to(torch.int64)
    param = _int16((wide + 0x8000) >> 16).view(torch.bfloat16)
    return param, _int16(wide)


def _int16(wide: Tensor) -> Tensor:
    low = wide & 0xFFFF
    return (low - ((low >> 15) << 16)).to(torch.int16)


def empty_for_streams(elems: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns uninitialised memory that a step reads and writes from end to end.

    On the CPU it lies in huge pages: a step of 16 Mi FP32 parameters takes 9.0 ms with them and
    10.3 ms without (Zen 4, one core), since the prefetchers stop at the end of a page.
    """
    tensor = torch.empty(elems, dtype=dtype, device=device)
    if device.type == "cpu":
        _native.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def master_dtype(layout: BucketLayout, master: str) -> torch.dtype | None:
    """Returns the dtype of the masters that ``master`` keeps of a bucket's parameters, or None."""
    if layout.dtype is torch.float32:
        return None
    return {"fp32": torch.float32, "remainder": torch.int16, "none": None}[master]


@dataclass
class ShardState:
    """The optimizer's state of a rank's chunk; all [chunk elements], zero in the padding.

    Attributes:
        moments: float32, by the names that torch gives them; see :meth:`Bucket.ensure`.
        quantized: the 8-bit moments, by the same names.
        quantized_state: True if moments are quantized to 8 bits.
        master: float32, or None for float32 parameters or where the options keep none. There is one
            of all parameters that cross quantized; see NOTE [Quantized parameters] in
            ``optim/buckets.py``.
        remainder: the low 16 bits of the master as int16, or None.
    """

    moments: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedMoment] = field(default_factory=dict)
    quantized_state: bool = False
    master: Tensor | None = None
    remainder: Tensor | None = None

    @classmethod
    def zeros(
        cls, layout: BucketLayout, chunk: Chunk, master: str, device: torch.device
    ) -> ShardState:
        """Returns the state before the first step; ``master`` is as in :class:`AdamWOptions`."""

        def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
            return empty_for_streams(chunk.elems, dtype, device).zero_()

        kept = master_dtype(layout, master)
        return cls(
            master=zeros() if kept is torch.float32 else None,
            remainder=zeros(torch.int16) if kept is torch.int16 else None,
        )

    def names(self) -> list[str]:
        """Returns the names of the tensors that there are."""
        return [*self.moments, *self.quantized, *self.masters()]

    def dtypes(self) -> dict[str, torch.dtype]:
        """Returns the dtypes of what :meth:`tensors` returns."""
        moments = dict.fromkeys((*self.moments, *self.quantized), torch.float32)
        return {**moments, **{name: each.dtype for name, each in self.masters().items()}}

    def masters(self) -> dict[str, Tensor]:
        """Returns the master or the remainder, by name, where there is one."""
        masters = (("master", self.master), ("remainder", self.remainder))
        return {name: each for name, each in masters if each is not None}

    def whole_master(self) -> Tensor:
        """Returns the FP32 master, which there is; if it is offloaded, a copy."""
        assert self.master is not None
        return self.master

    def wide(self) -> dict[str, Tensor]:
        """Returns the moments in FP32, by name; copies of the 8-bit ones."""
        return {**self.moments, **{name: each.wide() for name, each in self.quantized.items()}}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that there are, by name; copies in FP32 of 8-bit moments."""
        return {**self.wide(), **self.masters()}

    def memory(self, name: str) -> Tensor | None:
        """Returns the memory of a moment as the kernels take it, if there is such a moment."""
        found = self.quantized.get(name)
        return self.moments.get(name) if found is None else found.memory

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets tensors that there are; 8-bit moments are rounded to the nearest."""
        here = {**self.moments, **self.masters()}
        for name, tensor in tensors.items():
            if name in self.quantized:
                self.quantized[name].take(tensor)
            elif here[name] is not tensor:
                here[name].copy_(tensor)

    def zero(self, names: Iterable[str]) -> None:
        """Sets tensors of these names, which there are, to zeros."""
        here = {**self.moments, **self.masters()}
        for name in names:
            (self.quantized[name].memory if name in self.quantized else here[name]).zero_()


def heap_device_of(comm: Communicator | None) -> torch.device:
    """Returns the device of buckets to pass to :func:`ringcomm.zeros`; the host's for None."""
    return torch.device("cpu") if comm is None else comm.heap_device


class ParamHolder(Protocol):
    """The owner of a rank's chunk of the parameters, which may lie elsewhere for a while."""

    @property
    def is_here(self) -> bool:
        """True inside of :meth:`here`."""
        ...

    def here(self, write: bool = False, anew: bool = False) -> AbstractContextManager[None]:
        """Has the chunk in memory inside the context; see :meth:`Bucket.params_here`."""
        ...


@dataclass(frozen=True)
class BucketMemory:
    """The memory of a bucket's parameters and gradients on this rank.

    Attributes:
        own_params: [chunk elements], this rank's chunk of the parameters, in the heap.
        params: [elements], in the heap, of which ``own_params`` is a part; None where no rank keeps
            more than its chunk.
        grads: [elements], in the heap; of the parameters' dtype, or float32; None where gradients
            are reduced before the step.
        wide: float32 [chunk elements], the parameters before they were rounded to their dtype; None
            if they were not rounded. With ``compression`` these are the masters.
        compression: format in which the parameters cross between nodes; None if they cross as they
            are.
        holder: who has ``own_params``, where they may lie elsewhere; None if they are in memory.
    """

    own_params: Tensor
    params: Tensor | None = None
    grads: Tensor | None = None
    wide: Tensor | None = None
    compression: str | None = None
    holder: ParamHolder | None = None


class StateOffload:
    """The offload of buckets' state: none here, as a bucket has its whole state in memory.

    A subclass keeps state elsewhere, and brings it into memory in pieces.
    """

    #: True if no access to state moves it, so that none fails on this rank alone.
    in_memory = True

    def add(self, bucket: Bucket, master: str, quantized_state: bool) -> ShardState:
        """Takes up a bucket's state, and returns it, or what stands for it."""
        state = ShardState.zeros(bucket.layout, bucket.chunk, master, bucket.device)
        state.quantized_state = quantized_state
        return state

    def ensure(self, bucket: Bucket, names: Sequence[str]) -> bool:
        """Does :meth:`Bucket.ensure`."""
        state, elems, device = bucket.state, bucket.chunk.elems, bucket.device
        missing = [name for name in names if state.memory(name) is None]
        if missing and bucket.is_piece:
            raise AssertionError(f"a piece of bucket {bucket.number} has no memory for {missing}")
        for name in missing:
            if state.quantized_state:
                size_bytes = QuantizedMoment.size_bytes(elems)
                memory = empty_for_streams(size_bytes, torch.uint8, device).zero_()
                state.quantized[name] = QuantizedMoment(MOMENT_FORMATS[name], memory)
            else:
                state.moments[name] = empty_for_streams(elems, torch.float32, device).zero_()
        return bool(missing)

    def reserve(self) -> None:
        """Takes the memory and the space that the state needs."""

    def visit(self, bucket: Bucket, begin: int, end: int, write: bool) -> Iterator[Bucket]:
        """Does :meth:`Bucket.pieces`."""
        return iter((bucket,))

    def begin_step(
        self,
        find_active: Callable[[], Sequence[float] | None],
        order: Iterable[int] | None = None,
    ) -> None:
        """Plans the visits of a step, where they move state; see ``PiecedOffload``."""

    def update_only(self, active: Sequence[float]) -> None:
        """Has the visits that follow in a step move state of these parameters alone."""

    def end_step(self) -> None:
        """Ends the visits of a step."""

    def raise_fault(self) -> None:
        """Raises the first error of a visit, if there was any."""


NO_OFFLOAD = StateOffload()


def _has_no_copies() -> None:
    """Shares parameters of which there is no copy."""


class Bucket:
    """One bucket's memory on this rank.

    Attributes:
        number: number of the bucket in its layout.
        layout: layout of the bucket.
        chunk: the part that this rank keeps state for.
        segments: int64 [segments, 3], for the kernels.
        device: of all tensors.
        state: the optimizer's state of the chunk; if it is offloaded, what stands for it,
            whose elements :meth:`pieces` gives.
        offload: what keeps the state.
        is_piece: True if another bucket's :meth:`piece` made it, so that its state is laid out
            there.
        grad_shard: float32 [chunk elements], the gradient that the first of two passes hands to the
            second; None until the first such step.
        error_feedback: what quantization of gradients has lost; None where nothing keeps that.
        tag: returns a number that tells a reduction of the bucket's gradients from others of the
            same size, or 0 where there is none.
        share: where no rank keeps all parameters, but other nodes have a copy of ``own_params``,
            writes it to their copies, and theirs to this node's; with :attr:`compression` wherever
            they are, the masters quantized and dequantized; collective.
    """

    def __init__(
        self,
        number: int,
        layout: BucketLayout,
        chunk: Chunk,
        memory: BucketMemory,
    ) -> None:
        self.number = number
        self.layout = layout
        self.chunk = chunk
        self._memory = memory
        self.device = memory.own_params.device
        self.segments = layout.segment_table(self.device)
        self.state = ShardState()
        self.offload: StateOffload = NO_OFFLOAD
        self.is_piece = False
        self.grad_shard: Tensor | None = None
        self.error_feedback: ErrorFeedback | None = None
        self.tag: Callable[[], int] = int
        self.share: Callable[[], object] = _has_no_copies

    @property
    def own_params(self) -> Tensor:
        """The parameters of the chunk: [chunk elements]; see :meth:`params_here`."""
        holder = self._memory.holder
        if holder is not None and not holder.is_here:
            raise AssertionError(f"parameters of bucket {self.number} are not in memory")
        return self._memory.own_params

    @property
    def own_memory(self) -> Tensor:
        """The memory of :attr:`own_params`, whatever is there now."""
        return self._memory.own_params

    @property
    def compression(self) -> str | None:
        """The format in which parameters cross between nodes; None if they cross as they are."""
        return self._memory.compression

    @property
    def may_be_away(self) -> bool:
        """True if the parameters lie elsewhere but for :meth:`params_here`."""
        return self._memory.holder is not None

    def params_here(self, write: bool = False, anew: bool = False) -> AbstractContextManager[None]:
        """Has the chunk's parameters in memory inside the context, in a step or outside of it.

        Args:
            write: what is changed inside is kept.
            anew: all of them are written inside, whatever they were.

        Raises:
            DiskError: they lie on a disk, which has failed.
        """
        holder = self._memory.holder
        return nullcontext() if holder is None else holder.here(write, anew)

    def keep_state(
        self, master: str, quantized_state: bool, offload: StateOffload = NO_OFFLOAD
    ) -> None:
        """Begins to keep state: masters, of zeros, and the moments that :meth:`ensure` makes.

        Args:
            master: as in :class:`AdamWOptions`.
            quantized_state: as in :class:`ShardState`.
            offload: what keeps the state.
        """
        self.offload = offload
        if self.compression is not None:
            assert offload.in_memory and self._memory.wide is not None
            self.state = ShardState(quantized_state=quantized_state, master=self._memory.wide)
        else:
            self.state = offload.add(self, master, quantized_state)

    def pieces(
        self, begin: int = 0, end: int | None = None, write: bool = True
    ) -> Iterator[Bucket]:
        """Yields the pieces of the bucket whose state is in memory together, one after the other.

        In memory that is the bucket itself. Of offloaded state a piece is a bucket of its own: its
        chunk is a part of this one's, and its state is there until the next piece is asked for.

        Args:
            begin: only pieces that reach beyond this element of the bucket.
            end: only pieces that begin before this one; None for all.
            write: keep what is changed in the state.
        """
        return self.offload.visit(self, begin, self.chunk.end if end is None else end, write)

    def within(self, begin: int, end: int) -> tuple[slice, slice]:
        """Returns where elements [begin, end) of the bucket, if the chunk has some of them, lie.

        Returns:
            Their positions in a tensor [chunk elements], and in one [end - begin].
        """
        low, high = max(begin, self.chunk.begin), min(end, self.chunk.end)
        if low >= high:
            return slice(0, 0), slice(0, 0)
        first = self.chunk.begin
        return slice(low - first, high - first), slice(low - begin, high - begin)

    def read_state(self, name: str, begin: int, end: int) -> Tensor:
        """Returns a copy of elements [begin, end) of the bucket, which are of this rank's chunk.

        Args:
            name: of a moment, or "master" for the FP32 masters, or the parameters without any.
            begin: the first element.
            end: behind the last one.

        Returns:
            float32 [end - begin].
        """
        found = torch.empty(end - begin, dtype=torch.float32, device=self.device)
        if name == "master" and self.state.master is None:
            with self.params_here():
                self._read_params(begin, end, found)
            return found
        for piece in self.pieces(begin, end, write=False):
            here, there = piece.within(begin, end)
            values = piece.state.master if name == "master" else piece.state.wide()[name]
            assert values is not None
            found[there].copy_(values[here])
        return found

    def _read_params(self, begin: int, end: int, found: Tensor) -> None:
        """Fills ``found`` with parameters, joined with their remainders if there are any."""
        for piece in self.pieces(begin, end, write=False):
            here, there = piece.within(begin, end)
            values = piece.own_params[here]
            if piece.state.remainder is not None:
                values = join_master(values, piece.state.remainder[here])
            found[there].copy_(values)

    def write_state(self, name: str, begin: int, values: Tensor) -> None:
        """Sets elements of a moment, or of the masters, which are of this rank's chunk.

        Args:
            name: as of :meth:`read_state`; with "master" parameters are written, too, where they
                are a part of it.
            begin: the first element.
            values: float32 [elements].
        """
        end = begin + values.numel()
        splits = name == "master" and self.state.remainder is not None
        with self.params_here(write=True) if splits else nullcontext():
            for piece in self.pieces(begin, end):
                here, there = piece.within(begin, end)
                if name != "master":
                    moment = piece.state.wide()[name]
                    moment[here].copy_(values[there])
                    piece.state.take({name: moment})
                    continue
                if piece.state.master is not None:
                    piece.state.master[here].copy_(values[there])
                if piece.state.remainder is not None:
                    param, remainder = split_master(values[there])
                    piece.own_params[here].copy_(param)
                    piece.state.remainder[here].copy_(remainder)

    def piece(self, chunk: Chunk, state: ShardState) -> Bucket:
        """Returns a bucket of a piece of this one's chunk, with a state of its own."""
        first = self.chunk.begin
        own = self.own_memory[chunk.begin - first : chunk.end - first]
        memory = BucketMemory(own, holder=self._memory.holder)
        made = Bucket(self.number, self.layout, chunk, memory)
        made.segments = self.segments
        made.state = state
        made.is_piece = True
        return made

    def lay_out(self, layout: BucketLayout) -> None:
        """Takes another layout of the same elements, in which parameters have other indices."""
        self.layout = layout
        self.segments = layout.segment_table(self.device)

    @property
    def key(self) -> tuple[int, int]:
        """Tells the bucket from others of the optimizer, and from other pieces of the same one."""
        return self.number, self.chunk.begin

    @property
    def has_all_params(self) -> bool:
        """True if this rank keeps all parameters of the bucket, and not just its chunk."""
        return self._memory.params is not None

    @property
    def has_grads(self) -> bool:
        """True if there is memory for this rank's own gradients of all elements."""
        return self._memory.grads is not None

    @property
    def params(self) -> Tensor:
        """The flat parameters, [elements], in the heap; the module's parameters are views of it."""
        assert self._memory.params is not None
        return self._memory.params

    @property
    def params_ptr(self) -> int:
        """Address of element 0 of the bucket, even if this rank keeps only a later chunk."""
        if self._memory.params is not None:
            return self._memory.params.data_ptr()
        if not self.chunk.elems:
            return 0  # an empty chunk has no address to count back from
        size_bytes = self.own_memory.element_size()
        return self.own_memory.data_ptr() - self.chunk.begin * size_bytes

    @property
    def grads(self) -> Tensor:
        """The flat gradients, [elements], in the heap; of the parameters' dtype, or float32."""
        assert self._memory.grads is not None
        return self._memory.grads

    def ensure_grad_shard(self) -> Tensor:
        """Returns ``grad_shard``, which is allocated at the first call."""
        if self.grad_shard is None:
            self.grad_shard = empty_for_streams(self.chunk.elems, torch.float32, self.device)
        return self.grad_shard

    def write_params(self, begin: int, values: Tensor) -> None:
        """Writes the bucket's elements from ``begin`` on, of which this rank may keep a part."""
        if self.has_all_params:
            self.params[begin : begin + values.numel()].copy_(values)
            return
        low, high = max(begin, self.chunk.begin), min(begin + values.numel(), self.chunk.end)
        if low < high:
            with self.params_here(write=True):
                own = self.own_params[low - self.chunk.begin : high - self.chunk.begin]
                own.copy_(values[low - begin : high - begin])

    def take_wide(self) -> None:
        """Sets the master to the parameters before they were rounded, if these are known."""
        if self.compression is not None:
            self.follow_params()
            return
        wide = self._memory.wide
        if self.state.masters():
            with self.params_here(write=self.state.remainder is not None):
                self.refresh_master()
                if wide is not None:
                    values = following(wide, self.own_params, None)
                    self.write_state("master", self.chunk.begin, values)
        self._memory = replace(self._memory, wide=None)

    def follow_params(self) -> None:
        """Sets the FP32 master to the parameters, wherever it does not round to them."""
        if self.state.master is None:
            return
        for piece in self.pieces():
            assert piece.state.master is not None
            piece.state.master.copy_(
                following(piece.state.master, piece.own_params, self.compression)
            )

    def refresh_master(self, begin: int = 0, end: int | None = None) -> None:
        """Sets the master of the bucket's elements [begin, end), or of all, to the parameters.

        Those of quantized parameters follow: one that gives its parameter stays, here and
        elsewhere.
        """
        if self.compression is not None:
            self.follow_params()
            return
        if not self.state.masters():
            return
        with nullcontext() if self.state.master is None else self.params_here():
            for piece in self.pieces(begin, end):
                here, _ = piece.within(begin, self.chunk.end if end is None else end)
                if piece.state.master is not None:
                    piece.state.master[here].copy_(piece.own_params[here])
                if piece.state.remainder is not None:
                    piece.state.remainder[here].zero_()

    def ensure(self, names: Sequence[str]) -> bool:
        """Allocates the moments of these names, of zeros; returns False if there were all."""
        return self.offload.ensure(self, names)


def make_bucket(
    number: int, layout: BucketLayout, chunk: Chunk, options: AdamWOptions, device: torch.device
) -> Bucket:
    """Makes a bucket on a heap device, whose parameters and gradients every rank keeps whole."""
    # Zero the padding, which collectives move and norms read; nothing writes it later.
    params = zeros(layout.elems, dtype=layout.dtype, device=device)
    grads = zeros(layout.elems, dtype=options.accumulate_dtype or layout.dtype, device=device)
    memory = BucketMemory(params[chunk.begin : chunk.end], params, grads)
    return Bucket(number, layout, chunk, memory)


class Buckets(list[Bucket]):
    """All buckets of a layout on one rank, with a view of each parameter in them.

    Attributes:
        params: by parameter index, its view into its bucket, where this rank has it whole.
        grads: by parameter index, its view into the bucket's gradients, where there are any.
    """

    def __init__(self, layout: ShardLayout, buckets: Sequence[Bucket]) -> None:
        super().__init__(buckets)
        self.params: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        for bucket in self:
            if bucket.has_all_params:
                self.params.update(layout.views(bucket.number, bucket.params))
            if bucket.has_grads:
                self.grads.update(layout.views(bucket.number, bucket.grads))

    @classmethod
    def make(
        cls,
        layout: ShardLayout,
        shard_index: int,
        world_size: int,
        options: AdamWOptions,
        device: torch.device,
    ) -> Buckets:
        """Makes all buckets of a layout, with new memory on a heap device.

        This rank has state for chunk ``shard_index``.
        """
        return cls(
            layout,
            [
                make_bucket(number, bucket, bucket.chunk(shard_index, world_size), options, device)
                for number, bucket in enumerate(layout.buckets)
            ],
        )

    def adopt(self, params: list[Tensor]) -> None:
        """Moves parameters into their buckets: each becomes a view, and keeps its value."""
        for index, view in self.params.items():
            view.copy_(local_of(params[index]).detach())
            set_local(params[index], apart(params[index], view))


def sharers_of(comm: Communicator | None, state: str) -> Communicator | None:
    """Returns the ranks that share a copy of the state: all, or with "node" this rank's node."""
    return comm.node if comm is not None and state == "node" else comm


def gather_params(bucket: Bucket, sharers: Communicator) -> None:
    """Gives all ranks the chunks of a bucket's parameters that those which share state have."""
    if bucket.compression is not None:
        bucket.share()
        return
    chunks = bucket.layout.chunks(sharers)
    params = [bucket.params[chunk.begin : chunk.end] for chunk in chunks]
    sharers.all_gather(params, params[sharers.rank])
