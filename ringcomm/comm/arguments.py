"""Checks of a call's arguments before any peer hears of it, and dtypes and reduction operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch.autograd import forward_ad
from torch.distributed import ReduceOp

from ringcomm import _native
from ringcomm.comm.admission import WATCHES_KEYS, without_memory
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.integers import integer, integers, real
from ringcomm.json_reader import shown

__all__ = [
    "ALGORITHMS",
    "DEVICE_ALGORITHMS",
    "DTYPE_CODES",
    "DTYPE_NAMES",
    "SUM",
    "CallChecks",
    "NativeOp",
    "PremulSum",
    "ReduceOp",
    "is_plain",
    "overlap",
    "premul_sum",
    "put_back",
    "readable",
    "reduction_of",
    "size_bytes",
    "writable",
]

# The codes are those of the native module.
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _native.DTYPES.items() if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES}
OP_CODES = _native.OPS
_TORCH_OPS = {name: getattr(ReduceOp, name) for name in OP_CODES if hasattr(ReduceOp, name)}
PREMUL_SUM = "PREMUL_SUM"


class PremulSum:
    """The op that multiplies each input by ``factor``, then sums; see :func:`premul_sum`."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return f"premul_sum({self.factor})"


def premul_sum(factor: float | torch.Tensor) -> PremulSum:
    """Makes the op PREMUL_SUM, the sum of each rank's elements times its factor.

    torch.distributed makes this op only through a private function. ringcomm accepts both wherever
    it takes an op.

    Args:
        factor: a real number, or a tensor of one element; for integers a whole number.

    Raises:
        ArgumentError: ``factor`` is neither.
    """
    return PremulSum(_factor_of(factor))


def _factor_of(factor: object) -> float:
    if isinstance(factor, torch.Tensor) and factor.numel() == 1 and not factor.is_complex():
        return float(factor.item())
    number = real(factor)
    if number is not None:
        return number
    raise ArgumentError(
        f"PREMUL_SUM: expected a real number or a tensor of one element as the factor, "
        f"got {factor!r}"
    )


class NativeOp:
    """An op in native form: its code, and the factor of PREMUL_SUM (else 1)."""

    __slots__ = ("code", "factor", "name")

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name = name
        self.code = OP_CODES[name]
        self.factor = factor


_NAMES: dict[object, str] = {torch_op: name for name, torch_op in _TORCH_OPS.items()}
_PLAIN = {name: NativeOp(name) for name in OP_CODES if name != PREMUL_SUM}
_PLAIN_BY_ID = {id(_TORCH_OPS[name]): plain for name, plain in _PLAIN.items()}


def reduction_of(op: object) -> NativeOp:
    """Returns the native form of a ``ReduceOp``, ``RedOpType`` or :func:`premul_sum`.

    Raises:
        ArgumentError: ``op`` is not an op, or PREMUL_SUM without a factor.
    """
    quick = _PLAIN_BY_ID.get(id(op))
    if quick is not None:
        return quick
    if isinstance(op, PremulSum):
        return NativeOp(PREMUL_SUM, op.factor)
    if not isinstance(op, (ReduceOp, ReduceOp.RedOpType)):
        raise ArgumentError(f"op: expected a torch.distributed.ReduceOp, got {op!r}")
    kind, factor = _parts_of(op)
    name = _NAMES.get(kind)
    if name is None:
        raise ArgumentError(f"op: {kind} is unknown; known are {', '.join(OP_CODES)}")
    if name != PREMUL_SUM:
        return _PLAIN[name]
    if factor is None:
        raise ArgumentError(
            "op: PREMUL_SUM needs a factor; pass ringcomm.premul_sum(factor) instead of "
            "ReduceOp.PREMUL_SUM"
        )
    return NativeOp(PREMUL_SUM, _factor_of(factor))


def _parts_of(op: object) -> tuple[object, object]:
    """Returns the kind and factor of an op of torch."""
    # Checked first, because torch makes isinstance(kind, ReduceOp) true as well.
    if isinstance(op, ReduceOp.RedOpType):
        return op, None
    # The pickle state is the only view of the factor (__reduce_ex__ aborts the process in torch
    # 2.13: a pybind11 type without constructor).
    state: tuple[object, object] = cast(Any, op).__getstate__()
    return state


