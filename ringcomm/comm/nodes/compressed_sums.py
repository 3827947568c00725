# SPDX-License-Identifier: Apache-2.0
"""The forms in which nodes send partial sums to each other: unchanged, rounded, or quantized.

Quantization works on blocks of 128 numbers with one scale each;
``kernels/include/ringcomm/core/quantization.h`` defines the formats and bounds the error. A node
quantizes each partial sum once, also a partial sum that it adds itself: so the result does not
depend on which rank adds. Numbers are dequantized and added in FP32, in the order of the nodes, and
rounded once. An all-reduce also quantizes the sums, since they are sent to all nodes.

Only sums of float32, bfloat16 and float16 are quantized. Other types and operators need exact
numbers, so they are sent unchanged; sums of small buffers are also sent unchanged.

NOTE [Error feedback]
A rank that quantizes a node's partial sums of a bucket can keep the quantization error e and add it
to the next partial sums x: it sends c, the quantized x + e, and e becomes x + e - c. So the sum of
all values sent, plus e, equals the sum of all values to be sent, and the error of a mean over steps
shrinks with the number of steps; without error feedback it would not. A block with infinities or
NaNs leaves no error. Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014);
Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019); for quantization between nodes Xie
et al., "LoCo" (2024), who keep e in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ringcomm import _native

Tensor = torch.Tensor

# Only calls with larger buffers (in bytes) are quantized. Chosen without measurements: the time of
# smaller calls is mostly latency, and programs branch on losses, norms and flags, which are small.
QUANTIZED_ABOVE_BYTES = 8 << 10

SUM, AVG, PREMUL = (_native.OPS[name] for name in ("SUM", "AVG", "PREMUL_SUM"))
BFLOAT16, FLOAT16, FLOAT32 = (_native.DTYPES[name] for name in ("bfloat16", "float16", "float32"))


class Reducing(NamedTuple):
    """The arguments of a reduction besides its buffers: codes of dtype and op, and the factor."""

    dtype: int
    op: int
    factor: float

    @property
    def partial(self) -> int:
        """The code of the accumulator's type."""
        return FLOAT32 if self.dtype in (BFLOAT16, FLOAT16) else self.dtype

    @property
    def joining(self) -> int:
        """The op that combines partial sums, which already include the factor."""
        return SUM if self.op in (AVG, PREMUL) else self.op


def is_quantized(r: Reducing, size_bytes: int) -> bool:
    """True if compression quantizes the reduction: a sum of floats above the size limit."""
    return size_bytes > QUANTIZED_ABOVE_BYTES and r.partial == FLOAT32 and r.joining == SUM


def no_scale() -> float:
    """Returns 1.0, the loss scale of unscaled gradients."""
    return 1.0


@dataclass(eq=False)
class ErrorFeedback:
    """The quantization errors of one bucket's sums on this rank; see NOTE [Error feedback].

    One rank of each node quantizes each element of a bucket. If each node has a copy of the
    optimizer's state, the final sums are also quantized, each by one rank of the world.

    Attributes:
        begin: the first element of the bucket whose partial sums this rank quantizes.
        partial: float32 [elements], errors of partial sums from ``begin`` on. The partial sums are
            of this node alone and not yet averaged.
        sums_begin: the first element of the bucket whose sum this rank quantizes.
        sums: float32 [elements], errors of sums from ``sums_begin`` on; empty if not quantized.
        scale: the loss scale of the gradients that left the stored errors.
        scale_now: returns the loss scale of the next gradients.
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
        """The bytes of both buffers."""
        return sum(each.nbytes for each in self.tensors)

    def scale_by(self, scale_now: Callable[[], float]) -> None:
        """Sets the function that returns the loss scale of the next gradients.

        It also sets ``scale``: errors stored before this call come from the first backward, which
        ran before the step that prepares the optimizer, with gradients of the current loss scale.
        """
        if self.scale_now is no_scale:
            self.scale = scale_now()
        self.scale_now = scale_now

    def follow_scale(self) -> None:
        """Rescales the errors to the next gradients' loss scale; exact if both scales are 2^n."""
        now = self.scale_now()
        if now != self.scale:
            for each in self.tensors:
                each.mul_(now / self.scale)
            self.scale = now

    def forget(self) -> None:
        """Clears the errors."""
        for each in self.tensors:
            each.zero_()


class Form:
    """The form of the partial sums of one reduction: the accumulator's type, or a rounded type.

    Args:
        r: the reduction.
        dtype: code of the type that is sent.
        elem_bytes: bytes per element of this type.
    """

    def __init__(self, r: Reducing, dtype: int, elem_bytes: int) -> None:
        self.r = r
        self._dtype = dtype
        self._elem_bytes = elem_bytes

    @property
    def is_partial(self) -> bool:
        """True if partial sums are sent in the accumulator's type."""
        return self._dtype == self.r.partial

    @property
    def segment_elem_bytes(self) -> int:
        """The bytes per element that determine how a buffer is cut into segments."""
        return self._elem_bytes

    def bytes_of(self, elems: int) -> int:
        """Returns the bytes of ``elems`` partial sums in this form."""
        return elems * self._elem_bytes

    def write(self, wide_ptr: int, ptr: int, elems: int) -> None:
        """Converts partial sums from the accumulator's type to this form."""
        self.add([wide_ptr], self.r.partial, ptr, self._dtype, elems)

    def write_partial(self, source_ptr: int, wide_ptr: int, ptr: int, elems: int) -> None:
        """Calls :meth:`write` for this node's partial sums of the elements at ``source_ptr``."""
        self.write(wide_ptr, ptr, elems)

    def join(self, ptrs: list[int], ptr: int, elems: int) -> None:
        """Adds partial sums of this form, in order; the result has this form."""
        self.add(ptrs, self._dtype, ptr, self._dtype, elems)

    def finish(
        self, ptrs: list[int], out_ptr: int, out_dtype: int, elems: int, divide_by: int
    ) -> None:
        """Adds partial sums of this form in order; divides the result unless ``divide_by`` is 0."""
        self.add(ptrs, self._dtype, out_ptr, out_dtype, elems, divide_by)

    def add(
        self, ptrs: list[int], of: int, out_ptr: int, to: int, elems: int, divide_by: int = 0
    ) -> None:
        _native.combine_partials(ptrs, of, out_ptr, to, elems, self.r.joining, divide_by)


class QuantizedForm(Form):
    """The form of partial sums that are sent quantized.

    Args:
        r: the reduction, a sum of floats.
        code: the code of the quantized format.
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
        """Dequantizes values that another rank has sent, to elements of the reduction's dtype."""
        self.finish([ptr], out_ptr, self.r.dtype, elems, 0)

    def join(self, ptrs: list[int], ptr: int, elems: int) -> None:
        raise AssertionError("quantized partial sums are added only at their destination")

    def write_sums(self, wide_ptr: int, ptr: int, elems: int) -> None:
        """Calls :meth:`write` for final sums, which are quantized once more."""
        self.write(wide_ptr, ptr, elems)


class FeedbackForm(QuantizedForm):
    """The form of partial sums that are sent quantized, with error feedback.

    Args:
        r: the reduction of a bucket.
        code: the code of the quantized format.
        bucket_ptr: the address of the bucket.
        elem_bytes: bytes per element of the bucket.
        error_feedback: the error feedback of the bucket.
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
        assert kept.numel() == elems  # the native call writes ``elems`` numbers to ``kept``
        _native.quantize(self.code, wide_ptr, FLOAT32, ptr, elems, kept.data_ptr())
