"""The forms in which partial sums travel between nodes: as they are, rounded, or quantized.

Quantized numbers are in quantization blocks of 128 with a scale each;
``kernels/include/ringcomm/core/quantization.h`` defines the formats, and bounds the error. What a
node sends is quantized once, from its partial sum, and so is what it adds itself: the result does
not depend on who adds. Numbers are dequantized and added in FP32, in the order of the nodes, and
rounded once. In an all-reduce the sums are quantized once more, since they travel once more.

Only sums of numbers are quantized, of float32, bfloat16 and float16. Other types and operators,
which have no use for a number that is nearly right, travel as they are; so do small buffers.

NOTE [Error feedback]
A rank that quantizes a node's partial sums of a bucket can keep what that loses, and add it to the
next ones: x + e is sent as its quantized values c, and e becomes x + e - c. So what was sent so far
and e are always what was to be sent, and the error of a mean over steps falls with their number,
where that of quantization alone stays. A block with infinities or NaNs leaves nothing. Seide et
al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et al., "Error Feedback
Fixes SignSGD" (ICML 2019); for quantization between nodes Xie et al., "LoCo" (2024), who keep e in
8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ringcomm import _native

Tensor = torch.Tensor

# Calls of larger buffers are quantized. A choice: of smaller ones latency is most of the time, and
# they are what is exchanged to decide: losses, norms and flags.
QUANTIZED_ABOVE_BYTES = 8 << 10

SUM, AVG, PREMUL = (_native.OPS[name] for name in ("SUM", "AVG", "PREMUL_SUM"))
BFLOAT16, FLOAT16, FLOAT32 = (_native.DTYPES[name] for name in ("bfloat16", "float16", "float32"))


class Reducing(NamedTuple):
    """The arguments of a reduction beside its buffers; codes of the native module."""

    dtype: int
    op: int
    factor: float

    @property
    def partial(self) -> int:
        """The accumulator's type."""
        return FLOAT32 if self.dtype in (BFLOAT16, FLOAT16) else self.dtype

    @property
    def joining(self) -> int:
        """The op that joins partial sums, to which a factor has been applied."""
        return SUM if self.op in (AVG, PREMUL) else self.op


def is_quantized(r: Reducing, size_bytes: int) -> bool:
    """Tells whether compression quantizes a reduction of so many bytes: a large sum of numbers."""
    return size_bytes > QUANTIZED_ABOVE_BYTES and r.partial == FLOAT32 and r.joining == SUM


def no_scale() -> float:
    """Returns the scale of gradients that nobody scales."""
    return 1.0


