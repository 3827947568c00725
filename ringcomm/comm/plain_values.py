"""Tensors, parameters, NumPy's arrays and what describes them, as plain data and raw bytes.

These are the leaves of ``plain_objects.py`` that belong to torch and NumPy::

    ["T", dtype, shape, offset, size]             torch.Tensor; "G": one that requires grad
    ["P", dtype, shape, offset, size]             torch.nn.Parameter; "Q": one that is frozen
    ["A", dtype, shape, offset, size]             numpy.ndarray; "N": a NumPy scalar
    ["S", ...] ["y", dtype] ["v", type, index]    torch.Size, torch.dtype, torch.device
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from ringcomm.errors import UnsupportedError
from ringcomm.memory.records import shown

__all__ = ["Refused", "leaf_of", "leaf_tags", "value_of"]

_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_TENSORS: dict[str, tuple[type, bool]] = {
    "T": (torch.Tensor, False),
    "G": (torch.Tensor, True),
    "P": (torch.nn.Parameter, True),
    "Q": (torch.nn.Parameter, False),
}
_TENSOR_TAGS = {kind: tag for tag, kind in _TENSORS.items()}
leaf_tags = frozenset([*_TENSORS, *"ANSyv"])
_NUMPY_KINDS = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_END = 2**63
# NumPy's limit, and that of torch's operators.
_MOST_DIMS = 64

Keep = Callable[[bytes | bytearray], list[int]]


class Refused(Exception):
    """A value is not plain. ``path`` grows on the way out of the containers, innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []


def leaf_of(value: Any, keep: Keep) -> list[Any] | None:
    """What stands for ``value``, which is torch's or NumPy's; None when it is neither.

    Raises:
        Refused: it is, but cannot travel; says what to send instead.
    """
    kind = type(value)
    if kind is torch.Size:
        return ["S", *value]
    if kind is torch.dtype:
        return ["y", str(value)]
    if kind is torch.device:
        return ["v", value.type, value.index]
    if isinstance(value, torch.Tensor):
        return _tensor_leaf(value, keep)
    # Who has an object of NumPy has imported it.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    name = value.dtype.name
    if kind.__module__ != "numpy" or (
        isinstance(value, numpy.ndarray) and kind.__name__ != "ndarray"
    ):
        raise Refused(f"{kind.__qualname__} would arrive as NumPy's own: send numpy.asarray(value)")
    if name not in _NUMPY_KINDS or not value.dtype.isnative:
        raise Refused(
            f"NumPy's {shown(value.dtype.str)} cannot travel: convert it with astype() to a "
            "bool, integer, float or complex dtype of this machine's byte order"
        )
    tag = "A" if isinstance(value, numpy.ndarray) else "N"
    raw = (value.view("uint8") != 0 if name == "bool" else value).tobytes()
    return [tag, name, list(value.shape), *keep(raw)]


def _tensor_leaf(value: torch.Tensor, keep: Keep) -> list[Any]:
    tag = _TENSOR_TAGS.get((type(value), value.requires_grad))
    try:
        why_not = _why_not(value)
        if why_not:
            raise Refused(f"expected a dense tensor on the CPU, got one that {why_not}")
        if tag is None:
            raise Refused(
                f"{type(value).__qualname__} would arrive as torch.Tensor: send "
                "value.as_subclass(torch.Tensor), or of a DTensor value.to_local()"
            )
        raw = bytearray(value.numel() * value.element_size())
        if raw:
            dense = value.detach().resolve_conj().resolve_neg().contiguous()
            if dense.dtype is torch.bool:  # memory that nobody wrote has other bytes than 0 and 1
                dense = dense.view(torch.uint8).ne(0)
            torch.frombuffer(raw, dtype=torch.uint8).copy_(dense.view(-1).view(torch.uint8))
    except RecursionError:
        raise
    except RuntimeError as error:  # tensors of transforms, and dtypes without bytes
        told = str(error).partition("\n")[0]
        raise Refused(f"torch cannot read the bytes of this {value.dtype} tensor: {told}") from None
    return [tag, str(value.dtype), list(value.shape), *keep(raw)]


