# SPDX-License-Identifier: Apache-2.0
"""Buckets on one rank: parameters and gradients in the heap, and the state of the rank's chunk."""

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

# ---- 8-bit moments in torch: the kernels' number format, and conversions to and from FP32 -------
# This code mirrors ``kernels/include/ringcomm/optimizer/quantized_moments.h``, which explains the
# format and its rounding. Checkpoints use this code, and tests compare the kernels with it.

Tensor = torch.Tensor

#: The number of elements that form a quantization block and share one exponent.
MOMENT_BLOCK = _native.MOMENT_BLOCK_ELEMS

_CUT_BITS = 20
_ONE_EXPONENT = 1 << 23
_LEAST_EXPONENT = 36
_NOT_FINITE = 255 - _LEAST_EXPONENT
_WORD = (1 << 32) - 1

#: With this value in place of random bits, numbers are rounded to nearest, ties away from zero.
TO_NEAREST = 1 << (_CUT_BITS - 1)


@dataclass(frozen=True)
class MomentFormat:
    """The 8-bit number format of a moment.

    Attributes:
        below: number of normal exponents below the quantization block's exponent.
        signed: True if a value has a sign, its highest bit.
    """

    below: int
    signed: bool

    def least_normal(self, exponents: Tensor) -> Tensor:
        """Returns each quantization block's smallest normal number, as the int32 bits of FP32."""
        return (exponents.to(torch.int32) + (_LEAST_EXPONENT - self.below)) << 23

    def dequantize(self, values: Tensor, exponents: Tensor) -> Tensor:
        """Returns the FP32 numbers that quantized values represent.

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
        """Returns quantized values and block exponents; the inverse of :meth:`dequantize`.

        Args:
            numbers: float32 [blocks, MOMENT_BLOCK].
            random: 20 random bits per element, int32 of ``numbers``' shape; or one int for all.

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


#: The number format of each moment.
MOMENT_FORMATS = {"exp_avg": MomentFormat(14, True), "exp_avg_sq": MomentFormat(30, False)}


class QuantizedMoment:
    """An 8-bit moment of a chunk.

    Attributes:
        memory: uint8 [elements + blocks], the values and then the exponents, as the kernels read
            them.
    """

    def __init__(self, moment_format: MomentFormat, memory: Tensor) -> None:
        self._format = moment_format
        self.memory = memory

    @staticmethod
    def size_bytes(elems: int) -> int:
        """Returns the bytes of a moment of ``elems`` elements, which must fill whole blocks."""
        return elems + elems // MOMENT_BLOCK

    def _values_and_exponents(self) -> tuple[Tensor, Tensor]:
        elems = self.memory.numel() // (MOMENT_BLOCK + 1) * MOMENT_BLOCK
        return self.memory[:elems].view(-1, MOMENT_BLOCK), self.memory[elems:]

    def wide(self) -> Tensor:
        """Returns an FP32 copy of the moment: float32 [elements]."""
        return self._format.dequantize(*self._values_and_exponents()).view(-1)

    def take(self, numbers: Tensor) -> None:
        """Sets the moment to ``numbers``, float32 [elements], rounded to nearest."""
        quantized = self._format.quantize(numbers.to(self.memory.device).view(-1, MOMENT_BLOCK))
        for own, given in zip(self._values_and_exponents(), quantized, strict=True):
            own.copy_(given)


def random_bits(seed: int, param: int, step: int, elems: int) -> tuple[Tensor, Tensor]:
    """Returns the random bits with which a step rounds the two moments of a parameter.

    Args:
        seed: seed in the optimizer's options.
        param: index of the parameter.
        step: number of the parameter's step, from 1.
        elems: number of the parameter's elements, below 2^32.

    Returns:
        Two tensors, int32 [elems], with 20 random bits in each element.
    """
    key, twist = _philox(seed, param, step)[:2]
    x = _times(torch.arange(elems, dtype=torch.int64, device="cpu") ^ key, 0x7FEB352D)
    x = _times(x ^ (x >> 15) ^ twist, 0x846CA68B)
    x = x ^ (x >> 16)
    first, second = x & ((1 << _CUT_BITS) - 1), x >> (32 - _CUT_BITS)
    return first.to(torch.int32), second.to(torch.int32)


