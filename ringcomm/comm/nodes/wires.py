"""The forms in which partial sums travel between nodes: as they are, rounded, or in codes.

A coded wire has blocks of 128 numbers with a scale each; ``kernels/host/wire_codes.h`` defines the
codes, and bounds the error. What a node sends is coded once, from its partial sum, and so is what
it adds itself: the result does not depend on who adds. Numbers are decoded and added in FP32, in
the order of the nodes, and rounded once. In an all-reduce the sums are coded once more, since they
travel once more.

Only sums of numbers are coded, of float32, bfloat16 and float16. Other types and operators, which
have no use for a number that is nearly right, travel as they are; so do small buffers.
"""

from __future__ import annotations

from typing import NamedTuple

from ringcomm import _native

# Calls of larger buffers are coded. A choice: of smaller ones latency is most of the time, and they
# are what is exchanged to decide: losses, norms and flags.
CODED_ABOVE_BYTES = 8 << 10

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


def is_coded(r: Reducing, size_bytes: int) -> bool:
    """Tells whether coded wires code a reduction of so many bytes: a large sum of numbers."""
    return size_bytes > CODED_ABOVE_BYTES and r.partial == FLOAT32 and r.joining == SUM


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


class CodedForm(Form):
    """The form of a coded wire.

    Args:
        r: the reduction, a sum of numbers.
        code: of the wire.
    """

    def __init__(self, r: Reducing, code: int) -> None:
        super().__init__(r, FLOAT32, 4)
        self._code = code

    @property
    def is_partial(self) -> bool:
        return False

    def bytes_of(self, elems: int) -> int:
        return _native.wire_bytes(self._code, elems)

    def write(self, wide_ptr: int, ptr: int, elems: int) -> None:
        _native.encode_wire(self._code, wide_ptr, FLOAT32, ptr, elems)

    def finish(
        self, ptrs: list[int], out_ptr: int, out_dtype: int, elems: int, divide_by: int
    ) -> None:
        _native.sum_wires(self._code, ptrs, out_ptr, out_dtype, elems, divide_by)

    def decode(self, ptr: int, out_ptr: int, elems: int) -> None:
        """Decodes what another rank has coded, to elements of the reduction."""
        self.finish([ptr], out_ptr, self.r.dtype, elems, 0)

    def join(self, ptrs: list[int], ptr: int, elems: int) -> None:
        raise AssertionError("coded partial sums are added where they end")
