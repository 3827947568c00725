"""Argument checks of one call, before any peer hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ringcomm import _native
from ringcomm.comm.reduce_ops import ALGORITHMS, DTYPE_CODES, Reduction, reduction_of
from ringcomm.errors import ArgumentError, UnsupportedError, where

Tensor = torch.Tensor


def size_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def is_plain(tensor: Tensor) -> bool:
    """True when the bytes at ``data_ptr()`` are the elements in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it whose bytes are the elements in order."""
    if is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or scratch memory of its shape that :func:`put_back` copies into it."""
    if is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def put_back(tensor: Tensor, scratch: Tensor) -> None:
    """Ends a write that went through :func:`writable` or :func:`readable`."""
    if scratch is not tensor:
        tensor.detach().copy_(scratch)


def overlap(a: Tensor, b: Tensor) -> bool:
    """True when the two tensors share bytes and neither goes through a copy."""
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    a_ptr, b_ptr = a.data_ptr(), b.data_ptr()
    return a_ptr < b_ptr + size_bytes(b) and b_ptr < a_ptr + size_bytes(a)


class Site:
    """Where a check happens: the operation, the rank and the world, for messages."""

    __slots__ = ("op", "rank", "world_size")
    algorithms = ALGORITHMS

    def __init__(self, op: str, rank: int, world_size: int) -> None:
        self.op = op
        self.rank = rank
        self.world_size = world_size

    def __str__(self) -> str:
        return where(self.op, self.rank, self.world_size)

    def fail(self, text: str) -> NoReturn:
        raise ArgumentError(f"{self}: {text}")

    def tensor(self, name: str, tensor: Any) -> int:
        """Checks that it is a dense tensor here, of a known dtype; returns the dtype's code."""
        if not isinstance(tensor, Tensor):
            self.fail(f"{name}: expected a tensor, got {type(tensor).__name__}")
        self.place(name, tensor)
        if tensor.layout is not torch.strided:
            self.fail(f"{name}: expected a dense tensor, got layout {tensor.layout}")
        code = DTYPE_CODES.get(tensor.dtype)
        if code is None:
            known = ", ".join(str(dtype) for dtype in DTYPE_CODES)
            raise UnsupportedError(
                f"{self}: {name}: dtype {tensor.dtype} is not supported; known are {known}"
            )
        if tensor.numel() and not tensor.data_ptr():
            self.fail(
                f"{name}: expected a tensor with memory, got a {type(tensor).__name__} without"
            )
        return code

    def place(self, name: str, tensor: Tensor) -> None:
        """Checks that the tensor is where this communicator works."""
        if not tensor.is_cpu:
            self.fail(
                f"{name}: expected a CPU tensor, got one on {tensor.device}. Build a communicator "
                "with device= for tensors of a GPU, or copy it with .cpu()"
            )

    def output(self, name: str, tensor: Any) -> int:
        """As :meth:`tensor`, for one that is written to."""
        code = self.tensor(name, tensor)
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            self.fail(
                f"{name}: expected each element to have memory of its own, got an expanded "
                f"tensor (shape {tuple(tensor.shape)}, stride {tensor.stride()}); call .clone()"
            )
        return code

    def contiguous(self, name: str, tensor: Tensor) -> None:
        if not is_plain(tensor):
            self.fail(
                f"{name}: expected a contiguous tensor, got shape {tuple(tensor.shape)} with "
                f"stride {tensor.stride()}; call .contiguous()"
            )

    def tensors(self, name: str, tensors: Any, count: int, *, write: bool = False) -> list[Tensor]:
        """Checks a list of ``count`` tensors."""
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            self.fail(f"{name}: expected a list of tensors, got {type(tensors).__name__}")
        if len(tensors) != count:
            self.fail(f"{name}: expected {count} tensors, one per rank, got {len(tensors)}")
        for index, tensor in enumerate(tensors):
            (self.output if write else self.tensor)(f"{name}[{index}]", tensor)
        return list(tensors)

    def same_dtype(self, name: str, tensor: Tensor, of: str, other: Tensor) -> None:
        if tensor.dtype is not other.dtype:
            self.fail(f"{name}: expected the dtype of {of}, {other.dtype}, got {tensor.dtype}")

    def same_count(self, name: str, tensor: Tensor, of: str, count_elems: int) -> None:
        if tensor.numel() != count_elems:
            self.fail(
                f"{name}: expected {count_elems} elements ({of}), got {tensor.numel()} "
                f"(shape {tuple(tensor.shape)})"
            )

    def apart(self, name: str, tensor: Tensor, other_name: str, other: Tensor, hint: str) -> None:
        """Checks that two tensors share no memory."""
        if overlap(tensor, other):
            self.fail(
                f"{name} and {other_name}: expected separate memory, but they overlap; {hint}"
            )

    def all_apart(
        self, name: str, written: list[Tensor], read_name: str = "", read: Sequence[Tensor] = ()
    ) -> None:
        """Checks that no written tensor shares memory with another one, written or read."""
        spans = sorted(
            (tensor.data_ptr(), size_bytes(tensor), is_written, f"{of}[{index}]")
            for is_written, of, tensors in ((True, name, written), (False, read_name, read))
            for index, tensor in enumerate(tensors)
            if tensor.numel() and tensor.is_contiguous()
        )
        # The furthest end so far, over written spans and over all spans.
        ends = {True: (0, ""), False: (0, "")}
        for ptr, length, is_written, label in spans:
            end, earlier = ends[not is_written]
            if ptr < end:
                self.fail(
                    f"{earlier} and {label}: expected separate memory, but they overlap; "
                    "what is received needs memory of its own"
                )
            for kind in (True, False) if is_written else (False,):
                ends[kind] = max(ends[kind], (ptr + length, label))

    def peer(self, name: str, rank: Any) -> int:
        """Checks a rank of this communicator."""
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.world_size:
            self.fail(f"{name}: expected a rank from 0 to {self.world_size - 1}, got {rank!r}")
        return rank

    def algorithm(self, algorithm: Any) -> int:
        known = self.algorithms
        code = known.get(algorithm) if isinstance(algorithm, str) else None
        if code is None:
            self.fail(f"algorithm: expected one of {', '.join(known)}, got {algorithm!r}")
        return code

    def reduction(self, op: Any, name: str, tensor: Tensor) -> Reduction:
        """Checks the op, and that it makes sense for the tensor's dtype."""
        try:
            reduction = reduction_of(op)
        except ArgumentError as error:
            self.fail(str(error))
        if not _native.supports(DTYPE_CODES[tensor.dtype], reduction.code):
            self.fail(f"{name}: op {reduction.name} is not defined for dtype {tensor.dtype}")
        integral = not (tensor.is_floating_point() or tensor.is_complex())
        if integral and not reduction.factor.is_integer():
            self.fail(
                f"op: expected a whole number as PREMUL_SUM's factor for dtype {tensor.dtype}, "
                f"got {reduction.factor}"
            )
        if integral and tensor.dtype != torch.bool:
            limits = torch.iinfo(tensor.dtype)
            if not limits.min <= reduction.factor <= limits.max:
                self.fail(
                    f"op: expected a PREMUL_SUM factor between {limits.min} and {limits.max} for "
                    f"dtype {tensor.dtype}, got {reduction.factor:g}"
                )
        return reduction
