"""Python values as bytes and back, by a format that can name no code: JSON, with raw bytes behind.

A message is ``RCP1``, the length of the JSON text (8 bytes, little endian), the text, and the bytes
that it refers to. None, bools, strings, integers of 64 bits and finite floats stand for themselves;
everything else is a list that begins with a tag::

    ["l", ...] ["t", ...] ["s", ...] ["z", ...]   list, tuple, set, frozenset
    ["d", [key, value], ...]                      dict
    ["i", "hexadecimal"] ["f", "nan"] ["c", re, im]
    ["b", offset, size] ["a", offset, size]       bytes, bytearray
    ["T", dtype, shape, offset, size]             torch.Tensor on the CPU, dense
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcomm.errors import CorruptedError, UnsupportedError

__all__ = ["MAGIC", "pack", "unpack"]

MAGIC = b"RCP1"
_LENGTH_BYTES = 8
DEEPEST = 100
_SMALL_INT = 2**63
_NAMES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_MAKERS: dict[str, Callable[[list[Any]], Any]] = {tag: kind for kind, tag in _CONTAINERS.items()}


class _Packer:
    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.blob = bytearray()

    def _keep(self, raw: bytes | bytearray) -> list[int]:
        at = len(self.blob)
        self.blob += raw
        return [at, len(raw)]

    def _number(self, value: Any) -> Any:
        if type(value) is int:
            return value if -_SMALL_INT <= value < _SMALL_INT else ["i", hex(value)]
        if type(value) is float:
            return value if math.isfinite(value) else ["f", repr(value)]
        return ["c", self._number(value.real), self._number(value.imag)]

    def node(self, value: Any, what: str, depth: int) -> Any:
        kind = type(value)
        if depth > DEEPEST:
            raise UnsupportedError(
                f"{self._operation}: {what}: nested deeper than {DEEPEST} (or holds itself)"
            )
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float, complex):
            return self._number(value)
        if kind in (bytes, bytearray):
            return ["b" if kind is bytes else "a", *self._keep(value)]
        if kind is torch.Tensor:
            return self._tensor(value, what)
        if kind is dict:
            return [
                "d",
                *(
                    [
                        self.node(k, f"a key of {what}", depth + 1),
                        self.node(v, f"{what}[{k!r}]", depth + 1),
                    ]
                    for k, v in value.items()
                ),
            ]
        if kind in _CONTAINERS:
            parts = (self.node(v, f"{what}[{i}]", depth + 1) for i, v in enumerate(value))
            return [_CONTAINERS[kind], *parts]
        raise UnsupportedError(
            f"{self._operation}: {what}: objects travel as plain data: None, bool, int, float, "
            "complex, str, bytes, torch.Tensor, and lists, tuples, sets and dicts of them; got "
            f"{kind.__module__}.{kind.__qualname__}. Convert it, or build the communicator with "
            'CommOptions(objects="pickle"), which lets every rank run code on the others'
        )

    def _tensor(self, value: torch.Tensor, what: str) -> list[Any]:
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
            raise UnsupportedError(
                f"{self._operation}: {what}: expected a dense tensor on the CPU, got one of "
                f"{value.layout} on {value.device}. Send value.cpu(), or use a tensor's collective"
            )
        raw = bytearray(value.numel() * value.element_size())
        if raw:
            dense = value.detach().resolve_conj().resolve_neg().contiguous()
            torch.frombuffer(raw, dtype=torch.uint8).copy_(dense.view(-1).view(torch.uint8))
        return ["T", str(value.dtype), list(value.shape), *self._keep(raw)]


def pack(value: Any, operation: str) -> bytearray:
    """The bytes of ``value``.

    Raises:
        UnsupportedError: it holds something that is not plain data; says where and what.
    """
    packer = _Packer(operation)
    text = json.dumps(packer.node(value, "the object", 0), allow_nan=False).encode()
    return bytearray(MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + text) + packer.blob


class _Unpacker:
    def __init__(self, blob: memoryview) -> None:
        self._blob = blob

    def _raw(self, place: Sequence[Any]) -> memoryview:
        at, size = place
        if type(at) is not int or type(size) is not int or not 0 <= at <= at + size:
            raise ValueError("a place is two sizes")
        if at + size > len(self._blob):
            raise ValueError("a place lies behind the end")
        return self._blob[at : at + size]

    def _tensor(self, name: Any, shape: Any, *place: Any) -> torch.Tensor:
        dtype = _NAMES[name]
        if any(type(dim) is not int or dim < 0 for dim in shape):
            raise ValueError("a shape has sizes")
        raw = bytearray(self._raw(place))
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError("a tensor has as many bytes as its shape says")
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).view(shape)

    def node(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            if isinstance(plain, dict):
                raise ValueError("no object stands in a message")
            return plain
        tag, *rest = plain
        if tag in _MAKERS:
            return _MAKERS[tag]([self.node(each) for each in rest])
        if tag == "d":
            return {self.node(key): self.node(value) for key, value in rest}
        if tag == "T":
            return self._tensor(*rest)
        if tag in ("b", "a"):
            return (bytes if tag == "b" else bytearray)(self._raw(rest))
        (first, *second) = rest
        if tag == "c" and len(second) == 1:
            return complex(self.node(first), self.node(second[0]))
        if tag == "i" and not second:
            return int(first, 16)
        if tag == "f" and first in ("nan", "inf", "-inf") and not second:
            return float(first)
        raise ValueError("an unknown tag")


def _junk(constant: str) -> float:
    raise ValueError(f"{constant} is no number here")


def unpack(raw: memoryview, operation: str, sender: int) -> Any:
    """What :func:`pack` made ``raw`` of.

    Raises:
        CorruptedError: it is nothing of that kind; names the sender.
    """
    head = len(MAGIC) + _LENGTH_BYTES
    try:
        if bytes(raw[: len(MAGIC)]) != MAGIC or len(raw) < head:
            raise ValueError("it does not begin with the mark")
        end = head + int.from_bytes(raw[len(MAGIC) : head], "little")
        if end > len(raw):
            raise ValueError("it is cut off")
        plain = json.loads(bytes(raw[head:end]), parse_constant=_junk)
        return _Unpacker(raw[end:]).node(plain)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, RuntimeError) as error:
        raise CorruptedError(
            f"{operation}: what rank {sender} sent is no object in plain form: {error}. Do all "
            "ranks run the same ringcomm, with the same CommOptions.objects?"
        ) from error