# The native module finds the ops by identity, because hashing or comparing torch's op objects costs
# more than the rest of a small call. The objects live as long as torch. If torch's tensors lack the
# interface, or its dispatcher keeps its keys elsewhere, all calls take the path with Python's
# checks.
if WATCHES_KEYS and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    _native.read_tensors_with(
        torch.Tensor.__dlpack_c_exchange_api__,
        {
            "Tensor": torch.Tensor,
            "Parameter": torch.nn.Parameter,
            "ReduceOp": ReduceOp,
            "is_neg": torch.Tensor.is_neg,
            "requires_grad": torch._C.TensorBase.requires_grad,
            "forward_ad": vars(forward_ad),
            "int8": torch.int8,
            "uint8": torch.uint8,
        },
        [(op, OP_CODES[name]) for name, op in _TORCH_OPS.items() if name != PREMUL_SUM],
    )

DEVICE_ALGORITHMS = _native.ALGORITHMS
ALGORITHMS = {name: DEVICE_ALGORITHMS[name] for name in ("auto", "direct", "ring")}
SUM = ReduceOp.SUM


Tensor = torch.Tensor


def size_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def is_plain(tensor: Tensor) -> bool:
    """True when the bytes at ``data_ptr()`` are the elements in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of it whose bytes are the elements in order."""
    if is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: Tensor) -> Tensor:
    """Returns the tensor, or scratch memory of its shape that :func:`put_back` copies into it."""
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


class CallChecks:
    """The argument checks of one call, whose errors name the operation, the rank and the world."""

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
        """Checks for a dense tensor on this device, of a known dtype; returns the dtype's code."""
        if not isinstance(tensor, Tensor):
            self.fail(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if found := without_memory(tensor):
            raise UnsupportedError(
                f"{self}: {name}: expected a dense tensor with memory, got a {found}"
            )
        self.place(name, tensor)
        code = DTYPE_CODES.get(tensor.dtype)
        if code is None:
            known = ", ".join(str(dtype) for dtype in DTYPE_CODES)
            raise UnsupportedError(
                f"{self}: {name}: dtype {tensor.dtype} is not supported; known are {known}"
            )
        return code

    def place(self, name: str, tensor: Tensor) -> None:
        """Checks that the tensor is on this communicator's device."""
        if not tensor.is_cpu:
            self.fail(
                f"{name}: expected a CPU tensor, got one on {tensor.device}. Build a communicator "
                "with device= for tensors of a GPU, or copy it with .cpu()"
            )

    def output(self, name: str, tensor: Any) -> int:
        """Checks a tensor that is written to; returns the dtype's code like :meth:`tensor`."""
        code = self.tensor(name, tensor)
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            self.fail(
                f"{name}: expected each element to have memory of its own, got an expanded "
                f"tensor (shape {tuple(tensor.shape)}, stride {tensor.stride()}); call .clone()"
            )
        return code

    def contiguous(self, name: str, tensor: Tensor) -> None:
        """Checks the strides; a pending negation or conjugation is what :func:`readable` ends."""
        if not tensor.is_contiguous():
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
        """Checks a rank of this communicator; returns it as an int."""
        number = integer(rank, bools=True)
        if number is None or not 0 <= number < self.world_size:
            self.fail(f"{name}: expected a rank from 0 to {self.world_size - 1}, got {shown(rank)}")
        return number

    def integer(self, name: str, value: Any) -> int:
        """Checks an integer of 64 bits; returns it as an int."""
        number = integer(value, bools=True)
        if number is None:
            self.fail(f"{name}: expected an integer from -2^63 to 2^63 - 1, got {shown(value)}")
        return number

    def ranks(self, name: str, ranks: Any) -> list[int]:
        """Checks distinct ranks of this communicator, at least one; returns them as ints."""
        found = integers(ranks, bools=True)
        if found is None:
            self.fail(f"{name}: expected a list of ranks, which are integers, got {shown(ranks)}")
        members = [self.peer(name, rank) for rank in found]
        if len(set(members)) != len(members) or not members:
            self.fail(f"{name}: expected distinct ranks and at least one, got {members}")
        return members

    def splits(self, name: str, splits: Any) -> list[int] | None:
        """Checks a list of integers; returns them as ints, or None for None."""
        if splits is None:
            return None
        found = integers(splits, bools=True)
        if found is None:
            self.fail(
                f"{name}: expected a list of integers below 2^63, one per rank, or None, got "
                f"{shown(splits)}"
            )
        return found

    def algorithm(self, algorithm: Any) -> int:
        known = self.algorithms
        code = known.get(algorithm) if isinstance(algorithm, str) else None
        if code is None:
            if algorithm == "multicast":
                raise UnsupportedError(
                    f'{self}: algorithm: "multicast" is for GPUs under an NVSwitch, and this '
                    f"communicator works on the host. Use one of {', '.join(known)}"
                )
            self.fail(f"algorithm: expected one of {', '.join(known)}, got {algorithm!r}")
        return code

    def reduction(self, op: Any, name: str, tensor: Tensor) -> NativeOp:
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