def _why_not(value: torch.Tensor) -> str:
    """Why its bytes cannot be sent, and what to do; empty when they can."""
    if value.is_nested:
        return "is nested: send value.unbind()"
    if value.is_quantized:
        return "is quantised: send value.dequantize(), or value.int_repr() and its scale"
    if value.layout is not torch.strided:
        return f"has the layout {value.layout}: send value.to_dense()"
    if value.device.type == "meta":
        return "has no data (meta device): send its shape and dtype"
    if value.device.type != "cpu":
        return f"is on {value.device}: send value.cpu(), or use a tensor's collective"
    if value.dim() > _MOST_DIMS:
        return f"has more than {_MOST_DIMS} dimensions: send value.flatten() and its shape"
    if value.numel() and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.data_ptr():
        return "has no memory: its storage was freed"
    return ""


def value_of(tag: str, rest: list[Any], raw: Callable[[Any, Any], memoryview]) -> Any:
    """What :func:`leaf_of` made ``[tag, *rest]`` of.

    Raises:
        ValueError: it made nothing of that kind.
        UnsupportedError: it needs NumPy.
    """
    if tag == "S":
        if any(type(size) is not int or not -_END <= size < _END for size in rest):
            raise ValueError("expected sizes of 64 bits")
        return torch.Size(rest)
    if tag == "v":
        return _device(*_exactly(rest, 2))
    if tag == "y":
        return _dtype(*_exactly(rest, 1))
    name, dims, at, size = _exactly(rest, 4)
    data = bytearray(raw(at, size))
    if tag in ("A", "N"):
        return _from_numpy(tag, name, dims, data)
    dtype, (kind, requires_grad) = _dtype(name), _TENSORS[tag]
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"no tensor of {dtype} requires grad")
    shape = _shape(dims, dtype.itemsize)
    _check_bytes(data, math.prod(shape) * dtype.itemsize, dtype is torch.bool)
    tensor = (
        torch.frombuffer(data, dtype=dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype, device="cpu")
    )
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _exactly(rest: list[Any], count: int) -> list[Any]:
    if len(rest) != count:
        raise ValueError(f"expected {count} entries, got {len(rest)}")
    return rest


def _shape(dims: Any, itemsize: int) -> list[int]:
    """Checked, so that no size that torch or NumPy computes from it leaves 64 bits."""
    if type(dims) is not list or len(dims) > _MOST_DIMS:
        raise ValueError(f"expected a shape of at most {_MOST_DIMS} sizes")
    if any(type(dim) is not int or not 0 <= dim < _END for dim in dims):
        raise ValueError(f"expected a shape of integers >= 0, got {shown(dims)}")
    if math.prod(max(dim, 1) for dim in dims) * itemsize >= _END:
        raise ValueError("expected a shape of less than 2**63 bytes")
    return dims


def _dtype(name: Any) -> torch.dtype:
    dtype = _DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise ValueError(f"unknown dtype {shown(name)}")
    return dtype


def _device(kind: Any, index: Any) -> torch.device:
    if type(kind) is not str or not (index is None or (type(index) is int and 0 <= index < 128)):
        raise ValueError(f"unknown device {shown([kind, index])}")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError:
        raise ValueError(f"unknown device {shown([kind, index])}") from None


def _check_bytes(data: bytearray, size_bytes: int, is_bool: bool) -> None:
    if len(data) != size_bytes:
        raise ValueError(f"expected {size_bytes} bytes for that shape, got {len(data)}")
    # Any other byte would be a bool that is neither.
    if is_bool and data.count(0) + data.count(1) != len(data):
        raise ValueError("expected bools of 0 and 1")


def _from_numpy(tag: str, name: Any, dims: Any, data: bytearray) -> Any:
    if type(name) is not str or name not in _NUMPY_KINDS:
        raise ValueError(f"unknown NumPy dtype {shown(name)}")
    try:
        import numpy
    except ImportError:
        raise UnsupportedError(
            "it holds an array of NumPy, which is not installed here: install it, or send tensors"
        ) from None
    dtype = numpy.dtype(name)
    shape = _shape(dims, dtype.itemsize)
    _check_bytes(data, math.prod(shape) * dtype.itemsize, name == "bool")
    if tag == "N" and shape:
        raise ValueError("expected a scalar without a shape")
    flat = numpy.frombuffer(data, dtype) if data else numpy.empty(0, dtype)
    return flat[0] if tag == "N" else flat.reshape(shape)