@dataclass(eq=False)
class ErrorFeedback:
    """Keeps what quantization loses of one bucket's sums on this rank; see NOTE [Error feedback].

    Each element of a bucket is quantized by one rank of each node. With copies of the state on
    nodes the sums are quantized, too, each by one rank of all.

    Attributes:
        begin: the first element of the bucket whose partial sums this rank quantizes.
        partial: float32 [elements], of partial sums from there on; they are of this node alone, and
            not averaged yet.
        sums_begin: the first element of the bucket whose sum this rank quantizes.
        sums: float32 [elements], of sums from there on; empty where sums are not quantized.
        scale: the loss scale of the gradients that it is of.
        scale_now: returns that of the gradients that come next.
    """

    begin: int
    partial: Tensor
    sums_begin: int
    sums: Tensor
    scale: float = 1.0
    scale_now: Callable[[], float] = field(default=no_scale, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.partial, self.sums

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        return sum(each.nbytes for each in self.tensors)

    def scale_by(self, scale_now: Callable[[], float]) -> None:
        """Has someone tell the loss scale from now on.

        Gradients that came when nobody did were in that scale, too: those of a first backward,
        before the step that prepares the optimizer.
        """
        if self.scale_now is no_scale:
            self.scale = scale_now()
        self.scale_now = scale_now

    def follow_scale(self) -> None:
        """Brings it to the scale of the next gradients; exact between powers of two."""
        now = self.scale_now()
        if now != self.scale:
            for each in self.tensors:
                each.mul_(now / self.scale)
            self.scale = now

    def forget(self) -> None:
        """Owes nothing any more."""
        for each in self.tensors:
            each.zero_()


class Form:
    """The form of the partial sums of one reduction: that of the accumulator's type, or rounded.

    Args:
        r: the reduction.
        dtype: code of the type that travels.
        elem_bytes: of that.
    """

    def __init__(self, r: Reducing, dtype: int, elem_bytes: int) -> None:
        self.r = r
        self._dtype = dtype
        self._elem_bytes = elem_bytes

    @property
    def is_partial(self) -> bool:
        """True if partial sums travel as they are."""
        return self._dtype == self.r.partial

    @property
    def segment_elem_bytes(self) -> int:
        """The bytes of an element by which segments are cut."""
        return self._elem_bytes

    def bytes_of(self, elems: int) -> int:
        """Returns the bytes of so many partial sums."""
        return elems * self._elem_bytes

    def write(self, wide_ptr: int, ptr: int, elems: int) -> None:
        """Writes partial sums, which are in the accumulator's type, in this form."""
        self.add([wide_ptr], self.r.partial, ptr, self._dtype, elems)

    def write_partial(self, source_ptr: int, wide_ptr: int, ptr: int, elems: int) -> None:
        """Does :meth:`write` for a node's partial sums of what lies at ``source_ptr``."""
        self.write(wide_ptr, ptr, elems)

    def join(self, ptrs: list[int], ptr: int, elems: int) -> None:
        """Adds up partial sums in this form, in order, to one in this form."""
        self.add(ptrs, self._dtype, ptr, self._dtype, elems)

    def finish(
        self, ptrs: list[int], out_ptr: int, out_dtype: int, elems: int, divide_by: int
    ) -> None:
        """Adds up partial sums in this form, in order, to results; divides unless by 0."""
        self.add(ptrs, self._dtype, out_ptr, out_dtype, elems, divide_by)

    def add(
        self, ptrs: list[int], of: int, out_ptr: int, to: int, elems: int, divide_by: int = 0
    ) -> None:
        _native.combine_partials(ptrs, of, out_ptr, to, elems, self.r.joining, divide_by)


class QuantizedForm(Form):
    """The quantized form.

    Args:
        r: the reduction, a sum of numbers.
        code: of the quantized format.
    """

    def __init__(self, r: Reducing, code: int) -> None:
        super().__init__(r, FLOAT32, 4)
        self.code = code

    @property
    def is_partial(self) -> bool:
        return False

    def bytes_of(self, elems: int) -> int:
        return _native.quantized_bytes(self.code, elems)

    def write(self, wide_ptr: int, ptr: int, elems: int) -> None:
        _native.quantize(self.code, wide_ptr, FLOAT32, ptr, elems)

    def finish(
        self, ptrs: list[int], out_ptr: int, out_dtype: int, elems: int, divide_by: int
    ) -> None:
        _native.dequantize_and_sum(self.code, ptrs, out_ptr, out_dtype, elems, divide_by)

    def dequantize(self, ptr: int, out_ptr: int, elems: int) -> None:
        """Dequantizes what another rank has sent, to elements of the reduction."""
        self.finish([ptr], out_ptr, self.r.dtype, elems, 0)

    def join(self, ptrs: list[int], ptr: int, elems: int) -> None:
        raise AssertionError("quantized partial sums are added where they end")

    def write_sums(self, wide_ptr: int, ptr: int, elems: int) -> None:
        """Does :meth:`write` for sums that are quantized once more."""
        self.write(wide_ptr, ptr, elems)


class FeedbackForm(QuantizedForm):
    """The quantized form that takes up what was lost before.

    Args:
        r: the reduction, of a bucket.
        code: of the quantized format.
        bucket_ptr: where the bucket lies.
        elem_bytes: of its elements.
        error_feedback: buffer of the bucket.
    """

    def __init__(
        self,
        r: Reducing,
        code: int,
        bucket_ptr: int,
        elem_bytes: int,
        error_feedback: ErrorFeedback,
    ) -> None:
        super().__init__(r, code)
        self._bucket_ptr = bucket_ptr
        self._bucket_elem_bytes = elem_bytes
        self._error_feedback = error_feedback

    def write_partial(self, source_ptr: int, wide_ptr: int, ptr: int, elems: int) -> None:
        kept = self._error_feedback
        at = (source_ptr - self._bucket_ptr) // self._bucket_elem_bytes - kept.begin
        self._quantize(wide_ptr, ptr, elems, kept.partial[at : at + elems])

    def write_sums(self, wide_ptr: int, ptr: int, elems: int) -> None:
        self._quantize(wide_ptr, ptr, elems, self._error_feedback.sums)

    def _quantize(self, wide_ptr: int, ptr: int, elems: int, kept: Tensor) -> None:
        assert kept.numel() == elems  # written to by its address
        _native.quantize(self.code, wide_ptr, FLOAT32, ptr, elems, kept.data_ptr())