def _times(x: Tensor, factor: int) -> Tensor:
    """Returns the low 32 bits of x * factor, computed in halves: torch has no uint64 product."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & _WORD


def _philox(seed: int, counter: int, step: int) -> list[int]:
    """Returns the four words of Philox4x32-10 for the moments' stream, as in adamw_element.h."""
    k0, k1 = seed & _WORD, seed >> 32
    c = [counter & _WORD, counter >> 32, step, 1 << 31]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & _WORD, (a >> 32) ^ c[3] ^ k1, a & _WORD]
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c


# ---- Detecting writes to parameters between steps, to copy them to the FP32 masters -------------


def count_change(params: Sequence[Tensor]) -> None:
    """Increments the versions of parameters, as torch's in-place operations do.

    Autograd does not see that a kernel changes memory. With the version incremented, the backward
    of a graph that has saved a changed parameter raises instead of using the new values.
    """
    with without_torch_function():
        increment_version(with_local(params))


def with_local(params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the parameters and the DTensors' local tensors, which have versions of their own."""
    if TORCH_CLASSES.issuperset(map(type, params)):
        return params
    others = [param for param in params if type(param) not in TORCH_CLASSES]
    return [*params, *(local_of(param) for param in others if is_distributed(param))]


class OutsideWrites:
    """Detects in-place writes to parameters between steps, and copies them to the masters.

    A step stores the rounded masters in the parameters. Without this class a step would silently
    undo a ``load_state_dict()`` of the module. A write is detected if it changes a parameter's
    version; a write through ``.data`` does not. Under stochastic rounding masters do not follow
    writes, since the values do not show which elements were written.
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
        # Buckets also contain parameters that are in no param group, with their masters.
        followed_params += left_out if followed else []
        # A write to a local tensor does not change the version of its DTensor.
        self._params = with_local(followed_params)
        self._versions = self._read()
        self._index_of = {id(param): at for at, param in enumerate(self._params)}

    def _read(self) -> list[int]:
        with without_torch_function():
            return [param._version for param in self._params]

    def accept(self) -> None:
        """Keeps the masters as they are, and ignores all writes so far."""
        self._versions = self._read()

    def found(self, params: Sequence[Tensor]) -> bool:
        """True if any of these parameters was written to since the masters were last updated."""
        known = [(param, self._index_of.get(id(param))) for param in with_local(params)]
        with without_torch_function():
            return any(at is not None and each._version != self._versions[at] for each, at in known)

    def expect(self, written: Sequence[Tensor]) -> None:
        """Ignores the next version change: a step writes parameters and masters together."""
        if self._params:
            for at in map(self._index_of.get, map(id, with_local(written))):
                if at is not None:
                    self._versions[at] += 1

    def take_over(self) -> None:
        """After writes, sets each master that does not round to its parameter to the parameter."""
        versions = self._read()
        if versions != self._versions:
            for bucket in self._buckets:
                bucket.follow_params()
            self._versions = versions


# ---- Parameters that nodes exchange in quantized form, and their FP32 masters -------------------
# NOTE [Quantized parameters] With ``Compression(parameters=)`` every rank, including the rank that
# updates a parameter, computes with the parameter's FP32 master after it was quantized,
# dequantized, and rounded to the parameter's dtype. So all nodes have equal bits, whichever rank
# updates. As in mixed precision the parameters are rounded masters, but blocks of 128 elements,
# counted from the bucket's beginning, are quantized together. Chunks begin at block boundaries, so
# the rounding does not depend on the world size. Quantizing dequantized values again would change
# them, so the masters are kept for as long as the module is sharded. They are in
# ``ParamBucket.wide``, which is also the master in an optimizer's state.
#
# Masters follow outside writes to parameters: a master whose dequantized value differs from its
# parameter is set to the parameter. The master's block is then quantized again, which changes its
# other elements if its largest element has changed.


def dequantized(wide: Tensor, compression: str, dtype: torch.dtype) -> Tensor:
    """Quantizes and dequantizes FP32 numbers; the first number begins a quantization block.

    Args:
        wide: float32, contiguous, on the CPU.
        compression: "int8", "fp8" or "int4".
        dtype: dtype of the result.
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
    """Returns the masters; where a master does not round to its parameter, returns the parameter.

    Args:
        master: float32 [elements]; the first element begins a quantization block.
        params: [elements].
        compression: see :func:`dequantized`; None if parameters are just rounded to their dtype.
    """
    rounded = (
        master.to(params.dtype)
        if compression is None
        else dequantized(master, compression, params.dtype)
    )
    return torch.where(rounded == params, master, params.to(master.dtype))


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Returns FP32 masters, joined from bfloat16 parameters and their remainders (int16).

    This function mirrors join_master() in ``kernels/include/ringcomm/optimizer/adamw_element.h``.
    """
    low = remainder.to(torch.int64) & 0xFFFF
    high = (param.view(torch.int16).to(torch.int64) - (low >> 15)) & 0xFFFF
    bits = (high << 16) | low
    # Map the bits to the signed range, so that the conversion to 32 bits is exact.
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
    """Returns uninitialised memory for tensors that a step reads and writes from end to end.

    On the CPU it is in huge pages: a step of 16 Mi FP32 parameters takes 9.0 ms with huge pages and
    10.3 ms without (Zen 4, one core), since the prefetchers stop at the end of a page.
    """
    tensor = torch.empty(elems, dtype=dtype, device=device)
    if device.type == "cpu":
        _native.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def master_dtype(layout: BucketLayout, master: str) -> torch.dtype | None:
    """Returns the dtype of a bucket's masters under the option ``master``; None for no masters."""
    if layout.dtype is torch.float32:
        return None
    return {"fp32": torch.float32, "remainder": torch.int16, "none": None}[master]


@dataclass
class ShardState:
    """The optimizer state of this rank's chunk: tensors [chunk elements]; padding is zero.

    Attributes:
        moments: float32 moments, by torch's names; see :meth:`Bucket.ensure`.
        quantized: the 8-bit moments, by torch's names.
        quantized_state: True if moments are quantized to 8 bits.
        master: float32; None for float32 parameters, or if the options keep no masters. Parameters
            that nodes exchange in quantized form always have masters; see NOTE [Quantized
            parameters] in ``optim/buckets.py``.
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
        """Returns the state before the first step; for ``master`` see :class:`AdamWOptions`."""

        def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
            return empty_for_streams(chunk.elems, dtype, device).zero_()

        kept = master_dtype(layout, master)
        return cls(
            master=zeros() if kept is torch.float32 else None,
            remainder=zeros(torch.int16) if kept is torch.int16 else None,
        )

    def names(self) -> list[str]:
        """Returns the names of the existing tensors."""
        return [*self.moments, *self.quantized, *self.masters()]

    def dtypes(self) -> dict[str, torch.dtype]:
        """Returns the dtypes of the tensors that :meth:`tensors` returns."""
        moments = dict.fromkeys((*self.moments, *self.quantized), torch.float32)
        return {**moments, **{name: each.dtype for name, each in self.masters().items()}}

    def masters(self) -> dict[str, Tensor]:
        """Returns the master or the remainder, by name, if there is one."""
        masters = (("master", self.master), ("remainder", self.remainder))
        return {name: each for name, each in masters if each is not None}

    def whole_master(self) -> Tensor:
        """Returns the FP32 master, which must exist; a copy if it is offloaded."""
        assert self.master is not None
        return self.master

    def wide(self) -> dict[str, Tensor]:
        """Returns the moments in FP32, by name; 8-bit moments as copies."""
        return {**self.moments, **{name: each.wide() for name, each in self.quantized.items()}}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the existing tensors, by name; 8-bit moments as copies in FP32."""
        return {**self.wide(), **self.masters()}

    def memory(self, name: str) -> Tensor | None:
        """Returns a moment's memory in the kernels' format, or None if there is no such moment."""
        found = self.quantized.get(name)
        return self.moments.get(name) if found is None else found.memory

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies ``tensors`` into the existing tensors; 8-bit moments are rounded to nearest."""
        here = {**self.moments, **self.masters()}
        for name, tensor in tensors.items():
            if name in self.quantized:
                self.quantized[name].take(tensor)
            elif here[name] is not tensor:
                here[name].copy_(tensor)

    def zero(self, names: Iterable[str]) -> None:
        """Sets the existing tensors of these names to zeros."""
        here = {**self.moments, **self.masters()}
        for name in names:
            (self.quantized[name].memory if name in self.quantized else here[name]).zero_()


def heap_device_of(comm: Communicator | None) -> torch.device:
    """Returns the device whose heap holds a communicator's buckets; None: the CPU."""
    return torch.device("cpu") if comm is None else comm.heap_device


class ParamHolder(Protocol):
    """The owner of a rank's chunk of the parameters; the chunk is not always in memory."""

    @property
    def is_here(self) -> bool:
        """True inside the context :meth:`here`."""
        ...

    def here(self, write: bool = False, anew: bool = False) -> AbstractContextManager[None]:
        """Returns a context that keeps the chunk in memory; see :meth:`Bucket.params_here`."""
        ...


@dataclass(frozen=True)
class BucketMemory:
    """The memory of a bucket's parameters and gradients on this rank.

    Attributes:
        own_params: [chunk elements], this rank's chunk of the parameters, in the heap.
        params: [elements], in the heap: all parameters; ``own_params`` is a view of a part. None if
            each rank keeps only its own chunk.
        grads: [elements], in the heap, in the parameters' dtype or float32: all gradients of this
            rank. None if gradients are reduced before the step.
        wide: float32 [chunk elements], the parameters before they were rounded to their dtype; None
            if they were not rounded. With ``compression`` these are the masters.
        compression: format in which the parameters are sent between nodes; None if not quantized.
        holder: owner of ``own_params``; None if they are always in memory.
    """

    own_params: Tensor
    params: Tensor | None = None
    grads: Tensor | None = None
    wide: Tensor | None = None
    compression: str | None = None
    holder: ParamHolder | None = None


class StateOffload:
    """The place where buckets' state is kept; in this class the whole state stays in memory.

    A subclass keeps state on a disk or in host memory, and loads it into memory in pieces.
    """

    #: True if accesses never move state, so that no access can fail on this rank alone.
    in_memory = True

    def add(self, bucket: Bucket, master: str, quantized_state: bool) -> ShardState:
        """Allocates a bucket's state, and returns it, or a placeholder if it is offloaded."""
        state = ShardState.zeros(bucket.layout, bucket.chunk, master, bucket.device)
        state.quantized_state = quantized_state
        return state

    def ensure(self, bucket: Bucket, names: Sequence[str]) -> bool:
        """Implements :meth:`Bucket.ensure`."""
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
        """Reserves the memory and the disk space that the state needs."""

    def visit(self, bucket: Bucket, begin: int, end: int, write: bool) -> Iterator[Bucket]:
        """Implements :meth:`Bucket.pieces`."""
        return iter((bucket,))

    def begin_step(
        self,
        find_active: Callable[[], Sequence[float] | None],
        order: Iterable[int] | None = None,
    ) -> None:
        """Plans the visits of a step, if visits load state; see ``PiecedOffload``."""

    def update_only(self, active: Sequence[float]) -> None:
        """Limits the step's later visits to the state of active parameters."""

    def end_step(self) -> None:
        """Ends the visits of a step."""

    def raise_fault(self) -> None:
        """Raises the first error of a visit, if there was any."""


NO_OFFLOAD = StateOffload()


def _has_no_copies() -> None:
    """Does nothing, since the parameters have no copies."""


class Bucket:
    """A bucket on this rank: its parameters, gradients and optimizer state.

    Attributes:
        number: number of the bucket in its layout.
        layout: layout of the bucket.
        chunk: the elements for which this rank keeps state.
        segments: int64 [segments, 3], for the kernels.
        device: device of all tensors.
        state: the optimizer's state of the chunk; if it is offloaded, a placeholder, whose elements
            :meth:`pieces` loads.
        offload: the place of the state.
        is_piece: True if another bucket's :meth:`piece` made this bucket; the other bucket then
            allocates the state.
        grad_shard: float32 [chunk elements], the reduced gradient between the two passes of a step;
            None until the first step with two passes.
        error_feedback: buffer of the quantization errors of gradients, or None.
        tag: returns a number that distinguishes reductions of this bucket's gradients from other
            reductions of equal size; 0 means no number.
        share: collective function that updates the other nodes' copies of ``own_params``. It is
            called if no rank keeps all parameters, and always with :attr:`compression`. With
            compression it sends the quantized masters, and all nodes dequantize them.
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
        """The memory of :attr:`own_params`, even while the parameters are not in it."""
        return self._memory.own_params

    @property
    def compression(self) -> str | None:
        """The format in which parameters are sent between nodes; None if not quantized."""
        return self._memory.compression

    @property
    def may_be_away(self) -> bool:
        """True if the parameters are in memory for certain only inside :meth:`params_here`."""
        return self._memory.holder is not None

    def params_here(self, write: bool = False, anew: bool = False) -> AbstractContextManager[None]:
        """Returns a context that keeps the chunk's parameters in memory.

        Args:
            write: True to keep changes made inside.
            anew: True if all parameters are overwritten inside, so that they need not be loaded.

        Raises:
            DiskError: the parameters are on a disk, which has failed.
        """
        holder = self._memory.holder
        return nullcontext() if holder is None else holder.here(write, anew)

    def keep_state(
        self, master: str, quantized_state: bool, offload: StateOffload = NO_OFFLOAD
    ) -> None:
        """Allocates masters, as zeros; :meth:`ensure` later allocates the moments.

        Args:
            master: as in :class:`AdamWOptions`.
            quantized_state: as in :class:`ShardState`.
            offload: the place of the state.
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
        """Yields the pieces of the bucket one after the other, each with its state in memory.

        Without offload the only piece is the bucket itself. With offload a piece is a bucket whose
        chunk is a part of this bucket's chunk; its state stays in memory until the next piece.

        Args:
            begin: skip pieces that end at or before this element of the bucket.
            end: skip pieces that begin at or after this element; None for the chunk's end.
            write: True to keep changes to the state.
        """
        return self.offload.visit(self, begin, self.chunk.end if end is None else end, write)

    def within(self, begin: int, end: int) -> tuple[slice, slice]:
        """Returns where the chunk and the bucket elements [begin, end) overlap.

        Returns:
            Slices of a tensor [chunk elements] and of a tensor [end - begin]; both are empty if
            there is no overlap.
        """
        low, high = max(begin, self.chunk.begin), min(end, self.chunk.end)
        if low >= high:
            return slice(0, 0), slice(0, 0)
        first = self.chunk.begin
        return slice(low - first, high - first), slice(low - begin, high - begin)

    def read_state(self, name: str, begin: int, end: int) -> Tensor:
        """Returns a copy of the state of bucket elements [begin, end), all in this rank's chunk.

        Args:
            name: name of a moment; or "master": the masters, or the parameters if there are none.
            begin: the first element.
            end: one after the last element.

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
        """Sets elements of a moment or of the masters, all in this rank's chunk.

        Args:
            name: see :meth:`read_state`; "master" also writes parameters that are the high halves
                of their masters.
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
        """Returns a bucket for a part of this bucket's chunk, with the given state."""
        first = self.chunk.begin
        own = self.own_memory[chunk.begin - first : chunk.end - first]
        memory = BucketMemory(own, holder=self._memory.holder)
        made = Bucket(self.number, self.layout, chunk, memory)
        made.segments = self.segments
        made.state = state
        made.is_piece = True
        return made

    def lay_out(self, layout: BucketLayout) -> None:
        """Replaces the layout by a layout of the same elements with other parameter indices."""
        self.layout = layout
        self.segments = layout.segment_table(self.device)

    @property
    def key(self) -> tuple[int, int]:
        """The key that distinguishes this bucket or piece from all others of the optimizer."""
        return self.number, self.chunk.begin

    @property
    def has_all_params(self) -> bool:
        """True if this rank keeps all parameters of the bucket, and not just its chunk."""
        return self._memory.params is not None

    @property
    def has_grads(self) -> bool:
        """True if the bucket has memory for this rank's gradients of all elements."""
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
        """Writes parameters from element ``begin`` on, as far as this rank keeps them."""
        if self.has_all_params:
            self.params[begin : begin + values.numel()].copy_(values)
            return
        low, high = max(begin, self.chunk.begin), min(begin + values.numel(), self.chunk.end)
        if low < high:
            with self.params_here(write=True):
                own = self.own_params[low - self.chunk.begin : high - self.chunk.begin]
                own.copy_(values[low - begin : high - begin])

    def take_wide(self) -> None:
        """Sets the master to the unrounded parameters if they are known, else to the parameters."""
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
        """Sets the FP32 master to the parameter wherever the master does not round to it."""
        if self.state.master is None:
            return
        for piece in self.pieces():
            assert piece.state.master is not None
            piece.state.master.copy_(
                following(piece.state.master, piece.own_params, self.compression)
            )

    def refresh_master(self, begin: int = 0, end: int | None = None) -> None:
        """Sets the masters of bucket elements [begin, end), by default all, to the parameters.

        If parameters are quantized, the range is ignored: each master whose quantized value is not
        its parameter is set to the parameter.
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
        """Allocates missing moments of these names, as zeros; returns False if none was missing."""
        return self.offload.ensure(self, names)


def make_bucket(
    number: int, layout: BucketLayout, chunk: Chunk, options: AdamWOptions, device: torch.device
) -> Bucket:
    """Makes a bucket in the heap on ``device``; every rank keeps all parameters and gradients."""
    # Zero the padding, which collectives move and norms read; nothing writes it later.
    params = zeros(layout.elems, dtype=layout.dtype, device=device)
    grads = zeros(layout.elems, dtype=options.accumulate_dtype or layout.dtype, device=device)
    memory = BucketMemory(params[chunk.begin : chunk.end], params, grads)
    return Bucket(number, layout, chunk, memory)


class Buckets(list[Bucket]):
    """All buckets of a layout on one rank, with a view of each parameter in them.

    Attributes:
        params: the parameters by index, as views of buckets that this rank keeps whole.
        grads: the gradients by the parameter's index, likewise.
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
        """Makes all buckets of a layout, with new memory from the heap on ``device``.

        This rank keeps state for chunk ``shard_index``.
        """
        return cls(
            layout,
            [
                make_bucket(number, bucket, bucket.chunk(shard_index, world_size), options, device)
                for number, bucket in enumerate(layout.buckets)
            ],
        )

    def adopt(self, params: list[Tensor]) -> None:
        """Moves parameters into their buckets: each becomes a view of its bucket."""
        for index, view in self.params.items():
            view.copy_(local_of(params[index]).detach())
            set_local(params[index], apart(params[index], view))


def sharers_of(comm: Communicator | None, state: str) -> Communicator | None:
    """Returns the ranks that share one copy of the state; with "node", the ranks of this node."""
    return comm.node if comm is not None and state == "node" else comm


def gather_params(bucket: Bucket, sharers: Communicator) -> None:
    """Gathers the chunks of a bucket's parameters on all ranks that share the state."""
    if bucket.compression is not None:
        bucket.share()
        return
    chunks = bucket.layout.chunks(sharers)
    params = [bucket.params[chunk.begin : chunk.end] for chunk in chunks]
    sharers.all_gather(params, params[sharers.rank])
